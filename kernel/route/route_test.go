package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// space makes a namespace with its loopback up, and a connection to it, that go with the test.
func space(t *testing.T) (*netns.Namespace, *link.Conn) {
	t.Helper()
	ns := netnstest.New(t)
	c, err := link.Dial(ns)
	check(t, err)
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

func index(t *testing.T, c *link.Conn, name string) int {
	t.Helper()
	i, err := c.Index(name)
	check(t, err)
	return i
}

// talk sends a datagram from one namespace to an address of another and returns the source that arrived.
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
	var conns [2]*link.Conn
	macs := [2][6]byte{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	addrs := [2][2]netip.Addr{
		{netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("fd01::1")},
		{netip.MustParseAddr("172.30.9.9"), netip.MustParseAddr("2001:db8:9::9")},
	}
	for i := range 2 {
		ns[i], conns[i] = space(t)
		port, err := wire.AddVeth(link.End{Name: fmt.Sprint("port", i)}, link.End{Name: "eth0", MAC: macs[i][:]}, ns[i])
		check(t, err, wire.Attach(port, bridge))
		dev := index(t, conns[i], "eth0")
		check(t, conns[i].Up(dev))
		for k, a := range addrs[i] {
			check(t, conns[i].AddAddress(dev, netip.PrefixFrom(a, a.BitLen())))
			peer := addrs[1-i][k]
			check(t,
				conns[i].AddAddress(dev, netip.PrefixFrom(a, a.BitLen())), // again
				conns[i].PutNeighbour(link.Neighbour{Dev: dev, Addr: peer, MAC: macs[1-i]}),
				PutIn(ns[i], Route{To: netip.PrefixFrom(peer, peer.BitLen()), Dev: dev, Source: a}),
				PutIn(ns[i], Route{To: netip.PrefixFrom(peer, 0).Masked(), Via: peer, Dev: dev, Source: a}),
			)
		}
	}
	for i := range 2 {
		check(t, wire.Await(t.Context(), index(t, wire, fmt.Sprint("port", i))),
			conns[i].Await(t.Context(), index(t, conns[i], "eth0"), addrs[i][:]...))
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
	dev, err := c.AddVeth(link.End{Name: "eth0"}, link.End{Name: "eth0"}, other)
	check(t, err, o.Up(index(t, o, "eth0")))
	for _, f := range []struct{ a, b, to string }{{"10.0.0.1", "10.0.0.2", "10.9.0.0/16"},
		{"fd00::1", "fd00::2", "fd09::/64"}} {
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
		check(t, PutIn(ns, r))
		if got := local(); got != f.a {
			t.Errorf("first route: from %s", got)
		}
		for _, next := range []Route{
			{To: to, Dev: dev, Source: b},
			{To: to, Dev: dev, Source: b, Via: netip.PrefixFrom(b, b.BitLen()).Addr().Next()},
			{To: to, Dev: dev, Source: b},
		} {
			r = next
			check(t, PutIn(ns, r))
			if got := local(); got != f.b {
				t.Errorf("route %+v: from %s", r, got)
			}
		}
		check(t, DeleteIn(ns, r), DeleteIn(ns, r)) // and again
		if got := local(); !strings.Contains(got, "unreachable") {
			t.Errorf("no route: from %s", got)
		}
	}
	check(t, c.Delete(dev), c.Delete(dev))
	if _, err := o.Index("eth0"); err == nil {
		t.Error("the other end is still there")
	}
}

func TestErrorsNameTheRoute(t *testing.T) {
	ns := netnstest.New(t)
	err := PutIn(ns, Route{To: netip.MustParsePrefix("10.0.0.0/8"), Dev: 99})
	if err == nil || !strings.Contains(err.Error(), "10.0.0.0/8") {
		t.Errorf("%v, want it to name the prefix", err)
	}
}
