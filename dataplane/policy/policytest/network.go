// Package policytest tests policy engines: a node in network namespaces with what it forwards for, worlds of objects,
// and what they come to.
package policytest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/inet"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/verdict"
)

// Own are the addresses of node n1.
var Own = Addresses("192.168.0.1", "fd99::1")

// unlisted are addresses that the node has and its Node doesn't: what it sends from there is evaluated as others' is.
// The second and fourth are destinations that are translated later.
var unlisted = Addresses("192.168.9.9", "10.96.0.1", "fd99:9::9", "fd96::1")

// Behind are the addresses of the namespaces that node n1 forwards for: pods of its own, one that isn't known, and all
// that is beyond it.
var Behind = [][]netip.Addr{
	Addresses("10.0.1.2", "fd00:1::2"), // web
	Addresses("10.0.1.3", "fd00:1::3"), // db
	Addresses("10.0.1.4", "fd00:1::4"), // client
	Addresses("10.0.1.77", "fd00:1::77"),
	Addresses("10.0.2.2", "10.0.2.4", "fd00:2::4", "192.168.0.2", "fd99::2", "198.51.100.7", "2001:db8::7"),
}

// Served are the ports that every namespace answers at.
var Served = []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 81, Protocol: model.TCP},
	{Number: 8080, Protocol: model.TCP}, {Number: 53, Protocol: model.UDP}, {Number: 80, Protocol: model.UDP},
	{Number: 80, Protocol: model.SCTP}, {Number: 81, Protocol: model.SCTP}}

// Network is node n1 and what it forwards for.
type Network struct {
	testing.TB
	Node *netns.Namespace
	Of   map[netip.Addr]*netns.Namespace
	port atomic.Uint32 // of the next packet's source
}

// Must ends the test if there is an error.
func (n *Network) Must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// NewNetwork returns node n1 with what it forwards for.
func NewNetwork(t testing.TB) *Network {
	t.Helper()
	n := &Network{TB: t, Of: map[netip.Addr]*netns.Namespace{}}
	n.port.Store(10000)
	local := slices.Concat(Own, unlisted)
	n.Node = n.namespace(local, sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"},
		sysctl.Setting{Name: "net/ipv6/conf/all/forwarding", Value: "1"})
	c, err := link.Dial(n.Node)
	n.Must(err)
	defer c.Close()
	for _, a := range local {
		n.Must(c.AddAddress(1, netip.PrefixFrom(a, a.BitLen())))
	}
	for _, l := range Behind {
		n.join(c, Device(l[0]), n.namespace(l), l)
	}
	n.serve(n.Node)
	for _, l := range Behind {
		n.serve(n.Of[l[0]])
	}
	return n
}

// Bare returns a node without devices.
func Bare(t testing.TB) *Network {
	n := &Network{TB: t, Of: map[netip.Addr]*netns.Namespace{}}
	n.Node = n.namespace(nil)
	return n
}

// namespace makes a namespace that has addresses.
func (n *Network) namespace(l []netip.Addr, settings ...sysctl.Setting) *netns.Namespace {
	ns := netnstest.New(n)
	for _, s := range []string{"net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter",
		"net/ipv6/conf/all/accept_dad", "net/ipv6/conf/default/accept_dad"} {
		settings = append(settings, sysctl.Setting{Name: s, Value: "0"})
	}
	n.Must(sysctl.Set(ns, settings...))
	c, err := link.Dial(ns)
	n.Must(err)
	defer c.Close()
	n.Must(c.Up(1))
	for _, a := range l {
		n.Of[a] = ns
	}
	return ns
}

// join connects a namespace with the node.
func (n *Network) join(node *link.Conn, name string, ns *netns.Namespace, l []netip.Addr) {
	n.Helper()
	router := netip.MustParseAddr("fe80::1")
	dev, err := node.AddVeth(link.End{Name: name}, link.End{Name: "eth0"}, ns)
	n.Must(err)
	n.Must(node.AddAddress(dev, netip.PrefixFrom(router, 64)))
	c, err := link.Dial(ns)
	n.Must(err)
	defer c.Close()
	eth0, err := c.Index("eth0")
	n.Must(errors.Join(err, c.Up(eth0)))
	var six []netip.Addr
	for _, a := range l {
		n.Must(c.AddAddress(eth0, netip.PrefixFrom(a, a.BitLen())))
		n.Must(route.PutIn(n.Node, route.Route{To: netip.PrefixFrom(a, a.BitLen()), Dev: dev}))
		if a.Is6() {
			six = append(six, a)
		}
	}
	n.Must(route.PutIn(ns, route.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Via: Own[0], Dev: eth0},
		route.Route{To: netip.MustParsePrefix("::/0"), Via: router, Dev: eth0}))
	n.Must(errors.Join(c.Await(n.Context(), eth0, six...), node.Await(n.Context(), dev, router)))
}

func (n *Network) serve(ns *netns.Namespace) {
	n.Must(ns.Do(func() error {
		s, err := echo.Serve("shop/web", Served)
		if err == nil {
			n.Cleanup(func() { s.Close() })
		}
		return err
	}))
}

// Packet is the first of a connection.
func (n *Network) Packet(src, dst netip.Addr, to echo.Port) verdict.Packet {
	return verdict.Packet{Src: netip.AddrPortFrom(src, uint16(n.port.Add(1))), Dst: netip.AddrPortFrom(dst, to.Number),
		Protocol: to.Protocol, In: Device(src)}
}

// Device returns the name of the node's device by which packets of an address come in, "" for the node's own.
func Device(src netip.Addr) string {
	i := slices.IndexFunc(Behind, func(l []netip.Addr) bool { return slices.Contains(l, src) })
	if i < 0 {
		return ""
	}
	return fmt.Sprint("pod", i)
}

// Passes sends a packet and reports whether it is answered. How long it waits depends on what is expected.
func (n *Network) Passes(p verdict.Packet, expected bool) bool {
	wait := 150 * time.Millisecond
	if expected {
		wait = 5 * time.Second
	}
	ctx, cancel := context.WithTimeout(n.Context(), wait)
	defer cancel()
	err := n.Of[p.Src.Addr()].Do(func() error {
		_, err := echo.Request(ctx, p.Protocol, p.Dst, echo.Options{From: p.Src})
		return err
	})
	if err != nil && !errors.Is(err, echo.Timeout) && !errors.Is(err, unix.EPERM) { // what the sender hears of output
		n.Errorf("%v: %v", p, err)
	}
	return err == nil
}

// Packets returns some of all packets between two ends of which node n1 sees at least one.
func (n *Network) Packets(r *rand.Rand, count int) (l []verdict.Packet) {
	ends := slices.Concat(Own, unlisted)
	for _, b := range Behind {
		ends = append(ends, b...)
	}
	for len(l) < count {
		src, dst := ends[r.IntN(len(ends))], ends[r.IntN(len(ends))]
		if n.Of[src] != n.Of[dst] && src.Is4() == dst.Is4() {
			l = append(l, n.Packet(src, dst, Served[r.IntN(len(Served))]))
		}
	}
	return l
}

// Ping sends an echo request of an ID of its own and reports whether it is answered.
func (n *Network) Ping(src, dst netip.Addr, wait time.Duration) bool {
	ctx, cancel := context.WithTimeout(n.Context(), wait)
	defer cancel()
	err := n.Of[src].Do(func() error { return echo.Ping(ctx, dst, netip.AddrPortFrom(src, uint16(n.port.Add(1)))) })
	if err != nil && !errors.Is(err, echo.Timeout) && !errors.Is(err, unix.EPERM) {
		n.Error(err)
	}
	return err == nil
}

// Forge sends a packet to an address by the namespace of another one than its source's, which may drop it.
func (n *Network) Forge(by, src, dst netip.Addr) {
	n.Helper()
	err := n.Of[by].Do(func() error {
		level, option := unix.SOL_IP, unix.IP_TRANSPARENT
		if src.Is6() {
			level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
		}
		fd, err := unix.Socket(inet.Family(src), unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
			return err
		}
		if err := unix.Bind(fd, inet.Sockaddr(netip.AddrPortFrom(src, 0))); err != nil {
			return err
		}
		return unix.Sendto(fd, []byte("x"), 0, inet.Sockaddr(netip.AddrPortFrom(dst, 80)))
	})
	if !errors.Is(err, unix.EPERM) {
		n.Must(err)
	}
}
