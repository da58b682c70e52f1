package echo

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// Ping sends an ICMP echo request from an address and returns once its reply is here, or Timeout when ctx ends first.
// Kernels reply without a Server. It is called as Request is.
func Ping(ctx context.Context, to, from netip.Addr) error {
	what := fmt.Sprintf("ping %s", to)
	protocol, request, reply := unix.IPPROTO_ICMP, icmp.Type(ipv4.ICMPTypeEcho), icmp.Type(ipv4.ICMPTypeEchoReply)
	if to.Is6() {
		protocol, request, reply = unix.IPPROTO_ICMPV6, ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	s, err := open(family(to), unix.SOCK_RAW, model.Protocol(protocol))
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer s.Close()
	defer s.during(ctx)()
	id := rand.IntN(1 << 16)
	q, err := (&icmp.Message{Type: request, Body: &icmp.Echo{ID: id, Seq: 1}}).Marshal(nil)
	if err == nil {
		err = s.bind(netip.AddrPortFrom(from, 0))
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
		if e, ok := m.Body.(*icmp.Echo); unread == nil && ok && m.Type == reply && e.ID == id {
			return nil
		}
	}
	return classify(ctx, what, err)
}
