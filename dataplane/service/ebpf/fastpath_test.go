package ebpf_test

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	cebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox/echo"
)

// twoPods is a node with the pods a, b and c, each a network namespace behind a device of that name. In a is a
// client, in b and c servers that answer by b's addresses.
type twoPods struct {
	*testing.T
	plane *ebpf.Plane
	pods  map[string]*netns.Namespace
}

// The addresses of a and b, by family.
var podAddrs = map[string]map[bool]string{
	"a": {false: "10.244.1.1", true: "fd00:244::a"},
	"b": {false: "10.244.1.2", true: "fd00:244::b"},
}

// withPods runs f in such a node, whose plane has no Service.
func withPods(t *testing.T, f func(*twoPods)) {
	t.Helper()
	withPodsOf(t, podsWorld{}, f)
}

// podsWorld is what of a node with pods may be otherwise.
type podsWorld struct {
	network bool // Options.PodNetwork
	across  bool // b and c are pods of other nodes, behind bridges of those names
}

// withPodsOf is withPods for such a node.
func withPodsOf(t *testing.T, of podsWorld, f func(*twoPods)) {
	t.Helper()
	if err := bpf.ProbeDevices(); err != nil {
		t.Fatalf("this test needs programs at devices: %v", err)
	}
	w := &twoPods{T: t, pods: map[string]*netns.Namespace{}}
	id := rand.Text()[:8]
	for _, name := range []string{"a", "b", "c"} {
		ns, err := netns.New("fl-pod-" + id + name)
		if err != nil {
			t.Fatalf("this test needs root: %v", err)
		}
		defer func() {
			if err := errors.Join(ns.Close(), netns.Delete(ns.Name)); err != nil {
				t.Error(err)
			}
		}()
		w.pods[name] = ns
	}
	inside(t, func(o ebpf.Options) {
		w.run(
			"sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0 " +
				"net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0",
		)
		for i, name := range []string{"a", "b", "c"} {
			ns, as := w.pods[name].Name, map[string]string{"a": "a", "b": "b", "c": "b"}[name]
			device := `ip link add name %[1]s address 02:00:00:00:0%[3]d:01 type veth \
				peer name eth0 address 02:00:00:00:0%[3]d:02 netns %[2]s`
			if of.across && name != "a" {
				device = `ip link add name %[1]s address 02:00:00:00:0%[3]d:01 type bridge forward_delay 0 mcast_snooping 0
				ip link add name p%[1]s type veth peer name eth0 address 02:00:00:00:0%[3]d:02 netns %[2]s
				ip link set dev p%[1]s up master %[1]s
				for f in ip ip6; do sysctl -qw net.bridge.bridge-nf-call-${f}tables=0 || true; done`
			}
			w.run(fmt.Sprintf(`ip netns exec %[2]s sysctl -qw net.ipv6.conf.default.accept_dad=0
				`+device+`
				ip link set dev %[1]s up && ip addr add fe80::1/64 dev %[1]s nodad
				ip -n %[2]s link set eth0 up && ip -n %[2]s link set lo up
				ip -n %[2]s addr add %[4]s/32 dev eth0 && ip -n %[2]s addr add %[5]s/128 dev eth0 nodad
				ip -n %[2]s route add default via 169.254.1.1 dev eth0 onlink
				ip -n %[2]s neigh add 169.254.1.1 dev eth0 lladdr 02:00:00:00:0%[3]d:01
				ip -n %[2]s -6 route add default via fe80::1 dev eth0
				ip -n %[2]s neigh add fe80::1 dev eth0 lladdr 02:00:00:00:0%[3]d:01`,
				name, ns, i+1, podAddrs[as][false], podAddrs[as][true]))
			if name != "c" {
				w.route("add", name, name)
			}
			if name != "a" {
				w.in(name, func() {
					s, err := echo.Serve(name, []echo.Port{{Number: 8080, Protocol: model.TCP}, {Number: 8080, Protocol: model.UDP}})
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { s.Close() })
				})
			}
		}
		o.PodNetwork = of.network
		w.run("unshare -n sh -c 'iptables-legacy -L; nft add table inet t' >/dev/null") // modules, which nodes have loaded
		w.plane = opened(t, o)
		defer func() { clean(t, w.plane) }()
		change(t, w.plane, nil, []model.ServicePart{theNode})
		f(w)
	})
}

// nearAndAcross runs f with pods of one node, and with pods of several.
func nearAndAcross(t *testing.T, f func(*testing.T, *twoPods)) {
	for _, across := range []bool{false, true} {
		t.Run(map[bool]string{false: "pods of the node", true: "pods of other nodes"}[across], func(t *testing.T) {
			withPodsOf(t, podsWorld{across: across}, func(w *twoPods) { f(t, w) })
		})
	}
}

// run runs commands on the node.
func (w *twoPods) run(script string) {
	w.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		w.Fatalf("%s: %v: %s", script, err, out)
	}
}

// route has the addresses of one of the pods routed to another's device.
func (w *twoPods) route(verb, of, to string) {
	w.run(
		fmt.Sprintf(
			"ip route %[1]s %[2]s dev %[4]s && ip -6 route %[1]s %[3]s dev %[4]s",
			verb,
			podAddrs[of][false],
			podAddrs[of][true],
			to,
		),
	)
}

// in runs f in a pod.
func (w *twoPods) in(pod string, f func()) {
	w.Helper()
	if err := w.pods[pod].Do(func() error { f(); return nil }); err != nil {
		w.Fatal(err)
	}
}

// redirected returns how many packets were redirected so far.
func (w *twoPods) redirected() uint64 {
	w.Helper()
	c, err := w.plane.PacketCounts()
	if err != nil || c == nil {
		w.Fatal(c, err)
	}
	return c.Redirected
}

// How long a client waits for an answer, and where none is to come.
const patience, silence = 10 * time.Second, 300 * time.Millisecond

// ask has a client in a ask b, and returns who answered, and how many packets were redirected meanwhile.
func (w *twoPods) request(
	protocol model.Protocol,
	six bool,
	wait time.Duration,
	o echo.Options,
) (who string, redirected uint64, err error) {
	w.Helper()
	ctx, stop := context.WithTimeout(w.Context(), wait)
	defer stop()
	before := w.redirected()
	w.in("a", func() {
		answer, e := echo.Request(ctx, protocol, netip.AddrPortFrom(netip.MustParseAddr(podAddrs["b"][six]), 8080), o)
		who, err = answer.Pod, e
	})
	return who, w.redirected() - before, err
}

// each calls f for each protocol and family.
func each(f func(protocol model.Protocol, six bool)) {
	for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
		f(protocol, false)
		f(protocol, true)
	}
}

// redirects waits until packets are redirected both ways.
func (w *twoPods) redirects(when string) {
	w.Helper()
	each(func(protocol model.Protocol, six bool) {
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			who, n, err := w.request(protocol, six, patience, echo.Options{})
			if err != nil {
				w.Errorf("%s, %s (IPv6 %t): %v", when, protocol, six, err)
			}
			if who == "b" && n >= 2 {
				return
			}
			if time.Now().After(end) {
				w.Fatalf("%s, %s (IPv6 %t): of %q's exchange %d packets were redirected", when, protocol, six, who, n)
			}
		}
	})
}

// slow returns what is reported to keep packets for pods on the stack, of both families.
func (w *twoPods) slow() string {
	w.Helper()
	f, err := w.plane.FastPath()
	if err != nil || f == nil {
		w.Fatalf("the fast path is not reported: %v, %v", f, err)
	}
	if !slices.Equal(f.IPv4.Reasons, f.IPv6.Reasons) || f.IPv4.Enabled != (len(f.IPv4.Reasons) == 0) {
		w.Errorf("of IPv4 %v, of IPv6 %v", f.IPv4, f.IPv6)
	}
	var words []string
	for _, r := range f.IPv4.Reasons {
		words = append(words, string(r))
	}
	if len(f.Devices) > 0 {
		words = append(words, "device")
	}
	return strings.Join(words, " ")
}

// idleHooks are hooks that leave a packet between pods as it is, as programs leave them that every node has.
var idleHooks = []struct{ name, put string }{
	{"kubelet's chains, which hook into nothing", "for i in iptables-nft ip6tables-nft; do " +
		"$i -t mangle -N KUBE-IPTABLES-HINT; " +
		"$i -t mangle -N KUBE-KUBELET-CANARY; $i -N KUBE-FIREWALL; $i -I OUTPUT -j KUBE-FIREWALL; done"},
	{"kubelet's firewall, which has connections tracked", kubeFirewall("iptables-nft")},
	{"kubelet's firewall in iptables' legacy form", kubeFirewall("iptables-legacy")},
	{"a list of rules by iptables", "for t in filter mangle raw security; do for i in iptables-nft ip6tables-nft; do " +
		"$i -t $t -L >/dev/null; done; done"},
	{"a list of rules by iptables in its legacy form", "for t in filter mangle raw; do " +
		"for i in iptables-legacy ip6tables-legacy; do $i -t $t -L >/dev/null; done; done"},
	{"a firewall of the node itself", "nft 'add table inet i; " +
		"add chain inet i c { type filter hook input priority 0; }; " +
		"add rule inet i c ct state invalid drop'"},
	{"empty chains", "for f in ip ip6 inet; do for h in prerouting forward postrouting; do " +
		"nft \"add table $f e; add chain $f e $h { type filter hook $h priority 0; }\"; done; done"},
	{"rules that came and went", "iptables-legacy -A FORWARD -j DROP; iptables-legacy -P FORWARD DROP; " +
		"iptables-legacy -F; iptables-legacy -P FORWARD ACCEPT; " +
		"nft 'add table inet w; add chain inet w c { type filter hook forward priority 0; policy drop; }; " +
		"add rule inet w c drop; flush chain inet w c; chain inet w c { policy accept; }'"},
}

// kubeFirewall returns the commands by which kubelet has a node drop what comes to its loopback addresses from
// elsewhere.
func kubeFirewall(program string) string {
	return program + " -N KUBE-FIREWALL || true; for c in INPUT OUTPUT; do " +
		program + " -I $c -j KUBE-FIREWALL; done; " +
		program + " -A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack " +
		"! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
}

// Packets are redirected beside hooks that would leave them as they are: each by itself, and all together.
func TestFastPathBesideIdleHooks(t *testing.T) {
	for _, network := range []bool{false, true} {
		withPodsOf(t, podsWorld{network: network}, func(w *twoPods) {
			for _, c := range idleHooks {
				w.run(c.put)
				w.watched(func() { w.redirects("beside " + c.name) })
				if slow := w.slow(); slow != "" {
					t.Errorf("beside %s, the fast path is reported off: %s", c.name, slow)
				}
			}
		})
	}
}

// watched runs f while the plane follows the node, as in an agent: it begins by what has come meanwhile.
func (w *twoPods) watched(f func()) {
	w.Helper()
	ctx, stop := context.WithCancel(w.Context())
	signals, err := w.plane.Watch(ctx)
	if err != nil {
		w.Fatal(err)
	}
	f()
	stop()
	for range signals {
	}
}

// table returns the command that adds a chain to a table of its own.
func table(chain string) string {
	return "nft 'add table inet t; add chain inet t c { " + chain + " }'"
}

// pastHooks are what would see a packet, and how the fast path is reported off then.
var pastHooks = []struct {
	name, put, undo string
	silent          bool // nothing answers
	stays           bool // for the kernel, once it was there, until the namespace ends
	slow            string
}{
	{
		name: "a filter of what is forwarded", slow: "netfilter",
		put:  table("type filter hook forward priority 0; policy drop;"),
		undo: "nft delete table inet t", silent: true,
	},
	{
		name: "a hook before routing", slow: "netfilter",
		put:  table("type filter hook prerouting priority 0;") + "; nft add rule inet t c counter",
		undo: "nft delete table inet t",
	},
	{
		name: "a hook behind routing", slow: "netfilter",
		put:  table("type filter hook postrouting priority 0;") + "; nft add rule inet t c counter",
		undo: "nft delete table inet t",
	},
	{
		name: "a translation", slow: "netfilter",
		put:  table("type nat hook postrouting priority 100;"),
		undo: "nft delete table inet t",
	},
	{
		name: "a default of iptables", slow: "netfilter",
		put:  "iptables-legacy -P FORWARD DROP; ip6tables-legacy -P FORWARD DROP",
		undo: "iptables-legacy -P FORWARD ACCEPT; ip6tables-legacy -P FORWARD ACCEPT", silent: true,
	},
	{
		name: "more hooks than are read", slow: "netfilter",
		put: "for i in $(seq 17); do " +
			"nft \"add table inet t; add chain inet t c$i { type filter hook forward priority $i; }\"; done",
		undo: "nft delete table inet t",
	},
	{
		name: "iptables", slow: "netfilter",
		put: "iptables-legacy -A FORWARD -j ACCEPT; ip6tables-legacy -A FORWARD -j DROP; " +
			"ip6tables-legacy -I FORWARD -j ACCEPT",
		undo: "iptables-legacy -F; ip6tables-legacy -F",
	},
	{
		name: "a hook where packets come in", slow: "device",
		put: "nft 'add table netdev t; add chain netdev t c " +
			"{ type filter hook ingress device a priority 0; policy drop; }'",
		undo: "nft delete table netdev t", silent: true,
	},
	{
		name: "a hook where packets leave", slow: "device",
		put:  "nft 'add table netdev t; add chain netdev t c { type filter hook egress device b priority 0; policy drop; }'",
		undo: "nft delete table netdev t", silent: true,
	},
	{
		name: "classifiers where packets come in", slow: "device",
		put: "for d in a b; do tc qdisc add dev $d clsact; " +
			"tc filter add dev $d ingress protocol all u32 match u32 0 0 flowid 1:1; done",
		undo: "for d in a b; do tc qdisc del dev $d clsact; done",
	},
	{
		name: "classifiers where packets leave", slow: "device",
		put: "for d in a b; do tc qdisc add dev $d clsact; " +
			"tc filter add dev $d egress protocol all u32 match u32 0 0 flowid 1:1; done",
		undo: "for d in a b; do tc qdisc del dev $d clsact; done",
	},
	{
		name: "a queue", slow: "device",
		put:  "for d in a b; do tc qdisc add dev $d root pfifo limit 100; done",
		undo: "for d in a b; do tc qdisc del dev $d root; done",
	},
	{
		name: "a rule of routing", slow: "routing_rule",
		put:  "ip rule add from 10.244.1.1 blackhole pref 5; ip -6 rule add from fd00:244::a blackhole pref 5",
		undo: "ip rule del pref 5; ip -6 rule del pref 5", silent: true, stays: true,
	},
	{
		name: "a policy of IPsec", slow: "ipsec",
		put: "ip xfrm policy add dir fwd src 10.244.1.1 dst 10.244.1.2 action block; " +
			"ip xfrm policy add dir fwd src fd00:244::a dst fd00:244::b action block",
		undo: "ip xfrm policy flush", silent: true,
	},
	{
		name: "no forwarding", slow: "forwarding",
		put:  "sysctl -qw net.ipv4.ip_forward=0 net.ipv6.conf.all.forwarding=0",
		undo: "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1", silent: true,
	},
	{
		name: "another device upon it", slow: "device",
		put:  "for d in a b; do ip link add link $d name m$d type macvlan; ip link set dev m$d up; done",
		undo: "for d in a b; do ip link del dev m$d; done",
	},
	{
		name: "a default of IPsec", slow: "ipsec",
		put:  "ip xfrm policy setdefault fwd block",
		undo: "ip xfrm policy setdefault fwd accept", silent: true,
	},
	{name: "a closed route", put: "ip route replace blackhole 10.244.1.2; ip -6 route add blackhole fd00:244::b metric 1",
		undo: "ip route replace 10.244.1.2 dev b; ip -6 route del blackhole fd00:244::b metric 1", silent: true},
}

// What would look at a packet sees it, from the first on after it was put there, and no packet is redirected past it.
func TestNoRedirectPastHooks(t *testing.T) {
	for _, c := range pastHooks {
		t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) {
			withPods(t, func(w *twoPods) {
				w.T = t
				for _, idle := range idleHooks { // so that functions of hooks are known, but what they would do isn't
					w.run(idle.put)
				}
				w.watched(func() { w.redirects("with nothing in the way") })
				if slow := w.slow(); slow != "" {
					t.Errorf("with nothing in the way, the fast path is reported off: %s", slow)
				}
				w.run(c.put)
				if slow := w.slow(); slow != c.slow {
					t.Errorf("the fast path is reported off: %q, want %q", slow, c.slow)
				}
				wait := patience
				if c.silent {
					wait = silence
				}
				if _, n, err := w.request(model.UDP, true, wait, echo.Options{}); n != 0 || (err != nil) != c.silent {
					t.Errorf("IPv6: %d packets were redirected, answered: %v", n, err)
				}
				if _, n, err := w.request(model.TCP, false, wait, echo.Options{}); n != 0 || (err != nil) != c.silent {
					t.Errorf("%d packets were redirected, answered: %v", n, err)
				}
				w.run(c.undo)
				if !c.stays {
					w.redirects("when it is gone")
				} else if who, n, err := w.request(model.TCP, false, patience, echo.Options{}); who != "b" || n != 0 {
					t.Errorf("when it is gone, %d packets were redirected, %q answered: %v", n, who, err)
				}
			})
		})
	}
}

// The pod network's own rules of routing, by which a pod's packets to other nodes take a table of theirs, keep no
// packet off the fast path; rules beside them do, while they are there.
func TestFastPathBesideRulesOfThePodNetwork(t *testing.T) {
	withPodsOf(t, podsWorld{network: true}, func(w *twoPods) {
		w.run("for f in -4 -6; do ip $f rule add fwmark 0/0x20000000 lookup 77 pref 250 protocol 250; done; " +
			"ip route add 192.0.2.9 dev lo table 77; ip -6 route add 2001:db8::9 dev lo table 77")
		w.redirects("beside own rules")
		if slow := w.slow(); slow != "" {
			t.Errorf("beside own rules, the fast path is reported off: %s", slow)
		}
		for _, other := range []string{"from 10.244.1.1 blackhole", "from fd00:244::a blackhole",
			"from all lookup 7 protocol kernel", "from all l3mdev protocol kernel"} {
			family := "-4"
			if strings.Contains(other, "fd00") {
				family = "-6"
			}
			w.run("ip " + family + " rule add pref 5 " + other)
			wait, silent := patience, strings.Contains(other, "blackhole")
			if silent {
				wait = silence
			}
			_, n, err := w.request(model.TCP, family == "-6", wait, echo.Options{})
			if n != 0 || (err != nil) != silent {
				t.Errorf("rule %s: %d packets were redirected, answered: %v", other, n, err)
			}
			w.run("ip " + family + " rule del pref 5")
			w.redirects("without rule " + other)
		}
		w.run("for n in $(seq 20); do ip rule add fwmark 1/1 lookup 77 pref 25$n protocol 250; done")
		if _, n, err := w.request(model.TCP, false, patience, echo.Options{}); n != 0 || err != nil {
			t.Errorf("beside more rules than are read: %d packets were redirected, %v", n, err)
		}
	})
	withPodsOf(t, podsWorld{}, func(w *twoPods) { // where pods are another plugin's, nothing is ours
		w.run("for f in -4 -6; do ip $f rule add from all lookup 77 pref 250 protocol 250; done")
		if slow := w.slow(); slow != "routing_rule" {
			t.Errorf("beside another network's rules, the fast path is reported off: %q", slow)
		}
	})
}

// So does another's program, behind ours where packets come in and before the pod.
func TestNoRedirectPastPrograms(t *testing.T) {
	drop, xdp := dropper(t, cebpf.SchedCLS, 2 /* TC_ACT_SHOT */), dropper(t, cebpf.XDP, 1 /* XDP_DROP */)
	withPods(t, func(w *twoPods) {
		for device, at := range map[string]cebpf.AttachType{"a": cebpf.AttachTCXIngress, "b": cebpf.AttachTCXEgress} {
			w.redirects("with nothing in the way")
			i, err := net.InterfaceByName(device)
			if err != nil {
				t.Fatal(err)
			}
			l, err := link.AttachTCX(link.TCXOptions{Interface: i.Index, Program: drop, Attach: at})
			if err != nil {
				t.Fatal(err)
			}
			each(func(protocol model.Protocol, six bool) {
				if _, n, err := w.request(protocol, six, silence, echo.Options{}); n != 0 || err == nil {
					t.Errorf("%s, %s (IPv6 %t): %d packets were redirected, answered: %v", device, protocol, six, n, err)
				}
			})
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
		w.redirects("when they are gone")
		var inPod link.Link
		w.in("b", func() {
			i, err := net.InterfaceByName("eth0")
			if err == nil {
				inPod, err = link.AttachXDP(link.XDPOptions{Program: xdp, Interface: i.Index, Flags: link.XDPDriverMode})
			}
			if err != nil {
				t.Fatal(err)
			}
		})
		each(func(protocol model.Protocol, six bool) {
			if _, n, err := w.request(protocol, six, silence, echo.Options{}); n != 0 || err == nil {
				t.Errorf("XDP in the pod, %s (IPv6 %t): %d packets were redirected, answered: %v", protocol, six, n, err)
			}
		})
		if err := inPod.Close(); err != nil {
			t.Fatal(err)
		}
		w.redirects("when XDP is gone")
	})
}

// A program in place of ours at the pod's device is not bypassed either.
func TestNoRedirectPastReplacedProgram(t *testing.T) {
	drop := dropper(t, cebpf.SchedCLS, 2 /* TC_ACT_SHOT */)
	withPods(t, func(w *twoPods) {
		w.redirects("with nothing in the way")
		i, err := net.InterfaceByName("b")
		if err != nil {
			t.Fatal(err)
		}
		folder, _, _ := bpf.Folder()
		ours, err := link.LoadPinnedLink(filepath.Join(folder, "devices", fmt.Sprint("leave-", i.Index)), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer ours.Close()
		if err := ours.Detach(); err != nil {
			t.Fatal(err)
		}
		l, err := link.AttachTCX(link.TCXOptions{Interface: i.Index, Program: drop, Attach: cebpf.AttachTCXEgress})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if _, n, err := w.request(model.TCP, false, silence, echo.Options{}); n != 0 || err == nil {
			t.Errorf("%d packets were redirected, answered: %v", n, err)
		}
	})
}

// dropper loads a program that always returns the same result.
func dropper(t *testing.T, kind cebpf.ProgramType, result int32) *cebpf.Program {
	t.Helper()
	p, err := cebpf.NewProgram(
		&cebpf.ProgramSpec{
			Name:         "stranger",
			Type:         kind,
			License:      "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, result), asm.Return()},
		},
	)
	if err != nil {
		t.Fatalf("this test needs programs at devices: %v", err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// A packet comes as the node would have sent it: from the device's address to the pod's, a hop further, with right
// sums.
func TestRedirectedAsForwarded(t *testing.T) {
	nearAndAcross(t, func(t *testing.T, w *twoPods) {
		w.redirects("with nothing in the way")
		each(func(protocol model.Protocol, six bool) {
			var tap int
			w.in("b", func() { tap = openTap(t, "eth0") })
			defer unix.Close(tap)
			if _, n, err := w.request(protocol, six, patience, echo.Options{}); err != nil || n == 0 {
				t.Fatalf("%d packets were redirected: %v", n, err)
			}
			frame, ip := make([]byte, 2048), 14
			for {
				n, err := unix.Read(tap, frame)
				if err != nil {
					t.Fatalf("%s (IPv6 %t): no packet was seen: %v", protocol, six, err)
				}
				hops := frame[ip+8]
				if kind := binary.BigEndian.Uint16(frame[12:]); six && kind == unix.ETH_P_IPV6 {
					hops = frame[ip+7]
				} else if six || kind != unix.ETH_P_IP {
					continue
				}
				// b's own, or a neighbour's question
				if from := frame[6:12]; from[5] == 2 || six && frame[ip+6] == unix.IPPROTO_ICMPV6 {
					continue
				}
				if to := net.HardwareAddr(frame[:6]).
					String(); to != "02:00:00:00:02:02" || net.HardwareAddr(frame[6:12]).String() != "02:00:00:00:02:01" ||
					hops != 63 {
					t.Errorf(
						"%s (IPv6 %t): from %s to %s, %d hops: % x",
						protocol,
						six,
						net.HardwareAddr(frame[6:12]),
						to,
						hops,
						frame[:n],
					)
				}
				if !six && sum(frame[ip:ip+20]) != 0xffff {
					t.Errorf("the header's checksum is wrong: % x", frame[ip:ip+20])
				}
				return
			}
		})
	})
}

// openTap sees all packets of a device, or of all: "".
func openTap(t *testing.T, device string) int {
	t.Helper()
	all := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all))
	if err != nil {
		t.Fatal(err)
	}
	i, err := net.InterfaceByName(device)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index})
	}
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10})
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// sum is the Internet's, of 16-bit words.
func sum(b []byte) uint32 {
	var s uint32
	for i := 0; i < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	return s&0xffff + s>>16
}

// Who listens at the pod's device sees every packet.
func TestTapSeesAll(t *testing.T) {
	withPods(t, func(w *twoPods) {
		w.redirects("with nothing in the way")
		tap := openTap(t, "b")
		// Replies leave by a's device, where no tap is. A route that was looked up before a's neighbour entry was there is
		// cached for some ticks.
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			_, n, err := w.request(model.TCP, false, patience, echo.Options{})
			if n > 0 && err == nil {
				break
			}
			if err != nil || time.Now().After(end) {
				t.Fatalf("%d packets were redirected: %v", n, err)
			}
		}
		seen := 0
		for end := time.Now().Add(10 * time.Second); seen == 0; {
			frame := make([]byte, 2048)
			if _, err := unix.Read(tap, frame); err != nil || time.Now().After(end) {
				t.Fatalf("no packet to the pod was seen: %v", err)
			}
			if frame[11] == 1 && binary.BigEndian.Uint16(frame[12:]) == unix.ETH_P_IP {
				seen++
			}
		}
		unix.Close(tap)
		w.redirects("when it is gone")
	})
}

// Packets go where a route leads from now on.
func TestRedirectFollowsRoutes(t *testing.T) {
	nearAndAcross(t, func(t *testing.T, w *twoPods) {
		w.redirects("with nothing in the way")
		w.route("replace", "b", "c")
		each(func(protocol model.Protocol, six bool) {
			if who, _, err := w.request(protocol, six, patience, echo.Options{}); who != "c" {
				t.Errorf("%s (IPv6 %t): when the route leads to c, %q answers: %v", protocol, six, who, err)
			}
		})
		w.run("ip link del dev b")
		w.route("replace", "b", "c")
		if who, _, err := w.request(model.TCP, false, patience, echo.Options{}); who != "c" {
			t.Errorf("when b is gone, %q answers: %v", who, err)
		}
	})
}

// A source that isn't the pod's is the kernel's to judge, and so is a frame for another host.
func TestForgedNotRedirected(t *testing.T) {
	nearAndAcross(t, func(t *testing.T, w *twoPods) {
		w.redirects("with nothing in the way")
		w.run(
			"ip -n " + w.pods["a"].Name + " addr add 10.244.1.9/32 dev eth0; " +
				"ip route add 10.244.1.9 dev c; sysctl -qw net.ipv4.conf.a.rp_filter=1",
		)
		from := echo.Options{From: netip.MustParseAddrPort("10.244.1.9:0")}
		if _, n, err := w.request(model.TCP, false, silence, from); n != 0 || err == nil {
			t.Errorf("%d packets of another address were redirected, answered: %v", n, err)
		}
		w.run("sysctl -qw net.ipv4.conf.a.rp_filter=0")
		if _, n, _ := w.request(model.TCP, false, silence, from); n != 0 { // the kernel lets it in now, and answers lead to c
			t.Errorf("%d packets of another address were redirected", n)
		}
		w.run("ip -n " + w.pods["a"].Name + " neigh replace 169.254.1.1 dev eth0 lladdr 02:00:00:00:09:09")
		if _, n, err := w.request(model.UDP, false, silence, echo.Options{}); n != 0 || err == nil {
			t.Errorf("%d packets in frames for another host were redirected, answered: %v", n, err)
		}
	})
}

// send has a client in a send a datagram to b that may not be fragmented, and wait for the reply.
func (w *twoPods) send(six bool, tos, hops, size int) (err error) {
	network, level, option := "udp4", unix.IPPROTO_IP, unix.IP_TTL
	find, yes, report := unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO, unix.IP_RECVERR
	if six {
		network, level, option = "udp6", unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
		find, yes, report = unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO, unix.IPV6_RECVERR
	}
	w.in("a", func() {
		var c net.Conn
		if c, err = net.Dial(network, net.JoinHostPort(podAddrs["b"][six], "8080")); err != nil {
			return
		}
		defer c.Close()
		raw, _ := c.(*net.UDPConn).SyscallConn()
		raw.Control(func(fd uintptr) {
			err = errors.Join(
				unix.SetsockoptInt(int(fd), level, option, hops),
				unix.SetsockoptInt(int(fd), level, find, yes),
				unix.SetsockoptInt(int(fd), level, report, 1),
			)
			if !six {
				err = errors.Join(err, unix.SetsockoptInt(int(fd), level, unix.IP_TOS, tos))
			}
		})
		if err == nil {
			_, err = c.Write(make([]byte, size))
		}
		if err == nil {
			c.SetReadDeadline(time.Now().Add(patience))
			_, err = c.Read(make([]byte, 2048))
		}
	})
	return err
}

// A packet that is too long for its route or the pod's device, or came too far, is answered by the node, and so is
// one of a class that is routed otherwise.
func TestNoRedirectWhenICMPErrorDue(t *testing.T) {
	nearAndAcross(t, func(t *testing.T, w *twoPods) {
		w.redirects("with nothing in the way")
		for _, six := range []bool{false, true} {
			if err := w.send(six, 0, 64, 1300); err != nil {
				t.Errorf("IPv6 %t: %v", six, err)
			}
			before := w.redirected()
			if err := w.send(six, 0, 1, 100); !errors.Is(err, unix.EHOSTUNREACH) || w.redirected() != before {
				t.Errorf("IPv6 %t: one hop from its end: %v", six, err)
			}
		}
		if err := w.send(false, 0x10, 64, 100); err != nil {
			t.Errorf("by another class: %v", err)
		}
		w.run("ip route add unreachable 10.244.1.2 tos 0x10")
		if err := w.send(false, 0, 64, 100); err != nil {
			t.Errorf("by no class: %v", err)
		}
		before := w.redirected()
		if err := w.send(false, 0x10, 64, 100); !errors.Is(err, unix.EHOSTUNREACH) || w.redirected() != before {
			t.Errorf("by a class whose route ends: %v", err)
		}
		w.run("ip route replace 10.244.1.2 dev b mtu lock 1290; ip -6 route replace fd00:244::b dev b mtu lock 1290")
		for _, six := range []bool{false, true} {
			before := w.redirected()
			if err := w.send(six, 0, 64, 1300); !errors.Is(err, unix.EMSGSIZE) || w.redirected() != before {
				t.Errorf("IPv6 %t: too long for its route: %v, %d packets were redirected", six, err, w.redirected()-before)
			}
		}
		w.route("replace", "b", "b")
		w.run("ip link set dev b mtu 1280")
		for _, six := range []bool{false, true} {
			before := w.redirected()
			if err := w.send(six, 0, 64, 1300); !errors.Is(err, unix.EMSGSIZE) || w.redirected() != before {
				t.Errorf("IPv6 %t: too long: %v, %d packets were redirected", six, err, w.redirected()-before)
			}
		}
		// Streams, in pieces that stand for several packets, find the size.
		for _, six := range []bool{false, true} {
			if who, _, err := w.request(model.TCP, six, patience, echo.Options{Size: 60000}); who != "b" {
				t.Errorf("IPv6 %t: of a long question, %q: %v", six, who, err)
			}
		}
	})
}

// Nothing is redirected any more where that is not wanted.
func TestNoFastPath(t *testing.T) {
	withPods(t, func(w *twoPods) {
		w.redirects("with nothing in the way")
		p := opened(t, ebpf.Options{Cgroup: w.plane.Cgroup, NoFastPath: true})
		defer p.Close()
		if _, err := p.Read(t.Context()); err != nil { // as an agent does that starts again
			t.Fatal(err)
		}
		_, stop := watched(t, p)
		defer stop()
		each(func(protocol model.Protocol, six bool) {
			for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
				who, n, err := w.request(protocol, six, patience, echo.Options{})
				if who != "b" || time.Now().After(end) {
					t.Fatalf("%s (IPv6 %t): %d packets were redirected, %q answered: %v", protocol, six, n, who, err)
				}
				if n == 0 {
					return
				}
			}
		})
	})
}

// Clients that no hook sees reach a Service's endpoint on the same node, and hear it by the Service's address, while
// others are redirected.
func TestServiceBesideFastPath(t *testing.T) {
	withPods(t, func(w *twoPods) {
		w.redirects("with nothing in the way")
		pool := &model.Pool{
			ID:       7,
			Name:     "b",
			Protocol: model.TCP,
			Backends: []model.Backend{{Addr: netip.MustParseAddrPort("10.244.1.2:8080"), Local: true}},
		}
		change(t, w.plane, []model.ServicePart{theNode}, []model.ServicePart{theNode, pool, frontendOf("10.96.0.1:80", pool)})
		ctx, stop := context.WithTimeout(t.Context(), patience)
		defer stop()
		request := func() (err error) {
			w.in("a", func() { _, err = echo.Request(ctx, model.TCP, netip.MustParseAddrPort("10.96.0.1:80"), echo.Options{}) })
			return err
		}
		redirected := false
		for n := 0; !redirected && n < 100; n++ { // where the processors are busy, one may take the host stack
			before := w.redirected()
			if err := request(); err != nil {
				t.Fatalf("by the hooks: %v", err)
			}
			redirected = w.redirected() > before
		}
		if !redirected {
			t.Error("by the hooks: no packet of 100 connections was redirected")
		}
		root, err := cgroup.Root()
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := cgroup.Do(root, request); err != nil {
				t.Errorf("beyond the hooks: %v", err)
			}
		}
		if err := request(); err != nil {
			t.Errorf("by the hooks, thereafter: %v", err)
		}
	})
}
