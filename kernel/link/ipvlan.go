package link

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// IPVLAN is a device that shares the link-layer address of another one, its parent: packets to its IP addresses that
// arrive at the parent, or are sent by another of its children, are this device's.
type IPVLAN struct {
	Parent int    // interface index of the parent, or of a child of it
	Mode   uint16 // of all children of a parent: IPVLANL2 or IPVLANL3
	MTU    int
	Up     bool // and without ARP
}

// Modes of if_link.h (IPVLAN_MODE_*): how what is no child's leaves.
const (
	IPVLANL2 = 0 // as a frame: to the parent's own link-layer address, it arrives at the parent
	IPVLANL3 = 1 // as a packet of the parent's network namespace, by the parent
)

// AddIPVLAN makes a device of that name, which is down: here, or in the network namespace of a file descriptor. Its
// name must be free here, too (Linux before 6.15).
func AddIPVLAN(b *netlink.Batch, name string, v IPVLAN, ns int) {
	said := func() string { return fmt.Sprintf("add ipvlan device %s", name) }
	b.Add(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, said, func(m *netlink.Buffer) {
		*m = append(*m, make([]byte, unix.SizeofIfInfomsg)...)
		m.Text(unix.IFLA_IFNAME, name)
		m.Uint32(unix.IFLA_LINK, uint32(v.Parent))
		m.Uint32(unix.IFLA_MTU, uint32(v.MTU))
		if ns != Here {
			m.Uint32(unix.IFLA_NET_NS_FD, uint32(ns))
		}
		v.info(m)
	})
}

// Here stands for the network namespace of the socket.
const Here = -1

func (v IPVLAN) info(m *netlink.Buffer) {
	m.Nest(unix.IFLA_LINKINFO, func() {
		m.Text(unix.IFLA_INFO_KIND, KindIPVLAN)
		m.Nest(unix.IFLA_INFO_DATA, func() { m.Uint16(unix.IFLA_IPVLAN_MODE, v.Mode) })
	})
}

// ChangeIPVLAN sets the MTU and the mode of the device of that name, and brings it up without ARP and neighbour
// discovery: all its packets are sent to the parent's link-layer address. It has no IPv6 link-local address.
func ChangeIPVLAN(b *netlink.Batch, name string, v IPVLAN) {
	said := func() string { return "set ipvlan device " + name }
	withoutLinkLocal(b, name)
	b.Add(unix.RTM_NEWLINK, 0, said, func(m *netlink.Buffer) {
		*m = append(*m, linkHeader(unix.IFF_UP, unix.IFF_UP)...)
		m.Text(unix.IFLA_IFNAME, name)
		m.Uint32(unix.IFLA_MTU, uint32(v.MTU))
		v.info(m)
	})
	b.Add(unix.RTM_NEWLINK, 0, said, func(m *netlink.Buffer) { // what brings it up sets this by the mode
		*m = append(*m, linkHeader(unix.IFF_NOARP, unix.IFF_NOARP)...)
		m.Text(unix.IFLA_IFNAME, name)
	})
}

// Rename renames a device that is down.
func Rename(b *netlink.Batch, index int, name string) {
	said := func() string { return fmt.Sprintf("name interface %d %s", index, name) }
	b.Add(unix.RTM_NEWLINK, 0, said, func(m *netlink.Buffer) {
		header := linkHeader(0, 0)
		binary.NativeEndian.PutUint32(header[4:], uint32(index))
		*m = append(*m, header...)
		m.Text(unix.IFLA_IFNAME, name)
	})
}

// FindIPVLAN returns the device of that name and its interface index, 0 where there is none. One of another kind has no
// parent.
func FindIPVLAN(s *netlink.Socket, name string) (v IPVLAN, index int, err error) {
	f, err := find(s, name, KindIPVLAN)
	if f.index == 0 || f.data == nil {
		return v, f.index, err
	}
	v = IPVLAN{Parent: f.parent, MTU: f.mtu, Up: f.up && f.noARP}
	for t, a := range netlink.Attributes(f.data) {
		if t == unix.IFLA_IPVLAN_MODE {
			v.Mode = uint16(netlink.Uint(a))
		}
	}
	return v, f.index, err
}
