package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"fairlead.dev/fairlead/kernel/sysctl"
)

// ours are settings of the loopback device, where a packet of the node itself enters again once its destination has
// changed: its source is the node's, or even a loopback address. Packets from other hosts don't enter there.
var ours = []string{"accept_local", "route_localnet"}

func setting(name string) string { return "net/ipv4/conf/lo/" + name }

// changed returns the folder that stands for a setting that was changed by us.
func (d *devices) changed(name string) string { return filepath.Join(d.folder, "lo-"+name) }

// loopback makes the settings, and records which were different.
func (d *devices) loopback() error {
	for _, name := range ours {
		now, err := sysctl.Get(d.ns, setting(name))
		if err != nil {
			return err
		}
		if now == "1" {
			continue
		}
		if err := os.MkdirAll(d.changed(name), 0o700); err != nil {
			return fmt.Errorf("ebpf: record that a setting is changed: %w", err)
		}
		if err := sysctl.Set(d.ns, sysctl.Setting{Name: setting(name), Value: "1"}); err != nil {
			return err
		}
	}
	return nil
}

// restore undoes what loopback changed.
func (d *devices) restore() error {
	for _, name := range ours {
		err := os.Remove(d.changed(name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("ebpf: record that a setting is as before: %w", err)
		}
		if err := sysctl.Set(d.ns, sysctl.Setting{Name: setting(name), Value: "0"}); err != nil {
			return err
		}
	}
	return nil
}
