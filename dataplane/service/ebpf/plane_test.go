package ebpf_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/link"
	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// Three endpoints of each family, all on the node's loopback. No route leads to a Service's address: what is not
// translated goes nowhere.
var endpoints = []string{"10.244.0.1", "10.244.0.2", "10.244.0.3", "fd00:244::1", "fd00:244::2", "fd00:244::3"}

var theNode = &model.ServiceNode{Node: &model.Node{Name: "a",
	Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/64")}}}

// copyOfNode returns a copy of theNode that a test may change.
func copyOfNode() model.ServiceNode {
	n, inner := *theNode, *theNode.Node
	n.Node = &inner
	return n
}

// pool makes a pool of the endpoints of a family, by their last digits.
func poolOf(id uint64, six bool, p model.Protocol, last ...int) *model.Pool {
	v := &model.Pool{ID: id, Protocol: p, Name: fmt.Sprint("pool ", id)}
	for _, n := range last {
		a := fmt.Sprintf("10.244.0.%d", n)
		if six {
			a = fmt.Sprintf("fd00:244::%d", n)
		}
		v.Backends = append(v.Backends, model.Backend{Addr: netip.AddrPortFrom(netip.MustParseAddr(a), 8080)})
	}
	return v
}

// frontendOf makes a frontend that serves everybody with one pool.
func frontendOf(at string, v *model.Pool) *model.Frontend {
	a := netip.MustParseAddrPort(at)
	t := model.Target{Pool: v}
	return &model.Frontend{
		Service:  "default/web",
		Entry:    model.Entry{Addr: a.Addr(), Port: a.Port(), Protocol: v.Protocol},
		Internal: t,
		External: t,
	}
}

// withLinks adds the devices of the calling thread's network namespace to the parts of a node.
func withLinks(parts []model.ServicePart) []model.ServicePart {
	isNode := func(p model.ServicePart) bool { _, is := p.(*model.ServiceNode); return is }
	if !slices.ContainsFunc(parts, isNode) {
		return parts
	}
	links, err := link.Open()
	if err != nil {
		panic(err)
	}
	defer links.Close()
	all, _, err := links.Update()
	if err != nil {
		panic(err)
	}
	return slices.Concat(parts, all)
}

// render returns the facts of parts, and with a node those of its devices.
func render(p *ebpf.Plane, parts ...model.ServicePart) (facts []ebpf.Fact) {
	for _, v := range withLinks(parts) {
		for _, f := range p.Render(v) {
			if !slices.ContainsFunc(facts, f.Equal) {
				facts = append(facts, f)
			}
		}
	}
	return facts
}

// change writes what makes parts of others.
func change(t testing.TB, p *ebpf.Plane, from, to []model.ServicePart) {
	t.Helper()
	old, now := render(p, from...), render(p, to...)
	differs := func(l []ebpf.Fact) func(ebpf.Fact) bool {
		return func(f ebpf.Fact) bool { return slices.ContainsFunc(l, f.Equal) }
	}
	write(t, p, slices.DeleteFunc(slices.Clone(now), differs(old)), slices.DeleteFunc(slices.Clone(old), differs(now)))
}

// serve answers on port 8080 of all addresses.
func serve(t testing.TB) {
	t.Helper()
	s, err := echo.Serve("web", []echo.Port{{Number: 8080, Protocol: model.TCP}, {Number: 8080, Protocol: model.UDP}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
}

// request sends one request.
func request(p model.Protocol, to string, o echo.Options) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a, err := echo.Request(ctx, p, netip.MustParseAddrPort(to), o)
	return a.Server.Addr().String(), err
}

// answers sends requests and counts who answers.
func answers(t testing.TB, n int, p model.Protocol, to string, o echo.Options) map[string]int {
	t.Helper()
	count := map[string]int{}
	for range n {
		who, err := request(p, to, o)
		if err != nil {
			t.Fatalf("%s/%s: %v", to, p, err)
		}
		count[who]++
	}
	return count
}

func TestEverySocketReachesItsService(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		parts := []model.ServicePart{theNode}
		for i, proto := range []model.Protocol{model.TCP, model.UDP} {
			four, six := poolOf(uint64(2*i+1), false, proto, 1, 2, 3), poolOf(uint64(2*i+2), true, proto, 1, 2, 3)
			parts = append(parts, four, six, frontendOf("10.96.0.1:80", four), frontendOf("[fd00:96::1]:80", six))
		}
		change(t, p, nil, parts)
		for _, to := range []string{"10.96.0.1:80", "[fd00:96::1]:80"} {
			for _, c := range []struct {
				proto model.Protocol
				echo.Options
			}{{proto: model.TCP}, {proto: model.UDP}, {model.UDP, echo.Options{Unconnected: true}}} {
				if who := answers(t, 60, c.proto, to, c.Options); len(who) != 3 {
					t.Errorf("%s/%s %+v: answers come from %v alone", to, c.proto, c.Options, who)
				}
			}
		}
		if _, err := request(model.TCP, "10.96.0.1:81", echo.Options{}); err == nil {
			t.Error("another port than the Service's is served")
		}
	}, endpoints...)
}

// getpeername() returns the Service's address, also by a socket of both families, and
// where other sockets have its place. When it closes, its own is free again.
func TestThePeerIsTheService(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		four, six, udp := poolOf(1, false, model.TCP, 1), poolOf(2, true, model.TCP, 1), poolOf(3, false, model.UDP, 1)
		change(t, p, nil, []model.ServicePart{theNode, four, six, udp,
			frontendOf("10.96.0.1:80", four), frontendOf("[fd00:96::1]:80", six), frontendOf("10.96.0.1:80", udp)})
		names := namesOf(t, p)
		thePeerIsTheService(t)
		if i := slices.IndexFunc(names, func(n service.PeerName) bool { return n.Cookie != 0 }); i >= 0 {
			t.Errorf("all are closed, and there is %+v", names[i])
		}
		held := dial(t, 1, "tcp", "10.96.0.1:80")
		if n := slices.IndexFunc(
			names,
			func(n service.PeerName) bool { return n.Cookie != 0 },
		); n < 0 ||
			held[0].RemoteAddr().String() != "10.96.0.1:80" {
			t.Errorf("an open connection to %s has place %d", held[0].RemoteAddr(), n)
		} else if raw, err := held[0].(*net.TCPConn).SyscallConn(); err == nil {
			raw.Control(func(fd uintptr) { unix.Getpeername(int(fd)) })
			if names[n].Queried != 1 {
				t.Errorf("of one that asked there is %+v", names[n])
			}
		}
		held[0].Close()
		const other = 1 << 60
		for _, requested := range []uint32{0, 1} {
			for i := range names {
				names[i].Cookie, names[i].Queried = other+uint64(i), requested
			}
			thePeerIsTheService(t)
			mine := slices.IndexFunc(names, func(n service.PeerName) bool { return n.Cookie < other })
			switch {
			case requested == 0 && mine < 0:
				t.Error("no place was taken of those who never asked")
			case requested == 1 && mine >= 0:
				t.Errorf("the place of one that asked has %+v", names[mine])
			}
		}
		folder, _, err := bpf.Folder()
		if err := errors.Join(err, service.Detach(filepath.Join(folder, "links"))); err != nil {
			t.Fatal(err)
		}
		write(t, p, p.Render(theNode), nil)
		if i := slices.IndexFunc(names, func(n service.PeerName) bool { return n.Cookie != 0 }); i >= 0 {
			t.Errorf("sockets may have been closed unseen, and there is %+v", names[i])
		}
		thePeerIsTheService(t)
	}, endpoints...)
}

// namesOf returns the peer names of TCP sockets that the kernel holds.
func namesOf(t *testing.T, p *ebpf.Plane) []service.PeerName {
	t.Helper()
	folder, _, err := bpf.Folder()
	if err != nil {
		t.Fatal(err)
	}
	layout, err := device.Layout(p.Sizes)
	if err != nil {
		t.Fatal(err)
	}
	m, err := device.OpenMaps(filepath.Join(folder, layout), p.Sizes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m.PeerNames
}

func thePeerIsTheService(t *testing.T) {
	t.Helper()
	four, six := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00:96::1")
	for _, c := range []struct {
		family, kind int
		to           netip.Addr
	}{
		{unix.AF_INET, unix.SOCK_STREAM, four}, {unix.AF_INET6, unix.SOCK_STREAM, six},
		{unix.AF_INET6, unix.SOCK_STREAM, netip.AddrFrom16(four.As16())},
		{unix.AF_INET, unix.SOCK_DGRAM, four}, {unix.AF_INET6, unix.SOCK_DGRAM, netip.AddrFrom16(four.As16())},
	} {
		fd, err := unix.Socket(c.family, c.kind|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		var to unix.Sockaddr = &unix.SockaddrInet6{Addr: c.to.As16(), Port: 80}
		if c.family == unix.AF_INET {
			to = &unix.SockaddrInet4{Addr: c.to.As4(), Port: 80}
		}
		if err := unix.Connect(fd, to); err != nil {
			t.Fatalf("connect to %s: %v", c.to, err)
		}
		for range 2 {
			if peer, err := unix.Getpeername(
				fd,
			); err != nil ||
				!cmp.Equal(peer, to, cmp.AllowUnexported(unix.SockaddrInet4{}, unix.SockaddrInet6{})) {
				if a, b := inet.AddrPort(peer), inet.AddrPort(to); a != b {
					t.Errorf("family %d kind %d to %s: the peer is %s, %v", c.family, c.kind, c.to, a, err)
				}
			}
		}
		unix.Close(fd)
	}
}

func TestWithoutEndpointsIsRefused(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o)
		defer clean(t, p)
		tcp, udp, quiet := poolOf(
			1,
			false,
			model.TCP,
		), poolOf(
			2,
			false,
			model.UDP,
		), frontendOf(
			"10.96.0.2:80",
			poolOf(1, false, model.TCP),
		)
		quiet.Internal.Empty, quiet.External.Empty = model.Drop, model.Drop
		change(
			t,
			p,
			nil,
			[]model.ServicePart{theNode, tcp, udp, frontendOf("10.96.0.1:80", tcp), frontendOf("10.96.0.1:80", udp), quiet},
		)
		for _, c := range []struct {
			proto model.Protocol
			echo.Options
		}{{proto: model.TCP}, {proto: model.UDP}, {model.UDP, echo.Options{Unconnected: true}}} {
			if _, err := request(c.proto, "10.96.0.1:80", c.Options); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%s %+v: %v", c.proto, c.Options, err)
			}
		}
		if _, err := request(model.TCP, "10.96.0.2:80", echo.Options{}); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("what is to be silent should have been left alone: %v", err)
		}
		counts, err := p.Counts()
		if err != nil || counts[1].Refused != 1 || counts[2].Refused != 2 {
			t.Errorf("counts are %v, %v", counts, err)
		}
	})
}

// What a socket can't do is left alone: here, to no route.
func TestOtherTrafficUntouched(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		v := poolOf(1, false, model.TCP, 1)
		sources, hidden := frontendOf("10.96.0.1:80", v), frontendOf("10.96.0.2:80", v)
		sources.Sources = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}
		hidden.Masquerade = model.AllOrigins
		change(t, p, nil, []model.ServicePart{theNode, v, sources, hidden})
		if _, err := request(model.TCP, "10.96.0.1:80", echo.Options{}); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("sources that are looked at: %v", err)
		}
		if _, err := request(model.TCP, "10.96.0.2:80", echo.Options{}); err != nil {
			t.Errorf("the node hides its own processes by itself: %v", err)
		}
		from := echo.Options{From: netip.MustParseAddrPort("127.0.0.1:0")}
		if _, err := request(model.TCP, "10.96.0.2:80", from); err == nil {
			t.Error("a socket bound to loopback was translated, though its packets can't leave")
		}
		pod(t, func(ns *netns.Namespace) {
			err := ns.Do(func() error {
				serve(t)
				if _, err := request(model.TCP, "10.96.0.2:80", echo.Options{}); err == nil {
					return errors.New("a pod was not masqueraded")
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		}, "10.244.0.1")
		root, err := cgroup.Root()
		if err != nil {
			t.Fatal(err)
		}
		err = cgroup.Do(root, func() error {
			_, err := request(model.TCP, "10.96.0.2:80", echo.Options{})
			return err
		})
		if !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("a socket outside the cgroup: %v", err)
		}
	}, endpoints...)
}

// Pods inside and outside the ranges that count as pods get what is theirs.
func TestPodsAreKnownByTheirAddress(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o)
		defer clean(t, p)
		in, out := poolOf(1, false, model.TCP, 1), poolOf(2, false, model.TCP, 2)
		f := frontendOf("10.96.0.1:80", in)
		f.External.Pool = out
		node := copyOfNode()
		node.Pods = []netip.Prefix{netip.MustParsePrefix("10.244.0.2/31")}
		change(t, p, nil, []model.ServicePart{&node, in, out, f})
		for mine, want := range map[string]string{"10.244.0.3": "10.244.0.1", "10.244.0.9": "10.244.0.2"} {
			pod(t, func(ns *netns.Namespace) {
				err := ns.Do(func() error {
					serve(t)
					for range 3 { // what it is, is known from the second time on
						if who, err := request(model.TCP, "10.96.0.1:80", echo.Options{}); who != want {
							return fmt.Errorf("a pod at %s is answered by %s, not %s: %v", mine, who, want, err)
						}
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}, mine, "10.244.0.1", "10.244.0.2")
		}
	})
}

func TestNodePorts(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		four, six := poolOf(1, false, model.TCP, 1, 2), poolOf(2, true, model.TCP, 1, 2)
		node := copyOfNode()
		node.Addresses = []netip.Addr{
			netip.MustParseAddr("192.0.2.1"),
			netip.MustParseAddr("192.0.2.2"),
			netip.MustParseAddr("2001:db8::1"),
		}
		node.NodePorts = []model.Range{
			{First: netip.MustParseAddr("127.0.0.0"), Last: netip.MustParseAddr("127.0.0.9")},
			{First: netip.MustParseAddr("192.0.2.0"), Last: netip.MustParseAddr("192.0.2.1")},
			{First: netip.MustParseAddr("::"), Last: netip.MustParseAddr("ffff::")},
		}
		change(t, p, nil, []model.ServicePart{&node, four, six, frontendOf("0.0.0.0:30080", four),
			frontendOf("[::]:30080", six)})
		for to, served := range map[string]bool{ // 0.0.0.0 is 127.0.0.1 to packets
			"127.0.0.1:30080": true, "127.0.0.9:30080": true, "127.0.0.10:30080": false, "192.0.2.1:30080": true,
			"192.0.2.2:30080":     false,
			"[2001:db8::1]:30080": true, "[::1]:30080": true, "10.244.0.3:30080": false, "0.0.0.0:30080": true,
			"192.0.2.1:30081": false,
		} {
			if _, err := request(model.TCP, to, echo.Options{}); (err == nil) != served {
				t.Errorf("%s: served should be %t: %v", to, served, err)
			}
		}
	}, append([]string{"192.0.2.1", "192.0.2.2", "2001:db8::1"}, endpoints...)...)
}

func TestAffinity(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		v := poolOf(1, false, model.TCP, 1, 2, 3)
		v.Affinity = time.Hour
		f := frontendOf("10.96.0.1:80", v)
		change(t, p, nil, []model.ServicePart{theNode, v, f})
		who := answers(t, 20, model.TCP, "10.96.0.1:80", echo.Options{})
		if len(who) != 1 {
			t.Fatalf("a client has several backends: %v", who)
		}
		mine := slices.Collect(maps.Keys(who))[0]
		many := map[string]bool{}
		for i := range 40 {
			from := echo.Options{From: netip.MustParseAddrPort(fmt.Sprintf("10.1.0.%d:0", i+1))}
			for w := range answers(t, 2, model.TCP, "10.96.0.1:80", from) {
				many[w] = true
			}
		}
		if len(many) != 3 {
			t.Errorf("40 clients all went to %v", many)
		}
		stays := func(last ...int) map[string]int {
			now := poolOf(1, false, model.TCP, last...)
			now.Affinity = time.Hour
			change(t, p, []model.ServicePart{v, f}, []model.ServicePart{now, frontendOf("10.96.0.1:80", now)})
			v, f = now, frontendOf("10.96.0.1:80", now)
			return answers(t, 20, model.TCP, "10.96.0.1:80", echo.Options{})
		}
		var m int
		fmt.Sscanf(mine, "10.244.0.%d", &m)
		if who := stays(m); who[mine] != 20 {
			t.Errorf("with its backend alone: %v, not %s", who, mine)
		}
		if who := stays(1, 2, 3); who[mine] != 20 {
			t.Errorf("with others again: %v, not %s", who, mine)
		}
		if who := stays(
			slices.DeleteFunc([]int{1, 2, 3}, func(n int) bool { return n == m })...); len(who) != 1 ||
			who[mine] != 0 {
			t.Errorf("without its backend %s: %v", mine, who)
		}
	}, append(manyAddresses(), endpoints...)...)
}

func manyAddresses() (l []string) {
	for i := range 40 {
		l = append(l, fmt.Sprintf("10.1.0.%d", i+1))
	}
	return l
}

func TestSchedulers(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		before := []model.ServicePart{theNode}
		change(t, p, nil, before)
		for _, c := range []struct {
			scheduler model.Scheduler
			weights   [3]uint16
			least     [3]int // of 240 connections of one client
			most      [3]int
		}{
			// six standard deviations of what a fair draw gives
			{model.Random, [3]uint16{}, [3]int{36, 36, 36}, [3]int{124, 124, 124}},
			{model.Random, [3]uint16{1, 2, 5}, [3]int{1, 19, 104}, [3]int{61, 101, 196}},
			{model.RoundRobin, [3]uint16{1, 2, 5}, [3]int{80, 80, 80}, [3]int{80, 80, 80}},
			{model.WeightedRoundRobin, [3]uint16{}, [3]int{80, 80, 80}, [3]int{80, 80, 80}},
			{model.WeightedRoundRobin, [3]uint16{1, 2, 5}, [3]int{30, 60, 150}, [3]int{30, 60, 150}},
		} {
			v := poolOf(1, false, model.TCP, 1, 2, 3)
			v.Scheduler = c.scheduler
			for i := range v.Backends {
				v.Backends[i].Weight = c.weights[i]
			}
			now := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
			change(t, p, before, now)
			before = now
			who := answers(t, 240, model.TCP, "10.96.0.1:80", echo.Options{})
			for i := range 3 {
				if n := who[endpoints[i]]; n < c.least[i] || n > c.most[i] {
					t.Errorf("%s %v: %v", c.scheduler, c.weights, who)
					break
				}
			}
		}
		for _, s := range []model.Scheduler{model.SourceHash, model.DestinationHash, model.Maglev} {
			v := poolOf(1, false, model.TCP, 1, 2, 3)
			v.Scheduler = s
			now := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
			change(t, p, before, now)
			before = now
			all := map[string]bool{}
			for i := range 40 {
				from := echo.Options{From: netip.MustParseAddrPort(fmt.Sprintf("10.1.0.%d:0", i+1))}
				who := answers(t, 3, model.TCP, "10.96.0.1:80", from)
				if len(who) != 1 {
					t.Errorf("%s: one client goes to %v", s, who)
				}
				for w := range who {
					all[w] = true
				}
			}
			if len(all) != map[model.Scheduler]int{model.SourceHash: 3, model.DestinationHash: 1, model.Maglev: 3}[s] {
				t.Errorf("%s: 40 clients go to %v", s, all)
			}
		}
	}, append(manyAddresses(), endpoints...)...)
}

// A socket that isn't connected keeps its backend while that is one, and takes another when it goes.
func TestDatagramsStayWithBackend(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		v := poolOf(1, false, model.UDP, 1, 2, 3)
		before := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
		change(t, p, nil, before)
		ctx := t.Context()
		h, err := echo.Open(ctx, model.UDP, netip.MustParseAddrPort("10.96.0.1:80"), echo.Options{Unconnected: true})
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		who := func() string {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			a, err := h.Request(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return a.Server.Addr().String()
		}
		first := who()
		for range 10 {
			if w := who(); w != first {
				t.Fatalf("%s, then %s", first, w)
			}
		}
		left := slices.DeleteFunc([]int{1, 2, 3}, func(n int) bool { return strings.HasSuffix(first, fmt.Sprint(".", n)) })
		now := poolOf(1, false, model.UDP, left...)
		change(t, p, before, []model.ServicePart{theNode, now, frontendOf("10.96.0.1:80", now)})
		if w := who(); w == first {
			t.Errorf("%s answers, though it is no backend any more", w)
		}
	}, endpoints...)
}

// When a backend goes, connected sockets that use it are closed, and only those: not others to the same Service, nor
// such as were connected to the backend directly.
func TestSocketsOfGoneBackendsAreClosed(t *testing.T) {
	for _, c := range []struct {
		proto  model.Protocol
		tcp    bool
		closed bool
	}{{model.UDP, false, true}, {model.TCP, false, false}, {model.TCP, true, true}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			inside(t, func(o ebpf.Options) {
				serve(t)
				o.CloseTCP = c.tcp
				p := opened(t, o)
				defer clean(t, p)
				v := poolOf(1, false, c.proto, 1, 2)
				before := []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)}
				change(t, p, nil, before)
				held := map[string][]*echo.Flow{}
				hold := func(to string) (who string) {
					h, err := echo.Open(t.Context(), c.proto, netip.MustParseAddrPort(to), echo.Options{})
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { h.Close() })
					a, err := h.Request(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					who = a.Server.Addr().String()
					if strings.HasPrefix(to, "10.244") {
						who = "direct"
					}
					held[who] = append(held[who], h)
					return who
				}
				hold("10.244.0.1:8080")
				for range 40 {
					hold("10.96.0.1:80")
				}
				now := poolOf(1, false, c.proto, 2)
				change(t, p, before, []model.ServicePart{theNode, now, frontendOf("10.96.0.1:80", now)})
				for who, l := range held {
					for _, h := range l {
						_, err := h.Request(t.Context())
						if gone := who == "10.244.0.1" && c.closed; gone != (err != nil) {
							t.Errorf("a socket of %s: closed should be %t: %v", who, gone, err)
						}
					}
				}
			}, endpoints...)
		})
	}
}

// Sockets of a backend that goes are closed wherever their owners are: on the node, and in each pod.
func TestSocketsAreClosedInEveryNamespace(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o)
		defer clean(t, p)
		v, other := poolOf(1, false, model.UDP, 1), poolOf(2, false, model.UDP, 1)
		before := []model.ServicePart{theNode, v, other, frontendOf("10.96.0.1:80", v), frontendOf("10.96.0.2:80", other)}
		change(t, p, nil, before)
		gone := map[string]bool{"10.96.0.1:80": true, "10.96.0.2:80": false, "10.244.0.1:8080": false}
		held := map[string][]net.Conn{}
		hold := func() error {
			for to := range gone {
				held[to] = append(held[to], dial(t, 2, "udp", to)...)
			}
			return nil
		}
		hold()
		pod(t, func(a *netns.Namespace) {
			pod(t, func(b *netns.Namespace) {
				if err := errors.Join(a.Do(hold), b.Do(hold)); err != nil {
					t.Fatal(err)
				}
				now := poolOf(1, false, model.UDP, 2)
				change(
					t,
					p,
					before,
					[]model.ServicePart{theNode, now, other, frontendOf("10.96.0.1:80", now), frontendOf("10.96.0.2:80", other)},
				)
				for to, l := range held {
					for i, c := range l {
						var reset bool
						if raw, err := c.(*net.UDPConn).SyscallConn(); err == nil {
							raw.Control(func(fd uintptr) {
								_, err := unix.Getpeername(int(fd))
								reset = err == unix.ENOTCONN
							})
						}
						if reset != gone[to] {
							t.Errorf("socket %d of %d to %s: closed should be %t", i, len(l), to, gone[to])
						}
					}
				}
			}, "10.244.9.2", "10.244.0.1", "10.244.0.2")
		}, "10.244.9.1", "10.244.0.1", "10.244.0.2")
	}, endpoints...)
}

// While a pool changes all the time, every connection goes to a backend of before or after. Nodes that come to know
// of a pool at a time don't all lead their first client to one backend: each time a pool is new, it begins elsewhere.
func TestNewPoolsBeginAnywhere(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		for _, scheduler := range []model.Scheduler{model.Random, model.RoundRobin} {
			v := poolOf(1, false, model.TCP, 1, 2, 3)
			v.Scheduler = scheduler
			facts := render(p, theNode, v, frontendOf("10.96.0.1:80", v))
			first := map[string]int{}
			for range 16 { // one by chance alone: 3^-15
				write(t, p, facts, nil)
				who, err := request(model.TCP, "10.96.0.1:80", echo.Options{})
				if err != nil {
					t.Fatal(err)
				}
				first[who]++
				write(t, p, nil, facts)
			}
			if len(first) < 2 {
				t.Errorf("%s: the first client is always led to one: %v", scheduler, first)
			}
		}
	}, endpoints...)
}

func TestAPoolChangesAtOnce(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		o.Sizes = service.Sizes{Frontends: 16, Pools: 16, Slots: 64} // so that extents are used again and again
		p := opened(t, o)
		defer clean(t, p)
		a, b, other := poolOf(1, false, model.TCP, 1, 2), poolOf(1, false, model.TCP, 2), poolOf(2, false, model.TCP, 3)
		f := frontendOf("10.96.0.1:80", a)
		write(t, p, render(p, theNode, a, other, f, frontendOf("10.96.0.2:80", other)), nil)
		done := make(chan error, 1)
		go func() {
			for i := range 3000 {
				put, del := p.Render(a), p.Render(b)
				if i%2 == 0 {
					put, del = del, put
				}
				if err := p.Write(context.Background(), put, del); err != nil {
					done <- err
					return
				}
				if err := p.Write(context.Background(), p.Render(other), p.Render(other)); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
		for n := 0; ; n++ {
			select {
			case err := <-done:
				if err != nil || n == 0 {
					t.Error(n, err)
				}
				return
			default:
			}
			if who, err := request(model.TCP, "10.96.0.1:80", echo.Options{}); err != nil || who == "10.244.0.3" {
				t.Fatal(who, err)
			}
		}
	}, endpoints...)
}

func TestTrace(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		seen, unseen := poolOf(1, false, model.TCP, 1), poolOf(2, false, model.TCP)
		change(
			t,
			p,
			nil,
			[]model.ServicePart{theNode, seen, unseen, frontendOf("10.96.0.1:80", seen), frontendOf("10.96.0.2:80", unseen)},
		)
		ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
		defer stop()
		events := make(chan service.Event, 100)
		ended := make(chan error, 1)
		go func() {
			_, err := p.Trace(ctx, service.Filter{Pools: []uint64{1}}, func(e service.Event) { events <- e })
			ended <- err
		}()
		for {
			request(model.TCP, "10.96.0.2:80", echo.Options{})
			request(model.TCP, "10.96.0.1:80", echo.Options{})
			select {
			case e := <-events:
				want := service.Event{Time: e.Time, Namespace: e.Namespace, Pool: 1, Entry: netip.MustParseAddrPort("10.96.0.1:80"),
					Backend: netip.MustParseAddrPort("10.244.0.1:8080"), Protocol: 6, Process: uint32(os.Getpid()), Command: e.Command}
				if e != want || e.Time == 0 || e.Namespace == 0 || e.Command == "" {
					t.Errorf("event %+v, not %+v", e, want)
				}
				stop()
				if err := <-ended; err != nil {
					t.Error(err)
				}
				return
			case err := <-ended:
				t.Fatalf("no event came: %v", err)
			default:
			}
		}
	}, endpoints...)
}

// MPTCP sockets are TCP's to who uses them.
func TestMultipathTCP(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		serve(t)
		p := opened(t, o)
		defer clean(t, p)
		v := poolOf(1, false, model.TCP, 1)
		change(t, p, nil, []model.ServicePart{theNode, v, frontendOf("10.96.0.1:80", v)})
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
		if err != nil {
			t.Fatalf("this test needs a kernel with MPTCP: %v", err)
		}
		err = unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 1}, Port: 80})
		if err := errors.Join(err, unix.Close(fd)); err != nil {
			t.Error(err)
		}
		// Its inner sockets are the kernel's, which doesn't say when they are closed.
		if names := namesOf(t, p); slices.ContainsFunc(names, func(n service.PeerName) bool { return n.Queried != 0 }) {
			t.Error("an index is allocated that is never freed")
		}
	}, endpoints...)
}
