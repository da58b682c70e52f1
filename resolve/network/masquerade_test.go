package network

import (
	"fmt"
	"net/netip"
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

func FuzzMasqueradeFile(f *testing.F) {
	f.Add([]byte("nonMasqueradeCIDRs: [10.0.0.0/8]\nnonMasqueradeCIDRsIPv6: ['fd00::/8']\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ParseMasquerade(b)
		for _, p := range m.Except {
			if err == nil && (!p.IsValid() || p != p.Masked() || p.Addr().Is4In6()) {
				t.Errorf("%s", p)
			}
		}
	})
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
