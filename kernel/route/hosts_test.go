package route

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
)

// watched is what Follow reports of a namespace.
type watched struct {
	*testing.T
	seen chan []Device
	last []Device
}

// follow has the devices of a namespace followed until the test ends.
func follow(t *testing.T, ns *netns.Namespace) *watched {
	w := &watched{T: t, seen: make(chan []Device, 100)}
	var h *Hosts
	check(t, ns.Do(func() (err error) {
		h, err = OpenHosts()
		return err
	}))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- h.Follow(ctx, func(l []Device) { w.seen <- l }) }()
	t.Cleanup(func() {
		cancel()
		check(t, <-ended, h.Close())
	})
	return w
}

// until waits until the devices are so, in text.
func (w *watched) until(what string, want ...string) {
	w.Helper()
	for got := []string(nil); ; {
		select {
		case now := <-w.seen:
			if w.last != nil && slices.EqualFunc(now, w.last, Device.Equal) {
				w.Errorf("%s: notified of %v again", what, now)
			}
			w.last, got = now, nil
			for _, d := range now {
				got = append(got, strings.Join(strings.Fields(fmt.Sprintln(d.Name, d.Hosts, d.Links, d.Behind,
					strings.Join(d.Bypass[:], "; "))), " "))
			}
		case <-time.After(20 * time.Second):
			w.Fatalf("%s: %q, want %q", what, got, want)
		}
		if slices.Equal(got, want) {
			return
		}
	}
}

func to(prefix string, via string, dev int) Route {
	r := Route{To: netip.MustParsePrefix(prefix), Dev: dev}
	if via != "" {
		r.Via = netip.MustParseAddr(via)
	}
	return r
}

// Devices follow routes of full length on links, the other routes of their devices, and the devices themselves.
func TestHostsFollowRoutes(t *testing.T) {
	ns, c := space(t)
	pod0, err := c.AddVeth(link.End{Name: "pod0"}, link.End{Name: "peer0"}, ns)
	check(t, err)
	pod1, err := c.AddVeth(link.End{Name: "pod1"}, link.End{Name: "peer1"}, ns)
	check(t, err)
	w := follow(t, ns)
	w.until("no route")
	check(t, PutIn(ns, to("10.0.3.0/24", "", pod0), to("10.0.1.2/32", "", pod0), to("10.0.1.9/32", "10.0.1.2", pod0),
		to("10.0.1.3/32", "", pod1), to("fd00:1::2/128", "", pod1)))
	first := "pod0 [10.0.1.2] [10.0.3.0/24] [10.0.1.9/32] ;"
	w.until("routes", first, "pod1 [10.0.1.3 fd00:1::2] [] [] ;")
	second := func(verb string) { // a route that differs by its metric
		t.Helper()
		check(t, ns.Do(func() error {
			return exec.Command("ip", "route", verb, "10.0.1.2", "dev", "pod1", "metric", "5").Run()
		}))
	}
	second("add")
	w.until("two devices", first, "pod1 [10.0.1.2 10.0.1.3 fd00:1::2] [] [] ;")
	second("del")
	w.until("one of them again", first, "pod1 [10.0.1.3 fd00:1::2] [] [] ;")
	check(t, PutIn(ns, to("10.0.4.0/24", "10.0.1.2", pod0)))
	w.until("a range behind a host", "pod0 [10.0.1.2] [10.0.3.0/24] [10.0.1.9/32 10.0.4.0/24] ;",
		"pod1 [10.0.1.3 fd00:1::2] [] [] ;")
	check(t, DeleteIn(ns, to("10.0.4.0/24", "", pod0)), PutIn(ns, to("10.0.1.2/32", "", pod1)))
	w.until("another device", "pod1 [10.0.1.2 10.0.1.3 fd00:1::2] [] [] ;")
	check(t, DeleteIn(ns, to("10.0.1.3/32", "", pod1)), PutIn(ns, to("10.0.1.4/32", "", pod0)))
	w.until("a route is gone", "pod0 [10.0.1.4] [10.0.3.0/24] [10.0.1.9/32] ;", "pod1 [10.0.1.2 fd00:1::2] [] [] ;")
	check(t, DeleteIn(ns, to("fd00:1::2/128", "", pod1))) // the kernel reports IPv6's with their device
	w.until("IPv4 alone", "pod0 [10.0.1.4] [10.0.3.0/24] [10.0.1.9/32] ;", "pod1 [10.0.1.2] [] [] ;")
	check(t, c.Delete(pod1))
	w.until("a device is gone", "pod0 [10.0.1.4] [10.0.3.0/24] [10.0.1.9/32] ;")
	for _, d := range w.last {
		if d.Peer || d.Bridge {
			t.Errorf("%+v: both ends of its pair are in one namespace", d)
		}
	}
}

// A device whose other end is in another namespace is known as that, and its link-local range leads nowhere.
func TestPeerDevice(t *testing.T) {
	ns, c := space(t)
	pod, err := c.AddVeth(link.End{Name: "pod0"}, link.End{Name: "eth0"}, netnstest.New(t))
	check(t, err, c.AddAddress(pod, netip.MustParsePrefix("fe80::1/64")))
	w := follow(t, ns)
	w.until("no route")
	check(t, PutIn(ns, to("10.0.1.2/32", "", pod)))
	w.until("a route", "pod0 [10.0.1.2] [] [] ;")
	if !w.last[0].Peer {
		t.Errorf("%+v isn't the end of a pair", w.last[0])
	}
}

// Bridges are known by the ranges that they lead to, and by the setting that has what they forward bypass netfilter, of
// the namespace or of the bridge.
func TestBridgesFollowTheirSettings(t *testing.T) {
	ns, c := space(t)
	set := func(four, six string) {
		t.Helper()
		check(t, sysctl.Set(ns, sysctl.Setting{Name: "net/bridge/bridge-nf-call-iptables", Value: four},
			sysctl.Setting{Name: "net/bridge/bridge-nf-call-ip6tables", Value: six}))
	}
	set("1", "1")
	bridge, err := c.AddBridge("cni0")
	check(t, err, c.AddAddress(bridge, netip.MustParsePrefix("10.0.1.1/24")))
	w := follow(t, ns)
	w.until("filtered", "cni0 [] [10.0.1.0/24] [] ;")
	set("0", "1")
	w.until("IPv4 is not", "cni0 [] [10.0.1.0/24] [] net.bridge.bridge-nf-call-iptables is 0;")
	set("0", "0")
	w.until("neither is",
		"cni0 [] [10.0.1.0/24] [] net.bridge.bridge-nf-call-iptables is 0; net.bridge.bridge-nf-call-ip6tables is 0")
	check(t, ns.Do(func() error {
		return exec.Command("ip", "link", "set", "cni0", "type", "bridge", "nf_call_ip6tables", "1").Run()
	}))
	w.until("IPv6 is by the bridge's own setting", "cni0 [] [10.0.1.0/24] [] net.bridge.bridge-nf-call-iptables is 0;")
	check(t, c.Delete(bridge))
	w.until("no bridge")
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
