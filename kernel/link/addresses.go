package link

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	vns "github.com/vishvananda/netns"

	"fairlead.dev/fairlead/kernel/netns"
)

// Addresses lists the addresses of all interfaces but one, which need not be there: sorted, each once.
func (c *Conn) Addresses(but string) (l []netip.Addr, err error) {
	all, err := c.h.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	not := -1
	if i, err := c.h.LinkByName(but); err == nil {
		not = i.Attrs().Index
	}
	for _, i := range all {
		if a, ok := netip.AddrFromSlice(i.IP); ok && i.LinkIndex != not {
			l = append(l, a.Unmap())
		}
	}
	slices.SortFunc(l, netip.Addr.Compare)
	return slices.Compact(l), nil
}

// WatchAddresses sends whenever addresses of ns come, go or change, until ctx ends or the kernel has more to tell than it can
// hold back; then it closes the channel.
func WatchAddresses(ctx context.Context, ns *netns.Namespace) (<-chan struct{}, error) {
	updates, handle := make(chan netlink.AddrUpdate, 64), vns.NsHandle(ns.FD())
	if err := netlink.AddrSubscribeWithOptions(updates, ctx.Done(), netlink.AddrSubscribeOptions{Namespace: &handle}); err != nil {
		return nil, fmt.Errorf("watch addresses: %w", err)
	}
	return signal(updates, func(netlink.AddrUpdate) bool { return true }), nil
}
