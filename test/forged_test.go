package test_test

import (
	"context"
	"encoding/binary"
	"flag"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/sandbox/echo"
)

var forging = flag.Duration("forging", 10*time.Second, "how long packets are forged, in each mode")

// flowsPerClient is how many connections of each client are open while packets are forged.
const flowsPerClient = 6

// A pod and a host outside that send SYNs of another pod's address and of all its ports, to a ClusterIP and a node
// port, break no open connection, and no new one fails, of that pod, of its node and of the host outside.
func TestForgedPacketsBreakNoConnection(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables", "ebpf", "userspace"} {
		t.Run(mode, func(t *testing.T) {
			l := newLife(t, mode)
			l.hire()
			open := l.openFlows()
			ctx, end := context.WithTimeout(t.Context(), *forging)
			defer end()
			var sent sync.WaitGroup
			victim := netip.MustParseAddr("10.244.1.4")
			sent.Go(func() { l.forge(ctx, l.pod("web-1"), victim, "10.96.0.10:80", "192.168.77.1:30080") })
			sent.Go(func() { l.forge(ctx, l.clients[2].host, victim, "10.96.0.10:80", "192.168.77.1:30080") })
			stop := l.probe()
			sent.Wait()
			stop()
			for i, h := range open {
				ctx, end := context.WithTimeout(t.Context(), 5*time.Second)
				if _, err := h.Request(ctx); err != nil {
					t.Errorf("open connection %d from %s: %v", i, l.clients[i/flowsPerClient].host.Name, err)
				}
				end()
			}
		})
	}
}

// pod returns a pod of the node.
func (l *lives) pod(name string) *sandbox.Host {
	l.t.Helper()
	h, err := l.cluster.Pod("default", name)
	if err != nil {
		l.t.Fatal(err)
	}
	return h
}

// openFlows opens connections of each client that stay open, once each is answered.
func (l *lives) openFlows() (open []*echo.Flow) {
	l.t.Helper()
	for _, c := range l.clients {
		err := c.host.Do(func() error {
			for range flowsPerClient {
				h, err := echo.Open(l.t.Context(), model.TCP, c.to, echo.Options{})
				if err != nil {
					return err
				}
				l.t.Cleanup(func() { h.Close() })
				if _, err := h.Request(l.t.Context()); err != nil {
					return err
				}
				open = append(open, h)
			}
			return nil
		})
		if err != nil {
			l.t.Fatal(err)
		}
	}
	return open
}

// forge has a host send SYNs of another's address to the targets, from one ephemeral port after the other, until ctx
// ends.
func (l *lives) forge(ctx context.Context, from *sandbox.Host, source netip.Addr, targets ...string) {
	const first, last, burst = 32768, 60999, 60
	err := from.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for port := uint16(first); ; {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
			for range burst {
				for _, to := range targets {
					to := netip.MustParseAddrPort(to)
					if err := unix.Sendto(fd, syn(netip.AddrPortFrom(source, port), to), 0,
						&unix.SockaddrInet4{Addr: to.Addr().As4()}); err != nil {
						return err
					}
				}
				if port++; port > last {
					port = first
				}
			}
		}
	})
	if err != nil {
		l.t.Error(err)
	}
}

// syn writes a SYN behind an IPv4 header; the kernel writes the checksum of that.
func syn(from, to netip.AddrPort) []byte {
	ip := append([]byte{4<<4 | 5, 0, 0, 40, 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0}, append(from.Addr().AsSlice(),
		to.Addr().AsSlice()...)...)
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, from.Port())
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	tcp[7], tcp[12], tcp[13], tcp[14] = 1, 5<<4, 2, 0xff
	s := uint32(unix.IPPROTO_TCP + len(tcp))
	for _, b := range [][]byte{ip[12:], tcp} {
		for i := 0; i < len(b); i += 2 {
			s += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	for s > 0xffff {
		s = s&0xffff + s>>16
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(s))
	return append(ip, tcp...)
}
