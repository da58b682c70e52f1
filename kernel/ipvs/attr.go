package ipvs

import (
	"encoding/binary"

	"fairlead.dev/fairlead/kernel/nlattr"
)

// Netlink attributes: u16 length, u16 type, payload padded to 4 bytes. Numbers of IPVS are in the host's byte order, but
// ports and the IPv4 netmask.
const nested = nlattr.Nested

// buffer is a message being written.
type buffer []byte

func (b *buffer) bytes(t uint16, v []byte) {
	at := b.open(t)
	*b = append(*b, v...)
	b.close(at)
}

func (b *buffer) u16(t, v uint16) { b.bytes(t, binary.NativeEndian.AppendUint16(nil, v)) }
func (b *buffer) u32(t uint16, v uint32) {
	b.bytes(t, binary.NativeEndian.AppendUint32(nil, v))
}
func (b *buffer) str(t uint16, v string) { b.bytes(t, append([]byte(v), 0)) }

// open begins an attribute and gives its place for close.
func (b *buffer) open(t uint16) int {
	at := len(*b)
	*b = binary.NativeEndian.AppendUint16(*b, 0)
	*b = binary.NativeEndian.AppendUint16(*b, t)
	return at
}

func (b *buffer) close(at int) {
	binary.NativeEndian.PutUint16((*b)[at:], uint16(len(*b)-at))
	for len(*b)%4 != 0 {
		*b = append(*b, 0)
	}
}

func number(v []byte) uint32 {
	switch {
	case len(v) >= 4:
		return binary.NativeEndian.Uint32(v)
	case len(v) >= 2:
		return uint32(binary.NativeEndian.Uint16(v))
	}
	return 0
}

// eachMessage calls f with every netlink message in b.
func eachMessage(b []byte, f func(kind, flags uint16, seq uint32, body []byte)) {
	for len(b) >= 16 {
		n := int(binary.NativeEndian.Uint32(b))
		if n < 16 || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]), b[16:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}
