package ipvs

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
	"pgregory.net/rapid"
)

func address(s string) netip.Addr { return netip.MustParseAddr(s) }

// randomNode draws a node.
func randomNode(t *rapid.T) *model.ServiceNode {
	n := &model.ServiceNode{Node: &model.Node{Name: "a",
		Addresses: []netip.Addr{address("192.0.2.1"), address("2001:db8::1")}}, Localhost: rapid.Bool().Draw(t, "localhost")}
	for _, p := range []string{"10.244.0.0/16", "10.9.9.9/32", "fd00:244::/48"} {
		if rapid.Bool().Draw(t, "pods "+p) {
			n.Pods = append(n.Pods, netip.MustParsePrefix(p))
		}
	}
	for _, r := range []model.Range{{First: address("0.0.0.0"), Last: address("126.255.255.255")},
		{First: address("192.0.2.1"), Last: address("192.0.2.1")}, {First: address("::2"), Last: address("fd00::1")}} {
		if rapid.Bool().Draw(t, "node ports "+r.String()) {
			n.NodePorts = append(n.NodePorts, r)
		}
	}
	return n
}

// randomPool draws a pool of a family; equal ids give equal pools.
func randomPool(t *rapid.T, id uint64, six bool) *model.Pool {
	p := &model.Pool{
		ID: id, Name: fmt.Sprint("pool ", id), Protocol: []model.Protocol{model.TCP, model.UDP, model.SCTP}[id%3],
		Affinity:  rapid.SampledFrom([]time.Duration{0, 0, time.Second, time.Hour}).Draw(t, "affinity"),
		Scheduler: rapid.SampledFrom(Capabilities.Schedulers.List()).Draw(t, "scheduler"),
		Ports:     rapid.Bool().Draw(t, "ports"),
	}
	base := netip.MustParseAddr("10.244.0.1")
	if six {
		base = netip.MustParseAddr("fd00:244::1")
	}
	for i := range rapid.IntRange(0, 5).Draw(t, "backends") {
		p.Backends = append(p.Backends, model.Backend{
			Addr: netip.AddrPortFrom(base, uint16(8080+i)), Local: i%2 == 0,
			Weight: uint16(rapid.IntRange(0, model.MaxWeight).Draw(t, "weight"))})
		if i%2 == 1 {
			base = base.Next()
		}
	}
	return p
}

// randomFrontend draws a frontend at an entry.
func randomFrontend(t *rapid.T, e model.Entry, pools []*model.Pool) *model.Frontend {
	target := func(side string) model.Target {
		return model.Target{Pool: rapid.SampledFrom(pools).Draw(t, side),
			Empty: model.Action(rapid.IntRange(0, 1).Draw(t, "empty"))}
	}
	f := &model.Frontend{Service: "x", Entry: e, Internal: target("inside"),
		Masquerade: model.Origins(rapid.IntRange(0, 7).Draw(t, "hide"))}
	f.External = f.Internal
	if rapid.Bool().Draw(t, "split") {
		f.External = target("outside")
	}
	if rapid.Bool().Draw(t, "restricted") {
		f.Sources = []netip.Prefix{}
		for bits := range rapid.IntRange(0, 2).Draw(t, "sources") {
			p := netip.MustParsePrefix([]string{"198.51.100.0/24", "192.0.2.7/32"}[bits])
			if e.Addr.Is6() {
				p = netip.MustParsePrefix([]string{"2001:db8:1::/64", "2001:db8::7/128"}[bits])
			}
			f.Sources = append(f.Sources, p)
		}
	}
	return f
}

// randomServices draws a decided node.
func randomServices(t *rapid.T) *model.Snapshot {
	s := &model.Snapshot{ServiceNode: randomNode(t), Frontends: map[model.Entry]*model.Frontend{}}
	for family, addrs := range [][]string{{"10.96.0.1", "192.0.2.1", "0.0.0.0"}, {"fd00:96::1", "2001:db8::1", "::"}} {
		var pools []*model.Pool
		for i := range rapid.IntRange(1, 6).Draw(t, "pools") {
			pools = append(pools, randomPool(t, uint64(family<<32|i+1), family == 1))
		}
		for i := range rapid.IntRange(0, 8).Draw(t, "frontends") {
			e := model.Entry{Addr: address(rapid.SampledFrom(addrs).Draw(t, "address")), Port: uint16(80 + i%3),
				Protocol: []model.Protocol{model.TCP, model.UDP, model.SCTP}[i%3]}
			s.Frontends[e] = randomFrontend(t, e, pools)
		}
	}
	return s
}

// rendered returns the facts of parts, each once, and what is wrong with them.
func rendered(p *Plane, parts []model.ServicePart) (l []Fact, wrong error) {
	m := map[Key]string{}
	for _, part := range parts {
		for _, f := range p.Render(part) {
			v, ok := m[f.Key]
			if ok && v != f.Value {
				return nil, fmt.Errorf("%v is wanted as %q and as %q", f.Key, f.Value, v)
			}
			if !ok {
				l = append(l, f)
			}
			m[f.Key] = f.Value
		}
	}
	slices.SortStableFunc(l, func(a, b Fact) int { return a.Key.Rank() - b.Key.Rank() })
	return l, nil
}

// clone copies a part deeply enough that it shares nothing that Render looks at.
func clone(part model.ServicePart) model.ServicePart {
	pool := func(p *model.Pool) *model.Pool {
		c := *p
		c.Backends = slices.Clone(p.Backends)
		return &c
	}
	switch v := part.(type) {
	case *model.ServiceNode:
		c := *v
		return &c
	case *model.Pool:
		return pool(v)
	case *model.Frontend:
		c := *v
		c.Internal.Pool, c.External.Pool = pool(v.Internal.Pool), pool(v.External.Pool)
		if v.Internal == v.External {
			c.External = c.Internal
		}
		c.Sources = slices.Clone(v.Sources)
		return &c
	}
	return part
}

func TestEqualPartsRenderEqualFacts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, q := &Plane{}, &Plane{}
		s := randomServices(t)
		if _, err := rendered(p, s.Parts()); err != nil {
			t.Fatal(err)
		}
		for _, part := range s.Parts() {
			a, b := p.Render(part), q.Render(clone(part))
			slices.SortFunc(a, compare)
			slices.SortFunc(b, compare)
			if !slices.EqualFunc(a, b, Fact.Equal) {
				t.Fatalf("%+v gives other facts a second time:\n%v\n%v", part, a, b)
			}
		}
	})
}

func compare(a, b Fact) int {
	for _, x := range [][2]string{{a.Key.Name, b.Key.Name}, {a.Key.Element, b.Key.Element}, {a.Value, b.Value}} {
		if x[0] != x[1] {
			return map[bool]int{true: -1, false: 1}[x[0] < x[1]]
		}
	}
	return int(a.Key.Kind) - int(b.Key.Kind)
}

// What a fact leads to is there before it: a chain before the element that leads to it, a service before its
// destinations, and the way of packets to this host before the frontends that send them there.
func TestRanks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		facts, err := rendered(&Plane{}, randomServices(t).Parts())
		if err != nil {
			t.Fatal(err)
		}
		rank := map[Key]int{}
		for _, f := range facts {
			rank[f.Key] = f.Key.Rank()
		}
		before := func(k, than Key) {
			if r, ok := rank[k]; !ok || r >= rank[than] {
				t.Fatalf("%v (rank %d, there: %t) must come before %v (rank %d)", k, r, ok, than, rank[than])
			}
		}
		for _, f := range facts {
			k := f.Key
			switch {
			case k.Kind == KindDestination:
				before(key(KindService, k.Name, k.Element[:8]), k)
			case k.Kind == KindElement && allSets[k.Name].ToVerdicts() && f.Value != nft.DropIt.String():
				v, err := nft.ParseVerdict(f.Value)
				if err != nil {
					t.Error(err)
				}
				before(key(KindChain, v.Chain, ""), k)
			case k.Kind == KindElement && base(k.Name) == "service":
				before(key(KindElement, acts[unword(k.Element)]+k.Name[7:], string(nft.Word(nil, 0))+f.Value[8:12]), k)
				before(key(KindDelivery, k.Name[7:], ""), k)
				if pool := id(f.Value); pool != 0 {
					before(key(KindService, k.Name[7:], string(ofPool(pool))), k)
				}
			case k.Kind == KindSet || k.Kind == KindSysctl || k.Kind == KindTimeout:
				before(key(KindTable, Table, ""), k)
			case k.Kind == KindElement:
				before(key(KindSet, k.Name, ""), k)
			}
		}
	})
}

// A pool keeps its mark, no two have the same, and none has that of packets that belong to no pool in particular.
func TestNumbering(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := newNumbering()
		ids := rapid.SliceOfNDistinct(rapid.Uint64Range(1, 1<<60), 1, 200, rapid.ID[uint64]).Draw(t, "ids")
		has := map[uint64]uint32{}
		for _, id := range ids {
			m, isNew := n.acquire(id, id%2 == 0)
			if again, isNewAgain := n.acquire(id, id%2 == 0); !isNew || isNewAgain || again != m {
				t.Fatalf("pool %#x has mark %#x, then %#x", id, m, again)
			}
			if m&ourBits != claimed || m == claimed || isTCP(m) != (id%2 == 0) {
				t.Fatalf("pool %#x has mark %#x", id, m)
			}
			has[id] = m
		}
		for id, m := range has {
			if n.id(m) != id || n.of(id) != m {
				t.Fatalf("mark %#x of pool %#x is pool %#x's", m, id, n.id(m))
			}
			n.drop(id)
			if n.of(id) != claimed || n.of(n.id(m)) != m {
				t.Fatalf("mark %#x of no pool is %#x as pool, which has mark %#x", m, n.id(m), n.of(n.id(m)))
			}
		}
	})
}

// What a fact says of a scheduler differs wherever schedulers differ: the loop writes nothing else.
func TestSchedulersDifferInText(t *testing.T) {
	said := map[string]scheduler{}
	for _, by := range Capabilities.Schedulers.List() {
		for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
			for _, ports := range []bool{false, true} {
				s := schedulerOf(&model.Pool{Protocol: protocol, Scheduler: by, Ports: ports})
				if other, is := said[s.String()]; is && other != s {
					t.Errorf("%q is said of %+v and of %+v", s, other, s)
				}
				said[s.String()] = s
			}
		}
	}
	if Capabilities.Schedulers.Instead(model.Random) != model.WeightedRoundRobin {
		t.Error("what stands in for drawing at random knows no weights")
	}
}
