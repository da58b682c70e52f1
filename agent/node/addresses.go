package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
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

// Close gives the handles back.
func (a *Addresses) Close() { a.of.Close() }

// List gives them, sorted.
func (a *Addresses) List() ([]netip.Addr, error) {
	l, err := a.of.List(dummy)
	return slices.DeleteFunc(l, func(a netip.Addr) bool { return a.IsLoopback() || a.IsLinkLocalUnicast() }), err
}

// Follow calls tell with all of them at once, and again whenever they have changed, until ctx ends. It is called once.
func (a *Addresses) Follow(ctx context.Context, tell func([]netip.Addr)) error {
	defer context.AfterFunc(ctx, a.of.Stop)()
	var known []netip.Addr
	for first := true; ; first = false {
		now, err := a.List()
		if err == nil && (first || !slices.Equal(now, known)) {
			tell(now)
			known = now
		}
		if err == nil {
			err = a.of.Wait()
		}
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// InterfaceTo returns the name of the interface by which packets to an address leave the calling thread's namespace,
// "" where there is none.
func InterfaceTo(to netip.Addr) (name string, err error) {
	ns, err := netns.Current()
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	c, err := link.Dial(ns)
	if err != nil {
		return "", err
	}
	defer c.Close()
	index, err := c.DeviceTo(to)
	if err != nil || index == 0 {
		return "", err
	}
	i, err := net.InterfaceByIndex(index)
	if err != nil {
		return "", fmt.Errorf("find the interface to %s: %w", to, err)
	}
	return i.Name, nil
}
