package route

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/sysctl"
)

// Device is a network device, and what the main table leads to by it. Link-local ranges are left out.
type Device struct {
	Name   string
	Peer   bool           // one end of a pair, whose other end is in another network namespace
	Bridge bool           // a bridge
	Hosts  []netip.Addr   // by routes to a single address on its link; sorted
	Links  []netip.Prefix // by other routes to its link; sorted
	Behind []netip.Prefix // by next hops there; sorted
	// Bypass is the setting of the kernel by which what a bridge forwards between its ports doesn't pass netfilter, of
	// IPv4 and IPv6; "": it does, or the device is no bridge.
	Bypass [2]string
}

// Equal reports whether d and o say the same.
func (d Device) Equal(o Device) bool {
	return d.Name == o.Name && d.Peer == o.Peer && d.Bridge == o.Bridge && d.Bypass == o.Bypass &&
		slices.Equal(d.Hosts, o.Hosts) && slices.Equal(d.Links, o.Links) && slices.Equal(d.Behind, o.Behind)
}

// Hosts are the hosts on links of one network namespace, and the devices that lead to them.
type Hosts struct {
	s, events *netlink.Socket
	ns        *netns.Namespace
	concerned atomic.Pointer[map[int]bool] // the indexes of the devices of the last listing
}

// OpenHosts opens those of the calling thread's namespace.
func OpenHosts() (*Hosts, error) {
	s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return nil, err
	}
	// The kernel reports no route of IPv4 that goes with its device.
	events, err := netlink.Listen(unix.NETLINK_ROUTE, 0, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
		unix.RTNLGRP_LINK)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch routes: %w", err), s.Close())
	}
	ns, err := netns.Current()
	if err != nil {
		return nil, errors.Join(err, s.Close(), events.Close())
	}
	h := &Hosts{s: s, events: events, ns: ns}
	h.concerned.Store(&map[int]bool{})
	return h, nil
}

// Close closes the sockets.
func (h *Hosts) Close() error { return errors.Join(h.s.Close(), h.events.Close(), h.ns.Close()) }

// toHost reports whether r is a route to one host on a link.
func (r Route) toHost() bool {
	return r.IsMain() && r.To.IsSingleIP() && r.Dev != 0 && !r.Via.IsValid()
}

// Devices returns the bridges, and the devices that lead to hosts by routes to single addresses, sorted by name.
func (h *Hosts) Devices() ([]Device, error) {
	shapes, err := link.Shapes(h.s)
	if err != nil {
		return nil, err
	}
	routes, err := list(h.s, [headerLength]byte{4: unix.RT_TABLE_MAIN, 7: unix.RTN_UNICAST}, func(r Route) bool {
		return r.IsMain() && shapes[r.Dev].Name != ""
	})
	if err != nil {
		return nil, err
	}
	of := map[int]*Device{}
	add := func(index int) {
		if of[index] == nil {
			s := shapes[index]
			of[index] = &Device{Name: s.Name, Peer: s.Peer, Bridge: s.Bridge}
		}
	}
	for index, s := range shapes {
		if s.Bridge {
			add(index)
		}
	}
	for _, r := range routes {
		if r.toHost() {
			add(r.Dev)
		}
	}
	for _, r := range routes {
		if d := of[r.Dev]; d != nil {
			d.leads(r)
		}
	}
	for index, d := range of {
		if d.Bridge {
			d.Bypass = h.bypass(shapes[index].Calls)
		}
	}
	return h.sorted(of), nil
}

// leads adds a route to those of a device.
func (d *Device) leads(r Route) {
	switch {
	case r.To.Addr().IsLinkLocalUnicast() && (!r.To.IsSingleIP() || r.To.Addr().Is6()):
	case r.toHost():
		d.Hosts = append(d.Hosts, r.To.Addr())
	case r.Via.IsValid():
		d.Behind = append(d.Behind, r.To)
	default:
		d.Links = append(d.Links, r.To)
	}
}

// sorted returns devices by name, and remembers them.
func (h *Hosts) sorted(of map[int]*Device) []Device {
	known, l := make(map[int]bool, len(of)), make([]Device, 0, len(of))
	for index, d := range of {
		slices.SortFunc(d.Hosts, netip.Addr.Compare)
		slices.SortFunc(d.Links, netip.Prefix.Compare)
		slices.SortFunc(d.Behind, netip.Prefix.Compare)
		d.Hosts, d.Links, d.Behind = slices.Compact(d.Hosts), slices.Compact(d.Links), slices.Compact(d.Behind)
		l, known[index] = append(l, *d), true
	}
	h.concerned.Store(&known)
	slices.SortFunc(l, func(a, b Device) int { return strings.Compare(a.Name, b.Name) })
	return l
}

// bridgeCalls are the settings that have what bridges forward pass netfilter, of IPv4 and IPv6.
var bridgeCalls = [2]string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"}

// bypass returns why what a bridge forwards doesn't pass netfilter, given which of its own settings are on.
func (h *Hosts) bypass(own [2]bool) (why [2]string) {
	for family, name := range bridgeCalls {
		var calls int
		err := h.ns.Do(func() (err error) {
			calls, err = sysctl.Number("net/bridge/" + name)
			return err
		})
		switch {
		case errors.Is(err, fs.ErrNotExist):
			why[family] = fmt.Sprintf("net.bridge.%s is absent", name)
		case err != nil:
			why[family] = err.Error()
		case calls == 0 && !own[family]:
			why[family] = fmt.Sprintf("net.bridge.%s is 0", name)
		}
	}
	return why
}

// period is how often the settings of bridges are read: the kernel has no event for their changes.
const period = 5 * time.Second

// Follow calls notify with what Devices returns, and again whenever that has changed, until ctx ends.
func (h *Hosts) Follow(ctx context.Context, notify func([]Device)) error {
	signals, err := h.events.Watch(ctx, true, func(m netlink.Message) bool {
		r, is := Of(m)
		return is && (r.toHost() || r.IsMain() && (*h.concerned.Load())[r.Dev]) ||
			m.Type == unix.RTM_NEWLINK || m.Type == unix.RTM_DELLINK
	})
	if err != nil {
		return fmt.Errorf("watch routes: %w", err)
	}
	tick := time.NewTicker(period)
	defer tick.Stop()
	var known []Device
	for first := true; ; {
		due := true
		select {
		case _, open := <-signals:
			if !open {
				return nil
			}
		case <-tick.C:
			due = slices.ContainsFunc(known, func(d Device) bool { return d.Bridge })
		}
		if !due {
			continue
		}
		now, err := h.Devices()
		if err != nil {
			return err
		}
		if first || !slices.EqualFunc(known, now, Device.Equal) {
			first, known = false, now
			notify(now)
		}
	}
}
