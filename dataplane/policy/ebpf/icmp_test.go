package ebpf

import (
	"context"
	"crypto/rand"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// TestErrorPassesToItsSource: an ICMP error about a packet of a flow passes to that packet's source. Any other, and one
// about a packet of no flow, is evaluated as a message of its own.
func TestErrorPassesToItsSource(t *testing.T) {
	n := newNode(t)
	n.hold("deny-ingress.yaml")
	for i := range web {
		port := echo.Port{Number: 53, Protocol: model.UDP}
		byWeb, byDB := n.open(web[i], client[i], port, echo.Options{}), n.open(db[i], client[i], port, echo.Options{})
		at := netip.AddrPortFrom(client[i], port.Number)
		ofWeb := echo.Quote{Protocol: model.UDP, Src: netip.AddrPortFrom(web[i], byWeb.Local().Port()), Dst: at}
		ofDB := echo.Quote{Protocol: model.UDP, Src: netip.AddrPortFrom(db[i], byDB.Local().Port()), Dst: at}
		if !n.pings(web[i], client[i], 77, true) {
			t.Errorf("ping %s > %s", web[i], client[i])
		}
		echoOf := func(src, dst netip.Addr, id uint16) echo.Quote {
			return echo.Quote{Protocol: icmpOf(src), Src: netip.AddrPortFrom(src, id), Dst: netip.AddrPortFrom(dst, 0)}
		}
		for _, c := range []struct {
			name   string
			to     netip.Addr
			of     echo.Quote
			passes bool
		}{
			{"its own packet", web[i], ofWeb, true},
			{"another's packet", db[i], ofWeb, false},
			{"another's packet", web[i], ofDB, false},
			{"a reply to it", web[i], echo.Quote{Protocol: model.UDP, Src: at, Dst: ofWeb.Src}, false},
			{"a packet of no flow", web[i], echo.Quote{Protocol: model.UDP, Src: ofWeb.Src,
				Dst: netip.AddrPortFrom(client[i], 9)}, false},
			{"its own echo request", web[i], echoOf(web[i], client[i], 77), true},
			{"another's echo request", db[i], echoOf(web[i], client[i], 77), false},
			{"an echo request of another ID", web[i], echoOf(web[i], client[i], 78), false},
			{"an echo request in reverse", web[i], echoOf(client[i], web[i], 77), false},
		} {
			if n.errorArrives(client[i], c.to, c.of, c.passes) != c.passes {
				t.Errorf("an ICMP error about %s, to %s, which passes: %t", c.name, c.to, !c.passes)
			}
		}
	}
}

func icmpOf(a netip.Addr) model.Protocol {
	if a.Is6() {
		return unix.IPPROTO_ICMPV6
	}
	return unix.IPPROTO_ICMP
}

// errorArrives sends an ICMP error and reports whether it arrives.
func (n *node) errorArrives(src, dst netip.Addr, of echo.Quote, expected bool) bool {
	n.T.Helper()
	ctx, cancel := n.within(expected)
	defer cancel()
	var l *echo.Errors
	n.Must(n.Of[dst].Do(func() (err error) {
		l, err = echo.ListenErrors(dst)
		return err
	}))
	defer l.Close()
	data := []byte(rand.Text())
	n.Must(n.Of[src].Do(func() error { return echo.SendError(src, dst, of, data) }))
	_, err := l.Await(ctx, data)
	return err == nil
}

// within returns a context that ends when what is expected or not must have arrived.
func (n *node) within(expected bool) (context.Context, context.CancelFunc) {
	wait := 200 * time.Millisecond
	if expected {
		wait = 10 * time.Second
	}
	return context.WithTimeout(n.T.Context(), wait)
}

// pings sends an echo request and reports whether it is answered.
func (n *node) pings(src, dst netip.Addr, id uint16, expected bool) bool {
	n.T.Helper()
	ctx, cancel := n.within(expected)
	defer cancel()
	return n.Of[src].Do(func() error { return echo.Ping(ctx, dst, netip.AddrPortFrom(src, id)) }) == nil
}

// TestEchoRequestInReverseIsEvaluated: whatever IDs both ends use. Where it is allowed both are answered.
func TestEchoRequestInReverseIsEvaluated(t *testing.T) {
	n := newNode(t)
	for _, c := range []struct {
		world   string
		allowed bool
	}{{"deny-ingress.yaml", false}, {"audit.yaml", true}} {
		n.hold(c.world)
		for i := range web {
			for _, id := range []uint16{0, 0xffff} {
				for _, other := range []uint16{id, id - 1, id + 1} {
					if !n.pings(web[i], client[i], id, true) {
						t.Errorf("%s: ID %d: %s > %s is not answered", c.world, id, web[i], client[i])
					}
					if n.pings(client[i], web[i], other, c.allowed) != c.allowed {
						t.Errorf("%s: ID %d after %d: %s > %s is answered: %t", c.world, other, id, client[i], web[i], !c.allowed)
					}
				}
			}
		}
	}
}
