package service

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// ExternalIPs returns which of spec.externalIPs are served (CVE-2020-8554: whoever may write a Service may write any
// address there, and so would get traffic that is meant for others).
type ExternalIPs string

// The choices.
const (
	RefuseExternalIPs ExternalIPs = "Refuse" // none
	// those that are not a pod's, another Service's ClusterIP or the API server; the default
	SafeExternalIPs ExternalIPs = "Safe"
	AnyExternalIPs  ExternalIPs = "Any" // all but the API server, as kube-proxy
)

// apiServer names the Service of the API server: its endpoints are the API server's addresses.
// Tenants can't write into its namespace.
var apiServer = source.Key{Kind: source.Service, Namespace: corev1.NamespaceDefault, Name: "kubernetes"}

// guarded reports whether a frontend of that kind may be at an address that is not the Service's to have.
func (v via) guarded() bool { return v == viaExternalIP || v == viaLoadBalancer || v == viaHostPort }

// guard finds which of s's entries may not be served since they would capture what is meant for others, and has s claim
// the others alone.
func (r *Resolver) guard(s *service) {
	was := s.refused
	s.refused = r.rejections(s)
	for i := range s.entries {
		switch before, now := was[i], s.refused[i]; {
		case before == now:
			continue
		case before == "":
			r.moveEntry(s, i, false)
		case now == "":
			r.moveEntry(s, i, true)
		}
		r.touch(s, false)
	}
}

// rejections returns why entries of s are refused, by index; nil where none is.
func (r *Resolver) rejections(s *service) (refused map[int]string) {
	for i := range s.entries {
		e := &s.entries[i]
		if reason := r.captures(s, e); reason != "" {
			if refused == nil {
				refused = map[int]string{}
			}
			refused[i] = reason
		}
	}
	return refused
}

// captures returns why an entry of s is refused, or "".
func (r *Resolver) captures(s *service, e *entry) string {
	if r.isOverlay(e.Entry) {
		return overlays
	}
	if !e.via.guarded() {
		return ""
	}
	if _, api := r.api[netip.AddrPortFrom(e.Addr, e.Port)]; api && e.Protocol == model.TCP {
		return "is the API server's"
	}
	if e.via == viaHostPort {
		return r.capturesAPI(e)
	}
	another := func(o *service) bool { return o != s }
	if e.via == viaLoadBalancer || r.set.ExternalIPs == SafeExternalIPs {
		if slices.ContainsFunc(r.clusterIPs[e.Addr], another) {
			return "is the ClusterIP of another Service"
		}
	}
	if e.via == viaExternalIP && r.set.ExternalIPs == SafeExternalIPs && r.isPod(e.Addr) {
		return "is in a range of pods"
	}
	return ""
}

// overlays is why an entry or an endpoint at the overlay's port of a node is refused.
const overlays = "is the port of the pod network's overlay at a node"

// isOverlay reports whether an entry would take packets of the overlay from a node: those at a port of every address of
// this one, or at an address of any.
func (r *Resolver) isOverlay(e model.Entry) bool {
	return e.Protocol == model.UDP && e.Port == r.set.OverlayPort && e.Port != 0 &&
		(e.AnyAddr() || r.nodeIPs[e.Addr] > 0 || r.nodeState.owns(e.Addr))
}

// guardAt guards the Services that have entries at an address of their own choice.
func (r *Resolver) guardAt(a netip.Addr) {
	for s := range r.external[a] {
		r.guard(s)
	}
}

// capturesAPI returns why a host port of every address of this node is refused, or "".
func (r *Resolver) capturesAPI(e *entry) string {
	for a := range r.api {
		if e.AnyAddr() && a.Port() == e.Port && e.Protocol == model.TCP && familyOf(a.Addr()) == familyOf(e.Addr) &&
			r.nodeState.owns(a.Addr()) {
			return fmt.Sprintf("is the API server's at %s", a)
		}
	}
	return ""
}

// isPod reports whether a is in a range of pods of any node.
func (r *Resolver) isPod(a netip.Addr) bool {
	i, found := slices.BinarySearchFunc(r.podRanges, a,
		func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
	return found || i > 0 && r.podRanges[i-1].Contains(a)
}

// rejection reports an entry that is refused by the guard.
func (r *Resolver) rejection(s *service, i int, rep *report) {
	e := &s.entries[i]
	out := "use another address"
	if s.refused[i] == overlays {
		out = "use another port"
	} else if e.via == viaExternalIP && s.refused[i] != "is the API server's" {
		out += fmt.Sprintf(", or set externalIPs to %s", AnyExternalIPs)
	}
	rep.addAt(e.Entry, e.field(), "AddressRefused", "%s %s: it is not served, so that its traffic reaches its owner; "+
		"%s", e.Entry, s.refused[i], out)
}

// indexAddresses records, or forgets, at which addresses s has ClusterIPs and guarded entries, and guards those who are
// concerned by it.
func (r *Resolver) indexAddresses(s *service, add bool) {
	var last ingressAddress
	for i := range s.entries {
		e := &s.entries[i]
		if w := (ingressAddress{addr: e.Addr, via: e.via}); w == last || e.Addr.IsUnspecified() {
			continue
		} else {
			last = w
		}
		if e.via != viaClusterIP {
			r.indexExternal(s, e.Addr, add)
			continue
		}
		r.changedClusterIPs[e.Addr] = struct{}{}
		if add {
			r.clusterIPs[e.Addr] = append(r.clusterIPs[e.Addr], s)
		} else if l := without(r.clusterIPs[e.Addr], s); len(l) > 0 {
			r.clusterIPs[e.Addr] = l
		} else {
			delete(r.clusterIPs, e.Addr)
		}
		for other := range r.external[e.Addr] {
			if other != s {
				r.guard(other)
			}
		}
	}
}

func (r *Resolver) indexExternal(s *service, a netip.Addr, add bool) {
	at := r.external[a]
	if !add {
		if delete(at, s); len(at) == 0 {
			delete(r.external, a)
		}
		return
	}
	if at == nil {
		at = map[*service]struct{}{}
		r.external[a] = at
	}
	at[s] = struct{}{}
}

// guardAll guards every Service that has entries at addresses of its own choice.
func (r *Resolver) guardAll() {
	seen := map[*service]bool{}
	for _, at := range r.external {
		for s := range at {
			if !seen[s] {
				seen[s] = true
				r.guard(s)
			}
		}
	}
}

// updateAPIServers takes the API server's addresses from its Service's slices, beside those of the configuration.
func (r *Resolver) updateAPIServers() {
	r.api = map[netip.AddrPort]struct{}{}
	for _, a := range r.set.APIServers {
		r.api[a] = struct{}{}
	}
	if s := r.services[apiServer]; s != nil {
		for _, e := range s.slices {
			for _, p := range e.ports {
				for i := range e.endpoints {
					if p.protocol == model.TCP {
						r.api[netip.AddrPortFrom(e.endpoints[i].addr(), p.number)] = struct{}{}
					}
				}
			}
		}
	}
	r.guardAll()
}

// updatePodRanges takes the ranges of pods from the configuration and from all Nodes.
func (r *Resolver) updatePodRanges() {
	ranges := slices.Clone(r.set.ClusterCIDRs)
	for _, n := range r.nodes {
		ranges = append(ranges, n.pods...)
	}
	if ranges = outermost(ranges); slices.Equal(ranges, r.podRanges) {
		return
	}
	r.podRanges = ranges
	r.guardAll()
}
