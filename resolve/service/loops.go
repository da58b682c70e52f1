package service

import (
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// Endpoints that are entries. A host port of this node leads to its pod, which takes the endpoint's place; other nodes
// send packets to the host port. Traffic to any other such endpoint would come to a Service again, in a plane of
// sockets without end. An endpoint that is a ClusterIP, or an entry of its own namespace, is left out. Where it is an
// external address of another namespace, neither takes anything from the other: the endpoint stays, and whoever writes
// an EndpointSlice can't end another tenant's Service.

// isEntry reports whether c, an endpoint of g, is an entry, and notes that.
func (w *decider) isEntry(g *group, c candidate) bool {
	x, ok := w.at(model.Entry{Addr: c.at.Addr(), Port: c.at.Port(), Protocol: g.protocol})
	external := ok
	if ok = ok && (x.entry().via == viaClusterIP || x.by.key.Namespace == w.key.Namespace); !ok &&
		w.nodes[c.at.Addr()] > 0 {
		x, ok = w.at(model.Entry{Addr: familyOf(c.at.Addr()).any(), Port: c.at.Port(), Protocol: g.protocol})
		// a host port is this node's alone
		ok = ok && x.entry().via != viaHostPort && x.by.key.Namespace == w.key.Namespace
	}
	if !ok {
		last := len(w.onward) - 1
		w.onward[last] = w.onward[last] || external
		return false
	}
	rep := report{w.key, w.out.problems}
	if !rep.full() {
		rep.add("", "EndpointIsEntry", "the endpoint %s is an address of %s (%s): it is ignored, because its "+
			"traffic would reach a Service again; "+
			"list the endpoints of that Service instead", c.at, x.by.groups[x.entry().group].label, x.entry().via)
		rep.against(x.by, "the endpoint %s is an address of a Service of another namespace: it is ignored; list "+
			"that Service's endpoints instead", c.at)
	}
	w.out.problems = rep.problems
	return true
}

// throughHostPorts returns the endpoints of g, in place of each that is a host port of this node the pod behind it.
func (w *decider) throughHostPorts(g *group, list []candidate) []candidate {
	some := false
	for i, c := range list {
		if x, ok := w.hostPort(model.Entry{Addr: c.at.Addr(), Port: c.at.Port(), Protocol: g.protocol}); ok {
			pod := *c.endpoint
			list[i] = candidate{x.pod(), &pod}
			what := pod.what.Value()
			what.is |= onSomeNode | local
			pod = newEndpoint(list[i].at.Addr(), what)
			some = true
		}
	}
	if some {
		list = once(list)
	}
	return list
}

// hostPort returns the claim of the host port that serves packets to e on this node, if one does.
func (w *decider) hostPort(e model.Entry) (x claim, ok bool) {
	if !w.HostPorts || !w.owns(e.Addr) {
		return x, false
	}
	if x, ok = w.at(e); !ok && w.hasNodePorts(e.Addr) {
		x, ok = w.at(model.Entry{Addr: familyOf(e.Addr).any(), Port: e.Port, Protocol: e.Protocol})
	}
	return x, ok && x.entry().via == viaHostPort
}

// isOverlay reports whether c, an endpoint of g, is the overlay's port of a node, and reports it. What this node
// translates and masquerades would reach the overlay's end there as this node's own.
func (w *decider) isOverlay(g *group, c candidate) bool {
	if g.protocol != model.UDP || w.OverlayPort == 0 || c.at.Port() != w.OverlayPort || w.nodes[c.at.Addr()] == 0 {
		return false
	}
	rep := report{w.key, w.out.problems}
	rep.add("", "EndpointRefused", "the endpoint %s %s: it gets no traffic; use another port", c.at, overlays)
	w.out.problems = rep.problems
	return true
}

// block returns the prefix in which addresses are counted together.
func block(a netip.Addr) netip.Prefix {
	p, _ := a.Prefix(a.BitLen() - 8)
	return p
}

// indexBlocks counts the blocks of a slice's endpoints up or down.
func (r *Resolver) indexBlocks(s *endpointSlice, by int) {
	var last netip.Prefix
	for i := range s.endpoints {
		b := block(s.endpoints[i].addr())
		if b == last {
			continue
		}
		last = b
		if r.blocks[b] += by; r.blocks[b] == 0 {
			delete(r.blocks, b)
		}
	}
}

// recheck records that an address may be an endpoint that is to be looked at again.
func (r *Resolver) recheck(a netip.Addr) { r.changedEntries[model.Entry{Addr: a}] = struct{}{} }

// entryAddresses returns the addresses of an entry: this node's for one of any address.
func (r *Resolver) entryAddresses(e model.Entry) []netip.Addr {
	if !e.AnyAddr() {
		return []netip.Addr{e.Addr}
	}
	return slices.DeleteFunc(slices.Clone(r.nodeState.model.Addresses),
		func(a netip.Addr) bool { return familyOf(a) != familyOf(e.Addr) })
}

// findLoops touches Services with endpoints that may have become entries, or are none any more, or that lead to pods by
// host ports where that is so.
func (r *Resolver) findLoops() {
	addrs := map[netip.Addr]struct{}{}
	add := func(e model.Entry) {
		for _, a := range r.entryAddresses(e) {
			if r.blocks[block(a)] > 0 {
				addrs[a] = struct{}{}
			}
		}
	}
	for e := range r.changedEntries {
		if !e.AnyAddr() {
			add(e)
		}
	}
	for key := range r.hostPorts.pods {
		if s := r.services[key]; s.hasEndpointAt(addrs) {
			for i := range s.entries {
				add(s.entries[i].Entry)
			}
		}
	}
	if len(addrs) > 0 {
		for _, s := range r.services {
			if !s.stale && s.hasEndpointAt(addrs) {
				r.touch(s, true)
			}
		}
	}
	for n := range r.changedNodePorts {
		for s := range n.services {
			if !s.stale && slices.ContainsFunc(s.slices, func(e *endpointSlice) bool { return e.hasNode(r.nodeIPs) }) {
				r.touch(s, true)
			}
		}
	}
	// made anew: clearing a map that was large once costs as much as it had
	if len(r.changedEntries)+len(r.changedNodePorts) > 0 {
		r.changedEntries, r.changedNodePorts = map[model.Entry]struct{}{}, map[*namespace]struct{}{}
	}
}

// hasEndpointAt reports whether s has an endpoint at one of the addresses.
func (s *service) hasEndpointAt(addrs map[netip.Addr]struct{}) bool {
	return slices.ContainsFunc(s.slices, func(e *endpointSlice) bool {
		return slices.ContainsFunc(e.endpoints, func(p endpoint) bool { _, ok := addrs[p.addr()]; return ok })
	})
}

// hasNode reports whether an endpoint of the slice has a Node's address.
func (s *endpointSlice) hasNode(nodes map[netip.Addr]int) bool {
	return slices.ContainsFunc(s.endpoints, func(p endpoint) bool { return nodes[p.addr()] > 0 })
}
