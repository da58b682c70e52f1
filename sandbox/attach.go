package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/source"
)

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
	out, err := c.plugin(h, Runtime.Attach)
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
	_, err := c.plugin(h, func(r Runtime, config []byte) ([]byte, error) { return nil, r.Detach(config) })
	return err
}

// plugin calls the CNI plugin in the network namespace of a pod's node, and returns what it prints.
func (c *Cluster) plugin(h *Host, call func(Runtime, []byte) ([]byte, error)) (out []byte, err error) {
	r := Runtime{Folder: c.cni(h.Node), Container: c.Name + "-" + strings.Replace(h.Short(), "/", ".", 1), Pod: h.Short(),
		Netns: h.Namespace, Addresses: h.spec.host.Addresses}
	config, err := r.Config()
	if err != nil {
		return nil, err
	}
	h.called = true
	err = c.hosts["node "+h.Node].inside(func() error {
		out, err = call(r, config)
		return err
	})
	return out, err
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
