package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// namespace makes a network namespace with its loopback up and returns the way into it.
func namespace(t testing.TB) func(func() error) error {
	t.Helper()
	fd := -1
	err := Thread{}.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace (this test needs root): %w", err)
		}
		var err error
		if fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
		return loopbackUp()
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return func(f func() error) error { // on a Place's own thread, which needs no way back
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	}
}

func loopbackUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr)
}

// cpu is a processor that this process may use.
func cpu(t testing.TB) int {
	t.Helper()
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	for i := range 1024 {
		if set.IsSet(i) {
			return i
		}
	}
	t.Fatal("no processor to be pinned to")
	return 0
}

func serve(t testing.TB, p Thread, sizes Sizes, id byte, addrs ...string) *Server {
	t.Helper()
	c := ServerConfig{Thread: p, Sizes: sizes, ID: id}
	for _, a := range addrs {
		c.Listen = append(c.Listen, netip.MustParseAddrPort(a))
	}
	s, err := Serve(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// counter reads one of the namespace's own SNMP counters.
func counter(t testing.TB, p Thread, file, name string) float64 {
	t.Helper()
	v := math.NaN()
	err := p.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/" + file)
		v = parseSNMP(b)[name]
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// fewPorts leaves the namespace ten local ports, so that an engine that uses them up can't hide it.
func fewPorts(t testing.TB, p Thread) {
	t.Helper()
	err := p.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40009"), 0o644)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestClosedLoops(t *testing.T) {
	for _, op := range []Op{Connect, CRR, RR} {
		for _, end := range []Close{Reset, Fin} {
			for _, addr := range []string{"127.0.0.1:7001", "[::1]:7001"} {
				t.Run(fmt.Sprint(op, end, addr), func(t *testing.T) {
					p := Thread{Enter: namespace(t), CPUs: []int{cpu(t)}}
					sizes := Sizes{Request: 3, Response: 5}
					srv := serve(t, p, sizes, 42, addr)
					fewPorts(t, p)
					c := Client{Thread: p, Targets: srv.Addrs, Sizes: sizes, Close: end, Warm: 5 * time.Millisecond,
						Workers: Workers{Servers: []Worker{srv}}}
					s, err := c.Run(t.Context(), op, 60*time.Millisecond)
					if err != nil {
						t.Fatal(err)
					}
					check(t, s, op, end)
					if resets := counter(t, p, "snmp", "Tcp.OutRsts"); end == Fin && op != RR && resets > 0 {
						t.Errorf("%v resets were sent though connections end with FIN", resets)
					}
				})
			}
		}
	}
}

// check returns what holds for a closed loop against a good server through ten local ports.
func check(t *testing.T, s Sample, op Op, end Close) {
	t.Helper()
	if s.Ops < 20 || s.Failed() != 0 {
		t.Fatalf("%d operations, errors %v", s.Ops, s.Errors)
	}
	if s.Hist.TotalCount() != s.Ops {
		t.Errorf("%d in the histogram for %d operations", s.Hist.TotalCount(), s.Ops)
	}
	q := s.Quantiles
	if !(0 < q["min"] && q["min"] <= q["p50"] && q["p50"] <= q["p99"] && q["p99"] <= q["max"]) {
		t.Errorf("quantiles out of order: %v", q)
	}
	if h := float64(s.Hist.ValueAtQuantile(50)); math.Abs(h/q["p50"]-1) > 0.002 {
		t.Errorf("p50 is %v, the histogram's %v", q["p50"], h)
	}
	if s.Wall < 60*time.Millisecond || s.CPU.User+s.CPU.System <= 0 || s.CPU.Server <= 0 {
		t.Errorf("wall %v, cpu %+v", s.Wall, s.CPU)
	}
	if want := map[Op]float64{Connect: 3, CRR: 5, RR: 2}[op]; s.Counters["softnet"] < want*float64(s.Ops) {
		t.Errorf("%v packets for %d operations, want %v each at least", s.Counters["softnet"], s.Ops, want)
	}
	if s.Counters["retransmits"] != 0 || s.Counters["listen_overflows"] != 0 {
		t.Errorf("segments were lost: %v", s.Counters)
	}
	if answered := op != Connect || end == Fin; answered && s.Answers[42] < s.Ops {
		t.Errorf("answers %v for %d operations", s.Answers, s.Ops)
	}
}

// An operation takes longer with cold caches, by far, and the walk that makes them so is no part of its time.
func TestColdCaches(t *testing.T) {
	at := cpu(t)
	p := Thread{Enter: namespace(t), CPUs: []int{at}}
	sizes := Sizes{Request: 3, Response: 5}
	srv := serve(t, p, sizes, 42, "127.0.0.1:7001")
	m, err := NewMemory(max(2*LastCache(at), 32<<20))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	// What others do on the machine meanwhile only lengthens: the least of some tries counts. To walk through hundreds of
	// MiB takes a minute for nine.
	tries := 9
	if m.Size() > 256<<20 {
		tries = 3
	}
	for _, op := range []Op{Connect, CRR, RR} {
		w, x, walk := math.Inf(1), math.Inf(1), math.Inf(1)
		for range tries {
			begin := time.Now()
			m.Walk()
			walk = min(walk, float64(time.Since(begin)))
			c := Client{Thread: p, Targets: srv.Addrs, Sizes: sizes, Warm: 5 * time.Millisecond, Most: 25}
			warm, err := c.Run(t.Context(), op, time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			c.Cold, c.Warm = m, 0
			cold, err := c.Run(t.Context(), op, time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			if cold.Ops != 25 {
				t.Fatalf("%s: %d operations with cold caches", op, cold.Ops)
			}
			w, x = min(w, warm.Quantiles["p50"]), min(x, cold.Quantiles["p50"])
		}
		t.Logf("%s: warm %.1f µs, cold %.1f µs; a walk %.1f ms", op, w/1e3, x/1e3, walk/1e6)
		if x < 1.2*w || x > walk/2 {
			t.Errorf("%s takes %.1f µs with cold caches, %.1f µs with warm ones, a walk takes %.1f ms", op, x/1e3, w/1e3,
				walk/1e6)
		}
	}
}

func TestCacheSizes(t *testing.T) {
	for s, want := range map[string]int{"32768K": 32 << 20, "512K": 512 << 10, "": 0, "K": 0, "-1K": 0, "32M": 0} {
		if got := cacheSize(s); got != want {
			t.Errorf("%q is %d bytes, want %d", s, got, want)
		}
	}
}

func TestFailuresAreCounted(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	deaf := deafListener(t, p)
	for _, c := range []struct{ kind, target string }{
		{"refused", "127.0.0.1:9"}, {"unreachable", "192.0.2.1:80"}, {"timeout", deaf},
	} {
		client := Client{Thread: p, Targets: []netip.AddrPort{netip.MustParseAddrPort(c.target)}, Sizes: Sizes{1, 1},
			Timeout: 20 * time.Millisecond}
		s, err := client.Run(t.Context(), CRR, 30*time.Millisecond)
		if err != nil || s.Ops != 0 || s.Errors[c.kind] == 0 || s.Failed() != s.Errors[c.kind] {
			t.Errorf("%s: %d operations, errors %v, %v", c.kind, s.Ops, s.Errors, err)
		}
		if s.Quantiles != nil {
			t.Errorf("%s: quantiles of nothing: %v", c.kind, s.Quantiles)
		}
	}
}

// deafListener listens, has its accept queue filled, and drops every further SYN.
func deafListener(t *testing.T, p Thread) string {
	t.Helper()
	var fds []int
	var port int
	err := p.Do(func() error {
		l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		fds = append(fds, l)
		if err := errors.Join(unix.Bind(l, sockaddr(netip.MustParseAddrPort("127.0.0.1:0"))), unix.Listen(l, 0)); err != nil {
			return err
		}
		sa, err := unix.Getsockname(l)
		if err != nil {
			return err
		}
		port = sa.(*unix.SockaddrInet4).Port
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		fds = append(fds, fd)
		return unix.Connect(fd, sa)
	})
	t.Cleanup(func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", port)
}

func TestTargetsAreVisitedInTurn(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	sizes := Sizes{1, 1}
	var targets []netip.AddrPort
	for id := range byte(3) {
		targets = append(targets, serve(t, p, sizes, id+1, fmt.Sprintf("127.0.0.%d:80", id+1)).Addrs...)
	}
	s, err := Client{Thread: p, Targets: targets, Sizes: sizes, Seed: 9}.Run(t.Context(), CRR, 30*time.Millisecond)
	if err != nil || s.Failed() > 0 {
		t.Fatal(err, s.Errors)
	}
	for id := range byte(3) {
		if n := s.Answers[id+1]; n < s.Ops/3 || n > s.Ops/3+1 {
			t.Errorf("server %d gave %d of %d answers", id+1, n, s.Ops)
		}
	}
}

func TestBadQuestions(t *testing.T) {
	ctx := t.Context()
	one := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}
	noCPU := Thread{CPUs: []int{1023}}
	for name, f := range map[string]func() error{
		"no target": func() error { _, err := Client{Sizes: Sizes{1, 1}}.Run(ctx, CRR, 1); return err },
		"no size":   func() error { _, err := Client{Targets: one}.Run(ctx, CRR, 1); return err },
		"no rate":   func() error { _, _, err := Open{Targets: one, Sizes: Sizes{1, 1}}.Run(ctx, 1); return err },
		"no such CPU": func() error {
			_, err := Client{Thread: noCPU, Targets: one, Sizes: Sizes{1, 1}}.Run(ctx, CRR, 1)
			return err
		},
		"server size": func() error { _, err := Serve(ServerConfig{}); return err },
		"server CPU":  func() error { _, err := Serve(ServerConfig{Thread: noCPU, Sizes: Sizes{1, 1}}); return err },
		"foreign address": func() error {
			_, err := Serve(ServerConfig{Sizes: Sizes{1, 1}, Listen: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.7:1")}})
			return err
		},
	} {
		if err := f(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestEndedContextStopsAClient(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	srv := serve(t, p, Sizes{1, 1}, 1, "127.0.0.1:0")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Client{Thread: p, Targets: srv.Addrs, Sizes: Sizes{1, 1}}.Run(ctx, RR, time.Hour)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestOpenLoop(t *testing.T) {
	for _, end := range []Close{Reset, Fin} {
		for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
			p := Thread{Enter: namespace(t)}
			sizes := Sizes{2, 3000}
			srv := serve(t, p, sizes, 7, addr)
			o := Open{Thread: p, Targets: srv.Addrs, Sizes: sizes, Close: end, Rate: 2000,
				Workers: Workers{Servers: []Worker{srv}}}
			s, tr, err := o.Run(t.Context(), 100*time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			if tr.Intended != 200 || s.Ops != 200 || s.Failed() != 0 || s.Answers[7] != 200 {
				t.Errorf("%s %s: %d intended, %d done, errors %v, answers %v", end, addr, tr.Intended, s.Ops, s.Errors, s.Answers)
			}
			if len(tr.Slowest) != 10 || float64(tr.Slowest[0].Elapsed) != s.Quantiles["max"] || len(tr.Failures) != 0 {
				t.Errorf("%s %s: slowest %v, max %v", end, addr, tr.Slowest, s.Quantiles["max"])
			}
		}
	}
}

// A server that answers none before it has 50 connections: a closed loop would wait for ever on its first. The open
// loop's first connections must have waited for the other starts, and their times must count from their intended
// starts.
func TestOpenLoopCountsFromTheIntendedStart(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	const n, rate = 50, 1000
	var l net.Listener
	if err := p.Do(func() (err error) { l, err = net.Listen("tcp4", "127.0.0.1:0"); return err }); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	failed := make(chan error, 1)
	go func() {
		var held []net.Conn
		for range n {
			c, err := l.Accept()
			if err != nil {
				failed <- err
				return
			}
			held = append(held, c)
		}
		for _, c := range held {
			_, err := io.ReadFull(c, make([]byte, 1))
			if err == nil {
				_, err = c.Write([]byte{1})
			}
			if err != nil {
				failed <- err
				return
			}
			defer c.Close()
		}
		failed <- nil
	}()
	target := netip.MustParseAddrPort(l.Addr().String())
	s, tr, err := Open{Thread: p, Targets: []netip.AddrPort{target}, Sizes: Sizes{1, 1}, Rate: rate}.Run(t.Context(),
		n*time.Second/rate)
	if err := errors.Join(err, <-failed); err != nil {
		t.Fatal(err)
	}
	if s.Ops != n {
		t.Fatalf("%d of %d answered: %v", s.Ops, n, s.Errors)
	}
	for _, e := range tr.Slowest { // none was answered before the last one's start
		if e.At+e.Elapsed < (n-1)*time.Second/rate {
			t.Errorf("intended at %v, answered %v later: before %v", e.At, e.Elapsed, (n-1)*time.Second/rate)
		}
	}
	if s.Quantiles["max"] < float64((n-10)*time.Second/rate) {
		t.Errorf("the slowest took %v ns", s.Quantiles["max"])
	}
}

func TestOpenLoopCountsLosses(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	deaf := netip.MustParseAddrPort(deafListener(t, p))
	good := serve(t, p, Sizes{1, 1}, 3, "127.0.0.1:0").Addrs[0]
	closed := netip.MustParseAddrPort("127.0.0.1:9")
	o := Open{Thread: p, Targets: []netip.AddrPort{deaf, good, closed}, Sizes: Sizes{1, 1}, Rate: 1000,
		Timeout: 300 * time.Millisecond}
	s, tr, err := o.Run(t.Context(), 60*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if s.Ops != 20 || s.Errors["timeout"] != 20 || s.Errors["refused"] != 20 || tr.Intended != 60 ||
		len(tr.Failures) != 40 {
		t.Errorf("%d answered, errors %v, trace %+v", s.Ops, s.Errors, tr)
	}
	for _, f := range tr.Failures {
		if want := map[string]netip.AddrPort{"timeout": deaf, "refused": closed}[f.Kind]; f.Target != want {
			t.Errorf("%s at %s, want %s", f.Kind, f.Target, want)
		}
		if f.Kind == "timeout" && f.Elapsed < o.Timeout {
			t.Errorf("given up after %v", f.Elapsed)
		}
	}
	o.Targets, o.Most = o.Targets[:1], 5
	if s, _, err = o.Run(t.Context(), 20*time.Millisecond); err != nil || s.Errors["overload"] != 15 ||
		s.Errors["timeout"] != 5 {
		t.Errorf("with room for 5: errors %v, %v", s.Errors, err)
	}
}

func TestEndedContextCutsAnOpenLoop(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	srv := serve(t, p, Sizes{1, 1}, 1, "127.0.0.1:0")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s, tr, err := Open{Thread: p, Targets: srv.Addrs, Sizes: Sizes{1, 1}, Rate: 100}.Run(ctx, time.Hour)
	if err != nil || !tr.Cut || s.Ops+s.Failed() != tr.Intended {
		t.Errorf("%+v, %d done, %v", tr, s.Ops, err)
	}
}

func TestServerOutlivesRudeClients(t *testing.T) {
	p := Thread{Enter: namespace(t)}
	sizes := Sizes{8, 1 << 20} // does not fit into the socket's buffer at once
	srv := serve(t, p, sizes, 9, "127.0.0.1:0")
	rude := func(say string) error {
		return p.Do(func() error {
			c, err := net.Dial("tcp", srv.Addrs[0].String())
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = io.WriteString(c, say)
			return errors.Join(err, c.(*net.TCPConn).SetLinger(0))
		})
	}
	for _, say := range []string{"", "k", "kkkkkkkk", "cccccccc"} {
		if err := rude(say); err != nil {
			t.Fatal(err)
		}
	}
	for _, end := range []Close{Reset, Fin} {
		s, err := Client{Thread: p, Targets: srv.Addrs, Sizes: sizes, Close: end}.Run(t.Context(), CRR, 30*time.Millisecond)
		if err != nil || s.Ops == 0 || s.Failed() != 0 {
			t.Errorf("after rude clients, %s: %d operations, errors %v, %v", end, s.Ops, s.Errors, err)
		}
	}
	if srv.Accepted() < 6 || srv.Served() < 2 || srv.CPU() <= 0 {
		t.Errorf("accepted %d, served %d, cpu %v", srv.Accepted(), srv.Served(), srv.CPU())
	}
}

func TestThreadPinsAndEnds(t *testing.T) {
	want := cpu(t)
	var before, in, after unix.CPUSet
	get := func(s *unix.CPUSet) func() error { return func() error { return unix.SchedGetaffinity(0, s) } }
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := errors.Join(get(&before)(), Thread{CPUs: []int{want}, Enter: namespace(t)}.Do(get(&in)), get(&after)())
	if err != nil {
		t.Fatal(err)
	}
	if in.Count() != 1 || !in.IsSet(want) || before != after {
		t.Errorf("pinned to %d: inside %v, before %v, after %v", want, in, before, after)
	}
}

func TestQuantiles(t *testing.T) {
	ns := make([]int64, 1000)
	for i := range ns {
		ns[(i*7)%1000] = int64(i + 1)
	}
	q, h := Quantiles(ns)
	for name, want := range map[string]float64{"min": 1, "p1": 10, "p50": 500, "p90": 900, "p99": 990, "p99.9": 999,
		"max": 1000, "mean": 500.5} {
		if q[name] != want {
			t.Errorf("%s = %v, want %v", name, q[name], want)
		}
	}
	if h.TotalCount() != 1000 || h.Max() != 1000 {
		t.Errorf("histogram of %d to %d", h.TotalCount(), h.Max())
	}
	if q, _ := Quantiles([]int64{3}); q["p1"] != 3 || q["p99.9"] != 3 {
		t.Errorf("of one number: %v", q)
	}
}

func TestKind(t *testing.T) {
	for err, want := range map[error]string{
		unix.ECONNREFUSED: "refused", io.ErrUnexpectedEOF: "cut short", unix.EADDRNOTAVAIL: "overload",
		fmt.Errorf("read: %w", unix.ECONNRESET): "reset", unix.EINVAL: "invalid argument",
	} {
		if got := Kind(err); got != want {
			t.Errorf("%v is %q, want %q", err, got, want)
		}
	}
}

func benchmark(b *testing.B, op Op, end Close) {
	p := Thread{Enter: namespace(b), CPUs: []int{cpu(b)}}
	srv := serve(b, p, Sizes{1, 1}, 1, "127.0.0.1:0")
	s, err := Client{Thread: p, Targets: srv.Addrs, Sizes: Sizes{1, 1}, Close: end,
		Warm: 20 * time.Millisecond}.Run(b.Context(), op, 300*time.Millisecond)
	if err != nil || s.Failed() > 0 {
		b.Fatal(err, s.Errors)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(s.Quantiles["p50"], "p50-ns")
	b.ReportMetric(s.Quantiles["p99"], "p99-ns")
	b.ReportMetric(s.Counters["softnet"]/float64(s.Ops), "packets/op")
	b.ReportMetric(s.Counters["switches"]/float64(s.Ops), "switches/op")
}

func BenchmarkConnectReset(b *testing.B) { benchmark(b, Connect, Reset) }
func BenchmarkConnectFin(b *testing.B)   { benchmark(b, Connect, Fin) }
func BenchmarkCRRReset(b *testing.B)     { benchmark(b, CRR, Reset) }
func BenchmarkCRRFin(b *testing.B)       { benchmark(b, CRR, Fin) }
func BenchmarkRR(b *testing.B)           { benchmark(b, RR, Reset) }
