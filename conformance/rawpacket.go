package conformance

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
)

// Lengths of headers.
const (
	ip4Header = 20
	ip6Header = 40
	udpHeader = 8
)

// udpPacket returns an IP packet that carries a UDP datagram.
func udpPacket(src, dst netip.Addr, from, to uint16, payload []byte) []byte {
	udp := binary.BigEndian.AppendUint16(nil, from)
	udp = binary.BigEndian.AppendUint16(udp, to)
	udp = binary.BigEndian.AppendUint16(udp, uint16(udpHeader+len(payload)))
	udp = append(append(udp, 0, 0), payload...)
	ends := slices.Concat(src.AsSlice(), dst.AsSlice())
	sum := onesSum(onesSum(uint32(len(udp)+unix.IPPROTO_UDP), ends), udp)
	binary.BigEndian.PutUint16(udp[6:], foldSum(sum))
	if src.Is4() {
		return append(ip4(uint16(ip4Header+len(udp)), 0, 0, ends), udp...)
	}
	h := binary.BigEndian.AppendUint16([]byte{0x60, 0, 0, 0}, uint16(len(udp)))
	return slices.Concat(h, []byte{unix.IPPROTO_UDP, 64}, ends, udp)
}

// ip4 returns the header of an IPv4 packet of UDP.
func ip4(length, id, fragment uint16, ends []byte) []byte {
	h := binary.BigEndian.AppendUint16([]byte{0x45, 0}, length)
	h = binary.BigEndian.AppendUint16(h, id)
	h = binary.BigEndian.AppendUint16(h, fragment)
	h = slices.Concat(h, []byte{64, unix.IPPROTO_UDP, 0, 0}, ends)
	binary.BigEndian.PutUint16(h[10:], foldSum(onesSum(0, h)))
	return h
}

// onesSum adds the words of b to an Internet checksum (RFC 1071).
func onesSum(sum uint32, b []byte) uint32 {
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	return sum
}

func foldSum(sum uint32) uint16 {
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// vxlanFrame returns what a UDP datagram of VXLAN carries (RFC 7348): its header, and a frame with an IP packet.
func vxlanFrame(vni uint32, to [6]byte, packet []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{8, 0, 0, 0}, vni<<8)
	kind := uint16(unix.ETH_P_IP)
	if packet[0]>>4 == 6 {
		kind = unix.ETH_P_IPV6
	}
	b = slices.Concat(b, to[:], []byte{2, 0, 0, 0, 0, 9})
	return append(binary.BigEndian.AppendUint16(b, kind), packet...)
}

var fragmentIDs uint16

// fragments returns an IPv4 packet in as many pieces, the last ones first; one piece is the packet itself.
func fragments(packet []byte, pieces int) (l [][]byte) {
	if pieces == 1 || packet[0]>>4 == 6 {
		return [][]byte{packet}
	}
	fragmentIDs++
	body, ends := packet[ip4Header:], packet[12:ip4Header]
	size := (len(body)/pieces + 7) &^ 7
	for at := 0; at < len(body); at += size {
		piece, more := body[at:min(at+size, len(body))], uint16(0)
		if at+size < len(body) {
			more = 1 << 13 // IP_MF
		}
		l = append(l, append(ip4(uint16(ip4Header+len(piece)), fragmentIDs, uint16(at/8)|more, ends), piece...))
	}
	slices.Reverse(l)
	return l
}

// sendRaw sends packets with the headers that they have, in the calling thread's network namespace.
func sendRaw(to netip.Addr, packets [][]byte) error {
	fd, err := unix.Socket(inet.Family(to), unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return fmt.Errorf("open a raw socket: %w", err)
	}
	defer unix.Close(fd)
	for _, p := range packets {
		if err := unix.Sendto(fd, p, 0, inet.Sockaddr(netip.AddrPortFrom(to, 0))); err != nil {
			return fmt.Errorf("send a packet to %s: %w", to, err)
		}
	}
	return nil
}
