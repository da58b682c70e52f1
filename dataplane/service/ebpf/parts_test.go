package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/model"
)

// Whatever is taken and given back, no index is allocated twice at a time, nor one that was given back before grace;
// and what is free can be had.
func TestSpace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const end = 101
		waited := 0
		s := newSpace("places", end, func() error { waited++; return nil })
		used, limbo := map[uint32]uint32{}, map[uint32]bool{} // runs in use; places given back since the last wait
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			if size := rapid.Uint32Range(1, 20).Draw(t, "size"); rapid.Bool().Draw(t, "take") {
				before := waited
				at, err := s.allocate(size)
				if waited > before {
					clear(limbo)
				}
				if err != nil {
					if longest(used, end) >= size {
						t.Fatalf("%d places are free in a row, yet %v", longest(used, end), err)
					}
					continue
				}
				for i := at; i < at+size; i++ {
					if i == 0 || i >= end || limbo[i] || inUse(used, i) {
						t.Fatalf("place %d of %d at %d is taken", i, size, at)
					}
				}
				used[at] = size
			} else if len(used) > 0 {
				keys := make([]uint32, 0, len(used))
				for at := range used {
					keys = append(keys, at)
				}
				slices.Sort(keys)
				at := rapid.SampledFrom(keys).Draw(t, "give")
				s.release(at, used[at])
				for i := range used[at] {
					limbo[at+i] = true
				}
				delete(used, at)
			}
		}
		spans := []span{}
		for at, size := range used {
			spans = append(spans, span{at, size})
		}
		again := newSpace("places", end, func() error { return errors.New("no grace period is needed") })
		again.fill(spans)
		free := uint32(end - 1)
		for _, size := range used {
			free -= size
		}
		for ; free > 0; free-- {
			at, err := again.allocate(1)
			if err != nil || inUse(used, at) {
				t.Fatalf("%d are free, yet %d, %v", free, at, err)
			}
			used[at] = 1
		}
	})
}

func inUse(used map[uint32]uint32, i uint32) bool {
	for at, size := range used {
		if at <= i && i < at+size {
			return true
		}
	}
	return false
}

func longest(used map[uint32]uint32, end uint32) (best uint32) {
	run := uint32(0)
	for i := uint32(1); i < end; i++ {
		if run++; inUse(used, i) {
			run = 0
		}
		best = max(best, run)
	}
	return best
}

// drawPool draws a pool.
func drawPool(t *rapid.T) *model.Pool {
	p := &model.Pool{
		ID:        rapid.Uint64().Draw(t, "id"),
		Protocol:  rapid.SampledFrom([]model.Protocol{model.TCP, model.UDP}).Draw(t, "protocol"),
		Scheduler: rapid.SampledFrom(schedulers.List()).Draw(t, "scheduler"),
		Affinity:  time.Duration(rapid.IntRange(0, 86400).Draw(t, "affinity")) * time.Second,
		Entries:   rapid.SampledFrom([]int{0, 7, 1021, model.MaxEntries}).Draw(t, "entries"),
	}
	six := rapid.Bool().Draw(t, "six")
	n, others := rapid.IntRange(0, 20).Draw(t, "backends"), rapid.IntRange(0, 3).Draw(t, "unselected")
	for i := range n + others {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i), rapid.Byte().Draw(t, "byte")})
		if six {
			a = netip.AddrFrom16([16]byte{0xfd, 14: byte(i), 15: rapid.Byte().Draw(t, "byte")})
		}
		where := rapid.IntRange(0, 2).Draw(t, "where")
		b := model.Backend{Local: where == 1, Remote: where == 2,
			Addr: netip.AddrPortFrom(a, rapid.Uint16Min(1).Draw(t, "port"))}
		if i >= n {
			p.Unselected = append(p.Unselected, b)
			continue
		}
		b.Weight = rapid.Uint16Range(0, model.MaxWeight).Draw(t, "weight")
		p.Backends = append(p.Backends, b)
	}
	return p
}

// The fast path at connect() is for frontends without any other feature.
func TestConnectFast(t *testing.T) {
	two := []model.Backend{
		{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Weight: 3},
		{Addr: netip.MustParseAddrPort("10.0.0.2:80")},
	}
	for _, c := range []struct {
		model.Pool
		want uint32
	}{
		{model.Pool{Backends: two}, 2},
		{model.Pool{}, 0},
		{model.Pool{Backends: two, Affinity: time.Second}, 0},
		{model.Pool{Backends: two, Scheduler: model.RoundRobin}, 0},
		{model.Pool{Backends: two, Scheduler: model.SourceHash}, 0},
		{model.Pool{Backends: two, Scheduler: model.LeastConnections}, 0},
		{model.Pool{Backends: two, Scheduler: model.Maglev}, 0},
	} {
		e, err := newExtent(&c.Pool)
		if err != nil || e.fast() != c.want {
			t.Errorf("%+v: %d, %v, want %d", c.Pool, e.fast(), err, c.want)
		}
	}
	for fallback, want := range map[model.Origins]model.Origins{
		0:                                   model.OriginsOf(model.FromNode, model.FromPod),
		model.OriginsOf(model.FromExternal): model.OriginsOf(model.FromNode, model.FromPod),
		model.OriginsOf(model.FromPod):      model.OriginsOf(model.FromNode),
		model.AllOrigins:                    0,
	} {
		if got := fast(service.Frontend{Fallback: uint8(fallback)}); got != uint8(want) {
			t.Errorf("where %s are left: %s, want %s", fallback, model.Origins(got), want)
		}
	}
	if got := fast(service.Frontend{NodePort: 1}); got != 0 {
		t.Errorf("a node port: %s", model.Origins(got))
	}
	var p service.Pool
	for i := range uint32(3) {
		if was := p.Lead(i+1, 10*i); was != i || p.Extent != i+1 || p.Fast != 10*i {
			t.Errorf("a pool led to %d, and leads to %d, %d", was, p.Extent, p.Fast)
		}
	}
}

// A pool reads back from slots as it was written, with a table as large as was asked for; each backend is drawn by
// its weight.
func TestExtents(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPool(t)
		e, err := newExtent(readPool(poolValue(p)))
		if err != nil {
			t.Fatal(err)
		}
		slots := make([]service.Slot, e.size()+3)
		e.write(p.ID, slots)
		value, size := readExtent(slots)
		if value != poolValue(p) || size != e.size() {
			t.Fatalf("%d slots read %x, wrote %d, %x", size, value, e.size(), poolValue(p))
		}
		for i := uint32(1); i < size; i++ {
			if value, n := readExtent(slots[:i]); n != 0 || value != "" {
				t.Fatal("part of an extent is taken for the whole")
			}
		}
		if p.Scheduler == model.LeastConnections { // heeds no weights
			for i := range p.Backends {
				p.Backends[i].Weight = 0
			}
		}
		if requested := p.Entries; p.Scheduler == model.Maglev && len(p.Backends) > 0 && requested > len(p.Backends) &&
			len(e.choices) != requested {
			t.Fatalf("a table of %d entries was asked for, of %d written", requested, len(e.choices))
		}
		n, total := len(p.Backends), 0
		within := 2 / float64(min(1009, max(1, len(e.choices))))
		if p.Scheduler == model.Maglev && len(e.choices) < 1000 {
			within = float64(n) / float64(len(e.choices)) // a small table is not even: each backend has an entry
		}
		chance, chosen := make([]float64, n), make([]int, n)
		for i, b := range p.Backends {
			total += b.Share()
			s := slots[1+i].Backend()
			chance[i] += float64(s.Threshold) + 1
			chance[s.Alias] += 65535 - float64(s.Threshold)
		}
		for i := range e.choices {
			chosen[slots[1+n+i/choicesPerSlot].Choices()[i%choicesPerSlot]]++
		}
		for i, b := range p.Backends {
			want := float64(b.Share()) / float64(total)
			if got := chance[i] / float64(n) / 65536; math.Abs(got-want) > float64(n)/65536 {
				t.Fatalf("backend %d of %d is drawn with %f, not %f", i, n, got, want)
			}
			if got := float64(
				chosen[i],
			) / float64(
				max(1, len(e.choices)),
			); len(e.choices) > 0 &&
				math.Abs(got-want) > 0.01*want+within {
				t.Fatalf("%s: backend %d of %d has %f of the choices, not %f", p.Scheduler, i, n, got, want)
			}
		}
	})
}

// The turns of weights 1, 2 and 5 are spread, and too many are scaled down.
func TestRoundRobinSlots(t *testing.T) {
	weighted := func(w ...uint16) (l []model.Backend) {
		for _, n := range w {
			l = append(l, model.Backend{Weight: n})
		}
		return l
	}
	if got := fmt.Sprint(roundRobinSlots(weighted(1, 2, 5))); got != "[2 1 2 0 2 2 1 2]" {
		t.Errorf("turns are %s", got)
	}
	if l := roundRobinSlots(weighted(7, 7)); len(l) != 14 {
		t.Errorf("%d turns", len(l))
	}
	if l := roundRobinSlots(weighted(0, 0)); l != nil {
		t.Errorf("equal weights take no turns: %v", l)
	}
	many := slices.Repeat([]uint16{256, 1}, 1000)
	if l := roundRobinSlots(weighted(many...)); len(l) > maxChoices || len(l) < maxChoices/2 {
		t.Errorf("%d turns of 2,000 backends", len(l))
	}
}

func TestWithin(t *testing.T) {
	home := netip.MustParsePrefix("127.0.0.0/8")
	for _, c := range []struct {
		first, last string
		want        []string
	}{
		{"0.0.0.0", "255.255.255.255", []string{"127.0.0.0/8"}},
		{"127.0.0.1", "127.0.0.1", []string{"127.0.0.1/32"}},
		{"127.0.0.0", "127.0.0.9", []string{"127.0.0.0/29", "127.0.0.8/31"}},
		{"10.0.0.0", "126.255.255.255", nil},
		{"::", "::1", nil},
	} {
		var got []string
		r := model.Range{First: netip.MustParseAddr(c.first), Last: netip.MustParseAddr(c.last)}
		for _, p := range r.PrefixesIn(home) {
			got = append(got, p.String())
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s-%s: %s", c.first, c.last, diff)
		}
	}
}

// Keys and values read back as they were written.
func TestKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "address")
		a := netip.AddrFrom16([16]byte(b)).Unmap()
		if rapid.Bool().Draw(t, "four") {
			a = netip.AddrFrom4([4]byte(b))
		}
		e := model.Entry{Addr: a, Port: rapid.Uint16().Draw(t, "port"), Protocol: model.UDP}
		if got := entry(frontendKey(e)); got != e {
			t.Fatalf("%s reads %s", e, got)
		}
		if got := entryKey(heldEntry(frontendKey(e))); got != frontendKey(e) {
			t.Fatalf("%s is held as %s", e, got)
		}
		p := netip.PrefixFrom(a, rapid.IntRange(0, a.BitLen()).Draw(t, "bits")).Masked()
		if got := prefixOf(prefixKey(p)); p.Addr().Unmap() == p.Addr() && got != p {
			t.Fatalf("%s reads %s", p, got)
		}
	})
}

// What programs must know of direct server return is in the facts.
func TestDirectFacts(t *testing.T) {
	v := &model.Pool{ID: 1, Backends: []model.Backend{{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Remote: true}}}
	here := &model.Pool{ID: 1, Backends: []model.Backend{{Addr: netip.MustParseAddrPort("10.0.0.1:80")}}}
	if poolValue(v) == poolValue(here) {
		t.Error("a backend on another node is as one on none")
	}
	f := model.Frontend{Internal: model.Target{Pool: v}, External: model.Target{Pool: v}, Masquerade: model.AllOrigins}
	g := f
	g.DSR = model.OriginsOf(model.FromExternal)
	if frontendValue(&f, 0) == frontendValue(&g, 0) {
		t.Error("which clients backends' nodes answer is not written")
	}
	a := netip.MustParseAddr
	n := &model.ServiceNode{
		Node:  &model.Node{Pods: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, Addresses: []netip.Addr{a("10.0.0.1")}},
		Nodes: []netip.Addr{a("10.0.0.1"), a("10.0.0.2"), a("192.0.2.2")},
	}
	is := map[string]uint32{}
	for _, f := range nodePrefixes(n) {
		is[prefixOf(f.Key).String()] = binary.BigEndian.Uint32([]byte(f.Value))
	}
	want := map[string]uint32{
		"10.0.0.0/8":   service.Pods,
		"10.0.0.1/32":  service.Nodes,
		"10.0.0.2/32":  service.Nodes | service.Pods,
		"192.0.2.2/32": service.Nodes,
	}
	if diff := cmp.Diff(want, is); diff != "" {
		t.Error(diff)
	}
}

// Which clients a socket can't serve at a frontend.
func TestFallbackOrigins(t *testing.T) {
	v := &model.Pool{ID: 1}
	ports := &model.Pool{ID: 2, Ports: true}
	for _, c := range []struct {
		f    model.Frontend
		want string
	}{
		{model.Frontend{}, "none"},
		{model.Frontend{Masquerade: model.OriginsOf(model.FromNode)}, "none"},
		{model.Frontend{Masquerade: model.OriginsOf(model.FromNode, model.FromExternal)}, "external"},
		{model.Frontend{Masquerade: model.AllOrigins}, "pod,external"},
		{model.Frontend{Sources: []netip.Prefix{}}, "node,pod,external"},
		{model.Frontend{External: model.Target{Pool: ports}}, "node,pod,external"},
	} {
		if c.f.Internal.Pool = v; c.f.External.Pool == nil {
			c.f.External.Pool = v
		}
		if got := fallbackOrigins(&c.f).String(); got != c.want {
			t.Errorf("%+v leaves %s, not %s", c.f, got, c.want)
		}
	}
}
