package echo

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
)

// TestPingCountsItsOwnReply has a process reply to an echo request as the kernel would, and with what another request
// of the same identifier had.
func TestPingCountsItsOwnReply(t *testing.T) {
	client, server := pair(t)
	for _, name := range []string{"net/ipv4/icmp_echo_ignore_all", "net/ipv6/icmp/echo_ignore_all"} {
		if err := sysctl.Set(server, sysctl.Setting{Name: name, Value: "1"}); err != nil {
			t.Fatal(err)
		}
	}
	for to, from := range map[netip.Addr]netip.Addr{server4: client4, server6: client6} {
		for _, own := range []bool{false, true} {
			ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
			var s *socket
			err := server.Do(func() (err error) {
				protocol, _, _ := echoOf(to)
				if s, err = open(inet.Family(to), unix.SOCK_RAW, model.Protocol(protocol)); err != nil {
					return err
				}
				return s.bind(netip.AddrPortFrom(to, 0))
			})
			if err != nil {
				t.Fatal(err)
			}
			replied := make(chan error, 1)
			go func() {
				replied <- s.reply(to, own)
				if !own {
					time.AfterFunc(100*time.Millisecond, stop) // a reply that counts would be there at once
				}
			}()
			err = client.Do(func() error { return Ping(ctx, to, netip.AddrPortFrom(from, 4711)) })
			if own && err != nil || !own && !errors.Is(err, context.Canceled) {
				t.Errorf("%s, its own reply %t: %v", to, own, err)
			}
			if err := <-replied; err != nil {
				t.Error(err)
			}
			stop()
			s.Close()
		}
	}
}

// reply replies to the next echo request, with what it carries or something else.
func (s *socket) reply(at netip.Addr, own bool) error {
	protocol, request, reply := echoOf(at)
	for buf := make([]byte, 2048); ; {
		p, err := s.receive(buf)
		if err != nil {
			return err
		}
		m, err := icmp.ParseMessage(protocol, payload(p.data, at.Is4()))
		if err != nil || m.Type != request {
			continue
		}
		m.Type = reply
		if !own {
			m.Body.(*icmp.Echo).Data[0] ^= 1
		}
		b, err := m.Marshal(nil)
		if err != nil {
			return err
		}
		return s.send(packet{data: b, from: netip.AddrPortFrom(p.from.Addr(), 0)})
	}
}
