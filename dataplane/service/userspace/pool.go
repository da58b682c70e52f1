package userspace

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sort"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane/maglev"
	"fairlead.dev/fairlead/model"
)

// backend is a place that answers, and what is open to it.
type backend struct {
	addr   netip.AddrPort
	share  int
	active int  // connections and flows
	credit int  // of weighted round robin
	gone   bool // no longer in its pool
}

// pool returns clients backends. It lives as long as its ID is wanted; what it holds of clients and counts survives
// changes of its other backends. It may be used by several goroutines.
type pool struct {
	mu         sync.Mutex
	model      model.Pool
	backends   []*backend
	sums       []int    // shares summed up, where they differ
	roundRobin int      // of round robin
	table      []uint16 // of Maglev, made when first needed

	clients map[netip.Addr]client
	sweep   int // the number of clients at which those whose time is over are dropped
}

// client is who has affinity.
type client struct {
	to   *backend
	last time.Time // of its last connection
}

// set changes the pool to what is told of it.
func (p *pool) set(m model.Pool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := make(map[netip.AddrPort]*backend, len(p.backends))
	for _, b := range p.backends {
		b.gone, old[b.addr] = true, b
	}
	p.model, p.backends, p.table, p.sums = m, make([]*backend, 0, len(m.Backends)), nil, nil
	sum, even := 0, true
	sums := make([]int, len(m.Backends))
	for i, b := range m.Backends {
		e := old[b.Addr]
		if e == nil {
			e = &backend{addr: b.Addr}
		}
		e.gone, e.share = false, b.Share()
		p.backends = append(p.backends, e)
		sum += e.share
		sums[i], even = sum, even && e.share == p.backends[0].share
	}
	if !even {
		p.sums = sums
	}
}

// empty reports whether there is no backend.
func (p *pool) empty() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.backends) == 0
}

// serves reports whether a flow to the endpoint at a stays there.
func (p *pool) serves(a netip.AddrPort) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.model.Serves(a)
}

// drains reports whether flows may stay with endpoints that get no new one.
func (p *pool) drains() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.model.Unselected) > 0
}

// pick returns a client that asks for an address a backend that it has not tried, and counts it as the client's; nil
// where there is none.
func (p *pool) pick(from netip.AddrPort, to netip.Addr, tried []*backend, now time.Time) *backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.model.Affinity == 0 {
		return counted(p.choose(from, to, tried))
	}
	c, known := p.clients[from.Addr()]
	if !known || c.to.gone || now.Sub(c.last) >= p.model.Affinity || slices.Contains(tried, c.to) {
		if c.to = p.choose(from, to, tried); c.to == nil {
			return nil
		}
	}
	p.remember(from.Addr(), client{c.to, now})
	return counted(c.to)
}

func counted(b *backend) *backend {
	if b != nil {
		b.active++
	}
	return b
}

// releaseBackend takes a connection off a backend's count.
func (p *pool) releaseBackend(b *backend) {
	p.mu.Lock()
	b.active--
	p.mu.Unlock()
}

// remember keeps a client's backend, and now and then forgets whose time is over.
func (p *pool) remember(a netip.Addr, c client) {
	if p.clients == nil {
		p.clients, p.sweep = map[netip.Addr]client{}, 1024
	}
	if p.clients[a] = c; len(p.clients) < p.sweep {
		return
	}
	for a, o := range p.clients {
		if o.to.gone || c.last.Sub(o.last) >= p.model.Affinity {
			delete(p.clients, a)
		}
	}
	p.sweep = max(1024, 2*len(p.clients))
}

// choose queries the scheduler.
func (p *pool) choose(from netip.AddrPort, to netip.Addr, tried []*backend) *backend {
	all, sums := p.backends, p.sums
	if len(tried) > 0 {
		all = slices.DeleteFunc(slices.Clone(all), func(b *backend) bool { return slices.Contains(tried, b) })
		sums = nil
	}
	if len(all) < 2 {
		if len(all) == 0 {
			return nil
		}
		return all[0]
	}
	switch p.model.Scheduler {
	case model.RoundRobin:
		p.roundRobin++
		return all[p.roundRobin%len(all)]
	case model.WeightedRoundRobin:
		return weighted(all)
	case model.LeastConnections, model.WeightedLeastConnections, model.ShortestExpectedDelay, model.NeverQueue:
		p.roundRobin++
		return least(all, p.roundRobin, cost(p.model.Scheduler))
	case model.SourceHash:
		return rendezvous(all, hashOf(from, p.model.Ports))
	case model.DestinationHash:
		return rendezvous(all, hashOf(netip.AddrPortFrom(to, 0), false))
	case model.Maglev:
		if h := hashOf(from, p.model.Ports); len(tried) > 0 {
			return rendezvous(all, h)
		} else {
			return p.byTable(h)
		}
	}
	return random(all, sums)
}

// random draws, each as likely as its share.
func random(all []*backend, sums []int) *backend {
	if sums == nil {
		return all[rand.IntN(len(all))]
	}
	n := rand.IntN(sums[len(sums)-1])
	return all[sort.SearchInts(sums, n+1)]
}

// weighted returns each its share, spread as evenly as can be: who has waited longest for its weight is next.
func weighted(all []*backend) *backend {
	best, total := all[0], 0
	for _, b := range all {
		b.credit += b.share
		total += b.share
		if b.credit > best.credit {
			best = b
		}
	}
	best.credit -= total
	return best
}

// cost returns what one more connection at a backend would cost under a scheduler.
func cost(s model.Scheduler) func(*backend) float64 {
	switch s {
	case model.LeastConnections:
		return func(b *backend) float64 { return float64(b.active) }
	case model.WeightedLeastConnections:
		return func(b *backend) float64 { return float64(b.active) / float64(b.share) }
	case model.NeverQueue:
		return func(b *backend) float64 {
			if b.active == 0 {
				return 0
			}
			return float64(b.active+1) / float64(b.share)
		}
	}
	return func(b *backend) float64 { return float64(b.active+1) / float64(b.share) }
}

// least returns the cheapest; among equals, each in turn.
func least(all []*backend, roundRobin int, cost func(*backend) float64) *backend {
	best, lowest := (*backend)(nil), math.Inf(1)
	for i := range all {
		b := all[(roundRobin+i)%len(all)]
		if c := cost(b); c < lowest {
			best, lowest = b, c
		}
	}
	return best
}

// rendezvous returns equal hashes the same backend, each backend as many as its share, and moves only those whose
// backend goes (Thaler and Ravishankar, 1998; weights as Schindelhauer and Schomaker have them, 2005).
func rendezvous(all []*backend, h uint64) *backend {
	best, highest := all[0], math.Inf(-1)
	for _, b := range all {
		u := (float64(stir(h^hashOf(b.addr, true))>>11) + 1) / (1 << 53)
		if s := -float64(b.share) / math.Log(u); s > highest {
			best, highest = b, s
		}
	}
	return best
}

// byTable returns the backend that Maglev's table has for a hash.
func (p *pool) byTable(h uint64) *backend {
	if p.table == nil {
		p.table = maglev.Table(p.model.Backends, maglev.Entries(&p.model, tableEntries))
	}
	return p.backends[p.table[h%uint64(len(p.table))]]
}

// hashOf hashes an address, and its port if asked for, alike on every node and after every start.
func hashOf(a netip.AddrPort, port bool) uint64 {
	h := uint64(14695981039346656037)
	bytes := a.Addr().As16()
	for _, c := range bytes {
		h = (h ^ uint64(c)) * 1099511628211
	}
	if port {
		h = (h ^ uint64(a.Port())) * 1099511628211
	}
	return stir(h)
}

// stir spreads a number's bits as splitmix64 does.
func stir(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
