package echo

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
)

// TestErrorArrives: with what it quotes, of every protocol.
func TestErrorArrives(t *testing.T) {
	client, server := pair(t)
	for _, c := range []struct {
		from, to netip.Addr
		of       []model.Protocol
	}{
		{client4, server4, []model.Protocol{model.TCP, model.UDP, unix.IPPROTO_ICMP}},
		{client6, server6, []model.Protocol{model.TCP, model.UDP, unix.IPPROTO_ICMPV6}},
	} {
		for _, p := range c.of {
			var l *Errors
			err := server.Do(func() (err error) {
				l, err = ListenErrors(c.to)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			q := Quote{Protocol: p, Src: netip.AddrPortFrom(c.to, 1234), Dst: netip.AddrPortFrom(c.from, 80)}
			err = client.Do(func() error { return SendError(c.from, c.to, q, []byte("one")) })
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
			if from, err := l.Await(ctx, []byte("one")); err != nil || from != c.from {
				t.Errorf("%s: from %s, %v", p, from, err)
			}
			stop()
			ctx, stop = context.WithTimeout(t.Context(), 10*time.Millisecond)
			if _, err := l.Await(ctx, []byte("two")); !errors.Is(err, Timeout) {
				t.Errorf("%s: an error that was not sent: %v", p, err)
			}
			stop()
		}
	}
}

func TestPing(t *testing.T) {
	client, _ := pair(t)
	for _, c := range [][2]netip.Addr{{client4, server4}, {client6, server6}} {
		for _, id := range []uint16{0, 77} {
			ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
			err := client.Do(func() error { return Ping(ctx, c[1], netip.AddrPortFrom(c[0], id)) })
			stop()
			if err != nil {
				t.Error(err)
			}
		}
	}
}
