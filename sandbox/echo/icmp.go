package echo

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// Quote is a packet that an ICMP error quotes: of TCP, UDP or SCTP, else an echo request whose ID is Src's port.
type Quote struct {
	Protocol model.Protocol
	Src, Dst netip.AddrPort
}

// unreachable returns the type and code of the ICMP error "port unreachable" of a family, and the protocol.
func unreachable(six bool) (protocol model.Protocol, kind icmp.Type, code int) {
	if six {
		return unix.IPPROTO_ICMPV6, ipv6.ICMPTypeDestinationUnreachable, 4
	}
	return unix.IPPROTO_ICMP, ipv4.ICMPTypeDestinationUnreachable, 3
}

// marshal returns the packet from its IP header on, with data behind its first eight bytes.
func (q Quote) marshal(data []byte) []byte {
	begin := make([]byte, 8)
	binary.BigEndian.PutUint16(begin, q.Src.Port())
	binary.BigEndian.PutUint16(begin[2:], q.Dst.Port())
	if request := map[model.Protocol]byte{unix.IPPROTO_ICMP: byte(ipv4.ICMPTypeEcho),
		unix.IPPROTO_ICMPV6: byte(ipv6.ICMPTypeEchoRequest)}[q.Protocol]; request != 0 {
		begin = []byte{request, 0, 0, 0, begin[0], begin[1], 0, 0}
	}
	body := append(begin, data...)
	header := []byte{0x45, 0, 0, byte(20 + len(body)), 0, 0, 0, 0, 64, byte(q.Protocol), 0, 0}
	if q.Src.Addr().Is6() {
		header = []byte{0x60, 0, 0, 0, 0, byte(len(body)), byte(q.Protocol), 64}
	}
	header = append(append(header, q.Src.Addr().AsSlice()...), q.Dst.Addr().AsSlice()...)
	return append(header, body...)
}

// SendError sends an ICMP error, "port unreachable", that quotes a packet with these data, of 100 bytes at most. It is
// called as Request is.
func SendError(from, to netip.Addr, q Quote, data []byte) error {
	protocol, kind, code := unreachable(to.Is6())
	m := icmp.Message{Type: kind, Code: code, Body: &icmp.DstUnreach{Data: q.marshal(data)}}
	b, err := m.Marshal(nil)
	if err != nil {
		return err
	}
	s, err := open(inet.Family(to), unix.SOCK_RAW, protocol)
	if err == nil {
		defer s.Close()
		err = s.bind(netip.AddrPortFrom(from, 0))
	}
	if err == nil {
		err = s.send(packet{data: b, from: netip.AddrPortFrom(to, 0)})
	}
	if err != nil {
		return fmt.Errorf("send an ICMP error from %s to %s: %w", from, to, err)
	}
	return nil
}

// Errors receives the ICMP errors that reach an address.
type Errors struct {
	s  *socket
	at netip.Addr
}

// ListenErrors opens it in the calling thread's network namespace.
func ListenErrors(at netip.Addr) (*Errors, error) {
	protocol, _, _ := unreachable(at.Is6())
	s, err := open(inet.Family(at), unix.SOCK_RAW, protocol)
	if err == nil {
		if err = s.bind(netip.AddrPortFrom(at, 0)); err != nil {
			err = errors.Join(err, s.Close())
		}
	}
	if err != nil {
		return nil, fmt.Errorf("receive ICMP errors at %s: %w", at, err)
	}
	return &Errors{s, at}, nil
}

// Await returns the source of an error of SendError with these data once that has arrived, or Timeout when ctx ends
// first.
func (e *Errors) Await(ctx context.Context, data []byte) (from netip.Addr, err error) {
	defer e.s.during(ctx)()
	protocol, kind, _ := unreachable(e.at.Is6())
	for buf := make([]byte, 2048); ; {
		r, err := e.s.receive(buf)
		if err != nil {
			return from, classify(ctx, fmt.Sprintf("await an ICMP error at %s", e.at), err)
		}
		b := payload(r.data, e.at.Is4())
		if m, unread := icmp.ParseMessage(int(protocol), b); unread == nil && m.Type == kind && bytes.HasSuffix(b, data) {
			return r.from.Addr(), nil
		}
	}
}

// Close ends it.
func (e *Errors) Close() error { return e.s.Close() }
