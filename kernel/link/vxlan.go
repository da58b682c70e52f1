package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// VXLAN is a device of a VXLAN overlay (RFC 7348) that learns nothing: where a link-layer address is, only forwarding
// entries say. VXLANs are comparable.
type VXLAN struct {
	VNI    uint32
	Port   uint16     // UDP
	Local  netip.Addr // outer source; its family is that of all outer packets
	Uplink int        // interface index of the device by which outer packets leave
	MAC    [6]byte
	MTU    int
	Up     bool
	Learns bool // from packets: never as made here
}

// AddVXLAN makes a device of that name. Its outer packets have no UDP checksum and the inner ones' DSCP.
func AddVXLAN(b *netlink.Batch, name string, v VXLAN) {
	v.put(b, name, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
}

// ChangeVXLAN changes the device of that name, which must have the same VNI, port and family.
func ChangeVXLAN(b *netlink.Batch, name string, v VXLAN) { v.put(b, name, 0) }

func (v VXLAN) put(b *netlink.Batch, name string, flags uint16) {
	said := func() string { return fmt.Sprintf("set vxlan device %s of VNI %d, port %d", name, v.VNI, v.Port) }
	b.Add(unix.RTM_NEWLINK, flags, said, func(m *netlink.Buffer) {
		*m = append(*m, make([]byte, unix.SizeofIfInfomsg)...)
		m.Text(unix.IFLA_IFNAME, name)
		m.Bytes(unix.IFLA_ADDRESS, v.MAC[:])
		m.Nest(unix.IFLA_LINKINFO, func() {
			m.Text(unix.IFLA_INFO_KIND, "vxlan")
			m.Nest(unix.IFLA_INFO_DATA, func() { v.write(m, flags != 0) })
		})
	})
	b.Add(unix.RTM_NEWLINK, 0, said, func(m *netlink.Buffer) {
		*m = append(*m, linkHeader(unix.IFF_UP, unix.IFF_UP)...)
		m.Text(unix.IFLA_IFNAME, name)
		m.Uint32(unix.IFLA_MTU, uint32(v.MTU)) // which no request that has a kind can change
	})
}

// linkHeader returns a struct ifinfomsg that sets flags.
func linkHeader(flags, change uint32) []byte {
	h := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(h[8:], flags)
	binary.NativeEndian.PutUint32(h[12:], change)
	return h
}

// inheritTOS has outer packets the DSCP of inner ones.
const inheritTOS = 1

// write writes IFLA_INFO_DATA. The kernel refuses to be told again what it can't change.
func (v VXLAN) write(m *netlink.Buffer, isNew bool) {
	local := uint16(unix.IFLA_VXLAN_LOCAL)
	if v.Local.Is6() {
		local = unix.IFLA_VXLAN_LOCAL6
	}
	if isNew {
		m.Uint32(unix.IFLA_VXLAN_ID, v.VNI)
		m.BE16(unix.IFLA_VXLAN_PORT, v.Port)
		m.Uint8(unix.IFLA_VXLAN_UDP_CSUM, 0)
		m.Uint8(unix.IFLA_VXLAN_UDP_ZERO_CSUM6_TX, 1)
		m.Uint8(unix.IFLA_VXLAN_UDP_ZERO_CSUM6_RX, 1)
	}
	m.Uint32(unix.IFLA_VXLAN_LINK, uint32(v.Uplink))
	m.Bytes(local, v.Local.AsSlice())
	m.Uint8(unix.IFLA_VXLAN_LEARNING, 0)
	m.Uint8(unix.IFLA_VXLAN_TOS, inheritTOS)
}

// DeleteNamed removes the device of that name. One that isn't there is no error.
func DeleteNamed(b *netlink.Batch, name string) {
	said := func() string { return "delete device " + name }
	b.Add(unix.RTM_DELLINK, 0, said, func(m *netlink.Buffer) {
		*m = append(*m, make([]byte, unix.SizeofIfInfomsg)...)
		m.Text(unix.IFLA_IFNAME, name)
	}, unix.ENODEV)
}

// FindVXLAN returns the device of that name and its interface index, 0 where there is none. One of another kind has no
// VNI.
func FindVXLAN(s *netlink.Socket, name string) (v VXLAN, index int, err error) {
	f, err := find(s, name, "vxlan")
	if f.index != 0 {
		v = VXLAN{MAC: f.mac, MTU: f.mtu, Up: f.up}
		v.read(f.data)
	}
	return v, f.index, err
}

// found is a device that was looked up by its name. The zero value is none.
type found struct {
	index  int
	parent int // interface index; 0: it has none
	up     bool
	noARP  bool
	mac    [6]byte
	mtu    int
	data   []byte // IFLA_INFO_DATA; nil: the device is of another kind than was looked for
}

// find looks a device up.
func find(s *netlink.Socket, name, kind string) (f found, err error) {
	err = get(s, name, func(m netlink.Message) {
		f.index = IndexIn(m)
		flags := binary.NativeEndian.Uint32(m.Body[8:])
		f.up, f.noARP = flags&unix.IFF_UP != 0, flags&unix.IFF_NOARP != 0
		for t, a := range m.Attributes(unix.SizeofIfInfomsg) {
			switch t {
			case unix.IFLA_ADDRESS:
				copy(f.mac[:], a)
			case unix.IFLA_LINK:
				f.parent = int(netlink.Uint(a))
			case unix.IFLA_MTU:
				f.mtu = int(netlink.Uint(a))
			case unix.IFLA_LINKINFO:
				if netlink.Text(netlink.Find(a, unix.IFLA_INFO_KIND)) == kind {
					f.data = slices.Clone(netlink.Find(a, unix.IFLA_INFO_DATA))
				}
			}
		}
	})
	return f, err
}

// get calls f with the device of that name, if there is one.
func get(s *netlink.Socket, name string, f func(netlink.Message)) error {
	err := s.Request(unix.RTM_GETLINK, 0, func(b *netlink.Buffer) {
		*b = append(*b, make([]byte, unix.SizeofIfInfomsg)...)
		b.Text(unix.IFLA_IFNAME, name)
		b.Uint32(unix.IFLA_EXT_MASK, skipStatistics)
	}, func(m netlink.Message) {
		if IndexIn(m) != 0 {
			f(m)
		}
	})
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("read device %s: %w", name, err)
	}
	return nil
}

func (v *VXLAN) read(data []byte) {
	for t, a := range netlink.Attributes(data) {
		switch t {
		case unix.IFLA_VXLAN_ID:
			v.VNI = netlink.Uint(a)
		case unix.IFLA_VXLAN_PORT:
			v.Port = uint16(netlink.BE(a))
		case unix.IFLA_VXLAN_LINK:
			v.Uplink = int(netlink.Uint(a))
		case unix.IFLA_VXLAN_LOCAL, unix.IFLA_VXLAN_LOCAL6:
			v.Local, _ = netip.AddrFromSlice(a)
		case unix.IFLA_VXLAN_LEARNING:
			v.Learns = netlink.Uint(a) != 0
		}
	}
}
