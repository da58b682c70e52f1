package attach

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/testbed"
)

// findPlugin finds fairlead-cni beside this program where none was given.
func (t *trial) findPlugin(context.Context) error {
	name := experiment.FairleadCNIProgram.Name
	if t.programs[name] != "" {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	path := filepath.Join(filepath.Dir(self), name)
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("the plugin is not beside this program: %w; `make build` builds both, and --subject %s=PATH "+
			"takes one from elsewhere", err, name)
	}
	t.programs[name] = path
	return nil
}

func makeFolder(path string) error {
	if err := os.Mkdir(path, 0o755); err != nil {
		return fmt.Errorf("make a folder for CNI: %w", err)
	}
	return nil
}

// awaitConfig waits until an agent has written the network configuration, and returns what a runtime passes to the
// plugin: the list's one entry, with the list's name and version.
func awaitConfig(ctx context.Context, folder string, within time.Duration) ([]byte, error) {
	var files []string
	for end := time.Now().Add(within); len(files) == 0; {
		var err error
		if files, err = filepath.Glob(filepath.Join(folder, "*.conflist")); err != nil {
			return nil, err
		}
		if len(files) > 0 {
			break
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("the agent has written no network configuration into %s within %v", folder, within)
		}
		if err := testbed.Sleep(ctx, 5*time.Millisecond); err != nil {
			return nil, err
		}
	}
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
		return nil, errors.Join(fmt.Errorf("%s is no network configuration of one plugin", files[0]), err)
	}
	entry := list.Plugins[0]
	entry["cniVersion"], entry["name"] = list.Version, list.Name
	return json.Marshal(entry)
}

// configOf returns what a runtime passes to bridge or ptp, with addresses of host-local.
func configOf(plugin string, ranges []string, folder string) ([]byte, error) {
	type object = map[string]any
	var subnets [][]object
	routes := []object{{"dst": "0.0.0.0/0"}}
	for _, r := range ranges {
		subnets = append(subnets, []object{{"subnet": r}})
		if strings.Contains(r, ":") {
			routes = append(routes, object{"dst": "::/0"})
		}
	}
	c := object{"cniVersion": "1.0.0", "name": "lab", "type": plugin,
		"ipam": object{"type": "host-local", "ranges": subnets, "routes": routes, "dataDir": folder}}
	if plugin == experiment.BridgeProgram.Name {
		c["bridge"], c["isGateway"] = "cni0", true
	}
	return json.Marshal(c)
}

// call runs the plugin for a pod, as a runtime does, and returns how long it took from its start to its end; in an
// exact run, its processor time and that of the programs that it ran, to the microsecond.
func (n *node) call(ctx context.Context, command string, pod *netns.Namespace, container string,
) (elapsed time.Duration, err error) {
	var out bytes.Buffer
	c := exec.CommandContext(ctx, n.program)
	c.Stdin, c.Stdout, c.Stderr, c.Dir = bytes.NewReader(n.config), &out, &out, "/"
	c.Env = []string{"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + container, "CNI_IFNAME=eth0",
		"CNI_NETNS=" + filepath.Join(netns.Dir, pod.Name), "CNI_PATH=" + filepath.Dir(n.program),
		"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=lab;K8S_POD_NAME=" + pod.Name, "PATH=" + os.Getenv("PATH")}
	err = n.ns.Do(func() error {
		began := time.Now()
		err := c.Run()
		elapsed = time.Since(began)
		if n.exact && c.ProcessState != nil {
			elapsed = c.ProcessState.UserTime() + c.ProcessState.SystemTime()
		}
		return err
	})
	if err != nil {
		err = fmt.Errorf("%s of %s by %s: %w: %s", command, pod.Name, n.program, err, testbed.Brief(out.String()))
	}
	return elapsed, err
}
