package ebpf_test

import (
	"context"
	"crypto/rand"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// Outside is a host with clients and, behind the same wire, the endpoint that serves them.
var outsideAddrs = []string{"192.0.2.7", "192.0.2.8", "10.244.0.9"}

// wired runs f in a node with a device to another host, which routes everything to the node, and the node to it.
func wired(t *testing.T, f func(o ebpf.Options, out *netns.Namespace)) {
	t.Helper()
	name := "fl-wire-" + rand.Text()[:8]
	out, err := netns.New(name)
	if err != nil {
		t.Fatalf("this test needs root: %v", err)
	}
	defer func() {
		if err := errors.Join(out.Close(), netns.Delete(name)); err != nil {
			t.Error(err)
		}
	}()
	inside(t, func(o ebpf.Options) {
		node, err := netns.Current()
		if err != nil {
			t.Fatal(err)
		}
		defer node.Close()
		plug(t, node, out)
		f(o, out)
	}, "192.0.2.1")
}

// plug joins a node and a host by a wire, and gives the host its addresses.
func plug(t *testing.T, node, out *netns.Namespace) {
	t.Helper()
	must := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	near, err := link.Dial(node)
	must(err)
	defer near.Close()
	far, err := link.Dial(out)
	must(err)
	defer far.Close()
	must(link.Set(node, link.Setting{Name: "ipv4/ip_forward", Value: "1"}))
	mac := [][6]byte{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	index, err := near.AddVeth(link.End{Name: "wire", MAC: mac[0][:]}, link.End{Name: "eth0", MAC: mac[1][:]}, out)
	must(err)
	eth0, err := far.Index("eth0")
	must(err, far.Up(1), far.Up(eth0))
	host := func(s string) netip.Prefix { return netip.PrefixFrom(netip.MustParseAddr(s), 32) }
	for _, a := range outsideAddrs {
		must(far.AddAddress(eth0, host(a)), near.PutRoute(link.Route{To: host(a), Dev: index, Source: host("192.0.2.1").Addr()}),
			near.PutNeighbour(link.Neighbour{Dev: index, Addr: host(a).Addr(), MAC: mac[1]}))
	}
	must(far.PutRoute(link.Route{To: host("192.0.2.1"), Dev: eth0, Source: host(outsideAddrs[0]).Addr()}),
		far.PutNeighbour(link.Neighbour{Dev: eth0, Addr: host("192.0.2.1").Addr(), MAC: mac[0]}))
	ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
	defer stop()
	must(near.Await(ctx, index), far.Await(ctx, eth0))
}

// nodePort gives the parts of a node port 30080 that leads to the endpoint outside, and hides everybody.
func nodePort(protocol model.Protocol) []model.Part {
	node := *theNode
	node.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	node.NodePorts = []model.Range{{First: netip.MustParseAddr("192.0.2.1"), Last: netip.MustParseAddr("192.0.2.1")}}
	pool := poolOf(uint64(protocol), false, protocol, 9)
	f := frontendOf("0.0.0.0:30080", pool)
	f.Hide = model.AllOrigins
	return []model.Part{&node, pool, f}
}

// asks asks the node port from an address outside.
func asks(t *testing.T, out *netns.Namespace, protocol model.Protocol, from string) echo.Answer {
	t.Helper()
	var a echo.Answer
	err := out.Do(func() (err error) {
		ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		a, err = echo.Ask(ctx, protocol, netip.MustParseAddrPort("192.0.2.1:30080"), echo.Options{From: netip.MustParseAddrPort(from)})
		return err
	})
	if err != nil {
		t.Errorf("from %s by %s: %v", from, protocol, err)
	}
	return a
}

// serveThere answers at the endpoint outside.
func serveThere(t *testing.T, out *netns.Namespace) {
	t.Helper()
	err := out.Do(func() error {
		s, err := echo.Serve("web", []echo.Port{{Number: 8080, Protocol: model.TCP}, {Number: 8080, Protocol: model.UDP}})
		if err == nil {
			t.Cleanup(func() { s.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Clients that have the same port are told apart behind the node's address.
func TestClientsOfOnePort(t *testing.T) {
	if err := bpf.ProbeDevices(); err != nil {
		t.Fatalf("this test needs programs at devices: %v", err)
	}
	wired(t, func(o ebpf.Options, out *netns.Namespace) {
		serveThere(t, out)
		p := opened(t, o)
		defer clean(t, p)
		for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
			change(t, p, nil, nodePort(protocol))
			first, second := asks(t, out, protocol, "192.0.2.7:5000").Client, asks(t, out, protocol, "192.0.2.8:5000").Client
			node := netip.MustParseAddr("192.0.2.1")
			if first.Addr() != node || second.Addr() != node || first == second {
				t.Errorf("%s: the endpoint saw %s and %s", protocol, first, second)
			}
			// The node itself has the port too, and asks the endpoint itself.
			who, err := ask(protocol, "10.244.0.9:8080", echo.Options{From: netip.MustParseAddrPort("192.0.2.1:5000")})
			if err != nil || who != "10.244.0.9" {
				t.Errorf("%s: the node is answered by %q: %v", protocol, who, err)
			}
		}
	})
}

// pins gives the names of links to devices that are pinned.
func pins(t *testing.T) map[string]bool {
	t.Helper()
	folder, _, err := bpf.Folder()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, pattern := range []string{"arrive-*", "leave-*"} {
		l, _ := filepath.Glob(filepath.Join(folder, "devices", pattern))
		for _, path := range l {
			names[filepath.Base(path)] = true
		}
	}
	return names
}

// await waits until what is pinned is as wanted.
func await(t *testing.T, what string, is func(map[string]bool) bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(pins(t)); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: pinned is %v", what, pins(t))
		}
	}
}

// watched has a plane watch until stop.
func watched(t *testing.T, p *ebpf.Plane) (signals <-chan struct{}, stop func()) {
	t.Helper()
	ctx, end := context.WithCancel(context.Background())
	signals, err := p.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return signals, func() {
		end()
		for range signals {
		}
	}
}

// Devices that come are served, those that go leave nothing, and a link that a stranger removes comes back.
func TestDevicesAreFollowed(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o)
		defer clean(t, p)
		change(t, p, nil, []model.Part{theNode})
		_, stop := watched(t, p)
		defer stop()
		if l := pins(t); len(l) != 1 || !l["leave-1"] {
			t.Errorf("at a lone loopback, pinned is %v", l)
		}
		ns, err := netns.Current()
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		c, err := link.Dial(ns)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		bridge, err := c.AddBridge("new")
		if err != nil {
			t.Fatal(err)
		}
		await(t, "a new device", func(l map[string]bool) bool { return len(l) == 3 })
		folder, _, _ := bpf.Folder()
		if err := os.Remove(filepath.Join(folder, "devices", "leave-1")); err != nil {
			t.Fatal(err)
		}
		await(t, "a link that was removed", func(l map[string]bool) bool { return l["leave-1"] })
		if err := c.Delete(bridge); err != nil {
			t.Fatal(err)
		}
		await(t, "a device that went", func(l map[string]bool) bool { return len(l) == 1 })

		programs := func() (l []string) {
			l, _ = filepath.Glob(filepath.Join(folder, "devices", "program-*"))
			return l
		}
		if l := programs(); len(l) != 2 {
			t.Errorf("where no device lacks a link-layer header, there are %v", l)
		}
		tun := addTUN(t)
		await(t, "a device without link-layer header", func(l map[string]bool) bool { return len(l) == 3 })
		if l := programs(); len(l) != 4 {
			t.Errorf("with such a device, there are %v", l)
		}
		if facts, err := p.Read(t.Context()); err != nil || len(facts) == 0 {
			t.Errorf("reading back: %d facts, %v", len(facts), err)
		}
		tun.Close()
		await(t, "a device that went", func(l map[string]bool) bool { return len(l) == 1 })
	})
}

// Programs that can't be loaded when a device without link-layer header comes are a fact that isn't as wanted, until they can.
func TestLateProgramsThatCannotBeLoaded(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o)
		defer clean(t, p)
		change(t, p, nil, []model.Part{theNode})
		signals, stop := watched(t, p)
		defer stop()
		folder, _, _ := bpf.Folder()
		maps, _ := filepath.Glob(filepath.Join(folder, "maps-*"))
		if len(maps) != 1 {
			t.Fatalf("maps are in %v", maps)
		}
		aside := filepath.Join(folder, "aside")
		if err := os.Rename(maps[0], aside); err != nil {
			t.Fatal(err)
		}
		defer addTUN(t).Close()
		<-signals
		if err := os.Rename(aside, maps[0]); err != nil {
			t.Fatal(err)
		}
		amiss := func() (l []ebpf.Fact) {
			facts, err := p.Read(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			wanted := render(p, theNode)
			return slices.DeleteFunc(facts, func(f ebpf.Fact) bool { return f.Key.Kind != ebpf.KindDevices || slices.Contains(wanted, f) })
		}
		if l := amiss(); len(l) != 1 && len(pins(t)) != 3 { // unless a later word of the device was heard once they could be loaded
			t.Fatalf("not as wanted is %v", l)
		}
		write(t, p, render(p, theNode), nil)
		if l := amiss(); len(l) != 0 {
			t.Errorf("once they could be loaded, not as wanted is %v", l)
		}
		if l := pins(t); len(l) != 3 {
			t.Errorf("once they could be loaded, pinned is %v", l)
		}
	})
}

// addTUN adds a device of packets without link-layer header to the calling thread's network namespace. It goes when it is closed.
func addTUN(t *testing.T) *os.File {
	t.Helper()
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		t.Fatalf("this test needs a TUN device: %v", err)
	}
	name, err := unix.NewIfreq("fltun")
	if err != nil {
		t.Fatal(err)
	}
	name.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(int(f.Fd()), unix.TUNSETIFF, name); err != nil {
		t.Fatalf("this test needs a TUN device: %v", err)
	}
	return f
}

// Clean leaves the loopback device's settings as they were, also where one was ours before.
func TestLoopbackIsAsBefore(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		ns, err := netns.Current()
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		get := func(name string) string {
			v, err := link.Get(ns, "ipv4/conf/lo/"+name)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		if err := link.Set(ns, link.Setting{Name: "ipv4/conf/lo/route_localnet", Value: "1"}); err != nil {
			t.Fatal(err)
		}
		p := opened(t, o)
		change(t, p, nil, []model.Part{theNode})
		if get("accept_local") != "1" || get("route_localnet") != "1" {
			t.Error("the node's own packets can't come in again")
		}
		clean(t, p)
		if get("accept_local") != "0" || get("route_localnet") != "1" {
			t.Errorf("left accept_local=%s route_localnet=%s", get("accept_local"), get("route_localnet"))
		}
	})
}
