package generate

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/source"
)

// PolicySize is the size of a cluster with network policies: three for four pods, as people write them.
type PolicySize struct {
	Pods, Namespaces int
	Here             int // of the pods, on the node PolicyNode
	Cluster          int // ClusterNetworkPolicies
}

// PolicyNode is the node that has PolicySize.Here pods.
const PolicyNode = "node-0"

// PolicyCluster makes the objects of a cluster with network policies, the same ones every time.
type PolicyCluster struct {
	PolicySize
	Objects []source.Object
	Pods    []*corev1.Pod // those of PolicyNode first
	random  *rand.Rand
}

// NewPolicyCluster returns a cluster with all its objects.
func NewPolicyCluster(s PolicySize) *PolicyCluster {
	c := &PolicyCluster{PolicySize: s, random: rand.New(rand.NewPCG(1, 2))}
	for i := range s.Namespaces {
		c.add(c.Namespace(i, "prod"))
	}
	for i := range s.Pods/perNode + 1 {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: policyNode(i)}}
		n.Spec.PodCIDRs = []string{netip.PrefixFrom(policyAddress(256*i), 24).String()}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("172.16.%d.%d", i/256,
			i%256)}}
		c.add(n)
	}
	for i := range s.Pods {
		c.pod(i)
	}
	for i := range s.Pods * 3 / 4 {
		c.add(c.Policy(i))
	}
	for i := range s.Cluster {
		c.add(c.clusterPolicy(i))
	}
	return c
}

func (c *PolicyCluster) add(o source.Object) { c.Objects = append(c.Objects, o) }

func policyNode(i int) string { return fmt.Sprintf("node-%d", i) }

func policyAddress(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
}

// Namespace returns the i-th namespace at a stage, which is one of its labels.
func (c *PolicyCluster) Namespace(i int, stage string) *corev1.Namespace {
	name := fmt.Sprintf("ns-%d", i)
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		corev1.LabelMetadataName: name, "team": fmt.Sprintf("team-%d", i%50), "stage": stage}}}
}

// pod makes pod i: the first ones are on PolicyNode.
func (c *PolicyCluster) pod(i int) {
	node, host := policyNode(0), i
	if i >= c.Here {
		k := i - c.Here
		node, host = policyNode(1+k/perNode), 65536+256*(k/perNode)+k%perNode+2
	}
	app := fmt.Sprintf("app-%d", c.random.IntN(8))
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprintf("ns-%d", i%c.Namespaces),
		Name: fmt.Sprintf("pod-%d", i), Labels: map[string]string{"app": app, "version": fmt.Sprint(c.random.IntN(3)),
			"tier":              []string{"web", "db", "cache"}[c.random.IntN(3)],
			"pod-template-hash": fmt.Sprintf("%d-%s", i%c.Namespaces, app)}}}
	p.Spec.NodeName = node
	p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}}}
	p.Status.Phase, p.Status.PodIPs = corev1.PodRunning, []corev1.PodIP{{IP: policyAddress(host).String()}}
	c.Pods = append(c.Pods, p)
	c.add(p)
}

func appSelector(i int) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprintf("app-%d", i%8)}}
}

// Policy returns the i-th NetworkPolicy, a new draw each time.
func (c *PolicyCluster) Policy(i int) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprintf("ns-%d", i%c.Namespaces),
		Name: fmt.Sprintf("policy-%d", i)}}
	udp, dns, port := corev1.ProtocolUDP, intstr.FromInt32(53), intstr.FromInt32(int32(8000+c.random.IntN(100)))
	from := []networkingv1.NetworkPolicyPeer{{PodSelector: appSelector(i / 3)}}
	p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	switch (i / c.Namespaces) % 6 {
	case 0: // deny all
	case 3: // DNS
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
		p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{
			Ports: []networkingv1.NetworkPolicyPort{{Protocol: &udp, Port: &dns}},
			To: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{
				corev1.LabelMetadataName: "ns-0"}}}}}}
	case 4: // another namespace
		from[0].NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: fmt.
			Sprintf("ns-%d", c.random.IntN(c.Namespaces))}}
		fallthrough
	case 1, 2: // app to app
		p.Spec.PodSelector = *appSelector(i)
		p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: from,
			Ports: []networkingv1.NetworkPolicyPort{{Port: &port}}}}
	case 5: // the world, but for private addresses
		p.Spec.PodSelector = *appSelector(i)
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
		p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{To: []networkingv1.NetworkPolicyPeer{{
			IPBlock: &networkingv1.IPBlock{CIDR: "0.0.0.0/0", Except: []string{"10.0.0.0/8", "172.16.0.0/12"}}}}}}
	}
	return p
}

func (c *PolicyCluster) clusterPolicy(i int) *cnpv1.ClusterNetworkPolicy {
	p := &cnpv1.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("cluster-%d", i)}}
	p.Spec.Tier, p.Spec.Priority = cnpv1.AdminTier, int32(i)
	p.Spec.Subject.Namespaces = &metav1.LabelSelector{}
	if i%2 == 1 {
		p.Spec.Subject.Namespaces.MatchLabels = map[string]string{"team": fmt.Sprintf("team-%d", c.random.IntN(50))}
	}
	action := []cnpv1.ClusterNetworkPolicyRuleAction{"Accept", "Deny", "Pass"}[i%3]
	from := cnpv1.ClusterNetworkPolicyIngressPeer{Pods: &cnpv1.NamespacedPod{PodSelector: *appSelector(c.random.IntN(8)),
		NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{
			"team": fmt.Sprintf("team-%d", c.random.IntN(50))}}}}
	if i%4 == 0 {
		from = cnpv1.ClusterNetworkPolicyIngressPeer{Namespaces: &metav1.LabelSelector{MatchLabels: map[string]string{
			"team": fmt.Sprintf("team-%d", c.random.IntN(50))}}}
	}
	p.Spec.Ingress = []cnpv1.ClusterNetworkPolicyIngressRule{{Action: action,
		From: []cnpv1.ClusterNetworkPolicyIngressPeer{from}, Protocols: []cnpv1.ClusterNetworkPolicyProtocol{{
			TCP: &cnpv1.ClusterNetworkPolicyProtocolTCP{DestinationPort: &cnpv1.Port{
				Number: int32(8000 + c.random.IntN(100))}}}}}}
	return p
}

// Relabelled returns a pod with another label, a new draw each time.
func (c *PolicyCluster) Relabelled(i int) *corev1.Pod {
	p := c.Pods[i].DeepCopy()
	p.Labels["app"] = fmt.Sprintf("app-%d", c.random.IntN(8))
	return p
}
