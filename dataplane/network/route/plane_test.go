package route

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/network"
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

func TestAddressesWithoutAPodAreUnreachable(t *testing.T) {
	c := newCluster(t)
	begin := time.Now()
	for _, a := range []string{"10.244.2.99", "fd00:2::99", "10.244.3.99", "fd00:3::99"} {
		_, err := c.request(c.nodes["a"].podNS, served[0], netip.MustParseAddr(a), 0, 10*time.Second)
		if !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("%s: %v", a, err)
		}
	}
	if elapsed := time.Since(begin); elapsed > 8*time.Second {
		t.Errorf("rejections lasted %s", elapsed)
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
		"own address deleted": func() { c.ip(a, "addr", "flush", "dev", Device) },
		"another kind of device": func() {
			c.command(a, "sh", "-c", "until ip link add fl-vxlan type bridge; do ip link del fl-vxlan; done")
		},
		"another VNI": func() {
			c.command(a, "sh", "-c", "until ip link add fl-vxlan type vxlan id 9 dstport 4789; do ip link del fl-vxlan; done")
		},
		"learning on":         func() { c.ip(a, "link", "set", Device, "type", "vxlan", "learning") },
		"forwarding off":      func() { c.command(a, "sysctl", "-wq", "net.ipv4.ip_forward=0") },
		"IPv6 forwarding off": func() { c.command(a, "sysctl", "-wq", "net.ipv6.conf.all.forwarding=0") },
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
	c.apply(a, change("b", nil))
	c.apply(a, change("c", nil))
	c.sync()
	c.holds(a)
	// Node d has c's address, and the range of b.
	o := third.object()
	o.Name, o.Spec.PodCIDRs = "d", b.object().Spec.PodCIDRs
	c.apply(a, change("d", o))
	c.sync()
	c.holds(a)
	if r := a.resolver.Network().Route(b.pod[0]); r == nil || r.Node != "d" || r.Hop != model.Tunneled {
		t.Errorf("%v", r)
	}
	c.apply(a, change("d", nil), change("b", b.object()), change("c", third.object()))
	c.sync()
	c.holds(a)
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
	c.must(errors.Join(other.Clean(t.Context()), other.Clean(t.Context())))
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
	netnstest.Do(t, func() {
		p, err := New()
		if err != nil {
			t.Error(err)
			return
		}
		defer p.Close()
		via := netip.MustParseAddr("192.168.0.2")
		good := Fact{Key: Key{Kind: KindRoute, To: netip.MustParsePrefix("10.244.1.0/24")}, Value: Value{Unreachable: true}}
		bad := Fact{Key: Key{Kind: KindRoute, To: netip.MustParsePrefix("10.244.2.0/24")}, Value: Value{Device: "eth9",
			Via: via}}
		down := Fact{Key: Key{Kind: KindRoute, To: netip.MustParsePrefix("10.244.3.0/24")}, Value: Value{Device: "lo",
			Via: via}}
		err = p.Write(t.Context(), []Fact{bad, good, down}, nil)
		var refused *dataplane.Refused[Key]
		if !errors.As(err, &refused) || len(refused.Facts) != 2 || !strings.Contains(refused.Facts[bad.Key].Error(),
			"no device eth9") ||
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
