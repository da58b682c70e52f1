package link

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/sysctl"
)

// Interface is a network device with addresses.
type Interface struct {
	Name     string
	MTU      int
	Prefixes []netip.Prefix // its addresses, each with the length of its link's prefix; sorted
}

// Equal reports whether i and o say the same.
func (i Interface) Equal(o Interface) bool {
	return i.Name == o.Name && i.MTU == o.MTU && slices.Equal(i.Prefixes, o.Prefixes)
}

// Interfaces are the interfaces of one network namespace.
type Interfaces struct {
	s, events *netlink.Socket
	noIPv6    *sysctl.File
}

// OpenInterfaces opens those of the calling thread's namespace.
func OpenInterfaces() (*Interfaces, error) {
	s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return nil, err
	}
	events, err := netlink.Listen(unix.NETLINK_ROUTE, 0, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR,
		unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch interfaces: %w", err), s.Close())
	}
	return &Interfaces{s, events, sysctl.OpenOptional("net/ipv6/conf/default/disable_ipv6")}, nil
}

// NoIPv6 reports whether interfaces that are made have no IPv6: the kernel hasn't, or it is off.
func (i *Interfaces) NoIPv6() bool {
	off, err := i.noIPv6.Get()
	return err != nil || off != "0"
}

// Close closes the sockets.
func (i *Interfaces) Close() error {
	return errors.Join(i.s.Close(), i.events.Close(), i.noIPv6.Close())
}

// Follow calls notify with the interfaces that have addresses, sorted by name, and again whenever they have changed,
// until ctx ends.
func (i *Interfaces) Follow(ctx context.Context, notify func([]Interface)) error {
	other := differing(interfaceOf)
	signals, err := i.events.Watch(ctx, true, func(m netlink.Message) bool {
		return IsAddress(m) || IndexIn(m) != 0 && other(m)
	})
	if err != nil {
		return fmt.Errorf("watch interfaces: %w", err)
	}
	var known []Interface
	for range signals {
		now, err := interfaces(i.s)
		if err != nil {
			return err
		}
		if known == nil || !slices.EqualFunc(known, now, Interface.Equal) {
			known = now
			notify(now)
		}
	}
	return nil
}

// named is what a message says of an interface.
type named struct {
	name string
	mtu  int
}

func interfaceOf(m netlink.Message) (i named) {
	for t, v := range m.Attributes(unix.SizeofIfInfomsg) {
		switch t {
		case unix.IFLA_IFNAME:
			i.name = netlink.Text(v)
		case unix.IFLA_MTU:
			i.mtu = int(netlink.Uint(v))
		}
	}
	return i
}

// interfaces returns those that have addresses; never nil.
func interfaces(s *netlink.Socket) ([]Interface, error) {
	of := map[int]*Interface{}
	err := list(s, func(m netlink.Message) {
		if index := IndexIn(m); index != 0 {
			i := interfaceOf(m)
			of[index] = &Interface{Name: i.name, MTU: i.mtu}
		}
	}, func() { clear(of) })
	if err != nil {
		return nil, err
	}
	all, err := addresses(s)
	for _, a := range all {
		if i := of[a.dev]; i != nil {
			i.Prefixes = append(i.Prefixes, netip.PrefixFrom(a.addr, a.bits))
		}
	}
	l := []Interface{}
	for _, i := range of {
		if len(i.Prefixes) > 0 {
			slices.SortFunc(i.Prefixes, func(a, b netip.Prefix) int {
				return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
			})
			l = append(l, *i)
		}
	}
	slices.SortFunc(l, func(a, b Interface) int { return strings.Compare(a.Name, b.Name) })
	return l, err
}
