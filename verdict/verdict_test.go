package verdict

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
)

func world() *model.Services {
	ap, a, pre := netip.MustParseAddrPort, netip.MustParseAddr, netip.MustParsePrefix
	two := &model.Pool{Name: "web cluster", Protocol: model.TCP, Affinity: time.Hour, Backends: []model.Backend{
		{Addr: ap("10.244.0.1:8080"), Local: true}, {Addr: ap("10.244.1.1:8080")}}}
	local := &model.Pool{Name: "web local", Protocol: model.TCP, Backends: two.Backends[:1]}
	none := &model.Pool{Name: "none", Protocol: model.TCP}
	s := &model.Services{
		Node: &model.Node{Name: "a", Addresses: []netip.Addr{a("10.0.0.1"), a("10.244.0.254")}, Pods: []netip.Prefix{pre("10.244.0.0/16")},
			NodePorts: []model.Range{{First: a("0.0.0.0"), Last: a("126.255.255.255")}}},
		Frontends: map[model.Entry]*model.Frontend{},
	}
	to := func(p *model.Pool, e model.Action) model.Target { return model.Target{Pool: p, Empty: e} }
	for _, f := range []*model.Frontend{
		{Entry: model.Entry{Addr: a("10.96.0.1"), Port: 80}, Inside: to(two, 0), Outside: to(two, 0), Hide: model.OriginsOf(model.FromNode, model.FromOutside)},
		{Entry: model.Entry{Addr: a("10.96.0.2"), Port: 80}, Inside: to(none, model.Reject), Outside: to(none, model.Drop)},
		{Entry: model.Entry{Addr: a("198.51.100.1"), Port: 80}, Inside: to(two, 0), Outside: to(two, 0), Sources: []netip.Prefix{pre("10.0.0.0/24")}},
		{Entry: model.Entry{Addr: a("198.51.100.2"), Port: 80}, Inside: to(two, 0), Outside: to(two, 0), Sources: []netip.Prefix{}},
		{Entry: model.Entry{Addr: a("0.0.0.0"), Port: 30080}, Inside: to(two, 0), Outside: to(local, model.Drop), Hide: model.OriginsOf(model.FromNode)},
	} {
		f.Entry.Protocol = model.TCP
		s.Frontends[f.Entry] = f
	}
	return s
}

func packet(src, dst string, proto model.Protocol) Packet {
	return Packet{Src: netip.MustParseAddrPort(src), Dst: netip.MustParseAddrPort(dst), Protocol: proto}
}

// directly has backends' nodes answer clients outside at a node port.
func directly() *model.Services {
	s, a := world(), netip.MustParseAddr
	s.Node.Direct, s.Node.Nodes = true, []netip.Addr{a("10.0.0.1"), a("10.0.0.2")}
	ap := netip.MustParseAddrPort
	pool := &model.Pool{Name: "web", Protocol: model.TCP, Backends: []model.Backend{
		{Addr: ap("10.244.0.1:8080"), Local: true}, {Addr: ap("10.244.1.1:8080"), Away: true}, {Addr: ap("203.0.113.1:8080")}}}
	f := &model.Frontend{Entry: model.Entry{Addr: a("0.0.0.0"), Port: 30081, Protocol: model.TCP}, Inside: model.Target{Pool: pool}, Outside: model.Target{Pool: pool},
		Hide: model.AllOrigins, Direct: model.OriginsOf(model.FromOutside)}
	g := *f
	g.Entry.Addr, g.Entry.Port = a("198.51.100.3"), 80
	s.Frontends[f.Entry], s.Frontends[g.Entry] = f, &g
	return s
}

func TestDirect(t *testing.T) {
	for _, c := range []struct{ src, dst, want string }{ // ~ marks a hidden source, ! one that would be, did the backend's node not answer
		{"192.0.2.1:1", "10.0.0.1:30081", "!10.244.0.1 !10.244.1.1 ~203.0.113.1"},
		{"192.0.2.1:1", "198.51.100.3:80", "!10.244.0.1 !10.244.1.1 ~203.0.113.1"},
		{"192.0.2.1:1", "10.244.0.254:30081", "~10.244.0.1 ~10.244.1.1 ~203.0.113.1"}, // no address that other nodes know
		{"10.0.0.1:1", "10.0.0.1:30081", "~10.244.0.1 ~10.244.1.1 ~203.0.113.1"},
		{"10.0.0.2:1", "10.0.0.1:30081", "~10.244.0.1 ~10.244.1.1 ~203.0.113.1"}, // a node: the backend's would not answer to itself
		{"10.244.0.9:1", "10.0.0.1:30081", "~10.244.0.1 ~10.244.1.1 ~203.0.113.1"},
		{"10.244.0.1:1", "198.51.100.3:80", "~10.244.0.1 ~10.244.1.1 ~203.0.113.1"},
		{"192.0.2.1:1", "10.96.0.1:80", "~10.244.0.1 ~10.244.1.1"},
	} {
		got := ""
		for _, k := range Of(directly(), packet(c.src, c.dst, model.TCP)).Candidates {
			got += " " + map[[2]bool]string{{false, false}: "", {true, false}: "~", {false, true}: "!"}[[2]bool{k.Hidden, k.Direct}] + k.Backend.Addr.Addr().String()
		}
		if got != " "+c.want {
			t.Errorf("%s -> %s: got%s, want %s", c.src, c.dst, got, c.want)
		}
	}
	s := directly()
	s.Node.Pods = nil
	p := packet("10.244.1.1:1", "198.51.100.3:80", model.TCP)
	if k := Of(s, p).Candidates[1]; !k.Hidden || k.Direct {
		t.Errorf("a backend on another node that asks itself: %+v", k)
	}
}

func TestOf(t *testing.T) {
	for _, c := range []struct {
		src, dst string
		proto    model.Protocol
		want     string // action, then candidates; ~ marks a hidden source
	}{
		{"10.244.1.9:1", "10.96.0.1:80", model.TCP, "forward 10.244.0.1 10.244.1.1"},
		{"10.244.0.1:1", "10.96.0.1:80", model.TCP, "forward ~10.244.0.1 10.244.1.1"},    // hairpin
		{"10.244.1.1:1", "10.96.0.1:80", model.TCP, "forward 10.244.0.1 10.244.1.1"},     // not local: not this node's hairpin
		{"10.0.0.1:1", "10.96.0.1:80", model.TCP, "forward ~10.244.0.1 ~10.244.1.1"},     // the node itself
		{"10.244.0.254:1", "10.96.0.1:80", model.TCP, "forward ~10.244.0.1 ~10.244.1.1"}, // its address wins over the pods' range
		{"127.0.0.1:1", "10.96.0.1:80", model.TCP, "forward ~10.244.0.1 ~10.244.1.1"},
		{"192.0.2.1:1", "10.96.0.1:80", model.TCP, "forward ~10.244.0.1 ~10.244.1.1"},
		{"192.0.2.1:1", "10.96.0.1:81", model.TCP, "pass"},
		{"192.0.2.1:1", "10.96.0.1:80", model.UDP, "pass"},
		{"10.244.1.9:1", "10.96.0.2:80", model.TCP, "reject"},
		{"192.0.2.1:1", "10.96.0.2:80", model.TCP, "drop"},
		{"10.0.0.77:1", "198.51.100.1:80", model.TCP, "forward 10.244.0.1 10.244.1.1"},
		{"10.0.1.77:1", "198.51.100.1:80", model.TCP, "drop"},
		{"10.0.0.77:1", "198.51.100.2:80", model.TCP, "drop"}, // an empty list lets nobody in
		{"192.0.2.1:1", "10.0.0.1:30080", model.TCP, "forward 10.244.0.1"},
		{"10.244.1.9:1", "10.0.0.1:30080", model.TCP, "forward 10.244.0.1 10.244.1.1"},
		{"10.0.0.1:1", "10.0.0.1:30080", model.TCP, "forward ~10.244.0.1 ~10.244.1.1"},
		{"192.0.2.1:1", "10.0.0.2:30080", model.TCP, "pass"},  // another node's address
		{"127.0.0.1:1", "127.0.0.1:30080", model.TCP, "pass"}, // loopback takes no node ports here
		{"[fd00::9]:1", "[fd00::1]:30080", model.TCP, "pass"},
	} {
		o := Of(world(), packet(c.src, c.dst, c.proto))
		got := []string{o.Action.String()}
		for _, k := range o.Candidates {
			h := ""
			if k.Hidden {
				h = "~"
			}
			got = append(got, h+k.Backend.Addr.Addr().String())
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s -> %s/%s: got %q (%s), want %q", c.src, c.dst, c.proto, s, o.Reason, c.want)
		}
		if o.Reason == "" {
			t.Errorf("%s -> %s/%s: no reason given", c.src, c.dst, c.proto)
		}
	}
}

func TestPodsByInterface(t *testing.T) {
	prefix, name := model.Interfaces{Name: "veth", Prefix: true}, model.Interfaces{Name: "cni0"}
	for _, c := range []struct {
		pods    model.Interfaces
		in, src string
		want    model.Origin
	}{
		{prefix, "veth12", "192.0.2.1:1", model.FromPod},
		{prefix, "veth", "192.0.2.1:1", model.FromPod},
		{prefix, "eth0", "10.244.1.9:1", model.FromOutside},
		{prefix, "", "192.0.2.1:1", model.FromOutside},
		{prefix, "veth12", "10.0.0.1:1", model.FromNode}, // an address of the node wins
		{name, "cni0", "192.0.2.1:1", model.FromPod},
		{name, "cni01", "192.0.2.1:1", model.FromOutside},
		{model.Interfaces{}, "", "192.0.2.1:1", model.FromOutside},
		{model.Interfaces{Prefix: true}, "veth12", "192.0.2.1:1", model.FromOutside},
	} {
		s := world()
		s.Node.Pods, s.Node.PodInterfaces = nil, c.pods
		p := packet(c.src, "10.96.0.1:80", model.TCP)
		p.In = c.in
		if got := Of(s, p).Origin; got != c.want {
			t.Errorf("pods' interfaces %q, %s in by %q: from %s, want %s", c.pods, c.src, c.in, got, c.want)
		}
	}
}

func TestStays(t *testing.T) {
	at := netip.MustParseAddrPort
	pool := &model.Pool{Protocol: model.UDP, Backends: []model.Backend{{Addr: at("10.244.0.1:53")}},
		Unselected: []model.Backend{{Addr: at("10.244.0.2:53")}}}
	s := world()
	e := model.Entry{Addr: netip.MustParseAddr("10.96.0.53"), Port: 53, Protocol: model.UDP}
	s.Frontends[e] = &model.Frontend{Entry: e, Inside: model.Target{Pool: pool}, Outside: model.Target{Pool: pool}}
	for _, c := range []struct {
		to, has string
		want    bool
	}{
		{"10.96.0.53:53", "10.244.0.1:53", true},
		{"10.96.0.53:53", "10.244.0.2:53", true},
		{"10.96.0.53:53", "10.244.0.3:53", false},
		{"10.96.0.53:53", "10.244.0.2:54", false},
		{"10.96.0.54:53", "10.244.0.1:53", false},
	} {
		if got := Stays(s, Packet{Src: at("10.244.1.9:1"), Dst: at(c.to), Protocol: model.UDP}, at(c.has)); got != c.want {
			t.Errorf("a flow to %s that has %s stays: %t", c.to, c.has, got)
		}
	}
}

func TestUnmatched(t *testing.T) {
	s, a := world(), netip.MustParseAddr
	s.ClusterIPs = map[netip.Addr]*model.ClusterIP{a("10.96.0.1"): {Service: "shop/web", Addr: a("10.96.0.1")}, a("10.0.0.1"): {Addr: a("10.0.0.1")}}
	s.Node.ServiceRanges = []model.Range{{First: a("10.96.0.0"), Last: a("10.96.255.255")}, {First: a("10.0.0.0"), Last: a("10.0.0.255")}}
	for _, c := range []struct {
		dst  string
		p    model.Protocol
		want Action
		why  string
	}{
		{"10.96.0.1:80", model.TCP, Forward, "2 backends"},
		{"10.96.0.1:81", model.TCP, Reject, "ClusterIP of shop/web"},
		{"10.96.0.1:80", model.UDP, Reject, "ClusterIP of shop/web"},
		{"10.96.0.9:80", model.TCP, Drop, "in a ServiceCIDR"},
		{"10.97.0.1:80", model.TCP, Pass, "no frontend"},
		{"10.0.0.1:81", model.TCP, Pass, "no frontend"}, // the node's own
	} {
		o := Of(s, Packet{Src: netip.MustParseAddrPort("10.244.0.9:40000"),
			Dst: netip.MustParseAddrPort(c.dst), Protocol: c.p})
		if o.Action != c.want || !strings.Contains(o.Reason, c.why) {
			t.Errorf("%s/%s: %s, %s; want %s, %s", c.dst, c.p, o.Action, o.Reason, c.want, c.why)
		}
	}
}
