package route

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/sandbox/echo"
)

// ip runs ip-route(8)'s program in a node's namespace.
func (c *cluster) ip(n *node, args ...string) {
	c.Helper()
	c.command(n, "ip", args...)
}

func (c *cluster) command(n *node, program string, args ...string) {
	c.Helper()
	c.must(n.ns.Do(func() error {
		out, err := exec.Command(program, args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s %v: %w: %s", program, args, err, out)
		}
		return nil
	}))
}

func TestPodsReachEachOther(t *testing.T) { reachEachOther(newCluster(t)) }

func reachEachOther(c *cluster) {
	for _, n := range c.nodes {
		c.holds(n)
	}
	c.connected()
	for _, o := range []resolve.Overlay{resolve.Always, resolve.Subnets} {
		c.switchTo(o)
		for _, n := range c.nodes {
			c.holds(n)
		}
		c.connected()
	}
}

// TestAddressesWithoutAPodAreUnreachable has packets for addresses of no pod rejected by the node that has their range,
// at once: they take no default route, by which they would come back until they have no hop left.
func TestAddressesWithoutAPodAreUnreachable(t *testing.T) {
	c := newCluster(t)
	a := c.nodes["a"]
	begin := time.Now()
	for _, n := range c.nodes {
		for i, own := range n.pod {
			b := own.AsSlice()
			b[len(b)-1] = 0x99
			to, _ := netip.AddrFromSlice(b)
			_, err := c.request(a.podNS, served[0], to, 0, 10*time.Second)
			if !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.ENETUNREACH) {
				t.Errorf("%s: %v", to, err)
			}
			if e, err := c.rejected(a.podNS, to, 1, nil); err != nil || e.kind != unreachable[i] || !n.sends(e.by, i) {
				t.Errorf("%s: %+v, %v; want node %s to say that it is unreachable", to, e, err, n.name)
			}
		}
	}
	for _, to := range []string{"10.244.1.99", "fd00:1::99"} {
		_, err := c.request(a.ns, served[0], netip.MustParseAddr(to), 0, 10*time.Second)
		if !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("from the node to %s: %v", to, err)
		}
	}
	if elapsed := time.Since(begin); elapsed > 8*time.Second {
		t.Errorf("rejections lasted %s", elapsed)
	}
}

// TestTooLongPacketsAreReported sends packets that no node may cut, in both directions over each way: the longest ones
// arrive, and of those with a byte more the sender is told, by its own node where the way is too narrow and by the far
// one where the last hop is, so that TCP goes on.
func TestTooLongPacketsAreReported(t *testing.T) {
	const wide, narrow, last = 1500, pathMTU, 1400
	c := newCluster(t)
	for _, pair := range [][2]string{{"a", "b"}, {"b", "a"}, {"a", "c"}, {"c", "a"}} {
		from, to := c.nodes[pair[0]], c.nodes[pair[1]]
		uplink := narrow // of nodes on one link; through the tunnel, its device is as narrow
		if pair[0] == "c" || pair[1] == "c" {
			uplink = wide
		}
		setMTU := func(n *node, pod int) {
			c.shell(n.ns, fmt.Sprintf("ip link set eth0 mtu %d; ip link set pod mtu %d; ip -n %s link set eth0 mtu %d", uplink,
				pod, n.podNS.Name, pod))
		}
		setMTU(from, wide)
		setMTU(to, wide)
		for i, a := range to.pod {
			c.flushPaths(from.podNS)
			c.flushPaths(to.podNS)
			if _, err := c.request(from.podNS, served[0], a, echo.MaxSize, 10*time.Second); err != nil {
				t.Errorf("TCP from %s to %s: %v", from.name, a, err)
			}
			for ns, peer := range map[*netns.Namespace]netip.Addr{from.podNS: a, to.podNS: from.pod[i]} {
				if mtu := c.pathTo(ns, peer); mtu != narrow {
					t.Errorf("TCP between %s and %s: packets to %s may have %d bytes, want %d", from.name, a, peer, mtu, narrow)
				}
			}
			c.longest(from, to, i, narrow, from)
		}
		setMTU(to, last)
		for i := range to.pod {
			c.longest(from, to, i, last, to)
		}
	}
}

// flushPaths has a network namespace forget the MTUs of paths.
func (c *cluster) flushPaths(ns *netns.Namespace) {
	c.shell(ns, "ip route flush cache; ip -6 route flush cache")
}

// pathTo returns the longest packet that a namespace sends to an address, as it was told; 0: as long as its device has.
func (c *cluster) pathTo(ns *netns.Namespace, a netip.Addr) (mtu int) {
	c.Helper()
	c.must(ns.Do(func() error {
		out, err := exec.Command("ip", "route", "get", a.String()).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		fields := strings.Fields(string(out))
		if i := slices.Index(fields, "mtu"); i >= 0 {
			mtu, err = strconv.Atoi(fields[i+1])
		}
		return err
	}))
	return mtu
}

// longest checks that packets of so many bytes between two pods arrive, and that a node says so of longer ones.
func (c *cluster) longest(from, to *node, family, bytes int, says *node) {
	c.Helper()
	a, headers := to.pod[family], []int{20 + 8, 40 + 8}[family]
	if err := c.arrives(from.podNS, to.podNS, a, bytes-headers); err != nil {
		c.Errorf("%d bytes from %s to %s: %v", bytes, from.name, a, err)
	}
	e, err := c.rejected(from.podNS, a, bytes-headers+1, uncut)
	if err != nil || e.errno != unix.EMSGSIZE || e.info != bytes || !says.sends(e.by, family) {
		c.Errorf("%d bytes from %s to %s: %+v, %v; want node %s to say that %d fit", bytes+1, from.name, a, e, err, says.name,
			bytes)
	}
}

// arrives returns an error unless a datagram of so many bytes, which no node may cut, arrives.
func (c *cluster) arrives(from, to *netns.Namespace, a netip.Addr, size int) error {
	var server *net.UDPConn
	err := to.Do(func() (err error) {
		server, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, port)))
		return err
	})
	if err != nil {
		return err
	}
	defer server.Close()
	err = from.Do(func() error {
		fd, err := send(a, size, uncut)
		return errors.Join(err, unix.Close(fd))
	})
	if err != nil {
		return err
	}
	server.SetReadDeadline(time.Now().Add(10 * time.Second))
	n, err := server.Read(make([]byte, 2*size))
	if err == nil && n != size {
		err = fmt.Errorf("%d bytes arrive of %d", n, size)
	}
	return err
}

// TestReversePathFilters has pods and nodes reach each other whatever the nodes' reverse path filters are.
func TestReversePathFilters(t *testing.T) {
	c := newCluster(t)
	for _, value := range []string{"1", "2"} {
		for _, n := range c.nodes {
			c.must(sysctl.Set(n.ns, sysctl.Setting{Name: "net/ipv4/conf/all/rp_filter", Value: value},
				sysctl.Setting{Name: "net/ipv4/conf/default/rp_filter", Value: value}))
		}
		for _, o := range []resolve.Overlay{resolve.Always, resolve.Subnets} {
			c.switchTo(o)
			c.connected()
		}
	}
}

// TestForwardingComesBack has another program switch forwarding off, of all devices and of single ones.
func TestForwardingComesBack(t *testing.T) {
	c := newCluster(t)
	for _, off := range []struct{ what, script string }{ // what others repair, too, comes later
		{"the uplink's", "sysctl -qw net.ipv4.conf.eth0.forwarding=0"},
		{"the tunnel's", "sysctl -qw net.ipv4.conf.fl-vxlan.forwarding=0"},
		{"IPv4", "sysctl -qw net.ipv4.ip_forward=0"},
		{"IPv6", "sysctl -qw net.ipv6.conf.all.forwarding=0"},
		{"of devices to come", "sysctl -qw net.ipv4.conf.default.forwarding=0; ip link del fl-vxlan"},
		{"of all and of a new", "sysctl -qw net.ipv4.ip_forward=0; ip link del fl-vxlan"},
	} {
		t.Run(off.what, func(t *testing.T) {
			d := *c
			d.T = t
			for _, n := range []*node{c.nodes["a"], c.nodes["c"]} { // c reaches others by the tunnel alone
				d.shell(n.ns, off.script)
				d.repaired(n)
				d.connected()
			}
		})
	}
}

// TestUnboundSocketsReplyFromTheirAddress has a pod send to another node's own address, where a socket that is bound to
// no address replies: by the source that the kernel prefers, which must be the one that was sent to.
func TestUnboundSocketsReplyFromTheirAddress(t *testing.T) {
	c := newCluster(t)
	from := c.nodes["a"].podNS
	for _, to := range []*node{c.nodes["b"], c.nodes["c"]} {
		for i, a := range to.wire {
			network := []string{"udp4", "udp6"}[i]
			var server, client *net.UDPConn
			c.must(to.ns.Do(func() (err error) {
				server, err = net.ListenUDP(network, &net.UDPAddr{Port: port})
				return err
			}))
			c.must(from.Do(func() (err error) {
				client, err = net.DialUDP(network, nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(a.Addr(), port)))
				return err
			}))
			_, err := client.Write([]byte("x"))
			c.must(errors.Join(err, server.SetDeadline(time.Now().Add(10*time.Second)),
				client.SetDeadline(time.Now().Add(10*time.Second))))
			b := make([]byte, 1)
			_, who, err := server.ReadFrom(b)
			c.must(err)
			_, err = server.WriteTo(b, who)
			c.must(err)
			if _, err := client.Read(b); err != nil {
				t.Errorf("%s replies from another address: %v", a.Addr(), err)
			}
			c.must(errors.Join(server.Close(), client.Close()))
		}
	}
}

// flow is traffic that goes on until it is stopped.
type flow struct {
	name string
	done atomic.Int32 // requests that were replied to
}

// traffic has node a's pod send requests to the other pods, over one connection each, and over a new one for each
// request. None may fail.
func (c *cluster) traffic(ctx context.Context) (flows []*flow, wait func()) {
	var running sync.WaitGroup
	from := c.nodes["a"].podNS
	for _, to := range []*node{c.nodes["b"], c.nodes["c"]} {
		for _, a := range to.pod {
			at := netip.AddrPortFrom(a, served[0].Number)
			for _, fresh := range []bool{false, true} {
				f := &flow{name: fmt.Sprintf("to %s, each on its own: %t", a, fresh)}
				flows = append(flows, f)
				running.Go(func() {
					if err := f.run(ctx, from, at, fresh); err != nil {
						c.Errorf("%s: after %d requests: %v", f.name, f.done.Load(), err)
					}
				})
			}
		}
	}
	return flows, running.Wait
}

// run sends requests until ctx ends.
func (f *flow) run(ctx context.Context, from *netns.Namespace, to netip.AddrPort, fresh bool) error {
	const patience = 15 * time.Second
	var held *echo.Flow
	for ctx.Err() == nil {
		once, stop := context.WithTimeout(context.Background(), patience)
		err := from.Do(func() (err error) {
			if held == nil {
				held, err = echo.Open(once, model.TCP, to, echo.Options{})
			}
			if err == nil {
				_, err = held.Request(once)
			}
			return err
		})
		stop()
		if err != nil {
			return err
		}
		if f.done.Add(1); fresh {
			held.Close()
			held = nil
		}
	}
	if held != nil {
		return held.Close()
	}
	return nil
}

// TestOverlaySwitchesUnderTraffic has the nodes change what they reach through the tunnel while connections are open
// and new ones are made, between nodes on one link and on others, by routers that know the nodes' ranges: one after the
// other where the tunnel stays, and all at once where it goes.
func TestOverlaySwitchesUnderTraffic(t *testing.T) {
	c := newCluster(t)
	for _, n := range c.nodes {
		for i, r := range n.ranges {
			c.shell(c.router, fmt.Sprintf("ip route add %s via %s", r, n.wire[i].Addr()))
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	flows, wait := c.traffic(ctx)
	defer wait()
	defer stop()
	goOn := func(what string) {
		t.Helper()
		begin := time.Now()
		for _, f := range flows {
			for was := f.done.Load(); f.done.Load() < was+3; time.Sleep(time.Millisecond) {
				if t.Failed() || time.Since(begin) > 30*time.Second {
					t.Fatalf("%s: traffic %s stopped after %d requests", what, f.name, was)
				}
			}
		}
		t.Logf("%s: goes on within %s", what, time.Since(begin).Round(time.Millisecond))
	}
	goOn("Subnets")
	for _, o := range []resolve.Overlay{resolve.Always, resolve.Subnets, resolve.Always} {
		for _, name := range []string{"a", "b", "c"} {
			c.switchTo(o, name)
			goOn(fmt.Sprintf("%s on %s", o, name))
		}
	}
	for _, o := range []resolve.Overlay{resolve.Never, resolve.Always, resolve.Never, resolve.Subnets} {
		c.switchTo(o)
		goOn(string(o))
	}
}

func TestLongestPacketsPassTheTunnel(t *testing.T) {
	c := newCluster(t)
	a, b := c.nodes["a"], c.nodes["c"]
	for i, size := range []int{1450 - 28, 1450 - 48, 4000} { // 4000: fragments, and segments of TCP
		for _, p := range served {
			for f, to := range b.pod {
				if i < 2 && i != f {
					continue
				}
				if _, err := c.request(a.podNS, p, to, size, 10*time.Second); err != nil {
					t.Errorf("%d bytes to %s %s: %v", size, to, p, err)
				}
			}
		}
	}
}

func TestDriftIsRepaired(t *testing.T) {
	c := newCluster(t)
	a := c.nodes["a"]
	for name, broken := range map[string]func(){
		"device deleted":           func() { c.ip(a, "link", "del", Device) },
		"device down":              func() { c.ip(a, "link", "set", Device, "down") },
		"MAC changed":              func() { c.ip(a, "link", "set", Device, "address", "02:00:00:00:00:01") },
		"MTU changed":              func() { c.ip(a, "link", "set", Device, "mtu", "1300") },
		"forwarding entry deleted": func() { c.command(a, "bridge", "fdb", "del", "02:66:ac:10:00:03", "dev", Device) },
		"forwarding entry added": func() {
			c.command(a, "bridge", "fdb", "append", "02:66:ac:10:00:03", "dst", "1.2.3.4",
				"dev", Device)
		},
		"neighbours flushed":  func() { c.ip(a, "neigh", "flush", "dev", Device, "nud", "permanent") },
		"routes flushed":      func() { c.ip(a, "route", "flush", "proto", "250") },
		"IPv6 routes flushed": func() { c.ip(a, "-6", "route", "flush", "proto", "250") },
		"route replaced":      func() { c.ip(a, "route", "replace", "10.244.3.0/24", "via", "192.168.0.2") },
		"routes for pods flushed": func() {
			c.ip(a, "route", "flush", "table", "4194304250")
			c.ip(a, "-6", "route", "flush", "table", "4194304250")
		},
		"route for pods replaced": func() {
			c.ip(a, "route", "replace", "172.16.0.3", "via", "192.168.0.2", "table", "4194304250")
		},
		"rules deleted": func() {
			c.ip(a, "rule", "del", "pref", "250")
			c.ip(a, "-6", "rule", "del", "pref", "250")
		},
		"rules replaced": func() {
			c.ip(a, "rule", "del", "pref", "250")
			c.ip(a, "rule", "add", "from", "10.244.1.0/24", "lookup", "4194304250", "pref", "251", "proto", "250")
		},
		"another rule": func() {
			c.ip(a, "-6", "rule", "add", "from", "fd00:1::/64", "lookup", "4194304250", "pref", "249", "proto", "250")
		},
		"a rule of another range": func() {
			c.ip(a, "rule", "add", "from", "10.244.9.0/24", "lookup", "4194304250", "pref", "250", "proto", "250")
		},
		"own address deleted": func() { c.ip(a, "addr", "flush", "dev", Device) },
		"another kind of device": func() {
			c.command(a, "sh", "-c", "until ip link add fl-vxlan type bridge; do ip link del fl-vxlan; done")
		},
		"another VNI": func() {
			c.command(a, "sh", "-c", "until ip link add fl-vxlan type vxlan id 9 dstport 4789; do ip link del fl-vxlan; done")
		},
		"learning on": func() { c.ip(a, "link", "set", Device, "type", "vxlan", "learning") },
		"the uplink down and up": func() {
			c.ip(a, "link", "set", "eth0", "down")
			c.ip(a, "link", "set", "eth0",
				"up")
			c.ip(a, "addr", "add", "fd99::1/64", "dev", "eth0", "nodad")
		},
		"the uplink's address flaps": func() {
			c.ip(a, "addr", "del", "192.168.0.1/24", "dev", "eth0")
			c.ip(a, "addr",
				"add", "192.168.0.1/24", "dev", "eth0")
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := *c
			d.T = t
			broken()
			d.repaired(a)
		})
	}
}

func TestNodesComeGoAndMove(t *testing.T) {
	c := newCluster(t)
	a, b, third := c.nodes["a"], c.nodes["b"], c.nodes["c"]
	replies := func(want string) { // who replies at the addresses of b's pod
		t.Helper()
		for _, to := range b.pod {
			wait := 5 * time.Second
			if want == "" {
				wait = 300 * time.Millisecond
			}
			r, err := c.reply(a.podNS, served[0], to, 0, wait)
			if (err == nil) != (want != "") || r.Pod != want {
				t.Errorf("%s: %q replies, %v; want %q", to, r.Pod, err, want)
			}
		}
	}
	for _, address := range b.pod { // c's pod has them too, for when c has b's range
		c.shell(third.podNS, fmt.Sprintf("ip address add %s dev eth0 nodad", host(address)))
		c.shell(third.ns, fmt.Sprintf("ip route add %s dev pod", host(address)))
	}
	replies("pod/b")
	c.apply(a, change("b", nil))
	c.apply(a, change("c", nil))
	c.sync()
	c.holds(a)
	replies("")
	// Node d has c's address, and the range of b.
	o := third.object()
	o.Name, o.Spec.PodCIDRs = "d", b.object().Spec.PodCIDRs
	c.apply(a, change("d", o))
	c.sync()
	c.holds(a)
	if r := a.resolver.Network().Route(b.pod[0]); r == nil || r.Node != "d" || r.Hop != model.Tunneled {
		t.Errorf("%v", r)
	}
	replies("pod/c")
	c.apply(a, change("d", nil), change("b", b.object()), change("c", third.object()))
	c.sync()
	c.holds(a)
	replies("pod/b")
	for _, address := range b.pod {
		c.shell(third.ns, fmt.Sprintf("ip route del %s dev pod", host(address)))
		c.shell(third.podNS, fmt.Sprintf("ip address del %s dev eth0", host(address)))
	}
	c.connected()
}

func TestTunnelIsReplaced(t *testing.T) {
	c := newCluster(t)
	for _, n := range c.nodes {
		old := n.resolver.Network().Parts()
		n.resolver = resolve.New(resolve.Config{Node: n.name, VNI: 99, Port: 8472,
			Devices: []resolve.Device{{Name: "eth0", MTU: 1500, Prefixes: n.wire}}})
		n.loop.Change(n.resolver.Apply(c.all()).Put, old)
	}
	for _, n := range c.nodes {
		c.repaired(n)
	}
	c.connected()
}

func TestCleanLeavesNothing(t *testing.T) {
	c := newCluster(t)
	n := c.nodes["a"]
	var other *Plane
	c.must(n.ns.Do(func() (err error) {
		other, err = New()
		return err
	}))
	defer other.Close()
	c.must(other.Clean(t.Context()))
	c.repaired(n) // the loop is another run's
	d := n.resolver.Network()
	n.loop.Change(nil, d.Parts())
	c.must(n.loop.Sync(t.Context()))
	c.ip(n, "rule", "add", "from", "10.244.1.0/24", "lookup", "7", "pref", "250") // another owner's
	c.must(errors.Join(other.Clean(t.Context()), other.Clean(t.Context())))
	c.ip(n, "rule", "del", "pref", "250")
	facts, err := other.Read(t.Context())
	c.must(err)
	for _, f := range facts {
		t.Errorf("%s is left", f.Key)
	}
}

// A node forwards IPv6 for another program, and its pods have IPv4 alone: what is read is what was rendered.
func TestForwardingOfAnotherFamilyIsNoDrift(t *testing.T) {
	ns := netnstest.New(t)
	for _, value := range []string{"0", "1"} {
		err := sysctl.Set(ns, sysctl.Setting{Name: settings[0], Value: value}, sysctl.Setting{Name: settings[1], Value: "1"})
		if err != nil {
			t.Fatal(err)
		}
		err = ns.Do(func() error {
			p, err := New()
			if err != nil {
				return err
			}
			defer p.Close()
			want := p.Render(&model.Network{Ranges: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}})
			if err := p.Write(t.Context(), want, nil); err != nil {
				return err
			}
			got, err := p.Read(t.Context())
			if !maps.Equal(byKey(want), byKey(got)) {
				t.Errorf("ip_forward was %s: got %v, want %v", value, byKey(got), byKey(want))
			}
			return errors.Join(err, p.Clean(t.Context()))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func byKey(facts []Fact) map[Key]Value {
	m := map[Key]Value{}
	for _, f := range facts {
		m[f.Key] = f.Value
	}
	return m
}

func TestRefusedFactsAreNamed(t *testing.T) {
	netnstest.With(t, New, func(p *Plane) {
		via := netip.MustParseAddr("192.168.0.2")
		good := Fact{Key: Key{Kind: KindRoute, To: netip.MustParsePrefix("10.244.1.0/24")}, Value: Value{Unreachable: true}}
		bad := Fact{Key: Key{Kind: KindRoute, To: netip.MustParsePrefix("10.244.2.0/24")}, Value: Value{Device: "eth9",
			Via: via}}
		down := Fact{Key: Key{Kind: KindRoute, To: netip.MustParsePrefix("10.244.3.0/24")}, Value: Value{Device: "lo",
			Via: via}}
		err := p.Write(t.Context(), []Fact{bad, good, down}, nil)
		refused, ok := errors.AsType[*dataplane.Refused[Key]](err)
		if !ok || len(refused.Facts) != 2 || !strings.Contains(refused.Facts[bad.Key].Error(), "no device eth9") ||
			!strings.Contains(refused.Facts[down.Key].Error(), "10.244.3.0/24") {
			t.Errorf("%v", err)
		}
		facts, err := p.Read(t.Context())
		if err != nil || len(facts) != 1 || !facts[0].Equal(good) {
			t.Errorf("%v, %v", facts, err)
		}
	})
}

// processorTime returns what this process has used so far.
func processorTime() time.Duration {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkNodes5000 is aim N10: cold, and one node's change.
func BenchmarkNodes5000(b *testing.B) {
	runtime.LockOSThread() // never unlocked: the namespace ends with the thread
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		b.Fatal(err)
	}
	if out, err := exec.Command("sh", "-c", "ip link set lo up; ip link add eth0 type bridge; ip addr add "+
		"192.168.0.1/16 dev eth0; "+
		"ip link set eth0 up").CombinedOutput(); err != nil {
		b.Fatal(err, string(out))
	}
	p, err := New()
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	own := &model.Network{Node: "a", MTU: 1450, Ranges: prefixesOf("10.0.0.0/24"), Tunnel: &model.Tunnel{VNI: 7,
		Port:  4789,
		Local: netip.MustParseAddr("192.168.0.1"), MAC: [6]byte{2, 0x66, 1}, Uplink: "eth0", MTU: 1450,
		Own: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}}
	facts := p.Render(own)
	if err := p.Write(b.Context(), facts, nil); err != nil {
		b.Fatal(err)
	}
	var routes []Fact
	for i := range 5000 {
		to := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(1 + i>>8), byte(i), 0}), 24)
		via := netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)})
		routes = append(routes, p.Render(&model.Route{To: to, Hop: model.Tunneled, Via: via, Gateway: to.Addr().Next(),
			MAC: resolve.MAC(via), Source: own.Tunnel.Own[0]})...)
	}
	b.Run("cold", func(b *testing.B) {
		var cpu time.Duration
		for b.Loop() {
			b.StopTimer()
			if err := p.Write(b.Context(), nil, routes); err != nil {
				b.Fatal(err)
			}
			before := processorTime()
			b.StartTimer()
			if err := p.Write(b.Context(), routes, nil); err != nil {
				b.Fatal(err)
			}
			cpu += processorTime() - before
		}
		b.ReportMetric(cpu.Seconds()*1000/float64(b.N), "cpu-ms/op")
	})
	b.Run("one", func(b *testing.B) { // a node goes, or comes
		for i := 0; b.Loop(); i++ {
			put, del := routes[:3], []Fact(nil)
			if i%2 == 0 {
				put, del = del, put
			}
			if err := p.Write(b.Context(), put, del); err != nil {
				b.Fatal(err)
			}
		}
		if err := p.Write(b.Context(), routes[:3], nil); err != nil {
			b.Fatal(err)
		}
	})
	b.Run("read", func(b *testing.B) {
		for b.Loop() {
			if l, err := p.Read(b.Context()); err != nil || len(l) < len(routes) {
				b.Fatal(len(l), err)
			}
		}
	})
}
