package verdict

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
)

func fixture() *model.Snapshot {
	ap, a, pre := netip.MustParseAddrPort, netip.MustParseAddr, netip.MustParsePrefix
	two := &model.Pool{Name: "web cluster", Protocol: model.TCP, Affinity: time.Hour, Backends: []model.Backend{
		{Addr: ap("10.244.0.1:8080"), Local: true}, {Addr: ap("10.244.1.1:8080")}}}
	local := &model.Pool{Name: "web local", Protocol: model.TCP, Backends: two.Backends[:1]}
	none := &model.Pool{Name: "none", Protocol: model.TCP}
	node := &model.Node{Name: "a", Addresses: []netip.Addr{a("10.0.0.1"), a("10.244.0.254")},
		Pods: []netip.Prefix{pre("10.244.0.0/16")}}
	s := &model.Snapshot{
		Node: node,
		ServiceNode: &model.ServiceNode{Node: node,
			NodePorts: []model.Range{{First: a("0.0.0.0"), Last: a("126.255.255.255")}}},
		Frontends: map[model.Entry]*model.Frontend{},
	}
	to := func(p *model.Pool, e model.Action) model.Target { return model.Target{Pool: p, Empty: e} }
	for _, f := range []*model.Frontend{
		{Entry: model.Entry{Addr: a("10.96.0.1"), Port: 80}, Internal: to(two, 0), External: to(two, 0),
			Masquerade: model.OriginsOf(model.FromNode, model.FromExternal)},
		{Entry: model.Entry{Addr: a("10.96.0.2"), Port: 80}, Internal: to(none, model.Reject),
			External: to(none, model.Drop)},
		{Entry: model.Entry{Addr: a("198.51.100.1"), Port: 80}, Internal: to(two, 0), External: to(two, 0),
			Sources: []netip.Prefix{pre("10.0.0.0/24")}},
		{Entry: model.Entry{Addr: a("198.51.100.2"), Port: 80}, Internal: to(two, 0), External: to(two, 0),
			Sources: []netip.Prefix{}},
		{Entry: model.Entry{Addr: a("0.0.0.0"), Port: 30080}, Internal: to(two, 0), External: to(local, model.Drop),
			Masquerade: model.OriginsOf(model.FromNode)},
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
func directly() *model.Snapshot {
	s, a := fixture(), netip.MustParseAddr
	s.ServiceNode.DSR, s.ServiceNode.Nodes = true, []netip.Addr{a("10.0.0.1"), a("10.0.0.2")}
	ap := netip.MustParseAddrPort
	pool := &model.Pool{Name: "web", Protocol: model.TCP, Backends: []model.Backend{
		{Addr: ap("10.244.0.1:8080"), Local: true}, {Addr: ap("10.244.1.1:8080"), Remote: true},
		{Addr: ap("203.0.113.1:8080")}}}
	f := &model.Frontend{Entry: model.Entry{Addr: a("0.0.0.0"), Port: 30081, Protocol: model.TCP},
		Internal: model.Target{Pool: pool}, External: model.Target{Pool: pool},
		Masquerade: model.AllOrigins, DSR: model.OriginsOf(model.FromExternal)}
	g := *f
	g.Entry.Addr, g.Entry.Port = a("198.51.100.3"), 80
	s.Frontends[f.Entry], s.Frontends[g.Entry] = f, &g
	return s
}

func TestDSR(t *testing.T) {
	// ~ marks a hidden source, ! one that would be, did the backend's node not answer
	for _, c := range []struct{ src, dst, want string }{
		{"192.0.2.1:1", "10.0.0.1:30081", "!10.244.0.1 !10.244.1.1 ~203.0.113.1"},
		{"192.0.2.1:1", "198.51.100.3:80", "!10.244.0.1 !10.244.1.1 ~203.0.113.1"},
		{"192.0.2.1:1", "10.244.0.254:30081", "~10.244.0.1 ~10.244.1.1 ~203.0.113.1"}, // no address that other nodes know
		{"10.0.0.1:1", "10.0.0.1:30081", "~10.244.0.1 ~10.244.1.1 ~203.0.113.1"},
		// a node: the backend's would not answer to itself
		{"10.0.0.2:1", "10.0.0.1:30081", "~10.244.0.1 ~10.244.1.1 ~203.0.113.1"},
		{"10.244.0.9:1", "10.0.0.1:30081", "~10.244.0.1 ~10.244.1.1 ~203.0.113.1"},
		{"10.244.0.1:1", "198.51.100.3:80", "~10.244.0.1 ~10.244.1.1 ~203.0.113.1"},
		{"192.0.2.1:1", "10.96.0.1:80", "~10.244.0.1 ~10.244.1.1"},
	} {
		got := ""
		for _, k := range Of(directly(), packet(c.src, c.dst, model.TCP)).Candidates {
			got += " " + map[[2]bool]string{{false, false}: "", {true, false}: "~",
				{false, true}: "!"}[[2]bool{k.Masqueraded, k.DSR}] + k.Backend.Addr.Addr().String()
		}
		if got != " "+c.want {
			t.Errorf("%s -> %s: got%s, want %s", c.src, c.dst, got, c.want)
		}
	}
	s := directly()
	s.Node.Pods = nil
	p := packet("10.244.1.1:1", "198.51.100.3:80", model.TCP)
	if k := Of(s, p).Candidates[1]; !k.Masqueraded || k.DSR {
		t.Errorf("a backend on another node that asks itself: %+v", k)
	}
}

// A node port at another node's address is this node's to translate for its pods and processes, and shows pods.
func TestRemoteNodePorts(t *testing.T) {
	s, a := fixture(), netip.MustParseAddr
	s.ServiceNode.RemoteNodePorts = []netip.Addr{a("10.0.0.2"), a("10.0.0.3")}
	f := *s.Frontends[model.Entry{Addr: a("0.0.0.0"), Port: 30080, Protocol: model.TCP}]
	f.Entry.Port, f.Masquerade, f.Remote = 30082, model.AllOrigins, true
	s.Frontends[f.Entry] = &f
	for _, c := range []struct{ src, dst, want string }{
		{"10.244.1.9:1", "10.0.0.2:30082", "forward 10.244.0.1 10.244.1.1"},
		{"10.244.0.1:1", "10.0.0.3:30082", "forward ~10.244.0.1 10.244.1.1"}, // back to itself
		{"10.0.0.1:1", "10.0.0.2:30082", "forward ~10.244.0.1 ~10.244.1.1"},
		{"10.244.1.9:1", "10.0.0.1:30082", "forward ~10.244.0.1 ~10.244.1.1"}, // other nodes' pods may come here
		{"192.0.2.1:1", "10.0.0.2:30082", "pass"},
		{"10.244.1.9:1", "10.0.0.4:30082", "pass"}, // no node's
		{"10.244.1.9:1", "10.0.0.2:30080", "pass"}, // not served there: policy Local, a host port
	} {
		v := Of(s, packet(c.src, c.dst, model.TCP))
		got := v.Action.String()
		for _, k := range v.Candidates {
			got += " " + map[bool]string{true: "~"}[k.Masqueraded] + k.Backend.Addr.Addr().String()
		}
		if got != c.want {
			t.Errorf("%s -> %s: %s, want %s: %s", c.src, c.dst, got, c.want, v.Reason)
		}
	}
	want := "10.0.0.2 is another node's, which serves its node port itself"
	if v := Of(s, packet("192.0.2.1:1", "10.0.0.2:30082", model.TCP)); v.Reason != want {
		t.Errorf("reason %q, want %q", v.Reason, want)
	}
}

func TestOf(t *testing.T) {
	for _, c := range []struct {
		src, dst string
		proto    model.Protocol
		want     string // action, then candidates; ~ marks a hidden source
	}{
		{"10.244.1.9:1", "10.96.0.1:80", model.TCP, "forward 10.244.0.1 10.244.1.1"},
		{"10.244.0.1:1", "10.96.0.1:80", model.TCP, "forward ~10.244.0.1 10.244.1.1"}, // hairpin
		// not local: not this node's hairpin
		{"10.244.1.1:1", "10.96.0.1:80", model.TCP, "forward 10.244.0.1 10.244.1.1"},
		{"10.0.0.1:1", "10.96.0.1:80", model.TCP, "forward ~10.244.0.1 ~10.244.1.1"}, // the node itself
		// its address wins over the pods' range
		{"10.244.0.254:1", "10.96.0.1:80", model.TCP, "forward ~10.244.0.1 ~10.244.1.1"},
		{"127.0.0.1:1", "10.96.0.1:80", model.TCP, "forward ~10.244.0.1 ~10.244.1.1"},
		{"192.0.2.1:1", "10.96.0.1:80", model.TCP, "forward ~10.244.0.1 ~10.244.1.1"},
		{"192.0.2.1:1", "10.96.0.1:81", model.TCP, "pass"},
		{"192.0.2.1:1", "10.96.0.1:80", model.UDP, "pass"},
		{"10.244.1.9:1", "10.96.0.2:80", model.TCP, "reject"},
		{"192.0.2.1:1", "10.96.0.2:80", model.TCP, "drop"},
		{"10.0.0.77:1", "198.51.100.1:80", model.TCP, "forward 10.244.0.1 10.244.1.1"},
		{"10.0.1.77:1", "198.51.100.1:80", model.TCP, "drop"},
		{"10.0.0.77:1", "198.51.100.2:80", model.TCP, "drop"}, // an empty list allows no source
		{"192.0.2.1:1", "10.0.0.1:30080", model.TCP, "forward 10.244.0.1"},
		{"10.244.1.9:1", "10.0.0.1:30080", model.TCP, "forward 10.244.0.1 10.244.1.1"},
		{"10.0.0.1:1", "10.0.0.1:30080", model.TCP, "forward ~10.244.0.1 ~10.244.1.1"},
		{"192.0.2.1:1", "10.0.0.2:30080", model.TCP, "pass"},  // another node's address
		{"127.0.0.1:1", "127.0.0.1:30080", model.TCP, "pass"}, // loopback takes no node ports here
		{"[fd00::9]:1", "[fd00::1]:30080", model.TCP, "pass"},
	} {
		o := Of(fixture(), packet(c.src, c.dst, c.proto))
		got := []string{o.Action.String()}
		for _, k := range o.Candidates {
			h := ""
			if k.Masqueraded {
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
		{prefix, "eth0", "10.244.1.9:1", model.FromExternal},
		{prefix, "", "192.0.2.1:1", model.FromExternal},
		{prefix, "veth12", "10.0.0.1:1", model.FromNode}, // an address of the node wins
		{name, "cni0", "192.0.2.1:1", model.FromPod},
		{name, "cni01", "192.0.2.1:1", model.FromExternal},
		{model.Interfaces{}, "", "192.0.2.1:1", model.FromExternal},
		{model.Interfaces{Prefix: true}, "veth12", "192.0.2.1:1", model.FromExternal},
	} {
		s := fixture()
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
	s := fixture()
	e := model.Entry{Addr: netip.MustParseAddr("10.96.0.53"), Port: 53, Protocol: model.UDP}
	s.Frontends[e] = &model.Frontend{Entry: e, Internal: model.Target{Pool: pool}, External: model.Target{Pool: pool}}
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
	s, a := fixture(), netip.MustParseAddr
	s.ClusterIPs = map[netip.Addr]*model.ClusterIP{a("10.96.0.1"): {Owner: model.Owner{Kind: model.KindService,
		Namespace: "shop", Name: "web"}, Addr: a("10.96.0.1")}, a("10.0.0.1"): {Addr: a("10.0.0.1")}}
	s.ServiceNode.ServiceRanges = []model.Range{{First: a("10.96.0.0"), Last: a("10.96.255.255")},
		{First: a("10.0.0.0"), Last: a("10.0.0.255")}}
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

// The steps lead to the outcome, which is what the last one decides.
func TestSteps(t *testing.T) {
	for _, c := range []struct{ src, dst, want string }{
		{"192.0.2.1:1", "10.96.0.1:80", "frontend pass, endpoints forward"},
		{"192.0.2.1:1", "10.96.0.1:81", "frontend pass"},
		{"10.0.0.7:1", "198.51.100.1:80", "frontend pass, sources pass, endpoints forward"},
		{"192.0.2.1:1", "198.51.100.1:80", "frontend pass, sources drop"},
		{"192.0.2.1:1", "10.96.0.2:80", "frontend pass, endpoints drop"},
	} {
		v := Of(fixture(), packet(c.src, c.dst, model.TCP))
		var got []string
		for _, s := range v.Steps {
			got = append(got, s.Stage.String()+" "+s.Action.String())
		}
		if is := strings.Join(got, ", "); is != c.want {
			t.Errorf("%s -> %s: %s, want %s", c.src, c.dst, is, c.want)
		}
		if last := v.Steps[len(v.Steps)-1]; last.Action != v.Action || last.Reason != v.Reason || v.Reason == "" {
			t.Errorf("%s -> %s: the last step %+v is not the outcome %+v", c.src, c.dst, last, v.Outcome)
		}
	}
}
