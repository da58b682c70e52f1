package advise

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// Cluster is the objects of a cluster as a testbed's node is served with them: what is on the advised node is on that
// one, and beside them stand Services and a pod that packets are sent through.
type Cluster struct {
	Objects []source.Object
	Sizes   Sizes
	Remarks []string // what is left out: sentences

	entries []netip.AddrPort // of the Services that are connected to in turn
	changes *testbed.Cluster // a Service that is connected to by no one, last among its objects its EndpointSlice
}

// Sizes is how large a cluster is.
type Sizes struct {
	Services  int `json:"services"`
	Endpoints int `json:"endpoints"`
	Policies  int `json:"policies"` // NetworkPolicies
	Pods      int `json:"pods"`
	Local     int `json:"pods_on_node"`
	Selecting int `json:"policies_of_the_pod"` // NetworkPolicies that select the pod with the most of them
}

// String returns the sizes in words.
func (s Sizes) String() string {
	text := fmt.Sprintf("%d Services with %d endpoints", s.Services, s.Endpoints)
	if s.Policies == 0 {
		return text + ", no NetworkPolicy"
	}
	return text + fmt.Sprintf(", %d NetworkPolicies, %d pods (%d on the node), at most %d policies to a pod", s.Policies,
		s.Pods, s.Local, s.Selecting)
}

// probes is how many Services are connected to in turn.
const probes = testbed.FewTargets

// probeLabel is the label of the pod that packets are sent from and to.
const probeLabel = "advise.fairlead.dev/probe"

// others stands for the name of a node that is called as the testbed's is.
const others = "other-" + testbed.NodeName

// Transplant returns a cluster for a testbed, of objects, with what is on a node. Without enforce, policies and pods
// are left out. Objects are not changed, but copied where they differ.
func Transplant(objects []source.Object, node string, enforce bool) *Cluster {
	t := &transplant{node: node, cluster: &Cluster{changes: testbed.NewCluster(probes + 1)}}
	bed := t.cluster.changes.Objects
	t.cluster.Objects = slices.Clone(bed[:len(bed)-1])
	t.own = map[source.Key]bool{}
	for _, o := range bed {
		t.own[source.KeyOf(o)] = true
	}
	t.cluster.readdress(objects)
	for _, o := range objects {
		t.add(o, enforce)
	}
	if n := t.global; n > 0 {
		t.remark("%d ClusterNetworkPolicies are left out of the measurement: they could deny the packets that are measured.",
			n)
	}
	if t.cluster.Sizes.Policies > 0 {
		t.probe()
	}
	return t.cluster
}

// transplant is a cluster as it is made.
type transplant struct {
	node     string
	cluster  *Cluster
	own      map[source.Key]bool // objects of the testbed's own
	pods     []*corev1.Pod
	policies []*networkingv1.NetworkPolicy
	global   int // ClusterNetworkPolicies
}

func (t *transplant) remark(format string, a ...any) {
	t.cluster.Remarks = append(t.cluster.Remarks, fmt.Sprintf(format, a...))
}

// readdress changes the ClusterIPs of the testbed's own Services to such that no object has: the first ones of a range
// are those of a real cluster's API server and DNS.
func (c *Cluster) readdress(objects []source.Object) {
	used := map[string]bool{}
	for _, o := range objects {
		if s, ok := o.(*corev1.Service); ok {
			used[s.Spec.ClusterIP] = true
		}
	}
	i := generate.MaxServices
	for service := range probes + 1 {
		at := ""
		for at == "" || used[at] {
			i--
			at = generate.ServiceAddress(i).String()
		}
		s := c.changes.Objects[1+2*service].(*corev1.Service)
		s.Spec.ClusterIP, s.Spec.ClusterIPs = at, []string{at}
		if service < probes {
			c.entries = append(c.entries, netip.AddrPortFrom(generate.ServiceAddress(i), testbed.ServiceEntry(0).Port()))
		}
	}
}

// add adds an object as the testbed's node is to know it.
func (t *transplant) add(o source.Object, enforce bool) {
	if t.own[source.KeyOf(o)] && source.KeyOf(o).Kind != source.Node {
		return
	}
	switch o := o.(type) {
	case *corev1.Service:
		c := *o
		c.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
		t.cluster.Sizes.Services++
		t.put(&c)
	case *discoveryv1.EndpointSlice:
		t.addSlice(o)
	case *corev1.Node:
		if o.Name == t.node { // other Nodes' addresses could be the testbed's
			n := t.cluster.Objects[0].(*corev1.Node).DeepCopy()
			n.Labels = maps.Clone(o.Labels)
			t.cluster.Objects[0] = n
		}
	case *corev1.Namespace:
		if enforce {
			c := *o
			c.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}
			t.put(&c)
		}
	case *corev1.Pod:
		if enforce {
			t.addPod(o)
		}
	case *networkingv1.NetworkPolicy:
		if enforce {
			c := *o
			c.TypeMeta = metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"}
			t.cluster.Sizes.Policies++
			t.policies = append(t.policies, &c)
			t.put(&c)
		}
	default:
		if source.KeyOf(o).Kind == source.ClusterNetworkPolicy && enforce {
			t.global++
		}
	}
}

func (t *transplant) put(o source.Object) { t.cluster.Objects = append(t.cluster.Objects, o) }

// nodeName returns what a node is called on the testbed.
func (t *transplant) nodeName(name string) string {
	switch name {
	case t.node:
		return testbed.NodeName
	case testbed.NodeName:
		return others
	}
	return name
}

func (t *transplant) addSlice(o *discoveryv1.EndpointSlice) {
	c := *o
	c.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
	c.Endpoints = slices.Clone(o.Endpoints)
	for i := range c.Endpoints {
		if n := c.Endpoints[i].NodeName; n != nil {
			name := t.nodeName(*n)
			c.Endpoints[i].NodeName = &name
		}
	}
	t.cluster.Sizes.Endpoints += len(c.Endpoints)
	t.put(&c)
}

// addPod adds a pod, unless its address is one of the testbed's.
func (t *transplant) addPod(o *corev1.Pod) {
	servers := netip.PrefixFrom(testbed.ServerAddr(0), 24).Masked()
	for _, ip := range append([]corev1.PodIP{{IP: o.Status.PodIP}}, o.Status.PodIPs...) {
		a, err := netip.ParseAddr(ip.IP)
		if err == nil && (servers.Contains(a) || a == testbed.ServerPod || a == testbed.ClientPod || a == testbed.NodeAddr) {
			return
		}
	}
	c := *o
	c.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	c.Spec.NodeName = t.nodeName(o.Spec.NodeName)
	t.cluster.Sizes.Pods++
	if c.Spec.NodeName == testbed.NodeName {
		t.cluster.Sizes.Local++
	}
	t.pods = append(t.pods, &c)
	t.put(&c)
}

// mostPods is how many pods of other nodes are looked at where none is on the node.
const mostPods = 1000

// probe adds the pod that packets are sent from and to: like the pod of the node that the most policies select, and a
// policy that allows these packets beside the cluster's own.
func (t *transplant) probe() {
	like, selecting := t.selected(func(p *corev1.Pod) bool { return p.Spec.NodeName == testbed.NodeName }, len(t.pods))
	if like == nil {
		like, selecting = t.selected(func(*corev1.Pod) bool { return true }, mostPods)
	}
	if like == nil {
		t.remark("No NetworkPolicy selects a pod of the source: policies are loaded, and no packet is measured under one.")
		like = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault}}
	}
	t.cluster.Sizes.Selecting = len(selecting)
	p := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: like.Namespace, Name: "fairlead-advise", Labels: maps.Clone(like.Labels)}}
	if p.Labels == nil {
		p.Labels = map[string]string{}
	}
	p.Labels[probeLabel] = ""
	p.Spec = corev1.PodSpec{NodeName: testbed.NodeName, Containers: like.Spec.Containers}
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: testbed.ServerPod.String(),
		PodIPs: []corev1.PodIP{{IP: testbed.ServerPod.String()}}}
	t.put(p)
	if len(selecting) > 0 {
		t.put(allow(like.Namespace, selecting))
	}
}

// selected returns the pod that the most policies select, of at most so many that fit, and these policies.
func (t *transplant) selected(fits func(*corev1.Pod) bool,
	most int) (like *corev1.Pod, by []*networkingv1.NetworkPolicy) {
	type policy struct {
		*networkingv1.NetworkPolicy
		selector labels.Selector
	}
	in := map[string][]policy{} // by namespace
	for _, p := range t.policies {
		if s, err := metav1.LabelSelectorAsSelector(&p.Spec.PodSelector); err == nil {
			in[p.Namespace] = append(in[p.Namespace], policy{p, s})
		}
	}
	for _, p := range t.pods {
		if most == 0 {
			break
		}
		if !fits(p) || p.Spec.HostNetwork {
			continue
		}
		most--
		var l []*networkingv1.NetworkPolicy
		for _, x := range in[p.Namespace] {
			if x.selector.Matches(labels.Set(p.Labels)) {
				l = append(l, x.NetworkPolicy)
			}
		}
		if len(l) > len(by) {
			like, by = p, l
		}
	}
	return like, by
}

// allow returns the policy that allows what is measured, in the directions that others restrict and in no further one.
func allow(namespace string, others []*networkingv1.NetworkPolicy) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "fairlead-advise"}}
	p.Spec.PodSelector.MatchLabels = map[string]string{probeLabel: ""}
	tcp, port := corev1.ProtocolTCP, intstr.FromInt32(testbed.ServerPort)
	ports := []networkingv1.NetworkPolicyPort{{Protocol: &tcp, Port: &port}}
	peer := func(p netip.Prefix) []networkingv1.NetworkPolicyPeer {
		return []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: p.Masked().String()}}}
	}
	restricted := func(d networkingv1.PolicyType) bool {
		return slices.ContainsFunc(others, func(o *networkingv1.NetworkPolicy) bool {
			if len(o.Spec.PolicyTypes) > 0 {
				return slices.Contains(o.Spec.PolicyTypes, d)
			}
			return d == networkingv1.PolicyTypeIngress || len(o.Spec.Egress) > 0
		})
	}
	if restricted(networkingv1.PolicyTypeIngress) {
		p.Spec.PolicyTypes = append(p.Spec.PolicyTypes, networkingv1.PolicyTypeIngress)
		p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: peer(netip.PrefixFrom(testbed.ClientPod, 32)),
			Ports: ports}}
	}
	if restricted(networkingv1.PolicyTypeEgress) {
		p.Spec.PolicyTypes = append(p.Spec.PolicyTypes, networkingv1.PolicyTypeEgress)
		p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{To: peer(netip.PrefixFrom(testbed.ServerAddr(0), 24)),
			Ports: ports}}
	}
	return p
}

// change returns the EndpointSlice of the Service that changes, with another address for its i-th endpoint.
func (c *Cluster) change(i, n int) *discoveryv1.EndpointSlice {
	return c.changes.With(probes, i%testbed.Endpoints, testbed.Spare(probes, n%1000))
}
