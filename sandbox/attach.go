package sandbox

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/source"
)

// pluginWait is how long the plugin waits for its agent: Attach is called again.
const pluginWait = time.Second

// Attach connects the pods that have no network yet, by the CNI plugin and the agents of their nodes, as a container
// runtime does: by the network configuration in the folder Options.CNI. It is for clusters that have one; those of
// others have nothing to attach. The error says which pods have no network, and why; call it again then.
func (c *Cluster) Attach(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	attached := false
	for _, h := range c.sorted() {
		if !c.waits(h) {
			continue
		}
		if err := errors.Join(ctx.Err(), c.attach(h)); err != nil {
			errs = append(errs, fmt.Errorf("attach %s: %w", h.Name, err))
			continue
		}
		attached = true
		if err := c.await(ctx, h); err != nil {
			errs = append(errs, fmt.Errorf("wait for %s: %w", h.Name, err))
		}
	}
	if attached {
		errs = append(errs, c.record())
	}
	return errors.Join(errs...)
}

// waits reports whether a host is a pod that Attach is to connect.
func (c *Cluster) waits(h *Host) bool {
	return c.cni != nil && h.Role == Pod && !h.spec.shared && h.port == 0
}

// attach has the plugin connect a pod.
func (c *Cluster) attach(h *Host) error {
	out, err := c.plugin(h, cni.Add)
	if err != nil {
		return err
	}
	var result cni.Result
	if err := json.Unmarshal(out, &result); err != nil {
		return fmt.Errorf("result of the CNI plugin: %w", err)
	}
	if len(result.Interfaces) != 2 {
		return fmt.Errorf("the CNI plugin made %d interfaces, not the pod's and the node's", len(result.Interfaces))
	}
	mac, err := net.ParseMAC(result.Interfaces[1].MAC)
	if err != nil {
		return fmt.Errorf("result of the CNI plugin: %w", err)
	}
	copy(h.box.mac[:], mac)
	port := 0
	err = errors.Join(
		c.above(h).dial(func(l *link.Conn) (err error) { port, err = l.Index(result.Interfaces[0].Name); return err }),
		h.box.dial(func(l *link.Conn) (err error) { h.box.eth0, err = l.Index("eth0"); return err }))
	if err != nil {
		return err
	}
	h.port = port
	return c.connect(h)
}

// detach has the plugin disconnect a pod, if it was called to connect it.
func (c *Cluster) detach(h *Host) error {
	if !h.called {
		return nil
	}
	_, err := c.plugin(h, cni.Del)
	return err
}

// plugin runs the CNI plugin in the network namespace of a pod's node, and returns what it prints.
func (c *Cluster) plugin(h *Host, command string) ([]byte, error) {
	config, err := c.pluginConfig(h)
	if err != nil {
		return nil, err
	}
	h.called = true
	namespace, name, _ := strings.Cut(h.Short(), "/")
	environment := map[string]string{"CNI_COMMAND": command, "CNI_CONTAINERID": c.Name + "-" + namespace + "." + name,
		"CNI_IFNAME": "eth0", "CNI_NETNS": filepath.Join(netns.Dir, h.Namespace),
		"CNI_ARGS": "K8S_POD_NAMESPACE=" + namespace + ";K8S_POD_NAME=" + name}
	var out bytes.Buffer
	code := 0
	err = c.hosts["node "+h.Node].inside(func() error {
		p := cni.Plugin{Environment: func(k string) string { return environment[k] }, Stdin: bytes.NewReader(config),
			Stdout: &out, AddWait: pluginWait, DelWait: pluginWait}
		code = p.Run()
		return nil
	})
	if err == nil && code != 0 {
		failure := &cni.Error{}
		if err = json.Unmarshal(out.Bytes(), failure); err == nil {
			err = failure
		}
	}
	return out.Bytes(), err
}

// pluginConfig returns what a runtime passes to the plugin: its entry in the network configuration of the pod's node,
// with the list's name and version, and the addresses that the pod must have.
func (c *Cluster) pluginConfig(h *Host) ([]byte, error) {
	folder := c.cni(h.Node)
	files, err := filepath.Glob(filepath.Join(folder, "*.conflist"))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("no network configuration is in %s: the agent of node %s is not ready", folder, h.Node)
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
	entry["runtimeConfig"] = map[string]any{"ips": h.spec.host.Addresses}
	return json.Marshal(entry)
}

// Attachable returns why the CNI plugin can't connect the pods of these objects, as their addresses are; nil: it can.
// Objects that make no sandbox are no reason: Up says what is wrong with them.
func Attachable(objects []source.Object) error {
	l, err := newLayout(objects, nil)
	if err != nil {
		return nil
	}
	var errs []error
	ranges := map[string][]netip.Prefix{}
	for _, o := range objects {
		if n, ok := o.(*corev1.Node); ok {
			for _, text := range n.Spec.PodCIDRs {
				if r, err := netip.ParsePrefix(text); err == nil {
					ranges[n.Name] = append(ranges[n.Name], r.Masked())
				}
			}
			if len(ranges[n.Name]) == 0 {
				errs = append(errs, fmt.Errorf("node %s has no podCIDRs", n.Name))
			}
		}
	}
	for _, s := range l.sorted() {
		if s.host.Role == Pod && !s.shared {
			errs = append(errs, fits(s.host, ranges[s.host.Node]))
		}
	}
	return errors.Join(errs...)
}

// fits returns why a pod can't have exactly the addresses that it has, from its node's ranges.
func fits(h Host, ranges []netip.Prefix) error {
	families := map[bool]bool{}
	for _, r := range ranges {
		families[r.Addr().Is4()] = true
	}
	has := map[bool]bool{}
	for _, a := range h.Addresses {
		if !slices.ContainsFunc(ranges, func(r netip.Prefix) bool {
			return r.Contains(a) && r.Addr().Next().Less(a)
		}) {
			return fmt.Errorf("%s has the address %s, which is not in the podCIDRs %v of node %s, or reserved there", h.Name, a,
				ranges, h.Node)
		}
		if has[a.Is4()] {
			return fmt.Errorf("%s has several addresses of one family", h.Name)
		}
		has[a.Is4()] = true
	}
	if len(has) != len(families) {
		return fmt.Errorf("%s has addresses %v, and pods of node %s have one of each of %v", h.Name, h.Addresses, h.Node,
			ranges)
	}
	return nil
}

// links puts all nodes on one link: their addresses get a prefix of the usual length, or a shorter one that has them
// all. Nodes that are too far apart stay on links of their own.
func (l *layout) links() {
	usual := [2]int{24, 64}
	least := [2]int{8, 16}
	var first [2]netip.Addr
	bits := usual
	for _, s := range l.sorted() {
		for _, a := range s.host.Addresses {
			f := family(a)
			if s.host.Role != Node {
				continue
			}
			if !first[f].IsValid() {
				first[f] = a
			}
			for bits[f] > 0 && !netip.PrefixFrom(first[f], bits[f]).Masked().Contains(a) {
				bits[f]--
			}
		}
	}
	for f := range bits {
		if bits[f] < least[f] {
			bits[f] = 0
		}
	}
	for name, s := range l.specs {
		if s.host.Role == Node {
			s.bits = bits
			l.specs[name] = s
		}
	}
}
