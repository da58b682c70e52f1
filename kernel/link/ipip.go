package link

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// IPIP is a device that encapsulates IPv4 in IPv4 (RFC 2003) without a fixed far end: the outer destination is the next
// hop of the route by which a packet leaves.
type IPIP struct {
	Local  netip.Addr // outer source, IPv4
	Uplink int        // interface index of the device by which outer packets leave
	MTU    int
	Up     bool
}

// Attributes of if_tunnel.h (IFLA_IPTUN_*).
const (
	iptunLink  = 1
	iptunLocal = 2
	iptunTTL   = 4
	iptunTOS   = 5
	iptunProto = 9
)

// outerTTL is that of outer packets: routers may be in between.
const outerTTL = 64

// AddIPIP makes a device of that name, which is down. Its outer packets have the inner ones' DSCP and aren't
// fragmented.
func AddIPIP(b *netlink.Batch, name string, v IPIP) {
	said := func() string { return fmt.Sprintf("add ipip device %s", name) }
	b.Add(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, said, func(m *netlink.Buffer) {
		*m = append(*m, make([]byte, unix.SizeofIfInfomsg)...)
		m.Text(unix.IFLA_IFNAME, name)
		m.Nest(unix.IFLA_LINKINFO, func() {
			m.Text(unix.IFLA_INFO_KIND, "ipip")
			m.Nest(unix.IFLA_INFO_DATA, func() {
				m.Uint32(iptunLink, uint32(v.Uplink))
				m.Bytes(iptunLocal, v.Local.AsSlice())
				m.Uint8(iptunTTL, outerTTL)
				m.Uint8(iptunTOS, inheritTOS)
				m.Uint8(iptunProto, unix.IPPROTO_IPIP)
			})
		})
	})
}

// ChangeIPIP sets the MTU of the device of that name, and brings it up.
func ChangeIPIP(b *netlink.Batch, name string, v IPIP) {
	b.Add(unix.RTM_NEWLINK, 0, func() string { return "set ipip device " + name }, func(m *netlink.Buffer) {
		*m = append(*m, linkHeader(unix.IFF_UP, unix.IFF_UP)...)
		m.Text(unix.IFLA_IFNAME, name)
		m.Uint32(unix.IFLA_MTU, uint32(v.MTU))
	})
}

// FindIPIP returns the device of that name and its interface index, 0 where there is none. One of another kind has no
// source.
func FindIPIP(s *netlink.Socket, name string) (v IPIP, index int, err error) {
	f, err := find(s, name, "ipip")
	if f.index == 0 {
		return v, 0, err
	}
	v = IPIP{MTU: f.mtu, Up: f.up}
	for t, a := range netlink.Attributes(f.data) {
		switch t {
		case iptunLink:
			v.Uplink = int(netlink.Uint(a))
		case iptunLocal:
			v.Local, _ = netip.AddrFromSlice(a)
		}
	}
	return v, f.index, err
}
