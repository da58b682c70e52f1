package revoke

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkCut measures how long it takes from the change that withdraws a permission until all connections that it
// allowed are cut: marked, with the engine's rule in the kernel.
func BenchmarkCut(b *testing.B) {
	for _, count := range []int{1_000, 100_000} {
		b.Run(fmt.Sprint(count), func(b *testing.B) {
			bed := newBed(b)
			bed.start(fmt.Sprintf(allow, "client"))
			bed.open(count)
			var cpu time.Duration
			for b.Loop() {
				cpu -= used()
				bed.withdraw(bed.Cuts().Cut + uint64(count))
				b.StopTimer()
				cpu += used()
				bed.must(bed.SyncCut(b.Context()))
				bed.apply(fmt.Sprintf(allow, "client"))
				b.StartTimer()
			}
			s := bed.Cuts()
			if s.Problem != "" || s.Restored != s.Cut {
				b.Errorf("%+v", s)
			}
			b.ReportMetric(cpu.Seconds()*1000/float64(b.N), "cpu-ms/op")
		})
	}
}

// used returns the processor time of the process so far, its system calls included.
func used() time.Duration {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// withdraw takes the clients' permission, and waits until so many were cut.
func (b *bed) withdraw(cut uint64) {
	objects := b.load(fmt.Sprintf(allow, "nobody"))
	c := b.resolver.Apply(changesOf(objects))
	b.Change(c.Put, c.Del)
	for b.Cuts().Cut < cut {
		time.Sleep(time.Millisecond)
	}
	b.must(b.Sync(b.Context()))
}

// open has the node track so many connections from client to web.
func (b *bed) open(count int) {
	b.must(b.node.Do(func() error {
		return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", []byte("3600"), 0o600)
	}))
	src, _ := b.pod("client", false)
	_, web := b.pod("web", false)
	for sent := 0; sent < count; {
		var c *net.UDPConn
		b.must(src.Do(func() (err error) {
			c, err = net.ListenUDP("udp4", nil)
			return err
		}))
		for port := 1000; port < 60_000 && sent < count; port++ {
			_, err := c.WriteToUDPAddrPort([]byte("word"), netip.AddrPortFrom(web, uint16(port)))
			b.must(err)
			sent++
		}
		c.Close()
	}
}
