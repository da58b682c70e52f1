// Package network is what the data planes of the pod network share: batches of rtnetlink requests whose rejections are
// those of facts, and a watch for what others change.
package network

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/model"
)

// Batch is rtnetlink requests of facts. The zero value has none.
type Batch[K dataplane.Key] struct {
	requests netlink.Batch
	owners   []K // by request
	refused  map[K]error
}

// portion is how many bytes of requests are sent at once: rejections of all of them fit in a socket's usual buffer.
const portion = 8 << 10

// Add adds the requests that f adds, as those of fact k.
func (b *Batch[K]) Add(k K, f func(*netlink.Batch)) {
	b.requests.Portion = portion
	f(&b.requests)
	for len(b.owners) < b.requests.Len() {
		b.owners = append(b.owners, k)
	}
}

// Refuse records that a fact can't be written.
func (b *Batch[K]) Refuse(k K, err error) {
	if b.refused == nil {
		b.refused = map[K]error{}
	}
	if b.refused[k] == nil {
		b.refused[k] = err
	}
}

// Run sends the requests and forgets them. The error is dataplane.Refused with the facts of which the kernel refused
// some, and those of Refuse.
func (b *Batch[K]) Run(s *netlink.Socket) error {
	err := s.Run(&b.requests, func(i int, err error) {
		b.Refuse(b.owners[i], fmt.Errorf("%s: %w", b.requests.Said(i), err))
	})
	refused := b.refused
	*b = Batch[K]{}
	if err == nil && refused != nil {
		err = &dataplane.Refused[K]{Facts: refused}
	}
	return err
}

// Forwarding returns the name of the setting by which a device forwards the IPv4 packets that it receives. Of IPv6
// there is one for all devices.
func Forwarding(device string) string { return "net/ipv4/conf/" + device + "/forwarding" }

// IPVLANMode returns the mode of the ipvlan devices by which pods are connected.
func IPVLANMode(k model.DeviceKind) uint16 {
	if k == model.IPVLANL3 {
		return link.IPVLANL3
	}
	return link.IPVLANL2
}

// Protocols of routes (rtm_protocol), by the planes that write them.
const (
	NodeRoutes = 0xfa // to other nodes
	PodRoutes  = 0xfb // to this node's pods
)

// UnderlayMark is the bit of a packet's mark by which a pod's reply to another node's own address goes by the underlay
// though that node is behind the tunnel: its connection was translated on this node, so that it came by the underlay.
const UnderlayMark = 0x20000000

// ConcernsRoutes reports whether a message is about a route of a protocol, or one that another program may have put in
// its place: the kernel doesn't say what went.
func ConcernsRoutes(m netlink.Message, protocol uint8) bool {
	r, ok := route.Of(m)
	other := r.Owner != NodeRoutes && r.Owner != PodRoutes
	return ok && (r.Owner == protocol || other && m.Flags&unix.NLM_F_REPLACE != 0)
}

// Watch sends whenever concerns reports true of a notification of some groups that no request of own caused, and once
// at first, until ctx ends; then it closes the channel.
func Watch(ctx context.Context, ns *netns.Namespace, own *netlink.Socket, groups []int,
	concerns func(netlink.Message) bool) (signals <-chan struct{}, err error) {
	err = ns.Do(func() error {
		s, err := netlink.Listen(unix.NETLINK_ROUTE, 0, groups...)
		if err != nil {
			return err
		}
		defer s.Close()
		if err := s.Ignore(own.Port()); err != nil {
			return err
		}
		signals, err = s.Watch(ctx, true, concerns)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("watch the pod network: %w", err)
	}
	return signals, nil
}
