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
// of that one's in the order of names, by which a runtime chooses. Multus' 00-multus.conf comes before both: Multus has
// the first of the others as its delegate.
const (
	ConfigFile  = "10-fairlead.conflist"
	ChainedFile = "01-fairlead.conflist"
)

// entry is fairlead-cni in a network configuration.
type entry struct {
	Type         string          `json:"type"`
	Capabilities map[string]bool `json:"capabilities,omitempty"`
	Socket       string          `json:"socket"`
	Records      string          `json:"records"`
}

// WriteConfig writes the network configuration into the folder from which the container runtime reads it: from then on
// it starts pods. The folder must be there: the runtime watches it. Another network's configuration there that the
// runtime would use is an error, and ours is there nevertheless.
func WriteConfig(folder, socket, records string) error {
	b, err := json.MarshalIndent(struct {
		Version  string   `json:"cniVersion"`
		Versions []string `json:"cniVersions"`
		Name     string   `json:"name"`
		Plugins  []entry  `json:"plugins"`
	}{cni.ListVersions[0], cni.ListVersions, "fairlead", []entry{
		{cni.PluginName, map[string]bool{"bandwidth": true, "ips": true, "portMappings": true}, socket, records}}}, "", "  ")
	if err != nil {
		return err
	}
	if err := write(folder, ConfigFile, b, ChainedFile); err != nil {
		return err
	}
	return isFirst(folder, ConfigFile)
}

// isFirst returns an error where the container runtime starts pods by another configuration than ours, unless that
// leads to our plugin, as Multus' does that has Fairlead as its delegate.
func isFirst(folder, ours string) error {
	file, types, err := First(folder)
	if err != nil || file == ours || leads(types, ours == ConfigFile) {
		return err
	}
	if slices.ContainsFunc(types, isMultus) {
		return fmt.Errorf("the configuration of Multus, %s, has another delegate than %s, so that the container runtime "+
			"starts pods without Fairlead: restart the pod of Multus on this node, or name that file by its "+
			"--multus-master-cni-file-name",
			filepath.Join(folder, file), ours)
	}
	return fmt.Errorf("%s comes before %s in the order of names, so that the container runtime starts pods in that "+
		"network: remove it with what wrote it, or rename it, such as to 90-%s", filepath.Join(folder, file), ours, file)
}

// leads reports whether plugins, behind Multus or not, have ours called as a mode has it: alone in mode Own, else
// behind others.
func leads(types []string, alone bool) bool {
	if len(types) > 0 && isMultus(types[0]) {
		types = types[1:]
	}
	i := slices.Index(types, cni.PluginName)
	return i >= 0 && (i == 0) == alone && !slices.ContainsFunc(types, isMultus)
}

// First returns the name of the configuration in a folder by which a runtime starts pods, the first by name (libcni's
// order), and the plugins that it calls; "" where there is none.
func First(folder string) (file string, types []string, err error) {
	names, err := configurations(folder)
	if err != nil || len(names) == 0 {
		return "", nil, err
	}
	b, err := os.ReadFile(filepath.Join(folder, names[0]))
	return names[0], typesIn(b, folder), err
}

// isMultus reports whether a plugin is Multus, which calls others.
func isMultus(t string) bool { return strings.HasPrefix(t, "multus") }

// typesIn returns the plugins that a network configuration names, in the order in which they are called: those of
// Multus' delegates behind Multus, which it has as they are, or as a file of the folder; "": that isn't read.
func typesIn(b []byte, folder string) (l []string) {
	var c struct {
		Type      string            `json:"type"`
		Plugins   []json.RawMessage `json:"plugins"`
		Delegates []json.RawMessage `json:"delegates"`
		Cluster   string            `json:"clusterNetwork"` // the path of that file, as Multus' pod has it
	}
	json.Unmarshal(b, &c) // what isn't as it should be names nothing
	if c.Type != "" {
		l = append(l, c.Type)
	}
	for _, p := range slices.Concat(c.Plugins, c.Delegates) {
		l = append(l, typesIn(p, folder)...)
	}
	if folder != "" && c.Cluster != "" {
		if b, err := os.ReadFile(filepath.Join(folder, filepath.Base(c.Cluster))); err == nil {
			l = append(l, typesIn(b, "")...)
		}
	}
	return l
}

// configurations returns the names of the files in a folder that a runtime reads, sorted.
func configurations(folder string) (names []string, err error) {
	entries, err := os.ReadDir(folder) // sorted
	for _, e := range entries {
		if slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(e.Name())) {
			names = append(names, e.Name())
		}
	}
	return names, err
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
	if err := write(folder, ChainedFile, b, ConfigFile); err != nil {
		return err
	}
	return isFirst(folder, ChainedFile)
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
	old, err := os.ReadFile(file)
	if err != nil || string(old) != string(b)+"\n" {
		temporary := filepath.Join(folder, ".fairlead.new") // which no runtime reads
		if err = os.WriteFile(temporary, append(b, '\n'), 0o600); err == nil {
			err = os.Rename(temporary, file)
		}
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
// (libcni's order). One that has fairlead-cni already is passed over, and Multus', which has others' as its delegates.
func findList(folder string) (*list, error) {
	names, err := configurations(folder)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			return nil, err
		}
		if t := typesIn(b, ""); slices.Contains(t, cni.PluginName) || slices.ContainsFunc(t, isMultus) {
			continue
		}
		l, err := parseList(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(folder, name), err)
		}
		l.file = name
		return l, nil
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
