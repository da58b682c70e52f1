package denial

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// parse reads the beginning of a packet from its network header on (RFC 791, RFC 8200). Ports that aren't in it, such
// as those of a later fragment, are 0.
func parse(b []byte) (p verdict.Packet, ok bool) {
	if len(b) == 0 {
		return p, false
	}
	var src, dst netip.Addr
	var protocol uint8
	var rest []byte
	switch b[0] >> 4 {
	case 4:
		header := int(b[0]&0xf) * 4
		if header < 20 || len(b) < header {
			return p, false
		}
		protocol, src, dst = b[9], netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		if rest = b[header:]; binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			rest = nil
		}
	case 6:
		if len(b) < 40 {
			return p, false
		}
		src, dst = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		protocol, rest = extensions(b[6], b[40:])
	default:
		return p, false
	}
	var from, to uint16
	switch protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
		if len(rest) >= 4 {
			from, to = binary.BigEndian.Uint16(rest), binary.BigEndian.Uint16(rest[2:])
		}
	case unix.IPPROTO_ICMPV6:
		if len(rest) > 0 {
			p.Type = rest[0]
		}
	}
	p.Src, p.Dst = netip.AddrPortFrom(src, from), netip.AddrPortFrom(dst, to)
	p.Protocol = model.Protocol(protocol)
	return p, true
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
