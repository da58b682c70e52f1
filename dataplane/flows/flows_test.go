package flows

import (
	"net/netip"
	"testing"

	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/model"
)

func pool(addrs ...string) *model.Pool {
	p := &model.Pool{}
	for _, a := range addrs {
		p.Backends = append(p.Backends, model.Backend{Addr: netip.MustParseAddrPort(a)})
	}
	return p
}

func leads(internal, external *model.Pool) Allowed {
	return Allowed{&model.Frontend{Internal: model.Target{Pool: internal}, External: model.Target{Pool: external}}}
}

func key(addr string, proto model.Protocol) Key {
	a := netip.MustParseAddrPort(addr)
	return Key{Addr: a.Addr(), Port: a.Port(), Protocol: proto}
}

func TestStale(t *testing.T) {
	drains := pool("10.1.0.1:53")
	drains.Unselected = pool("10.1.0.2:53").Backends
	some := leads(drains, drains)
	some.Sources = []netip.Prefix{netip.MustParsePrefix("10.3.0.0/16")}
	c := cutter{
		now: map[Key]Allowed{
			key("10.96.0.53:53", model.UDP): leads(pool("10.1.0.1:53", "10.1.0.2:53"), pool("10.1.0.3:53")),
			key("0.0.0.0:30053", model.UDP): leads(pool("10.1.0.1:53"), pool()),
			key("10.96.0.55:53", model.UDP): leads(drains, drains),
			key("10.96.0.56:53", model.UDP): some,
			key("10.96.0.9:9", model.SCTP):  leads(pool("10.1.0.1:9"), pool("10.1.0.1:9")),
			key("[fd00::53]:53", model.UDP): leads(pool("[fd01::1]:53"), pool("[fd01::1]:53")),
		},
		past:   map[Key]Allowed{key("10.96.0.54:53", model.UDP): leads(pool("10.1.0.7:53"), pool("10.1.0.8:53"))},
		own:    map[netip.Addr]bool{netip.MustParseAddr("10.0.0.1"): true},
		remote: map[netip.Addr]bool{netip.MustParseAddr("10.0.0.3"): true},
	}
	remote := leads(pool("10.1.0.1:53"), pool())
	remote.Remote = true
	c.now[key("0.0.0.0:30054", model.UDP)] = remote
	gone := netip.MustParseAddr("10.0.0.4")
	c.moved = map[netip.Addr]bool{netip.MustParseAddr("10.0.0.5"): true, gone: true}
	c.remote[netip.MustParseAddr("10.0.0.5")] = true
	c.ports = map[Key]Allowed{key("0.0.0.0:30055", model.UDP): remote}
	for _, f := range []struct {
		proto           model.Protocol
		to, replySource string
		stale           bool
		what            string
	}{
		{model.UDP, "10.96.0.53:53", "10.1.0.1:53", false, "a backend for clients inside"},
		{model.UDP, "10.96.0.53:53", "10.1.0.3:53", false, "a backend for clients outside"},
		{model.UDP, "10.96.0.53:53", "10.1.0.9:53", true, "no backend any more"},
		{model.UDP, "10.96.0.53:53", "10.1.0.1:54", true, "another port of a backend"},
		{model.UDP, "10.96.0.55:53", "10.1.0.2:53", false, "an endpoint that serves, though new flows go to others"},
		{model.UDP, "10.96.0.55:53", "10.1.0.3:53", true, "an endpoint that doesn't"},
		{model.UDP, "10.96.0.56:53", "10.1.0.1:53", true, "a client that is not allowed"},
		{model.UDP, "10.96.0.53:53", "10.96.0.53:53", true, "never translated: from before the frontend"},
		{model.UDP, "10.96.0.53:54", "10.1.0.9:53", false, "an entry that is not ours"},
		{model.TCP, "10.96.0.53:53", "10.1.0.9:53", false, "TCP ends by itself"},
		{model.SCTP, "10.96.0.9:9", "10.1.0.2:9", true, "SCTP to a backend that went"},
		{model.UDP, "10.0.0.1:30053", "10.1.0.2:53", true, "a node port to a backend that went"},
		{model.UDP, "10.0.0.1:30053", "10.1.0.1:53", false, "a node port to a backend"},
		{model.UDP, "10.0.0.2:30053", "10.1.0.2:53", false, "another host's port of that number"},
		{model.UDP, "10.0.0.3:30054", "10.1.0.2:53", true, "another node's node port to a backend that went"},
		{model.UDP, "10.0.0.3:30054", "10.1.0.1:53", false, "another node's node port to a backend"},
		{model.UDP, "10.0.0.3:30054", "10.0.0.3:30054", true, "another node's node port that it served itself"},
		{model.UDP, "10.0.0.3:30053", "10.1.0.1:53", true, "a node port that another node serves itself from now on"},
		{model.UDP, "10.0.0.3:30053", "10.0.0.3:30053", false, "a node port that another node serves itself"},
		{model.UDP, "10.0.0.4:30055", "10.1.0.1:53", true, "an address that is another node's no more"},
		{model.UDP, "10.0.0.4:30055", "10.0.0.4:30055", false, "an address that is another node's no more, which serves"},
		{model.UDP, "10.0.0.5:30055", "10.0.0.5:30055", true, "an address that is another node's from now on"},
		{model.UDP, "10.0.0.5:30055", "10.1.0.1:53", false, "an address of another node, to a backend"},
		{model.UDP, "10.0.0.3:30055", "10.0.0.3:30055", false, "a node port that didn't change, at an address that didn't"},
		{model.UDP, "10.0.0.5:30056", "10.1.0.1:53", false, "a port of another node that is no node port"},
		{model.UDP, "10.0.0.2:30054", "10.1.0.2:53", false, "the port of a host that is no node"},
		{model.UDP, "[fd00::53]:53", "[fd01::2]:53", true, "IPv6"},
		{model.UDP, "10.96.0.54:53", "10.1.0.7:53", true, "the Service went, and this was its backend"},
		{model.UDP, "10.96.0.54:53", "10.1.0.9:53", false, "the Service went, but this flow was another's"},
	} {
		flow := conntrack.Flow{Protocol: uint8(f.proto), Source: netip.MustParseAddrPort("10.2.0.1:1000"),
			Destination: netip.MustParseAddrPort(f.to), ReplySource: netip.MustParseAddrPort(f.replySource)}
		if got := c.stale(flow); got != f.stale {
			t.Errorf("%s to %s answered by %s: stale is %v, want %v: %s", f.proto, f.to, f.replySource, got, f.stale, f.what)
		}
	}
}

// Of TCP, only connections to a frontend that are still opening and were never translated are cut.
func TestStaleTCP(t *testing.T) {
	c := cutter{
		now: map[Key]Allowed{key("10.96.0.10:80", model.TCP): {}, key("0.0.0.0:30080", model.TCP): {},
			key("[fd00::10]:80", model.TCP): {}, key("10.96.0.10:53", model.UDP): leads(pool(), pool())},
		own: map[netip.Addr]bool{netip.MustParseAddr("10.0.0.1"): true},
	}
	for _, f := range []struct {
		to, replySource string
		opening         bool
		stale           bool
		what            string
	}{
		{"10.96.0.10:80", "10.96.0.10:80", true, true, "opened before the frontend came"},
		{"[fd00::10]:80", "[fd00::10]:80", true, true, "IPv6"},
		{"10.0.0.1:30080", "10.0.0.1:30080", true, true, "a node port"},
		{"10.96.0.10:80", "10.96.0.10:80", false, false, "not translated, but open"},
		{"10.96.0.10:80", "10.1.0.1:80", true, false, "translated"},
		{"10.96.0.10:81", "10.96.0.10:81", true, false, "another port"},
		{"10.96.0.10:53", "10.96.0.10:53", true, false, "the port of another protocol"},
		{"10.0.0.2:30080", "10.0.0.2:30080", true, false, "another host's port of that number"},
	} {
		flow := conntrack.Flow{Protocol: uint8(model.TCP), Source: netip.MustParseAddrPort("10.2.0.1:1000"),
			Destination: netip.MustParseAddrPort(f.to), ReplySource: netip.MustParseAddrPort(f.replySource), Opening: f.opening}
		if got := c.stale(flow); got != f.stale {
			t.Errorf("to %s answered by %s: stale is %v, want %v: %s", f.to, f.replySource, got, f.stale, f.what)
		}
	}
}

// A cutter knows other nodes' addresses and node ports from the facts that became true.
func TestCutterLearnsFromFacts(t *testing.T) {
	at, other := Fact{Key: Key{Addr: netip.MustParseAddr("10.0.0.3")}}, Fact{Key: key("10.96.0.1:53", model.UDP)}
	port, tcp := Fact{Key: key("0.0.0.0:30053", model.UDP)}, Fact{Key: key("0.0.0.0:30080", model.TCP)}
	p := &Plane{remote: map[netip.Addr]bool{}, ports: map[Key]Allowed{}}
	facts := []Fact{at, port, tcp, other}
	c := p.cutter()
	for _, f := range facts {
		c.add(f)
	}
	if len(c.now) != 3 || len(c.past) != 0 || !c.moved[at.Key.Addr] || !p.remote[at.Key.Addr] || len(p.ports) != 2 {
		t.Errorf("added: %+v, %+v", c, p)
	}
	c = p.cutter()
	for _, f := range facts {
		if cuts := c.remove(f); cuts == (f == tcp) {
			t.Errorf("flows may be cut for %v: %t", f.Key, cuts)
		}
	}
	if len(c.now) != 0 || len(c.past) != 2 || !c.moved[at.Key.Addr] || len(p.remote)+len(p.ports) != 0 {
		t.Errorf("removed: %+v, %+v", c, p)
	}
}

// TCP has one fact for a frontend, whatever its backends: their changes cost nothing.
func TestRender(t *testing.T) {
	p := &Plane{}
	f := func(proto model.Protocol) *model.Frontend {
		to := model.Target{Pool: pool("10.1.0.1:53")}
		return &model.Frontend{Internal: to, External: to,
			Entry: model.Entry{Addr: netip.MustParseAddr("10.96.0.1"), Port: 53, Protocol: proto}}
	}
	for proto, allows := range map[model.Protocol]bool{model.TCP: false, model.UDP: true, model.SCTP: true} {
		facts := p.Render(f(proto))
		if len(facts) != 1 || (facts[0].Value != Allowed{}) != allows {
			t.Errorf("%s: %v", proto, facts)
		}
	}
	node := &model.ServiceNode{RemoteNodePorts: []netip.Addr{netip.MustParseAddr("10.0.0.3")}}
	if facts := p.Render(node); len(facts) != 1 {
		t.Errorf("another node's address: %v", facts)
	}
	if got := p.Render(&model.Pool{}); got != nil {
		t.Errorf("a pool has facts: %v", got)
	}
}
