package link

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
)

// devconfSourceMark is the setting src_valid_mark of a device, as an index (IPV4_DEVCONF_SRC_VMARK of linux/ip.h).
const devconfSourceMark = 24

// MarkReversePath has IPv4's reverse path filter of the device of that name look routes up with a packet's mark
// (src_valid_mark). It also works where /proc/sys is read-only.
func MarkReversePath(b *netlink.Batch, name string) {
	said := func() string { return "set src_valid_mark of device " + name }
	b.Add(unix.RTM_NEWLINK, 0, said, func(m *netlink.Buffer) {
		*m = append(*m, make([]byte, unix.SizeofIfInfomsg)...)
		m.Text(unix.IFLA_IFNAME, name)
		m.Nest(unix.IFLA_AF_SPEC, func() {
			m.Nest(unix.AF_INET, func() {
				m.Nest(unix.IFLA_INET_CONF, func() { m.Uint32(devconfSourceMark, 1) })
			})
		})
	})
}

// MarksReversePath reports whether a device of that name is there and is as MarkReversePath makes it.
func MarksReversePath(s *netlink.Socket, name string) (marks bool, err error) {
	err = get(s, name, func(m netlink.Message) {
		for t, v := range m.Attributes(unix.SizeofIfInfomsg) {
			if t != unix.IFLA_AF_SPEC {
				continue
			}
			settings := netlink.Find(netlink.Find(v, unix.AF_INET), unix.IFLA_INET_CONF) // an array
			const at = 4 * (devconfSourceMark - 1)
			marks = len(settings) >= at+4 && binary.NativeEndian.Uint32(settings[at:]) != 0
		}
	})
	return marks, err
}
