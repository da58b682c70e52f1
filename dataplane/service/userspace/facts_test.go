package userspace

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/model"
)

// What a fact says differs wherever what is served differs: the loop writes nothing else.
func TestFactsSayAllThereIsToSay(t *testing.T) {
	a, pre := netip.MustParseAddr, netip.MustParsePrefix
	p, q := &model.Pool{ID: 1<<64 - 1}, &model.Pool{ID: 2}
	said := map[string]any{}
	say := func(text string, of any) {
		if other, ok := said[text]; ok {
			t.Errorf("%q is said of %+v and of %+v", text, other, of)
		}
		said[text] = of
	}
	ports := []model.Range{{First: a("1.2.3.4"), Last: a("5.6.7.8")}, {First: a("::2"), Last: a("fd00::")}}
	for _, n := range []*model.ServiceNode{
		{Node: &model.Node{}},
		{Node: &model.Node{PodInterfaces: model.Interfaces{Name: "veth", Prefix: true}}},
		{Node: &model.Node{PodInterfaces: model.Interfaces{Name: "veth"}}},
		{Node: &model.Node{Pods: []netip.Prefix{pre("10.0.0.0/8"), pre("fd00::/48")}}, NodePorts: ports},
		{Node: &model.Node{Pods: []netip.Prefix{pre("10.0.0.0/8")}}, NodePorts: ports},
		{Node: &model.Node{Pods: []netip.Prefix{pre("10.0.0.0/8")}}, NodePorts: ports[:1]},
	} {
		say(nodeText(n), n)
	}
	whole := model.Pool{Protocol: model.TCP, Scheduler: model.Maglev, Ports: true, Affinity: 3 * time.Hour,
		Backends: []model.Backend{{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Weight: 3},
			{Addr: netip.MustParseAddrPort("[fd00::1]:80")}},
		Unselected: []model.Backend{{Addr: netip.MustParseAddrPort("10.0.0.3:80")}}}
	for _, change := range []func(*model.Pool){
		func(*model.Pool) {},
		func(p *model.Pool) { p.Protocol = model.UDP },
		func(p *model.Pool) { p.Scheduler = model.Random },
		func(p *model.Pool) { p.Ports = false },
		func(p *model.Pool) { p.Affinity++ },
		func(p *model.Pool) { p.Backends = p.Backends[:1] },
		func(p *model.Pool) { p.Unselected = nil },
		func(p *model.Pool) { p.Backends, p.Unselected = append(p.Backends[:2:2], p.Unselected...), nil },
		func(p *model.Pool) {
			p.Backends = []model.Backend{p.Backends[0], {Addr: p.Backends[1].Addr, Weight: 2}}
		},
	} {
		p := whole
		change(&p)
		say(poolText(&p), p)
	}
	for _, f := range []*model.Frontend{
		{Internal: model.Target{Pool: p}, External: model.Target{Pool: q}},
		{Internal: model.Target{Pool: q}, External: model.Target{Pool: p}},
		{Internal: model.Target{Pool: p, Empty: model.Drop}, External: model.Target{Pool: q}},
		{Internal: model.Target{Pool: p}, External: model.Target{Pool: q, Empty: model.Drop}},
		{Internal: model.Target{Pool: p}, External: model.Target{Pool: q}, Sources: []netip.Prefix{}},
		{Internal: model.Target{Pool: p}, External: model.Target{Pool: q},
			Sources: []netip.Prefix{pre("10.0.0.0/8"), pre("0.0.0.0/0")}},
	} {
		say(frontendText(f), f)
	}
}

// passes runs a filter as the kernel does, over a packet from a source.
func passes(t *testing.T, b []unix.SockFilter, from netip.Addr) bool {
	t.Helper()
	if b == nil {
		return true
	}
	header := make([]byte, 12)
	if from.Is6() {
		header = header[:8]
	}
	header = append(header, from.AsSlice()...)
	acc := uint32(0)
	for pc := 0; pc < len(b); pc++ {
		switch i := b[pc]; i.Code {
		case bpfLoad:
			acc = binary.BigEndian.Uint32(header[i.K-netOffset:])
		case bpfAnd:
			acc &= i.K
		case bpfEqual:
			if pc += int(i.Jt); acc != i.K {
				pc += int(i.Jf) - int(i.Jt)
			}
		case bpfJump:
			pc += int(i.K)
		case bpfReturn:
			return i.K != 0
		default:
			t.Fatalf("instruction %#x is none of ours", i.Code)
		}
	}
	t.Fatal("the filter has no end")
	return false
}

func TestFilterDropsDisallowedClients(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	address := func(six bool) netip.Addr {
		b := make([]byte, 4+12*b2i(six))
		for i := range b {
			b[i] = byte(r.IntN(2)) // near each other
		}
		a, _ := netip.AddrFromSlice(b)
		return a
	}
	prefixes := func(six bool, n int) []netip.Prefix {
		l := []netip.Prefix{}
		for range n {
			a := address(six)
			l = append(l, netip.PrefixFrom(a, r.IntN(a.BitLen()+1)).Masked())
		}
		return l
	}
	within := func(l []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(l, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	dropped, admitted := 0, 0
	for range 2000 {
		six := r.IntN(2) == 1
		sources := prefixes(six, r.IntN(5))
		if r.IntN(3) == 0 {
			sources = nil
		}
		var v view
		for _, p := range append(prefixes(six, r.IntN(4)), prefixes(!six, 1)...) {
			v.pods = append(v.pods, origin{p, r.IntN(3) > 0})
		}
		sides := [2]model.Action{model.Action(r.IntN(2)), model.Action(r.IntN(2))}
		b, err := program(six, sources, v.origins(), sides[0], sides[1])
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			from := address(six)
			want := (sources == nil || within(sources, from)) && sides[b2i(!v.internal(from))] == model.Reject
			if got := passes(t, b, from); got != want {
				t.Fatalf("sources %v, origins %v, sides %v: %s passes: %t", sources, v.pods, sides, from, got)
			}
			dropped, admitted = dropped+b2i(!want), admitted+b2i(want)
		}
	}
	if dropped < 1000 || admitted < 1000 {
		t.Errorf("%d were kept out and %d let in: that says little", dropped, admitted)
	}
	if _, err := program(false, prefixes(false, 2000), nil, 0, 0); err == nil {
		t.Error("a filter that no kernel takes is no error")
	}
}

func TestPodsByRoute(t *testing.T) {
	pre := netip.MustParsePrefix
	routes := []route.Reach{{To: pre("10.0.0.7/32"), Interface: "veth1"}, {To: pre("10.0.0.8/32"), Interface: "eth1"},
		{To: pre("10.0.0.0/24"), Interface: "veth2"}, {To: pre("10.0.0.0/16"), Interface: "eth0"}}
	n := &model.ServiceNode{Node: &model.Node{PodInterfaces: model.Interfaces{Name: "veth", Prefix: true}}}
	pods, err := podsOf(n, func() ([]route.Reach, error) { return routes, nil })
	if err != nil || len(pods) != 3 { // what leads elsewhere anyway needs no naming
		t.Fatalf("pods are at %v, %v", pods, err)
	}
	v := view{pods: pods}
	for from, want := range map[string]bool{"10.0.0.7": true, "10.0.0.8": false, "10.0.0.9": true, "10.0.1.1": false} {
		if got := v.internal(netip.MustParseAddr(from)); got != want {
			t.Errorf("%s is inside: %t", from, got)
		}
	}
}
