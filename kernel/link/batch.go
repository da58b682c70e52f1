package link

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/kernel/netlink"
)

// Address is an address of a device. Addresses are comparable.
type Address struct {
	Dev    int // interface index
	Prefix netip.Prefix
}

// PutAddresses adds addresses, without duplicate address detection and without a route to their prefixes' links. One
// that is there is no error.
func PutAddresses(b *netlink.Batch, l ...Address) {
	for _, a := range l {
		said := func() string { return fmt.Sprintf("add address %s to interface %d", a.Prefix, a.Dev) }
		b.Add(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, said, a.write)
	}
}

// DeleteAddresses removes addresses. One that isn't there is no error.
func DeleteAddresses(b *netlink.Batch, l ...Address) {
	for _, a := range l {
		said := func() string { return fmt.Sprintf("delete address %s of interface %d", a.Prefix, a.Dev) }
		b.Add(unix.RTM_DELADDR, 0, said, a.write, unix.EADDRNOTAVAIL, unix.ENODEV)
	}
}

func (a Address) write(m *netlink.Buffer) {
	const flags = unix.IFA_F_NODAD | unix.IFA_F_NOPREFIXROUTE
	*m = append(*m, uint8(inet.Family(a.Prefix.Addr())), uint8(a.Prefix.Bits()), unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE)
	*m = binary.NativeEndian.AppendUint32(*m, uint32(a.Dev))
	m.Bytes(unix.IFA_LOCAL, a.Prefix.Addr().AsSlice())
	m.Bytes(unix.IFA_ADDRESS, a.Prefix.Addr().AsSlice())
	m.Uint32(unix.IFA_FLAGS, flags)
}

// AddressesOf returns the addresses of one device, those that the kernel made itself (IPv6 link-local) left out.
func AddressesOf(s *netlink.Socket, dev int) (l []Address, err error) {
	all, err := addresses(s)
	for _, a := range all {
		if a.dev == dev && !(a.addr.Is6() && a.addr.IsLinkLocalUnicast()) {
			l = append(l, Address{dev, netip.PrefixFrom(a.addr, a.bits)})
		}
	}
	return l, err
}

// PutNeighbours makes neighbours permanent, in place of what is known of their addresses.
func PutNeighbours(b *netlink.Batch, l ...Neighbour) {
	for _, n := range l {
		said := func() string { return fmt.Sprintf("set neighbour %s on interface %d", n.Addr, n.Dev) }
		b.Add(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, said, func(m *netlink.Buffer) {
			n.write(m,
				uint8(inet.Family(n.Addr)), 0)
		})
	}
}

// DeleteNeighbours forgets neighbours. One that isn't there is no error.
func DeleteNeighbours(b *netlink.Batch, l ...Neighbour) {
	for _, n := range l {
		said := func() string { return fmt.Sprintf("delete neighbour %s on interface %d", n.Addr, n.Dev) }
		b.Add(unix.RTM_DELNEIGH, 0, said, func(m *netlink.Buffer) { n.write(m, uint8(inet.Family(n.Addr)), 0) }, unix.ENOENT,
			unix.ENODEV)
	}
}

// PutForwards makes a VXLAN device send packets to a link-layer address to an outer address, in place of another: a
// forwarding entry.
func PutForwards(b *netlink.Batch, l ...Neighbour) {
	for _, n := range l {
		said := func() string { return fmt.Sprintf("set forwarding entry %s on interface %d", n.mac(), n.Dev) }
		b.Add(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, said, func(m *netlink.Buffer) {
			n.write(m,
				unix.AF_BRIDGE, unix.NTF_SELF)
		})
	}
}

// DeleteForwards removes forwarding entries by their link-layer addresses. One that isn't there is no error.
func DeleteForwards(b *netlink.Batch, l ...Neighbour) {
	for _, n := range l {
		n.Addr = netip.Addr{}
		said := func() string { return fmt.Sprintf("delete forwarding entry %s on interface %d", n.mac(), n.Dev) }
		b.Add(unix.RTM_DELNEIGH, 0, said, func(m *netlink.Buffer) { n.write(m, unix.AF_BRIDGE, unix.NTF_SELF) }, unix.ENOENT,
			unix.ENODEV)
	}
}

func (n Neighbour) mac() string { return net.HardwareAddr(n.MAC[:]).String() }

// write writes a struct ndmsg and what follows.
func (n Neighbour) write(m *netlink.Buffer, family, flags uint8) {
	state := uint16(unix.NUD_PERMANENT)
	if family == unix.AF_BRIDGE {
		state |= unix.NUD_NOARP
	}
	*m = append(*m, family, 0, 0, 0)
	*m = binary.NativeEndian.AppendUint32(*m, uint32(n.Dev))
	*m = binary.NativeEndian.AppendUint16(*m, state)
	*m = append(*m, flags, 0)
	if n.Addr.IsValid() {
		m.Bytes(unix.NDA_DST, n.Addr.AsSlice())
	}
	m.Bytes(unix.NDA_LLADDR, n.MAC[:])
}

const neighbourHeader = unix.SizeofNdMsg

// Neighbours returns the permanent neighbours on a device, 0 for all, of both families.
func Neighbours(s *netlink.Socket, dev int) (l []Neighbour, err error) {
	err = netlink.Stable(func() (err error) {
		l = nil
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			all := func(b *netlink.Buffer) {
				*b = append(append(*b, family), make([]byte, neighbourHeader-1)...)
				if dev != 0 {
					b.Uint32(unix.NDA_IFINDEX, uint32(dev))
				}
			}
			if err := s.Request(unix.RTM_GETNEIGH, unix.NLM_F_DUMP, all, collect(&l, dev, family)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list neighbours on interface %d: %w", dev, err)
	}
	return l, nil
}

// Forwards returns the forwarding entries of a VXLAN device.
func Forwards(s *netlink.Socket, dev int) (l []Neighbour, err error) {
	err = netlink.Stable(func() error {
		l = nil
		return s.Request(unix.RTM_GETNEIGH, unix.NLM_F_DUMP, func(b *netlink.Buffer) {
			*b = append(*b, unix.AF_BRIDGE, 0, 0, 0)
			*b = binary.NativeEndian.AppendUint32(*b, uint32(dev))
			*b = append(*b, 0, 0, 0, 0)
		}, collect(&l, dev, unix.AF_BRIDGE))
	})
	if err != nil {
		return nil, fmt.Errorf("list forwarding entries of interface %d: %w", dev, err)
	}
	return l, nil
}

// collect appends the permanent entries of a dump that are on a device.
func collect(l *[]Neighbour, dev int, family uint8) func(netlink.Message) {
	return func(m netlink.Message) {
		if m.Type != unix.RTM_NEWNEIGH || len(m.Body) < neighbourHeader || m.Body[0] != family || dev != 0 &&
			NeighbourDevice(m) != dev ||
			binary.NativeEndian.Uint16(m.Body[8:])&unix.NUD_PERMANENT == 0 {
			return
		}
		n := Neighbour{Dev: NeighbourDevice(m)}
		for t, v := range m.Attributes(neighbourHeader) {
			switch t {
			case unix.NDA_DST:
				n.Addr, _ = netip.AddrFromSlice(v)
			case unix.NDA_LLADDR:
				copy(n.MAC[:], v)
			}
		}
		*l = append(*l, n)
	}
}

// AllDevices is ForwardingOff's index for the setting of all devices (NETCONFA_IFINDEX_ALL).
const AllDevices = -1

// ForwardingOff returns the interface index of a notification that a device forwards no packets any more, AllDevices
// for that of all, and reports whether m is one.
func ForwardingOff(m netlink.Message) (index int, off bool) {
	const header, netconfaIndex, netconfaForwarding = 4, 1, 2 // struct netconfmsg, aligned; linux/netconf.h
	if m.Type != unix.RTM_NEWNETCONF {
		return 0, false
	}
	for t, v := range m.Attributes(header) {
		switch t {
		case netconfaIndex:
			index = int(int32(netlink.Uint(v)))
		case netconfaForwarding:
			off = netlink.Uint(v) == 0
		}
	}
	return index, off
}

// NeighbourDevice returns the interface index of a message about a neighbour or a forwarding entry, 0 of others.
func NeighbourDevice(m netlink.Message) int {
	if m.Type != unix.RTM_NEWNEIGH && m.Type != unix.RTM_DELNEIGH || len(m.Body) < neighbourHeader {
		return 0
	}
	return int(binary.NativeEndian.Uint32(m.Body[4:]))
}
