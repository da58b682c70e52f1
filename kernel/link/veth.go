package link

import (
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// Kinds of devices that connect a pod.
const (
	KindVeth   = "veth"   // a pair
	KindNetkit = "netkit" // a pair that carries frames as a veth does (NETKIT_L2), from Linux 6.10 on
	KindIPVLAN = "ipvlan" // one device, of a parent
)

// Veth is one end of a veth or netkit pair without addresses of the kernel's choice. Veths are comparable.
type Veth struct {
	Kind  string // KindVeth or KindNetkit; of others' pairs and of an ipvlan, as the kernel has it
	Name  string
	Alias string // for people, at most 255 bytes
	MAC   [6]byte
	MTU   int
	Up    bool
	Group uint32 // of devices, such as PodGroup; 0: none
	NoARP bool   // neither sends, answers nor learns from ARP
}

// Groups of the node's ends of pods' devices. They differ in one bit, so that one test knows both.
const (
	PodGroup = 0xfa11
	// ReleasedGroup is of pods that have gone. The kernel needs 15 to 25 ms under its lock of devices (RTNL) to delete
	// one of them, and hardly more for many at once.
	ReleasedGroup = 0xfa13
)

// pairPeer is VETH_INFO_PEER and IFLA_NETKIT_PEER_INFO: the far end of a pair.
const pairPeer = 1

// AddPair makes a pair of near's kind, down: near here, far in the network namespace of a file descriptor. ChangeVeth
// is to follow.
func AddPair(b *netlink.Batch, near, far Veth, ns int) {
	said := func() string { return fmt.Sprintf("add %s %s with peer %s", near.Kind, near.Name, far.Name) }
	b.Add(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, said, func(m *netlink.Buffer) {
		*m = append(*m, make([]byte, unix.SizeofIfInfomsg)...)
		near.write(m)
		m.Nest(unix.IFLA_LINKINFO, func() {
			m.Text(unix.IFLA_INFO_KIND, near.Kind)
			m.Nest(unix.IFLA_INFO_DATA, func() {
				if near.Kind == KindNetkit { // without a policy it passes packets on
					m.Uint32(unix.IFLA_NETKIT_MODE, unix.NETKIT_L2)
				}
				m.Nest(pairPeer, func() {
					*m = append(*m, make([]byte, unix.SizeofIfInfomsg)...)
					far.write(m)
					m.Uint32(unix.IFLA_NET_NS_FD, uint32(ns))
				})
			})
		})
	})
}

func (v Veth) write(m *netlink.Buffer) {
	m.Text(unix.IFLA_IFNAME, v.Name)
	m.Bytes(unix.IFLA_ADDRESS, v.MAC[:])
	m.Uint32(unix.IFLA_MTU, uint32(v.MTU))
	if v.Group != 0 {
		m.Uint32(unix.IFLA_GROUP, v.Group)
	}
}

// addrGenModeNone is IN6_ADDR_GEN_MODE_NONE.
const addrGenModeNone = 1

// ChangeVeth sets all that a Veth has of the device of its name, and brings it up, without an IPv6 link-local address.
func ChangeVeth(b *netlink.Batch, v Veth) {
	said := func() string { return "set device " + v.Name }
	withoutLinkLocal(b, v.Name)
	b.Add(unix.RTM_NEWLINK, 0, said, func(m *netlink.Buffer) {
		flags := uint32(unix.IFF_UP)
		if v.NoARP {
			flags |= unix.IFF_NOARP
		}
		*m = append(*m, linkHeader(flags, unix.IFF_UP|unix.IFF_NOARP)...)
		v.write(m)
		if v.Alias != "" {
			m.Bytes(unix.IFLA_IFALIAS, []byte(v.Alias))
		}
	})
}

// withoutLinkLocal has the kernel give the device of that name no IPv6 link-local address.
func withoutLinkLocal(b *netlink.Batch, name string) {
	said := func() string { return "set device " + name }
	b.Add(unix.RTM_NEWLINK, 0, said, func(m *netlink.Buffer) {
		*m = append(*m, make([]byte, unix.SizeofIfInfomsg)...)
		m.Text(unix.IFLA_IFNAME, name)
		m.Nest(unix.IFLA_AF_SPEC, func() {
			m.Nest(unix.AF_INET6, func() { m.Uint8(unix.IFLA_INET6_ADDR_GEN_MODE, addrGenModeNone) })
		})
	}, unix.EAFNOSUPPORT)
}

// Up brings the device of that name up.
func Up(b *netlink.Batch, name string) {
	b.Add(unix.RTM_NEWLINK, 0, func() string { return "bring device " + name + " up" }, func(m *netlink.Buffer) {
		*m = append(*m, linkHeader(unix.IFF_UP, unix.IFF_UP)...)
		m.Text(unix.IFLA_IFNAME, name)
	})
}

// Release takes the device of that name down, then into ReleasedGroup. One that isn't there is no error.
func Release(b *netlink.Batch, name string) {
	said := func() string { return "take device " + name + " down" }
	b.Add(unix.RTM_NEWLINK, 0, said, func(m *netlink.Buffer) {
		*m = append(*m, linkHeader(0, unix.IFF_UP)...)
		m.Text(unix.IFLA_IFNAME, name)
	}, unix.ENODEV)
	b.Add(unix.RTM_NEWLINK, 0, said, func(m *netlink.Buffer) {
		*m = append(*m, linkHeader(0, 0)...)
		m.Text(unix.IFLA_IFNAME, name)
		m.Uint32(unix.IFLA_GROUP, ReleasedGroup)
	}, unix.ENODEV)
}

// DeleteReleased deletes the devices of ReleasedGroup that mine reports true of: all at once, unless that group has
// others too.
func DeleteReleased(s *netlink.Socket, mine func(Veth) bool) error {
	var own []string
	others := false
	err := list(s, func(m netlink.Message) {
		switch v, _ := VethOf(m); {
		case v.Group == ReleasedGroup && mine(v):
			own = append(own, v.Name)
		case v.Group == ReleasedGroup:
			others = true
		}
	}, func() { own, others = nil, false })
	if err != nil || len(own) == 0 {
		return err
	}
	var b netlink.Batch
	if !others {
		said := func() string { return fmt.Sprintf("delete %d devices of pods that have gone", len(own)) }
		b.Add(unix.RTM_DELLINK, 0, said, func(m *netlink.Buffer) {
			*m = append(*m, make([]byte, unix.SizeofIfInfomsg)...)
			m.Uint32(unix.IFLA_GROUP, ReleasedGroup)
		}, unix.ENODEV)
		return s.Apply(&b)
	}
	for _, name := range own {
		DeleteNamed(&b, name)
	}
	return s.Apply(&b)
}

// Veths returns the devices of pods' kinds that are named with a prefix, by interface index.
func Veths(s *netlink.Socket, prefix string) (all map[int]Veth, err error) {
	err = list(s, func(m netlink.Message) {
		if v, ok := VethOf(m); ok && strings.HasPrefix(v.Name, prefix) {
			all[IndexIn(m)] = v
		}
	}, func() { all = map[int]Veth{} })
	return all, err
}

// VethNamed returns the device of that name and its interface index, 0 where there is none.
func VethNamed(s *netlink.Socket, name string) (index int, v Veth, err error) {
	err = get(s, name, func(m netlink.Message) {
		index = IndexIn(m)
		v, _ = VethOf(m)
	})
	return index, v, err
}

// Operational reports whether the device of that name passes packets: its operational state is up (RFC 2863). After
// its carrier has come the kernel sees to that in the background; since Linux 6.8 at once where it is asked. A device
// that is not there is an error.
func Operational(s *netlink.Socket, name string) (up bool, err error) {
	const operUp = 6 // IF_OPER_UP
	found := false
	err = get(s, name, func(m netlink.Message) {
		found = true
		for t, v := range m.Attributes(unix.SizeofIfInfomsg) {
			up = up || t == unix.IFLA_OPERSTATE && netlink.Uint(v) == operUp
		}
	})
	if err == nil && !found {
		err = fmt.Errorf("device %s is gone", name)
	}
	return up, err
}

// skipStatistics is RTEXT_FILTER_SKIP_STATS: half of a device's message.
const skipStatistics = 1 << 3

// list calls a function with each device, after begin; once more from begin on where devices have changed meanwhile.
func list(s *netlink.Socket, each func(netlink.Message), begin func()) error {
	err := netlink.Stable(func() error {
		begin()
		return s.Request(unix.RTM_GETLINK, unix.NLM_F_DUMP, func(b *netlink.Buffer) {
			*b = append(*b, make([]byte, unix.SizeofIfInfomsg)...)
			b.Uint32(unix.IFLA_EXT_MASK, skipStatistics)
		}, each)
	})
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	return nil
}

// VethOf reads a message, and reports whether it is about a device of pods' kinds.
func VethOf(m netlink.Message) (v Veth, ok bool) {
	if m.Type != unix.RTM_NEWLINK || len(m.Body) < unix.SizeofIfInfomsg {
		return v, false
	}
	flags := binary.NativeEndian.Uint32(m.Body[8:])
	v.Up, v.NoARP = flags&unix.IFF_UP != 0, flags&unix.IFF_NOARP != 0
	for t, a := range m.Attributes(unix.SizeofIfInfomsg) {
		switch t {
		case unix.IFLA_IFNAME:
			v.Name = netlink.Text(a)
		case unix.IFLA_IFALIAS:
			v.Alias = netlink.Text(a)
		case unix.IFLA_ADDRESS:
			copy(v.MAC[:], a)
		case unix.IFLA_MTU:
			v.MTU = int(netlink.Uint(a))
		case unix.IFLA_GROUP:
			v.Group = uint32(netlink.Uint(a))
		case unix.IFLA_LINKINFO:
			v.Kind = netlink.Text(netlink.Find(a, unix.IFLA_INFO_KIND))
			ok = v.Kind == KindVeth || v.Kind == KindNetkit || v.Kind == KindIPVLAN
		}
	}
	return v, ok
}
