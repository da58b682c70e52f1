package link

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// Addresses are those of the interfaces of one network namespace.
type Addresses struct{ s, events *netlink.Socket }

// OpenAddresses opens those of the calling thread's namespace. It enters none, which takes CAP_SYS_ADMIN.
func OpenAddresses() (*Addresses, error) {
	s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return nil, err
	}
	events, err := netlink.Listen(unix.NETLINK_ROUTE, 0, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("watch addresses: %w", err)
	}
	return &Addresses{s, events}, nil
}

// Close closes the sockets.
func (a *Addresses) Close() error { return errors.Join(a.s.Close(), a.events.Close()) }

// List lists the addresses of all interfaces but one, which need not be there: sorted, each once.
func (a *Addresses) List(but string) (l []netip.Addr, err error) {
	names, err := Names(a.s)
	if err != nil {
		return nil, err
	}
	all, err := addresses(a.s)
	for _, i := range all {
		if names[i.dev] != but {
			l = append(l, i.addr)
		}
	}
	slices.SortFunc(l, netip.Addr.Compare)
	return slices.Compact(l), err
}

// Watch sends whenever addresses have come, gone or changed since a was opened, until ctx ends; then it closes the
// channel.
func (a *Addresses) Watch(ctx context.Context) (<-chan struct{}, error) {
	return a.events.Watch(ctx, false, IsAddress)
}

// IsAddress reports whether a message is about an address.
func IsAddress(m netlink.Message) bool {
	return m.Type == unix.RTM_NEWADDR || m.Type == unix.RTM_DELADDR
}

// Own returns the addresses of the interfaces of the socket's network namespace.
func Own(s *netlink.Socket) (map[netip.Addr]bool, error) {
	all, err := addresses(s)
	own := make(map[netip.Addr]bool, len(all))
	for _, a := range all {
		own[a.addr] = true
	}
	return own, err
}

// address is an address of an interface.
type address struct {
	dev       int
	addr      netip.Addr
	bits      int  // of its prefix
	temporary bool // it has a lifetime
}

// Temporary returns the indexes of the interfaces that have IPv6 addresses with a lifetime, as router advertisements
// make them.
func Temporary(s *netlink.Socket) (map[int]bool, error) {
	all, err := addresses(s)
	l := map[int]bool{}
	for _, a := range all {
		if a.temporary && a.addr.Is6() {
			l[a.dev] = true
		}
	}
	return l, err
}

func addresses(s *netlink.Socket) (l []address, err error) {
	err = netlink.Stable(func() error {
		l = nil
		all := func(b *netlink.Buffer) { *b = append(*b, make([]byte, unix.SizeofIfAddrmsg)...) }
		return s.Request(unix.RTM_GETADDR, unix.NLM_F_DUMP, all, func(m netlink.Message) {
			if len(m.Body) < unix.SizeofIfAddrmsg {
				return
			}
			a := address{dev: int(binary.NativeEndian.Uint32(m.Body[4:])), bits: int(m.Body[1]),
				temporary: m.Body[2]&unix.IFA_F_PERMANENT == 0}
			for t, v := range m.Attributes(unix.SizeofIfAddrmsg) {
				// Of a point-to-point interface, IFA_ADDRESS is its peer's.
				if t == unix.IFA_LOCAL || t == unix.IFA_ADDRESS && !a.addr.IsValid() {
					a.addr, _ = netip.AddrFromSlice(v)
				}
			}
			l = append(l, a)
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return l, nil
}
