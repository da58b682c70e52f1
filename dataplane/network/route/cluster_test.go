package route

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	resolve "fairlead.dev/fairlead/resolve/network"
	"fairlead.dev/fairlead/sandbox/echo"
	"fairlead.dev/fairlead/source"
)

// cluster is nodes a and b on one subnet and c on another one, behind a router that knows no pods. Each has a pod.
type cluster struct {
	*testing.T
	nodes  map[string]*node
	router *netns.Namespace
	tunnel model.TunnelKind
}

// node is one of them, with the line from its resolver to its kernel.
type node struct {
	name      string
	wire      []netip.Prefix // its addresses
	ranges    []netip.Prefix
	pod       []netip.Addr
	ns, podNS *netns.Namespace
	resolver  *resolve.Resolver
	loop      *reconcile.Loop[model.NetworkPart, Key, Value]
	plane     *Plane
}

func (c *cluster) must(err error) {
	c.Helper()
	if err != nil {
		c.Fatal(err)
	}
}

func prefixesOf(texts ...string) (l []netip.Prefix) {
	for _, t := range texts {
		l = append(l, netip.MustParsePrefix(t))
	}
	return l
}

// newNode returns node a, b or c by its number.
func newNode(i int) *node {
	subnet := []string{"192.168.0", "192.168.0", "172.16.0"}[i]
	six := []string{"fd99:", "fd99:", "fd98:"}[i]
	return &node{name: string(rune('a' + i)),
		wire:   prefixesOf(fmt.Sprintf("%s.%d/24", subnet, i+1), fmt.Sprintf("%s:%d/64", six, i+1)),
		ranges: prefixesOf(fmt.Sprintf("10.244.%d.0/24", i+1), fmt.Sprintf("fd00:%d::/64", i+1)),
		pod: []netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.244.%d.10", i+1)),
			netip.MustParseAddr(fmt.Sprintf("fd00:%d::10", i+1))},
	}
}

// object returns the node's Node.
func (n *node) object() *corev1.Node {
	o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}
	for _, p := range n.wire {
		o.Status.Addresses = append(o.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: p.Addr().String()})
	}
	for _, p := range n.ranges {
		o.Spec.PodCIDRs = append(o.Spec.PodCIDRs, p.String())
	}
	return o
}

func change(name string, o *corev1.Node) source.Change {
	c := source.Change{Key: source.Key{Kind: source.Node, Name: name}}
	if o != nil {
		c.Object = o
	}
	return c
}

// quiet are settings of every namespace.
var quiet = []sysctl.Setting{{Name: "net/ipv4/conf/all/rp_filter", Value: "0"},
	{Name: "net/ipv4/conf/default/rp_filter", Value: "0"}, {Name: "net/ipv6/conf/all/accept_dad", Value: "0"},
	{Name: "net/ipv6/conf/default/accept_dad", Value: "0"}}

var served = []echo.Port{{Number: 80, Protocol: model.TCP}, {Number: 53, Protocol: model.UDP}}

func newCluster(t *testing.T) *cluster { return newClusterOf(t, model.VXLAN) }

// newClusterOf returns a cluster with an overlay of a kind.
func newClusterOf(t *testing.T, tunnel model.TunnelKind) *cluster {
	t.Helper()
	c := &cluster{T: t, nodes: map[string]*node{}, tunnel: tunnel}
	router := c.namespace()
	c.router = router
	c.must(sysctl.Set(router, sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"},
		sysctl.Setting{Name: "net/ipv6/conf/all/forwarding", Value: "1"}))
	r, err := link.Dial(router)
	c.must(err)
	defer r.Close()
	subnets := map[string]int{}
	for i := range 3 {
		n := newNode(i)
		n.ns, n.podNS = c.namespace(), c.namespace()
		c.nodes[n.name] = n
		subnet := n.wire[0].Masked().String()
		if subnets[subnet] == 0 {
			subnets[subnet], err = r.AddBridge(fmt.Sprint("br", len(subnets)))
			c.must(err)
			for _, g := range n.routers() {
				c.must(r.AddAddress(subnets[subnet], g))
			}
		}
		c.plug(r, n, subnets[subnet])
		c.addPod(n)
	}
	for _, n := range c.nodes {
		c.run(n)
	}
	c.sync()
	return c
}

// routers returns the router's addresses on the node's link.
func (n *node) routers() (l []netip.Prefix) {
	for _, p := range n.wire {
		b := p.Masked().Addr().AsSlice()
		b[len(b)-1] = 254
		a, _ := netip.AddrFromSlice(b)
		l = append(l, netip.PrefixFrom(a, p.Bits()))
	}
	return l
}

func (c *cluster) namespace() *netns.Namespace {
	ns := netnstest.New(c)
	c.must(sysctl.Set(ns, quiet...))
	l, err := link.Dial(ns)
	c.must(err)
	defer l.Close()
	c.must(l.Up(1))
	return ns
}

var anywhere = prefixesOf("0.0.0.0/0", "::/0")

// plug connects a node with the router's bridge.
func (c *cluster) plug(r *link.Conn, n *node, bridge int) {
	port, err := r.AddVeth(link.End{Name: "to-" + n.name}, link.End{Name: "eth0"}, n.ns)
	c.must(errors.Join(err, r.Attach(port, bridge)))
	l, err := link.Dial(n.ns)
	c.must(err)
	defer l.Close()
	dev, err := l.Index("eth0")
	c.must(errors.Join(err, l.Up(dev)))
	for i, p := range n.wire {
		c.must(l.AddAddress(dev, p))
		c.must(route.PutIn(n.ns, route.Route{To: anywhere[i], Via: n.routers()[i].Addr(), Dev: dev}))
	}
	c.must(errors.Join(l.Await(c.Context(), dev, n.wire[1].Addr()), r.Await(c.Context(), port)))
	s, err := n.serve(n.ns)
	c.must(err)
	c.Cleanup(func() { s.Close() })
}

func (n *node) serve(ns *netns.Namespace) (s *echo.Server, err error) {
	err = ns.Do(func() (err error) {
		s, err = echo.Serve("pod/"+n.name, served)
		return err
	})
	return s, err
}

// addPod makes a node's pod, with a route to it.
func (c *cluster) addPod(n *node) {
	l, err := link.Dial(n.ns)
	c.must(err)
	defer l.Close()
	dev, err := l.AddVeth(link.End{Name: "pod"}, link.End{Name: "eth0"}, n.podNS)
	c.must(err)
	pod, err := link.Dial(n.podNS)
	c.must(err)
	defer pod.Close()
	eth0, err := pod.Index("eth0")
	c.must(errors.Join(err, pod.Up(eth0)))
	gateway := netip.MustParsePrefix("fe80::1/64")
	c.must(l.AddAddress(dev, gateway))
	for i, via := range []netip.Addr{n.wire[0].Addr(), gateway.Addr()} {
		c.must(errors.Join(pod.AddAddress(eth0, host(n.pod[i])),
			route.PutIn(n.ns, route.Route{To: host(n.pod[i]), Dev: dev}),
			route.PutIn(n.podNS, route.Route{To: anywhere[i], Via: via, Dev: eth0})))
	}
	c.must(errors.Join(pod.Await(c.Context(), eth0, n.pod[1]), l.Await(c.Context(), dev, gateway.Addr())))
	s, err := n.serve(n.podNS)
	c.must(err)
	c.Cleanup(func() { s.Close() })
}

// run starts a node's line.
func (c *cluster) run(n *node) {
	c.must(n.ns.Do(func() (err error) {
		n.plane, err = New()
		return err
	}))
	c.configure(n, resolve.Subnets)
	log := slog.New(slog.NewTextHandler(testWriter{c.T}, nil)).With("node", n.name)
	n.loop = reconcile.New[model.NetworkPart, Key, Value](n.plane, reconcile.Options[model.NetworkPart]{
		Owner: model.NetworkOwner, Log: log,
		Backoff: func(int) time.Duration { return 50 * time.Millisecond }})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- n.loop.Run(ctx) }()
	c.Cleanup(func() {
		cancel()
		<-ended
		n.plane.Close()
	})
	c.apply(n, c.all()...)
}

type testWriter struct{ *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// configure replaces a node's resolver.
func (c *cluster) configure(n *node, o resolve.Overlay) {
	n.resolver = resolve.New(resolve.Config{Node: n.name, Overlay: o, Tunnel: c.tunnel,
		Devices: []resolve.Device{{Name: "eth0", MTU: 1500, Prefixes: n.wire}}})
}

// all returns all Nodes.
func (c *cluster) all() (l []source.Change) {
	for _, n := range c.nodes {
		l = append(l, change(n.name, n.object()))
	}
	return l
}

// apply has a node learn of changes.
func (c *cluster) apply(n *node, changes ...source.Change) {
	d := n.resolver.Apply(changes)
	n.loop.Change(d.Put, d.Del)
}

// switchTo has nodes, all by default, decide with another overlay.
func (c *cluster) switchTo(o resolve.Overlay, names ...string) {
	for _, n := range c.nodes {
		if len(names) > 0 && !slices.Contains(names, n.name) {
			continue
		}
		old := n.resolver.Network().Parts()
		c.configure(n, o)
		n.loop.Change(n.resolver.Apply(c.all()).Put, old)
	}
	c.sync()
}

// sync waits until every node's kernel is as decided.
func (c *cluster) sync() {
	c.Helper()
	for _, n := range c.nodes {
		c.must(n.loop.Sync(c.Context()))
	}
}

// request sends a request from one namespace to an address and returns the client that the server saw.
func (c *cluster) request(from *netns.Namespace, p echo.Port, to netip.Addr, size int, wait time.Duration) (netip.Addr,
	error) {
	reply, err := c.reply(from, p, to, size, wait)
	return reply.Client.Addr(), err
}

// reply is request that returns the whole reply.
func (c *cluster) reply(from *netns.Namespace, p echo.Port, to netip.Addr, size int,
	wait time.Duration) (reply echo.Reply, err error) {
	ctx, cancel := context.WithTimeout(c.Context(), wait)
	defer cancel()
	err = from.Do(func() (err error) {
		reply, err = echo.Request(ctx, p.Protocol, netip.AddrPortFrom(to, p.Number), echo.Options{Size: size})
		return err
	})
	return reply, err
}

// connected checks that pods and nodes reach each other with their own source.
func (c *cluster) connected() {
	c.Helper()
	for _, from := range c.nodes {
		for _, to := range c.nodes {
			if from == to {
				continue
			}
			c.reachesNode(from, to)
			for i, a := range to.pod {
				if r := from.resolver.Network().Route(a); r != nil && r.Hop == model.Unreachable { // IPIP carries IPv4 alone
					if _, err := c.request(from.podNS, served[0], a, 0, 5*time.Second); err == nil {
						c.Errorf("pod of %s reaches %s, past the overlay", from.name, a)
					}
					continue
				}
				for _, p := range served {
					if saw, err := c.request(from.podNS, p, a, 0, 5*time.Second); err != nil || saw != from.pod[i] {
						c.Errorf("pod of %s to %s %s: from %s, %v", from.name, a, p, saw, err)
					}
				}
				saw, err := c.request(from.ns, served[0], a, 0, 5*time.Second)
				if want := from.sources(c, to, i); err != nil || saw != want {
					c.Errorf("node %s to %s: from %s, want %s, %v", from.name, a, saw, want, err)
				}
			}
		}
	}
}

// reachesNode checks that a pod and its node reach another node's own addresses with their own source. IPv6 that has no
// way to pods has none for their replies.
func (c *cluster) reachesNode(from, to *node) {
	c.Helper()
	for i, a := range to.wire {
		for _, p := range served {
			if saw, err := c.request(from.ns, p, a.Addr(), 0, 5*time.Second); err != nil || saw != from.wire[i].Addr() {
				c.Errorf("node %s to node %s %s: from %s, %v", from.name, a.Addr(), p, saw, err)
			}
			if r := from.resolver.Network().Route(to.pod[i]); r != nil && r.Hop == model.Unreachable {
				continue
			}
			if saw, err := c.request(from.podNS, p, a.Addr(), 0, 5*time.Second); err != nil || saw != from.pod[i] {
				c.Errorf("pod of %s to node %s %s: from %s, %v", from.name, a.Addr(), p, saw, err)
			}
		}
	}
}

// sources returns the source of what a node sends to another one's pods.
func (n *node) sources(c *cluster, to *node, family int) netip.Addr {
	if r := n.resolver.Network().Route(to.pod[family]); r != nil && r.Source.IsValid() {
		return r.Source
	}
	return n.wire[family].Addr()
}

// holds checks that a node's kernel holds exactly what is decided.
func (c *cluster) holds(n *node) {
	c.Helper()
	if why := c.differs(n); why != "" {
		c.Errorf("node %s: %s", n.name, why)
	}
}

// differs returns how a node's kernel is not as decided, "" where it is.
func (c *cluster) differs(n *node) string {
	var plane *Plane
	c.must(n.ns.Do(func() (err error) {
		plane, err = New()
		return err
	}))
	defer plane.Close()
	facts, err := plane.Read(c.Context())
	c.must(err)
	held := map[Key]Value{}
	for _, f := range facts {
		held[f.Key] = f.Value
	}
	var why []string
	for _, p := range n.resolver.Network().Parts() {
		for _, f := range plane.Render(p) {
			if v, there := held[f.Key]; !there || v != f.Value {
				why = append(why, fmt.Sprintf("%s is %+v (%t), want %+v", f.Key, v, there, f.Value))
			}
		}
	}
	wanted := map[Key]bool{}
	for _, p := range n.resolver.Network().Parts() {
		for _, f := range plane.Render(p) {
			wanted[f.Key] = true
		}
	}
	for k := range held {
		if !wanted[k] {
			why = append(why, fmt.Sprintf("%s is there and not wanted", k))
		}
	}
	slices.Sort(why)
	return strings.Join(why, "\n")
}

// repaired waits until a node's kernel is as decided again.
func (c *cluster) repaired(n *node) {
	c.Helper()
	begin := time.Now()
	for why := "x"; why != ""; {
		if why = c.differs(n); why != "" && time.Since(begin) > 10*time.Second {
			c.Fatalf("node %s was not repaired: %s", n.name, why)
		}
	}
	c.Logf("repaired after %s", time.Since(begin).Round(time.Millisecond))
}
