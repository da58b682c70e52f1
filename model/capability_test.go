package model

import (
	"net/netip"
	"slices"
	"testing"
	"time"
)

func TestPackets(t *testing.T) {
	own := netip.MustParseAddr("10.96.0.1")
	inside := &Pool{Protocol: UDP, Scheduler: Maglev, Affinity: time.Hour,
		Backends: []Backend{{Addr: netip.AddrPortFrom(own, 80)}}}
	outside := &Pool{Protocol: UDP}
	f := &Frontend{Via: ViaClusterIP, Entry: Entry{Addr: own, Port: 80, Protocol: UDP},
		Internal: Target{Pool: inside}, External: Target{Pool: outside}}
	port := &Frontend{Via: "NodePort", Entry: Entry{Addr: netip.IPv6Unspecified(), Port: 30080, Protocol: TCP},
		Internal: f.External,
		External: f.External, Sources: []netip.Prefix{netip.MustParsePrefix("fd00::/8")}}
	outsideOnly := OriginsOf(FromExternal)
	for _, c := range []struct {
		name        string
		packets     *Packets
		f           *Frontend
		o           Origins
		has, hasOut bool // from anywhere, from outside
	}{
		{"none", nil, f, AllOrigins, false, false},
		{"all", &Packets{}, f, AllOrigins, true, true},
		{"protocol", &Packets{Protocols: []Protocol{TCP, UDP}}, f, AllOrigins, true, true},
		{"other protocol", &Packets{Protocols: []Protocol{SCTP}}, f, AllOrigins, false, false},
		{"family", &Packets{Family: 4}, f, AllOrigins, true, true},
		{"other family", &Packets{Family: 6}, f, AllOrigins, false, false},
		{"port", &Packets{Port: 80, Addresses: true}, f, AllOrigins, true, true},
		{"address", &Packets{Addresses: true}, port, AllOrigins, false, false},
		{"node port", &Packets{NodePorts: true, Family: 6, Ranges: true}, port, AllOrigins, true, true},
		{"no node port", &Packets{NodePorts: true}, f, AllOrigins, false, false},
		{"via", &Packets{Via: ViaClusterIP}, f, AllOrigins, true, true},
		{"not via", &Packets{NotVia: ViaClusterIP}, f, AllOrigins, false, false},
		{"origin", &Packets{Origins: OriginsOf(FromNode)}, f, AllOrigins, true, false},
		{"affinity", &Packets{Affinity: true}, f, AllOrigins, true, false},
		{"scheduler", &Packets{Schedulers: SchedulersOf(Maglev)}, f, AllOrigins, true, false},
		{"own address", &Packets{OwnAddress: true}, f, AllOrigins, true, false},
		{"ranges", &Packets{Ranges: true}, f, AllOrigins, false, false},
		{"unmatched", &Packets{Unmatched: true}, f, AllOrigins, false, false},
		{"unmatched, of none", &Packets{Unmatched: true}, nil, AllOrigins, true, true},
		{"of none", &Packets{}, nil, AllOrigins, false, false},
		{"unmatched, of another protocol", &Packets{Unmatched: true, Protocols: []Protocol{SCTP}}, nil, AllOrigins, false,
			false},
	} {
		protocol := TCP
		if c.f != nil {
			protocol = c.f.Entry.Protocol
		}
		if has := c.packets.Has(c.f, protocol, c.o); has != c.has {
			t.Errorf("%s: %t", c.name, has)
		}
		if has := c.packets.Has(c.f, protocol, outsideOnly); has != c.hasOut {
			t.Errorf("%s, from outside: %t", c.name, has)
		}
	}
}

func TestRemarksAbout(t *testing.T) {
	p := &Pool{Affinity: time.Hour}
	f := &Frontend{Entry: Entry{Addr: netip.MustParseAddr("10.96.0.1"), Port: 80, Protocol: TCP},
		Internal: Target{Pool: p}, External: Target{Pool: &Pool{}}}
	c := Capabilities{Remarks: []Remark{{Text: "in general"}, {Text: "of affinity", About: &Packets{Affinity: true}},
		{Text: "of all", About: &Packets{}}},
		Unserved: []Remark{{Text: "no SCTP", About: &Packets{Protocols: []Protocol{SCTP}}}}}
	if l := c.About(f, FromPod); !slices.Equal(l, []string{"of affinity", "of all"}) {
		t.Errorf("from a pod: %q", l)
	}
	if l := c.About(f, FromExternal); !slices.Equal(l, []string{"of all"}) {
		t.Errorf("from outside: %q", l)
	}
	sctp := *f
	sctp.Entry.Protocol = SCTP
	if c.WhyNot(f) != "" || c.WhyNot(&sctp) != "no SCTP" || (Capabilities{}).WhyNot(f) != "" {
		t.Error("frontends are served that can't be, or the reverse")
	}
}
