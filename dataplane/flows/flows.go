// Package flows is the data plane that cuts stale flows: connections of UDP and SCTP that the kernel tracks to an
// endpoint which serves their frontend's port no more, of a client that is no longer allowed, or to none from before
// there was a frontend. TCP ends by itself: it is kept (keep.go) where a switch of data planes would end it. Only a
// connection that is still opening, and was not translated, is cut when its frontend comes: the kernel would send
// each further SYN from that port where it sent the first, for two minutes.
//
// What traffic writes into the kernel is no fact; which backends an entry's flows may have is. A fact that becomes true
// cuts the entry's other flows, one that becomes untrue those that it allowed. It is told after the service data plane
// has the change, else a client could come back to the old backend in between.
package flows

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/model"
)

// Key is the entry that flows go to.
type Key model.Entry

// Rank implements dataplane.Key: entries don't depend on each other.
func (Key) Rank() int { return 0 }

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
type Plane struct{ conn *conntrack.Conn }

var _ dataplane.Plane[model.ServicePart, Key, Allowed] = (*Plane)(nil)

// New opens the plane of the calling thread's network namespace.
func New() (*Plane, error) {
	conn, err := conntrack.Open()
	if err != nil {
		return nil, err
	}
	return &Plane{conn}, nil
}

// Close returns the plane's sockets back.
func (p *Plane) Close() { p.conn.Close() }

// Invalid returns how many packets connection tracking has called invalid.
func (p *Plane) Invalid() (uint64, error) { return p.conn.Invalid() }

// Render implements dataplane.Plane.
func (p *Plane) Render(part model.ServicePart) []Fact {
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

// Write implements dataplane.Plane with one look through the flows of each family concerned.
func (p *Plane) Write(_ context.Context, put, del []Fact) error {
	if len(put)+len(del) == 0 {
		return nil
	}
	own, err := p.conn.Addresses()
	if err != nil {
		return err
	}
	c := cutter{now: map[Key]Allowed{}, past: map[Key]Allowed{}, own: own}
	families := map[uint8]bool{}
	record := func(m map[Key]Allowed, facts []Fact) {
		for _, f := range facts {
			m[f.Key] = f.Value
			families[familyOf(f.Key.Addr)] = true
		}
	}
	record(c.past, slices.DeleteFunc(slices.Clone(del), func(f Fact) bool { return f.Key.Protocol == model.TCP }))
	record(c.now, put)
	var errs []error
	for family := range families {
		_, err := p.conn.Cut(family, c.stale)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func familyOf(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// anyAddr returns the address that stands for every one of the node's in an entry, of a's family.
func anyAddr(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// cutter decides about flows.
type cutter struct {
	now, past map[Key]Allowed // of entries that are and entries that are no more
	own       map[netip.Addr]bool
}

// stale reports whether a flow is to be cut: it goes to an entry that is, by another way than its backends; or it went
// to an entry that is no more by one of the backends of then. Of TCP, only what is still opening untranslated is.
func (c cutter) stale(f conntrack.Flow) bool {
	if f.Protocol == uint8(model.TCP) && (!f.Opening || f.ReplySource != f.Destination) {
		return false
	}
	k := Key{Addr: f.Destination.Addr(), Port: f.Destination.Port(), Protocol: model.Protocol(f.Protocol)}
	if yes, known := c.decide(k, f); known {
		return yes
	}
	if !c.own[k.Addr] {
		return false
	}
	k.Addr = anyAddr(k.Addr)
	yes, _ := c.decide(k, f)
	return yes
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
