package cni

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// PluginName is the name of the plugin in the runtime's folder.
const PluginName = "fairlead-cni"

// Install copies this program into the container runtime's folder of plugins, in place of one that is there, at once;
// and under LoopbackName where the folder has no such plugin. A folder that isn't there is made.
func Install(folder string) error {
	if err := install(folder); err != nil {
		return fmt.Errorf("install the CNI plugin in %s: %w", folder, err)
	}
	return nil
}

func install(folder string) (err error) {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close()
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	fresh := filepath.Join(folder, "."+PluginName+".new")
	to, err := os.OpenFile(fresh, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, self)
	if err = errors.Join(err, to.Close()); err != nil {
		return err
	}
	if err := os.Rename(fresh, filepath.Join(folder, PluginName)); err != nil {
		return err
	}
	err = os.Symlink(PluginName, filepath.Join(folder, LoopbackName))
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}
