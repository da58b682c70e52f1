package network

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestMasqueradeFile(t *testing.T) {
	for _, test := range []struct{ file, want string }{
		{"", "{false [] false false }"},
		{"nonMasqueradeCIDRs: [10.0.0.0/8, 192.168.0.0/16]\nmasqLinkLocal: true\nresyncInterval: 60s\n",
			"{false [10.0.0.0/8 192.168.0.0/16] true false }"},
		{`{"nonMasqueradeCIDRsIPv6": ["fd00::1/8"], "masqLinkLocalIPv6": true}`, "{false [fd00::/8] false true }"},
		{"nonMasqueradeCIDRs: [fd00::/8]", `"fd00::/8" is no IPv4 range`},
		{"nonMasqueradeCIDRsIPv6: [x]", `"x" is no IPv6 range`},
		{"nonMasquerade: []", "unknown field"},
		{"- x", "cannot unmarshal"},
	} {
		m, err := ParseMasquerade([]byte(test.file))
		if got := fmt.Sprint(m, err); !strings.Contains(got, test.want) {
			t.Errorf("%q: %s, want %s", test.file, got, test.want)
		}
	}
}

// FuzzMasqueradeFile has no address see a pod's own that the file doesn't name, nor one of those that it does be
// masqueraded; and what was read be the same once it is written and read again.
func FuzzMasqueradeFile(f *testing.F) {
	f.Add([]byte("nonMasqueradeCIDRs: [10.0.0.0/8]\nnonMasqueradeCIDRsIPv6: ['fd00::/8']\n"), []byte{10, 1, 2, 3})
	f.Add([]byte("nonMasqueradeCIDRs: [10.0.0.7/8, 10.1.0.0/16, 0.0.0.0/0]\nmasqLinkLocal: true\n"),
		[]byte{169, 254, 1, 1})
	f.Add([]byte(`{"nonMasqueradeCIDRsIPv6": ["fe80::/9", "::/0"], "masqLinkLocalIPv6": true, "resyncInterval": 1}`),
		[]byte("\xfe\x80............\x00\x01"))
	f.Fuzz(func(t *testing.T, b, address []byte) {
		m, err := ParseMasquerade(b)
		if err != nil {
			return
		}
		r := New(Config{Node: "a", Masquerade: m})
		s := survey{known: r, decision: &decision{}}
		except := s.decideMasquerade(&node{name: "a"}).Except
		for _, p := range except {
			if p != p.Masked() || p.Addr().Is4In6() {
				t.Errorf("%s", p)
			}
		}
		has := func(l []netip.Prefix, a netip.Addr) bool {
			return slices.ContainsFunc(l, func(p netip.Prefix) bool { return p.Contains(a) })
		}
		probes := []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
		if a, ok := netip.AddrFromSlice(address); ok {
			probes = append(probes, a.Unmap())
		}
		for _, p := range m.Except {
			probes = append(probes, p.Addr(), p.Addr().Prev(), last(p), last(p).Next())
		}
		for _, a := range probes {
			local := a.IsLinkLocalUnicast() && (a.Is4() && !m.LinkLocal4 || a.Is6() && !m.LinkLocal6)
			if want := a.IsValid() && (has(m.Except, a) || a.IsMulticast() || local); has(except, a) != want {
				t.Errorf("%s sees pods' own addresses: %t, want %t; %+v", a, !want, want, m)
			}
		}
		again, err := ParseMasquerade(masqueradeFile(t, m))
		if err != nil || fmt.Sprint(again) != fmt.Sprint(m) {
			t.Errorf("%v, %v; written %v", again, err, m)
		}
	})
}

// last returns the last address of a range.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// masqueradeFile returns the file that m is read from.
func masqueradeFile(t *testing.T, m Masquerade) []byte {
	file := map[string]any{"masqLinkLocal": m.LinkLocal4, "masqLinkLocalIPv6": m.LinkLocal6}
	for _, p := range m.Except {
		key := "nonMasqueradeCIDRs"
		if p.Addr().Is6() {
			key += "IPv6"
		}
		l, _ := file[key].([]string)
		file[key] = append(l, p.String())
	}
	b, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestMasqueradeExceptionsAreDisjoint(t *testing.T) {
	r := New(Config{Node: "a", ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
		Masquerade: Masquerade{Fault: "it is broken", Except: []netip.Prefix{netip.MustParsePrefix("10.96.1.0/24"),
			netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("169.254.0.0/24")}}})
	s := survey{known: r, decision: &decision{}}
	want := "[0.0.0.0/1 169.254.0.0/16 224.0.0.0/4 fe80::/10 ff00::/8]"
	if got := fmt.Sprint(s.decideMasquerade(&node{name: "a"}).Except); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if len(s.problems) != 1 || !strings.Contains(s.problems[0].Message, "it is broken") {
		t.Errorf("%v", s.problems)
	}
	r.SetMasquerade(Masquerade{Off: true})
	if s.decideMasquerade(&node{name: "a"}) != nil {
		t.Error("switched off, it is there")
	}
}

// TestMasqueradeExceptsAnAddressOnce has a file name the address of a node that pods reach through the tunnel.
func TestMasqueradeExceptsAnAddressOnce(t *testing.T) {
	set := config()
	set.Masquerade = Masquerade{Except: prefixes("172.16.0.3/32", "172.16.0.4/32")}
	r := New(set)
	r.Apply(nodes(nodeA, nodeC))
	if got := fmt.Sprint(r.Network().Network.Masquerade.Except); strings.Contains(got, "172.16.0.3") ||
		!strings.Contains(got, "172.16.0.4") || r.Network().Route(netip.MustParseAddr("172.16.0.3")) == nil {
		t.Errorf("%s", got)
	}
}
