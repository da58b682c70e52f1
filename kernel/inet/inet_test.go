package inet

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAddressesOfBothFamilies(t *testing.T) {
	for _, c := range []struct {
		at, any string
		family  int
	}{{"10.0.0.1:80", "0.0.0.0", unix.AF_INET}, {"[fd00::1]:53", "::", unix.AF_INET6}} {
		at := netip.MustParseAddrPort(c.at)
		if got := AddrPort(Sockaddr(at)); got != at {
			t.Errorf("%s became %s", at, got)
		}
		if f, a := Family(at.Addr()), Unspecified(at.Addr()); f != c.family || a.String() != c.any {
			t.Errorf("%s is of family %d, and any address of it is %s", at, f, a)
		}
	}
	if got := AddrPort(&unix.SockaddrUnix{Name: "/x"}); got.IsValid() {
		t.Errorf("a path became %s", got)
	}
}
