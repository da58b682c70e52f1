package policy

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// naive decides about packets straight from the objects and the words of the API, without an index and without any of
// the resolver's code: the second opinion.
type naive struct {
	config     Config
	namespaces map[string]*corev1.Namespace
	nodes      map[string]*corev1.Node
	pods       []*corev1.Pod
	policies   []*networkingv1.NetworkPolicy
	cluster    []*cnpv1.ClusterNetworkPolicy
	names      []*source.ResolvedName
}

func newNaive(c Config, objects map[source.Key]source.Object) *naive {
	n := &naive{config: c, namespaces: map[string]*corev1.Namespace{}, nodes: map[string]*corev1.Node{}}
	for _, o := range objects {
		switch o := o.(type) {
		case *corev1.Namespace:
			n.namespaces[o.Name] = o
		case *corev1.Node:
			n.nodes[o.Name] = o
		case *corev1.Pod:
			n.pods = append(n.pods, o)
		case *networkingv1.NetworkPolicy:
			n.policies = append(n.policies, o)
		case *cnpv1.ClusterNetworkPolicy:
			n.cluster = append(n.cluster, o)
		case *source.ResolvedName:
			n.names = append(n.names, o)
		}
	}
	slices.SortFunc(n.cluster, func(a, b *cnpv1.ClusterNetworkPolicy) int {
		return cmp.Or(cmp.Compare(a.Spec.Priority, b.Spec.Priority), strings.Compare(a.Name, b.Name))
	})
	return n
}

// end is one end of a packet.
type end struct {
	addr    netip.Addr
	pod     *corev1.Pod // nil: none that counts
	nodes   []*corev1.Node
	self    bool // an address of this node
	unknown bool // it may be a pod's that isn't known
}

func (n *naive) end(a netip.Addr) (e end) {
	e = end{addr: a, self: slices.Contains(n.config.Addresses, a)}
	for _, p := range n.pods {
		if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed ||
			n.namespaces[p.Namespace] == nil && !n.config.ImpliedNamespaces {
			continue
		}
		has := func(ip corev1.PodIP) bool { b, err := netip.ParseAddr(ip.IP); return err == nil && a == b }
		if slices.ContainsFunc(p.Status.PodIPs, has) && (e.pod == nil || newer(p, e.pod)) {
			e.pod = p
		}
	}
	var ranges []netip.Prefix
	for _, o := range n.nodes {
		if slices.ContainsFunc(o.Status.Addresses, func(x corev1.NodeAddress) bool { return x.Address == a.String() }) {
			e.nodes = append(e.nodes, o)
			e.self = e.self || o.Name == n.config.Node
		}
		for _, c := range o.Spec.PodCIDRs {
			ranges = append(ranges, netip.MustParsePrefix(c))
		}
	}
	in := func(p netip.Prefix) bool { return p.Contains(a) }
	e.unknown = e.pod == nil && e.nodes == nil && !e.self &&
		slices.ContainsFunc(append(ranges, n.config.PodRanges...), in) &&
		n.config.UnknownPods != AllowUnknownPods
	return e
}

func newer(a, b *corev1.Pod) bool {
	if x, y := a.DeletionTimestamp != nil, b.DeletionTimestamp != nil; x != y {
		return y
	}
	return cmp.Or(cmp.Compare(a.CreationTimestamp.Unix(), b.CreationTimestamp.Unix()),
		strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name)) > 0
}

// naiveResult is what becomes of a packet.
type naiveResult struct {
	drop, reported bool
	by             string // the policy that decides, where it is a ClusterNetworkPolicy
}

func (n *naive) judge(p verdict.Packet) (r naiveResult) {
	src, dst := n.end(p.Src.Addr()), n.end(p.Dst.Addr())
	if src.self {
		return r
	}
	if n.one(&r, src, dst, model.Egress, p); r.drop || dst.self {
		return r
	}
	n.one(&r, dst, src, model.Ingress, p)
	return r
}

func (n *naive) one(r *naiveResult, own, other end, d model.Direction, p verdict.Packet) {
	here := n.config.Node
	if own.pod == nil || own.pod.Spec.NodeName != here {
		node, enforced := n.nodes[here], false
		for _, o := range n.policies {
			enforced = enforced || !n.audited(o.Annotations)
		}
		for _, o := range n.cluster {
			enforced = enforced || !n.audited(o.Annotations) && validTier(o) && validSubject(o)
		}
		if enforced && node != nil && slices.ContainsFunc(node.Spec.PodCIDRs, func(c string) bool {
			return netip.MustParsePrefix(c).Contains(own.addr)
		}) {
			r.drop = true
		}
		return
	}
	c := connection{n, d, own, other, p}
	if v, by := c.tier(cnpv1.AdminTier, false); v == "" {
		if would, _ := c.tier(cnpv1.AdminTier, true); would == cnpv1.ClusterNetworkPolicyRuleActionDeny {
			r.reported = true
		}
	} else if v == cnpv1.ClusterNetworkPolicyRuleActionDeny {
		r.drop, r.by = true, by
		return
	} else {
		if would, _ := c.tier(cnpv1.AdminTier, true); would == cnpv1.ClusterNetworkPolicyRuleActionDeny {
			r.reported = true
		}
		if v == cnpv1.ClusterNetworkPolicyRuleActionAccept {
			return
		}
	}
	isolated, allowed := c.networkPolicies(false)
	if isolated {
		r.drop = !allowed
		return
	}
	v, by := c.tier(cnpv1.BaselineTier, false)
	if v == cnpv1.ClusterNetworkPolicyRuleActionDeny {
		r.drop, r.by = true, by
		return
	}
	if isolated, allowed = c.networkPolicies(true); isolated {
		r.reported = r.reported || !allowed
		return
	}
	would, _ := c.tier(cnpv1.BaselineTier, true)
	r.reported = r.reported || would == cnpv1.ClusterNetworkPolicyRuleActionDeny
}

func (n *naive) audited(annotations map[string]string) bool {
	return n.config.Audit || annotations[AuditAnnotation] == "true"
}

func validTier(o *cnpv1.ClusterNetworkPolicy) bool {
	return o.Spec.Tier == cnpv1.AdminTier || o.Spec.Tier == cnpv1.BaselineTier
}

func validSubject(o *cnpv1.ClusterNetworkPolicy) bool {
	return (o.Spec.Subject.Namespaces == nil) != (o.Spec.Subject.Pods == nil)
}

// connection is a packet seen from the pod at one end.
type connection struct {
	*naive
	d          model.Direction
	own, other end
	p          verdict.Packet
}

func selects(s *metav1.LabelSelector, l map[string]string) bool {
	x, err := metav1.LabelSelectorAsSelector(s)
	return err == nil && x.Matches(labels.Set(l))
}

func (n *naive) labelsOf(ns string) map[string]string {
	if o := n.namespaces[ns]; o != nil {
		return o.Labels
	}
	return map[string]string{corev1.LabelMetadataName: ns}
}

// networkPolicies returns whether NetworkPolicies, the audited ones as well if all, isolate the pod, and whether a rule
// allows the connection.
func (c connection) networkPolicies(all bool) (isolated, allowed bool) {
	for _, o := range c.policies {
		if o.Namespace != c.own.pod.Namespace || !selects(&o.Spec.PodSelector, c.own.pod.Labels) ||
			c.audited(o.Annotations) && !all {
			continue
		}
		if c.d == model.Ingress {
			if slices.Contains(o.Spec.PolicyTypes, networkingv1.PolicyTypeIngress) || len(o.Spec.PolicyTypes) == 0 {
				isolated = true
				for _, r := range o.Spec.Ingress {
					allowed = allowed || c.allows(o, r.From, r.Ports)
				}
			}
		} else if slices.Contains(o.Spec.PolicyTypes, networkingv1.PolicyTypeEgress) ||
			len(o.Spec.PolicyTypes) == 0 && len(o.Spec.Egress) > 0 {
			isolated = true
			for _, r := range o.Spec.Egress {
				allowed = allowed || c.allows(o, r.To, r.Ports)
			}
		}
	}
	return isolated, allowed
}

func (c connection) allows(o *networkingv1.NetworkPolicy, peers []networkingv1.NetworkPolicyPeer,
	ports []networkingv1.NetworkPolicyPort) bool {
	for _, peer := range append(peers, make([]networkingv1.NetworkPolicyPeer, min(1, max(0, 1-len(peers))))...) {
		everyone := len(peers) == 0
		if !everyone && !c.isPeer(o, peer) {
			continue
		}
		if len(ports) == 0 {
			return true
		}
		for _, port := range ports {
			if c.atPort(port) {
				return true
			}
		}
	}
	return false
}

func (c connection) isPeer(o *networkingv1.NetworkPolicy, p networkingv1.NetworkPolicyPeer) bool {
	switch {
	case p.IPBlock != nil && (p.PodSelector != nil || p.NamespaceSelector != nil):
		return false
	case p.IPBlock != nil:
		for _, e := range p.IPBlock.Except {
			x, err := netip.ParsePrefix(e)
			if err != nil || x.Addr().Is4In6() || x.Contains(c.other.addr) {
				return false
			}
		}
		x, err := netip.ParsePrefix(p.IPBlock.CIDR)
		return err == nil && !x.Addr().Is4In6() && x.Contains(c.other.addr)
	case c.other.pod == nil || p.PodSelector == nil && p.NamespaceSelector == nil:
		return false
	case p.PodSelector != nil && !selects(p.PodSelector, c.other.pod.Labels):
		return false
	case p.NamespaceSelector == nil:
		return c.other.pod.Namespace == o.Namespace
	}
	return selects(p.NamespaceSelector, c.labelsOf(c.other.pod.Namespace))
}

// atPort reports whether a port of a NetworkPolicy is the connection's.
func (c connection) atPort(p networkingv1.NetworkPolicyPort) bool {
	protocol := corev1.ProtocolTCP
	if p.Protocol != nil {
		protocol = *p.Protocol
	}
	if !c.isProtocol(protocol) {
		return false
	}
	to := int32(c.p.Dst.Port())
	switch {
	case p.Port == nil:
		return p.EndPort == nil
	case p.Port.Type == intstr.String:
		return p.EndPort == nil && c.hasPort(p.Port.StrVal, false)
	case p.EndPort != nil:
		return p.Port.IntVal >= 1 && *p.EndPort <= 65535 && p.Port.IntVal <= to && to <= *p.EndPort
	}
	return to == p.Port.IntVal && to > 0
}

func (c connection) isProtocol(p corev1.Protocol) bool {
	switch p {
	case corev1.ProtocolTCP:
		return c.p.Protocol == model.TCP
	case corev1.ProtocolUDP:
		return c.p.Protocol == model.UDP
	case corev1.ProtocolSCTP:
		return c.p.Protocol == model.SCTP
	}
	return false
}

// hasPort reports whether the destination is a pod that has the destination port under that name. One that isn't known
// is thought to have what any pod has, if that counts.
func (c connection) hasPort(name string, unknown bool) bool {
	to := c.other
	if c.d == model.Ingress {
		to = c.own
	}
	if to.unknown && unknown {
		return slices.ContainsFunc(c.pods, func(p *corev1.Pod) bool {
			return !p.Spec.HostNetwork && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed &&
				len(p.Status.PodIPs) > 0 && c.podHasPort(p, name)
		})
	}
	return to.pod != nil && c.podHasPort(to.pod, name)
}

func (c connection) podHasPort(pod *corev1.Pod, name string) bool {
	for _, x := range append(slices.Clone(pod.Spec.Containers), pod.Spec.InitContainers...) {
		for _, p := range x.Ports {
			if p.Name == name && p.ContainerPort == int32(c.p.Dst.Port()) && c.isProtocol(cmp.Or(p.Protocol, "TCP")) {
				return true
			}
		}
	}
	return false
}

// tier returns the action of the first rule of a tier that matches, "" if none does, and its policy.
func (c connection) tier(t cnpv1.Tier, all bool) (cnpv1.ClusterNetworkPolicyRuleAction, string) {
	for _, o := range c.cluster {
		if o.Spec.Tier != t || !validSubject(o) || c.audited(o.Annotations) && !all {
			continue
		}
		ns, pod := c.labelsOf(c.own.pod.Namespace), c.own.pod.Labels
		if s := o.Spec.Subject.Namespaces; s != nil && !selects(s, ns) {
			continue
		}
		if s := o.Spec.Subject.Pods; s != nil && (!selects(&s.NamespaceSelector, ns) || !selects(&s.PodSelector, pod)) {
			continue
		}
		if c.d == model.Ingress {
			for _, r := range o.Spec.Ingress {
				var peers []cnpv1.ClusterNetworkPolicyEgressPeer
				for _, p := range r.From {
					peers = append(peers, cnpv1.ClusterNetworkPolicyEgressPeer{Namespaces: p.Namespaces, Pods: p.Pods})
				}
				if a := c.action(r.Action, peers, r.Protocols); a != "" {
					return a, o.Name
				}
			}
			continue
		}
		for _, r := range o.Spec.Egress {
			if a := c.action(r.Action, r.To, r.Protocols); a != "" {
				return a, o.Name
			}
		}
	}
	return "", ""
}

// action returns what a rule does to the connection, "" if it doesn't match.
func (c connection) action(a cnpv1.ClusterNetworkPolicyRuleAction, peers []cnpv1.ClusterNetworkPolicyEgressPeer,
	protocols []cnpv1.ClusterNetworkPolicyProtocol) cnpv1.ClusterNetworkPolicyRuleAction {
	accept := a == cnpv1.ClusterNetworkPolicyRuleActionAccept
	closed, unnamed := len(peers) == 0, false
	for _, p := range peers {
		closed = closed || p.Namespaces == nil && p.Pods == nil && p.Nodes == nil && p.Networks == nil &&
			p.DomainNames == nil ||
			p.DomainNames != nil && !accept
		for _, n := range p.Networks {
			x, err := netip.ParsePrefix(string(n))
			closed = closed || !accept && (err != nil || x.Addr().Is4In6())
		}
		for _, q := range protocols {
			unnamed = unnamed || q.DestinationNamedPort != "" && (p.Nodes != nil || p.Networks != nil || p.DomainNames != nil)
		}
	}
	for _, q := range protocols {
		closed = closed || q.TCP == nil && q.UDP == nil && q.SCTP == nil && q.DestinationNamedPort == ""
	}
	switch {
	case closed && accept, unnamed && !closed:
		return ""
	case closed:
		return cnpv1.ClusterNetworkPolicyRuleActionDeny
	}
	peer := func(p cnpv1.ClusterNetworkPolicyEgressPeer) bool { return c.isClusterPeer(p, accept) }
	protocol := func(p cnpv1.ClusterNetworkPolicyProtocol) bool { return c.isClusterProtocol(p, accept) }
	if !slices.ContainsFunc(peers, peer) || len(protocols) > 0 && !slices.ContainsFunc(protocols, protocol) {
		return ""
	}
	return a
}

func (c connection) isClusterPeer(p cnpv1.ClusterNetworkPolicyEgressPeer, accept bool) bool {
	other := c.other
	switch {
	case p.Networks != nil:
		return slices.ContainsFunc(p.Networks, func(n cnpv1.CIDR) bool {
			x, err := netip.ParsePrefix(string(n))
			return err == nil && !x.Addr().Is4In6() && x.Contains(other.addr)
		})
	case p.Nodes != nil:
		return slices.ContainsFunc(other.nodes, func(o *corev1.Node) bool { return selects(p.Nodes, o.Labels) })
	case p.DomainNames != nil:
		return slices.ContainsFunc(c.names, func(n *source.ResolvedName) bool {
			return slices.Contains(n.Addresses, other.addr) && slices.ContainsFunc(p.DomainNames, func(d cnpv1.DomainName) bool {
				below, wild := strings.CutPrefix(string(d), "*")
				return wild && strings.HasSuffix(n.Name, below) || string(d) == n.Name
			})
		})
	case other.unknown && !accept:
		return true
	case other.pod == nil:
		return false
	case p.Namespaces != nil:
		return selects(p.Namespaces, c.labelsOf(other.pod.Namespace))
	}
	return selects(&p.Pods.NamespaceSelector, c.labelsOf(other.pod.Namespace)) && selects(&p.Pods.PodSelector,
		other.pod.Labels)
}

func (c connection) isClusterProtocol(p cnpv1.ClusterNetworkPolicyProtocol, accept bool) bool {
	at := func(protocol model.Protocol, q *cnpv1.Port) bool {
		to := int32(c.p.Dst.Port())
		switch {
		case protocol != c.p.Protocol:
			return false
		case q == nil:
			return true
		case q.Range != nil:
			return q.Range.Start <= to && to <= q.Range.End
		}
		return q.Number == to
	}
	switch {
	case p.TCP != nil:
		return at(model.TCP, p.TCP.DestinationPort)
	case p.UDP != nil:
		return at(model.UDP, p.UDP.DestinationPort)
	case p.SCTP != nil:
		return at(model.SCTP, p.SCTP.DestinationPort)
	}
	return c.hasPort(p.DestinationNamedPort, !accept)
}
