// Package packet reads the headers of IP packets as netfilter passes them (RFC 791, RFC 8200).
package packet

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Packet is what a packet's headers say.
type Packet struct {
	Src, Dst  netip.Addr
	Protocol  uint8
	Transport []byte // from the transport header on; nil of a later fragment
}

// Parse reads a packet, or its beginning, from its network header on.
func Parse(b []byte) (p Packet, ok bool) {
	if len(b) == 0 {
		return p, false
	}
	switch b[0] >> 4 {
	case 4:
		header := int(b[0]&0xf) * 4
		if header < 20 || len(b) < header {
			return p, false
		}
		p = Packet{netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:])), b[9], b[header:]}
		if binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			p.Transport = nil
		}
	case 6:
		if len(b) < 40 {
			return p, false
		}
		p.Src, p.Dst = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		p.Protocol, p.Transport = extensions(b[6], b[40:])
	default:
		return p, false
	}
	return p, true
}

// Ports returns the ports of a protocol that has some, 0 where they aren't in the packet, such as in a later fragment.
func (p Packet) Ports() (from, to uint16) {
	switch p.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
		if len(p.Transport) >= 4 {
			return binary.BigEndian.Uint16(p.Transport), binary.BigEndian.Uint16(p.Transport[2:])
		}
	}
	return 0, 0
}

// Payload returns what is behind the header of UDP or TCP, nil for other protocols.
func (p Packet) Payload() []byte {
	header := 8
	switch {
	case p.Protocol == unix.IPPROTO_TCP && len(p.Transport) >= 20:
		header = int(p.Transport[12]>>4) * 4
	case p.Protocol != unix.IPPROTO_UDP:
		return nil
	}
	return p.Transport[min(header, len(p.Transport)):]
}

// extensions skips IPv6 extension headers. It returns the protocol behind them and its header, nil for a later
// fragment.
func extensions(next uint8, b []byte) (protocol uint8, rest []byte) {
	for len(b) >= 8 {
		length := 0
		switch next {
		case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS:
			length = (int(b[1]) + 1) * 8
		case unix.IPPROTO_AH:
			length = (int(b[1]) + 2) * 4
		case unix.IPPROTO_FRAGMENT:
			if length = 8; binary.BigEndian.Uint16(b[2:])&^7 != 0 {
				return b[0], nil
			}
		default:
			return next, b
		}
		next, b = b[0], b[min(length, len(b)):]
	}
	return next, b
}
