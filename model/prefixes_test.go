package model

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
)

func TestPrefixes(t *testing.T) {
	for _, c := range []struct{ first, last, want string }{
		{"10.96.0.0", "10.96.255.255", "[10.96.0.0/16]"},
		{"10.96.0.0", "10.96.0.8", "[10.96.0.0/29 10.96.0.8/32]"},
		{"10.96.0.10", "10.96.0.12", "[10.96.0.10/31 10.96.0.12/32]"},
		{"0.0.0.0", "255.255.255.255", "[0.0.0.0/0]"},
		{"fd96::1", "fd96::3", "[fd96::1/128 fd96::2/127]"},
	} {
		r := Range{First: netip.MustParseAddr(c.first), Last: netip.MustParseAddr(c.last)}
		if got := fmt.Sprint(r.Prefixes()); got != c.want {
			t.Errorf("%s: %s, want %s", r, got, c.want)
		}
	}
}

func TestPrefixCount(t *testing.T) {
	d := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		bytes := []int{4, 16}[d.IntN(2)]
		var a, b netip.Addr
		for _, x := range []*netip.Addr{&a, &b} {
			l := make([]byte, bytes)
			for i := d.IntN(bytes); i < bytes; i++ {
				l[i] = []byte{0, 255, byte(d.Uint32())}[d.IntN(3)]
			}
			*x, _ = netip.AddrFromSlice(l)
		}
		if b.Less(a) {
			a, b = b, a
		}
		if r := (Range{First: a, Last: b}); r.PrefixCount() != len(r.Prefixes()) {
			t.Fatalf("%s: %d prefixes, want %d", r, r.PrefixCount(), len(r.Prefixes()))
		}
	}
}
