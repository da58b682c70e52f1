package sandbox

import (
	"net/netip"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/route"
)

// connect writes a host's routes and neighbours as the other hosts are now.
func (c *Cluster) connect(h *Host) error {
	w := routeSet{h: h, attached: c.cni != nil, routes: map[netip.Prefix]route.Route{},
		neighbours: map[netip.Addr]link.Neighbour{}}
	if h.spec.shared {
		h = c.hosts["node "+h.Node]
		w.h = h
	}
	switch {
	case h.Role != Pod:
		w.wire(c.hosts, c.sorted())
	case !w.attached:
		w.pod()
	}
	for p, via := range h.box.requested {
		w.route(p, via, h.box.eth0)
	}
	return h.box.set(w.routes, w.neighbours)
}

// routeSet collects the routes and neighbours of one host.
type routeSet struct {
	h          *Host
	attached   bool // pods are connected by the CNI plugin, and the agents know the way to them
	routes     map[netip.Prefix]route.Route
	neighbours map[netip.Addr]link.Neighbour
}

// onLink sends a prefix onto the link, in packets of so many bytes at most where mtu isn't 0.
func (w routeSet) onLink(p netip.Prefix, dev, mtu int) {
	if w.route(p, netip.Addr{}, dev); mtu > 0 && w.routes[p] != (route.Route{}) {
		r := w.routes[p]
		r.MTU = uint32(mtu)
		w.routes[p] = r
	}
}

// route sends a prefix to a next hop, or onto the link where via is zero, if the host has an address of that family.
func (w routeSet) route(p netip.Prefix, via netip.Addr, dev int) {
	if src := w.h.source(p.Addr()); src.IsValid() {
		w.routes[p] = route.Route{To: p, Via: via, Dev: dev, Source: src}
	}
}

// neighbour makes an address known on a link, if the host has an address of that family.
func (w routeSet) neighbour(a netip.Addr, mac [6]byte, dev int) {
	if w.h.source(a).IsValid() {
		w.neighbours[a] = link.Neighbour{Dev: dev, Addr: a, MAC: mac}
	}
}

// pod has its node as the gateway to everything.
func (w routeSet) pod() {
	for _, g := range gateways {
		w.neighbour(g, gatewayMAC, w.h.box.eth0)
		w.route(anywhere(g), g, w.h.box.eth0)
	}
}

// wire has the other hosts on the wire as neighbours, pods by their nodes, and everything else by the outside client;
// that itself by the first node.
func (w routeSet) wire(hosts map[string]*Host, sorted []*Host) {
	for _, o := range sorted {
		for _, a := range o.Addresses {
			to := netip.PrefixFrom(a, a.BitLen())
			switch {
			case o == w.h, o.spec.shared, o.Role == Pod && w.h.Role == Node && w.attached:
			case o.Role != Pod:
				w.neighbour(a, o.box.mac, w.h.box.eth0)
				w.onLink(to, w.h.box.eth0, o.mtu)
				w.fallback(o, a)
			case o.Node == w.h.Node:
				w.neighbour(a, o.box.mac, o.port)
				w.onLink(to, o.port, o.mtu)
			default:
				w.route(to, hosts["node "+o.Node].source(a), w.h.box.eth0)
			}
		}
	}
}

// fallback takes address a of host o for the way to everything else, unless there is one already.
func (w routeSet) fallback(o *Host, a netip.Addr) {
	all := anywhere(a)
	if _, have := w.routes[all]; !have && (o.Role == External || w.h.Role == External) {
		w.route(all, a, w.h.box.eth0)
	}
}

// anywhere is the default route's prefix of a's family.
func anywhere(a netip.Addr) netip.Prefix {
	if a.Is4() {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}
