package echo

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/model"
)

// Ping sends an ICMP echo request from an address and returns once its reply is here, or Timeout when ctx ends first.
// Kernels reply without a Server. It is called as Request is. From's port is the request's identifier, which with both
// addresses makes the connection: for a kernel that tracks it, requests of one identifier are of one connection. 0: any
// identifier. A reply is the request's if it carries the same number, drawn for each.
func Ping(ctx context.Context, to netip.Addr, from netip.AddrPort) error {
	what := fmt.Sprintf("ping %s", to)
	protocol, request, reply := echoOf(to)
	s, err := open(inet.Family(to), unix.SOCK_RAW, model.Protocol(protocol))
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer s.Close()
	defer s.during(ctx)()
	id, data := int(from.Port()), binary.BigEndian.AppendUint64(nil, rand.Uint64())
	if id == 0 {
		id = 1 + rand.IntN(math.MaxUint16)
	}
	q, err := (&icmp.Message{Type: request, Body: &icmp.Echo{ID: id, Seq: 1, Data: data}}).Marshal(nil)
	if err == nil {
		err = s.bind(netip.AddrPortFrom(from.Addr(), 0))
	}
	if err == nil {
		err = s.connect(netip.AddrPortFrom(to, 0))
	}
	if err == nil {
		err = s.send(packet{data: q})
	}
	for buf := make([]byte, 2048); err == nil; {
		var r packet
		if r, err = s.receive(buf); err != nil {
			break
		}
		m, unread := icmp.ParseMessage(protocol, payload(r.data, to.Is4()))
		if unread != nil || m.Type != reply {
			continue
		}
		if e, ok := m.Body.(*icmp.Echo); ok && e.ID == id && bytes.Equal(e.Data, data) {
			return nil
		}
	}
	return classify(ctx, what, err)
}

// echoOf returns the number of ICMP for an address's family, and the types of an echo request and its reply.
func echoOf(a netip.Addr) (protocol int, request, reply icmp.Type) {
	if a.Is4() {
		return unix.IPPROTO_ICMP, ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
	}
	return unix.IPPROTO_ICMPV6, ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
}
