package userspace

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// voices are raw sockets of a network namespace by which it says that nothing is at a port, by family: IPv4, IPv6.
type voices [2]int

// openVoices opens the calling thread's namespace's. A family that the kernel lacks has none.
func openVoices() (v voices) {
	v[0], _ = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMP)
	v[1], _ = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMPV6)
	for i, level := range []int{unix.IPPROTO_IP, unix.IPPROTO_IPV6} {
		unix.SetsockoptInt(v[i], level, []int{unix.IP_TRANSPARENT, unix.IPV6_TRANSPARENT}[i], 1)
	}
	const filter = 1 // ICMP_FILTER and ICMPV6_FILTER: they only speak
	unix.SetsockoptInt(v[0], unix.SOL_RAW, filter, -1)
	unix.SetsockoptICMPv6Filter(v[1], unix.IPPROTO_ICMPV6, filter,
		&unix.ICMPv6Filter{Data: [8]uint32(slices.Repeat([]uint32{1<<32 - 1}, 8))})
	return v
}

func (v voices) close() {
	for _, fd := range v {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// reject notifies a client that nothing is at the port where it sent a datagram: ICMP port unreachable (RFC 792, RFC
// 4443).
func (v voices) reject(at, client netip.AddrPort) {
	if at.Addr().Is4() {
		v.say(at, client, []byte{3, 3, 0, 0, 0, 0, 0, 0})
		return
	}
	v.say(at, client, []byte{1, 4, 0, 0, 0, 0, 0, 0})
}

// tooLong notifies a client of IPv6 that a datagram was longer than the path's MTU: ICMPv6 Packet Too Big (RFC 4443).
func (v voices) tooLong(at, client netip.AddrPort, mtu int) {
	v.say(at, client, binary.BigEndian.AppendUint32([]byte{2, 0, 0, 0}, uint32(mtu)))
}

// say sends a client an ICMP message about a datagram that it sent. The message is given up to its 8th byte, without
// checksum.
func (v voices) say(at, client netip.AddrPort, m []byte) {
	a, c := at.Addr(), client.Addr()
	datagram := binary.BigEndian.AppendUint16(nil, client.Port())
	datagram = binary.BigEndian.AppendUint16(datagram, at.Port())
	datagram = append(datagram, 0, 8, 0, 0)
	if a.Is4() {
		header := []byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, byte(model.UDP), 0, 0}
		header = append(append(header, c.AsSlice()...), a.AsSlice()...)
		m = append(append(m, header...), datagram...)
		binary.BigEndian.PutUint16(m[2:], checksum(m))
		unix.SendmsgN(v[0], m, unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a.As4()}), inet.Sockaddr(netip.AddrPortFrom(c, 0)),
			unix.MSG_DONTWAIT)
		return
	}
	header := []byte{0x60, 0, 0, 0, 0, 8, byte(model.UDP), 64}
	header = append(append(header, c.AsSlice()...), a.AsSlice()...)
	m = append(append(m, header...), datagram...)
	unix.SendmsgN(v[1], m, unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a.As16()}), inet.Sockaddr(netip.AddrPortFrom(c, 0)),
		unix.MSG_DONTWAIT)
}

// checksum is the Internet's (RFC 1071), of an even number of bytes.
func checksum(b []byte) uint16 {
	sum := uint32(0)
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
