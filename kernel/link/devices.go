package link

import (
	"context"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
)

// Device is an interface, as those see it who look at its packets.
type Device struct {
	Index    int
	Loopback bool
	Header   int  // length of the link-layer header of its packets, in bytes: Ethernet's, or none
	Pod      bool // a veth whose other end is in another network namespace: a pod's
}

// headerOf gives the length of the link-layer headers of a kind of device, by the name of its ARPHRD_ number. Of others
// than these nobody knows.
var headerOf = map[string]int{
	"ether": 14, "loopback": 14,
	"none": 0, "ppp": 0, "ipip": 0, "tunnel6": 0, "sit": 0, "gre": 0,
}

// Devices lists the interfaces that carry IP behind a header of a known length.
func (c *Conn) Devices() (l []Device, err error) {
	all, err := c.h.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, i := range all {
		a := i.Attrs()
		if n, known := headerOf[a.EncapType]; known {
			l = append(l, Device{Index: a.Index, Loopback: a.EncapType == "loopback", Header: n, Pod: i.Type() == "veth" && a.NetNsID >= 0})
		}
	}
	return l, nil
}

// WatchDevices sends whenever interfaces of ns come, go or change, until ctx ends; then it closes the channel.
func WatchDevices(ctx context.Context, ns *netns.Namespace) (<-chan struct{}, error) {
	updates, signals := make(chan netlink.LinkUpdate, 64), make(chan struct{}, 1)
	err := ns.Do(func() error { return netlink.LinkSubscribe(updates, ctx.Done()) })
	if err != nil {
		return nil, fmt.Errorf("watch interfaces: %w", err)
	}
	go func() {
		defer close(signals)
		for u := range updates {
			if u.Header.Type != unix.RTM_NEWLINK && u.Header.Type != unix.RTM_DELLINK {
				continue
			}
			select {
			case signals <- struct{}{}:
			default:
			}
		}
	}()
	return signals, nil
}
