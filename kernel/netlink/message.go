package netlink

import (
	"encoding/binary"
	"fmt"
	"iter"

	"golang.org/x/sys/unix"
)

// Message is a netlink message: its header but for the length, and what is behind it.
type Message struct {
	Type, Flags uint16
	Seq, Port   uint32
	Body        []byte
}

// Messages returns the messages of a datagram in their order, up to one that is not whole.
func Messages(b []byte) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			n := int(binary.NativeEndian.Uint32(b))
			if n < unix.NLMSG_HDRLEN || n > len(b) {
				return
			}
			m := Message{
				Type: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
				Seq: binary.NativeEndian.Uint32(b[8:]), Port: binary.NativeEndian.Uint32(b[12:]),
				Body: b[unix.NLMSG_HDRLEN:n],
			}
			if !yield(m) {
				return
			}
			b = b[min((n+3)&^3, len(b)):]
		}
	}
}

// Attributes returns the attributes behind a header of so many bytes.
func (m Message) Attributes(header int) iter.Seq2[uint16, []byte] {
	return Attributes(m.Body[min(header, len(m.Body)):])
}

// Err returns the error of an NLMSG_ERROR or NLMSG_DONE, with the kernel's own words where it has any; nil for an
// acknowledgement. The error is a unix.Errno.
func (m Message) Err() error {
	if len(m.Body) < 4 {
		return unix.EBADMSG
	}
	e := unix.Errno(-int32(binary.NativeEndian.Uint32(m.Body)))
	if e == 0 {
		return nil
	}
	if m.Flags&unix.NLM_F_ACK_TLVS != 0 {
		header := 4
		if m.Type == unix.NLMSG_ERROR {
			header += unix.NLMSG_HDRLEN // of the request
		}
		for t, v := range m.Attributes(header) {
			if t == unix.NLMSGERR_ATTR_MSG {
				return fmt.Errorf("%w (%s)", e, Text(v))
			}
		}
	}
	return e
}

// begin writes a message's header and returns its offset for end.
func (b *Buffer) begin(kind, flags uint16, seq uint32) int {
	at := len(*b)
	*b = binary.NativeEndian.AppendUint32(*b, 0)
	*b = binary.NativeEndian.AppendUint16(*b, kind)
	*b = binary.NativeEndian.AppendUint16(*b, flags)
	*b = binary.NativeEndian.AppendUint32(*b, seq)
	*b = binary.NativeEndian.AppendUint32(*b, 0)
	return at
}

// end writes the length of the message that began at an offset.
func (b *Buffer) end(at int) { binary.NativeEndian.PutUint32((*b)[at:], uint32(len(*b)-at)) }

// Marker returns a message that is no request of its own, such as a transaction's begin.
func Marker(kind uint16, body ...byte) []byte {
	var b Buffer
	at := b.begin(kind, unix.NLM_F_REQUEST, 0)
	b = append(b, body...)
	b.end(at)
	return b
}
