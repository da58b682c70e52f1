package bpf

import (
	"encoding/binary"
	"net/netip"
)

// Words returns an address as the programs read it: 16 bytes of either family, IPv4 as ::ffff:a.b.c.d.
func Words(a netip.Addr) (w [4]uint32) {
	b := a.As16()
	for i := range w {
		w[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return w
}

// Addr is the inverse of Words.
func Addr(w [4]uint32) netip.Addr {
	var b [16]byte
	for i := range w {
		binary.NativeEndian.PutUint32(b[4*i:], w[i])
	}
	return netip.AddrFrom16(b).Unmap()
}

// Port converts a port to network byte order, or back.
func Port(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}
