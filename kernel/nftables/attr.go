package nftables

import (
	"encoding/binary"

	"fairlead.dev/fairlead/kernel/nlattr"
)

// Netlink attributes: u16 length, u16 type, payload padded to 4 bytes (include/uapi/linux/netlink.h). Numbers inside
// nf_tables attributes are big endian.
const nested = nlattr.Nested

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

func number(v []byte) uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(v)
}
