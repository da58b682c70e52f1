package experiment

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/dataplane/policy/ebpf"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/model"
)

// Exchange is what a client asks for, and where.
type Exchange struct {
	Server netip.AddrPort
	Sizes  load.Sizes
}

// tries is how often lookups are counted before other packets than the client's are too many: the node's own multicast
// ones count, too.
const tries = 5

// AgreeLookups has the policy engine ebpf of a node count its lookups in maps while a client connects for a short
// exchange and for a long one. The first packet of a connection must have as many as on paper, any later packet one.
func AgreeLookups(ctx context.Context, node *netns.Namespace, s *model.Policies, client netip.Addr, c load.Client,
	short, long Exchange) (first int, err error) {
	first = ebpf.Lookups(s, client, short.Server, model.TCP)
	if other := ebpf.Lookups(s, client, long.Server, model.TCP); other != first {
		return first, fmt.Errorf("on paper %s has %d lookups, %s has %d", short.Server, first, long.Server, other)
	}
	var plane *ebpf.Plane
	err = node.Do(func() (err error) {
		plane, err = ebpf.New()
		return err
	})
	if err != nil {
		return first, err
	}
	defer func() { err = errors.Join(err, plane.Close()) }()
	for range tries {
		err = plane.CountLookups(ctx, func(counted func() (policy.Lookups, error)) error {
			return compareLookups(ctx, counted, first, client, c, short, long)
		})
		if !errors.Is(err, errUncounted) {
			break
		}
	}
	return first, err
}

// errUncounted is the error that the program that counts saw no packet: the agent may have put its own back.
var errUncounted = errors.New("no packet was counted")

// compareLookups compares what is counted of both exchanges with what is on paper.
func compareLookups(ctx context.Context, counted func() (policy.Lookups, error), first int, client netip.Addr,
	c load.Client, short, long Exchange) error {
	var of [2]policy.Lookups
	for range tries {
		for i, x := range []Exchange{short, long} {
			before, err := counted()
			if err == nil {
				err = exchange(ctx, c, x)
			}
			if err == nil {
				of[i], err = counted()
			}
			if err != nil {
				return err
			}
			of[i].Packets, of[i].Lookups = of[i].Packets-before.Packets, of[i].Lookups-before.Lookups
		}
		switch {
		case agrees(of[0], first) && agrees(of[1], first) && of[1].Packets > of[0].Packets:
			return nil
		case of == [2]policy.Lookups{}:
			return fmt.Errorf("from %s to %s: %w", client, short.Server, errUncounted)
		}
	}
	return fmt.Errorf("from %s to %s: on paper %d lookups in maps for the first packet of a connection and one for "+
		"each later one, the program counted %+v and %+v", client, short.Server, first, of[0], of[1])
}

// agrees reports whether packets of a connection had the lookups on paper.
func agrees(l policy.Lookups, first int) bool {
	return l.Packets > 0 && l.Lookups == uint64(first)+l.Packets-1
}

// exchange has a client connect once.
func exchange(ctx context.Context, c load.Client, x Exchange) error {
	c.Targets, c.Sizes, c.Most, c.Timeout = []netip.AddrPort{x.Server}, x.Sizes, 1, 2*time.Second
	s, err := c.Run(ctx, load.CRR, 10*time.Second)
	if err == nil && s.Ops != 1 {
		err = fmt.Errorf("connect to %s: %v", x.Server, s.Errors)
	}
	return err
}
