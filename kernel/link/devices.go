package link

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	nl "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
)

// Device is an interface, as those see it who look at its packets.
type Device struct {
	Index    int
	Name     string
	Loopback bool
	Header   int  // length of the link-layer header of its packets, in bytes: Ethernet's, or none
	Pod      bool // a veth whose other end is in another network namespace: a pod's
	Tunnel   bool // leads to other hosts by way of others of this host's devices
}

// tunnels are the kinds of devices that are tunnels.
var tunnels = []string{"vxlan", "geneve", "gre", "gretap", "ip6gre", "ip6gretap", "ipip", "ip6tnl", "sit", "wireguard"}

// headerOf returns the length of the link-layer headers of a kind of device, by the name of its ARPHRD_ number. Of
// others than these it is not known.
var headerOf = map[string]int{
	"ether": 14, "loopback": 14,
	"none": 0, "ppp": 0, "ipip": 0, "tunnel6": 0, "sit": 0, "gre": 0,
}

// Devices lists the interfaces that carry IP behind a header of a known length.
func (c *Conn) Devices() (l []Device, err error) {
	all, err := c.h.LinkList()
	for n := 0; n < 100 && errors.Is(err, nl.ErrDumpInterrupted); n++ { // some came or went meanwhile
		all, err = c.h.LinkList()
	}
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, i := range all {
		a := i.Attrs()
		if n, known := headerOf[a.EncapType]; known {
			l = append(l, Device{Index: a.Index, Name: a.Name, Loopback: a.EncapType == "loopback", Header: n,
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

// WatchDevices sends whenever concerns reports true of a message about an interface of ns, until ctx ends; then it
// closes the channel.
func WatchDevices(ctx context.Context, ns *netns.Namespace, concerns func(netlink.Message) bool) (
	signals <-chan struct{}, err error) {
	err = ns.Do(func() error {
		s, err := netlink.Listen(unix.NETLINK_ROUTE, 0, unix.RTNLGRP_LINK)
		if err != nil {
			return err
		}
		defer s.Close()
		signals, err = s.Watch(ctx, false, func(m netlink.Message) bool {
			return IndexIn(m) != 0 && concerns(m)
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("watch interfaces: %w", err)
	}
	return signals, nil
}

// Changed reports true of all messages: interfaces that come, go or change in whatever they are.
func Changed(netlink.Message) bool { return true }

// Gone reports whether an interface has gone.
func Gone(m netlink.Message) bool { return m.Type == unix.RTM_DELLINK }

// Renamed returns a function that reports whether an interface has come or gone, or has another name than before.
func Renamed() func(netlink.Message) bool { return differing(NameIn) }

// differing returns a function that reports whether an interface has come or gone, or f returns something else of it
// than before. While a pod's device is made, the kernel reports some ten changes of it.
func differing[T comparable](f func(netlink.Message) T) func(netlink.Message) bool {
	known := map[int]T{}
	return func(m netlink.Message) bool {
		index := IndexIn(m)
		if Gone(m) {
			delete(known, index)
			return true
		}
		was, seen := known[index]
		known[index] = f(m)
		return !seen || was != known[index]
	}
}

// Names returns the names of the interfaces by their indexes.
func Names(s *netlink.Socket) (names map[int]string, err error) {
	err = list(s, func(m netlink.Message) {
		if index := IndexIn(m); index != 0 {
			names[index] = NameIn(m)
		}
	}, func() { names = map[int]string{} })
	return names, err
}

// Shape is what an interface is, as far as it says whose packets come in by it.
type Shape struct {
	Name   string
	Peer   bool    // one end of a pair, whose other end is in another network namespace
	Bridge bool    // a bridge
	Calls  [2]bool // of a bridge: its own setting has what it forwards pass netfilter, for IPv4 and IPv6
}

// pairs are the kinds of devices that have another end.
var pairs = []string{"veth", "netkit"}

// Attributes of a bridge (include/uapi/linux/if_link.h).
const (
	bridgeCalls4 = 36 // IFLA_BR_NF_CALL_IPTABLES
	bridgeCalls6 = 37 // IFLA_BR_NF_CALL_IP6TABLES
)

// Shapes returns what the interfaces are by their indexes.
func Shapes(s *netlink.Socket) (shapes map[int]Shape, err error) {
	err = list(s, func(m netlink.Message) {
		if index := IndexIn(m); index != 0 {
			shapes[index] = shapeIn(m)
		}
	}, func() { shapes = map[int]Shape{} })
	return shapes, err
}

// shapeIn returns what the interface is that a message is about.
func shapeIn(m netlink.Message) (s Shape) {
	away := false
	for t, v := range m.Attributes(unix.SizeofIfInfomsg) {
		switch t {
		case unix.IFLA_IFNAME:
			s.Name = netlink.Text(v)
		case unix.IFLA_LINK_NETNSID:
			away = true
		case unix.IFLA_LINKINFO:
			kind := netlink.Text(netlink.Find(v, unix.IFLA_INFO_KIND))
			s.Peer, s.Bridge = slices.Contains(pairs, kind), kind == "bridge"
			if data := netlink.Find(v, unix.IFLA_INFO_DATA); s.Bridge {
				s.Calls = [2]bool{isOn(netlink.Find(data, bridgeCalls4)), isOn(netlink.Find(data, bridgeCalls6))}
			}
		}
	}
	s.Peer = s.Peer && away
	return s
}

func isOn(v []byte) bool { return len(v) > 0 && v[0] != 0 }

// NameIn returns the name of the interface that a message is about, "" where it is about none.
func NameIn(m netlink.Message) string {
	if m.Type == unix.RTM_NEWLINK || m.Type == unix.RTM_DELLINK {
		for t, v := range m.Attributes(unix.SizeofIfInfomsg) {
			if t == unix.IFLA_IFNAME {
				return netlink.Text(v)
			}
		}
	}
	return ""
}

// IndexIn returns the interface index of a message about an interface, 0 of others.
func IndexIn(m netlink.Message) int {
	if m.Type != unix.RTM_NEWLINK && m.Type != unix.RTM_DELLINK || len(m.Body) < unix.SizeofIfInfomsg {
		return 0
	}
	return int(binary.NativeEndian.Uint32(m.Body[4:]))
}
