package service

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

func addrs(texts ...string) (l []netip.Addr) {
	for _, t := range texts {
		l = append(l, netip.MustParseAddr(t))
	}
	return l
}

func prefixes(texts ...string) (l []netip.Prefix) {
	for _, t := range texts {
		l = append(l, netip.MustParsePrefix(t))
	}
	return l
}

func TestNode(t *testing.T) {
	externalIP := func(ip string) editNode {
		return func(n *corev1.Node) {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: ip},
				corev1.NodeAddress{Type: corev1.NodeHostName, Address: "n1"})
		}
	}
	for _, c := range []struct {
		name      string
		config    Config
		node      *corev1.Node
		addresses string
		pods      string
		problems  []string
	}{
		{"nothing", Config{}, nil, "[]", "[]", nil},
		{"another node", Config{}, node(internalIPs("172.18.0.9"), podCIDRs("10.244.9.0/24"),
			func(n *corev1.Node) { n.Name = "n9" }), "[]", "[]", lines("Node n1  NodeUnknown")},
		{"addresses, sorted, once", Config{Addresses: addrs("127.0.0.1", "172.18.0.2")},
			node(internalIPs("172.18.0.2", "fd18::2"), externalIP("192.0.2.2")),
			"[127.0.0.1 172.18.0.2 192.0.2.2 fd18::2]", "[]", nil},
		{"unreadable addresses", Config{}, node(internalIPs("172.18.0.2", "n1", "169.254.0.1")), "[172.18.0.2]", "[]",
			lines("Node n1 status.addresses[1].address InvalidAddress", "Node n1 status.addresses[2].address UnusableAddress")},
		{"podCIDRs", Config{}, node(podCIDRs("fd24::/64", "10.244.1.0/24")), "[]", "[10.244.1.0/24 fd24::/64]", nil},
		{"podCIDR alone", Config{}, node(func(n *corev1.Node) { n.Spec.PodCIDR = "10.244.1.7/24" }), "[]", "[10.244.1.0/24]",
			nil},
		{"podCIDRs unreadable", Config{}, node(podCIDRs("10.244.1.0/24", "pods")), "[]", "[10.244.1.0/24]",
			lines("Node n1 spec.podCIDRs[1] InvalidRange")},
		{"configured", Config{ClusterCIDRs: prefixes("10.244.128.0/17", "10.244.0.5/16")},
			node(podCIDRs("10.99.0.0/24", "pods")), "[]", "[10.244.0.0/16]", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.config.Node = "n1"
			r := New(c.config)
			if c.node != nil {
				r.Apply(puts(c.node))
			}
			n := r.Services().ServiceNode
			same(t, "name", n.Name, "n1")
			same(t, "addresses", sprint(n.Addresses), c.addresses)
			same(t, "pods", sprint(n.Pods), c.pods)
			same(t, "problems", problemLines(r), c.problems)
		})
	}
}

func TestNodePorts(t *testing.T) {
	const all4, all6 = "0.0.0.0-126.255.255.255 128.0.0.0-255.255.255.255", "::2-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	const everything = all4 + " " + all6
	n := node(internalIPs("172.18.0.2", "172.18.0.3", "fd18::2"))
	for _, c := range []struct {
		list      string // comma-separated
		node      *corev1.Node
		want      string
		localhost bool
	}{
		{"", n, everything, false},
		{"all", n, everything, false},
		{"primary", n, "172.18.0.2-172.18.0.2 fd18::2-fd18::2", false},
		{"primary", nil, "", false},
		{"localhost", n, "127.0.0.0-127.255.255.255", true},
		{"all,localhost", n, "0.0.0.0-255.255.255.255 ::2-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", true},
		{"primary,localhost", n, "127.0.0.0-127.255.255.255 172.18.0.2-172.18.0.2 fd18::2-fd18::2", true},
		{"172.18.0.0/16", n, "172.18.0.0-172.18.255.255 " + all6, false},
		{"172.18.0.0/16,primary", n, "172.18.0.0-172.18.255.255 fd18::2-fd18::2", false},
		{"10.128.0.0/9,10.0.0.0/9,10.1.0.0/16", n, "10.0.0.0-10.255.255.255 " + all6, false},
		{"192.168.0.0/24,10.0.0.0/8", n, "10.0.0.0-10.255.255.255 192.168.0.0-192.168.0.255 " + all6, false},
		{"127.0.0.1/32", n, "127.0.0.1-127.0.0.1 " + all6, true},
		{"0.0.0.0/0", n, "0.0.0.0-255.255.255.255 " + all6, true},
		{"::/0", n, everything, false},
		{"fd18::/127,fd18::2/127", n, all4 + " fd18::-fd18::3", false},
		{"primary", node(externalIPsOf("192.0.2.7", "192.0.2.8")), "192.0.2.7-192.0.2.7", false},
		{"primary", node(externalIPsOf("192.0.2.7", "2001:db8::7"), internalIPs("172.18.0.2")),
			"172.18.0.2-172.18.0.2 2001:db8::7-2001:db8::7", false},
	} {
		t.Run(c.list, func(t *testing.T) {
			config := n1
			if c.list != "" {
				config.NodePortAddresses = strings.Split(c.list, ",")
			}
			r := New(config)
			if c.node != nil {
				r.Apply(puts(c.node))
			}
			got := r.Services().ServiceNode
			same(t, "ranges", strings.Trim(sprint(got.NodePorts), "[]"), c.want)
			same(t, "localhost", got.Localhost, c.localhost)
			same(t, "problems", problemLines(r), nil)
		})
	}
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		name   string
		config Config
		want   []string // parts of the error; nil: none
	}{
		{"good", Config{Node: "n1", ClusterCIDRs: prefixes("10.244.0.0/16"),
			NodePortAddresses: lines("primary", "10.0.0.0/8")}, nil},
		{"no name", Config{}, lines("Node: ", "set it to the name of the Node object")},
		{"address", Config{Node: "n1", Addresses: append(addrs("10.0.0.1", "::ffff:10.0.0.1"), netip.Addr{})},
			lines("Addresses[1]: ::ffff:10.0.0.1", "Addresses[2]: ", "use plain addresses")},
		{"cluster CIDR", Config{Node: "n1", ClusterCIDRs: []netip.Prefix{{}}}, lines("ClusterCIDRs[0]: ", "use one such as")},
		{"node port address", Config{Node: "n1", NodePortAddresses: lines("all", "eth0", "10.0.0.1")},
			lines(`NodePortAddresses[1]: "eth0"`, `NodePortAddresses[2]: "10.0.0.1"`, "give a range")},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.config.Validate()
			if (err == nil) != (c.want == nil) {
				t.Fatalf("error %v", err)
			}
			for _, part := range c.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("no %q in %q", part, err)
				}
			}
			if got := len(New(c.config).Problems()) == 0; got != (err == nil) {
				t.Errorf("New has no problems: %t, Validate gives %v", got, err)
			}
		})
	}
}

// What is replaced is a problem, and no reason not to begin: kube-proxy begins with it.
func TestReplacedSettings(t *testing.T) {
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Config{Node: "n1", NodePortAddresses: lines("::1/128")}, "NodePortAddresses[0] LoopbackNotServed"},
		{Config{Node: "n1", Balancing: Balancing{Scheduler: model.DestinationHash},
			Capabilities: model.Capabilities{Schedulers: model.SchedulersOf(model.RoundRobin)}},
			"Scheduler SchedulerNotAvailable"},
	} {
		if err := c.config.Validate(); err != nil {
			t.Error(err)
		}
		same(t, "problems", problemLines(New(c.config)), lines(c.want))
	}
}

func TestWrongClusterCIDRsDontFallBack(t *testing.T) {
	r := resolved(Config{Node: "n1", ClusterCIDRs: []netip.Prefix{{}}}, node(podCIDRs("10.244.1.0/24")))
	same(t, "pods", sprint(r.Services().Node.Pods), "[]")
}

// Node ports at other nodes' addresses follow nodePortAddresses, and what other Nodes say changes no frontend.
func TestRemoteNodePorts(t *testing.T) {
	a := node(podCIDRs("10.244.1.0/24"), internalIPs("172.18.0.1", "fd00::1"))
	b := node(podCIDRs("10.244.2.0/24"), internalIPs("172.18.0.2", "172.19.0.2", "fd00::2"))
	// one that claims a pod's address, and this node's
	c := node(podCIDRs("10.244.3.0/24"), internalIPs("172.18.0.3", "10.244.2.9", "172.18.0.1"))
	b.Name, c.Name = "n2", "n3"
	port, cannot := svc(nodePort(30080)), model.Capabilities{Unsupported: model.Unsupported{NoRemote: "it can't"}}
	for _, x := range []struct {
		name    string
		config  Config
		want    string
		service edit
		serves  bool
	}{
		{"all", Config{}, "[172.18.0.2 172.18.0.3 172.19.0.2 fd00::2]", nil, true},
		{"range", Config{NodePortAddresses: lines("172.19.0.0/16")}, "[172.19.0.2 fd00::2]", nil, true},
		{"primary", Config{NodePortAddresses: lines("primary")}, "[172.18.0.2 172.18.0.3 fd00::2]", nil, true},
		{"localhost", Config{NodePortAddresses: lines("localhost")}, "[]", nil, true},
		{"masqueradeAll", Config{MasqueradeAll: true}, "[]", nil, false},
		{"unsupported", Config{Capabilities: cannot}, "[]", nil, false},
		{"policy Local", Config{}, "[]", external("Local"), false},
	} {
		t.Run(x.name, func(t *testing.T) {
			x.config.Node = "n1"
			s := port.DeepCopy()
			if x.service != nil {
				x.service(s)
			}
			r := resolved(x.config, s, a, b, c)
			same(t, "addresses", sprint(r.Services().ServiceNode.RemoteNodePorts), x.want)
			if f := frontend(t, r, "*4:30080/tcp"); f.Remote != x.serves || frontend(t, r, "10.96.0.1:80/tcp").Remote {
				t.Errorf("at other nodes' addresses: %v, want %v", f.Remote, x.serves)
			}
		})
	}
	none := resolved(n1, svc(), a, b)
	for _, x := range []struct {
		put  *corev1.Service
		want string
	}{{svc(), "[]"}, {port, "[172.18.0.2 172.19.0.2 fd00::2]"}, {svc(), "[]"}} { // the first one, and the last gone
		none.Apply(puts(x.put))
		same(t, "addresses", sprint(none.Services().ServiceNode.RemoteNodePorts), x.want)
	}
	r := resolved(n1, port, a, b)
	same(t, "parts that a Node changes", partNames(r.Apply(puts(c)).Services.Put), lines("node"))
	if d := r.Apply(puts(c.DeepCopy())); !d.Empty() {
		t.Errorf("a heartbeat changes %v", partNames(d.Services.Put))
	}
}

// A change of the node changes what depends on it, and no more.
func TestNodeChanges(t *testing.T) {
	base := objects(
		svc(ports(sport("http", 80)), distribute("PreferSameZone")), eps(ep("10.0.0.1", in("z1")), ep("10.0.0.2", in("z2"))),
		svc(named("lb"), clusterIPs("10.96.0.2"), ingress("192.0.2.1"), sources("172.18.0.0/16")))
	first := node(zoned("z1"), podCIDRs("10.244.1.0/24"), internalIPs("172.18.0.2"))
	for _, c := range []struct {
		name string
		node *corev1.Node // nil: gone
		want []string     // changed parts: "node", pools' names, entries
	}{
		{"heartbeat", func() *corev1.Node {
			n := first.DeepCopy()
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeReady})
			n.ResourceVersion = "2"
			return n
		}(), nil},
		{"zone", node(zoned("z2"), podCIDRs("10.244.1.0/24"), internalIPs("172.18.0.2")),
			lines("shop/web:http tcp ipv4 cluster", "10.96.0.1:80/tcp")},
		{"podCIDRs", node(zoned("z1"), podCIDRs("10.244.2.0/24"), internalIPs("172.18.0.2")), lines("node")},
		{"no podCIDRs", node(zoned("z1"), internalIPs("172.18.0.2")), lines("node", "10.96.0.2:80/tcp", "192.0.2.1:80/tcp",
			"10.96.0.1:80/tcp")},
		{"address", node(zoned("z1"), podCIDRs("10.244.1.0/24"), internalIPs("172.19.0.2")),
			lines("node", "192.0.2.1:80/tcp")},
		{"gone", nil, lines("node", "shop/web:http tcp ipv4 cluster", "10.96.0.2:80/tcp", "192.0.2.1:80/tcp",
			"10.96.0.1:80/tcp")},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := resolved(n1, append(base, first)...)
			changes := dels(first)
			if c.node != nil {
				changes = puts(c.node)
			}
			d := r.Apply(changes)
			same(t, "put", partNames(d.Services.Put), c.want)
			if len(d.Services.Del) != len(d.Services.Put) {
				t.Errorf("%d put, %d deleted", len(d.Services.Put), len(d.Services.Del))
			}
		})
	}
}

func TestOtherNodesCostNothing(t *testing.T) {
	r := resolved(n1, node(), svc())
	other := puts(node(zoned("z9"), func(n *corev1.Node) { n.Name = "n9" }))
	if n := testing.AllocsPerRun(100, func() { r.Apply(other) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func partNames(ps []model.ServicePart) (names []string) {
	for _, p := range ps {
		switch p := p.(type) {
		case *model.ServiceNode:
			names = append(names, "node")
		case *model.Pool:
			names = append(names, p.Name)
		case *model.Frontend:
			names = append(names, p.Entry.String())
		case *model.ClusterIP:
			names = append(names, p.Addr.String())
		}
	}
	return names
}

func TestFirstDeltaIncludesTheNode(t *testing.T) {
	r := New(n1)
	if d := r.Apply(nil); len(d.Services.Put) != 1 || d.Services.Put[0] != model.ServicePart(r.Services().ServiceNode) ||
		len(d.Services.Del) != 0 {
		t.Errorf("the first delta is %v", d)
	}
	if d := r.Apply(puts(&corev1.Pod{}, &corev1.Namespace{})); !d.Empty() {
		t.Errorf("the second delta is %v", d)
	}
	never := source.Key{Kind: source.Service, Namespace: "x", Name: "never there"}
	if d := r.Apply([]source.Change{{Key: never}}); !d.Empty() || len(r.services) != 0 {
		t.Errorf("the third delta is %v", d)
	}
}

func TestUnknownNode(t *testing.T) {
	r := New(Config{Node: "nowhere"})
	for _, step := range []struct {
		name string
		obj  *corev1.Node
		want int
	}{{"n1", node(), 1}, {"nowhere", node(), 0}, {"nowhere", nil, 1}, {"n1", nil, 0}} {
		c := source.Change{Key: source.Key{Kind: source.Node, Name: step.name}}
		if step.obj != nil {
			c.Object = step.obj
		}
		r.Apply([]source.Change{c})
		n := 0
		for _, p := range r.Problems() {
			if p.Reason == "NodeUnknown" {
				n++
			}
		}
		if n != step.want {
			t.Errorf("after %s, %t: %d problems, want %d", step.name, step.obj != nil, n, step.want)
		}
	}
}

// The addresses of interfaces come and go without the Node object: what is known of the node, and what is said of
// external IPs that are its own, follow with the next Delta. What is the same again is no change.
func TestSetAddresses(t *testing.T) {
	r := New(Config{Node: "n1", Addresses: addrs("192.0.2.7")})
	r.Apply(puts(node(internalIPs("172.18.0.2")), svc(externalIPs("192.0.2.8"))))
	same(t, "problems at first", problemLines(r), nil)
	for _, step := range []struct {
		addresses []netip.Addr
		want      string
		problems  []string
		same      bool
	}{
		{addrs("192.0.2.8", "192.0.2.7"), "[172.18.0.2 192.0.2.7 192.0.2.8]", lines("spec.externalIPs[0] NodeAddress"),
			false},
		{addrs("192.0.2.7", "192.0.2.8"), "[172.18.0.2 192.0.2.7 192.0.2.8]", lines("spec.externalIPs[0] NodeAddress"), true},
		{addrs("172.18.0.2"), "[172.18.0.2]", nil, false},
	} {
		r.SetAddresses(step.addresses)
		d := r.Apply(nil)
		if is := fmt.Sprint(r.Services().Node.Addresses); is != step.want || d.Empty() != step.same {
			t.Errorf("%s: the node has %s, and changed: %t", step.addresses, is, !d.Empty())
		}
		same(t, "problems", problemLines(r), step.problems)
	}
}

func TestLeaving(t *testing.T) {
	being, tainted := node(), node()
	being.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	tainted.Spec.Taints = []corev1.Taint{{Key: toBeDeleted}}
	other := node(func(n *corev1.Node) { n.Name = "n2" })
	gone := source.Change{Key: source.KeyOf(node())}
	for _, c := range []struct {
		name     string
		nodeless bool
		changes  []source.Change
		want     string
	}{
		{"never seen", false, nil, "no Node of this name was seen"},
		{"another alone", false, puts(other), "no Node of this name was seen"},
		{"Services alone", true, nil, ""},
		{"another alone, where none need be", true, puts(other), "no Node of this name was seen"},
		{"there", false, puts(node()), ""},
		{"tainted", false, puts(tainted), "the Node has the taint " + toBeDeleted},
		{"being deleted", true, puts(being), "the Node is being deleted"},
		{"deleted", true, append(puts(node()), gone), "the Node was deleted"},
		{"there again", false, append(append(puts(node()), gone), puts(node())...), ""},
	} {
		r := New(Config{Node: "n1", Objects: Objects{Nodeless: c.nodeless}})
		for _, x := range c.changes {
			r.Apply([]source.Change{x})
		}
		if is := r.Leaving(); is != c.want {
			t.Errorf("%s: %q, want %q", c.name, is, c.want)
		}
	}
}

func TestPodsUnknown(t *testing.T) {
	veth := model.Interfaces{Name: "veth", Prefix: true}
	for _, c := range []struct {
		name   string
		config Config
		node   *corev1.Node
		want   string // field and reason of the problem
	}{
		{"the Node has no podCIDRs", Config{}, node(), "spec.podCIDRs PodsUnknown"},
		{"they are given", Config{}, node(podCIDRs("10.244.1.0/24")), ""},
		{"in the old way", Config{}, node(func(n *corev1.Node) { n.Spec.PodCIDR = "10.244.1.7/24" }), ""},
		{"the cluster's ranges", Config{ClusterCIDRs: prefixes("10.244.0.0/16")}, node(), ""},
		{"no range", Config{NoPods: true}, node(podCIDRs("10.244.1.0/24")), "ClusterCIDRs PodsUnknown"},
		{"interfaces", Config{PodInterfaces: veth}, node(), ""},
		{"a name too long", Config{PodInterfaces: model.Interfaces{Name: "abcdefghijklmnop"}}, node(),
			"PodInterfaces InvalidInterface"},
		{"a name that no interface has", Config{PodInterfaces: model.Interfaces{Name: "a b"}}, node(),
			"PodInterfaces InvalidInterface"},
	} {
		c.config.Node = "n1"
		if err := c.config.Validate(); err != nil {
			t.Errorf("%s: the start is refused: %v", c.name, err)
		}
		got := ""
		for _, p := range resolved(c.config, c.node).Problems() {
			got += p.Field + " " + p.Reason
			if !strings.Contains(p.Message, "externalTrafficPolicy Local") {
				t.Errorf("%s: nothing says what follows: %s", c.name, p.Message)
			}
		}
		same(t, c.name, got, c.want)
	}
}

func TestPodsByInterface(t *testing.T) {
	c := Config{Node: "n1", PodInterfaces: model.Interfaces{Name: "cni0"}, ClusterCIDRs: prefixes("10.0.0.0/8")}
	r := resolved(c, node(podCIDRs("10.244.1.0/24")), svc(), eps(ep("10.244.1.1", on("n1"))))
	n := r.Services().ServiceNode
	same(t, "pods", sprint(n.Pods), "[]")
	same(t, "interfaces", n.PodInterfaces.String(), "cni0")
	masquerade := frontend(t, r, "10.96.0.1:80/tcp").Masquerade
	same(t, "masqueraded", masquerade, model.OriginsOf(model.FromNode, model.FromExternal))
}
