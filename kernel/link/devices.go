package link

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

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
	Tunnel   bool // leads to other hosts by way of others of this host's devices
}

// tunnels are the kinds of devices that are tunnels.
var tunnels = []string{"vxlan", "geneve", "gre", "gretap", "ip6gre", "ip6gretap", "ipip", "ip6tnl", "sit", "wireguard"}

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
			l = append(l, Device{Index: a.Index, Loopback: a.EncapType == "loopback", Header: n,
				Pod: i.Type() == "veth" && a.NetNsID >= 0, Tunnel: slices.Contains(tunnels, i.Type())})
		}
	}
	return l, nil
}

// PodBridges returns the names of bridges that pods are ports of.
func (c *Conn) PodBridges() (names []string, err error) {
	all, err := c.h.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	ports := map[int]bool{}
	for _, i := range all {
		if a := i.Attrs(); i.Type() == "veth" && a.NetNsID >= 0 {
			ports[a.MasterIndex] = true
		}
	}
	for _, i := range all {
		if i.Type() == "bridge" && ports[i.Attrs().Index] {
			names = append(names, i.Attrs().Name)
		}
	}
	return names, nil
}

// DeviceTo returns the index of the device by which packets to an address leave, 0 where there is none.
func (c *Conn) DeviceTo(to netip.Addr) (int, error) {
	routes, err := c.h.RouteGet(to.AsSlice())
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.EACCES) ||
		errors.Is(err, unix.EINVAL) {
		return 0, nil // no route, or unreachable, prohibit, blackhole
	}
	if err != nil {
		return 0, fmt.Errorf("look up the route to %s: %w", to, err)
	}
	if len(routes) == 0 {
		return 0, nil
	}
	return routes[0].LinkIndex, nil
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
