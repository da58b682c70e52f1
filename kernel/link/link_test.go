package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
)

var spaces atomic.Int32

// space makes a namespace with its loopback up, and a connection to it, that go with the test.
func space(t *testing.T) (*netns.Namespace, *Conn) {
	t.Helper()
	ns, err := netns.New(fmt.Sprintf("fllink%d-%d", os.Getpid(), spaces.Add(1)))
	if err != nil {
		t.Fatalf("this test needs root, to make network namespaces: %v", err)
	}
	t.Cleanup(func() {
		ns.Close()
		if err := netns.Delete(ns.Name); err != nil {
			t.Error(err)
		}
	})
	c, err := Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	check(t, c.Up(1))
	return ns, c
}

func check(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func index(t *testing.T, c *Conn, name string) int {
	t.Helper()
	i, err := c.Index(name)
	check(t, err)
	return i
}

// talk sends a datagram from one namespace to an address of another and gives the source that arrived.
func talk(from, in *netns.Namespace, to string) (netip.Addr, error) {
	var server *net.UDPConn
	err := in.Do(func() (err error) {
		server, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
		return err
	})
	if err != nil {
		return netip.Addr{}, err
	}
	defer server.Close()
	err = from.Do(func() error {
		c, err := net.Dial("udp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("hello"))
		return err
	})
	if err != nil {
		return netip.Addr{}, err
	}
	server.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, source, err := server.ReadFromUDPAddrPort(make([]byte, 16))
	return source.Addr().Unmap(), err
}

func TestRoutedPairOverABridge(t *testing.T) {
	_, wire := space(t)
	bridge, err := wire.AddBridge("wire")
	check(t, err)
	var ns [2]*netns.Namespace
	var conns [2]*Conn
	macs := [2][6]byte{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	addrs := [2][2]netip.Addr{
		{netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("fd01::1")},
		{netip.MustParseAddr("172.30.9.9"), netip.MustParseAddr("2001:db8:9::9")},
	}
	for i := range 2 {
		ns[i], conns[i] = space(t)
		port, err := wire.AddVeth(End{Name: fmt.Sprint("port", i)}, End{Name: "eth0", MAC: macs[i][:]}, ns[i])
		check(t, err, wire.Attach(port, bridge))
		dev := index(t, conns[i], "eth0")
		check(t, conns[i].Up(dev))
		for k, a := range addrs[i] {
			check(t, conns[i].AddAddress(dev, netip.PrefixFrom(a, a.BitLen())))
			peer := addrs[1-i][k]
			check(t,
				conns[i].AddAddress(dev, netip.PrefixFrom(a, a.BitLen())), // again
				conns[i].PutNeighbour(Neighbour{Dev: dev, Addr: peer, MAC: macs[1-i]}),
				conns[i].PutRoute(Route{To: netip.PrefixFrom(peer, peer.BitLen()), Dev: dev, Source: a}),
				conns[i].PutRoute(Route{To: netip.PrefixFrom(peer, 0).Masked(), Via: peer, Dev: dev, Source: a}),
			)
		}
	}
	for i := range 2 {
		check(t, wire.Await(t.Context(), index(t, wire, fmt.Sprint("port", i))), conns[i].Await(t.Context(), index(t, conns[i], "eth0"), addrs[i][:]...))
	}
	for k, to := range addrs[1] {
		got, err := talk(ns[0], ns[1], netip.AddrPortFrom(to, 1000).String())
		if err != nil || got != addrs[0][k] {
			t.Errorf("to %s: %s, %v, want %s", to, got, err, addrs[0][k])
		}
	}
}

func TestRouteIsReplacedAndDeleted(t *testing.T) {
	ns, c := space(t)
	other, o := space(t)
	dev, err := c.AddVeth(End{Name: "eth0"}, End{Name: "eth0"}, other)
	check(t, err, o.Up(index(t, o, "eth0")))
	for _, f := range []struct{ a, b, to string }{{"10.0.0.1", "10.0.0.2", "10.9.0.0/16"}, {"fd00::1", "fd00::2", "fd09::/64"}} {
		a, b, to := netip.MustParseAddr(f.a), netip.MustParseAddr(f.b), netip.MustParsePrefix(f.to)
		for _, x := range []netip.Addr{a, b} {
			check(t, c.AddAddress(dev, netip.PrefixFrom(x, x.BitLen())))
		}
		local := func() string { // the source of a packet to the prefix
			var local string
			ns.Do(func() error {
				conn, err := net.Dial("udp", netip.AddrPortFrom(to.Addr().Next(), 1).String())
				if err != nil {
					local = err.Error()
					return nil
				}
				defer conn.Close()
				local = conn.LocalAddr().(*net.UDPAddr).IP.String()
				return nil
			})
			return local
		}
		r := Route{To: to, Dev: dev, Source: a}
		check(t, c.PutRoute(r))
		if got := local(); got != f.a {
			t.Errorf("first route: from %s", got)
		}
		for _, next := range []Route{
			{To: to, Dev: dev, Source: b},
			{To: to, Dev: dev, Source: b, Via: netip.PrefixFrom(b, b.BitLen()).Addr().Next()},
			{To: to, Dev: dev, Source: b},
		} {
			r = next
			check(t, c.PutRoute(r))
			if got := local(); got != f.b {
				t.Errorf("route %+v: from %s", r, got)
			}
		}
		check(t, c.DeleteRoute(r), c.DeleteRoute(r)) // and again
		if got := local(); !strings.Contains(got, "unreachable") {
			t.Errorf("no route: from %s", got)
		}
		n := Neighbour{Dev: dev, Addr: b.Next(), MAC: [6]byte{2}}
		check(t, c.PutNeighbour(n), c.PutNeighbour(n), c.DeleteNeighbour(n), c.DeleteNeighbour(n))
	}
	check(t, c.Delete(dev), c.Delete(dev))
	if _, err := o.Index("eth0"); err == nil {
		t.Error("the other end is still there")
	}
}

func TestGSO(t *testing.T) {
	ns, c := space(t)
	dev, err := c.AddVeth(End{Name: "near"}, End{Name: "far"}, ns)
	check(t, err, c.SetGSO(dev, 196608))
	if got, err := c.GSO(dev); err != nil || got != 196608 {
		t.Errorf("pieces have up to %d bytes, %v: this test needs a kernel with BIG TCP for IPv4 (6.3)", got, err)
	}
	if err := c.SetGSO(dev, 1<<30); !errors.Is(err, unix.EINVAL) {
		t.Errorf("pieces of a GiB: %v", err)
	}
}

func TestAwait(t *testing.T) {
	_, c := space(t)
	other, o := space(t)
	near, err := c.AddVeth(End{Name: "eth0"}, End{Name: "eth0"}, other)
	check(t, err)
	far := index(t, o, "eth0")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Await(ctx, near); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an interface whose peer is down: %v", err)
	}
	check(t, o.Up(far), c.Await(t.Context(), near), o.Await(t.Context(), far))
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	a := netip.MustParseAddr("fd00::1")
	if err := c.Await(ctx, near, a); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an address that isn't there: %v", err)
	}
	check(t, c.AddAddress(near, netip.PrefixFrom(a, 64)), c.Await(t.Context(), near, a))
	if err := c.Await(t.Context(), 99); err == nil {
		t.Error("an interface that isn't there is ready")
	}
}

func TestErrorsSayWhatWasTried(t *testing.T) {
	ns, c := space(t)
	for _, e := range []struct {
		err  error
		want []string
	}{
		{c.Up(99), []string{"99", "up"}},
		{c.AddAddress(99, netip.MustParsePrefix("10.0.0.1/32")), []string{"10.0.0.1/32", "99"}},
		{c.PutRoute(Route{To: netip.MustParsePrefix("10.0.0.0/8"), Dev: 99}), []string{"10.0.0.0/8"}},
		{c.PutNeighbour(Neighbour{Dev: 99, Addr: netip.MustParseAddr("10.0.0.1")}), []string{"10.0.0.1", "99"}},
		{second(c.AddVeth(End{Name: "lo"}, End{Name: "x"}, ns)), []string{"veth lo", "peer x", ns.Name}},
		{second(c.AddBridge("lo")), []string{"bridge lo"}},
		{second(c.Index("none")), []string{"none"}},
		{c.Attach(1, 99), []string{"1", "99"}},
		{Set(ns, Setting{"ipv4/none", "1"}), []string{"net/ipv4/none", ns.Name}},
		{Set(ns, Setting{"ipv4/ip_forward", "many"}), []string{"net/ipv4/ip_forward", "many"}},
	} {
		for _, w := range e.want {
			if e.err == nil || !strings.Contains(e.err.Error(), w) {
				t.Errorf("%v, want it to name %s", e.err, w)
			}
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestSetIsTheNamespacesOwn(t *testing.T) {
	ns, _ := space(t)
	other, _ := space(t)
	check(t, Set(ns, Setting{"ipv4/ip_forward", "1"}, Setting{"-no/such", "1"}), Set(other, Setting{"ipv4/ip_forward", "0"}))
	for _, c := range []struct {
		ns   *netns.Namespace
		want string
	}{{ns, "1\n"}, {other, "0\n"}} {
		c.ns.Do(func() error {
			if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward"); string(b) != c.want {
				t.Errorf("%s: %q, %v, want %q", c.ns.Name, b, err, c.want)
			}
			return nil
		})
	}
}

func TestAddressIsUsableAtOnce(t *testing.T) {
	ns, c := space(t)
	other, _ := space(t)
	dev, err := c.AddVeth(End{Name: strings.Repeat("x", MaxName)}, End{Name: "eth0"}, other)
	check(t, err, c.AddAddress(dev, netip.MustParsePrefix("fd00::1/128")))
	err = ns.Do(func() error { // a tentative address can't be bound to
		s, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		return unix.Bind(s, &unix.SockaddrInet6{Addr: netip.MustParseAddr("fd00::1").As16()})
	})
	check(t, err)
}
