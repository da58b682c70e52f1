package model

import (
	"fmt"
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
