package network

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// nodeOf reads "name age address,… range,…"; "-" is an empty list.
func nodeOf(text string) source.Change {
	f := strings.Fields(text)
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: f[0]}}
	age, err := time.ParseDuration(f[1])
	if err != nil {
		panic(err)
	}
	n.CreationTimestamp = metav1.NewTime(time.Unix(1_700_000_000, 0).Add(-age))
	list := func(s string) []string {
		return slices.DeleteFunc(strings.Split(s, ","), func(s string) bool { return s == "-" })
	}
	for _, a := range list(f[2]) {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	n.Spec.PodCIDRs = list(f[3])
	return source.Change{Key: source.Key{Kind: source.Node, Name: n.Name}, Object: n}
}

func nodes(lines ...string) (l []source.Change) {
	for _, line := range lines {
		l = append(l, nodeOf(line))
	}
	return l
}

func prefixes(texts ...string) (l []netip.Prefix) {
	for _, t := range texts {
		l = append(l, netip.MustParsePrefix(t))
	}
	return l
}

var eth0 = Device{Name: "eth0", MTU: 1500, Prefixes: prefixes("192.168.0.1/24", "fd99::1/64")}

func config() Config {
	return Config{Node: "a", Devices: []Device{{Name: "lo", MTU: 65536, Prefixes: prefixes("127.0.0.1/8")}, eth0},
		ServiceCIDRs: prefixes("10.96.0.0/16")}
}

const (
	nodeA = "a 9h 192.168.0.1,fd99::1 10.244.1.0/24,fd00:1::/64"
	nodeB = "b 8h 192.168.0.2,fd99::2 10.244.2.0/24,fd00:2::/64"
	nodeC = "c 7h 172.16.0.3,fd98::3 10.244.3.0/24,fd00:3::/64"
)

// print returns a decided state, a line each.
func (r *Resolver) print() (lines []string) {
	n := r.Network()
	if n.Network != nil {
		line := fmt.Sprintf("pods %v mtu %d", n.Network.Ranges, n.Network.MTU)
		if n.Network.Device != model.Veth {
			line += " " + n.Network.Device.String()
		}
		if c := n.Network.Child; c != nil {
			line += fmt.Sprintf(" of %s %v", c.Uplink, c.Own)
		}
		if t := n.Network.Tunnel; t != nil {
			if line += " tunnel"; t.Kind != model.VXLAN {
				line += " " + t.Kind.String()
			}
			line += fmt.Sprintf(" %d:%d %s %x %s %v", t.VNI, t.Port, t.Local, t.MAC, t.Uplink, t.Own)
			if t.Pods != nil {
				line += fmt.Sprintf(" for pods %v", t.Pods)
			}
		}
		lines = append(lines, line)
	}
	for _, t := range n.Routes {
		line := fmt.Sprintf("%s %s", t.To, t.Hop)
		switch t.Hop {
		case model.Direct:
			line += fmt.Sprintf(" %s %s src %s", t.Via, t.Device, t.Source)
		case model.Tunneled:
			if t.Tunnel == model.IPIP {
				line += fmt.Sprintf(" ipip %s src %s", t.Via, t.Source)
				break
			}
			line += fmt.Sprintf(" %s %x %s src %s", t.Via, t.MAC, t.Gateway, t.Source)
		}
		if t.PodsOnly {
			line = strings.Replace(line, " src "+t.Source.String(), " for pods", 1)
		}
		lines = append(lines, line)
	}
	for _, p := range r.Problems() {
		lines = append(lines, "problem "+p.String())
	}
	return lines
}

func TestDecisions(t *testing.T) {
	const pods = "pods [10.244.1.0/24 fd00:1::/64] mtu 1450 tunnel 7:4789 192.168.0.1 0266c0a80001 eth0 " +
		"[10.244.1.1 fd00:1::1]"
	const forPods = " for pods [10.244.1.0/24 fd00:1::/64]"
	b := []string{"10.244.2.0/24 direct 192.168.0.2 eth0 src 192.168.0.1", "fd00:2::/64 direct fd99::2 eth0 src fd99::1"}
	for name, c := range map[string]struct {
		edit  func(*Config)
		nodes []string
		want  []string // lines, or the beginnings of problems
	}{
		"one subnet": {nodes: []string{nodeA, nodeB}, want: append([]string{pods}, b...)},
		"two subnets": {nodes: []string{nodeA, nodeB, nodeC}, want: []string{pods + forPods, b[0],
			"10.244.3.0/24 tunneled 172.16.0.3 0266ac100003 10.244.3.1 src 192.168.0.1",
			"172.16.0.3/32 tunneled 172.16.0.3 0266ac100003 10.244.3.1 for pods", b[1],
			"fd00:3::/64 tunneled 172.16.0.3 0266ac100003 fe80::66:acff:fe10:3 src fd99::1",
			"fd98::3/128 tunneled 172.16.0.3 0266ac100003 fe80::66:acff:fe10:3 for pods"}},
		"IPv6 off": {edit: func(c *Config) { c.NoIPv6 = true }, nodes: []string{nodeA, nodeB}, want: []string{
			"pods [10.244.1.0/24] mtu 1450 tunnel 7:4789 192.168.0.1 0266c0a80001 eth0 [10.244.1.1]", b[0],
			"problem Node a: spec.podCIDRs[1]: no pod gets an address of fd00:1::/64"}},
		"always": {edit: func(c *Config) { c.Overlay = Always }, nodes: []string{nodeA, nodeB}, want: []string{
			pods + forPods, "10.244.2.0/24 tunneled 192.168.0.2 0266c0a80002 10.244.2.1 src 192.168.0.1",
			"192.168.0.2/32 tunneled 192.168.0.2 0266c0a80002 10.244.2.1 for pods",
			"fd00:2::/64 tunneled 192.168.0.2 0266c0a80002 fe80::66:c0ff:fea8:2 src fd99::1",
			"fd99::2/128 tunneled 192.168.0.2 0266c0a80002 fe80::66:c0ff:fea8:2 for pods"}},
		"nodes of several addresses": {nodes: []string{nodeA,
			"b 8h 172.16.0.2,172.17.0.2,fd98::2,172.17.0.9,192.168.0.1,169.254.0.2,10.96.0.2 10.244.2.0/24",
			"c 7h 172.16.0.3,172.17.0.9,10.244.2.7,fd98::3 fd00:3::/64"}, want: []string{pods + forPods,
			"10.244.2.0/24 tunneled 172.16.0.2 0266ac100002 10.244.2.1 src 192.168.0.1",
			"172.16.0.2/32 tunneled 172.16.0.2 0266ac100002 10.244.2.1 for pods",
			"172.17.0.2/32 tunneled 172.16.0.2 0266ac100002 10.244.2.1 for pods",
			"172.17.0.9/32 tunneled 172.16.0.2 0266ac100002 10.244.2.1 for pods",
			"fd00:3::/64 tunneled 172.16.0.3 0266ac100003 fe80::66:acff:fe10:3 src fd99::1",
			"fd98::3/128 tunneled 172.16.0.3 0266ac100003 fe80::66:acff:fe10:3 for pods",
			"problem Node c: status.addresses: 10.244.2.7 is inside 10.244.2.0/24"}},
		"IPIP": {edit: func(c *Config) { c.Tunnel = model.IPIP }, nodes: []string{nodeA, nodeB, nodeC}, want: []string{
			"pods [10.244.1.0/24 fd00:1::/64] mtu 1480 tunnel IPIP 0:0 192.168.0.1 000000000000 eth0 [10.244.1.1] for pods " +
				"[10.244.1.0/24]", b[0], "10.244.3.0/24 tunneled ipip 172.16.0.3 src 192.168.0.1",
			"172.16.0.3/32 tunneled ipip 172.16.0.3 for pods", b[1], "fd00:3::/64 unreachable",
			"problem Node c: spec.podCIDRs[1]: fd00:3::/64 can't be reached from node a: IPIP carries IPv4 alone"}},
		"IPIP without IPv4": {edit: func(c *Config) { c.Tunnel = model.IPIP },
			nodes: []string{"a 9h fd99::1 10.244.1.0/24", "c 7h fd98::3 10.244.3.0/24"}, want: []string{
				"pods [10.244.1.0/24] mtu 1480", "10.244.3.0/24 unreachable",
				"problem Node a: status.addresses: has no IPv4 InternalIP on a device of this node"}},
		"netkit": {edit: func(c *Config) { c.Device, c.Overlay = model.Netkit, Never }, nodes: []string{nodeA},
			want: []string{"pods [10.244.1.0/24 fd00:1::/64] mtu 1500 netkit"}},
		"ipvlan": {edit: func(c *Config) { c.Device, c.Overlay = model.IPVLANL3, Never },
			nodes: []string{nodeA, nodeB, nodeC}, want: []string{
				"pods [10.244.1.0/24 fd00:1::/64] mtu 1500 ipvlan-l3 of eth0 [10.244.1.1 fd00:1::1]", b[0],
				"10.244.3.0/24 external", b[1], "fd00:3::/64 external"}},
		"ipvlan on two links": {edit: func(c *Config) {
			c.Device, c.Overlay, c.Devices = model.IPVLANL2, Never, append(c.Devices, Device{Name: "six", MTU: 1500,
				Prefixes: prefixes("fd99:6::1/64")})
		}, nodes: []string{"a 9h 192.168.0.1,fd99:6::1 10.244.1.0/24,fd00:1::/64"}, want: []string{
			"pods [10.244.1.0/24 fd00:1::/64] mtu 1500 ipvlan-l2 of eth0 [10.244.1.1 fd00:1::1]",
			"problem Node a: status.addresses: InternalIPs 192.168.0.1 and fd99:6::1 are on devices eth0 and six"}},
		"never": {edit: func(c *Config) { c.Overlay = Never }, nodes: []string{nodeA, nodeB, nodeC}, want: []string{
			"pods [10.244.1.0/24 fd00:1::/64] mtu 1500", b[0], "10.244.3.0/24 external", b[1], "fd00:3::/64 external"}},
		"IPv6 alone": {nodes: []string{"a 9h fd99::1 fd00:1::/64", "c 7h fd98::3 fd00:3::/64"}, want: []string{
			"pods [fd00:1::/64] mtu 1430 tunnel 7:4789 fd99::1 02666c193358 eth0 [fd00:1::1] for pods [fd00:1::/64]",
			"fd00:3::/64 tunneled fd98::3 0266997c1849 fe80::66:99ff:fe7c:1849 src fd99::1",
			"fd98::3/128 tunneled fd98::3 0266997c1849 fe80::66:99ff:fe7c:1849 for pods"}},
		"IPv6 pods over IPv4 nodes": {nodes: []string{"a 9h 192.168.0.1 fd00:1::/64", "b 8h 192.168.0.2 fd00:2::/64"},
			want: []string{"pods [fd00:1::/64] mtu 1450 tunnel 7:4789 192.168.0.1 0266c0a80001 eth0 [fd00:1::1]",
				"fd00:2::/64 tunneled 192.168.0.2 0266c0a80002 fe80::66:c0ff:fea8:2 src fd00:1::1"}},
		"an InternalIP that no device has": {edit: func(c *Config) { c.Uplink = "eth0" },
			nodes: []string{"a 9h 198.51.100.1 10.244.1.0/24", "c 7h 172.16.0.3 10.244.3.0/24"}, want: []string{
				"pods [10.244.1.0/24] mtu 1450 tunnel 7:4789 198.51.100.1 0266c6336401 eth0 [10.244.1.1] for pods [10.244.1.0/24]",
				"10.244.3.0/24 tunneled 172.16.0.3 0266ac100003 10.244.3.1 src 10.244.1.1",
				"172.16.0.3/32 tunneled 172.16.0.3 0266ac100003 10.244.3.1 for pods"}},
		"the device by name": {edit: func(c *Config) {
			c.Uplink, c.Devices = "wan", append(c.Devices, Device{Name: "wan", MTU: 9000, Prefixes: prefixes("192.168.7.1/24")})
		}, nodes: []string{nodeA, nodeB}, want: []string{
			"pods [10.244.1.0/24 fd00:1::/64] mtu 8950 tunnel 7:4789 192.168.0.1 0266c0a80001 wan [10.244.1.1 fd00:1::1]" +
				forPods, "10.244.2.0/24 tunneled 192.168.0.2 0266c0a80002 10.244.2.1 src 192.168.0.1",
			"192.168.0.2/32 tunneled 192.168.0.2 0266c0a80002 10.244.2.1 for pods",
			"fd00:2::/64 tunneled 192.168.0.2 0266c0a80002 fe80::66:c0ff:fea8:2 src fd99::1",
			"fd99::2/128 tunneled 192.168.0.2 0266c0a80002 fe80::66:c0ff:fea8:2 for pods"}},
		"overlapping ranges": {nodes: []string{nodeA, nodeB, "c 9m 192.168.0.3 10.244.2.128/25"}, want: append(append(
			[]string{pods}, b...), "problem Node c: spec.podCIDRs[0]: 10.244.2.128/25 overlaps 10.244.2.0/24 of the older "+
			"Node b:")},
		"the older inside the younger": {nodes: []string{nodeA, nodeB, "c 9m 192.168.0.3 10.244.0.0/16"}, want: append(append(
			[]string{pods}, b...), "problem Node c: spec.podCIDRs[0]: 10.244.0.0/16 overlaps 10.244.1.0/24 of the older "+
			"Node a:")},
		"a range around Services": {nodes: []string{nodeA, "b 8h 192.168.0.2 10.0.0.0/8"}, want: []string{pods,
			"problem Node b: spec.podCIDRs[0]: 10.0.0.0/8 overlaps 10.96.0.0/16, where Services are:"}},
		"a range around its own Node": {nodes: []string{nodeA, "b 8h 192.168.7.2 192.168.7.0/24"}, want: []string{pods,
			"problem Node b: spec.podCIDRs[0]: 192.168.7.0/24 holds 192.168.7.2, an address of the Node itself:"}},
		"a range around this node": {nodes: []string{"a 1h 192.168.0.1,fd99::1 10.244.1.0/24,fd00:1::/64",
			"b 8h 172.16.0.2 192.168.0.0/24"}, want: []string{pods,
			"problem Node b: spec.podCIDRs[0]: 192.168.0.0/24 holds 192.168.0.1, an address of Node a:"}},
		"a range around an older Node": {nodes: []string{nodeA, nodeB, "c 1h 172.16.0.2 192.168.0.2/32",
			"d 1h 172.16.0.4 192.168.0.2/31"},
			want: append(append([]string{pods}, b...), "problem Node c: spec.podCIDRs[0]: 192.168.0.2/32 is too small:",
				"problem Node d: spec.podCIDRs[0]: 192.168.0.2/31 is too small:")},
		"a range around an older Node's address": {nodes: []string{nodeA, nodeB, "c 1h 172.16.0.3 192.168.0.0/30"},
			want: append(append([]string{pods}, b...),
				"problem Node c: spec.podCIDRs[0]: 192.168.0.0/30 holds 192.168.0.1, an address of Node a:")},
		"a younger Node's address in a range": {nodes: []string{nodeA, nodeB, "c 1h 10.244.2.9 10.244.3.0/24"},
			want: []string{pods, b[0], "10.244.3.0/24 unreachable", b[1],
				"problem Node c: status.addresses: 10.244.2.9 is inside 10.244.2.0/24, addresses of pods of the older Node b",
				"problem Node c: status.addresses: has no IPv4 InternalIP that others don't have: its pods 10.244.3.0/24 can't " +
					"be reached"}},
		"no ranges": {nodes: []string{nodeA, "b 8h 192.168.0.2 -"}, want: []string{pods,
			"problem Node b: spec.podCIDRs: is empty, so that pods on it get no address"}},
		"bad ranges": {nodes: []string{nodeA, "b 8h 192.168.0.2 x,10.244.2.0/31,0.0.0.0/0,fe80::/64,::ffff:10.0.0.0/104"},
			want: []string{pods,
				`problem Node b: spec.podCIDRs[0]: "x" is no range`, "problem Node b: spec.podCIDRs[1]: 10.244.2.0/31 is too small",
				"problem Node b: spec.podCIDRs[2]: 0.0.0.0/0 can't be", "problem Node b: spec.podCIDRs[3]: fe80::/64 can't be",
				`problem Node b: spec.podCIDRs[4]: "::ffff:10.0.0.0/104" is no range`}},
		"a twin of this node's address": {nodes: []string{nodeA, "b 8h 192.168.0.1 10.244.2.0/24"}, want: []string{pods,
			"10.244.2.0/24 unreachable", "problem Node b: status.addresses: has no IPv4 InternalIP that others don't have"}},
		"this Node isn't there": {nodes: []string{nodeB}, want: []string{"problem Node a: this Node isn't there"}},
		"no device has the address": {nodes: []string{"a 9h 192.168.0.99 10.244.1.0/24"}, want: []string{
			"problem Node a: status.addresses: no device of this node has one of the InternalIPs [192.168.0.99]"}},
		"an MTU that doesn't fit": {edit: func(c *Config) { c.MTU = 1500 }, nodes: []string{nodeA}, want: []string{
			strings.Replace(pods, "1450", "1500", 1), "problem Node a: packets of pods may have 1500 bytes, but 1450 fit"}},
		"too small for IPv6": {edit: func(c *Config) { c.Devices = []Device{{"eth0", 1300, eth0.Prefixes}} },
			nodes: []string{nodeA},
			want:  []string{strings.Replace(pods, "1450", "1280", 1), "problem Node a: 1250 bytes of a packet fit"}},
	} {
		t.Run(name, func(t *testing.T) {
			set := config()
			if c.edit != nil {
				c.edit(&set)
			}
			r := New(set)
			r.Apply(nodes(c.nodes...))
			same := func(got, want string) bool {
				return got == want || strings.HasPrefix(want, "problem") && strings.HasPrefix(got, want)
			}
			if got := r.print(); !slices.EqualFunc(got, c.want, same) {
				t.Errorf("got:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(c.want, "\n"))
			}
		})
	}
}

func TestServiceCIDRObjects(t *testing.T) {
	r := New(config())
	r.Apply(nodes(nodeA, nodeB))
	cidr := source.Change{Key: source.Key{Kind: source.ServiceCIDR, Name: "more"},
		Object: &networkingv1.ServiceCIDR{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.244.2.0/28", "x"}}}}
	if c := r.Apply([]source.Change{cidr}); len(c.Del) != 2 || len(c.Put) != 1 || len(r.Problems()) != 1 {
		t.Errorf("%v, %v", c, r.Problems())
	}
	cidr.Object = nil
	if c := r.Apply([]source.Change{cidr}); len(c.Put) != 2 || len(r.Problems()) != 0 {
		t.Errorf("%v, %v", c, r.Problems())
	}
}

func TestMTUFollowsTheDevice(t *testing.T) {
	r := New(config())
	r.Apply(nodes(nodeA, nodeB))
	r.SetDevices([]Device{{"eth0", 9000, eth0.Prefixes}})
	c := r.Apply(nil)
	if len(c.Put) != 1 || c.Put[0].(*model.Network).MTU != 8950 || c.Put[0].(*model.Network).Tunnel.MTU != 8950 {
		t.Errorf("%v", c)
	}
	r.SetDevices([]Device{{"eth0", 9000, slices.Clone(eth0.Prefixes)}})
	if c := r.Apply(nil); !c.Empty() {
		t.Errorf("nothing changed: %v", c)
	}
}

func TestUnchangedNodesCostNothing(t *testing.T) {
	r := New(config())
	r.Apply(nodes(nodeA, nodeB))
	before := r.Network()
	if c := r.Apply(nodes(nodeB, nodeA)); !c.Empty() || r.stale {
		t.Errorf("%v", c)
	}
	r.Apply(nodes("c 7h 192.168.0.3 10.244.3.0/24"))
	after := r.Network()
	if after.Network != before.Network || after.Routes[0] != before.Routes[0] {
		t.Error("equal parts are other pointers")
	}
}

// TestEndsOfNodes has a node whose family differs from the tunnel's, and one that is reached directly: what they send
// through the tunnel has their ends as outer sources.
func TestEndsOfNodes(t *testing.T) {
	for overlay, own := range map[Overlay]bool{Subnets: true, Always: true, Never: false} {
		c := config()
		c.Overlay = overlay
		r := New(c)
		r.Apply(nodes(nodeA, nodeB, nodeC))
		for address, want := range map[string]string{"10.244.2.1": "192.168.0.2", "fd00:2::1": "192.168.0.2 fd99::2",
			"10.244.3.1": "172.16.0.3", "fd00:3::1": "172.16.0.3 fd98::3"} {
			got, route := "", r.Network().Route(netip.MustParseAddr(address))
			if route.End.IsValid() {
				got = route.End.String()
			}
			if route.Internal.IsValid() {
				got += " " + route.Internal.String()
			}
			if !own {
				want = ""
			}
			if on := overlay == Always && route.Node == "b"; route.OnLink != on {
				t.Errorf("%s, overlay %s: on a link: %t", address, overlay, route.OnLink)
			}
			if got != want {
				t.Errorf("%s, overlay %s: %q, want %q", address, overlay, got, want)
			}
		}
	}
}

func TestRouteOfAnAddress(t *testing.T) {
	r := New(config())
	r.Apply(nodes(nodeA, nodeB, nodeC))
	n := r.Network()
	if l := n.Parts(); len(l) != 7 || model.NetworkOwner(l[0]).Name != "a" || model.NetworkOwner(l[1]).Name != "b" {
		t.Errorf("%v", l)
	}
	for a, want := range map[string]string{"10.244.2.0": "b", "10.244.2.255": "b", "10.244.3.7": "c", "fd00:2::1": "b",
		"172.16.0.3": "c", "fd98::3": "c", "192.168.0.2": "", "172.16.0.2": "",
		"10.244.1.1": "", "10.244.4.0": "", "10.243.0.0": "", "fd00:9::": "", "::": ""} {
		got := ""
		if x := n.Route(netip.MustParseAddr(a)); x != nil {
			got = x.Node
		}
		if got != want {
			t.Errorf("%s: %q, want %q", a, got, want)
		}
	}
}

// world is Nodes with few addresses and ranges, so that many are in conflict.
func world(roll func(int) int) (lines []string) {
	for i := range 1 + roll(8) {
		line := fmt.Sprintf("%c %dh ", 'a'+i, roll(4))
		for range 1 + roll(2) {
			line += []string{"192.168.0.%d,", "172.16.0.%d,", "fd99::%d,", "fd98::%d,", "10.244.2.%d,"}[roll(5)]
			line = fmt.Sprintf(line, 1+roll(3))
		}
		line = strings.TrimSuffix(line, ",") + " "
		for range roll(3) {
			line += fmt.Sprintf([]string{"10.244.%d.0/24,", "10.244.%d.0/22,", "fd00:%d::/64,", "fd00:%d::/30,",
				"192.168.%d.0/28,", "10.96.%d.0/24,"}[roll(6)], roll(4))
		}
		lines = append(lines, strings.TrimSuffix(line+"-", ",-"))
	}
	return lines
}

// judge compares a Resolver that was told in steps, some taken back, with one that was told at once, and what the
// changes say with what is decided.
func judge(t *testing.T, roll func(int) int) {
	lines := world(roll)
	set := config()
	set.Overlay = []Overlay{Subnets, Always, Never}[roll(3)]
	once := New(set)
	once.Apply(nodes(lines...))

	r := New(set)
	held := map[model.NetworkPart]bool{}
	apply := func(c ...source.Change) {
		d := r.Apply(c)
		for _, p := range d.Del {
			if !held[p] {
				t.Errorf("%v goes that wasn't there", p)
			}
			delete(held, p)
		}
		for _, p := range d.Put {
			held[p] = true
		}
	}
	perm := rand.New(rand.NewPCG(uint64(roll(250)), 1)).Perm(len(lines))
	for _, i := range perm {
		if roll(3) == 0 { // something else first
			other := nodeOf(world(roll)[0])
			other.Key.Name = lines[i][:1]
			other.Object.(*corev1.Node).Name = other.Key.Name
			apply(other)
		}
		if roll(3) == 0 {
			apply(nodeOf("z 1h 192.168.0.9 10.244.0.0/16"), source.Change{Key: source.Key{Kind: source.Node, Name: "y"}})
		}
		apply(nodeOf(lines[i]))
	}
	apply(source.Change{Key: source.Key{Kind: source.Node, Name: "z"}})
	if a, b := once.print(), r.print(); !slices.Equal(a, b) {
		t.Errorf("%v\nat once:\n%s\nin steps:\n%s", lines, strings.Join(a, "\n"), strings.Join(b, "\n"))
	}
	for _, p := range r.Network().Parts() {
		if !held[p] {
			t.Errorf("%v was never put", p)
		}
		delete(held, p)
	}
	if len(held) > 0 {
		t.Errorf("%d parts were never deleted", len(held))
	}
	for i, a := range r.Network().Routes {
		for _, b := range r.Network().Routes[:i] {
			if a.To.Overlaps(b.To) {
				t.Errorf("%s and %s overlap", a, b)
			}
		}
	}
}

func TestOrderNeverMatters(t *testing.T) {
	for seed := range uint64(3000) {
		judge(t, rand.New(rand.NewPCG(seed, 2)).IntN)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func FuzzNodes(f *testing.F) {
	f.Add([]byte{3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1, 1, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		judge(t, func(n int) int {
			if len(b) == 0 {
				return 0
			}
			x := int(b[0]) % n
			b = b[1:]
			return x
		})
	})
}

func FuzzReadNode(f *testing.F) {
	f.Add("10.244.1.0/24", "192.168.0.1")
	f.Add("fd00::/64", "fd99::1%eth0")
	f.Fuzz(func(t *testing.T, cidr, address string) {
		c := nodeOf(nodeA)
		n := c.Object.(*corev1.Node)
		n.Spec.PodCIDRs, n.Spec.PodCIDR = []string{cidr, cidr}, cidr
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: address})
		r := New(config())
		r.Apply([]source.Change{c, nodeOf(nodeB)})
		if net := r.network; net != nil && len(net.Ranges)+len(r.Problems()) == 0 {
			t.Errorf("%q is lost", cidr)
		}
	})
}

// cluster returns n Nodes that are all in one subnet.
func cluster(n int) []source.Change {
	l := nodes(nodeA)
	for i := 1; i < n; i++ {
		l = append(l, nodeOf(fmt.Sprintf("n%d %dm 172.16.%d.%d 10.%d.%d.0/24,fd00:%x::/64", i, i, i>>8, i&255, 128+i>>8,
			i&255,
			i+9)))
	}
	return l
}

func TestProblemsAreBounded(t *testing.T) {
	l := cluster(500)
	for _, c := range l[1:] {
		c.Object.(*corev1.Node).Spec.PodCIDRs = []string{"10.200.0.0/16"}
	}
	r := New(config())
	r.Apply(l)
	if p := r.Problems(); len(p) != mostProblems+1 || !strings.Contains(p[mostProblems].Message, "398 more") {
		t.Errorf("%d problems, %v", len(p), p[len(p)-1])
	}
	if !reflect.DeepEqual(r.Problems(), r.Problems()) {
		t.Error("problems change by themselves")
	}
}

func BenchmarkOneNodeOf5000(b *testing.B) {
	r := New(config())
	r.Apply(cluster(5000))
	one := []source.Change{nodeOf("n77 2h 172.16.200.1 10.250.1.0/24"), nodeOf("n77 2h 172.16.200.2 10.250.1.0/24")}
	i := 0
	for b.Loop() {
		i++
		if c := r.Apply(one[i%2 : i%2+1]); c.Empty() {
			b.Fatal("nothing changed")
		}
	}
}
