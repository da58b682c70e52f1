package route

import (
	"context"
	"maps"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// Devices follow routes of full length on links, and the devices themselves.
func TestHostsFollowRoutes(t *testing.T) {
	ns, c := space(t)
	pod0, err := c.AddVeth(link.End{Name: "pod0"}, link.End{Name: "peer0"}, ns)
	check(t, err)
	pod1, err := c.AddVeth(link.End{Name: "pod1"}, link.End{Name: "peer1"}, ns)
	check(t, err)
	var h *Hosts
	check(t, ns.Do(func() (err error) {
		h, err = OpenHosts()
		return err
	}))
	defer h.Close()
	ctx, cancel := context.WithCancel(t.Context())
	seen, ended := make(chan map[netip.Addr]string, 100), make(chan error)
	go func() { ended <- h.Follow(ctx, func(m map[netip.Addr]string) { seen <- m }) }()
	var last map[netip.Addr]string
	until := func(what string, want map[string]string) {
		t.Helper()
		wanted := map[netip.Addr]string{}
		for a, name := range want {
			wanted[netip.MustParseAddr(a)] = name
		}
		for {
			select {
			case now := <-seen:
				if last != nil && maps.Equal(now, last) {
					t.Errorf("%s: notified of %v again", what, now)
				}
				last = now
			case <-time.After(10 * time.Second):
				t.Fatalf("%s: %v, want %v", what, last, wanted)
			}
			if maps.Equal(last, wanted) {
				return
			}
		}
	}
	to := func(prefix string, via string, dev int) Route {
		r := Route{To: netip.MustParsePrefix(prefix), Dev: dev}
		if via != "" {
			r.Via = netip.MustParseAddr(via)
		}
		return r
	}
	until("no route", nil)
	check(t, PutIn(ns, to("10.0.1.2/32", "", pod0), to("10.0.3.0/24", "", pod0), to("10.0.1.9/32", "10.0.1.2", pod0),
		to("10.0.1.3/32", "", pod1), to("fd00:1::2/128", "", pod1)))
	until("routes", map[string]string{"10.0.1.2": "pod0", "10.0.1.3": "pod1", "fd00:1::2": "pod1"})
	second := func(verb string) { // a route that differs by its metric
		t.Helper()
		check(t, ns.Do(func() error {
			return exec.Command("ip", "route", verb, "10.0.1.2", "dev", "pod1", "metric", "5").Run()
		}))
	}
	second("add")
	until("two devices", map[string]string{"10.0.1.3": "pod1", "fd00:1::2": "pod1"})
	second("del")
	until("one of them again", map[string]string{"10.0.1.2": "pod0", "10.0.1.3": "pod1", "fd00:1::2": "pod1"})
	check(t, PutIn(ns, to("10.0.1.2/32", "", pod1)))
	until("another device", map[string]string{"10.0.1.2": "pod1", "10.0.1.3": "pod1", "fd00:1::2": "pod1"})
	check(t, DeleteIn(ns, to("10.0.1.3/32", "", pod1)), PutIn(ns, to("10.0.1.4/32", "", pod0)))
	until("a route is gone", map[string]string{"10.0.1.2": "pod1", "10.0.1.4": "pod0", "fd00:1::2": "pod1"})
	check(t, DeleteIn(ns, to("fd00:1::2/128", "", pod1))) // the kernel reports IPv6's with their device
	until("IPv4 alone", map[string]string{"10.0.1.2": "pod1", "10.0.1.4": "pod0"})
	check(t, c.Delete(pod1))
	until("a device is gone", map[string]string{"10.0.1.4": "pod0"})
	cancel()
	check(t, <-ended)
}

// A namespace in which nothing was ever up has no table of routes.
func TestNoTableHasNoRoutes(t *testing.T) {
	check(t, netnstest.New(t).Do(func() error {
		s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
		if err != nil {
			return err
		}
		defer s.Close()
		if l, err := Reached(s); err != nil || len(l) != 0 {
			t.Errorf("%v, %v: want none", l, err)
		}
		return nil
	}))
}
