package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// spec is one host as the objects ask for it.
type spec struct {
	host   Host        // Namespace without the cluster's name
	shared bool        // lives in its node's namespace
	ports  []echo.Port // pods: what to serve
	bits   [2]int      // nodes: lengths of their link's prefixes, IPv4's and IPv6's; zero: that of an address alone
}

// prefixes returns the host's addresses with the lengths of its link's prefixes.
func (s spec) prefixes() (l []netip.Prefix) {
	for _, a := range s.host.Addresses {
		bits := s.bits[family(a)]
		l = append(l, netip.PrefixFrom(a, cmp.Or(bits, a.BitLen())))
	}
	return l
}

// family returns 0 for IPv4 and 1 for IPv6.
func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

func (s spec) equal(o spec) bool {
	return s.host.equal(o.host) && s.shared == o.shared && s.bits == o.bits && slices.Equal(s.ports, o.ports)
}

// layout is the hosts that objects ask for by Host.Name, and the addresses that objects speak of.
type layout struct {
	specs map[string]spec
	owner map[netip.Addr]string // of every node's and pod's own address
	inUse map[netip.Addr]string // of every other address in the objects
	errs  []error
}

// newLayout decides what hosts there are to be. The outside client keeps the addresses given, or, with none, gets ones
// that no object has. All that is wrong comes in one error, a line each.
func newLayout(objects []source.Object, external []netip.Addr) (layout, error) {
	l := layout{specs: map[string]spec{}, owner: map[netip.Addr]string{}, inUse: map[netip.Addr]string{}}
	for _, o := range objects {
		switch o := o.(type) {
		case *corev1.Node:
			l.node(o)
		case *corev1.Service:
			l.service(o)
		case *discoveryv1.EndpointSlice:
			l.slice(o)
		}
	}
	for _, o := range objects { // once all nodes are known
		if p, ok := o.(*corev1.Pod); ok {
			l.pod(p)
		}
	}
	l.hostPorts()
	l.external(external)
	return l, errors.Join(l.errs...)
}

func (l *layout) errorf(format string, args ...any) {
	l.errs = append(l.errs, fmt.Errorf(format, args...))
}

// add takes in a host and its addresses.
func (l *layout) add(key source.Key, s spec) {
	if _, twice := l.specs[s.host.Name]; twice {
		l.errorf("%s is there twice", key)
		return
	}
	l.specs[s.host.Name] = s
	for _, a := range s.host.Addresses {
		if s.shared {
			break
		}
		if other, inUse := l.owner[a]; inUse {
			l.errorf("%s has the address %s, which is %s's", key, a, other)
			continue
		}
		l.owner[a] = key.String()
	}
}

// addresses reads the addresses of one object and drops repeated ones.
func (l *layout) addresses(key source.Key, field string, texts []string) (list []netip.Addr) {
	for _, t := range texts {
		a, err := netip.ParseAddr(t)
		a = a.Unmap()
		switch {
		case err != nil:
			l.errorf("%s: %s: %w", key, field, err)
		case a.IsUnspecified(), a.IsLoopback(), a.IsMulticast(), a.IsLinkLocalUnicast(), a.Zone() != "":
			l.errorf("%s: %s: %s can't be the address of a host in a sandbox", key, field, a)
		case !slices.Contains(list, a):
			list = append(list, a)
		}
	}
	return list
}

// node takes a Node with its InternalIPs, then its ExternalIPs.
func (l *layout) node(n *corev1.Node) {
	key := source.KeyOf(n)
	var texts []string
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for _, a := range n.Status.Addresses {
			if a.Type == kind {
				texts = append(texts, a.Address)
			}
		}
	}
	if len(texts) == 0 {
		l.errorf("%s has no address: write an InternalIP into its status.addresses", key)
	}
	l.add(key, spec{host: Host{
		Role: Node, Name: "node " + n.Name, Node: n.Name, Namespace: "node-" + n.Name,
		Addresses: l.addresses(key, "status.addresses", texts),
	}})
}

// pod takes a Pod that runs: one that has a node and isn't over.
func (l *layout) pod(p *corev1.Pod) {
	if p.Spec.NodeName == "" || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return
	}
	key := source.KeyOf(p)
	node, ok := l.specs["node "+p.Spec.NodeName]
	if !ok {
		l.errorf("%s is on Node %s, which is not among the objects", key, p.Spec.NodeName)
		return
	}
	s := spec{
		// A namespace's name has no dot: no two pods share a name here.
		host: Host{
			Role: Pod, Name: "pod " + p.Namespace + "/" + p.Name, Node: p.Spec.NodeName,
			Namespace: "pod-" + p.Namespace + "." + p.Name,
		},
		ports: l.ports(key, p), shared: p.Spec.HostNetwork,
	}
	if s.shared {
		s.host.Addresses = node.host.Addresses
	} else {
		s.host.Addresses = l.podAddresses(key, p, node)
	}
	l.add(key, s)
}

func (l *layout) podAddresses(key source.Key, p *corev1.Pod, node spec) []netip.Addr {
	var texts []string
	for _, ip := range p.Status.PodIPs {
		texts = append(texts, ip.IP)
	}
	if len(texts) == 0 && p.Status.PodIP != "" {
		texts = []string{p.Status.PodIP}
	}
	if len(texts) == 0 {
		l.errorf("%s has no address: write one into its status.podIPs", key)
	}
	list := l.addresses(key, "status.podIPs", texts)
	for _, a := range list {
		if !node.host.source(a).IsValid() {
			l.errorf("%s has the address %s, but its Node %s has none of that family", key, a, p.Spec.NodeName)
		}
	}
	return list
}

// protocols are those that echo serves, by their names in Kubernetes; none is TCP.
var protocols = map[corev1.Protocol]model.Protocol{
	"": model.TCP, corev1.ProtocolTCP: model.TCP, corev1.ProtocolUDP: model.UDP, corev1.ProtocolSCTP: model.SCTP,
}

// ports returns the container ports of a pod, each once.
func (l *layout) ports(key source.Key, p *corev1.Pod) (list []echo.Port) {
	for _, c := range p.Spec.Containers {
		for _, cp := range c.Ports {
			proto, ok := protocols[cp.Protocol]
			if !ok || cp.ContainerPort < 1 || cp.ContainerPort > 65535 {
				l.errorf("%s: container %s: can't serve port %d/%s", key, c.Name, cp.ContainerPort, cp.Protocol)
				continue
			}
			list = append(list, echo.Port{Number: uint16(cp.ContainerPort), Protocol: proto})
		}
	}
	slices.SortFunc(list, func(a, b echo.Port) int {
		return cmp.Or(cmp.Compare(a.Number, b.Number), cmp.Compare(a.Protocol, b.Protocol))
	})
	return slices.Compact(list)
}

// hostPorts finds pods that want the same port of one node.
func (l *layout) hostPorts() {
	type port struct {
		node string
		echo.Port
	}
	owner := map[port]string{}
	for _, name := range slices.Sorted(maps.Keys(l.specs)) {
		s := l.specs[name]
		for _, p := range s.ports {
			if !s.shared {
				break
			}
			at := port{s.host.Node, p}
			if other, inUse := owner[at]; inUse {
				l.errorf("%s and %s both want port %s of node %s", other, name, p, s.host.Node)
			}
			owner[at] = name
		}
	}
}

// service records the addresses of a Service, which no host may have by chance.
func (l *layout) service(s *corev1.Service) {
	texts := slices.Concat([]string{s.Spec.ClusterIP}, s.Spec.ClusterIPs, s.Spec.ExternalIPs)
	for _, i := range s.Status.LoadBalancer.Ingress {
		texts = append(texts, i.IP)
	}
	l.reserve(source.KeyOf(s), texts)
}

func (l *layout) slice(s *discoveryv1.EndpointSlice) {
	for _, e := range s.Endpoints {
		l.reserve(source.KeyOf(s), e.Addresses)
	}
}

func (l *layout) reserve(key source.Key, texts []string) {
	for _, t := range texts {
		if a, err := netip.ParseAddr(t); err == nil { // "None" and "" are no addresses
			l.inUse[a.Unmap()] = key.String()
		}
	}
}

// externalRanges are documentation ranges (RFC 5737, RFC 3849): the outside client gets the first free address of each.
// Two of each family let it be two clients for source ranges and affinity.
var externalRanges = []netip.Prefix{
	netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("198.51.100.0/24"),
	netip.MustParsePrefix("2001:db8::/64"), netip.MustParsePrefix("2001:db8:1::/64"),
}

func (l *layout) external(addrs []netip.Addr) {
	for _, a := range addrs {
		if other := cmp.Or(l.owner[a], l.inUse[a]); other != "" {
			l.errorf("%s has the address %s, which is the outside client's", other, a)
		}
	}
	if addrs == nil {
		for _, r := range externalRanges {
			addrs = append(addrs, l.free(r))
		}
	}
	l.specs["outside"] = spec{host: Host{Role: External, Name: "outside", Namespace: "outside", Addresses: addrs}}
}

// free returns the first address of the range that no object has.
func (l *layout) free(r netip.Prefix) netip.Addr {
	for a := r.Addr().Next(); r.Contains(a); a = a.Next() {
		if l.owner[a] == "" && l.inUse[a] == "" {
			return a
		}
	}
	l.errorf("the objects have every address of %s: none is left for the outside client", r)
	return netip.Addr{}
}

// sorted returns the specs in the order in which to build them: outside, nodes, pods, each by name.
func (l layout) sorted() []spec {
	list := slices.Collect(maps.Values(l.specs))
	slices.SortFunc(list, func(a, b spec) int { return compareHosts(&a.host, &b.host) })
	return list
}
