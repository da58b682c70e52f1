package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/sandbox/echo"
)

// Role is what a host stands for.
type Role string

// The roles.
const (
	Node     Role = "node"
	Pod      Role = "pod"
	External Role = "outside"
)

// Host is a place to send packets from and to: a network namespace, which pods on the host network share with their
// node.
type Host struct {
	Role      Role         `json:"role"`
	Name      string       `json:"name"`           // "node a", "pod shop/web-1", "outside"
	Node      string       `json:"node,omitempty"` // the Node that it is, or runs on
	Namespace string       `json:"namespace"`      // name of the network namespace
	Addresses []netip.Addr `json:"addresses"`      // the first of each family is what it sends from
	// Cgroup is the folder of the cgroup that stands for the node that the host is, or runs on: its threads, and its
	// sockets, are in there. Empty where the machine has none to give: then nothing can tell nodes apart by it.
	Cgroup string `json:"cgroup,omitempty"`

	cluster *Cluster
	spec    *spec
	box     *box
	port    int  // pods: interface of the node that leads here
	mtu     int  // of the last hop to here, 0: the wire's
	called  bool // pods: the CNI plugin was, to connect it
	server  *echo.Server
}

// Short is the name without the role: "a", "shop/web-1", "outside".
func (h *Host) Short() string {
	_, short, more := strings.Cut(h.Name, " ")
	if !more {
		return h.Name
	}
	return short
}

// Do runs f on a thread that is inside the host's network namespace and its node's cgroup. Goroutines that f starts are
// not.
func (h *Host) Do(f func() error) error {
	if h.Cgroup == "" {
		return h.inside(f)
	}
	return cgroup.Do(h.Cgroup, func() error { return h.inside(f) })
}

// inside runs f in the host's network namespace.
func (h *Host) inside(f func() error) error {
	if h.box != nil {
		return h.box.ns.Do(f)
	}
	ns, err := netns.Open(h.Namespace) // another process holds the cluster
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Do(f)
}

// Route sends what h sends to prefix by way of via, an address on the link of h's one interface: a node's or the
// outside client's address for those, for pods their node's. It takes the place of h's route to that very prefix and
// stays through Updates. It is for hosts of a Cluster, not of a State.
func (h *Host) Route(prefix netip.Prefix, via netip.Addr) error {
	if prefix.Addr().BitLen() != via.BitLen() {
		return fmt.Errorf("%s: route to %s via %s: not of one family", h.Name, prefix, via)
	}
	if h.cluster == nil {
		return fmt.Errorf("%s: another process holds its cluster", h.Name)
	}
	h.cluster.mu.Lock()
	defer h.cluster.mu.Unlock()
	h.box.requested[prefix.Masked()] = via
	return h.cluster.connect(h)
}

// Narrow lets packets of so many bytes at most through on the last hop to h, 0 as long ones as the wire takes. Whoever
// is to send h a longer one there, its node or for hosts on the wire any other on it, tells the sender so (RFC 1191,
// RFC 8201); h itself knows nothing of it. It is for hosts of a Cluster, not of a State.
func (h *Host) Narrow(mtu int) error {
	if h.cluster == nil {
		return fmt.Errorf("%s: another process holds its cluster", h.Name)
	}
	h.cluster.mu.Lock()
	defer h.cluster.mu.Unlock()
	h.mtu = mtu
	var errs []error
	for _, o := range h.cluster.hosts {
		if o.Role != Pod {
			errs = append(errs, h.cluster.connect(o))
		}
	}
	return errors.Join(errs...)
}

// source returns the address that h sends from to a, or none where it has none of that family.
func (h *Host) source(a netip.Addr) netip.Addr {
	i := slices.IndexFunc(h.Addresses, func(b netip.Addr) bool { return b.BitLen() == a.BitLen() })
	if i < 0 {
		return netip.Addr{}
	}
	return h.Addresses[i]
}

func (h *Host) equal(o Host) bool {
	return h.Role == o.Role && h.Name == o.Name && h.Node == o.Node && h.Namespace == o.Namespace &&
		slices.Equal(h.Addresses, o.Addresses)
}

// compareHosts orders hosts as they are built: each after those that it hangs on.
func compareHosts(a, b *Host) int {
	return cmp.Or(slices.Index(roles, a.Role)-slices.Index(roles, b.Role), strings.Compare(a.Name, b.Name))
}

var roles = []Role{External, Node, Pod}

// join puts a node into a cgroup of its own, and a pod into its node's.
func (c *Cluster) join(h *Host) {
	switch h.Role {
	case Node:
		h.Cgroup, _ = cgroup.New(h.Namespace) // see Host.Cgroup
		c.cgroups = append(c.cgroups, h.Cgroup)
	case Pod:
		h.Cgroup = c.hosts["node "+h.Node].Cgroup
	}
}

// unload removes what programs of a node have pinned, and its cgroup: on a machine of its own they would end with that.
func (h *Host) unload() error {
	if h.Role != Node {
		return nil
	}
	err := h.inside(func() error {
		services, _, err := bpf.Folder()
		if err != nil {
			return err
		}
		policies, err := policy.Folder()
		return errors.Join(err, bpf.RemoveFolder(services), bpf.RemoveFolder(policies))
	})
	return errors.Join(err, cgroup.Delete(h.Cgroup))
}
