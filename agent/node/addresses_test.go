package node

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// Addresses that others can reach are told of as they come and go; loopback, link-local ones and those of a
// kube-proxy's interface are not.
func TestAddressesFollow(t *testing.T) {
	netnstest.Do(t, func() {
		ip := func(args string) {
			if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				t.Errorf("ip %s: %v: %s", args, err, out)
			}
		}
		for _, args := range []string{"link set lo up", "link add eth9 type veth", "link add kube-ipvs0 type veth",
			"link set eth9 up",
			"address add 192.0.2.1/24 dev eth9", "address add 10.96.0.1/32 dev kube-ipvs0"} {
			ip(args)
		}
		a, err := OpenAddresses()
		if err != nil {
			t.Error(err)
			return
		}
		defer a.Close()
		ctx, stop := context.WithCancel(t.Context())
		observed, ended := make(chan []netip.Addr), make(chan error, 1)
		go func() { // on a thread of another namespace
			ended <- a.Follow(ctx, func(l []netip.Addr) { observed <- l })
		}()
		await := func(want string) {
			t.Helper()
			timeout := time.After(10 * time.Second)
			for last := ""; ; {
				select {
				case l := <-observed:
					if last = fmt.Sprint(l); last == want {
						return
					}
				case <-timeout:
					t.Errorf("told %s, want %s", last, want)
					return
				}
			}
		}
		await("[192.0.2.1]")
		ip("address add 2001:db8::1/64 dev eth9 nodad")
		await("[192.0.2.1 2001:db8::1]")
		ip("address add 10.96.0.2/32 dev kube-ipvs0")
		ip("address add 169.254.0.1/16 dev eth9")
		ip("address delete 192.0.2.1/24 dev eth9")
		await("[2001:db8::1]")
		ip("link delete eth9")
		await("[]")
		stop()
		if err := <-ended; err != nil {
			t.Errorf("ended with %v", err)
		}
		if l, err := a.List(); len(l) > 0 || err != nil {
			t.Errorf("at last: %v, %v", l, err)
		}
	})
}
