package service

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Config is what a node is told beside the objects.
type Config struct {
	Node string // this node's name
	Objects
	Addresses []netip.Addr // further addresses of this node's interfaces, beside those in the Node object
	Primary   netip.Addr   // this node's primary address of its family, in place of what the Node says; zero: none
	// ClusterCIDRs are sources that count as pods; empty: this Node's spec.podCIDRs; neither: nothing counts as a pod
	ClusterCIDRs []netip.Prefix
	NoPods       bool // nothing counts as a pod, whatever the Node's spec.podCIDRs
	// PodInterfaces are interfaces of the node: what comes in by them counts as pods', in place of all ranges.
	PodInterfaces model.Interfaces
	MasqueradeAll bool // hide every client of a clusterIP
	// ranges, or all (but loopback), primary (the Node's first InternalIP of each family, else ExternalIP), localhost
	// (127.0.0.0/8); empty: all
	NodePortAddresses []string
	// DirectServerReturn has backends' nodes answer clients outside, where they can (model.Frontend.DSR). It takes all
	// Nodes.
	DirectServerReturn bool
	// serve only Services with this service.kubernetes.io/service-proxy-name; "" serves those without the label
	ProxyName string

	Guard
	Limits Limits // what Services may come to; zero fields: DefaultLimits

	Balancing
	Capabilities model.Capabilities
}

// Guard is what Services may not have: as an address of their own, or as an endpoint.
type Guard struct {
	ExternalIPs ExternalIPs // which of spec.externalIPs are served; "": SafeExternalIPs
	// the API server's, beside the endpoints of Service default/kubernetes: no external address captures them
	APIServers  []netip.AddrPort
	OverlayPort uint16 // UDP, of the pod network's overlay at each Node: no endpoint may have it; 0: none
}

// Objects is which of the cluster's objects there are and count.
type Objects struct {
	Nodeless  bool // there may be Services alone: without any Node all is well
	HostPorts bool // those of this node's pods are served; it takes this node's Pods
	// NoLocalHostPorts leaves host ports out at IPv4 loopback addresses, for which the kernel must let packets from there
	// leave.
	NoLocalHostPorts bool
}

// Balancing is how Services that don't choose select an endpoint.
type Balancing struct {
	Scheduler model.Scheduler
	Entries   int // of Maglev's tables (model.Pool.Entries); 0: as Capabilities.TableEntriesPerBackend says
}

// Validate returns what is wrong with the configuration, all of it: field, value, and the way out.
func (c Config) Validate() error {
	var errs []error
	for _, p := range c.read().problems {
		errs = append(errs, fmt.Errorf("%s: %s", p.Field, p.Message))
	}
	return errors.Join(errs...)
}

// settings is a Config as read: what is of no use is left out and named in problems.
type settings struct {
	Config
	// ClusterCIDRs or PodInterfaces were given, or that there are none: spec.podCIDRs don't count
	podsConfigured bool
	ranges         []model.Range // of NodePortAddresses, but for primary
	primary        bool          // NodePortAddresses holds primary
	localhost      bool          // node ports or host ports may be at an IPv4 loopback address
	limits         Limits
	problems       []source.Problem
	instead        []source.Problem // what is done in place of what was asked for: no reason not to begin
}

func (c Config) read() *settings {
	s, rep := &settings{Config: c, podsConfigured: c.NoPods || len(c.ClusterCIDRs) > 0 || c.PodInterfaces.Name != ""},
		&report{}
	if c.Node == "" {
		rep.add("Node", "NodeMissing", "is empty, so no endpoint is local: set it to the name of the Node object")
	}
	s.Addresses = nil
	for i, a := range c.Addresses {
		if !a.IsValid() || a.Is4In6() || a.Zone() != "" || a.IsUnspecified() {
			rep.add(fmt.Sprintf("Addresses[%d]", i), "InvalidAddress",
				"%s is not an interface's address: use plain addresses, IPv4 as 192.0.2.1", a)
			continue
		}
		s.Addresses = append(s.Addresses, a)
	}
	if s.Primary.IsValid() {
		s.Addresses = append(s.Addresses, s.Primary)
	}
	s.ClusterCIDRs = nil
	for i, p := range c.ClusterCIDRs {
		if !p.IsValid() || p.Addr().Is4In6() {
			rep.add(fmt.Sprintf("ClusterCIDRs[%d]", i), "InvalidRange", "%s is not a CIDR: use one such as 10.244.0.0/16", p)
			continue
		}
		s.ClusterCIDRs = append(s.ClusterCIDRs, p.Masked())
	}
	s.ClusterCIDRs = outermost(s.ClusterCIDRs)
	other := &report{}
	s.readPods(other)
	if granted := s.granted(c.Scheduler); granted != c.Scheduler && c.Scheduler != model.Random {
		other.add("Scheduler", "SchedulerNotAvailable", "the data plane %s can't do %s: Services are served by %s; "+
			"choose one of %s, or another data plane",
			c.Capabilities.Name, c.Scheduler, granted, c.Capabilities.Schedulers)
	}
	if err := model.CheckEntries(c.Entries); err != nil {
		rep.add("Entries", "InvalidTable", "%v", err)
		s.Entries = 0
	}
	s.readNodePorts(rep, other)
	s.limits = c.Limits.or(DefaultLimits)
	c.Limits.check(rep)
	switch s.ExternalIPs = cmp.Or(c.ExternalIPs, SafeExternalIPs); s.ExternalIPs {
	case RefuseExternalIPs, SafeExternalIPs, AnyExternalIPs:
	default:
		rep.add("ExternalIPs", "UnknownValue", "%q is not %s, %s or %s: %[3]s is used", c.ExternalIPs,
			RefuseExternalIPs, SafeExternalIPs, AnyExternalIPs)
		s.ExternalIPs = SafeExternalIPs
	}
	s.readDSR(other)
	s.problems, s.instead = rep.list, other.list
	return s
}

// readPods reads what tells pods from other clients, and reports where nothing does.
func (s *settings) readPods(rep *report) {
	if name := s.PodInterfaces.Name; name != "" {
		s.ClusterCIDRs = nil
		if !matchable(name) {
			rep.add("PodInterfaces", "InvalidInterface", "%q is not a valid interface name, so %s; "+
				"use at most 15 letters, digits, dots, dashes and underscores", name, unknownPods)
			s.PodInterfaces = model.Interfaces{}
		}
	} else if s.NoPods {
		rep.add("ClusterCIDRs", PodsUnknown, "detectLocalMode is ClusterCIDR and clusterCIDR is empty, so %s; "+
			"set clusterCIDR or another detectLocalMode", unknownPods)
	}
}

// PodsUnknown is the reason of the problem that nothing tells pods from clients outside the cluster.
const PodsUnknown = "PodsUnknown"

// unknownPods returns what follows where nothing tells pods from other clients.
const unknownPods = "no client is known as a pod: pods can't reach load balancer addresses and node ports with " +
	"externalTrafficPolicy Local where this node has no endpoint, and external clients can't reach ClusterIPs whose " +
	"endpoints' replies don't return through this node"

// matchable reports whether every data plane can match the name, or its prefix, as an interface's.
func matchable(name string) bool {
	return len(name) < 16 && !strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._-@", r)
	})
}

// DSRUnavailable is the reason of the problem that the data plane can't have backends' nodes answer clients.
const DSRUnavailable = "DirectServerReturnNotAvailable"

// readDSR drops a wish that the data plane can't fulfil.
func (s *settings) readDSR(rep *report) {
	if !s.DirectServerReturn || s.Capabilities.NoDirect == "" {
		return
	}
	rep.add("DirectServerReturn", DSRUnavailable, "data plane %s doesn't support direct server return: %s; external "+
		"clients are masqueraded instead; choose another data plane",
		s.Capabilities.Name, s.Capabilities.NoDirect)
	s.DirectServerReturn = false
}

func (s *settings) readNodePorts(rep, other *report) {
	list := s.NodePortAddresses
	if len(list) == 0 {
		list = []string{"all"}
	}
	var named families
	for i, text := range list {
		field := fmt.Sprintf("NodePortAddresses[%d]", i)
		served, of, err := s.readNodePort(text)
		named = families{named.v4 || of.v4, named.v6 || of.v6}
		if err != nil {
			rep.flawed(field, err, "give a range, or one of all, primary and localhost")
		} else if !served {
			other.add(field, "LoopbackNotServed", "%s holds no address that is served: node ports are not served "+
				"at ::1; "+
				"use 127.0.0.0/8, or remove it", text)
		}
	}
	for _, r := range everywhere {
		if !named.has(familyOf(r.First)) { // as with kube-proxy: the list is about the other family
			s.ranges = append(s.ranges, r)
		}
	}
	s.ranges = merge(s.ranges)
	s.localhost = s.HostPorts && !s.NoLocalHostPorts ||
		slices.ContainsFunc(s.ranges, func(r model.Range) bool { return overlap(r, loopback4) })
}

// readNodePort reads one of NodePortAddresses, and reports whether any address that it says is served and of which
// families it says something. What can't be read may be about both.
func (s *settings) readNodePort(text string) (served bool, of families, err *flaw) {
	both := families{true, true}
	switch text {
	case "all":
		s.ranges = append(s.ranges, everywhere...)
		return true, both, nil
	case "primary":
		s.primary = true
		return true, both, nil
	case "localhost":
		s.ranges = append(s.ranges, loopback4)
		return true, both, nil
	}
	p, err := parsePrefix(text)
	if err != nil {
		return false, both, err
	}
	of.add(familyOf(p.Addr()))
	r := rangeOf(p)
	if first := everywhere[2].First; p.Addr().Is6() && r.First.Less(first) { // :: and ::1 never leave this node
		if r.Last.Less(first) {
			return false, of, nil
		}
		r.First = first
	}
	s.ranges = append(s.ranges, r)
	return true, of, nil
}

var (
	loopback4  = rangeOf(netip.MustParsePrefix("127.0.0.0/8"))
	everywhere = []model.Range{ // all but loopback
		{First: netip.MustParseAddr("0.0.0.0"), Last: netip.MustParseAddr("126.255.255.255")},
		{First: netip.MustParseAddr("128.0.0.0"), Last: netip.MustParseAddr("255.255.255.255")},
		{First: netip.MustParseAddr("::2"), Last: netip.MustParseAddr("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")},
	}
)

// overlap reports whether two ranges share an address.
func overlap(a, b model.Range) bool { return a.Contains(b.First) || b.Contains(a.First) }

// refuses returns the reason why the data plane can't serve a frontend, or "".
func (s *settings) refuses(f *model.Frontend) string {
	return s.Capabilities.WhyNot(f)
}
