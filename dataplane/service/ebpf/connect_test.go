package ebpf_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
)

// BenchmarkConnect compares connect() through one of 10,000 Services with 10 endpoints each with connect() to an
// endpoint by a socket that no hook sees: the processor time of the calling thread, which on a loopback does the
// whole handshake. Blocks of each take turns; the median of their ratios is what it reports, for processes of the
// node and of a pod, and for connections to no Service.
func BenchmarkConnect(b *testing.B) {
	var addrs []string
	for i := range 10 {
		addrs = append(addrs, fmt.Sprintf("10.244.0.%d", i+1))
	}
	inside(b, func(o ebpf.Options) {
		p := opened(b, o)
		defer clean(b, p)
		service, backends := served(b, p, addrs)
		folder, _, err := bpf.Folder()
		if err != nil {
			b.Fatal(err)
		}
		links := filepath.Join(folder, "links")
		node, err := netns.Current()
		if err != nil {
			b.Fatal(err)
		}
		defer node.Close()
		b.Run("node", func(b *testing.B) {
			err := node.Do(func() error {
				compare(b, links, o.Cgroup, service, backends)
				return nil
			})
			if err != nil {
				b.Error(err)
			}
		})
		pod(b, func(ns *netns.Namespace) {
			b.Run("pod", func(b *testing.B) {
				err := ns.Do(func() error {
					compare(b, links, o.Cgroup, service, backends)
					return nil
				})
				if err != nil {
					b.Error(err)
				}
			})
		}, addrs...)
	}, addrs...)
}

// served has a plane hold 10,000 Services of ten endpoints each, and one of which these addresses are the endpoints.
func served(b *testing.B, p *ebpf.Plane, addrs []string) (service netip.AddrPort, backends []model.Backend) {
	b.Helper()
	facts, _ := world(p, 10_000, 10)
	v := &model.Pool{ID: 1 << 40, Name: "served", Protocol: model.TCP}
	for _, a := range addrs {
		v.Backends = append(v.Backends, model.Backend{Addr: netip.AddrPortFrom(netip.MustParseAddr(a), 8080)})
	}
	slices.SortFunc(v.Backends, func(a, b model.Backend) int { return a.Addr.Compare(b.Addr) })
	t := model.Target{Pool: v}
	facts = append(facts, p.Render(v)...)
	e := model.Entry{Addr: netip.MustParseAddr("10.99.0.1"), Port: 80, Protocol: model.TCP}
	facts = append(facts, p.Render(&model.Frontend{Entry: e, Internal: t, External: t,
		Masquerade: model.OriginsOf(model.FromNode, model.FromExternal)})...)
	facts = append(facts, p.Render(&model.ServiceNode{
		Node: &model.Node{Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}})[0])
	write(b, p, facts, nil)
	return netip.AddrPortFrom(e.Addr, e.Port), v.Backends
}

// pod runs f with a namespace whose one interface has the addresses.
func pod(t testing.TB, f func(*netns.Namespace), addrs ...string) {
	t.Helper()
	ns, err := netns.New("fl-ebpf-" + rand.Text()[:8])
	if err != nil {
		t.Fatal(err)
	}
	defer func() { ns.Close(); netns.Delete(ns.Name) }()
	c, err := link.Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	dev, err := c.AddVeth(link.End{Name: "eth0"}, link.End{Name: "peer"}, ns)
	if err != nil {
		t.Fatal(err)
	}
	peer, err := c.Index("peer")
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range []int{1, dev, peer} {
		if err := c.Up(i); err != nil {
			t.Fatal(err)
		}
	}
	for _, a := range addrs {
		addr := netip.MustParseAddr(a)
		if err := c.AddAddress(dev, netip.PrefixFrom(addr, addr.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	f(ns)
}

// compare measures in the calling thread's network namespace.
func compare(b *testing.B, links, home string, service netip.AddrPort, backends []model.Backend) {
	b.Helper()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	serveAll(b, ctx, 8080)
	root, err := cgroup.Root()
	if err != nil {
		b.Fatal(err)
	}
	i := 0
	direct := func() netip.AddrPort { i++; return backends[i%len(backends)].Addr }
	through := func() netip.AddrPort { return service }
	const each = 200
	var hit, miss, again []float64
	for range max(21, b.N) {
		base := block(b, root, each, direct)
		hit = append(hit, block(b, home, each, through)/base)
		miss = append(miss, block(b, home, each, direct)/base)
		again = append(again, block(b, root, each, direct)/base)
	}
	perRun(b, links, func() { block(b, home, 2000, direct) }, "hook-miss-ns")
	perRun(b, links, func() { block(b, home, 2000, through) }, "hook-hit-ns")
	all := map[string][]float64{"service/direct": hit, "hooked-direct/direct": miss, "direct/direct": again}
	for name, l := range all {
		slices.Sort(l)
		b.ReportMetric(l[len(l)/2], name)
	}
}

// block returns the mean processor time of a connect().
func block(b *testing.B, home string, n int, to func() netip.AddrPort) float64 {
	b.Helper()
	var sum time.Duration
	err := cgroup.Do(home, func() error {
		for range n {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			a := to()
			sa := inet.Sockaddr(a)
			begin := clock()
			err = unix.Connect(fd, sa)
			sum += clock() - begin
			unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
			unix.Close(fd)
			if err != nil {
				return fmt.Errorf("connect to %s: %w", a, err)
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	return float64(sum) / float64(n)
}

// clock is the calling thread's processor time.
func clock() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return time.Duration(t.Nano())
}

// serveAll accepts and closes what comes to a port until ctx ends.
func serveAll(t testing.TB, ctx context.Context, port int) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: port}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 4096); err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, _, err := unix.Accept(fd)
			if err != nil && err != unix.EINTR {
				return
			}
			unix.Close(c)
		}
	}()
	context.AfterFunc(ctx, func() { unix.Shutdown(fd, unix.SHUT_RDWR); unix.Close(fd) })
}

// perRun reports the mean time of connect4 while f runs, by the kernel's own count.
func perRun(b *testing.B, links string, f func(), unit string) {
	stop, err := bpf.Measure()
	if err != nil {
		b.Fatal(err)
	}
	defer stop.Close()
	before := connect4(links)
	f()
	after := connect4(links)
	if n := after.Count - before.Count; n > 0 {
		b.ReportMetric(float64(after.Time-before.Time)/float64(n), unit)
	}
}

func connect4(links string) (r bpf.Run) {
	runs, _ := service.Runs(links)
	for _, r = range runs {
		if r.Hook == "connect4" {
			return r
		}
	}
	return bpf.Run{}
}
