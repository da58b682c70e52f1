package route

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// BenchmarkPut writes routes in a batch, and as vishvananda/netlink does, for docs/adr/0011-own-route-writer.md.
func BenchmarkPut(b *testing.B) {
	writers := map[string]func(s *netlink.Socket, h *vnetlink.Handle, to []netip.Prefix) error{
		"here": func(s *netlink.Socket, _ *vnetlink.Handle, to []netip.Prefix) error {
			batch := NewBatch()
			for _, p := range to {
				Put(batch, Route{Owner: 99, Table: 5000, To: p, Dev: 1})
			}
			return s.Apply(batch)
		},
		"vishvananda": func(_ *netlink.Socket, h *vnetlink.Handle, to []netip.Prefix) error {
			for _, p := range to {
				err := h.RouteReplace(&vnetlink.Route{LinkIndex: 1, Table: 5000, Protocol: 99, Scope: vnetlink.SCOPE_LINK,
					Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}})
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
	for _, n := range []int{1, 10_000} {
		var to []netip.Prefix
		for i := range n {
			to = append(to, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}), 32))
		}
		for name, write := range writers {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				var used time.Duration
				for b.Loop() {
					b.StopTimer()
					used += inNamespace(b, func(s *netlink.Socket, h *vnetlink.Handle) {
						b.StartTimer()
						if err := write(s, h, to); err != nil {
							b.Error(err)
						}
						b.StopTimer()
					})
					b.StartTimer()
				}
				b.ReportMetric(float64(used.Microseconds())/float64(b.N), "cpu-µs/op")
			})
		}
	}
}

// inNamespace runs f in a new namespace whose loopback is up, and returns the processor time that it takes.
func inNamespace(b *testing.B, f func(*netlink.Socket, *vnetlink.Handle)) (used time.Duration) {
	open := func() (*netlink.Socket, error) { return netlink.Open(unix.NETLINK_ROUTE, 0) }
	netnstest.With(b, open, func(s *netlink.Socket) {
		h, err := vnetlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			b.Error(err)
			return
		}
		defer h.Close()
		if err := h.LinkSetUp(&vnetlink.Device{LinkAttrs: vnetlink.LinkAttrs{Index: 1}}); err != nil {
			b.Error(err)
			return
		}
		before := processor()
		f(s, h)
		used = processor() - before
	})
	return used
}

// processor returns the processor time that this process has had.
func processor() time.Duration {
	var r syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
