package masquerade

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/dataplane/network"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// prefixes parses prefixes.
func prefixes(l ...string) (out []netip.Prefix) {
	for _, s := range l {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// addresses are those of each namespace, by its name.
var addresses = map[string][]netip.Prefix{
	"pod": prefixes("10.244.1.2/24", "fd00:1::2/64"), "node": prefixes("192.168.0.1/24", "fd99::1/64"),
	"wire": prefixes("192.168.0.2/24", "192.168.0.3/24", "10.244.2.5/24", "172.16.0.9/24", "203.0.113.9/24",
		"198.18.0.9/24", "fd99::2/64", "fd00:2::5/64", "fd98::9/64", "2001:db8::9/64", "fd97::9/64"),
	"proxy": prefixes("198.51.100.9/32", "2001:db8:1::9/128"),
}

// TestSourcesOutsideTheCluster has a pod and clients outside connect, and checks which client each server sees.
func TestSourcesOutsideTheCluster(t *testing.T) {
	pod, node, wire := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, ns := range []*netns.Namespace{pod, node, wire} {
		must(sysctl.Set(ns, sysctl.Setting{Name: "net/ipv6/conf/all/accept_dad", Value: "0"},
			sysctl.Setting{Name: "net/ipv6/conf/default/accept_dad", Value: "0"},
			sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"},
			sysctl.Setting{Name: "net/ipv6/conf/all/forwarding", Value: "1"}))
	}
	l, err := link.Dial(node)
	must(err)
	defer l.Close()
	uplink, err := l.AddVeth(link.End{Name: "eth0"}, link.End{Name: "eth0"}, wire)
	must(err)
	toPod, err := l.AddVeth(link.End{Name: "pod"}, link.End{Name: "eth0"}, pod)
	must(errors.Join(err, l.AddAddress(toPod, netip.MustParsePrefix("10.244.1.1/24")),
		l.AddAddress(toPod, netip.MustParsePrefix("fd00:1::1/64"))))
	for _, p := range addresses["node"] {
		must(l.AddAddress(uplink, p))
	}
	proxy, err := l.AddVeth(link.End{Name: model.ProxyDevice}, link.End{Name: "proxy"}, wire)
	must(err)
	for _, p := range addresses["proxy"] {
		must(route.PutIn(node, route.Route{To: p, Dev: proxy}))
	}
	for name, ns := range map[string]*netns.Namespace{"pod": pod, "wire": wire} {
		d, err := link.Dial(ns)
		must(err)
		dev, err := d.Index("eth0")
		must(errors.Join(err, d.Up(1), d.Up(dev)))
		for _, p := range addresses[name] {
			must(d.AddAddress(dev, p))
		}
		if name == "wire" {
			proxy, err := d.Index("proxy")
			must(errors.Join(err, d.Up(proxy)))
			for _, p := range addresses["proxy"] {
				must(d.AddAddress(proxy, p))
			}
		}
		for i, all := range prefixes("0.0.0.0/0", "::/0") {
			via := addresses["node"][i].Addr()
			if name == "pod" {
				via = netip.MustParseAddr([]string{"10.244.1.1", "fd00:1::1"}[i])
			} else {
				must(route.PutIn(node, route.Route{To: all, Via: addresses[name][6*i].Addr(), Dev: uplink}))
			}
			must(route.PutIn(ns, route.Route{To: all, Via: via, Dev: dev}))
		}
		must(ns.Do(func() error {
			s, err := echo.Serve(name, []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 53, Protocol: model.UDP}})
			if err == nil {
				t.Cleanup(func() { s.Close() })
			}
			return err
		}))
		must(d.Await(t.Context(), dev))
		d.Close()
	}
	must(errors.Join(l.Await(t.Context(), uplink), l.Await(t.Context(), proxy)))
	var plane *Plane
	must(node.Do(func() (err error) {
		plane, err = New()
		return err
	}))
	defer plane.Close()
	var facts []network.TableFact
	n := &model.Network{Node: "a", Ranges: prefixes("10.244.1.0/24", "fd00:1::/64"),
		Masquerade: &model.Masquerade{Except: prefixes("172.16.0.0/12", "fd98::/16")},
		Tunnel:     &model.Tunnel{Pods: prefixes("10.244.1.0/24", "fd00:1::/64")}}
	for _, p := range []model.NetworkPart{n,
		&model.Route{Node: "b", To: prefixes("10.244.2.0/24")[0], Hop: model.Direct, Via: netip.MustParseAddr("192.168.0.2")},
		&model.Route{Node: "b", To: prefixes("fd00:2::/64")[0], Hop: model.Tunneled,
			Via: netip.MustParseAddr("192.168.0.3")},
		&model.Route{Node: "c", To: prefixes("198.18.0.9/32")[0], Hop: model.Tunneled, PodsOnly: true},
		&model.Route{Node: "c", To: prefixes("fd97::9/128")[0], Hop: model.Tunneled, PodsOnly: true},
	} {
		facts = append(facts, plane.Render(p)...)
	}
	must(plane.Write(t.Context(), facts, nil))
	held, err := plane.Read(t.Context())
	if must(err); len(held) != len(facts) {
		t.Errorf("held %d of %d facts", len(held), len(facts))
	}
	request := func(ns *netns.Namespace, to string, p echo.Port, from string) string {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		var reply echo.Reply
		err := ns.Do(func() (err error) {
			o := echo.Options{}
			if from != "" {
				o.From = netip.AddrPortFrom(netip.MustParseAddr(from), 4444)
			}
			reply, err = echo.Request(ctx, p.Protocol, netip.AddrPortFrom(netip.MustParseAddr(to), p.Number), o)
			return err
		})
		if err != nil {
			return err.Error()
		}
		return reply.Client.Addr().String()
	}
	for to, want := range map[string]string{"10.244.2.5": "10.244.1.2", "172.16.0.9": "10.244.1.2",
		"192.168.0.2": "10.244.1.2", "192.168.0.3": "192.168.0.1", "203.0.113.9": "192.168.0.1",
		"fd00:2::5": "fd00:1::2", "fd98::9": "fd00:1::2",
		"198.18.0.9": "10.244.1.2", "fd97::9": "fd00:1::2",
		"2001:db8::9": "fd99::1", "198.51.100.9": "10.244.1.2", "2001:db8:1::9": "fd00:1::2"} {
		for _, p := range []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 53, Protocol: model.UDP}} {
			if got := request(pod, to, p, ""); got != want {
				t.Errorf("pod to %s %s: from %s, want %s", to, p, got, want)
			}
			if p.Protocol == model.UDP { // all by one port: each has a port of its own outside
				from := "10.244.1.2"
				if netip.MustParseAddr(to).Is6() {
					from = "fd00:1::2"
				}
				if got := request(pod, to, p, from); got != want {
					t.Errorf("pod to %s %s by a port of its choice: from %s, want %s", to, p, got, want)
				}
			}
		}
	}
	for _, from := range []string{"203.0.113.9", "2001:db8::9"} { // replies that changed would not arrive
		to := "10.244.1.2"
		if netip.MustParseAddr(from).Is6() {
			to = "fd00:1::2"
		}
		for i, p := range []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 53, Protocol: model.UDP}} {
			if got := request(wire, to, p, from); got != from {
				t.Errorf("%d %s to pod %s: %s", i, from, to, got)
			}
		}
	}
	eachItsPort(t, pod)
	must(plane.Clean(t.Context()))
	if held, err := plane.Read(t.Context()); err != nil || len(held) > 0 {
		t.Error(fmt.Sprint(held), err)
	}
}

// eachItsPort has two addresses of a pod's namespace, as two pods, send from the same ports to the same servers: each
// connection has a port of its own outside, and its reply.
func eachItsPort(t *testing.T, pod *netns.Namespace) {
	const ports = 200
	l, err := link.Dial(pod)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dev, err := l.Index("eth0")
	if err != nil {
		t.Fatal(err)
	}
	for i, sources := range [][]string{{"10.244.1.2", "10.244.1.3"}, {"fd00:1::2", "fd00:1::3"}} {
		if err := l.AddAddress(dev, netip.MustParsePrefix(sources[1]+[]string{"/24", "/64"}[i])); err != nil {
			t.Fatal(err)
		}
		to := netip.MustParseAddr([]string{"203.0.113.9", "2001:db8::9"}[i])
		for _, p := range []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 53, Protocol: model.UDP}} {
			seen := map[netip.AddrPort]netip.AddrPort{}
			for n := range ports * len(sources) {
				from := netip.AddrPortFrom(netip.MustParseAddr(sources[n%2]), uint16(20000+n/2))
				ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
				defer stop()
				var reply echo.Reply
				err := pod.Do(func() error {
					f, err := echo.Open(ctx, p.Protocol, netip.AddrPortFrom(to, p.Number), echo.Options{From: from})
					if err != nil {
						return err
					}
					t.Cleanup(func() { f.Close() }) // all are open at once
					reply, err = f.Request(ctx)
					return err
				})
				if err != nil {
					t.Fatalf("%s from %s: %v", p, from, err)
				}
				node := addresses["node"][i].Addr()
				if other, twice := seen[reply.Client]; twice || reply.Client.Addr() != node {
					t.Errorf("%s from %s is seen as %s, want %s; so is %v", p, from, reply.Client, node, other)
				}
				seen[reply.Client] = from
			}
		}
	}
}

// TestNodesBehindTheTunnelAtDevices renders what programs at devices know of nodes behind the tunnel.
func TestNodesBehindTheTunnelAtDevices(t *testing.T) {
	to := prefixes("198.18.0.9/32")[0]
	for podsOnly, want := range map[bool]uint32{false: device.MasqueradeInside | device.MasqueradeRemote,
		true: device.MasqueradeInside | device.MasqueradeNodes} {
		got := (&DevicePlane{}).Render(&model.Route{Node: "c", To: to, Hop: model.Tunneled, PodsOnly: podsOnly})
		if len(got) != 1 || got[0] != (RangeFact{Key: Range(to), Value: want}) {
			t.Errorf("pods only %t: %v", podsOnly, got)
		}
	}
}
