package netnstest

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Datagram returns an IP packet with a UDP datagram.
func Datagram(from, to netip.AddrPort, data []byte) []byte {
	udp := binary.BigEndian.AppendUint16(nil, from.Port())
	udp = binary.BigEndian.AppendUint16(udp, to.Port())
	udp = binary.BigEndian.AppendUint16(udp, uint16(8+len(data)))
	udp = append(append(udp, 0, 0), data...)
	ends := append(from.Addr().AsSlice(), to.Addr().AsSlice()...)
	sum := checksum(append(binary.BigEndian.AppendUint16([]byte{0, unix.IPPROTO_UDP}, uint16(len(udp))), append(ends,
		udp...)...))
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(udp[6:], sum)
	const hops = 64
	if from.Addr().Is6() {
		ip := binary.BigEndian.AppendUint16([]byte{6 << 4, 0, 0, 0}, uint16(len(udp)))
		return append(append(append(ip, unix.IPPROTO_UDP, hops), ends...), udp...)
	}
	ip := binary.BigEndian.AppendUint16([]byte{4<<4 | 5, 0}, uint16(20+len(udp)))
	ip = append(append(ip, 0, 0, 0, 0, hops, unix.IPPROTO_UDP, 0, 0), ends...)
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	return append(ip, udp...)
}

// checksum returns that of RFC 1071.
func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i, x := range b {
		sum += uint32(x) << (8 * (1 - i%2))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// Send sends an IP packet out by a device of the calling thread's network namespace, to a link-layer address, whatever
// the routes, rules and addresses there are.
func Send(device string, to net.HardwareAddr, packet []byte) error {
	i, err := net.InterfaceByName(device)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open packet socket: %w", err)
	}
	defer unix.Close(fd)
	kind := uint16(unix.ETH_P_IP)
	if packet[0]>>4 == 6 {
		kind = unix.ETH_P_IPV6
	}
	address := &unix.SockaddrLinklayer{Protocol: kind>>8 | kind<<8, Ifindex: i.Index}
	address.Halen = uint8(copy(address.Addr[:], to))
	return unix.Sendto(fd, packet, 0, address)
}
