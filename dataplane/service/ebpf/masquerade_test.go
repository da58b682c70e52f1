package ebpf_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/dataplane/network/guard"
	"fairlead.dev/fairlead/dataplane/network/masquerade"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// Addresses outside of the cluster and the node's own, by family. What is beyond knows no way to pod a.
var (
	nodeAddrs   = map[bool]string{false: "192.168.9.1", true: "fd99::1"}
	beyondAddrs = map[bool]string{false: "203.0.113.9", true: "2001:db8::9"}
	exceptAddrs = map[bool]string{false: "172.16.0.9", true: "fd98::9"}
)

// outside is a node with pods that send out of the cluster by the device out.
type outside struct {
	*twoPods
	wire *netns.Namespace
}

// withOutside runs f in such a node.
func withOutside(t *testing.T, f func(*outside)) {
	t.Helper()
	withPodsOf(t, podsWorld{network: true}, func(w *twoPods) {
		o := &outside{twoPods: w, wire: netnstest.New(t)}
		node, err := netns.Current()
		if err != nil {
			t.Fatal(err)
		}
		defer node.Close()
		l, err := link.Dial(node)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if _, err := l.AddVeth(link.End{Name: "out"}, link.End{Name: "eth0"}, o.wire); err != nil {
			t.Fatal(err)
		}
		w.run(`ip link set out up && ip addr add 192.168.9.1/24 dev out && ip addr add fd99::1/64 dev out nodad
			ip route add default via 192.168.9.2 dev out && ip -6 route add default via fd99::2 dev out`)
		o.beyond(func() {
			w.run(`sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv4.conf.all.rp_filter=0
				ip link set lo up && ip link set eth0 up
				ip addr add 192.168.9.2/24 dev eth0 && ip addr add fd99::2/64 dev eth0 nodad
				for a in 203.0.113.9/32 172.16.0.9/32 2001:db8::9/128 fd98::9/128; do ip addr add $a dev lo; done
				ip route add 10.244.1.2 via 192.168.9.1 && ip -6 route add fd00:244::b via fd99::1`)
			s, err := echo.Serve("beyond", []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 53, Protocol: model.UDP}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Close() })
		})
		attach(t, w.plane)
		f(o)
	})
}

// beyond runs f outside of the cluster.
func (o *outside) beyond(f func()) {
	o.Helper()
	if err := o.wire.Do(func() error { f(); return nil }); err != nil {
		o.Fatal(err)
	}
}

// masquerades has the programs masquerade what pods send, as the pod network's plane does.
func (o *outside) masquerades() {
	o.Helper()
	p, err := masquerade.NewDevice()
	if err != nil {
		o.Fatal(err)
	}
	defer p.Close()
	facts := p.Render(&model.Network{Node: "a", Ranges: prefixes("10.244.1.0/24", "fd00:244::/64"),
		Masquerade: &model.Masquerade{Except: prefixes("172.16.0.0/12", "fd98::/16")}})
	if err := p.Write(o.Context(), facts, nil); err != nil {
		o.Fatal(err)
	}
}

func prefixes(l ...string) (out []netip.Prefix) {
	for _, s := range l {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// portOf returns the servers' port beyond.
func portOf(p model.Protocol) uint16 {
	return map[model.Protocol]uint16{model.TCP: 80, model.UDP: 53}[p]
}

// sends has a client in a pod send a request to an address, and returns which client the server saw.
func (o *outside) sends(pod string, p model.Protocol, to netip.AddrPort, from netip.AddrPort) (client netip.AddrPort,
	err error) {
	o.Helper()
	ctx, stop := context.WithTimeout(o.Context(), 3*time.Second)
	defer stop()
	o.in(pod, func() {
		var reply echo.Reply
		reply, err = echo.Request(ctx, p, to, echo.Options{From: from})
		client = reply.Client
	})
	return client, err
}

// TestFlowsOfAnAddressAreCut has a pod send datagrams out of the cluster: replies reach it until its flows are cut.
func TestFlowsOfAnAddressAreCut(t *testing.T) {
	withOutside(t, func(o *outside) {
		o.masquerades()
		plane, err := masquerade.NewDevice()
		if err != nil {
			t.Fatal(err)
		}
		defer plane.Close()
		for six, address := range beyondAddrs {
			var server, client *net.UDPConn
			at := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(address), 5555))
			o.beyond(func() { server, err = net.ListenUDP("udp", at) })
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			o.in("a", func() { client, err = net.DialUDP("udp", nil, at) })
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			buffer := make([]byte, 10)
			_, err := client.Write([]byte("x"))
			server.SetReadDeadline(time.Now().Add(5 * time.Second))
			_, from, err2 := server.ReadFrom(buffer)
			if err := errors.Join(err, err2); err != nil {
				t.Fatal(err)
			}
			for _, reaches := range []bool{true, false} {
				wait := 5 * time.Second
				if !reaches {
					wait = 300 * time.Millisecond
					err = plane.CutFlows(func(a netip.Addr) bool { return a == netip.MustParseAddr(podAddrs["a"][six]) })
				}
				_, err2 := server.WriteTo([]byte("y"), from)
				client.SetReadDeadline(time.Now().Add(wait))
				if _, failed := client.Read(buffer); err != nil || err2 != nil || (failed == nil) != reaches {
					t.Errorf("%s: a reply gets %v, want one: %t; %v, %v", address, failed, reaches, err, err2)
				}
			}
		}
	})
}

// TestMasqueradeByProgram has pods send out of the cluster, and clients there send to pods.
func TestMasqueradeByProgram(t *testing.T) {
	withOutside(t, func(o *outside) {
		o.masquerades()
		each(func(p model.Protocol, six bool) {
			beyond := netip.AddrPortFrom(netip.MustParseAddr(beyondAddrs[six]), portOf(p))
			fixed := netip.AddrPortFrom(netip.MustParseAddr(podAddrs["a"][six]), 4444)
			for range 3 { // a port of its choice, again and again
				if got, err := o.sends("a", p, beyond, fixed); err != nil || got.Addr().String() != nodeAddrs[six] {
					t.Errorf("%s out of the cluster: from %s, %v", beyond, got, err)
				}
			}
			except := netip.AddrPortFrom(netip.MustParseAddr(exceptAddrs[six]), portOf(p))
			if got, err := o.sends("b", p, except, netip.AddrPort{}); err != nil || got.Addr().String() != podAddrs["b"][six] {
				t.Errorf("%s, which sees pods: from %s, %v", except, got, err)
			}
			if err := o.direct(p, six); err != nil {
				t.Errorf("%s (IPv6 %t) from beyond to a pod: %v", p, six, err)
			}
			closed := netip.AddrPortFrom(netip.MustParseAddr(beyondAddrs[six]), 9)
			begin := time.Now()
			if _, err := o.sends("a", p, closed, netip.AddrPort{}); err == nil || time.Since(begin) > 2*time.Second {
				t.Errorf("%s %s: %v after %s, want a refusal", p, closed, err, time.Since(begin))
			}
		})
		for _, six := range []bool{false, true} {
			ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
			to, from := netip.MustParseAddr(beyondAddrs[six]), netip.MustParseAddr(podAddrs["a"][six])
			o.in("a", func() {
				if err := echo.Ping(ctx, to, netip.AddrPortFrom(from, 0)); err != nil {
					t.Error(err)
				}
			})
			stop()
		}
	})
}

// direct has a client beyond send to pod b's own address.
func (o *outside) direct(p model.Protocol, six bool) (err error) {
	ctx, stop := context.WithTimeout(o.Context(), 3*time.Second)
	defer stop()
	o.beyond(func() {
		to := netip.AddrPortFrom(netip.MustParseAddr(podAddrs["b"][six]), 8080)
		from := netip.AddrPortFrom(netip.MustParseAddr(beyondAddrs[six]), 5555)
		var f *echo.Flow
		if f, err = echo.Open(ctx, p, to, echo.Options{From: from}); err != nil {
			return
		}
		defer f.Close()
		for range 3 {
			if _, err = f.Request(ctx); err != nil { // replies from another address would not arrive
				return
			}
		}
	})
	return err
}

// TestMasqueradeDespiteForgedClient has a pod send in the name of a server beyond to another pod, whose own packets to
// that server are masqueraded all the same.
func TestMasqueradeDespiteForgedClient(t *testing.T) {
	withOutside(t, func(o *outside) {
		o.masquerades()
		server, victim := netip.MustParseAddrPort("203.0.113.9:53"), netip.MustParseAddrPort("10.244.1.2:4446")
		o.run("ip -n " + o.pods["a"].Name + " addr add 203.0.113.9/32 dev eth0")
		ctx, stop := context.WithTimeout(t.Context(), silence)
		defer stop()
		o.in("a", func() { echo.Request(ctx, model.UDP, victim, echo.Options{From: server}) })
		if got, err := o.sends("b", model.UDP, server, victim); err != nil || got.Addr().String() != nodeAddrs[false] {
			t.Errorf("%s sees %s, %v", server, got, err)
		}
	})
}

// TestMasqueradeEnds has a pod begin a connection from a port again, to what is inside the cluster by now.
func TestMasqueradeEnds(t *testing.T) {
	withOutside(t, func(o *outside) {
		o.masquerades()
		to, from := netip.MustParseAddrPort("203.0.113.9:80"), netip.MustParseAddrPort("10.244.1.2:4447")
		for _, want := range []string{nodeAddrs[false], podAddrs["b"][false]} {
			if got, err := o.sends("b", model.TCP, to, from); err != nil || got.Addr().String() != want {
				t.Errorf("%s sees %s, %v, want %s", to, got, err, want)
			}
			folder, _, err := bpf.Folder()
			if err := errors.Join(err, device.CleanMasqueradeRanges(folder)); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestMasqueradeEachItsPort has pods and the node send from one port to one server.
func TestMasqueradeEachItsPort(t *testing.T) {
	withOutside(t, func(o *outside) {
		o.masquerades()
		each(func(p model.Protocol, six bool) {
			beyond := netip.AddrPortFrom(netip.MustParseAddr(beyondAddrs[six]), portOf(p))
			seen := map[netip.AddrPort]string{}
			for _, pod := range []string{"a", "b", ""} {
				var f *echo.Flow
				var reply echo.Reply
				var err error
				request := func() {
					from := netip.AddrPortFrom(netip.Addr{}, 4445)
					ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
					defer stop()
					if f, err = echo.Open(ctx, p, beyond, echo.Options{From: from}); err == nil {
						reply, err = f.Request(ctx)
					}
				}
				if pod == "" {
					request()
				} else {
					o.in(pod, request)
				}
				if err != nil {
					t.Fatalf("%s of %q to %s: %v", p, pod, beyond, err)
				}
				defer f.Close()
				if other, twice := seen[reply.Client]; twice || reply.Client.Addr().String() != nodeAddrs[six] {
					t.Errorf("%q is seen as %s, as is %q", pod, reply.Client, other)
				}
				seen[reply.Client] = pod
			}
		})
	})
}

// TestMasqueradeOutlivesAgent has flows go on while another agent takes over.
func TestMasqueradeOutlivesAgent(t *testing.T) {
	withOutside(t, func(o *outside) {
		o.masquerades()
		var flows []*echo.Flow
		each(func(p model.Protocol, six bool) {
			o.in("a", func() {
				f, err := echo.Open(t.Context(), p, netip.AddrPortFrom(netip.MustParseAddr(beyondAddrs[six]), portOf(p)),
					echo.Options{})
				if err == nil {
					_, err = f.Request(t.Context())
				}
				if err != nil {
					t.Fatal(err)
				}
				flows = append(flows, f)
			})
		})
		options := o.plane.Options
		if err := o.plane.Close(); err != nil {
			t.Fatal(err)
		}
		o.plane = opened(t, options)
		if _, err := o.plane.Read(t.Context()); err != nil {
			t.Fatal(err)
		}
		o.masquerades()
		for _, f := range flows {
			ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
			if _, err := f.Request(ctx); err != nil {
				t.Error(err)
			}
			stop()
			f.Close()
		}
	})
}

// TestRedirectBesideGuard has packets redirected while source validation has its hook, but none with a forged source.
func TestRedirectBesideGuard(t *testing.T) {
	withOutside(t, func(o *outside) {
		o.masquerades()
		g, err := guard.New()
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		defer g.Clean(context.Background())
		facts := g.Render(&model.Network{Node: "a"})
		for _, pod := range []string{"a", "b"} {
			facts = append(facts, g.Render(&model.Attachment{ID: pod, Device: pod, Addresses: []netip.Addr{
				netip.MustParseAddr(podAddrs[pod][false]), netip.MustParseAddr(podAddrs[pod][true])}})...)
			o.run(fmt.Sprintf("ip link set dev %s group %d", pod, link.PodGroup))
		}
		unique := map[any]bool{}
		for i := len(facts) - 1; i >= 0; i-- {
			if unique[facts[i].Key] {
				facts = append(facts[:i], facts[i+1:]...)
				continue
			}
			unique[facts[i].Key] = true
		}
		if err := g.Write(t.Context(), facts, nil); err != nil {
			t.Fatal(err)
		}
		o.watched(func() { o.redirects("with source validation") })
		if slow := o.slow(); slow != "" {
			t.Errorf("the fast path is reported off: %s", slow)
		}
		o.run("ip -n " + o.pods["a"].Name + " addr add 10.244.1.9/32 dev eth0")
		from := echo.Options{From: netip.MustParseAddrPort("10.244.1.9:0")}
		if _, n, err := o.request(model.UDP, false, silence, from); n != 0 || err == nil {
			t.Errorf("%d packets of another address were redirected, answered: %v", n, err)
		}
		if dropped, err := g.Dropped(); err != nil || dropped["forged_source"] == 0 {
			t.Errorf("dropped %v, %v", dropped, err)
		}
		o.run(table("type filter hook prerouting priority 0;"))
		o.watched(func() { o.redirects("beside an empty chain") })
		o.run("nft delete table inet t; " + table("type filter hook prerouting priority -390;"))
		if slow := o.slow(); slow != "netfilter" {
			t.Errorf("with another hook of the guard's priority, the fast path is reported off: %q", slow)
		}
		o.run("nft delete table inet t")
		o.run(table("type filter hook prerouting priority 0;") + "; nft add rule inet t c counter")
		if slow := o.slow(); slow != "netfilter" {
			t.Errorf("with another hook, the fast path is reported off: %q", slow)
		}
		o.run("nft delete table inet t")
	})
}
