package attach

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"fairlead.dev/fairlead/cni"
)

// ConfigFile is the name of the network configuration in the runtime's folder.
const ConfigFile = "10-fairlead.conflist"

// WriteConfig writes the network configuration into the folder from which the container runtime reads it: from then on
// it starts pods. The folder must be there: the runtime watches it.
func WriteConfig(folder, socket, records string) error {
	type plugin struct {
		Type         string          `json:"type"`
		Capabilities map[string]bool `json:"capabilities"`
		Socket       string          `json:"socket"`
		Records      string          `json:"records"`
	}
	b, err := json.MarshalIndent(struct {
		Version string   `json:"cniVersion"`
		Name    string   `json:"name"`
		Plugins []plugin `json:"plugins"`
	}{cni.Versions[1], "fairlead", []plugin{
		{"fairlead-cni", map[string]bool{"ips": true, "portMappings": true}, socket, records}}}, "", "  ")
	if err != nil {
		return err
	}
	file := filepath.Join(folder, ConfigFile)
	if old, err := os.ReadFile(file); err == nil && string(old) == string(b)+"\n" {
		return nil
	}
	temporary := filepath.Join(folder, ".fairlead.new") // which no runtime reads
	err = os.WriteFile(temporary, append(b, '\n'), 0o600)
	if err == nil {
		err = os.Rename(temporary, file)
	}
	if err != nil {
		return fmt.Errorf("write the CNI network configuration: %w", err)
	}
	return nil
}

// RemoveConfig removes the network configuration from the runtime's folder. Nothing there is no error.
func RemoveConfig(folder string) error {
	if err := os.Remove(filepath.Join(folder, ConfigFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the CNI network configuration: %w", err)
	}
	return nil
}
