package generate

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/source"
)

// HostileShape is a kind of objects that are small and come to much: what a tenant may write into a namespace, or
// labels with which it makes the cluster's own policies come to much.
type HostileShape struct {
	Name    string
	Objects func(tenant int) []source.Object
}

// HostileShapes are what network policies come to at worst. Pods are on PolicyNode; each tenant has a namespace.
var HostileShapes = []HostileShape{
	{"nested ports", func(n int) []source.Object { return tenant(n, 20).nested(360, 1).objects }},
	{"nested ports and peers", func(n int) []source.Object { return tenant(n, 20).nested(360, 20).objects }},
	{"nested ports of one peer", func(n int) []source.Object { return tenant(n, 20).nested(360, 0).objects }},
	{"ports times peers", func(n int) []source.Object { return tenant(n, 10).scattered(64, 120, 100).objects }},
	{"odd ranges", func(n int) []source.Object { return tenant(n, 8).oddRanges(4000).objects }},
	{"single ports", func(n int) []source.Object { return tenant(n, 8).singlePorts(8000).objects }},
	{"exceptions", func(n int) []source.Object { return tenant(n, 2).exceptions(500).objects }},
	{"nested CIDRs", func(n int) []source.Object { return tenant(n, 8).nestedCIDRs(8000).objects }},
	{"named ports", func(n int) []source.Object { return tenant(n, 20).namedPorts(4, 60).objects }},
	{"numbers of a named port", func(n int) []source.Object { return tenant(n, 100).ownNumbers(200).objects }},
	{"many policies", func(n int) []source.Object { return tenant(n, 100).manyPolicies(8000).objects }},
	{"broad selectors", func(n int) []source.Object { return tenant(n, 20).broad(16, 360, 1000).objects }},
	{"tables times pods", func(n int) []source.Object { return tenant(n, 20).tables(400, 1000).objects }},
	{"long texts", func(n int) []source.Object { return tenant(n, 8).longTexts(16).objects }},
	{"subsets of cluster policies", func(n int) []source.Object { return tenant(n, 100).subsets(60).objects }},
}

// hostile is what a tenant has.
type hostile struct {
	ns      string
	number  int
	pods    int // on PolicyNode
	objects []source.Object
	random  *rand.Rand
}

// tenant returns a tenant with a namespace, and so many pods of different labels on PolicyNode.
func tenant(number, pods int) *hostile {
	h := &hostile{ns: fmt.Sprintf("evil-%d", number), number: number, pods: pods,
		random: rand.New(rand.NewPCG(3, uint64(number)))}
	h.add(&corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{Name: h.ns, Labels: map[string]string{corev1.LabelMetadataName: h.ns}}})
	for i := range pods {
		h.add(h.pod(i, PolicyNode))
	}
	return h
}

func (h *hostile) add(o ...source.Object) *hostile {
	h.objects = append(h.objects, o...)
	return h
}

// pod returns a pod with labels of its own.
func (h *hostile) pod(i int, node string) *corev1.Pod {
	name := fmt.Sprintf("p%d", i)
	p := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: h.ns, Name: name, Labels: map[string]string{"app": name}}}
	p.Spec.NodeName, p.Spec.Containers = node, []corev1.Container{{Name: "c", Image: "example.com/c"}}
	p.Status.Phase, p.Status.PodIPs = corev1.PodRunning, []corev1.PodIP{{IP: netip.AddrFrom4([4]byte{10,
		byte(128 + h.number), byte(i >> 8), byte(i)}).String()}}
	return p
}

// policy returns a policy of ingress for the i-th pod, or for all with -1.
func (h *hostile) policy(name string, pod int) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1",
		Kind: "NetworkPolicy"}, ObjectMeta: metav1.ObjectMeta{Namespace: h.ns, Name: name}}
	p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	if pod >= 0 {
		p.Spec.PodSelector.MatchLabels = map[string]string{"app": fmt.Sprintf("p%d", pod)}
	}
	return p
}

// each adds a policy of ingress for each pod, by its number, which fill completes.
func (h *hostile) each(fill func(c int, p *networkingv1.NetworkPolicy)) *hostile {
	for c := range h.pods {
		p := h.policy(fmt.Sprintf("big%d", c), c)
		fill(c, p)
		h.add(p)
	}
	return h
}

// without returns a peer of all pods whose namespace has no label of that key: it is compared with every pod.
func without(format string, args ...any) networkingv1.NetworkPolicyPeer {
	return networkingv1.NetworkPolicyPeer{NamespaceSelector: &metav1.LabelSelector{
		MatchExpressions: []metav1.LabelSelectorRequirement{{Key: fmt.Sprintf(format, args...),
			Operator: metav1.LabelSelectorOpDoesNotExist}}}}
}

func portRange(first, last int) networkingv1.NetworkPolicyPort {
	p, end := intstr.FromInt32(int32(first)), int32(last)
	if first == last {
		return networkingv1.NetworkPolicyPort{Port: &p}
	}
	return networkingv1.NetworkPolicyPort{Port: &p, EndPort: &end}
}

func prefix4(i, bits int) string {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i)}), bits).Masked().
		String()
}

// nested adds to each pod a policy of rules whose port ranges nest, each with so many peers of its own: none of them
// with 0, but one for all.
func (h *hostile) nested(rules, peers int) *hostile {
	return h.each(func(c int, p *networkingv1.NetworkPolicy) {
		for i := range rules {
			r := networkingv1.NetworkPolicyIngressRule{Ports: []networkingv1.NetworkPolicyPort{portRange(1+i, 65535-i)}}
			for j := range peers {
				r.From = append(r.From, without("a%d-%d-%d", c, i, j))
			}
			if peers == 0 {
				r.From = append(r.From, without("a"))
			}
			p.Spec.Ingress = append(p.Spec.Ingress, r)
		}
	})
}

// scattered adds to each pod rules that share port ranges drawn at random.
func (h *hostile) scattered(rules, ports, peers int) *hostile {
	return h.each(func(c int, p *networkingv1.NetworkPolicy) {
		for i := range rules {
			r := networkingv1.NetworkPolicyIngressRule{}
			for range ports {
				first := 1 + h.random.IntN(60000)
				r.Ports = append(r.Ports, portRange(first, first+h.random.IntN(400)))
			}
			for j := range peers {
				r.From = append(r.From, without("a%d-%d-%d", c, i, j))
			}
			p.Spec.Ingress = append(p.Spec.Ingress, r)
		}
	})
}

// oddRanges adds to each pod ranges that no few prefixes hold.
func (h *hostile) oddRanges(ranges int) *hostile {
	return h.each(func(_ int, p *networkingv1.NetworkPolicy) {
		for i := range ranges {
			p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{
				From:  []networkingv1.NetworkPolicyPeer{without("a%d", i%2)},
				Ports: []networkingv1.NetworkPolicyPort{portRange(1+16*i, 15+16*i)}})
		}
	})
}

// singlePorts adds to each pod as many ports as a policy may have.
func (h *hostile) singlePorts(ports int) *hostile {
	return h.each(func(_ int, p *networkingv1.NetworkPolicy) {
		for i := range 2 {
			r := networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{without("a%d", i)}}
			for j := range ports / 2 {
				r.Ports = append(r.Ports, portRange(1+4*j+i, 1+4*j+i))
			}
			p.Spec.Ingress = append(p.Spec.Ingress, r)
		}
	})
}

// exceptions adds to each pod the same CIDR with exceptions of its own, each by itself.
func (h *hostile) exceptions(n int) *hostile {
	return h.each(func(c int, p *networkingv1.NetworkPolicy) {
		r := networkingv1.NetworkPolicyIngressRule{}
		for i := range n {
			r.From = append(r.From, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "0.0.0.0/0",
				Except: []string{prefix4(1<<28+(h.number*8+c)<<20+i<<9, 24)}}})
		}
		p.Spec.Ingress = append(p.Spec.Ingress, r)
	})
}

// nestedCIDRs adds to each pod CIDRs that nest as deep as they can.
func (h *hostile) nestedCIDRs(n int) *hostile {
	return h.each(func(c int, p *networkingv1.NetworkPolicy) {
		r := networkingv1.NetworkPolicyIngressRule{}
		for i := range n {
			a := 1<<30 + (h.number*8+c)<<20 + i/24*64
			r.From = append(r.From, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: prefix4(a,
				32-i%24)}})
		}
		p.Spec.Ingress = append(p.Spec.Ingress, r)
	})
}

// namedPorts adds to each pod rules of egress by the names of ports, and pods as many numbers for each name as count.
func (h *hostile) namedPorts(names, peers int) *hostile {
	h.each(func(c int, p *networkingv1.NetworkPolicy) {
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
		for i := range names {
			name := intstr.FromString(fmt.Sprintf("n%d-%d", h.number, i))
			r := networkingv1.NetworkPolicyEgressRule{Ports: []networkingv1.NetworkPolicyPort{{Port: &name}}}
			for j := range peers {
				r.To = append(r.To, without("a%d-%d-%d", c, i, j))
			}
			p.Spec.Egress = append(p.Spec.Egress, r)
		}
	})
	server := h.pod(h.pods, "elsewhere")
	for i := range names {
		for k := range 64 {
			server.Spec.Containers[0].Ports = append(server.Spec.Containers[0].Ports, corev1.ContainerPort{
				Name: fmt.Sprintf("n%d-%d", h.number, i), ContainerPort: int32(1000 + 100*i + k)})
		}
	}
	return h.add(server)
}

// ownNumbers adds to each pod other numbers for the port names that one policy of ingress has.
func (h *hostile) ownNumbers(names int) *hostile {
	p := h.policy("all", -1)
	for i := range names {
		name := intstr.FromString(fmt.Sprintf("n%d", i))
		p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{
			From:  []networkingv1.NetworkPolicyPeer{without("a%d", i)},
			Ports: []networkingv1.NetworkPolicyPort{{Port: &name}, portRange(1+i, 65535-i)}})
	}
	for _, o := range h.objects {
		if pod, is := o.(*corev1.Pod); is {
			for i := range names {
				pod.Spec.Containers[0].Ports = append(pod.Spec.Containers[0].Ports, corev1.ContainerPort{
					Name: fmt.Sprintf("n%d", i), ContainerPort: int32(1 + h.random.IntN(65535))})
			}
		}
	}
	return h.add(p)
}

// manyPolicies has policies that say nothing but that they select all, and pods that each have one more.
func (h *hostile) manyPolicies(n int) *hostile {
	for i := range n {
		h.add(h.policy(fmt.Sprintf("all%d", i), -1))
	}
	for c := range h.pods {
		h.add(h.policy(fmt.Sprintf("own%d", c), c))
	}
	return h
}

// broad has selectors that distinguish many pods, and others that match all of these.
func (h *hostile) broad(bits, rules, pods int) *hostile {
	for i := range pods {
		p := h.pod(1000+i, "elsewhere")
		for b := range bits {
			p.Labels[fmt.Sprintf("b%d", b)] = fmt.Sprint((i * 2654435761) >> b & 1)
		}
		h.add(p)
	}
	split := h.policy("split", -1)
	r := networkingv1.NetworkPolicyIngressRule{}
	for b := range bits {
		r.From = append(r.From, networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{
			MatchLabels: map[string]string{fmt.Sprintf("b%d", b): "1"}}})
	}
	split.Spec.Ingress = append(split.Spec.Ingress, r)
	return h.add(split).nested(rules, 1)
}

// tables has as many peer tables as rules, that each match every pod.
func (h *hostile) tables(rules, pods int) *hostile {
	for i := range pods {
		h.add(h.pod(1000+i, "elsewhere"))
	}
	return h.each(func(c int, p *networkingv1.NetworkPolicy) {
		for i := range rules {
			p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{
				From:  []networkingv1.NetworkPolicyPeer{without("a%d-%d", c, i)},
				Ports: []networkingv1.NetworkPolicyPort{portRange(1+i, 1+i)}})
		}
	})
}

// longTexts has selectors of the longest keys and values.
func (h *hostile) longTexts(rules int) *hostile {
	long := func(i int) string { return fmt.Sprintf("k%06d", i) + strings.Repeat("x", 63-7) }
	for c := range h.pods {
		p := h.policy(long(c), c)
		for i := range rules {
			e := metav1.LabelSelectorRequirement{Key: strings.Repeat(long(c)+".", 3) + "x/" + long(i),
				Operator: metav1.LabelSelectorOpNotIn}
			for j := range 1000 {
				e.Values = append(e.Values, long(j+1000*i))
			}
			p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{
				From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{
					MatchExpressions: []metav1.LabelSelectorRequirement{e}}}}})
		}
		h.add(p)
	}
	return h
}

// subsets has ClusterNetworkPolicies, of which each pod's labels select others.
func (h *hostile) subsets(policies int) *hostile {
	for i := range policies {
		p := &cnpv1.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c%d", i)}}
		p.Spec.Tier, p.Spec.Priority = cnpv1.AdminTier, int32(i)
		p.Spec.Subject.Pods = &cnpv1.NamespacedPod{PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{
			fmt.Sprintf("s%d", i%32): "1"}}}
		for j := range 10 {
			p.Spec.Ingress = append(p.Spec.Ingress, cnpv1.ClusterNetworkPolicyIngressRule{
				Action: cnpv1.ClusterNetworkPolicyRuleActionAccept, From: []cnpv1.ClusterNetworkPolicyIngressPeer{{
					Namespaces: &metav1.LabelSelector{MatchLabels: map[string]string{fmt.Sprint("t", i, j): "x"}}}},
				Protocols: []cnpv1.ClusterNetworkPolicyProtocol{{TCP: &cnpv1.ClusterNetworkPolicyProtocolTCP{
					DestinationPort: &cnpv1.Port{Range: &cnpv1.PortRange{Start: int32(1 + 10*i + j), End: int32(60000 - 10*i - j)}},
				}}}})
		}
		h.add(p)
	}
	for _, o := range h.objects {
		if pod, is := o.(*corev1.Pod); is {
			for i := range 32 {
				pod.Labels[fmt.Sprintf("s%d", i)] = fmt.Sprint(h.random.IntN(2))
			}
		}
	}
	return h
}
