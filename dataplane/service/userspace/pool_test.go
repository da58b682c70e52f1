package userspace

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
)

// poolOf makes a pool of neighbours with those weights.
func poolOf(s model.Scheduler, weights ...uint16) *pool {
	p := &pool{}
	p.set(modelOf(s, weights...))
	return p
}

func modelOf(s model.Scheduler, weights ...uint16) model.Pool {
	m := model.Pool{Protocol: model.TCP, Scheduler: s}
	for i, w := range weights {
		m.Backends = append(m.Backends, model.Backend{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}),
			80), Weight: w})
	}
	return m
}

// randomClient draws a client.
func randomClient(r *rand.Rand) netip.AddrPort {
	a := [4]byte(binary.BigEndian.AppendUint32(nil, r.Uint32()))
	return netip.AddrPortFrom(netip.AddrFrom4(a), uint16(r.Uint32()))
}

var vip = netip.MustParseAddr("10.96.0.1")

// shares counts which backends n clients get; those who come for a scheduler that counts connections keep them open.
func shares(p *pool, n int, seed uint64) map[netip.AddrPort]int {
	r, count := rand.New(rand.NewPCG(seed, 1)), map[netip.AddrPort]int{}
	for range n {
		to := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, r.Uint32()))) // for DestinationHash
		count[p.pick(randomClient(r), to, nil, time.Now()).addr]++
	}
	return count
}

// Each scheduler gives each backend its share of clients. Chi-square of two degrees of freedom is above 27.6 once in a
// million times.
func TestEachBackendGetsItsShare(t *testing.T) {
	weights := []uint16{1, 2, 5}
	const n = 16000
	for _, s := range model.AllSchedulers.List() {
		want := []float64{n / 8, n / 4, n * 5 / 8}
		if s == model.RoundRobin || s == model.LeastConnections {
			want = []float64{n / 3., n / 3., n / 3.} // whatever the weights
		}
		p := poolOf(s, weights...)
		count, chi := shares(p, n, 7), 0.0
		for i, b := range p.model.Backends {
			d := float64(count[b.Addr]) - want[i]
			chi += d * d / want[i]
		}
		if t.Logf("%s: %v, chi-square %.2f", s, count, chi); chi > 27.6 {
			t.Errorf("%s: clients don't spread as %v says: %v", s, weights, count)
		}
	}
}

func TestHashSelectsSameBackendForSameClient(t *testing.T) {
	for _, s := range []model.Scheduler{model.SourceHash, model.DestinationHash, model.Maglev} {
		for _, ports := range []bool{false, true} {
			m := modelOf(s, 0, 0, 0, 0, 0, 0, 0, 0)
			m.Ports = ports
			p, q := &pool{}, &pool{}
			p.set(m)
			q.set(m)
			moves := false
			for r := range 200 {
				from := randomClient(rand.New(rand.NewPCG(uint64(r), 2)))
				a, b := p.pick(from, vip, nil, time.Now()), q.pick(from, vip, nil, time.Now())
				other := p.pick(netip.AddrPortFrom(from.Addr(), from.Port()+1), vip, nil, time.Now())
				moves = moves || other != a
				if a.addr != b.addr {
					t.Fatalf("%s: two nodes send %s to %s and %s", s, from, a.addr, b.addr)
				}
			}
			if want := ports && s != model.DestinationHash; moves != want {
				t.Errorf("%s, ports %t: another port of a client leads elsewhere: %t", s, ports, moves)
			}
		}
	}
}

func TestConnectionsCount(t *testing.T) {
	for _, c := range []struct {
		s       model.Scheduler
		weights []uint16
		active  []int
		want    int
	}{
		{model.LeastConnections, []uint16{1, 9, 1}, []int{2, 3, 1}, 2},
		{model.WeightedLeastConnections, []uint16{1, 9, 1}, []int{2, 3, 1}, 1},
		{model.ShortestExpectedDelay, []uint16{1, 4, 1}, []int{0, 2, 1}, 1}, // 1, 3/4, 2
		{model.NeverQueue, []uint16{1, 4, 1}, []int{0, 2, 1}, 0},
		{model.NeverQueue, []uint16{1, 4, 1}, []int{1, 2, 1}, 1},
	} {
		p := poolOf(c.s, c.weights...)
		for i, n := range c.active {
			p.backends[i].active = n
		}
		got := p.pick(randomClient(rand.New(rand.NewPCG(1, 1))), vip, nil, time.Now())
		if got != p.backends[c.want] || got.active != c.active[c.want]+1 {
			t.Errorf("%s of weights %v with %v open: %s, want %s", c.s, c.weights, c.active, got.addr, p.backends[c.want].addr)
		}
		if p.releaseBackend(got); got.active != c.active[c.want] {
			t.Errorf("%s: a connection that has ended counts still", c.s)
		}
	}
}

func TestTriedBackendsAreNotSelectedAgain(t *testing.T) {
	for _, s := range model.AllSchedulers.List() {
		for _, affinity := range []time.Duration{0, time.Hour} {
			m := modelOf(s, 1, 2, 3)
			m.Affinity = affinity
			p := &pool{}
			p.set(m)
			var tried []*backend
			for range 3 {
				b := p.pick(netip.MustParseAddrPort("10.9.9.9:1"), vip, tried, time.Now())
				tried = append(tried, b)
			}
			seen := map[*backend]bool{tried[0]: true, tried[1]: true, tried[2]: true}
			if len(seen) != 3 || seen[nil] || p.pick(netip.MustParseAddrPort("10.9.9.9:1"), vip, tried, time.Now()) != nil {
				t.Errorf("%s, affinity %s: tried %v", s, affinity, tried)
			}
		}
	}
}

func TestAffinity(t *testing.T) {
	m := modelOf(model.Random, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	m.Affinity = time.Minute
	p := &pool{}
	p.set(m)
	from, now := netip.MustParseAddrPort("10.9.9.9:1"), time.Now()
	mine := p.pick(from, vip, nil, now)
	for range 50 {
		now = now.Add(59 * time.Second)
		if p.pick(from, vip, nil, now) != mine {
			t.Fatal("a client that comes back in time gets another backend")
		}
	}
	m.Backends = m.Backends[:0:0]
	for _, b := range p.model.Backends {
		if b.Addr == mine.addr || b.Addr.Addr().As4()[3]%2 == 0 {
			m.Backends = append(m.Backends, b)
		}
	}
	if p.set(m); p.pick(from, vip, nil, now) != mine {
		t.Error("a client loses its backend when others go")
	}
	moved := false
	for range 60 {
		now = now.Add(time.Minute)
		moved = moved || p.pick(from, vip, nil, now) != mine
	}
	if !moved {
		t.Error("a client that stays away too long always gets its old backend")
	}
	mine = p.pick(from, vip, nil, now)
	p.set(modelOf(model.Random, 0, 0)) // others than
	p.set(model.Pool{Affinity: time.Minute, Backends: []model.Backend{{Addr: netip.MustParseAddrPort("10.0.1.1:80")}}})
	if p.pick(from, vip, nil, now) == mine {
		t.Error("a client gets a backend that is gone")
	}
	for i := range 5000 {
		p.pick(netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)}), 1), vip, nil,
			now.Add(time.Duration(i)*time.Second))
	}
	if len(p.clients) > 2100 {
		t.Errorf("%d clients are recorded, of which 60 have affinity still", len(p.clients))
	}
}
