package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// size is a cluster of a benchmark: its policies are three for four pods, as people write them.
type size struct{ pods, namespaces, local, cluster int }

func (s size) String() string {
	return fmt.Sprintf("pods=%d/namespaces=%d/here=%d/cluster=%d", s.pods, s.namespaces, s.local, s.cluster)
}

var sizes = []size{
	{1_000, 250, 110, 20}, {10_000, 2_500, 110, 20}, {100_000, 25_000, 110, 0}, {100_000, 25_000, 110, 20},
	{100_000, 200, 250, 50}, {100_000, 25_000, 110, 200}, {100_000, 25_000, 100_000, 0},
}

const podsPerNode = 110

// cluster makes the objects of a cluster.
type cluster struct {
	size
	*rand.Rand
	changes []source.Change
	pods    []*corev1.Pod
}

func newCluster(s size) *cluster {
	c := &cluster{size: s, Rand: rand.New(rand.NewPCG(1, 2))}
	for i := range s.namespaces {
		c.add(c.namespace(i, "prod"))
	}
	for i := range s.pods/podsPerNode + 1 {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.node(i)}}
		n.Spec.PodCIDRs = []string{netip.PrefixFrom(addressOf(256*i), 24).String()}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("172.16.%d.%d", i/256,
			i%256)}}
		c.add(n)
	}
	for i := range s.pods {
		c.pod(i)
	}
	for i := range s.pods * 3 / 4 {
		c.add(c.policy(i))
	}
	for i := range s.cluster {
		c.add(c.clusterPolicy(i))
	}
	return c
}

func (c *cluster) add(o source.Object) {
	c.changes = append(c.changes, source.Change{Key: source.KeyOf(o), Object: o})
}

func (c *cluster) node(i int) string { return fmt.Sprintf("node-%d", i) }

func addressOf(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
}

func (c *cluster) namespace(i int, stage string) *corev1.Namespace {
	name := fmt.Sprintf("ns-%d", i)
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		corev1.LabelMetadataName: name, "team": fmt.Sprintf("team-%d", i%50), "stage": stage}}}
}

// pod makes pod i: the first ones are on the node of the benchmark.
func (c *cluster) pod(i int) {
	node, host := c.node(0), i
	if i >= c.local {
		k := i - c.local
		node, host = c.node(1+k/podsPerNode), 65536+256*(k/podsPerNode)+k%podsPerNode+2
	}
	app := fmt.Sprintf("app-%d", c.IntN(8))
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprintf("ns-%d", i%c.namespaces),
		Name: fmt.Sprintf("pod-%d", i), Labels: map[string]string{"app": app, "version": fmt.Sprint(c.IntN(3)),
			"tier": []string{"web", "db", "cache"}[c.IntN(3)], "pod-template-hash": fmt.Sprintf("%d-%s", i%c.namespaces, app)}}}
	p.Spec.NodeName = node
	p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}}}
	p.Status.Phase, p.Status.PodIPs = corev1.PodRunning, []corev1.PodIP{{IP: addressOf(host).String()}}
	c.pods = append(c.pods, p)
	c.add(p)
}

func app(i int) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprintf("app-%d", i%8)}}
}

func (c *cluster) policy(i int) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprintf("ns-%d", i%c.namespaces),
		Name: fmt.Sprintf("policy-%d", i)}}
	udp, dns, port := corev1.ProtocolUDP, intstr.FromInt32(53), intstr.FromInt32(int32(8000+c.IntN(100)))
	from := []networkingv1.NetworkPolicyPeer{{PodSelector: app(i / 3)}}
	p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	switch (i / c.namespaces) % 6 {
	case 0: // deny all
	case 3: // DNS
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
		p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{
			Ports: []networkingv1.NetworkPolicyPort{{Protocol: &udp, Port: &dns}},
			To: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{
				corev1.LabelMetadataName: "ns-0"}}}}}}
	case 4: // another namespace
		from[0].NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: fmt.
			Sprintf("ns-%d", c.IntN(c.namespaces))}}
		fallthrough
	case 1, 2: // app to app
		p.Spec.PodSelector = *app(i)
		p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: from,
			Ports: []networkingv1.NetworkPolicyPort{{Port: &port}}}}
	case 5: // the world, but for private addresses
		p.Spec.PodSelector = *app(i)
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
		p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{To: []networkingv1.NetworkPolicyPeer{{
			IPBlock: &networkingv1.IPBlock{CIDR: "0.0.0.0/0", Except: []string{"10.0.0.0/8", "172.16.0.0/12"}}}}}}
	}
	return p
}

func (c *cluster) clusterPolicy(i int) *cnpv1.ClusterNetworkPolicy {
	p := &cnpv1.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("cluster-%d", i)}}
	p.Spec.Tier, p.Spec.Priority = cnpv1.AdminTier, int32(i)
	p.Spec.Subject.Namespaces = &metav1.LabelSelector{}
	if i%2 == 1 {
		p.Spec.Subject.Namespaces.MatchLabels = map[string]string{"team": fmt.Sprintf("team-%d", c.IntN(50))}
	}
	action := []cnpv1.ClusterNetworkPolicyRuleAction{"Accept", "Deny", "Pass"}[i%3]
	from := cnpv1.ClusterNetworkPolicyIngressPeer{Pods: &cnpv1.NamespacedPod{PodSelector: *app(c.IntN(8)),
		NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{"team": fmt.Sprintf("team-%d", c.IntN(50))}}}}
	if i%4 == 0 {
		from = cnpv1.ClusterNetworkPolicyIngressPeer{Namespaces: &metav1.LabelSelector{MatchLabels: map[string]string{
			"team": fmt.Sprintf("team-%d", c.IntN(50))}}}
	}
	p.Spec.Ingress = []cnpv1.ClusterNetworkPolicyIngressRule{{Action: action,
		From: []cnpv1.ClusterNetworkPolicyIngressPeer{from}, Protocols: []cnpv1.ClusterNetworkPolicyProtocol{{
			TCP: &cnpv1.ClusterNetworkPolicyProtocolTCP{DestinationPort: &cnpv1.Port{Number: int32(8000 + c.IntN(100))}}}}}}
	return p
}

// processorTime returns what this process has had of processors.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkStart makes a node's policies of everything at once. Measured on a virtual machine with two processors of an
// Intel Xeon, of which other programs had most (load 14 to 22), so that the same row differs by half from run to run;
// "go test ./resolve/policy -run xxx -bench Start -benchtime 3x", without parsing and the objects' own memory:
//
//	pods × policies, namespaces, pods here, cluster policies | CPU ms | heap MiB
//	1,000 × 750, 250, 110, 20                                |      6 |   1
//	10,000 × 7,500, 2,500, 110, 20                           |     69 |   9
//	100,000 × 75,000, 25,000, 110, 0                         |    825 |  83
//	100,000 × 75,000, 25,000, 110, 20                        |    949 |  92
//	100,000 × 75,000, 200, 250, 50                           |  1,511 | 103
//	100,000 × 75,000, 25,000, 110, 200                       |  1,480 |  95
//	100,000 × 75,000, 25,000, all, 0                         |  3,724 | 206
func BenchmarkStart(b *testing.B) {
	for _, s := range sizes {
		b.Run(s.String(), func(b *testing.B) {
			c := newCluster(s)
			for b.Loop() {
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				begin := processorTime()
				r := New(Config{Node: c.node(0)})
				change := r.Apply(c.changes)
				b.ReportMetric(float64((processorTime() - begin).Milliseconds()), "cpu-ms")
				b.StopTimer()
				runtime.GC()
				runtime.ReadMemStats(&after)
				b.ReportMetric(float64(int64(after.HeapAlloc)-int64(before.HeapAlloc))/(1<<20), "MiB")
				parts := map[string]int{}
				for _, p := range change.Put {
					switch p := p.(type) {
					case *model.Peer:
						parts["peers"]++
					case *model.PeerVerdict:
						parts["verdicts"]++
					case *model.Ruleset:
						parts["entries"] += len(p.Ports)
					}
				}
				for unit, n := range parts {
					b.ReportMetric(float64(n), unit)
				}
				runtime.KeepAlive(r)
				b.StartTimer()
			}
		})
	}
}

// BenchmarkChange changes one object of a cluster at a time. On that machine, in the same circumstances, 100,000 pods
// in 25,000 namespaces with 75,000 policies, 110 pods here and 20 cluster policies durations (-benchtime 2000x) at p50
// / p99: a label of a pod elsewhere 18 / 213 µs, of a local pod 12 / 100 µs, of a namespace 15 / 86 µs, a policy 9 /
// 157 µs.
func BenchmarkChange(b *testing.B) {
	for _, s := range sizes {
		c := newCluster(s)
		r := New(Config{Node: c.node(0)})
		r.Apply(c.changes)
		label := func(i int) source.Object {
			p := c.pods[i].DeepCopy()
			p.Labels["app"] = fmt.Sprintf("app-%d", c.IntN(8))
			return p
		}
		for _, of := range []struct {
			name string
			make func() source.Object
		}{
			{"label of a pod elsewhere", func() source.Object { return label(len(c.pods) - 1 - c.IntN(len(c.pods)/2)) }},
			{"label of a local pod", func() source.Object { return label(c.IntN(c.local)) }},
			{"label of a namespace", func() source.Object { return c.namespace(c.IntN(c.namespaces), fmt.Sprint(c.IntN(5))) }},
			{"policy", func() source.Object { return c.policy(c.IntN(c.size.pods * 3 / 4)) }},
		} {
			b.Run(s.String()+"/"+of.name, func(b *testing.B) {
				var durations []time.Duration
				for b.Loop() {
					b.StopTimer()
					o := of.make()
					b.StartTimer()
					begin := time.Now()
					r.Apply([]source.Change{{Key: source.KeyOf(o), Object: o}})
					durations = append(durations, time.Since(begin))
				}
				slices.Sort(durations)
				b.ReportMetric(float64(durations[len(durations)/2].Nanoseconds())/1000, "p50-µs")
				b.ReportMetric(float64(durations[len(durations)*99/100].Nanoseconds())/1000, "p99-µs")
			})
		}
	}
}

// BenchmarkManyPolicies has 10,000 policies on the same 250 pods, each with a port and a peer of its own.
func BenchmarkManyPolicies(b *testing.B) {
	const policies, here = 10_000, 250
	var changes []source.Change
	put := func(o source.Object) { changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o}) }
	one := func(i int) *networkingv1.NetworkPolicy {
		p, port := &networkingv1.NetworkPolicy{}, intstr.FromInt32(int32(1000+i))
		p.Namespace, p.Name = "ns", fmt.Sprintf("policy-%d", i)
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{
			Ports: []networkingv1.NetworkPolicyPort{{Port: &port}},
			From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{
				"peer": fmt.Sprint(i)}}}}}}
		return p
	}
	for i := range here {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprintf("pod-%d", i),
			Labels: map[string]string{"peer": fmt.Sprint(i)}}}
		p.Spec.NodeName, p.Status.PodIPs = "node", []corev1.PodIP{{IP: addressOf(i).String()}}
		put(p)
	}
	for i := range policies {
		put(one(i))
	}
	b.Run("start", func(b *testing.B) {
		for b.Loop() {
			begin := processorTime()
			New(Config{Node: "node", ImpliedNamespaces: true}).Apply(changes)
			b.ReportMetric(float64((processorTime() - begin).Milliseconds()), "cpu-ms")
		}
	})
	b.Run("policy", func(b *testing.B) {
		r := New(Config{Node: "node", ImpliedNamespaces: true})
		r.Apply(changes)
		for i := 0; b.Loop(); i++ {
			o := one(i % policies)
			if i%2 == 0 {
				o.Spec.Ingress[0].From[0].PodSelector.MatchLabels["peer"] = "none"
			}
			r.Apply([]source.Change{{Key: source.KeyOf(o), Object: o}})
		}
	})
}
