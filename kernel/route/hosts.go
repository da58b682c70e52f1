package route

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
)

// Hosts are the hosts on links of one network namespace that the main table has routes of full length to.
type Hosts struct{ s, events *netlink.Socket }

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
	return &Hosts{s, events}, nil
}

// Close closes the sockets.
func (h *Hosts) Close() error { return errors.Join(h.s.Close(), h.events.Close()) }

// toHost reports whether r is a route to one host on a link.
func (r Route) toHost() bool {
	return r.IsMain() && r.To.IsSingleIP() && r.Dev != 0 && !r.Via.IsValid()
}

// Devices returns the name of the device by which each host is reached. Hosts that several devices lead to are left
// out.
func (h *Hosts) Devices() (map[netip.Addr]string, error) {
	names, err := link.Names(h.s)
	if err != nil {
		return nil, err
	}
	routes, err := list(h.s, [headerLength]byte{4: unix.RT_TABLE_MAIN, 7: unix.RTN_UNICAST}, Route.toHost)
	if err != nil {
		return nil, err
	}
	devices := make(map[netip.Addr]string, len(routes))
	for _, r := range routes {
		a, name := r.To.Addr(), names[r.Dev]
		if was, twice := devices[a]; twice && was != name {
			name = ""
		}
		devices[a] = name
	}
	maps.DeleteFunc(devices, func(_ netip.Addr, name string) bool { return name == "" })
	return devices, nil
}

// Follow calls notify with what Devices returns, and again whenever that has changed, until ctx ends.
func (h *Hosts) Follow(ctx context.Context, notify func(map[netip.Addr]string)) error {
	signals, err := h.events.Watch(ctx, true, func(m netlink.Message) bool {
		r, is := Of(m)
		return is && r.toHost() || m.Type == unix.RTM_NEWLINK || m.Type == unix.RTM_DELLINK
	})
	if err != nil {
		return fmt.Errorf("watch routes: %w", err)
	}
	var known map[netip.Addr]string
	for range signals {
		now, err := h.Devices()
		if err != nil {
			return err
		}
		if known == nil || !maps.Equal(known, now) {
			known = now
			notify(now)
		}
	}
	return nil
}
