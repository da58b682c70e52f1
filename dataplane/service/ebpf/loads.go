package ebpf

import (
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/model"
)

// counts reports whether a scheduler uses open sockets.
func counts(s model.Scheduler) bool {
	return s == model.LeastConnections || s == model.WeightedLeastConnections || s == model.ShortestExpectedDelay
}

// maxDeparted is the number of endpoints without a pool at which unused ones are searched for.
const maxDeparted = 1024

// forgetLoads records the endpoints that leave pools whose sockets are counted, and periodically deletes the counts
// of those that no socket is connected to. One that comes back finds its count unchanged.
func (p *Plane) forgetLoads(w *writes) error {
	if p.maps == nil {
		return nil
	}
	for m := range w.lost(func(v *model.Pool) bool { return counts(v.Scheduler) }) {
		p.departed = append(p.departed, m.held())
	}
	if len(p.departed) < maxDeparted {
		return nil
	}
	if err := p.grace.Wait(); err != nil { // programs that selected one of them have finished
		return err
	}
	return p.forgetUnused()
}

// forgetUnused deletes the counts of departed endpoints that are in no pool and have no socket open.
func (p *Plane) forgetUnused() error {
	var stay, gone []service.Endpoint
	for _, e := range p.departed {
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
	p.departed = stay
	return p.maps.DeleteLoads(gone)
}

// serves reports whether an endpoint is one of its pool's backends.
func (p *Plane) serves(e service.Endpoint) bool {
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

// readLoads records the endpoints that left pools while no agent ran.
func (p *Plane) readLoads() error {
	return p.maps.Loads(func(e service.Endpoint, _ service.Load) {
		p.maps.CountSockets() // some may still be open
		if !p.serves(e) {
			p.departed = append(p.departed, e)
		}
	})
}

// Open returns how many sockets of clients on this node are connected to each backend of a pool whose scheduler
// counts them. It needs a Read before.
func (p *Plane) Open(pool *model.Pool) (map[netip.AddrPort]uint64, error) {
	if p.maps == nil {
		return nil, errNoPrograms
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

// held returns a member as the kernel holds it.
func (m member) held() (e service.Endpoint) {
	e.Backend.Address.Word, e.Backend.Port, e.Pool = bpf.Words(m.at.Addr()), bpf.Port(m.at.Port()), m.pool
	return e
}
