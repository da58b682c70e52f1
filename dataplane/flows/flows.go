// Package flows is the data plane that cuts stale flows: connections of UDP and SCTP that the kernel tracks to an
// endpoint which serves their frontend's port no more, of a client that is no longer allowed, or to none from before
// there was a frontend; and to another node's node port, where that node translates them from now on, or this one
// does. TCP ends by itself: it is kept (keep.go) where a switch of data planes would end it. Only a connection that is
// still opening, and was not translated, is cut when its frontend comes: the kernel would send each further SYN from
// that port where it sent the first, for two minutes.
//
// What traffic writes into the kernel is no fact; which backends an entry's flows may have is. A fact that becomes true
// cuts the entry's other flows, one that becomes untrue those that it allowed. It is told after the service data plane
// has the change, else a client could come back to the old backend in between.
package flows

import (
	"context"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// Key is the entry that flows go to, or, without a port, another node's address at which node ports are served.
type Key model.Entry

// Rank implements dataplane.Key: entries don't depend on each other, but on nodes' addresses.
func (k Key) Rank() int {
	if k.Port == 0 {
		return 0
	}
	return 1
}

// Allowed is the frontend that says which flows its entry may have; nil for TCP, whose flows end by themselves.
type Allowed struct{ *model.Frontend }

// has reports whether a flow may stay with its endpoint: the client is allowed, and the endpoint serves.
func (a Allowed) has(f conntrack.Flow) bool {
	allowed := a.Sources == nil ||
		slices.ContainsFunc(a.Sources, func(r netip.Prefix) bool { return r.Contains(f.Source.Addr()) })
	return allowed && (a.Internal.Pool.Serves(f.ReplySource) || a.External.Pool.Serves(f.ReplySource))
}

// Fact returns which backends an entry's flows may have.
type Fact = dataplane.Fact[Key, Allowed]

// Plane implements dataplane.Plane[model.ServicePart, Key, Allowed].
type Plane struct {
	conn   *conntrack.Conn
	remote map[netip.Addr]bool // other nodes' addresses at which node ports are served
	ports  map[Key]Allowed     // of node ports
}

var _ dataplane.Plane[model.ServicePart, Key, Allowed] = (*Plane)(nil)

// New opens the plane of the calling thread's network namespace.
func New() (*Plane, error) {
	conn, err := conntrack.Open()
	if err != nil {
		return nil, err
	}
	return &Plane{conn, map[netip.Addr]bool{}, map[Key]Allowed{}}, nil
}

// Close returns the plane's sockets back.
func (p *Plane) Close() error { return p.conn.Close() }

// Invalid returns how many packets connection tracking has called invalid.
func (p *Plane) Invalid() (uint64, error) { return p.conn.Invalid() }

// Render implements dataplane.Plane.
func (p *Plane) Render(part model.ServicePart) []Fact {
	if n, ok := part.(*model.ServiceNode); ok {
		var facts []Fact
		for _, a := range n.RemoteNodePorts {
			facts = append(facts, Fact{Key: Key{Addr: a}})
		}
		return facts
	}
	f, ok := part.(*model.Frontend)
	if !ok {
		return nil
	}
	if f.Entry.Protocol == model.TCP {
		return []Fact{{Key: Key(f.Entry)}}
	}
	return []Fact{{Key: Key(f.Entry), Value: Allowed{f}}}
}

// Read implements dataplane.Plane. The kernel holds no such facts: after a restart each is told, and looked after,
// anew.
func (p *Plane) Read(context.Context) ([]Fact, error) { return nil, nil }

// Write implements dataplane.Plane by reading the flows once.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	c := p.cutter()
	changed := len(put) > 0
	for _, f := range del {
		changed = c.remove(f) || changed
	}
	for _, f := range put {
		c.add(f)
	}
	if !changed || len(c.now)+len(c.past)+len(c.ports) == 0 {
		return nil
	}
	var err error
	if c.own, err = p.conn.Addresses(); err != nil {
		return err
	}
	_, err = p.conn.Cut(c.stale)
	return err
}

// cutter decides about flows.
type cutter struct {
	now, past map[Key]Allowed     // of entries that changed, and of entries that are no more
	moved     map[netip.Addr]bool // other nodes', at which node ports are served from now on, or no longer
	ports     map[Key]Allowed     // of all node ports
	own       map[netip.Addr]bool
	remote    map[netip.Addr]bool // other nodes', at which node ports are served
}

// cutter returns one that knows of no change yet.
func (p *Plane) cutter() cutter {
	return cutter{now: map[Key]Allowed{}, past: map[Key]Allowed{}, moved: map[netip.Addr]bool{}, ports: p.ports,
		remote: p.remote}
}

// add takes in a fact that becomes true.
func (c cutter) add(f Fact) {
	if f.Key.Port == 0 {
		c.remote[f.Key.Addr], c.moved[f.Key.Addr] = true, true
		return
	}
	c.now[f.Key] = f.Value
	if f.Key.Addr.IsUnspecified() {
		c.ports[f.Key] = f.Value
	}
}

// remove takes in a fact that is no longer true, and reports whether flows may be cut for it.
func (c cutter) remove(f Fact) bool {
	if f.Key.Port == 0 {
		delete(c.remote, f.Key.Addr)
		c.moved[f.Key.Addr] = true
		return true
	}
	delete(c.ports, f.Key)
	if f.Key.Protocol == model.TCP {
		return false
	}
	c.past[f.Key] = f.Value
	return true
}

// stale reports whether a flow is to be cut: it goes to an entry that is, by another way than its backends; or it went
// to an entry that is no more by one of the backends of then. Of TCP, only what is still opening untranslated is.
func (c cutter) stale(f conntrack.Flow) bool {
	if f.Protocol == uint8(model.TCP) && (!f.Opening || translated(f)) {
		return false
	}
	k := Key{Addr: f.Destination.Addr(), Port: f.Destination.Port(), Protocol: model.Protocol(f.Protocol)}
	if yes, known := c.decide(k, f); known {
		return yes
	}
	port := Key{Addr: inet.Unspecified(k.Addr), Port: k.Port, Protocol: k.Protocol}
	if c.own[k.Addr] {
		yes, _ := c.decide(port, f)
		return yes
	}
	return (c.remote[k.Addr] || c.moved[k.Addr]) && c.staleRemote(port, f)
}

// staleRemote is stale for a flow to a node port at another node's address. Where that node serves it, a translated
// flow is one from before: it would go on past that node.
func (c cutter) staleRemote(port Key, f conntrack.Flow) bool {
	at := f.Destination.Addr()
	now, ok := c.now[port]
	if !ok && c.moved[at] {
		now, ok = c.ports[port]
	}
	switch {
	case !ok:
		past := c.past[port]
		return past.Frontend != nil && past.Remote && past.has(f)
	case c.remote[at] && (now.Frontend == nil || now.Remote): // of TCP it isn't known: what only opens loses nothing
		return now.Frontend == nil || !now.has(f)
	}
	return translated(f)
}

// decide reports whether a flow of an entry is stale, if the entry is known.
func (c cutter) decide(k Key, f conntrack.Flow) (stale, known bool) {
	if now, ok := c.now[k]; ok {
		return k.Protocol == model.TCP || !now.has(f), true
	}
	if past, ok := c.past[k]; ok {
		return past.has(f), true
	}
	return false, false
}
