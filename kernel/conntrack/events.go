package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

const groupNew = 1 // NFNLGRP_CONNTRACK_NEW

// EventsSetting is the setting of a network namespace for whether its connections have events: 0 never, 1 always, 2
// while there is a listener (Linux 5.19).
const EventsSetting = "net/netfilter/nf_conntrack_events"

// Events are the new connections of one network namespace.
type Events struct{ s *netlink.Socket }

// Listen begins to listen in the calling thread's network namespace, with a buffer of so many bytes: about a thousand
// for an event. It needs CAP_NET_ADMIN there.
func Listen(buffer int) (*Events, error) {
	s, err := netlink.Listen(unix.NETLINK_NETFILTER, buffer, groupNew)
	if err != nil {
		return nil, fmt.Errorf("conntrack: listen to new connections: %w", err)
	}
	return &Events{s}, nil
}

// Close ends listening. It comes after Run.
func (e *Events) Close() error { return e.s.Close() }

// Run calls f with each new connection, and lost whenever some didn't fit the buffer, until ctx ends; then with those
// that were new by then. It is called once. A connection is new once its first packet has passed all hooks: one that
// rules drop is none.
func (e *Events) Run(ctx context.Context, f func(Tracked), lost func()) error {
	read := func(m netlink.Message) {
		if t, ok := opened(m); ok {
			f(t)
		}
	}
	err := e.s.Receive(ctx, read, lost)
	if err == nil {
		err = e.s.Leave(groupNew)
	}
	for pending := err == nil; pending; {
		if err = e.s.Pending(read); errors.Is(err, unix.ENOBUFS) {
			lost()
		} else {
			pending = false
		}
	}
	if err != nil {
		return fmt.Errorf("conntrack: listen to new connections: %w", err)
	}
	return nil
}

// opened returns the connection that a message reports, and whether it reports one.
func opened(m netlink.Message) (t Tracked, ok bool) {
	if m.Type != unix.NFNL_SUBSYS_CTNETLINK<<8|msgNew || len(m.Body) < genHeader {
		return t, false
	}
	t, _, ok = tracked(m.Body[genHeader:])
	return t, ok
}

// Lost returns how many events didn't fit the buffer so far.
func (e *Events) Lost() (uint64, error) {
	n, err := e.s.Drops()
	if err != nil {
		return 0, fmt.Errorf("conntrack: %w", err)
	}
	return uint64(n), nil
}

// Tracking reports for which families the calling thread's network namespace tracks connections and reports new ones:
// it does while a rule needs it. Each is tried with a datagram on the loopback device; a family without one is as the
// other.
func Tracking() (v4, v6 bool, err error) {
	e, err := Listen(1 << 20)
	if err != nil {
		return false, false, err
	}
	defer e.Close()
	v4, v4Tried, err := e.reports(netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	if err != nil {
		return false, false, err
	}
	v6, v6Tried, err := e.reports(netip.IPv6Loopback())
	return v4 || !v4Tried && v6, v6 || !v6Tried && v4, err
}

// reports reports whether a datagram between two sockets at an address is reported as a new connection, and whether it
// could be sent.
func (e *Events) reports(at netip.Addr) (on, sent bool, err error) {
	var ports []netip.AddrPort
	var from *net.UDPConn
	for range 2 {
		c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, 0)))
		if err != nil {
			return false, false, nil
		}
		defer c.Close()
		from, ports = c, append(ports, c.LocalAddr().(*net.UDPAddr).AddrPort())
	}
	if _, err := from.WriteToUDPAddrPort([]byte{0}, ports[0]); err != nil {
		return false, false, nil
	}
	err = e.s.Pending(func(m netlink.Message) {
		t, ok := opened(m)
		on = on || ok && t.Source == ports[1] && t.Destination == ports[0]
	})
	if errors.Is(err, unix.ENOBUFS) {
		return true, true, nil
	}
	return on, true, err
}
