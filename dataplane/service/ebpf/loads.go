package ebpf

import (
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/model"
)

// counts says whether a scheduler goes by open sockets.
func counts(s model.Scheduler) bool {
	return s == model.LeastConnections || s == model.WeightedLeastConnections || s == model.ShortestExpectedDelay
}

// leavers is how many endpoints that have left their pools are put up with before it is looked which of them nobody uses.
const leavers = 1024

// forgetLoads notes the endpoints that leave pools whose sockets are counted, and now and then forgets those that no socket
// is connected to any more. One that comes back finds its count as it is.
func (p *Plane) forgetLoads(w *writes) error {
	if p.maps == nil {
		return nil
	}
	for m := range w.lost(func(v *model.Pool) bool { return counts(v.Scheduler) }) {
		p.leave = append(p.leave, m.held())
	}
	if len(p.leave) < leavers {
		return nil
	}
	if err := p.grace.Wait(); err != nil { // whoever drew one of them has connected
		return err
	}
	return p.forgetUnused()
}

// forgetUnused forgets the endpoints among p.leave that are in no pool and have no socket open.
func (p *Plane) forgetUnused() error {
	var stay, gone []bpf.Endpoint
	for _, e := range p.leave {
		open, err := p.maps.Open(e)
		switch {
		case err != nil:
			return err
		case p.serves(e):
		case open > 0:
			stay = append(stay, e)
		default:
			gone = append(gone, e)
		}
	}
	p.leave = stay
	return p.maps.DeleteLoads(gone)
}

// serves says whether an endpoint is one of its pool's backends.
func (p *Plane) serves(e bpf.Endpoint) bool {
	i, known := p.pools[e.Pool]
	if !known {
		return false
	}
	at := p.maps.Pools[i].Extent
	if at == 0 || at >= p.Sizes.Slots || extentSize(p.maps.Slots[at:]) == 0 {
		return false
	}
	for n := range p.maps.Slots[at].Header().Count {
		b := p.maps.Slots[at+1+n].Backend()
		if b.Address == e.Backend.Address && b.Port == e.Backend.Port {
			return true
		}
	}
	return false
}

// readLoads notes the endpoints that left pools while nobody looked.
func (p *Plane) readLoads() error {
	return p.maps.Loads(func(e bpf.Endpoint, _ bpf.Load) {
		p.maps.CountSockets() // some may be open still
		if !p.serves(e) {
			p.leave = append(p.leave, e)
		}
	})
}

// Open gives how many sockets of clients on this node are connected to each backend of a pool whose scheduler goes by that. It
// needs a Read before.
func (p *Plane) Open(pool *model.Pool) (map[netip.AddrPort]uint64, error) {
	if p.maps == nil {
		return nil, errNothing
	}
	open := make(map[netip.AddrPort]uint64, len(pool.Backends))
	for _, b := range pool.Backends {
		n, err := p.maps.Open(member{pool.ID, b.Addr}.held())
		if err != nil {
			return nil, fmt.Errorf("ebpf: %s: %w", pool.Name, err)
		}
		open[b.Addr] = n
	}
	return open, nil
}

// held gives a member as the kernel knows it.
func (m member) held() (e bpf.Endpoint) {
	e.Backend.Address.Word, e.Backend.Port, e.Pool = bpf.Words(m.at.Addr()), bpf.Port(m.at.Port()), m.pool
	return e
}
