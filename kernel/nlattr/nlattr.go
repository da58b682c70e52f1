// Package nlattr reads netlink attributes: u16 length, u16 type, payload padded to 4 bytes (include/uapi/linux/netlink.h).
package nlattr

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// Nested marks the type of an attribute that holds attributes.
const Nested = 1 << 15

const typeMask = 0x3fff // NLA_TYPE_MASK

// Each calls f with every attribute in b, its type without flags.
func Each(b []byte, f func(t uint16, v []byte)) error {
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

// Find gives the first attribute of type t, nil if there is none.
func Find(b []byte, t uint16) (found []byte) {
	Each(b, func(u uint16, v []byte) {
		if u == t && found == nil {
			found = v
		}
	})
	return found
}

// Text cuts a string attribute at its end mark.
func Text(v []byte) string {
	text, _, _ := bytes.Cut(v, []byte{0})
	return string(text)
}
