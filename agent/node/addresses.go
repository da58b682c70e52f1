package node

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/route"
)

// Addresses are a network namespace's own addresses that others can reach: not loopback, not link-local.
type Addresses struct{ of *link.Addresses }

// dummy is the interface of kube-proxy's mode ipvs. Its addresses are Services', not the node's.
const dummy = "kube-ipvs0"

// OpenAddresses opens those of the calling thread's namespace.
func OpenAddresses() (*Addresses, error) {
	of, err := link.OpenAddresses()
	return &Addresses{of}, err
}

// Close closes the sockets.
func (a *Addresses) Close() { a.of.Close() }

// List returns them, sorted.
func (a *Addresses) List() ([]netip.Addr, error) {
	l, err := a.of.List(dummy)
	return slices.DeleteFunc(l, func(a netip.Addr) bool { return a.IsLoopback() || a.IsLinkLocalUnicast() }), err
}

// Follow calls tell with all of them at once, and again whenever they have changed, until ctx ends. It is called once.
func (a *Addresses) Follow(ctx context.Context, notify func([]netip.Addr)) error {
	changes, err := a.of.Watch(ctx)
	if err != nil {
		return err
	}
	var known []netip.Addr
	for first := true; ; first = false {
		now, err := a.List()
		switch {
		case err != nil && ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		case first || !slices.Equal(now, known):
			notify(now)
			known = now
		}
		if _, ok := <-changes; !ok {
			return nil
		}
	}
}

// InterfaceTo returns the name of the interface by which packets to an address leave the calling thread's namespace,
// "" where there is none.
func InterfaceTo(to netip.Addr) (name string, err error) {
	s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return "", err
	}
	defer s.Close()
	r, ok, err := route.To(s, to)
	if err != nil || !ok || r.Dev == 0 {
		return "", err
	}
	i, err := net.InterfaceByIndex(r.Dev)
	if err != nil {
		return "", fmt.Errorf("find the interface to %s: %w", to, err)
	}
	return i.Name, nil
}
