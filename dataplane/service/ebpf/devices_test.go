package ebpf_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	source "fairlead.dev/fairlead/agent/link"
	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/sandbox/echo"
)

// Outside is a host with clients and, behind the same wire, the endpoint that serves them.
var outsideAddrs = []string{"192.0.2.7", "192.0.2.8", "10.244.0.9"}

// wired runs f in a node with a device to another host, which routes everything to the node, and the node to it.
func wired(t *testing.T, f func(o ebpf.Options, out *netns.Namespace)) {
	t.Helper()
	out := netnstest.New(t)
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

// plug joins a node and a host by a wire, and returns the host its addresses.
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
	must(sysctl.Set(node, sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"}))
	mac := [][6]byte{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	index, err := near.AddVeth(link.End{Name: "wire", MAC: mac[0][:]}, link.End{Name: "eth0", MAC: mac[1][:]}, out)
	must(err)
	eth0, err := far.Index("eth0")
	must(err, far.Up(1), far.Up(eth0))
	host := func(s string) netip.Prefix { return netip.PrefixFrom(netip.MustParseAddr(s), 32) }
	for _, a := range outsideAddrs {
		must(far.AddAddress(eth0, host(a)), route.PutIn(node,
			route.Route{To: host(a), Dev: index, Source: host("192.0.2.1").Addr()}),
			near.PutNeighbour(link.Neighbour{Dev: index, Addr: host(a).Addr(), MAC: mac[1]}))
	}
	must(route.PutIn(out, route.Route{To: host("192.0.2.1"), Dev: eth0, Source: host(outsideAddrs[0]).Addr()}),
		far.PutNeighbour(link.Neighbour{Dev: eth0, Addr: host("192.0.2.1").Addr(), MAC: mac[0]}))
	ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
	defer stop()
	must(near.Await(ctx, index), far.Await(ctx, eth0))
}

// nodePort returns the parts of a node port 30080 that leads to the endpoint outside, and masquerades all clients.
func nodePort(protocol model.Protocol) []model.ServicePart {
	node := copyOfNode()
	node.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	node.NodePorts = []model.Range{{First: netip.MustParseAddr("192.0.2.1"), Last: netip.MustParseAddr("192.0.2.1")}}
	pool := poolOf(uint64(protocol), false, protocol, 9)
	f := frontendOf("0.0.0.0:30080", pool)
	f.Masquerade = model.AllOrigins
	return []model.ServicePart{&node, pool, f}
}

// requests sends a request to the node port from an address outside.
func requests(t *testing.T, out *netns.Namespace, protocol model.Protocol, from string) echo.Reply {
	t.Helper()
	var a echo.Reply
	err := out.Do(func() (err error) {
		ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		a, err = echo.Request(
			ctx,
			protocol,
			netip.MustParseAddrPort("192.0.2.1:30080"),
			echo.Options{From: netip.MustParseAddrPort(from)},
		)
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
			first, second := requests(
				t,
				out,
				protocol,
				"192.0.2.7:5000",
			).Client, requests(
				t,
				out,
				protocol,
				"192.0.2.8:5000",
			).Client
			node := netip.MustParseAddr("192.0.2.1")
			if first.Addr() != node || second.Addr() != node || first == second {
				t.Errorf("%s: the endpoint saw %s and %s", protocol, first, second)
			}
			// The node itself has the port too, and asks the endpoint itself.
			who, err := request(protocol, "10.244.0.9:8080", echo.Options{From: netip.MustParseAddrPort("192.0.2.1:5000")})
			if err != nil || who != "10.244.0.9" {
				t.Errorf("%s: the node is answered by %q: %v", protocol, who, err)
			}
		}
	})
}

// pins returns the names of links to devices that are pinned.
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

// attach attaches the programs to devices that have come.
func attach(t *testing.T, p *ebpf.Plane) {
	t.Helper()
	others := func(f ebpf.Fact) bool { return f.Key.Kind != ebpf.KindAttachment }
	write(t, p, slices.DeleteFunc(render(p, theNode), others), nil)
}

// followed has a loop bring a plane to where it should be, and follow the devices of the calling thread's network
// namespace, until stop.
func followed(
	t testing.TB,
	p *ebpf.Plane,
	parts []model.ServicePart,
) (l *reconcile.Loop[model.ServicePart, ebpf.Key, string], stop func()) {
	t.Helper()
	links, err := source.Open()
	if err != nil {
		t.Fatal(err)
	}
	devices, _, err := links.Update()
	if err != nil {
		t.Fatal(err)
	}
	l = reconcile.New(p, reconcile.Options[model.ServicePart]{})
	ctx, end := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() { l.Run(ctx) })
	l.Change(slices.Concat(parts, devices), nil)
	ended.Go(func() { links.Run(ctx, l.Change, func(err error) { t.Error(err) }) })
	if err := l.Sync(ctx); err != nil {
		t.Error(err)
	}
	return l, func() {
		end()
		ended.Wait()
		links.Close()
	}
}

// Devices that come are served, those that go leave nothing, and a link that others remove comes back.
func TestDevicesAreFollowed(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o)
		defer clean(t, p)
		_, stop := followed(t, p, []model.ServicePart{theNode})
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
		folder, _, _ := bpf.Folder()
		programs := func() (l []string) {
			l, _ = filepath.Glob(filepath.Join(folder, "devices", "program-*"))
			return l
		}
		bridge, err := c.AddBridge("new")
		if err != nil {
			t.Fatal(err)
		}
		await(t, "a new device", func(l map[string]bool) bool { return len(l) == 3 })
		if err := os.Remove(filepath.Join(folder, "devices", "leave-1")); err != nil {
			t.Fatal(err)
		}
		await(t, "a link that was removed", func(l map[string]bool) bool { return l["leave-1"] })
		if err := c.Delete(bridge); err != nil {
			t.Fatal(err)
		}
		await(t, "a device that went", func(l map[string]bool) bool { return len(l) == 1 })
		if l := programs(); len(l) != 2 {
			t.Errorf("where no device lacks a link-layer header, there are %v", l)
		}
		tun := addTUN(t)
		await(t, "a device without link-layer header", func(l map[string]bool) bool { return len(l) == 3 })
		if l := programs(); len(l) != 4 {
			t.Errorf("with such a device, there are %v", l)
		}
		tun.Close()
		await(t, "a device that went", func(l map[string]bool) bool { return len(l) == 1 })
	})
}

// Programs that can't be loaded when a device without link-layer header comes, since the maps are gone, are loaded once
// the loop has made these anew.
func TestLateProgramsThatCannotBeLoaded(t *testing.T) {
	inside(t, func(o ebpf.Options) {
		p := opened(t, o)
		defer clean(t, p)
		_, stop := followed(t, p, []model.ServicePart{theNode})
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
		await(t, "once there are maps", func(l map[string]bool) bool { return len(l) == 3 })
		if err := os.RemoveAll(aside); err != nil {
			t.Fatal(err)
		}
	})
}

// addTUN adds a device of packets without link-layer header to the calling thread's network namespace. It goes when
// it is closed.
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
			v, err := sysctl.Get(ns, "net/ipv4/conf/lo/"+name)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		if err := sysctl.Set(ns, sysctl.Setting{Name: "net/ipv4/conf/lo/route_localnet", Value: "1"}); err != nil {
			t.Fatal(err)
		}
		p := opened(t, o)
		change(t, p, nil, []model.ServicePart{theNode})
		if get("accept_local") != "1" || get("route_localnet") != "1" {
			t.Error("the node's own packets can't come in again")
		}
		clean(t, p)
		if get("accept_local") != "0" || get("route_localnet") != "1" {
			t.Errorf("left accept_local=%s route_localnet=%s", get("accept_local"), get("route_localnet"))
		}
	})
}
