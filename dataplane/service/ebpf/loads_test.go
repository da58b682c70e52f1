package ebpf_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/model"
)

// dial connects so many sockets.
func dial(t *testing.T, n int, network, to string) (l []net.Conn) {
	t.Helper()
	for range n {
		c, err := net.Dial(network, to)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		l = append(l, c)
	}
	return l
}

// expectOpen expects so many open sockets, in the order of a pool's backends.
func expectOpen(t *testing.T, p *ebpf.Plane, v *model.Pool, when string, want ...uint64) {
	t.Helper()
	open, err := p.Open(v)
	if err != nil {
		t.Fatal(err)
	}
	var got []uint64
	for _, b := range v.Backends {
		got = append(got, open[b.Addr])
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: open are %d, not %d", when, got, want)
	}
}

// counted makes a pool by a scheduler that goes by open sockets.
func counted(s model.Scheduler, proto model.Protocol, last ...int) *model.Pool {
	v := poolOf(1, false, proto, last...)
	v.Scheduler = s
	return v
}

// The backend with the fewest open sockets gets the next, by its weight where the scheduler heeds that.
func TestFewestOpenSockets(t *testing.T) {
	for _, c := range []struct {
		by    model.Scheduler
		proto model.Protocol
		n     int
		want  [3]uint64 // of weights 1, 2 and 5
	}{
		{model.LeastConnections, model.TCP, 9, [3]uint64{3, 3, 3}},
		{model.LeastConnections, model.UDP, 9, [3]uint64{3, 3, 3}},
		{model.WeightedLeastConnections, model.TCP, 16, [3]uint64{2, 4, 10}},
		{model.ShortestExpectedDelay, model.TCP, 16, [3]uint64{2, 4, 10}},
		{model.ShortestExpectedDelay, model.TCP, 2, [3]uint64{0, 0, 2}},
	} {
		t.Run(fmt.Sprint(c.by, c.proto, c.n), func(t *testing.T) {
			inside(t, func(o ebpf.Options) {
				serve(t)
				p := opened(t, o)
				defer clean(t, p)
				v := counted(c.by, c.proto, 1, 2, 3)
				for i, w := range []uint16{1, 2, 5} {
					v.Backends[i].Weight = w
				}
				v.Backends[0].Local, v.Backends[1].Remote = true, true // where they run is no weight
				write(t, p, render(p, theNode, v, frontendOf("10.96.0.1:80", v)), nil)
				conns := dial(t, c.n, map[model.Protocol]string{model.TCP: "tcp", model.UDP: "udp"}[c.proto], "10.96.0.1:80")
				expectOpen(t, p, v, "connected", c.want[:]...)
				for _, c := range conns {
					c.Close()
				}
				expectOpen(t, p, v, "closed", 0, 0, 0)
			}, endpoints...)
		})
	}
}

// Of many backends the better of two is taken: no backend falls far behind.
func TestBetterOfTwo(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o)
		defer clean(t, p)
		v := &model.Pool{ID: 1, Protocol: model.UDP, Scheduler: model.LeastConnections}
		for i := range 20 {
			v.Backends = append(v.Backends, poolOf(1, false, model.UDP, 1).Backends[0])
			v.Backends[i].Addr = addrPort(fmt.Sprintf("10.244.0.1:%d", 9000+i))
		}
		write(t, p, render(p, theNode, v, frontendOf("10.96.0.1:80", v)), nil)
		dial(t, 400, "udp", "10.96.0.1:80")
		open, err := p.Open(v)
		if err != nil {
			t.Fatal(err)
		}
		sum := uint64(0)
		for a, n := range open { // a draw alone strays by 4.4, this by less than 1 (log log 20)
			if sum += n; n < 13 || n > 25 {
				t.Errorf("%s has %d open of 400 on 20", a, n)
			}
		}
		if sum != 400 {
			t.Errorf("%d are counted", sum)
		}
	}, endpoints...)
}

// A socket counts until it is closed or connected elsewhere, whatever comes of its connect().
func TestEverySocketCountsOnce(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o) // nothing listens
		defer clean(t, p)
		v, none := counted(model.LeastConnections, model.TCP, 1), poolOf(2, false, model.TCP, 2)
		write(t, p, render(p, theNode, v, none, frontendOf("10.96.0.1:80", v), frontendOf("10.96.0.2:80", none)), nil)
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		for i, to := range []string{"10.96.0.1", "10.96.0.1", "10.96.0.2", "10.96.0.1"} {
			a := addrPort(to + ":80")
			if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: 80}); err != unix.ECONNREFUSED {
				t.Fatalf("connect without a listener: %v", err)
			}
			expectOpen(t, p, v, fmt.Sprintf("connect %d, to %s", i, to), map[string]uint64{"10.96.0.1": 1}[to])
		}
		again, err := unix.Dup(fd)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		expectOpen(t, p, v, "one of two descriptors is closed", 1)
		unix.Close(again)
		expectOpen(t, p, v, "both are closed", 0)
	}, endpoints...)
}

// Counts outlive other endpoints of their pool, an agent, and maps of another layout; what comes back has its own
// again.
func TestCountsStay(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		v := counted(model.LeastConnections, model.TCP, 1, 2, 3)
		now := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
		change(t, p, nil, now)
		conns := dial(t, 6, "tcp", "10.96.0.1:80")
		to := func(last ...int) *model.Pool {
			v := counted(model.LeastConnections, model.TCP, last...)
			next := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
			change(t, p, now, next)
			now = next
			return v
		}
		v = to(1, 2)
		expectOpen(t, p, v, "without the third", 2, 2)
		conns = append(conns, dial(t, 2, "tcp", "10.96.0.1:80")...)
		v = to(1, 2, 3)
		expectOpen(t, p, v, "with the third again", 3, 3, 2)
		p.Close()
		p = opened(t, o)
		read(t, p)
		expectOpen(t, p, v, "after a restart", 3, 3, 2)
		conns = append(conns, dial(t, 1, "tcp", "10.96.0.1:80")...)
		expectOpen(t, p, v, "one more", 3, 3, 3)
		p.Close()
		o.Sizes = service.Sizes{Frontends: 64, Pools: 64, Slots: 1024}
		p = opened(t, o)
		defer func() { clean(t, p) }()
		looped(t, p, now)
		expectOpen(t, p, v, "in another layout", 3, 3, 3)
		for _, c := range conns {
			c.Close()
		}
		expectOpen(t, p, v, "closed", 0, 0, 0)
	}, endpoints...)
}

// Where the hook that sees sockets close was away, counts begin anew, and sockets of before don't touch them.
func TestCountsBeginAnewWithTheHook(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		v := counted(model.LeastConnections, model.TCP, 1)
		parts := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
		looped(t, p, parts)
		old := dial(t, 3, "tcp", "10.96.0.1:80")
		folder, _, err := bpf.Folder()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(folder, "links", "release")); err != nil {
			t.Fatal(err)
		}
		old[0].Close()
		looped(t, p, parts)
		expectOpen(t, p, v, "attached anew", 0)
		dial(t, 2, "tcp", "10.96.0.1:80")
		for _, c := range old {
			c.Close()
		}
		expectOpen(t, p, v, "with two of its own", 2)
	}, endpoints...)
}
