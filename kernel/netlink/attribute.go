package netlink

import (
	"bytes"
	"encoding/binary"
	"iter"

	"golang.org/x/sys/unix"
)

// Nested marks the type of an attribute that holds attributes.
const Nested = unix.NLA_F_NESTED

const typeMask = 0x3fff // NLA_TYPE_MASK

// Buffer is a message, or several, being written.
type Buffer []byte

// Open begins an attribute and returns its offset for Close.
func (b *Buffer) Open(t uint16) int {
	at := len(*b)
	*b = binary.NativeEndian.AppendUint16(*b, 0)
	*b = binary.NativeEndian.AppendUint16(*b, t)
	return at
}

// Close ends the attribute that began at an offset, and pads it to a multiple of 4 bytes.
func (b *Buffer) Close(at int) {
	binary.NativeEndian.PutUint16((*b)[at:], uint16(len(*b)-at))
	for len(*b)%4 != 0 {
		*b = append(*b, 0)
	}
}

// Nest writes an attribute that holds those that body writes.
func (b *Buffer) Nest(t uint16, body func()) {
	at := b.Open(t | Nested)
	body()
	b.Close(at)
}

// Bytes writes an attribute of bytes.
func (b *Buffer) Bytes(t uint16, v []byte) {
	at := b.Open(t)
	*b = append(*b, v...)
	b.Close(at)
}

// Text writes an attribute of text, with a zero byte behind it.
func (b *Buffer) Text(t uint16, v string) {
	at := b.Open(t)
	*b = append(append(*b, v...), 0)
	b.Close(at)
}

// Uint8 writes an attribute of one byte.
func (b *Buffer) Uint8(t uint16, v uint8) { b.Bytes(t, []byte{v}) }

// Uint16 writes a number in the host's byte order.
func (b *Buffer) Uint16(t, v uint16) { b.Bytes(t, binary.NativeEndian.AppendUint16(nil, v)) }

// Uint32 writes a number in the host's byte order.
func (b *Buffer) Uint32(t uint16, v uint32) { b.Bytes(t, binary.NativeEndian.AppendUint32(nil, v)) }

// BE16 writes a number in network byte order.
func (b *Buffer) BE16(t, v uint16) { b.Bytes(t, binary.BigEndian.AppendUint16(nil, v)) }

// BE32 writes a number in network byte order.
func (b *Buffer) BE32(t uint16, v uint32) { b.Bytes(t, binary.BigEndian.AppendUint32(nil, v)) }

// BE64 writes a number in network byte order.
func (b *Buffer) BE64(t uint16, v uint64) { b.Bytes(t, binary.BigEndian.AppendUint64(nil, v)) }

// Attributes returns the attributes in b in their order, by types without flags, up to one that is not whole.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofNlAttr {
			n := int(binary.NativeEndian.Uint16(b))
			if n < unix.SizeofNlAttr || n > len(b) || !yield(binary.NativeEndian.Uint16(b[2:])&typeMask, b[4:n]) {
				return
			}
			b = b[min((n+3)&^3, len(b)):]
		}
	}
}

// Find returns the value of the first attribute of type t, nil where there is none.
func Find(b []byte, t uint16) []byte {
	for u, v := range Attributes(b) {
		if u == t {
			return v
		}
	}
	return nil
}

// Text returns an attribute's text up to its zero byte.
func Text(v []byte) string {
	text, _, _ := bytes.Cut(v, []byte{0})
	return string(text)
}

// Uint returns a number of 1, 2 or 4 bytes in the host's byte order, 0 for others.
func Uint(v []byte) uint32 {
	switch len(v) {
	case 1:
		return uint32(v[0])
	case 2:
		return uint32(binary.NativeEndian.Uint16(v))
	case 4:
		return binary.NativeEndian.Uint32(v)
	}
	return 0
}

// BE returns a number of up to 8 bytes in network byte order.
func BE(v []byte) (n uint64) {
	for _, b := range v[:min(len(v), 8)] {
		n = n<<8 | uint64(b)
	}
	return n
}
