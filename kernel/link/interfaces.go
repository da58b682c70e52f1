package link

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
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
type Interfaces struct{ s, events *netlink.Socket }

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
	return &Interfaces{s, events}, nil
}

// Close closes the sockets.
func (i *Interfaces) Close() error { return errors.Join(i.s.Close(), i.events.Close()) }

// Follow calls notify with the interfaces that have addresses, sorted by name, and again whenever they have changed,
// until ctx ends.
func (i *Interfaces) Follow(ctx context.Context, notify func([]Interface)) error {
	signals, err := i.events.Watch(ctx, true, func(m netlink.Message) bool {
		return IsAddress(m) || m.Type == unix.RTM_NEWLINK || m.Type == unix.RTM_DELLINK
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

// interfaces returns those that have addresses; never nil.
func interfaces(s *netlink.Socket) ([]Interface, error) {
	of := map[int]*Interface{}
	err := netlink.Stable(func() error {
		clear(of)
		return s.Request(unix.RTM_GETLINK, unix.NLM_F_DUMP, func(b *netlink.Buffer) {
			*b = append(*b, make([]byte, unix.SizeofIfInfomsg)...)
		}, func(m netlink.Message) {
			if len(m.Body) < unix.SizeofIfInfomsg {
				return
			}
			i := &Interface{}
			for t, v := range m.Attributes(unix.SizeofIfInfomsg) {
				switch t {
				case unix.IFLA_IFNAME:
					i.Name = netlink.Text(v)
				case unix.IFLA_MTU:
					i.MTU = int(netlink.Uint(v))
				}
			}
			of[int(binary.NativeEndian.Uint32(m.Body[4:]))] = i
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
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
