package service

import (
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// Endpoints that are entries. Traffic to such an endpoint would come to a Service again, in a plane of sockets without
// end. An endpoint that is a ClusterIP, or an entry of its own namespace, is left out. Where it is an external address
// of another namespace, neither takes anything from the other: the endpoint stays, and whoever writes an EndpointSlice
// can't end another tenant's Service.

// isEntry reports whether c, an endpoint of g, is an entry, and notes that.
func (w *decider) isEntry(g *group, c candidate) bool {
	x, ok := w.at(model.Entry{Addr: c.at.Addr(), Port: c.at.Port(), Protocol: g.protocol})
	external := ok
	if ok = ok && (x.entry().via == viaClusterIP || x.by.key.Namespace == w.key.Namespace); !ok &&
		w.nodes[c.at.Addr()] > 0 {
		x, ok = w.at(model.Entry{Addr: familyOf(c.at.Addr()).any(), Port: c.at.Port(), Protocol: g.protocol})
		ok = ok && x.by.key.Namespace == w.key.Namespace
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

// block returns the prefix in which addresses are counted together.
func block(a netip.Addr) netip.Prefix {
	p, _ := a.Prefix(a.BitLen() - 8)
	return p
}

// indexBlocks counts the blocks of a slice's endpoints up or down.
func (r *Resolver) indexBlocks(s *endpointSlice, by int) {
	var last netip.Prefix
	for i := range s.endpoints {
		b := block(s.endpoints[i].addr)
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

// findLoops touches Services with endpoints that may have become entries, or are none any more.
func (r *Resolver) findLoops() {
	addrs := map[netip.Addr]struct{}{}
	for e := range r.changedEntries {
		if !e.AnyAddr() && r.blocks[block(e.Addr)] > 0 {
			addrs[e.Addr] = struct{}{}
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
		return slices.ContainsFunc(e.endpoints, func(p endpoint) bool { _, ok := addrs[p.addr]; return ok })
	})
}

// hasNode reports whether an endpoint of the slice has a Node's address.
func (s *endpointSlice) hasNode(nodes map[netip.Addr]int) bool {
	return slices.ContainsFunc(s.endpoints, func(p endpoint) bool { return nodes[p.addr] > 0 })
}
