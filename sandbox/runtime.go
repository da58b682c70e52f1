package sandbox

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/kernel/netns"
)

// pluginWait is how long the plugin waits for its agent: callers call again.
const pluginWait = time.Second

// Runtime calls the CNI plugin for a pod, as a container runtime does.
type Runtime struct {
	Folder    string       // with the network configuration of the pod's node
	Container string       // its ID
	Pod       string       // NAMESPACE/NAME
	Netns     string       // name of its network namespace
	Addresses []netip.Addr // that it must have
}

// Attach has the plugin connect the pod, on the calling thread, which must be in the network namespace of the pod's
// node, and returns what the plugin prints. The configuration is Config's.
func (r Runtime) Attach(config []byte) ([]byte, error) { return r.call(cni.Add, config) }

// Detach has the plugin disconnect the pod, likewise.
func (r Runtime) Detach(config []byte) error {
	_, err := r.call(cni.Del, config)
	return err
}

func (r Runtime) call(command string, config []byte) (_ []byte, err error) {
	namespace, name, _ := strings.Cut(r.Pod, "/")
	environment := map[string]string{"CNI_COMMAND": command, "CNI_CONTAINERID": r.Container, "CNI_IFNAME": "eth0",
		"CNI_NETNS": filepath.Join(netns.Dir, r.Netns),
		"CNI_ARGS":  "K8S_POD_NAMESPACE=" + namespace + ";K8S_POD_NAME=" + name}
	var out bytes.Buffer
	p := cni.Plugin{Environment: func(k string) string { return environment[k] }, Stdin: bytes.NewReader(config),
		Stdout: &out, AddWait: pluginWait, DelWait: pluginWait}
	if p.Run() != 0 {
		failure := &cni.Error{}
		if err = json.Unmarshal(out.Bytes(), failure); err == nil {
			err = failure
		}
	}
	return out.Bytes(), err
}

// Config returns what a runtime passes to the plugin: its entry in the network configuration of the pod's node, with
// the list's name and version, and the addresses that the pod must have.
func (r Runtime) Config() ([]byte, error) {
	files, err := filepath.Glob(filepath.Join(r.Folder, "*.conflist"))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("no network configuration is in %s: the agent of the node of pod %s is not ready", r.Folder, r.Pod)
	}
	if err != nil {
		return nil, err
	}
	slices.Sort(files)
	text, err := os.ReadFile(files[0])
	if err != nil {
		return nil, err
	}
	var list struct {
		Version string           `json:"cniVersion"`
		Name    string           `json:"name"`
		Plugins []map[string]any `json:"plugins"`
	}
	if err := json.Unmarshal(text, &list); err != nil || len(list.Plugins) != 1 {
		return nil, fmt.Errorf("network configuration %s must have one plugin, it has %d: %w", files[0], len(list.Plugins),
			cmp.Or(err, fs.ErrInvalid))
	}
	entry := list.Plugins[0]
	entry["cniVersion"], entry["name"] = list.Version, list.Name
	entry["runtimeConfig"] = map[string]any{"ips": r.Addresses}
	return json.Marshal(entry)
}
