package system

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
)

// Addresses are a network namespace's own addresses that others can reach: not loopback, not link-local.
type Addresses struct {
	ns   *netns.Namespace
	conn *link.Conn
}

// dummy is the interface of kube-proxy's mode ipvs. Its addresses are Services', not the node's.
const dummy = "kube-ipvs0"

// OpenAddresses opens those of the calling thread's namespace.
func OpenAddresses() (*Addresses, error) {
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	conn, err := link.Dial(ns)
	if err != nil {
		ns.Close()
		return nil, err
	}
	return &Addresses{ns, conn}, nil
}

// Close gives the handles back.
func (a *Addresses) Close() {
	a.conn.Close()
	a.ns.Close()
}

// List gives them, sorted.
func (a *Addresses) List() ([]netip.Addr, error) {
	l, err := a.conn.Addresses(dummy)
	return slices.DeleteFunc(l, func(a netip.Addr) bool { return a.IsLoopback() || a.IsLinkLocalUnicast() }), err
}

// Follow calls tell with all of them at once, and again whenever they have changed, until ctx ends.
func (a *Addresses) Follow(ctx context.Context, tell func([]netip.Addr)) error {
	var known []netip.Addr
	for first := true; ; {
		changes, err := link.WatchAddresses(ctx, a.ns)
		if err != nil {
			return err
		}
		for more := true; more; _, more = <-changes {
			now, err := a.List()
			if err != nil {
				return err
			}
			if first || !slices.Equal(now, known) {
				tell(now)
			}
			known, first = now, false
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second): // the kernel had more to tell than was held back
		}
	}
}
