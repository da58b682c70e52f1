package convert_test

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"pgregory.net/rapid"
	"sigs.k8s.io/network-policy-api/apis/v1alpha1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reachability"
	"fairlead.dev/fairlead/resolve/policy/convert"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// host is an end of packets: a pod, a node, or, without either, an address outside.
type host struct {
	addr      netip.Addr
	namespace string // of a pod
	labels    labels.Set
	node      bool
}

// namespaces are those of the test's pods, by name.
var namespaces = map[string]labels.Set{"one": {"team": "a"}, "two": {"team": "b"}, "three": {"team": "b", "level": "9"}}

// hosts are two nodes, pods on each, and one outside. Pods of app web have the port http, 8080 of TCP.
var hosts = []host{
	{addr: netip.MustParseAddr("10.0.1.1"), namespace: "one", labels: labels.Set{"app": "web"}},
	{addr: netip.MustParseAddr("10.0.2.1"), namespace: "one", labels: labels.Set{"app": "db"}},
	{addr: netip.MustParseAddr("10.0.1.2"), namespace: "two", labels: labels.Set{"app": "web"}},
	{addr: netip.MustParseAddr("10.0.2.2"), namespace: "two", labels: labels.Set{}},
	{addr: netip.MustParseAddr("10.0.2.3"), namespace: "three", labels: labels.Set{"app": "web", "role": "x"}},
	{addr: netip.MustParseAddr("192.168.0.1"), node: true, labels: labels.Set{"zone": "z1"}},
	{addr: netip.MustParseAddr("192.168.0.2"), node: true, labels: labels.Set{"zone": "z2"}},
	{addr: netip.MustParseAddr("192.0.2.1")},
}

// world returns the objects of hosts. A NetworkPolicy lets pods of namespace two talk to each other alone.
func world() (out []source.Object) {
	for name, l := range namespaces {
		out = append(out, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: l}})
	}
	for _, h := range hosts {
		name, node := "h"+h.addr.String(), fmt.Sprint("n", h.addr.As4()[2])
		switch {
		case h.node:
			node = fmt.Sprint("n", h.addr.As4()[3])
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, Labels: h.labels}}
			n.Spec.PodCIDRs = []string{"10.0." + node[1:] + ".0/24"}
			n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: h.addr.String()}}
			out = append(out, n)
		case h.namespace != "":
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: h.namespace, Name: name, Labels: h.labels}}
			p.Spec.NodeName, p.Spec.Containers = node, []corev1.Container{{Name: "c"}}
			if h.labels["app"] == "web" {
				p.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 8080,
					Protocol: corev1.ProtocolTCP}}
			}
			p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: h.addr.String()}}}
			out = append(out, p)
		}
	}
	np := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "two", Name: "own"}}
	np.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}
	own := []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}
	np.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: own}}
	np.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{To: own}}
	return append(out, np)
}

// selects reports whether a label selector matches.
func selects(s *metav1.LabelSelector, l labels.Set) bool {
	selector, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		panic(err)
	}
	return selector.Matches(l)
}

func (h host) isPodOf(namespace *metav1.LabelSelector, pod *v1alpha1.NamespacedPod) bool {
	switch {
	case h.namespace == "":
		return false
	case pod != nil:
		return selects(&pod.NamespaceSelector, namespaces[h.namespace]) && selects(&pod.PodSelector, h.labels)
	}
	return namespace != nil && selects(namespace, namespaces[h.namespace])
}

// original decides as the comments on the older types say: the first rule of the policies of the lowest priority, then
// NetworkPolicies, then the baseline.
type original struct {
	admin    []*v1alpha1.AdminNetworkPolicy // by priority
	baseline *v1alpha1.AdminNetworkPolicy   // with the fields of a BaselineAdminNetworkPolicy; nil: none
}

func (o original) allows(src, dst host, p verdict.Packet) bool {
	return (src.namespace == "" || o.decides(src, dst, p, false)) && (dst.namespace == "" || o.decides(dst, src, p, true))
}

// decides evaluates one direction of the policies of a pod.
func (o original) decides(pod, other host, p verdict.Packet, ingress bool) bool {
	for _, a := range o.admin {
		if action := first(a, pod, other, p, ingress); action == v1alpha1.AdminNetworkPolicyRuleActionPass {
			break
		} else if action != "" {
			return action == v1alpha1.AdminNetworkPolicyRuleActionAllow
		}
	}
	if pod.namespace == "two" {
		return other.namespace == "two"
	}
	return o.baseline == nil || first(o.baseline, pod, other, p, ingress) != v1alpha1.AdminNetworkPolicyRuleActionDeny
}

// first returns the action of the first rule of a policy that matches, "" for none.
func first(a *v1alpha1.AdminNetworkPolicy, pod, other host, p verdict.Packet,
	ingress bool) v1alpha1.AdminNetworkPolicyRuleAction {
	if !pod.isPodOf(a.Spec.Subject.Namespaces, a.Spec.Subject.Pods) {
		return ""
	}
	if ingress {
		for _, r := range a.Spec.Ingress {
			if slices.ContainsFunc(r.From, func(x v1alpha1.AdminNetworkPolicyIngressPeer) bool {
				return other.isPodOf(x.Namespaces, x.Pods)
			}) && onPort(r.Ports, pod, p) {
				return r.Action
			}
		}
		return ""
	}
	for _, r := range a.Spec.Egress {
		if slices.ContainsFunc(r.To, func(x v1alpha1.AdminNetworkPolicyEgressPeer) bool {
			return other.isPodOf(x.Namespaces, x.Pods) || x.Nodes != nil && other.node && selects(x.Nodes, other.labels) ||
				slices.ContainsFunc(x.Networks, func(n v1alpha1.CIDR) bool {
					return netip.MustParsePrefix(string(n)).Contains(other.addr)
				})
		}) && onPort(r.Ports, other, p) {
			return r.Action
		}
	}
	return ""
}

// onPort reports whether a packet to dst is to one of ports, nil for all.
func onPort(ports *[]v1alpha1.AdminNetworkPolicyPort, dst host, p verdict.Packet) bool {
	is := func(protocol corev1.Protocol, from, to int32) bool {
		return cmp.Or(protocol, corev1.ProtocolTCP) == map[model.Protocol]corev1.Protocol{model.TCP: "TCP", model.UDP: "UDP",
			model.SCTP: "SCTP"}[p.Protocol] && from <= int32(p.Dst.Port()) && int32(p.Dst.Port()) <= to
	}
	return ports == nil || slices.ContainsFunc(*ports, func(x v1alpha1.AdminNetworkPolicyPort) bool {
		switch {
		case x.PortNumber != nil:
			return is(x.PortNumber.Protocol, x.PortNumber.Port, x.PortNumber.Port)
		case x.PortRange != nil:
			return is(x.PortRange.Protocol, x.PortRange.Start, x.PortRange.End)
		}
		return *x.NamedPort == "http" && dst.labels["app"] == "web" && is(corev1.ProtocolTCP, 8080, 8080)
	})
}

// draw draws policies.
type draw struct{ *rapid.T }

func of[T any](d draw, list ...T) T { return rapid.SampledFrom(list).Draw(d.T, "choice") }

func (d draw) number(least, most int) int { return rapid.IntRange(least, most).Draw(d.T, "number") }

func (d draw) selector(key string, values ...string) *metav1.LabelSelector {
	s := &metav1.LabelSelector{}
	switch d.number(0, 3) {
	case 0:
	case 1:
		s.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: key, Operator: of(d, metav1.LabelSelectorOpIn,
			metav1.LabelSelectorOpNotIn), Values: values[:1]}}
	default:
		s.MatchLabels = map[string]string{key: of(d, values...)}
	}
	return s
}

func (d draw) pods() (namespaces *metav1.LabelSelector, pods *v1alpha1.NamespacedPod) {
	namespaces = d.selector("team", "a", "b")
	if d.number(0, 1) == 0 {
		return namespaces, nil
	}
	return nil, &v1alpha1.NamespacedPod{NamespaceSelector: *namespaces, PodSelector: *d.selector("app", "web", "db")}
}

func (d draw) ports(named bool) *[]v1alpha1.AdminNetworkPolicyPort {
	if d.number(0, 2) == 0 {
		return nil
	}
	var ports []v1alpha1.AdminNetworkPolicyPort
	for range of(d, 1, 2, 60) {
		var p v1alpha1.AdminNetworkPolicyPort
		protocol, http := of(d, "", corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP), "http"
		switch start := int32(d.number(8070, 8090)); d.number(0, 2) {
		case 0:
			p.PortNumber = &v1alpha1.Port{Protocol: protocol, Port: start}
		case 1:
			p.PortRange = &v1alpha1.PortRange{Protocol: protocol, Start: start, End: start + int32(d.number(0, 9))}
		default:
			if p.NamedPort = &http; !named {
				p.NamedPort, p.PortNumber = nil, &v1alpha1.Port{Port: 8080}
			}
		}
		ports = append(ports, p)
	}
	return &ports
}

// policy draws a policy of actions.
func (d draw) policy(name string, priority int, actions ...v1alpha1.AdminNetworkPolicyRuleAction) *v1alpha1.
	AdminNetworkPolicy {
	a := &v1alpha1.AdminNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	a.TypeMeta = metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "AdminNetworkPolicy"}
	a.Spec.Priority = int32(priority)
	a.Spec.Subject.Namespaces, a.Spec.Subject.Pods = d.pods()
	for range d.number(0, 3) {
		r := v1alpha1.AdminNetworkPolicyIngressRule{Action: of(d, actions...), Ports: d.ports(true)}
		for range of(d, 1, 2, 30) {
			var p v1alpha1.AdminNetworkPolicyIngressPeer
			p.Namespaces, p.Pods = d.pods()
			r.From = append(r.From, p)
		}
		a.Spec.Ingress = append(a.Spec.Ingress, r)
	}
	for range d.number(0, 3) {
		r, podsAlone := v1alpha1.AdminNetworkPolicyEgressRule{Action: of(d, actions...)}, d.number(0, 1) == 0
		r.Ports = d.ports(podsAlone)
		for range of(d, 1, 2, 30) {
			var p v1alpha1.AdminNetworkPolicyEgressPeer
			switch kind := d.number(0, 3); {
			case podsAlone || kind < 2:
				p.Namespaces, p.Pods = d.pods()
			case kind == 2:
				p.Nodes = d.selector("zone", "z1", "z2")
			default:
				for i := range of(d, 1, 40) {
					p.Networks = append(p.Networks, v1alpha1.CIDR(netip.PrefixFrom(hosts[i%len(hosts)].addr,
						of(d, 8, 24, 31, 32)).String()))
				}
			}
			r.To = append(r.To, p)
		}
		a.Spec.Egress = append(a.Spec.Egress, r)
	}
	return a
}

// TestConvertedDecidesAsTheOriginal compares what the resolver makes of converted policies with what the originals say,
// for every pair of hosts and ports about those that rules name. Rules of 60 ports and 30 peers need several.
func TestConvertedDecidesAsTheOriginal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d, o := draw{t}, original{}
		const allow, deny, pass = v1alpha1.AdminNetworkPolicyRuleActionAllow, v1alpha1.AdminNetworkPolicyRuleActionDeny,
			v1alpha1.AdminNetworkPolicyRuleActionPass
		var text []byte
		for i := range d.number(0, 3) {
			o.admin = append(o.admin, d.policy(string(rune('c'-i)), 10*i, allow, deny, pass))
			text = append(append(text, "---\n"...), must(yaml.Marshal(o.admin[i]))...)
		}
		if d.number(0, 2) > 0 {
			o.baseline = d.policy("default", 0, allow, deny)
			o.baseline.Kind = "BaselineAdminNetworkPolicy"
			text = append(append(text, "---\n"...), must(yaml.Marshal(o.baseline))...)
		}
		objects, problems := convert.Policies(text)
		if len(problems) > 0 {
			t.Fatalf("%v of\n%s", problems, text)
		}
		all := world()
		for _, o := range objects {
			all = append(all, o.Object)
		}
		c := reachability.New(all, reachability.Options{})
		if p := c.Problems(); len(p) > 0 {
			t.Fatal(p)
		}
		for _, src := range hosts[:5] {
			for _, dst := range hosts {
				for _, port := range []uint16{8069, 8075, 8080, 8088} {
					p := verdict.Packet{Src: netip.AddrPortFrom(src.addr, 40000), Dst: netip.AddrPortFrom(dst.addr, port),
						Protocol: of(d, model.TCP, model.UDP, model.SCTP)}
					fate, reason, _ := c.Decide(p).Fate()
					if want := o.allows(src, dst, p); src.addr != dst.addr && (fate == reachability.Allowed) != want {
						t.Fatalf("%v: %s, %s; the original allows it: %v\n%s", p, fate, reason, want, text)
					}
				}
			}
		}
	})
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}
