package nftables

import (
	"encoding/binary"
	"fmt"
)

// Netlink attributes: u16 length, u16 type, payload padded to 4 bytes (include/uapi/linux/netlink.h). Numbers inside
// nf_tables attributes are big endian.
const (
	nested   = 1 << 15
	typeMask = 0x3fff
)

// buffer is a message being written.
type buffer []byte

// pad fills up to a multiple of 4 bytes.
func (b *buffer) pad() {
	for len(*b)%4 != 0 {
		*b = append(*b, 0)
	}
}

// open begins an attribute and gives its place for close.
func (b *buffer) open(t uint16) int {
	at := len(*b)
	*b = binary.NativeEndian.AppendUint16(*b, 0)
	*b = binary.NativeEndian.AppendUint16(*b, t)
	return at
}

// close ends the attribute that began at a place.
func (b *buffer) close(at int) {
	binary.NativeEndian.PutUint16((*b)[at:], uint16(len(*b)-at))
	b.pad()
}

// nest writes an attribute that holds attributes.
func (b *buffer) nest(t uint16, body func()) {
	at := b.open(t | nested)
	body()
	b.close(at)
}

func (b *buffer) bytes(t uint16, v []byte) {
	at := b.open(t)
	*b = append(*b, v...)
	b.close(at)
}

func (b *buffer) str(t uint16, v string) {
	at := b.open(t)
	*b = append(append(*b, v...), 0)
	b.close(at)
}

func (b *buffer) u8(t uint16, v uint8)   { b.bytes(t, []byte{v}) }
func (b *buffer) u32(t uint16, v uint32) { b.bytes(t, binary.BigEndian.AppendUint32(nil, v)) }
func (b *buffer) u64(t uint16, v uint64) { b.bytes(t, binary.BigEndian.AppendUint64(nil, v)) }

// value writes a data attribute that holds a plain value.
func (b *buffer) value(t uint16, v string) {
	outer := b.open(t | nested)
	inner := b.open(nftaDataValue)
	*b = append(*b, v...)
	b.close(inner)
	b.close(outer)
}

// verdict writes a data attribute that holds a verdict; chain is empty unless the code names one.
func (b *buffer) verdict(t uint16, v Verdict) {
	b.nest(t, func() {
		b.nest(nftaDataVerdict, func() {
			b.u32(nftaVerdictCode, uint32(v.Code))
			if v.Chain != "" {
				b.str(nftaVerdictChain, v.Chain)
			}
		})
	})
}

// each calls f with every attribute in b, type without flags.
func each(b []byte, f func(t uint16, v []byte)) error {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return fmt.Errorf("attribute of %d bytes in %d", n, len(b))
		}
		f(binary.NativeEndian.Uint16(b[2:])&typeMask, b[4:n])
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}

// find gives the first attribute of type t, nil if there is none.
func find(b []byte, t uint16) (found []byte) {
	each(b, func(u uint16, v []byte) {
		if u == t && found == nil {
			found = v
		}
	})
	return found
}

// text cuts a string attribute at its end mark.
func text(v []byte) string {
	for i, c := range v {
		if c == 0 {
			return string(v[:i])
		}
	}
	return string(v)
}

func number(v []byte) uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(v)
}
