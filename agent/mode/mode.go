// Package mode knows which data planes make a mode, which one is the fallback of which, and which mode this kernel
// supports. It alone above the planes knows them by name: whoever runs a mode holds its planes as Runners.
package mode

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/dataplane/service/iptables"
	"fairlead.dev/fairlead/dataplane/service/ipvs"
	"fairlead.dev/fairlead/dataplane/service/nftables"
	"fairlead.dev/fairlead/dataplane/service/userspace"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// Mode is a data plane for Services, or several that share the work.
type Mode struct {
	model.Capabilities
	description
	planes  []opener                   // each is the fallback of the next
	tracked func(*model.Frontend) bool // whose flows the kernel's connection tracking has, if Tracked; nil: all
	options Options
}

// Serves returns why the mode can't serve a node that connects its pods by devices of that kind; nil: it can.
func (m Mode) Serves(k model.DeviceKind) error {
	if !k.IPVLAN() || m.NoIPVLAN == "" {
		return nil
	}
	return fmt.Errorf("mode %s can't serve pods with network.device %s: %s; set mode to ebpf, or network.device to veth "+
		"or netkit", m.Name, k, m.NoIPVLAN)
}

// description is what people are told of a mode.
type description struct {
	Summary string // how it carries Service traffic: a clause
	Needs   string // what it needs of a kernel: a list of nouns
	// what this kernel lacks that the mode can do without, and what follows: sentences; nil: nothing
	missing func() []string
	prepare func() error // sets sysctls that the mode needs, for an agent in a container that can't write them; nil: none
}

// modes are all there are. A new service plane is a line here.
var modes = []struct {
	name string
	make func() Mode
}{
	{"nftables", func() Mode {
		return Alone(nftables.Capabilities, nftables.New).described(description{
			Summary: "one nf_tables table of maps and verdict maps, written by netlink",
			Needs:   "nf_tables (CONFIG_NF_TABLES, CONFIG_NFT_NAT)"})
	}},
	{"iptables", func() Mode {
		return Alone(iptables.Capabilities(), iptables.New).described(describeIPTables(iptables.NFT, iptables.Legacy))
	}},
	{"iptables-legacy", func() Mode { return iptablesVariant(iptables.Legacy) }},
	{"iptables-nft", func() Mode { return iptablesVariant(iptables.NFT) }},
	{"ipvs", func() Mode {
		return Alone(ipvs.Capabilities, ipvs.New).described(description{prepare: ipvs.Prepare,
			Summary: "the kernel's load balancer IPVS, with its schedulers and draining; nf_tables marks and masquerades",
			Needs:   "IPVS (module ip_vs and one for each scheduler, loaded on demand) and nf_tables"})
	}},
	{"userspace", func() Mode {
		return Alone(userspace.Capabilities, userspace.New).described(description{
			Summary: "a proxy in the agent itself: sockets and routing rules, no firewall rule",
			Needs:   "nothing beyond policy routing"})
	}},
	{"ebpf", func() Mode {
		m := WithFallback(ebpf.Capabilities(), ebpf.New, nftables.Capabilities, nftables.New, ebpf.Leaves)
		return m.described(description{missing: ebpf.Missing,
			Summary: "eBPF: translation at connect() for clients on the node, at network devices for all others, without " +
				"connection tracking",
			Needs: "eBPF with BTF and a cgroup v2 hierarchy; Linux 6.7 for packets at devices, else nf_tables",
		}).With(Options{})
	}},
}

// iptablesVariant returns the mode of a variant of iptables' commands.
func iptablesVariant(v iptables.Variant) Mode {
	open := func() (*iptables.Plane, error) { return iptables.NewVariant(v) }
	m := Alone(iptables.CapabilitiesOf(v), open).described(describeIPTables(v))
	m.planes[0].kind = "iptables"
	return m
}

func describeIPTables(of ...iptables.Variant) description {
	return description{missing: func() []string { return iptables.Missing(of...) },
		Summary: "a tree of iptables chains instead of a list, by the legacy or the nft tools, whichever the node uses",
		Needs:   "iptables' programs and x_tables (CONFIG_IP_NF_IPTABLES or CONFIG_NFT_COMPAT)"}
}

// described returns the mode with what people are told of it.
func (m Mode) described(d description) Mode {
	m.description = d
	return m
}

// Missing returns what this kernel lacks that the mode can do without, and what follows.
func (m Mode) Missing() []string {
	if m.missing == nil {
		return nil
	}
	return m.missing()
}

// Prepare sets the sysctls that the mode needs, for an agent in a container that can't write them.
func (m Mode) Prepare() error {
	if m.prepare == nil {
		return nil
	}
	return m.prepare()
}

// Alone makes a mode of one plane.
func Alone[K dataplane.Key, V comparable, P ServicePlane[K, V]](c model.Capabilities, open func() (P, error)) Mode {
	return Mode{Capabilities: c, planes: []opener{opens(c, open, nil)}}
}

// WithFallback makes a mode of a plane and its fallback plane, which serves the frontends that the first leaves. It has
// the first's schedulers; the second is given what stands in for those that it doesn't have. Otherwise it supports what
// both support.
func WithFallback[K, L dataplane.Key, V, W comparable, P ServicePlane[K, V], Q ServicePlane[L, W]](a model.Capabilities,
	first func() (P, error), b model.Capabilities, second func() (Q, error), leaves func(*model.Frontend) bool) Mode {
	both := a
	both.Fallback = b.Schedulers
	both.Tracked, both.MasqueradesAll, both.Ends = a.Tracked || b.Tracked, a.MasqueradesAll || b.MasqueradesAll, a.Ends ||
		b.Ends
	both.Remarks = slices.Concat(a.Remarks, b.Remarks)
	both.Unserved, both.Long = slices.Concat(a.Unserved, b.Unserved), slices.Concat(a.Long, b.Long)
	limited := func() (ServicePlane[L, W], error) {
		p, err := second()
		if err != nil {
			return nil, err
		}
		return within(p, b.Schedulers), nil
	}
	return Mode{Capabilities: both, planes: []opener{opens(b, limited, leaves), opens(a, first, nil)}, tracked: leaves}
}

// Default is the mode of those who choose none.
const Default = "nftables"

// FastPath reports whether packets to pods may bypass the host stack in the mode with these options.
func (m Mode) FastPath(o Options) bool {
	return m.Name == "ebpf" && !o.NoFastPath && ebpf.Redirects()
}

// All returns all modes.
func All() (l []Mode) {
	for _, m := range modes {
		l = append(l, m.make())
	}
	return l
}

// Names returns the modes' names.
func Names() (names []string) {
	for _, m := range modes {
		names = append(names, m.name)
	}
	return names
}

// Of returns a mode by its name; "" is Default.
func Of(name string) (Mode, error) {
	for _, m := range modes {
		if m.name == cmp.Or(name, Default) {
			return m.make(), nil
		}
	}
	return Mode{}, fmt.Errorf("invalid mode %q: use one of %s", name, strings.Join(Names(), ", "))
}

// Planes returns the names of the mode's planes, each of which is the fallback of the next.
func (m Mode) Planes() (names []string) {
	for _, p := range m.planes {
		names = append(names, p.name)
	}
	return names
}

// Resolve returns a resolver's configuration with what the mode supports.
func (m Mode) Resolve(c resolve.Config) resolve.Config {
	c.Capabilities = m.Capabilities
	c.Limits.Total = c.Limits.Total.Within(resolve.DefaultLimits.Total, resolve.Bounds{Frontends: m.Frontends,
		Slots: m.Slots})
	return c
}

// Tracks reports whether the mode's own rules have the kernel translate TCP connections.
func (m Mode) Tracks() bool {
	return m.Tracked && (m.tracked == nil || m.tracked(&model.Frontend{Entry: model.Entry{Protocol: model.TCP}}))
}

// TrackedShare returns the share of the frontends whose flows the kernel's connection tracking has.
func (m Mode) TrackedShare() *Share { return &Share{Serves: m.tracked} }

// Scheduler returns the scheduler by which clients of an origin are served where a pool has s: external clients, which
// a mode's first plane never serves, by what its fallback supports.
func (m Mode) Scheduler(o model.Origin, s model.Scheduler) model.Scheduler {
	if o == model.FromExternal && m.Fallback != 0 {
		return m.Fallback.Instead(s)
	}
	return s
}

// Options are settings of planes. They count in modes that have the plane.
type Options struct {
	// ebpf: entries of the kernel's maps, for ports of Services and their endpoints; 0: DefaultMapEntries
	MapEntries         uint32
	Flows              uint32 // ebpf: size of each map of flows; 0: DefaultFlows
	CloseTCP           bool   // ebpf: close clients' TCP connections to an endpoint that goes, too
	NoFastPath         bool   // ebpf: no packet bypasses the host stack
	NoReversePathCheck bool   // ebpf: packets begin flows whatever device they come in by
	Policies           bool   // ebpf: network policies see what a pod sends to itself by way of a Service
	PodNetwork         bool   // ebpf: the pod network is this agent's

	TCP, FIN, UDP time.Duration // ipvs: timeouts of idle connections; 0: the kernel's, and a day for TCP
}

// The sizes of maps unless they are given.
const (
	DefaultMapEntries = ebpf.DefaultMapEntries
	DefaultFlows      = ebpf.DefaultFlows
)

// ebpf returns the options of that plane.
func (o Options) ebpf() ebpf.Options {
	sizes := ebpf.SizesFor(cmp.Or(o.MapEntries, DefaultMapEntries))
	sizes.Flows = cmp.Or(o.Flows, DefaultFlows)
	return ebpf.Options{Sizes: sizes, CloseTCP: o.CloseTCP, NoFastPath: o.NoFastPath,
		NoReversePathCheck: o.NoReversePathCheck, Policies: o.Policies, PodNetwork: o.PodNetwork}
}

// ipvs returns the options of that plane.
func (o Options) ipvs() ipvs.Options {
	return ipvs.Options{Timeouts: ipvs.Timeouts{TCP: o.TCP, FIN: o.FIN, UDP: o.UDP}}
}

// With returns the mode with options for its planes.
func (m Mode) With(o Options) Mode {
	m.options = o
	m = with(m, "ebpf", func() (*ebpf.Plane, error) { return ebpf.Open(o.ebpf()) })
	m = with(m, "ipvs", func() (*ipvs.Plane, error) { return ipvs.Open(o.ipvs()) })
	if m.Name == "ebpf" {
		m.Frontends, m.Slots = o.ebpf().Capacity()
	}
	return m
}

// with returns the mode with another way of opening one of its planes.
func with[K dataplane.Key, V comparable, P ServicePlane[K, V]](m Mode, name string, open func() (P, error)) Mode {
	m.planes = slices.Clone(m.planes)
	for i, p := range m.planes {
		if p.name == name {
			m.planes[i] = opens(model.Capabilities{Name: name, Batch: p.batch}, open, nil)
		}
	}
	return m
}
