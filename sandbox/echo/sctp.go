package echo

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"golang.org/x/sys/unix"
)

// Chunk types of SCTP (RFC 9260, section 3.2) and the one parameter that we use (section 3.3.3).
const (
	chunkInit    = 1
	chunkInitAck = 2
	chunkAbort   = 6
	stateCookie  = 7
)

// hurry has an SCTP socket ask again after a fifth of a second instead of three: an ICMP error that comes back while
// connect(2) is still sending is not heard (sctp_v4_err_handle in net/sctp/input.c leaves a socket in use alone), the
// next one is.
func (s *socket) hurry() error {
	const sctpRTOInfo = 0 // SCTP_RTOINFO, RFC 6458, section 8.1.1: association, initial, maximum and minimum timeout in ms
	b := make([]byte, 0, 16)
	for _, v := range []uint32{0, 200, 1000, 200} {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	err := s.control(func(fd int) error { return unix.SetsockoptString(fd, unix.IPPROTO_SCTP, sctpRTOInfo, string(b)) })
	if err != nil {
		return fmt.Errorf("set SCTP's timeouts: %w", err)
	}
	return nil
}

// segment is an SCTP packet with one chunk: INIT, INIT ACK, or another whose content doesn't matter.
type segment struct {
	Src, Dst uint16
	Tag      uint32 // verification tag: the receiver's, 0 in an INIT
	Chunk    uint8  // the first chunk's type
	Init     uint32 // INIT, INIT ACK: the sender's tag, never 0
	Cookie   []byte // INIT ACK: the State Cookie
}

// crc is the checksum of a packet whose checksum field counts as zero (RFC 9260, appendix A).
func crc(b []byte) uint32 {
	sum := crc32.Update(0, castagnoli, b[:8])
	sum = crc32.Update(sum, castagnoli, []byte{0, 0, 0, 0})
	return crc32.Update(sum, castagnoli, b[12:])
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// marshal returns the packet's bytes.
func (s segment) marshal() []byte {
	be := binary.BigEndian
	b := be.AppendUint16(nil, s.Src)
	b = be.AppendUint16(b, s.Dst)
	b = be.AppendUint32(b, s.Tag)
	b = append(b, 0, 0, 0, 0, s.Chunk, 0, 0, 0)
	if s.Chunk == chunkInit || s.Chunk == chunkInitAck {
		b = be.AppendUint32(b, s.Init)
		b = be.AppendUint32(b, 65536) // receiver window
		b = be.AppendUint16(b, 1)     // outbound streams
		b = be.AppendUint16(b, 1)     // inbound streams
		b = be.AppendUint32(b, s.Init)
	}
	if s.Chunk == chunkInitAck {
		b = be.AppendUint16(b, stateCookie)
		b = be.AppendUint16(b, uint16(4+len(s.Cookie)))
		b = append(b, s.Cookie...)
	}
	be.PutUint16(b[14:], uint16(len(b)-12)) // without the padding of a last parameter
	b = append(b, make([]byte, -len(b)&3)...)
	binary.LittleEndian.PutUint32(b[8:], crc(b))
	return b
}

// parseSegment reads the first chunk of a packet whose checksum is right.
func parseSegment(b []byte) (s segment, err error) {
	be := binary.BigEndian
	if len(b) < 16 {
		return s, fmt.Errorf("SCTP packet of %d bytes", len(b))
	}
	if got, want := binary.LittleEndian.Uint32(b[8:]), crc(b); got != want {
		return s, fmt.Errorf("SCTP checksum is %08x, should be %08x", got, want)
	}
	s = segment{Src: be.Uint16(b), Dst: be.Uint16(b[2:]), Tag: be.Uint32(b[4:]), Chunk: b[12]}
	length := int(be.Uint16(b[14:]))
	if length < 4 || length > len(b)-12 {
		return s, fmt.Errorf("SCTP chunk of %d bytes in %d", length, len(b)-12)
	}
	if s.Chunk != chunkInit && s.Chunk != chunkInitAck {
		return s, nil
	}
	chunk := b[12 : 12+length]
	if len(chunk) < 20 {
		return s, fmt.Errorf("SCTP INIT of %d bytes", len(chunk))
	}
	if s.Init = be.Uint32(chunk[4:]); s.Init == 0 {
		return s, errors.New("SCTP INIT with tag 0")
	}
	if s.Chunk == chunkInitAck {
		s.Cookie, err = cookie(chunk[20:])
	}
	return s, err
}

// cookie finds the State Cookie among a chunk's parameters; nil where there is none.
func cookie(params []byte) ([]byte, error) {
	for len(params) >= 4 {
		length := int(binary.BigEndian.Uint16(params[2:]))
		if length < 4 || length > len(params) {
			return nil, fmt.Errorf("SCTP parameter of %d bytes in %d", length, len(params))
		}
		if binary.BigEndian.Uint16(params) == stateCookie {
			return params[4:length], nil
		}
		params = params[min((length+3)&^3, len(params)):]
	}
	return nil, nil
}
