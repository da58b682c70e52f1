package service

import (
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// decision is what one Service comes to on this node, as if it were alone.
type decision struct {
	pools    []*model.Pool      // scopes for each group; nil where no policy needs the pool
	fronts   []*model.Frontend  // one for each entry
	health   *model.HealthCheck // nil: none
	problems problems
}

// decider decides one Service at a time: a pure function of what the Service declares, its slices and the place. It
// keeps room between uses, no meaning.
type decider struct {
	*nodeState
	*declared
	size
	key source.Key

	at     func(model.Entry) (claim, bool) // who has an entry
	nodes  map[netip.Addr]int              // addresses of Nodes
	strays map[source.Key][]string         // see Resolver
	old    *decision                       // lends its pointers where parts are equal
	out    decision
	scratch
}

// scratch is a decider's memory between uses.
type scratch struct {
	hits       []hit
	candidates []candidate
	backends   []model.Backend
	unselected []model.Backend
	usable     []bool       // by group: some endpoint of the cluster takes traffic
	onward     []bool       // by group: some of its endpoints are entries of others
	matched    []bool       // by group: a port of an EndpointSlice is its port
	near       []bool       // by group: nodes differ in which of its endpoints they use
	counted    []netip.Addr // ready endpoints on this node
}

// ownerFrom returns the owner of the parts of an object.
func ownerFrom(k source.Key) model.Owner {
	return model.Owner{Kind: string(k.Kind), Namespace: k.Namespace, Name: k.Name}
}

// decide returns what s comes to at p.
func (w *decider) decide(p *nodeState, s *service) decision {
	d := s.declared
	w.nodeState, w.key, w.declared, w.size, w.old, w.out = p, s.key, d, s.size, &s.decision, decision{}
	w.usable, w.near, w.counted = w.usable[:0], w.near[:0], w.counted[:0]
	w.onward, w.matched = w.onward[:0], w.matched[:0]
	w.out.pools = make([]*model.Pool, 0, scopes*len(d.groups))
	w.hits = match(w.hits[:0], d, s.slices)
	for i, hits := 0, w.hits; i < len(d.groups); i++ {
		n := 0
		for n < len(hits) && int(hits[n].group) == i {
			n++
		}
		w.matched = append(w.matched, n > 0)
		w.fill(&d.groups[i], hits[:n])
		hits = hits[n:]
	}
	w.out.fronts = make([]*model.Frontend, len(d.entries))
	for i := range d.entries {
		w.out.fronts[i] = w.front(i)
		w.warn(&d.entries[i], w.out.fronts[i])
	}
	w.warnMismatches(s)
	w.check()
	w.nodeState, w.declared, w.old = nil, nil, nil
	return w.out
}

// fill makes the pools of a group from the slice ports that match it.
func (w *decider) fill(g *group, hits []hit) {
	w.onward = append(w.onward, false)
	w.candidates = w.throughHostPorts(g, gather(w.candidates, hits, w.perPool))
	w.candidates = slices.DeleteFunc(w.candidates, func(c candidate) bool { return w.isOverlay(g, c) || w.isEntry(g, c) })
	w.usable = append(w.usable, slices.ContainsFunc(w.candidates, func(c candidate) bool { return c.usable() }))
	w.near = append(w.near, w.spread != anywhere || hinted(w.candidates))
	here := func(e *endpoint) bool { return e.is().has(local) }
	every := func(*endpoint) bool { return true }
	for scope, name := range g.pools {
		var p *model.Pool
		switch {
		case name.name == "":
		case scope == cluster:
			t := topologyFor(w.candidates, w.spread, w.zone)
			p = w.pool(g, name, choose(w.backends, w.candidates, every, t.fits, w.direct))
		default:
			p = w.pool(g, name, choose(w.backends, w.candidates, here, every, w.direct))
		}
		w.out.pools = append(w.out.pools, p)
	}
	for _, c := range w.candidates {
		if w.declared.health != 0 && c.is().has(ready|local) {
			w.counted = append(w.counted, c.addr())
		}
	}
}

// pool returns the old pool if there is an equal one, else a new one. The backends are copied.
func (w *decider) pool(g *group, name poolName, backends []model.Backend) *model.Pool {
	w.backends = backends
	w.unselected = w.unselected[:0]
	if g.protocol != model.TCP {
		w.unselected = unselect(w.unselected, w.candidates, backends, w.direct)
	}
	p := model.Pool{ID: name.id, Name: name.name, Owner: ownerFrom(w.key), Service: g.label, Protocol: g.protocol,
		Affinity: w.affinity, Scheduler: w.scheduler, Ports: w.ports}
	if w.noTable {
		p.Scheduler = w.schedulerWithoutTable(p.Scheduler)
		p.Ports = p.Ports && p.Scheduler.Hashes()
		for i := range backends {
			backends[i].Weight = 0
		}
	} else if p.Scheduler == model.Maglev && len(backends) > 0 {
		p.Entries = w.tableSize(len(backends))
	}
	old := find(w.old.pools, len(w.out.pools), func(o *model.Pool) bool {
		return o != nil && o.Name == p.Name && o.ID == p.ID && o.Affinity == p.Affinity &&
			o.Scheduler == p.Scheduler && o.Ports == p.Ports && o.Entries == p.Entries && slices.Equal(o.Backends, backends) &&
			slices.Equal(o.Unselected, w.unselected)
	})
	if old != nil {
		return old
	}
	p.Backends = append(p.Backends, backends...)
	p.Unselected = append(p.Unselected, w.unselected...)
	return &p
}

// front makes the frontend of an entry, or returns the old one if there is an equal one.
func (w *decider) front(i int) *model.Frontend {
	e := &w.entries[i]
	f := model.Frontend{Owner: ownerFrom(w.key), Service: w.groups[e.group].label, Via: e.via.String(), Entry: e.Entry,
		Masquerade: w.masquerade(e), Sources: w.allowedSources(e)}
	f.DSR = w.dsr(e) & f.Masquerade
	f.Onward, f.Remote, f.Shared = w.onward[e.group], w.remote(e), e.via == viaClusterIP && w.owns(e.Addr)
	f.Internal, f.External = w.targets(e)
	if old := find(w.old.fronts, i, func(o *model.Frontend) bool { return equalFrontend(o, &f) }); old != nil {
		return old
	}
	return &f
}

// targets returns the two sides of an entry. internalTrafficPolicy Local holds for everybody who uses a clusterIP;
// externalTrafficPolicy Local for clients outside only, since others would not come by a load balancer.
func (w *decider) targets(e *entry) (fromInternal, fromExternal model.Target) {
	whole := model.Target{Pool: w.out.pools[e.group*scopes+cluster], Empty: model.Reject}
	if !w.isLocal(e) {
		return whole, whole
	}
	here := model.Target{Pool: w.out.pools[e.group*scopes+onlyLocal], Empty: model.Reject}
	if w.usable[e.group] {
		here.Empty = model.Drop // the client may come to another node instead
	}
	if e.via == viaClusterIP {
		return here, here
	}
	return whole, here
}

// masquerade returns which clients' addresses become this node's, so that answers come back through it. Those to pods
// of this node do anyway: policies at the endpoint's node see the pod, where kube-proxy shows them this node.
func (w *decider) masquerade(e *entry) model.Origins {
	switch {
	case w.Capabilities.MasqueradesAll:
		return model.AllOrigins
	case w.MasqueradeAll && (e.via == viaClusterIP || !w.external && e.via != viaHostPort):
		return model.AllOrigins
	case e.via == viaClusterIP && w.podsIn.has(familyOf(e.Addr)):
		return model.OriginsOf(model.FromNode, model.FromExternal)
	case e.via == viaClusterIP:
		return 0
	case w.external, e.via == viaHostPort: // the endpoint is on this node
		return model.OriginsOf(model.FromNode)
	case !w.podsIn.has(familyOf(e.Addr)), e.via == viaNodePort && !w.podsHere.has(familyOf(e.Addr)):
		return model.AllOrigins // other nodes' pods may come, and have their answers past this one
	}
	return model.OriginsOf(model.FromNode, model.FromExternal)
}

// dsr returns which clients the nodes of endpoints may answer themselves: those outside, by TCP and UDP. Each node must
// come to the same endpoints, or it would not know that it is asked for its own.
func (w *decider) dsr(e *entry) model.Origins {
	if !w.DirectServerReturn || e.via == viaClusterIP || e.Protocol == model.SCTP || w.near[e.group] {
		return 0
	}
	return model.OriginsOf(model.FromExternal)
}

// direct reports whether the node of c, if it is another, may answer clients itself. At a Node's address there may be a
// pod's host port, which that node alone knows: there the pod is the endpoint.
func (w *decider) direct(c candidate) bool {
	return w.DirectServerReturn && !(w.HostPorts && w.nodes[c.at.Addr()] > 0)
}

// remote reports whether this node serves an entry at other nodes' addresses, too. With policy Local the other node
// does, by its own endpoints; with masqueradeAll, replies may not return through this one.
func (w *decider) remote(e *entry) bool {
	return e.via == viaNodePort && !w.external && !w.MasqueradeAll && w.Capabilities.NoRemote == ""
}

// allowedSources returns the sources that an entry lets in: nil for all, an empty slice for none. Where this node is
// let in, the entry's own address is too: an ingress address is often also an address of the node, and then its
// packets' source.
func (w *decider) allowedSources(e *entry) []netip.Prefix {
	if e.via != viaLoadBalancer || !w.restricted.has(familyOf(e.Addr)) {
		return nil
	}
	list := make([]netip.Prefix, 0, len(w.sources)+1)
	for _, p := range w.sources {
		if familyOf(p.Addr()) == familyOf(e.Addr) {
			list = append(list, p)
		}
	}
	if w.ownsSome(list) {
		list = outermost(append(list, hostPrefix(e.Addr)))
	}
	return list
}

// check makes the health check. Endpoints count once, whatever their ports; of two families the larger number counts.
func (w *decider) check() {
	if w.declared.health == 0 {
		return
	}
	slices.SortFunc(w.counted, netip.Addr.Compare)
	w.counted = slices.Compact(w.counted)
	v6, _ := slices.BinarySearchFunc(w.counted, ipv6.any(), netip.Addr.Compare)
	local := max(v6, len(w.counted)-v6)
	h := model.HealthCheck{Owner: ownerFrom(w.key), Port: w.declared.health, Local: local, Addresses: w.healthAt}
	if old := w.old.health; old != nil && old.Owner == h.Owner && old.Port == h.Port && old.Local == h.Local &&
		(old.Addresses == nil) == (h.Addresses == nil) && slices.Equal(old.Addresses, h.Addresses) {
		w.out.health = old
	} else {
		w.out.health = &h
	}
}

// warn records a frontend that the data plane can't serve, and an external address that is this node's own: it is
// served, as kube-proxy does.
func (w *decider) warn(e *entry, f *model.Frontend) {
	rep := report{w.key, w.out.problems}
	if why := w.refuses(f); why != "" {
		rep.addAt(f.Entry, e.field(), "NotServed", "%s is not served: data plane %s doesn't support it: %s; choose another "+
			"data plane", f.Entry, w.Capabilities.Name, why)
	} else if e.via == viaExternalIP && w.owns(e.Addr) {
		rep.add(e.field(), "NodeAddress", "%s is this node's own address: it is served, so a program that listens there on "+
			"port %d/%s is unreachable; use an address of no node, or a node port",
			e.Addr, e.Port, e.Protocol)
	}
	w.out.problems = rep.problems
}

// find returns the part of list that is the one: looks at index i first, where it nearly always is. Zero for none.
func find[P any](list []P, i int, is func(P) bool) (none P) {
	if i < len(list) && is(list[i]) {
		return list[i]
	}
	if at := slices.IndexFunc(list, is); at >= 0 {
		return list[at]
	}
	return none
}

func equalFrontend(a, b *model.Frontend) bool {
	return a.Owner == b.Owner && a.Service == b.Service && a.Via == b.Via && a.Entry == b.Entry &&
		a.Internal == b.Internal && a.External == b.External &&
		a.Masquerade == b.Masquerade && a.DSR == b.DSR &&
		a.Onward == b.Onward && a.Remote == b.Remote && a.Shared == b.Shared &&
		(a.Sources == nil) == (b.Sources == nil) && slices.Equal(a.Sources, b.Sources)
}
