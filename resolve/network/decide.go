package network

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// decision is what all that is known comes to.
type decision struct {
	network  *model.Network
	routes   []*model.Route // sorted by prefix
	problems []source.Problem
}

// mostProblems is how many problems are told; others are counted.
const mostProblems = 100

// add records a problem of a Node.
func (d *decision) add(n source.Key, field, reason, format string, args ...any) {
	d.problems = append(d.problems, source.Problem{Object: n, Field: field, Reason: reason,
		Message: fmt.Sprintf(format, args...)})
}

// decide decides everything anew.
func (r *Resolver) decide() (d decision) {
	s := survey{known: r, decision: &d, void: map[netip.Addr]bool{},
		tunneled: map[*node][2]*model.Route{}}
	own := r.nodes[r.config.Node]
	if own == nil {
		if len(r.nodes) > 0 {
			d.add(source.Key{Kind: source.Node, Name: r.config.Node}, "", "NodeUnknown", "this Node isn't there, so that it "+
				"has no pod network; register it, or set the node's name")
		}
		return d
	}
	ranges := s.supported(s.accept(), own)
	if !s.findUplinks(own) {
		d.finish()
		return d
	}
	d.network = s.decideNetwork(own, ranges)
	d.routes = make([]*model.Route, 0, len(ranges))
	for _, c := range ranges {
		if c.node != own {
			s.decideRoute(c)
		}
	}
	s.decideNodeRoutes(own)
	for _, n := range r.byAge {
		d.problems = append(d.problems, n.faulty...)
		if len(n.ranges)+len(n.faulty) == 0 {
			d.add(n.key(), "spec.podCIDRs", "NoPodCIDRs", "is empty, so that pods on it get no address and can't be reached; "+
				"have the controller manager assign them (--allocate-node-cidrs), or set it")
		}
	}
	d.finish()
	return d
}

// finish sorts the problems and counts those beyond the most.
func (d *decision) finish() {
	slices.SortFunc(d.problems, func(a, b source.Problem) int {
		return cmp.Or(strings.Compare(a.Object.Name, b.Object.Name), strings.Compare(a.Field, b.Field),
			strings.Compare(a.Reason, b.Reason), strings.Compare(a.Message, b.Message))
	})
	if more := len(d.problems) - mostProblems; more > 0 {
		d.problems = append(d.problems[:mostProblems:mostProblems], source.Problem{Reason: "MoreProblems",
			Message: fmt.Sprintf("%d more problems of Nodes; correct those that are named first", more)})
	}
}

// supported returns the claims whose family the node's kernel has. Those of its own that are left out are problems.
func (s *survey) supported(claims []claim, own *node) []claim {
	if !s.known.config.NoIPv6 {
		return claims
	}
	return slices.DeleteFunc(claims, func(c claim) bool {
		six := c.prefix.Addr().Is6()
		if six && c.node == own {
			s.add(own.key(), fmt.Sprintf("spec.podCIDRs[%d]", c.index), "IPv6Off", "no pod gets an address of %s, and pods "+
				"reach no IPv6 address: IPv6 is off in this node's kernel; set net.ipv6.conf.all.disable_ipv6 to 0, or "+
				"remove the range", c.prefix)
		}
		return six
	})
}

// survey is what one decision finds out.
type survey struct {
	known *Resolver
	*decision
	void     map[netip.Addr]bool       // addresses of Nodes that don't count
	uplinks  [2]uplink                 // IPv4's, IPv6's
	local    netip.Addr                // outer source of the tunnel
	ends     map[[6]byte]netip.Addr    // outer addresses by the MACs of their ends
	tunneled map[*node][2]*model.Route // one to pods of each node behind the tunnel, by family
	reserved []netip.Prefix            // Services' ranges
}

// uplink is the device that other nodes are behind, in one family.
type uplink struct {
	device   *Device // nil: none
	internal netip.Addr
}

func index(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// findUplinks finds the devices of our InternalIPs, and reports whether there is one.
func (s *survey) findUplinks(own *node) bool {
	for _, a := range own.internal {
		if i := index(a); s.uplinks[i].device == nil {
			if device := s.deviceOf(a); device != nil {
				s.uplinks[i] = uplink{device, a}
				if !s.local.IsValid() {
					s.local = a
				}
			}
		}
	}
	if s.local.IsValid() {
		return true
	}
	if len(own.internal) == 0 {
		s.add(own.key(), "status.addresses", "NoInternalIP", "has no InternalIP, so that this node has no pod network; "+
			"start the kubelet with --node-ip")
		return false
	}
	what := "no device of this node has one of the InternalIPs " + fmt.Sprint(own.internal)
	if s.known.config.Uplink != "" {
		what = fmt.Sprintf("this node has no device %s", s.known.config.Uplink)
	}
	s.add(own.key(), "status.addresses", "NoUplink", "%s, so that it has no pod network; correct --node-ip of the "+
		"kubelet, "+
		"or set the uplink", what)
	return false
}

// deviceOf returns the device that other nodes are behind if a is ours.
func (s *survey) deviceOf(a netip.Addr) *Device {
	i := slices.IndexFunc(s.known.config.Devices, func(d Device) bool {
		return s.known.config.Uplink == d.Name || s.known.config.Uplink == "" &&
			slices.ContainsFunc(d.Prefixes, func(p netip.Prefix) bool { return p.Addr() == a })
	})
	if i < 0 {
		return nil
	}
	return &s.known.config.Devices[i]
}

// overhead returns how many bytes of each packet the tunnel takes: of IPIP the outer IP header, of VXLAN outer IP and
// UDP headers, its own, and the inner link-layer header.
func overhead(kind model.TunnelKind, outer netip.Addr) int {
	switch {
	case kind == model.IPIP:
		return 20
	case outer.Is4():
		return 20 + 8 + 8 + 14
	}
	return 40 + 8 + 8 + 14
}

// minimumMTU is IPv6's (RFC 8200).
const minimumMTU = 1280

func (s *survey) decideNetwork(own *node, ranges []claim) *model.Network {
	n := &model.Network{Node: own.name, Device: s.known.config.Device, Masquerade: s.decideMasquerade(own)}
	six := false
	for _, c := range ranges {
		if c.node == own {
			n.Ranges = append(n.Ranges, c.prefix)
			six = six || c.prefix.Addr().Is6()
		}
	}
	for _, u := range s.uplinks {
		if u.device != nil && (n.MTU == 0 || u.device.MTU < n.MTU) {
			n.MTU = u.device.MTU
		}
	}
	if n.Device.IPVLAN() {
		n.Child = s.decideChild(own, n)
	}
	if s.known.config.Overlay != Never {
		n.MTU -= overhead(s.known.config.Tunnel, s.local)
		n.Tunnel = s.decideTunnel(own, n)
	}
	if fits := n.MTU; s.known.config.MTU > 0 {
		if n.MTU = s.known.config.MTU; n.MTU > fits {
			s.add(own.key(), "", "MTUTooLarge", "packets of pods may have %d bytes, but %d fit between nodes: longer ones are "+
				"lost or cut; set the MTU to at most that", n.MTU, fits)
		}
	}
	if six && n.MTU < minimumMTU {
		s.add(own.key(), "", "MTUTooSmall", "%d bytes of a packet fit between nodes, and IPv6 needs %d: pods get that, and "+
			"longer packets are lost; use an uplink with a larger MTU", n.MTU, minimumMTU)
		n.MTU = minimumMTU
	}
	return n
}

// decideChild returns this node's own child of the uplink.
func (s *survey) decideChild(own *node, n *model.Network) *model.Child {
	uplink := s.uplinks[index(s.local)].device.Name
	for _, u := range s.uplinks {
		if u.device != nil && u.device.Name != uplink {
			s.add(own.key(), "status.addresses", "SeveralUplinks", "InternalIPs %s and %s are on devices %s and %s, and pods "+
				"are connected by a child of the first alone: other hosts can't reach their addresses of the other family; set "+
				"network.device to veth", s.local, u.internal, uplink, u.device.Name)
		}
	}
	c := &model.Child{Uplink: uplink}
	for _, p := range n.Ranges {
		c.Own = append(c.Own, ownAddress(p))
	}
	return c
}

// decideTunnel returns this node's end of the overlay, nil where it can't have one.
func (s *survey) decideTunnel(own *node, n *model.Network) *model.Tunnel {
	ipip := s.known.config.Tunnel == model.IPIP
	if ipip {
		if s.uplinks[0].device == nil {
			s.add(own.key(), "status.addresses", "IPIPNeedsIPv4", "has no IPv4 InternalIP on a device of this node, and IPIP "+
				"carries IPv4 inside IPv4: pods of nodes on other links can't be reached; set network.encapsulation to VXLAN on "+
				"all nodes")
			return nil
		}
		s.local = s.uplinks[0].internal
	}
	t := &model.Tunnel{Kind: s.known.config.Tunnel, Local: s.local, Uplink: s.uplinks[index(s.local)].device.Name,
		MTU: n.MTU, AnySource: s.known.config.DirectReturn}
	if !ipip {
		t.VNI, t.Port, t.MAC = s.known.config.VNI, s.known.config.Port, MAC(s.local)
	}
	for _, p := range n.Ranges {
		if !ipip || p.Addr().Is4() {
			t.Own = append(t.Own, ownAddress(p))
		}
	}
	s.ends = map[[6]byte]netip.Addr{t.MAC: s.local}
	return t
}

// decideRoute decides how packets get to a range of another node.
func (s *survey) decideRoute(c claim) {
	r := &model.Route{Node: c.node.name, To: c.prefix, Hop: model.External}
	family := c.prefix.Addr()
	via, up := s.addressOf(c.node, family), s.uplinks[index(family)]
	s.decideEnd(c, r)
	direct := via.IsValid() && up.device != nil && via != up.internal &&
		slices.ContainsFunc(up.device.Prefixes, func(p netip.Prefix) bool { return p.Contains(via) })
	switch {
	case direct && s.known.config.Overlay != Always:
		r.Hop, r.Via, r.Device, r.Source = model.Direct, via, up.device.Name, up.internal
	case s.known.config.Overlay != Never:
		r.OnLink = direct
		if !s.through(c, r) { // by the default route, its packets would get to others
			r = &model.Route{Node: c.node.name, To: c.prefix, Hop: model.Unreachable, End: r.End,
				Internal: r.Internal}
		}
	}
	s.routes = append(s.routes, r)
	if r.Hop == model.Tunneled {
		of := s.tunneled[c.node]
		of[index(family)] = cmp.Or(of[index(family)], r)
		s.tunneled[c.node] = of
	}
}

// decideNodeRoutes decides how this node's pods get to the own addresses of nodes behind the tunnel, in the families in
// which their pods are: through it, so that these nodes see the pod. Of an address that several Nodes have, the oldest
// counts.
func (s *survey) decideNodeRoutes(own *node) {
	known, reserved := map[netip.Addr]bool{}, slices.Concat(local, s.serviceRanges())
	for _, a := range own.all {
		known[a] = true
	}
	var families [2]bool
	for _, n := range s.known.byAge {
		for _, a := range n.internal {
			pods, to := s.tunneled[n][index(a)], netip.PrefixFrom(a, a.BitLen())
			if pods != nil && !known[a] && !s.void[a] && !slices.ContainsFunc(reserved, to.Overlaps) {
				s.routes = append(s.routes, &model.Route{Node: n.name, To: to, Via: pods.Via, Gateway: pods.Gateway,
					MAC: pods.MAC, Hop: model.Tunneled, Tunnel: pods.Tunnel, End: pods.End, PodsOnly: true})
				families[index(a)] = true
			}
			known[a] = true
		}
	}
	slices.SortFunc(s.routes, compareRoutes)
	if m := s.network.Masquerade; m != nil { // an address is a destination once
		m.Except = slices.DeleteFunc(m.Except, func(p netip.Prefix) bool {
			_, found := slices.BinarySearchFunc(s.routes, p, func(r *model.Route, p netip.Prefix) int { return r.To.Compare(p) })
			return found
		})
	}
	for _, p := range s.network.Ranges {
		if families[index(p.Addr())] {
			s.network.Tunnel.Pods = append(s.network.Tunnel.Pods, p)
		}
	}
}

// decideEnd decides which outer and inner sources another node's packets have that come through the tunnel: also those
// of a node that is reached directly, which may send by it while the overlay is being changed.
func (s *survey) decideEnd(c claim, r *model.Route) {
	if s.network.Tunnel == nil {
		return
	}
	if end := s.addressOf(c.node, s.local); end.IsValid() && end != s.local {
		r.End = end
		if a := s.addressOf(c.node, c.prefix.Addr()); a != end {
			r.Internal = a
		}
	}
}

// through leads a route through the tunnel, and reports whether that can be.
func (s *survey) through(c claim, r *model.Route) bool {
	t := s.network.Tunnel
	if t == nil {
		return false
	}
	if t.Kind == model.IPIP && c.prefix.Addr().Is6() {
		s.add(c.node.key(), fmt.Sprintf("spec.podCIDRs[%d]", c.index), "IPIPCarriesIPv4", "%s can't be reached from node "+
			"%s: IPIP carries IPv4 alone; set network.encapsulation to VXLAN on all nodes", c.prefix, s.known.config.Node)
		return false
	}
	via := s.addressOf(c.node, s.local)
	if !via.IsValid() || via == s.local {
		s.add(c.node.key(), "status.addresses", "NoInternalIP", "has no %s InternalIP that others don't have: its pods %s "+
			"can't be reached from node %s; start its kubelet with --node-ip", familyOf(s.local), c.prefix, s.known.config.Node)
		return false
	}
	r.Hop, r.Via, r.Tunnel = model.Tunneled, via, t.Kind
	r.Source = s.sourceOf(t, c.prefix.Addr())
	if t.Kind == model.IPIP {
		return true
	}
	r.MAC = MAC(via)
	r.Gateway = gateway(c.prefix, r.MAC)
	if other, used := s.ends[r.MAC]; used && other != via {
		s.add(c.node.key(), "status.addresses", "AddressHash", "%s has the same hash as %s, so that its pods %s can't be "+
			"reached from node %s; change one of the two addresses", via, other, c.prefix, s.known.config.Node)
		return false
	}
	s.ends[r.MAC] = via
	return true
}

// sourceOf returns the source of what this node itself sends through the tunnel to addresses of a's family. It is the
// InternalIP, by which policies know the node and to which pods there reply through the tunnel, or, where no device has
// that, the node's own address in a range of pods.
func (s *survey) sourceOf(t *model.Tunnel, a netip.Addr) netip.Addr {
	internal := s.uplinks[index(a)].internal
	isInternal := func(p netip.Prefix) bool { return p.Addr() == internal }
	if slices.ContainsFunc(s.known.config.Devices, func(d Device) bool {
		return slices.ContainsFunc(d.Prefixes, isInternal)
	}) {
		return internal
	}
	for _, own := range t.Own {
		if own.Is4() == a.Is4() {
			return own
		}
	}
	return netip.Addr{}
}

// addressOf returns a node's first InternalIP of a's family that counts.
func (s *survey) addressOf(n *node, a netip.Addr) netip.Addr {
	for _, b := range n.internal {
		if a.Is4() == b.Is4() && !s.void[b] {
			return b
		}
	}
	return netip.Addr{}
}
