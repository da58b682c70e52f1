package link

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Addresses are those of the interfaces of one network namespace. A value may not be used by two goroutines at once, but for Stop.
type Addresses struct {
	h    *netlink.Handle
	news *nl.NetlinkSocket
}

// OpenAddresses opens those of the calling thread's namespace. It enters none, which takes CAP_SYS_ADMIN.
func OpenAddresses() (*Addresses, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	news, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("watch addresses: %w", err)
	}
	return &Addresses{h, news}, nil
}

// Stop has Wait fail, now and from now on.
func (a *Addresses) Stop() { a.news.Close() }

// Close gives up the handles.
func (a *Addresses) Close() {
	a.Stop()
	a.h.Close()
}

// List lists the addresses of all interfaces but one, which need not be there: sorted, each once.
func (a *Addresses) List(but string) (l []netip.Addr, err error) {
	all, err := a.h.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	not := -1
	if i, err := a.h.LinkByName(but); err == nil {
		not = i.Attrs().Index
	}
	for _, i := range all {
		if addr, ok := netip.AddrFromSlice(i.IP); ok && i.LinkIndex != not {
			l = append(l, addr.Unmap())
		}
	}
	slices.SortFunc(l, netip.Addr.Compare)
	return slices.Compact(l), nil
}

// Wait returns once addresses may have come, gone or changed since it returned last, or since a was opened.
func (a *Addresses) Wait() error {
	_, _, err := a.news.Receive()
	if errors.Is(err, unix.ENOBUFS) { // there was more than the socket holds: news all the same
		return nil
	}
	if err != nil {
		return fmt.Errorf("watch addresses: %w", err)
	}
	return nil
}
