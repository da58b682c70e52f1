package ebpf_test

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/model"
)

// BenchmarkHook tells what the hook itself takes with warm caches: how much longer a connect() takes that finds no route to any of ten
// endpoints, so that nothing follows the hook, than one by a socket that no hook sees. Of many blocks the shortest counts.
func BenchmarkHook(b *testing.B) {
	inside(b, func(o ebpf.Options) {
		p := opened(b, o)
		defer clean(b, p)
		facts, _ := world(p, 10_000, 10)
		v := &model.Pool{ID: 1 << 40, Name: "served", Protocol: model.TCP}
		for i := range 10 {
			v.Backends = append(v.Backends, model.Backend{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + i)}), 8080)})
		}
		slices.SortFunc(v.Backends, func(a, b model.Backend) int { return a.Addr.Compare(b.Addr) })
		t := model.Target{Pool: v}
		facts = append(facts, p.Render(v)...)
		e := model.Entry{Addr: netip.MustParseAddr("10.99.0.1"), Port: 80, Protocol: model.TCP}
		facts = append(facts, p.Render(&model.Frontend{Entry: e, Inside: t, Outside: t, Hide: model.OriginsOf(model.FromNode, model.FromOutside)})...)
		facts = append(facts, p.Render(&model.Node{Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}})[0])
		write(b, p, facts, nil)
		root, err := cgroup.Root()
		if err != nil {
			b.Fatal(err)
		}
		service, other := netip.AddrPortFrom(e.Addr, e.Port), v.Backends[0].Addr
		least := func(home string, to netip.AddrPort, was float64) float64 { return min(was, unreachable(b, home, to)) }
		none, miss, hit := math.Inf(1), math.Inf(1), math.Inf(1)
		for range max(100, b.N) {
			none, miss, hit = least(root, other, none), least(o.Cgroup, other, miss), least(o.Cgroup, service, hit)
		}
		b.ReportMetric(none, "unseen-ns")
		b.ReportMetric(miss-none, "hook-miss-ns")
		b.ReportMetric(hit-none, "hook-hit-ns")
	})
}

// unreachable gives the mean processor time of a connect() that finds no route, in ns.
func unreachable(b *testing.B, home string, to netip.AddrPort) (ns float64) {
	b.Helper()
	const each = 2000
	err := cgroup.Do(home, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		sa := &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
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
