package tigera

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/rules"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Calico's pods on a node and policies of each, as the article has them.
const (
	armCalico      = "calico"
	calicoPods     = 30
	calicoPolicies = 3
	fewServices    = 20 // of kube-proxy, which the article compares that with
)

// calico is a node with the policies of the article's comparison, in Calico's rules or by one of our engines. Two of
// its pods are there, the others' devices have names alone; the far end stands for pods of other nodes.
type calico struct {
	pair   *testbed.Pair
	layout classic.Calico
	pods   []*netns.Namespace // of the first two
	engine *testbed.Enforcer  // nil: Calico's rules
}

// policyArm returns the arm of the article's policies by one of our engines.
func policyArm(e mode.Engine) string { return "policies-" + e.Name }

// calicoMAC is that of the node's end of every pod's veth, as in Calico.
var calicoMAC = [6]byte{0xee, 0xee, 0xee, 0xee, 0xee, 0xee}

// podMAC is that of a pod's end.
func podMAC(i int) [6]byte { return [6]byte{2, 0xf1, 0, 0, 1, byte(i)} }

// newCalico makes the pods. Each lets clients in by each of its policies alike: a pod of another node by each, and a
// share of its neighbours.
func newCalico() (c classic.Calico) {
	c.Pool = netip.MustParsePrefix("10.64.0.0/10")
	for i := range calicoPods {
		c.Pods = append(c.Pods, classic.Pod{Name: fmt.Sprintf("default/pod-%d", i), Addr: netip.AddrFrom4(
			[4]byte{10, 65, 0, byte(1 + i)}), Port: testbed.ServerPort, Policies: make([][]netip.Addr, calicoPolicies)})
	}
	for i := range c.Pods {
		l := c.Pods[i].Policies
		for j := range l {
			l[j] = append(l[j], elsewhere(j))
		}
		for j := range c.Pods {
			if at := (i + j) % calicoPolicies; i != j {
				l[at] = append(l[at], c.Pods[j].Addr)
			}
		}
	}
	return c
}

// elsewhere is a pod of another node that the i-th policy of each pod lets in.
func elsewhere(i int) netip.Addr { return testbed.ServerAddr(i) }

// tryCalico returns an error where Calico's rules can't be written.
func tryCalico(ctx context.Context, b *testbed.Testbed) (err error) {
	ns, err := testbed.NewNamespace(b.Name + "-try")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, testbed.RemoveNamespace(ns)) }()
	c := newCalico()
	return ns.Do(func() error { return c.Install(ctx, classic.Legacy) })
}

// raiseCalico makes the node, and a server at each end of every way through it.
func raiseCalico(ctx context.Context, b *testbed.Testbed, arm string) (c *calico, err error) {
	name := b.Name + "-" + arm
	p, err := testbed.NewPair(ctx, name)
	if err != nil {
		return nil, err
	}
	c = &calico{pair: p, layout: newCalico()}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	for i := range 2 {
		if err := c.plug(ctx, name, i); err != nil {
			return nil, fmt.Errorf("pod %d of %s: %w", i, p.Near.Name, err)
		}
	}
	if err := sysctl.Set(p.Near, sysctl.Setting{Name: "net/ipv4/ip_forward", Value: "1"}); err != nil {
		return nil, err
	}
	return c, c.pair.Serve(load.Thread{Enter: c.pair.Far.Do}, testbed.Everywhere, testbed.OneByte, 1)
}

// install writes Calico's rules.
func (c *calico) install(ctx context.Context) error {
	return c.pair.Near.Do(func() error { return c.layout.Install(ctx, classic.Legacy) })
}

// enforce has one of our engines write the same policies.
func (c *calico) enforce(ctx context.Context, b *testbed.Testbed, e mode.Engine) (err error) {
	_, change, err := testbed.DecidePolicies(testbed.NodeName, c.objects())
	if err != nil {
		return err
	}
	if c.engine, err = b.Enforce(c.pair.Near, e); err != nil {
		return err
	}
	_, err = c.engine.Apply(ctx, change)
	return err
}

// objects returns the node, its pods and those of other nodes, and the policies, each of which allows its clients by
// their names.
func (c *calico) objects() []source.Object {
	const namespace = "default"
	named := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"name": name}}
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testbed.NodeName}}
	node.Spec.PodCIDRs = []string{netip.PrefixFrom(c.layout.Pods[0].Addr, 24).Masked().String()}
	l := []source.Object{node, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}}
	names := map[netip.Addr]string{}
	pod := func(name, on string, addr netip.Addr) {
		p := &corev1.Pod{ObjectMeta: named(name)}
		p.Spec.NodeName, p.Status.PodIPs = on, []corev1.PodIP{{IP: addr.String()}}
		names[addr], l = name, append(l, p)
	}
	for i := range calicoPolicies {
		pod(fmt.Sprint("elsewhere-", i), "elsewhere", elsewhere(i))
	}
	for i, p := range c.layout.Pods {
		pod(fmt.Sprint("pod-", i), testbed.NodeName, p.Addr)
	}
	tcp, port := corev1.ProtocolTCP, intstr.FromInt32(testbed.ServerPort)
	for i, p := range c.layout.Pods {
		for k, clients := range p.Policies {
			from := metav1.LabelSelectorRequirement{Key: "name", Operator: metav1.LabelSelectorOpIn}
			for _, a := range clients {
				from.Values = append(from.Values, names[a])
			}
			o := &networkingv1.NetworkPolicy{ObjectMeta: named(fmt.Sprintf("policy-%d-%d", i, k))}
			o.Spec.PodSelector.MatchLabels = map[string]string{"name": fmt.Sprint("pod-", i)}
			o.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
			o.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{
				From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{
					MatchExpressions: []metav1.LabelSelectorRequirement{from}}}},
				Ports: []networkingv1.NetworkPolicyPort{{Protocol: &tcp, Port: &port}}}}
			l = append(l, o)
		}
	}
	return l
}

// plug makes a pod, with a server.
func (c *calico) plug(ctx context.Context, name string, i int) error {
	pod := &c.layout.Pods[i]
	ns, err := testbed.NewNamespace(fmt.Sprintf("%s-pod%d", name, i))
	if err != nil {
		return err
	}
	c.pods = append(c.pods, ns)
	mac := podMAC(i)
	err = testbed.DialLink(c.pair.Near, func(l *link.Conn) error {
		dev, err := l.AddVeth(link.End{Name: pod.Device(), MAC: net.HardwareAddr(calicoMAC[:])},
			link.End{Name: "eth0", MAC: net.HardwareAddr(mac[:])}, ns)
		if err != nil {
			return err
		}
		return errors.Join(l.Up(dev),
			l.PutNeighbour(link.Neighbour{Dev: dev, Addr: pod.Addr, MAC: mac}),
			route.PutIn(c.pair.Near, route.Route{To: netip.PrefixFrom(pod.Addr, 32), Dev: dev}))
	})
	if err == nil {
		err = testbed.Plug(ctx, ns, []netip.Addr{pod.Addr}, testbed.NodeAddr, calicoMAC)
	}
	if err != nil {
		return err
	}
	return c.pair.Serve(load.Thread{Enter: ns.Do}, testbed.Everywhere, testbed.OneByte, 1)
}

func (c *calico) close() (err error) {
	if c.engine != nil {
		err = c.engine.Stop()
	}
	err = errors.Join(err, c.pair.Close())
	for _, ns := range c.pods {
		err = errors.Join(err, ns.Close(), netns.Delete(ns.Name))
	}
	return err
}

// Ways of a connection through the node, as measures have them.
const (
	comes  = ""        // to a pod, from another node
	leaves = "-leaves" // from a pod, to another node
	stays  = "-stays"  // between two of its pods
)

// packet opens a connection of a way: to or from a pod, with a client or server elsewhere or in another pod.
func (c *calico) packet(direction string, pod, other int) rules.Packet {
	p := rules.Packet{Protocol: model.TCP, Path: rules.Forwarded, In: "eth0", Out: "eth0",
		Node: []netip.Addr{testbed.NodeAddr}}
	at := func(a netip.Addr, client bool) netip.AddrPort {
		if client {
			return netip.AddrPortFrom(a, 40000)
		}
		return netip.AddrPortFrom(a, testbed.ServerPort)
	}
	own := c.layout.Pods[pod]
	switch direction {
	case comes:
		p.Src, p.Dst, p.Out = at(elsewhere(other), true), at(own.Addr, false), own.Device()
	case leaves:
		p.Src, p.Dst, p.In = at(own.Addr, true), at(elsewhere(other), false), own.Device()
	default:
		p.Src, p.Dst, p.In, p.Out = at(own.Addr, true), at(c.layout.Pods[other].Addr, false), own.Device(),
			c.layout.Pods[other].Device()
	}
	return p
}

// each calls f for every connection of a direction: every pod, with each of its peers.
func (c *calico) each(direction string, f func(pod, other int) error) error {
	others := calicoPolicies
	if direction == stays {
		others = len(c.layout.Pods)
	}
	for pod := range c.layout.Pods {
		for other := range others {
			if direction == stays && pod == other {
				continue
			}
			if err := f(pod, other); err != nil {
				return err
			}
		}
	}
	return nil
}

// countCalico counts the rules that a connection meets under the article's policies, in Calico's layout and by each of
// our engines, on average over all pods, and has the kernel count those of the pods that are there.
func (r *trial) countCalico(ctx context.Context) (traced int, err error) {
	traced, err = r.countPolicies(ctx, armCalico, func(c *calico) error { return c.install(ctx) })
	for _, e := range r.engines {
		if err != nil {
			return traced, err
		}
		n := 0
		n, err = r.countPolicies(ctx, policyArm(e), func(c *calico) error { return c.enforce(ctx, r.bed, e) })
		traced += n
	}
	return traced, err
}

// countPolicies counts the rules of one arm of the article's policies, once they are written.
func (r *trial) countPolicies(ctx context.Context, arm string, write func(*calico) error) (traced int, err error) {
	c, err := raiseCalico(ctx, r.bed, arm)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	if err := write(c); err != nil {
		return 0, fmt.Errorf("write the policies of %s: %w", arm, err)
	}
	set, err := experiment.ReadRules(ctx, c.pair.Near)
	if err != nil {
		return 0, err
	}
	for _, direction := range []string{comes, leaves, stays} {
		sum, n := 0.0, 0
		err := c.each(direction, func(pod, other int) error {
			packet := c.packet(direction, pod, other)
			counted, err := set.Count(packet)
			if err != nil {
				return err
			}
			sum, n = sum+counted.Mean, n+1
			if pod != 0 || direction == stays && other != 1 { // the others' ends are not there
				return nil
			}
			traced++
			return set.Agree(ctx, c.pair.Near, packet, counted, c.client(packet))
		})
		if err != nil {
			return traced, err
		}
		for _, services := range r.grid.Counts { // whatever their number
			if err := r.out.AddValue(result.Block{Arm: arm, Params: testbed.ServiceParams(services)}, "rules"+direction,
				sum/float64(n)); err != nil {
				return traced, err
			}
		}
	}
	return traced, nil
}

// client is one of a packet's sender.
func (c *calico) client(p rules.Packet) load.Client {
	from := c.pair.Far
	if p.In != "eth0" {
		from = c.pods[0]
	}
	return load.Client{Thread: load.Thread{Enter: from.Do}, Sources: []netip.Addr{p.Src.Addr()}, Sizes: testbed.OneByte}
}

// countFew counts, on paper alone, the rules of kube-proxy's of 2019 to the last of the few Services that the article
// compares Calico with.
func (r *trial) countFew() error {
	if slices.Contains(r.grid.Counts, fewServices) {
		return nil // that arm is there
	}
	w, err := testbed.Decide(fewServices)
	if err != nil {
		return err
	}
	t, err := rules.ParseIPTables(classic.IPTables19.Save(classic.FromParts(w.Parts)), "")
	if err != nil {
		return err
	}
	n, err := rules.Static(t, sent(testbed.ServiceEntry(experiment.ServiceAt(experiment.Last, fewServices))))
	if err != nil {
		return err
	}
	return r.out.AddValue(result.Block{Arm: experiment.LayoutIPTables19, Params: testbed.ServiceParams(fewServices)},
		"rules-last", n.Rules.Mean)
}
