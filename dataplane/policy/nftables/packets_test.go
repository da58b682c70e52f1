package nftables

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/verdict"
)

// own are the addresses of node n1.
var own = addresses("192.168.0.1", "fd99::1")

// unlisted are addresses that the node has and its Node doesn't: what it sends from there is evaluated as others' is.
// The second and fourth are destinations that are translated later.
var unlisted = addresses("192.168.9.9", "10.96.0.1", "fd99:9::9", "fd96::1")

// behind are the addresses of the namespaces that node n1 forwards for: pods of its own, one that isn't known, and all
// that is beyond it.
var behind = [][]netip.Addr{
	addresses("10.0.1.2", "fd00:1::2"), // web
	addresses("10.0.1.3", "fd00:1::3"), // db
	addresses("10.0.1.4", "fd00:1::4"), // client
	addresses("10.0.1.77", "fd00:1::77"),
	addresses("10.0.2.2", "10.0.2.4", "fd00:2::4", "192.168.0.2", "fd99::2", "198.51.100.7", "2001:db8::7"),
}

var served = []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 81, Protocol: model.TCP},
	{Number: 8080, Protocol: model.TCP}, {Number: 53, Protocol: model.UDP}, {Number: 80, Protocol: model.UDP},
	{Number: 80, Protocol: model.SCTP}, {Number: 81, Protocol: model.SCTP}}

// network is node n1 and what it forwards for.
type network struct {
	*testing.T
	*Plane
	node *netns.Namespace
	of   map[netip.Addr]*netns.Namespace
	port atomic.Uint32 // of the next packet's source
}

func (n *network) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{T: t, of: map[netip.Addr]*netns.Namespace{}}
	n.port.Store(10000)
	local := slices.Concat(own, unlisted)
	n.node = n.namespace(local, sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"},
		sysctl.Setting{Name: "net/ipv6/conf/all/forwarding", Value: "1"})
	c, err := link.Dial(n.node)
	n.must(err)
	defer c.Close()
	for _, a := range local {
		n.must(c.AddAddress(1, netip.PrefixFrom(a, a.BitLen())))
	}
	for i, l := range behind {
		n.join(c, fmt.Sprint("pod", i), n.namespace(l), l)
	}
	n.serve(n.node)
	for _, l := range behind {
		n.serve(n.of[l[0]])
	}
	n.open()
	return n
}

// open opens the plane of the node.
func (n *network) open() {
	n.must(n.node.Do(func() (err error) {
		n.Plane, err = New()
		return err
	}))
	n.Cleanup(func() { n.Plane.Close() })
}

// namespace makes a namespace that has addresses.
func (n *network) namespace(l []netip.Addr, settings ...sysctl.Setting) *netns.Namespace {
	ns := netnstest.New(n)
	for _, s := range []string{"net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter",
		"net/ipv6/conf/all/accept_dad", "net/ipv6/conf/default/accept_dad"} {
		settings = append(settings, sysctl.Setting{Name: s, Value: "0"})
	}
	n.must(sysctl.Set(ns, settings...))
	c, err := link.Dial(ns)
	n.must(err)
	defer c.Close()
	n.must(c.Up(1))
	for _, a := range l {
		n.of[a] = ns
	}
	return ns
}

// join connects a namespace with the node.
func (n *network) join(node *link.Conn, name string, ns *netns.Namespace, l []netip.Addr) {
	n.Helper()
	router := netip.MustParseAddr("fe80::1")
	dev, err := node.AddVeth(link.End{Name: name}, link.End{Name: "eth0"}, ns)
	n.must(err)
	n.must(node.AddAddress(dev, netip.PrefixFrom(router, 64)))
	c, err := link.Dial(ns)
	n.must(err)
	defer c.Close()
	eth0, err := c.Index("eth0")
	n.must(errors.Join(err, c.Up(eth0)))
	var six []netip.Addr
	for _, a := range l {
		n.must(c.AddAddress(eth0, netip.PrefixFrom(a, a.BitLen())))
		n.must(route.PutIn(n.node, route.Route{To: netip.PrefixFrom(a, a.BitLen()), Dev: dev}))
		if a.Is6() {
			six = append(six, a)
		}
	}
	n.must(route.PutIn(ns, route.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Via: own[0], Dev: eth0},
		route.Route{To: netip.MustParsePrefix("::/0"), Via: router, Dev: eth0}))
	n.must(errors.Join(c.Await(n.Context(), eth0, six...), node.Await(n.Context(), dev, router)))
}

func (n *network) serve(ns *netns.Namespace) {
	n.must(ns.Do(func() error {
		s, err := echo.Serve("shop/web", served)
		if err == nil {
			n.Cleanup(func() { s.Close() })
		}
		return err
	}))
}

// packet is the first of a connection.
func (n *network) packet(src, dst netip.Addr, to echo.Port) verdict.Packet {
	return verdict.Packet{Src: netip.AddrPortFrom(src, uint16(n.port.Add(1))), Dst: netip.AddrPortFrom(dst, to.Number),
		Protocol: to.Protocol}
}

// passes sends a packet and reports whether it is answered. How long it waits depends on what is expected.
func (n *network) passes(p verdict.Packet, expected bool) bool {
	wait := 150 * time.Millisecond
	if expected {
		wait = 5 * time.Second
	}
	ctx, cancel := context.WithTimeout(n.Context(), wait)
	defer cancel()
	err := n.of[p.Src.Addr()].Do(func() error {
		_, err := echo.Request(ctx, p.Protocol, p.Dst, echo.Options{From: p.Src})
		return err
	})
	if err != nil && !errors.Is(err, echo.Timeout) && !errors.Is(err, unix.EPERM) { // what the sender hears of output
		n.Errorf("%v: %v", p, err)
	}
	return err == nil
}

// packets returns some of all packets between two ends of which node n1 sees at least one.
func (n *network) packets(r *rand.Rand, count int) (l []verdict.Packet) {
	ends := slices.Concat(own, unlisted)
	for _, b := range behind {
		ends = append(ends, b...)
	}
	for len(l) < count {
		src, dst := ends[r.IntN(len(ends))], ends[r.IntN(len(ends))]
		if n.of[src] != n.of[dst] && src.Is4() == dst.Is4() {
			l = append(l, n.packet(src, dst, served[r.IntN(len(served))]))
		}
	}
	return l
}

func TestPacketsAreTreatedAsVerdictSays(t *testing.T) {
	n := newNetwork(t)
	names, objects := worlds(t)
	r := rand.New(rand.NewPCG(1, 2))
	held := map[Key]Fact{}
	for _, name := range names {
		d := decide(objects[name])
		wanted := facts(t, n.Plane, d.parts())
		move(t, n.Plane, held, wanted)
		held = wanted
		var fates [2]atomic.Int32
		var wg sync.WaitGroup
		for _, p := range n.packets(r, 150) {
			wg.Go(func() {
				o := verdict.Policy(d.now, p)
				fates[o.Verdict].Add(1)
				if expected := o.Verdict == model.VerdictAccept; n.passes(p, expected) != expected {
					t.Errorf("%s: %v: not so: %s, %s", name, p, o.Verdict, o.Reason)
				}
			})
		}
		wg.Wait()
		t.Logf("%s: %d facts, %d packets accepted, %d dropped", name, len(wanted), fates[0].Load(), fates[1].Load())
	}
	n.must(n.Clean(t.Context()))
	if missing, extra := read(t, n.Plane, nil); len(missing)+len(extra) > 0 {
		t.Errorf("after clean: %v", extra)
	}
}
