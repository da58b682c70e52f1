package attach

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"fairlead.dev/fairlead/cni"
)

// The names of the network configuration in the runtime's folder: with the plugin alone, and behind another one, ahead
// of that one's in the order of names, by which a runtime chooses.
const (
	ConfigFile  = "10-fairlead.conflist"
	ChainedFile = "00-fairlead.conflist"
)

// entry is fairlead-cni in a network configuration.
type entry struct {
	Type         string          `json:"type"`
	Capabilities map[string]bool `json:"capabilities,omitempty"`
	Socket       string          `json:"socket"`
	Records      string          `json:"records"`
}

// WriteConfig writes the network configuration into the folder from which the container runtime reads it: from then on
// it starts pods. The folder must be there: the runtime watches it.
func WriteConfig(folder, socket, records string) error {
	b, err := json.MarshalIndent(struct {
		Version string  `json:"cniVersion"`
		Name    string  `json:"name"`
		Plugins []entry `json:"plugins"`
	}{cni.ListVersion, "fairlead", []entry{
		{cni.PluginName, map[string]bool{"ips": true, "portMappings": true}, socket, records}}}, "", "  ")
	if err != nil {
		return err
	}
	return write(folder, ConfigFile, b, ChainedFile)
}

// WriteChained writes the network configuration of another plugin, with fairlead-cni behind it, into the folder from
// which the container runtime reads it; again, it follows what changes in the other's. The other's file stays as it is.
func WriteChained(folder, socket, records string) error {
	l, err := findList(folder)
	if err != nil {
		return fmt.Errorf("write the CNI network configuration: %w", err)
	}
	if l.file < ChainedFile {
		return fmt.Errorf("write the CNI network configuration: %s comes before %s in the order of names, so that the "+
			"container runtime would use it without Fairlead: rename it, such as to 05-%s", filepath.Join(folder, l.file),
			ChainedFile, l.file)
	}
	b, err := l.with(entry{Type: cni.PluginName, Socket: socket, Records: records})
	if err != nil {
		return fmt.Errorf("write the CNI network configuration: %s: %w", filepath.Join(folder, l.file), err)
	}
	return write(folder, ChainedFile, b, ConfigFile)
}

// MapsPorts reports whether the network configuration in a folder that WriteChained extends has the plugin portmap,
// which serves pods' host ports.
func MapsPorts(folder string) bool {
	l, err := findList(folder)
	return err == nil && slices.Contains(l.types, "portmap")
}

// write replaces a file of ours where it differs, and removes that of the other mode.
func write(folder, name string, b []byte, other string) error {
	file := filepath.Join(folder, name)
	if old, err := os.ReadFile(file); err == nil && string(old) == string(b)+"\n" {
		return nil
	}
	temporary := filepath.Join(folder, ".fairlead.new") // which no runtime reads
	err := os.WriteFile(temporary, append(b, '\n'), 0o600)
	if err == nil {
		err = os.Rename(temporary, file)
	}
	if err == nil {
		err = remove(folder, other)
	}
	if err != nil {
		return fmt.Errorf("write the CNI network configuration: %w", err)
	}
	return nil
}

func remove(folder, name string) error {
	if err := os.Remove(filepath.Join(folder, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// RemoveConfig removes the network configurations of both modes from the runtime's folder. Nothing there is no error.
func RemoveConfig(folder string) error {
	if err := errors.Join(remove(folder, ConfigFile), remove(folder, ChainedFile)); err != nil {
		return fmt.Errorf("remove the CNI network configuration: %w", err)
	}
	return nil
}

// list is another plugin's network configuration.
type list struct {
	file   string
	fields map[string]json.RawMessage // of the file, as a list of plugins
	types  []string                   // of the plugins
}

// errNoList is the error that there is nothing to be chained to.
var errNoList = errors.New("no other plugin's network configuration is there: install that plugin, or use " +
	"network.mode Own")

// findList returns the network configuration in a folder that a runtime would use without ours: the first by name
// (libcni's order). One that has fairlead-cni already is passed over.
func findList(folder string) (*list, error) {
	entries, err := os.ReadDir(folder) // sorted
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(e.Name())) {
			continue
		}
		b, err := os.ReadFile(filepath.Join(folder, e.Name()))
		if err != nil {
			return nil, err
		}
		l, err := parseList(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(folder, e.Name()), err)
		}
		if l.file = e.Name(); !slices.Contains(l.types, cni.PluginName) {
			return l, nil
		}
	}
	return nil, fmt.Errorf("%s: %w", folder, errNoList)
}

// parseList reads a network configuration: a list of plugins, or one plugin.
func parseList(b []byte) (*list, error) {
	l := &list{}
	if err := json.Unmarshal(b, &l.fields); err != nil {
		return nil, err
	}
	if l.fields["plugins"] == nil && l.fields["type"] != nil {
		one, err := json.Marshal([]json.RawMessage{b})
		if err != nil {
			return nil, err
		}
		l.fields = map[string]json.RawMessage{"cniVersion": l.fields["cniVersion"], "name": l.fields["name"], "plugins": one}
	}
	var plugins []struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(l.fields["plugins"], &plugins); err != nil || len(plugins) == 0 {
		return nil, errors.New("it has no list of plugins")
	}
	for _, p := range plugins {
		l.types = append(l.types, p.Type)
	}
	for _, field := range []string{"cniVersion", "name"} {
		var text string
		if err := json.Unmarshal(l.fields[field], &text); err != nil || strings.TrimSpace(text) == "" {
			return nil, fmt.Errorf("it has no %s", field)
		}
	}
	return l, nil
}

// with returns the network configuration with one plugin more behind those that it has. What it has else stays.
func (l *list) with(p entry) ([]byte, error) {
	var version string
	if err := json.Unmarshal(l.fields["cniVersion"], &version); err != nil || !slices.Contains(cni.Versions, version) {
		return nil, fmt.Errorf("cniVersion %s: use one of %s", l.fields["cniVersion"], strings.Join(cni.Versions, ", "))
	}
	var plugins []json.RawMessage
	if err := json.Unmarshal(l.fields["plugins"], &plugins); err != nil {
		return nil, err
	}
	if !slices.Contains(l.types, "portmap") {
		p.Capabilities = map[string]bool{"portMappings": true}
	}
	ours, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	all, err := json.Marshal(append(plugins, ours))
	if err != nil {
		return nil, err
	}
	out := map[string]json.RawMessage{}
	for k, v := range l.fields {
		out[k] = v
	}
	out["plugins"] = all
	return json.MarshalIndent(out, "", "  ")
}
