package network

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Overlay is which nodes are reached through the tunnel.
type Overlay string

// The values of Overlay. "" is Subnets.
const (
	Subnets Overlay = "Subnets" // those that are not on a link of this node
	Always  Overlay = "Always"  // all
	Never   Overlay = "Never"   // none: routers know the ranges of nodes that are not on a link
)

// The defaults of Config.
const (
	DefaultVNI  = 7
	DefaultPort = 4789 // IANA's for VXLAN
)

// Config is what a Resolver needs to know beside objects.
type Config struct {
	Node         string // this node's name
	Overlay      Overlay
	Device       model.DeviceKind // of pods; those of IPVLAN need the overlay to be Never
	Tunnel       model.TunnelKind // of the overlay
	VNI          uint32           // 0: DefaultVNI
	Port         uint16           // 0: DefaultPort
	Uplink       string           // the device that other nodes are behind; "": that of the Node's InternalIP
	MTU          int              // of pods' devices; 0: what the uplink and the tunnel leave
	ServiceCIDRs []netip.Prefix   // Services' addresses, in addition to those of ServiceCIDRs
	DirectReturn bool             // other nodes send packets of external clients through the tunnel, with their source
	Masquerade   Masquerade
	Devices      []Device
	NoIPv6       bool // the node's kernel has no IPv6 for new devices: pods get IPv4 addresses alone
	// SCTPUnmasqueraded: what masquerades leaves SCTP as it is, which is a problem of Pods that have ports of it
	SCTPUnmasqueraded bool
	// AllowedSources is what Pods may name in AllowedSourcesAnnotation
	AllowedSources []Grant
}

// Device is a network device of this node.
type Device struct {
	Name     string
	MTU      int
	Prefixes []netip.Prefix // its addresses, each with the length of its link's prefix
}

// Resolver holds what is known of the cluster's nodes, and what it comes to on this one. It is not safe for use by
// several goroutines at once; the parts that it returns are.
type Resolver struct {
	config   Config
	nodes    map[string]*node
	byAge    []*node // all, the oldest first
	services map[string][]netip.Prefix

	stale    bool
	network  *model.Network
	routes   []*model.Route   // sorted by prefix; the slice is not changed later
	decided  []source.Problem // with Nodes
	problems []source.Problem // all
	sources  sources
	sctp     sctp
}

// New returns a Resolver that knows no object yet.
func New(c Config) *Resolver {
	c.Overlay = cmp.Or(c.Overlay, Subnets)
	c.VNI, c.Port = cmp.Or(c.VNI, DefaultVNI), cmp.Or(c.Port, DefaultPort)
	c.Devices = slices.Clone(c.Devices)
	return &Resolver{config: c, nodes: map[string]*node{}, services: map[string][]netip.Prefix{},
		stale: true, sources: sources{requests: map[source.Key]string{}},
		sctp: sctp{pods: map[source.Key]bool{}}}
}

// SetDevices replaces Config.Devices. The next change has what follows from it.
func (r *Resolver) SetDevices(devices []Device) {
	same := func(a, b Device) bool {
		return a.Name == b.Name && a.MTU == b.MTU && slices.Equal(a.Prefixes, b.Prefixes)
	}
	if slices.EqualFunc(r.config.Devices, devices, same) {
		return
	}
	r.config.Devices, r.stale = slices.Clone(devices), true
}

// SetNoIPv6 replaces Config.NoIPv6. The next change has what follows from it.
func (r *Resolver) SetNoIPv6(none bool) {
	r.stale = r.stale || r.config.NoIPv6 != none
	r.config.NoIPv6 = none
}

// Observe makes changes true. What follows from them the next Apply decides.
func (r *Resolver) Observe(changes []source.Change) {
	for _, c := range changes {
		switch c.Key.Kind {
		case source.Node:
			o, _ := c.Object.(*corev1.Node)
			r.applyNode(c.Key.Name, o)
		case source.ServiceCIDR:
			o, _ := c.Object.(*networkingv1.ServiceCIDR)
			r.applyServiceCIDR(c.Key.Name, o)
		case source.Pod:
			o, _ := c.Object.(*corev1.Pod)
			r.applyPod(c.Key, o)
			r.applySCTP(c.Key, o)
		}
	}
}

// Apply makes changes true and returns what changes on the node by them, in a settled order. Kinds that mean nothing to
// the pod network, and changes of Nodes that mean nothing to it, cost next to nothing; others cost what all Nodes do.
func (r *Resolver) Apply(changes []source.Change) model.Change[model.NetworkPart] {
	r.Observe(changes)
	if !r.stale && !r.sources.changed && !r.sctp.changed {
		return model.Change[model.NetworkPart]{}
	}
	var c model.Change[model.NetworkPart]
	if r.stale {
		r.stale = false
		c = r.exchange(r.decide())
	}
	r.problems = slices.Concat(r.decided, r.decideSources(), r.sctpProblems())
	return c
}

func (r *Resolver) applyNode(name string, o *corev1.Node) {
	was := r.nodes[name]
	var now *node
	if o != nil {
		now = readNode(o)
	}
	if was == nil && now == nil || was != nil && now != nil && was.equal(now) {
		return
	}
	r.stale = true
	if was != nil {
		i, _ := slices.BinarySearchFunc(r.byAge, was, byAge)
		r.byAge = slices.Delete(r.byAge, i, i+1)
		delete(r.nodes, name)
	}
	if now != nil {
		i, _ := slices.BinarySearchFunc(r.byAge, now, byAge)
		r.byAge = slices.Insert(r.byAge, i, now)
		r.nodes[name] = now
	}
}

func byAge(a, b *node) int {
	return cmp.Or(cmp.Compare(a.created, b.created), strings.Compare(a.name, b.name))
}

func (r *Resolver) applyServiceCIDR(name string, o *networkingv1.ServiceCIDR) {
	var ranges []netip.Prefix
	if o != nil {
		for _, s := range o.Spec.CIDRs {
			if p, err := netip.ParsePrefix(s); err == nil { // what else it says, resolve/service reports
				ranges = append(ranges, p.Masked())
			}
		}
	}
	if slices.Equal(r.services[name], ranges) {
		return
	}
	r.stale = true
	if r.services[name] = ranges; ranges == nil {
		delete(r.services, name)
	}
}

// exchange replaces what was decided before and returns the difference: the network first, then routes by prefix.
func (r *Resolver) exchange(d decision) (c model.Change[model.NetworkPart]) {
	r.decided = d.problems
	if was := r.network; !was.Equal(d.network) {
		if r.network = d.network; was != nil {
			c.Del = append(c.Del, was)
		}
		if d.network != nil {
			c.Put = append(c.Put, d.network)
		}
	}
	old := r.routes
	for i, now := range d.routes {
		for len(old) > 0 && compareRoutes(old[0], now) < 0 {
			c.Del, old = append(c.Del, old[0]), old[1:]
		}
		switch {
		case len(old) == 0 || old[0].To != now.To:
			c.Put = append(c.Put, now)
			continue
		case *old[0] == *now:
			d.routes[i] = old[0]
		default:
			c.Put, c.Del = append(c.Put, now), append(c.Del, old[0])
		}
		old = old[1:]
	}
	for _, was := range old {
		c.Del = append(c.Del, was)
	}
	r.routes = d.routes
	return c
}

func compareRoutes(a, b *model.Route) int { return a.To.Compare(b.To) }

// Network returns the whole decided state, of the parts that Apply returned.
func (r *Resolver) Network() *model.PodNetwork {
	return &model.PodNetwork{Network: r.network, Routes: slices.Clip(r.routes)}
}

// Problems returns what is wrong now, sorted: at most mostProblems and a count. The slice is not changed later, and is
// the same one until something is decided anew.
func (r *Resolver) Problems() []source.Problem { return r.problems }
