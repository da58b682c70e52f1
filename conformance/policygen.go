package conformance

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/source"
)

// isolation is what a random world has of policies. Without an engine it stays empty.
type isolation struct {
	Namespaces [2]*corev1.Namespace
	Pods       [6]*corev1.Pod // of the cast, in its order; nil: not known
	Policies   [6]*networkingv1.NetworkPolicy
	Cluster    [3]*cnpv1.ClusterNetworkPolicy
}

// objects returns what is there.
func (i *isolation) objects() (l []source.Object) {
	for _, o := range i.Namespaces {
		if o != nil {
			l = append(l, o)
		}
	}
	for _, o := range i.Pods {
		if o != nil {
			l = append(l, o)
		}
	}
	for _, o := range i.Policies {
		if o != nil {
			l = append(l, o)
		}
	}
	for _, o := range i.Cluster {
		if o != nil {
			l = append(l, o)
		}
	}
	return l
}

// pods returns the pods of the cast that have a network of their own, and the one of a node's.
func pods() (l []*member) {
	for i := range topology {
		if m := &topology[i]; m.Node != "" && !m.isNode() {
			l = append(l, m)
		}
	}
	return l
}

// isolate draws what follows i: a few policies, labels and namespaces changed, most as they were.
func (d generator) isolate(i *isolation) {
	if i.Namespaces[0] == nil {
		for n, m := range pods() {
			i.Pods[n] = m.podObject()
		}
	}
	for n, name := range []string{"clients", "default"} {
		if i.Namespaces[n] == nil || d.chance(10) {
			i.Namespaces[n] = &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
				ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"team": one(d, "x", "y"),
					corev1.LabelMetadataName: name}}}
		}
	}
	for n, m := range pods() {
		switch k := d.IntN(100); {
		case k < 15:
			p := m.podObject()
			p.Labels["tier"] = one(d, "a", "b")
			if ports := p.Spec.Containers[0].Ports; d.chance(30) && len(ports) > 1 {
				ports[0].Name, ports[1].Name = "http", ""
			}
			i.Pods[n] = p
		case k < 18:
			i.Pods[n] = nil
		}
	}
	for n := range i.Policies {
		if d.chance(25) {
			i.Policies[n] = nil
			if d.chance(60) {
				i.Policies[n] = d.networkPolicy(n)
			}
		}
	}
	for n := range i.Cluster {
		if d.chance(25) {
			i.Cluster[n] = nil
			if d.chance(60) {
				i.Cluster[n] = d.clusterPolicy(n)
			}
		}
	}
}

// audit draws the annotations of a policy.
func (d generator) audit() map[string]string {
	if d.chance(10) {
		return map[string]string{policy.AuditAnnotation: "true"}
	}
	return nil
}

// selector draws a selector of labels that pods have.
func (d generator) selector() metav1.LabelSelector {
	switch d.IntN(5) {
	case 0, 1:
		return metav1.LabelSelector{}
	case 2:
		return metav1.LabelSelector{MatchLabels: map[string]string{"tier": one(d, "a", "b")}}
	case 3:
		return metav1.LabelSelector{MatchLabels: map[string]string{"app": one(d, pods()...).Name}}
	}
	return metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "tier",
		Operator: one(d, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpIn), Values: []string{"a"}}}}
}

// teams draws a selector of namespaces.
func (d generator) teams() metav1.LabelSelector {
	if d.chance(40) {
		return metav1.LabelSelector{}
	}
	return metav1.LabelSelector{MatchLabels: map[string]string{"team": one(d, "x", "y")}}
}

func (d generator) networkPolicy(n int) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{
		TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"},
		ObjectMeta: metav1.ObjectMeta{Namespace: one(d, "default", "clients"), Name: fmt.Sprint("p", n),
			Annotations: d.audit()},
		Spec: networkingv1.NetworkPolicySpec{PodSelector: d.selector()},
	}
	p.Spec.PolicyTypes = one(d, nil, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
		[]networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
		[]networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress})
	for range d.IntN(3) {
		p.Spec.Ingress = append(p.Spec.Ingress,
			networkingv1.NetworkPolicyIngressRule{From: d.peers(), Ports: d.policyPorts()})
	}
	for range d.IntN(3) {
		p.Spec.Egress = append(p.Spec.Egress, networkingv1.NetworkPolicyEgressRule{To: d.peers(), Ports: d.policyPorts()})
	}
	return p
}

func (d generator) peers() (l []networkingv1.NetworkPolicyPeer) {
	for range one(d, 0, 1, 1, 2, 3) {
		var p networkingv1.NetworkPolicyPeer
		pods, teams := d.selector(), d.teams()
		switch d.IntN(4) {
		case 0:
			p.PodSelector = &pods
		case 1:
			p.NamespaceSelector = &teams
		case 2:
			p.PodSelector, p.NamespaceSelector = &pods, &teams
		case 3:
			p.IPBlock = d.block()
		}
		l = append(l, p)
	}
	return l
}

// blocks are CIDRs that hold some of the cast.
var blocks = []string{"0.0.0.0/0", "::/0", "10.244.0.0/16", "10.244.1.0/24", "10.244.2.0/29", "10.244.1.10/32",
	"10.244.2.2/31", "192.168.77.0/30", "192.168.77.2/32", "192.0.2.0/24", "fd00:10:244::/48", "fd00:10:244:2::/64",
	"fd00:10:244:1::10/128", "fd00:77::/64", "2001:db8::/32"}

// block draws a CIDR, perhaps with others excepted that lie in it.
func (d generator) block() *networkingv1.IPBlock {
	b := &networkingv1.IPBlock{CIDR: one(d, blocks...)}
	outer := netip.MustParsePrefix(b.CIDR)
	for _, text := range some(d, d.IntN(4), blocks...) {
		if in := netip.MustParsePrefix(text); in.Overlaps(outer) && in.Bits() > outer.Bits() {
			b.Except = append(b.Except, text)
		}
	}
	return b
}

func (d generator) policyPorts() (l []networkingv1.NetworkPolicyPort) {
	for range one(d, 0, 0, 1, 1, 2, 3) {
		to := one(d, numberedPorts...)
		port := intstr.FromInt32(to.first)
		p := networkingv1.NetworkPolicyPort{Protocol: &to.protocol, Port: &port}
		switch d.IntN(6) {
		case 0:
			p.Port = nil
		case 1:
			end := to.first + int32(d.IntN(900))
			p.EndPort = &end
		case 2:
			port = intstr.FromString(to.name)
		}
		l = append(l, p)
	}
	return l
}

// numberedPorts are ports that pods of the cast answer on.
var numberedPorts = []struct {
	protocol corev1.Protocol
	first    int32
	name     string
}{{corev1.ProtocolTCP, 8080, "http"}, {corev1.ProtocolTCP, 8443, "http"}, {corev1.ProtocolTCP, 9001, "other"},
	{corev1.ProtocolUDP, 8053, "dns"}, {corev1.ProtocolSCTP, 8905, "sig"}}

func (d generator) clusterPolicy(n int) *cnpv1.ClusterNetworkPolicy {
	p := &cnpv1.ClusterNetworkPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: "policy.networking.k8s.io/v1beta1", Kind: "ClusterNetworkPolicy"},
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("c", n), Annotations: d.audit()},
		Spec: cnpv1.ClusterNetworkPolicySpec{Tier: one(d, cnpv1.AdminTier, cnpv1.AdminTier, cnpv1.BaselineTier),
			Priority: int32(d.IntN(4))},
	}
	teams := d.teams()
	if p.Spec.Subject.Namespaces = &teams; d.chance(40) {
		p.Spec.Subject = cnpv1.ClusterNetworkPolicySubject{Pods: &cnpv1.NamespacedPod{NamespaceSelector: teams,
			PodSelector: d.selector()}}
	}
	for range d.IntN(3) {
		p.Spec.Ingress = append(p.Spec.Ingress, cnpv1.ClusterNetworkPolicyIngressRule{Action: d.action(),
			From: d.clusterFrom(), Protocols: d.protocols()})
	}
	for range d.IntN(3) {
		p.Spec.Egress = append(p.Spec.Egress, cnpv1.ClusterNetworkPolicyEgressRule{Action: d.action(), To: d.clusterTo(),
			Protocols: d.protocols()})
	}
	return p
}

func (d generator) action() cnpv1.ClusterNetworkPolicyRuleAction {
	return one(d, cnpv1.ClusterNetworkPolicyRuleActionAccept, cnpv1.ClusterNetworkPolicyRuleActionDeny,
		cnpv1.ClusterNetworkPolicyRuleActionPass)
}

func (d generator) clusterFrom() (l []cnpv1.ClusterNetworkPolicyIngressPeer) {
	for range 1 + d.IntN(2) {
		teams := d.teams()
		p := cnpv1.ClusterNetworkPolicyIngressPeer{Namespaces: &teams}
		if d.chance(50) {
			p = cnpv1.ClusterNetworkPolicyIngressPeer{Pods: &cnpv1.NamespacedPod{NamespaceSelector: teams,
				PodSelector: d.selector()}}
		}
		l = append(l, p)
	}
	return l
}

func (d generator) clusterTo() (l []cnpv1.ClusterNetworkPolicyEgressPeer) {
	for range 1 + d.IntN(2) {
		teams := d.teams()
		var p cnpv1.ClusterNetworkPolicyEgressPeer
		switch d.IntN(4) {
		case 0:
			p.Namespaces = &teams
		case 1:
			p.Pods = &cnpv1.NamespacedPod{NamespaceSelector: teams, PodSelector: d.selector()}
		case 2:
			p.Networks = []cnpv1.CIDR{cnpv1.CIDR(one(d, blocks...))}
		case 3:
			p.Nodes = &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelTopologyZone: one(d, "z1", "z2")}}
		}
		l = append(l, p)
	}
	return l
}

func (d generator) protocols() (l []cnpv1.ClusterNetworkPolicyProtocol) {
	for range one(d, 0, 0, 1, 2) {
		to := one(d, numberedPorts...)
		port := &cnpv1.Port{Number: to.first}
		if d.chance(30) {
			port = &cnpv1.Port{Range: &cnpv1.PortRange{Start: to.first, End: to.first + int32(1+d.IntN(900))}}
		}
		if d.chance(15) {
			port = nil
		}
		var p cnpv1.ClusterNetworkPolicyProtocol
		switch to.protocol {
		case corev1.ProtocolTCP:
			p.TCP = &cnpv1.ClusterNetworkPolicyProtocolTCP{DestinationPort: port}
		case corev1.ProtocolUDP:
			p.UDP = &cnpv1.ClusterNetworkPolicyProtocolUDP{DestinationPort: port}
		case corev1.ProtocolSCTP:
			p.SCTP = &cnpv1.ClusterNetworkPolicyProtocolSCTP{DestinationPort: port}
		}
		l = append(l, p)
	}
	return l
}

// direct draws a packet between two hosts of the cast, to a port that pods answer on or to none.
func (d generator) direct() *packetLine {
	six := d.chance(50)
	to := one(d, pods()...)
	if d.chance(15) {
		to = one(d, memberNamed("node-a"), memberNamed("node-b"), memberNamed("outside"))
	}
	from := one(d, append(pods(), memberNamed("outside"), memberNamed("node-a"), memberNamed("node-b"))...)
	l := &packetLine{Clients: []client{{Name: from.Name, Addr: from.addr(six)}}}
	port := one(d, numberedPorts...)
	l.To = netip.AddrPortFrom(to.addr(six), uint16(port.first))
	l.Proto = map[corev1.Protocol]model.Protocol{corev1.ProtocolTCP: model.TCP, corev1.ProtocolUDP: model.UDP,
		corev1.ProtocolSCTP: model.SCTP}[port.protocol]
	switch k := d.IntN(100); {
	case k < 10:
		l.To, l.Proto = netip.AddrPortFrom(to.addr(six), 0), icmpOf(six)
	case k < 15 && l.Proto == model.UDP:
		l.Size = 4000
	}
	return l
}

// isolationCuts are the ways to make a scene's policies smaller.
func isolationCuts() (l []func(*scene)) {
	for i := range (isolation{}).Policies {
		l = append(l, func(s *scene) { s.Policies[i] = nil })
	}
	for i := range (isolation{}).Cluster {
		l = append(l, func(s *scene) { s.Cluster[i] = nil })
	}
	for i, m := range pods() {
		l = append(l, func(s *scene) {
			if s.Pods[i] != nil {
				s.Pods[i] = m.podObject()
			}
		})
	}
	each := func(of func(*networkingv1.NetworkPolicySpec)) {
		for i := range (isolation{}).Policies {
			l = append(l, func(s *scene) {
				if p := s.Policies[i]; p != nil {
					p = p.DeepCopy()
					of(&p.Spec)
					s.Policies[i] = p
				}
			})
		}
	}
	for n := range 2 {
		each(func(p *networkingv1.NetworkPolicySpec) { p.Ingress = leave(p.Ingress, n) })
		each(func(p *networkingv1.NetworkPolicySpec) { p.Egress = leave(p.Egress, n) })
		for i := range (isolation{}).Cluster {
			l = append(l, func(s *scene) {
				if p := s.Cluster[i]; p != nil {
					p = p.DeepCopy()
					p.Spec.Ingress, p.Spec.Egress = leave(p.Spec.Ingress, n), leave(p.Spec.Egress, n)
					s.Cluster[i] = p
				}
			})
		}
	}
	return slices.Clip(l)
}
