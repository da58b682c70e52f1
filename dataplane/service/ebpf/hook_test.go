package ebpf_test

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/inet"
)

// BenchmarkHook measures the hook itself with warm caches: how much longer a connect() runs that finds no route to
// any of ten endpoints, so that nothing follows the hook, than one by a socket that no hook sees. Of many blocks the
// shortest counts.
func BenchmarkHook(b *testing.B) {
	inside(b, func(o ebpf.Options) {
		p := opened(b, o)
		defer clean(b, p)
		var addrs []string
		for i := range 10 {
			addrs = append(addrs, fmt.Sprintf("192.0.2.%d", i+1))
		}
		service, backends := served(b, p, addrs)
		root, err := cgroup.Root()
		if err != nil {
			b.Fatal(err)
		}
		least := func(home string, to netip.AddrPort, was float64) float64 { return min(was, unreachable(b, home, to)) }
		none, miss, hit := math.Inf(1), math.Inf(1), math.Inf(1)
		for range max(100, b.N) {
			none, miss, hit = least(
				root,
				backends[0].Addr,
				none,
			), least(
				o.Cgroup,
				backends[0].Addr,
				miss,
			), least(
				o.Cgroup,
				service,
				hit,
			)
		}
		b.ReportMetric(none, "unseen-ns")
		b.ReportMetric(miss-none, "hook-miss-ns")
		b.ReportMetric(hit-none, "hook-hit-ns")
	})
}

// unreachable returns the mean processor time of a connect() that finds no route, in ns.
func unreachable(b *testing.B, home string, to netip.AddrPort) (ns float64) {
	b.Helper()
	const each = 2000
	err := cgroup.Do(home, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		sa := inet.Sockaddr(to)
		begin := clock()
		for range each {
			if err := unix.Connect(fd, sa); !errors.Is(err, unix.ENETUNREACH) {
				return fmt.Errorf("connect to %s: %w", to, err)
			}
		}
		ns = float64(clock()-begin) / each
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	return ns
}
