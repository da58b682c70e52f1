package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// stage is a node with one pod, 10.0.1.1 in namespace tenant, and what tenants do to it.
type stage struct {
	*testing.T
	*Resolver
	sum sum
}

func newStage(t *testing.T, c Config) *stage {
	c.Node, c.ImpliedNamespaces = "n1", true
	s := &stage{t, New(c), newSum()}
	s.put(somePod("tenant", "pod", "10.0.1.1", nil))
	return s
}

func somePod(ns, name, ip string, labels map[string]string, ports ...corev1.ContainerPort) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: labels}}
	p.Spec.NodeName, p.Spec.Containers = "n1", []corev1.Container{{Ports: ports}}
	p.Status.PodIPs = []corev1.PodIP{{IP: ip}}
	return p
}

func (s *stage) put(objects ...source.Object) {
	s.Helper()
	var changes []source.Change
	for _, o := range objects {
		changes = append(changes, source.Change{Key: source.KeyOf(o), Object: o})
	}
	s.sum.apply(seedDice{T: s.T}, s.Apply(changes))
}

func (s *stage) remove(objects ...source.Object) {
	s.Helper()
	for _, o := range objects {
		s.sum.apply(seedDice{T: s.T}, s.Apply([]source.Change{{Key: source.KeyOf(o)}}))
	}
}

// fate sends a TCP packet between addresses.
func (s *stage) fate(src, dst string, port uint16) model.Verdict {
	return verdict.Policy(s.sum.now, verdict.Packet{Src: netip.AddrPortFrom(netip.MustParseAddr(src), 1),
		Dst: netip.AddrPortFrom(netip.MustParseAddr(dst), port), Protocol: model.TCP}).Verdict
}

func (s *stage) want(src, dst string, port uint16, want model.Verdict) {
	s.Helper()
	if got := s.fate(src, dst, port); got != want {
		s.Errorf("%s > %s:%d: %v, want %v; problems %v", src, dst, port, got, want, s.Problems())
	}
}

// problem checks that a policy has a problem of that reason and text.
func (s *stage) problem(o source.Object, reason, text string) {
	s.Helper()
	for _, p := range s.Problems() {
		if p.Object == source.KeyOf(o) && p.Reason == reason && strings.Contains(p.Message, text) {
			return
		}
	}
	s.Errorf("%s has no problem %s %q: %v", source.KeyOf(o), reason, text, s.Problems())
}

func somePolicy(name string, rules ...networkingv1.NetworkPolicyIngressRule) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: name}}
	p.Spec.PolicyTypes, p.Spec.Ingress = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}, rules
	return p
}

func ports(from, n int) (out []networkingv1.NetworkPolicyPort) {
	for i := range n {
		p := intstr.FromInt32(int32(from + i))
		out = append(out, networkingv1.NetworkPolicyPort{Port: &p})
	}
	return out
}

func blocks(cidrs ...string) (out []networkingv1.NetworkPolicyPeer) {
	for _, c := range cidrs {
		out = append(out, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: c}})
	}
	return out
}

func TestPolicyBeyondBoundsIsolatesAndAllowsNothing(t *testing.T) {
	for name, c := range map[string]struct {
		limits Bounds
		rule   networkingv1.NetworkPolicyIngressRule
		text   string
	}{
		"ports": {Bounds{Ports: 3}, networkingv1.NetworkPolicyIngressRule{Ports: ports(80, 4)}, "4 ports, 3 are the limit"},
		"peers": {Bounds{Peers: 3}, networkingv1.NetworkPolicyIngressRule{From: blocks("0.0.0.0/0", "10.0.0.0/8",
			"10.0.0.0/9")}, "4 rules and peers"},
		"terms": {Bounds{Terms: 3}, networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{{
			NamespaceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a",
				Operator: metav1.LabelSelectorOpNotIn, Values: []string{"b", "c", "d"}}}}}, {IPBlock: &networkingv1.IPBlock{
			CIDR: "0.0.0.0/0"}}}}, "4 keys and values"},
		"excepts": {Bounds{Excepts: 1}, networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{{
			IPBlock: &networkingv1.IPBlock{CIDR: "0.0.0.0/0", Except: []string{"10.1.0.0/16", "10.2.0.0/16"}}}}},
			"2 exceptions"},
	} {
		t.Run(name, func(t *testing.T) {
			p := somePolicy("p", c.rule)
			s := newStage(t, Config{})
			s.put(p)
			s.want("198.51.100.1", "10.0.1.1", 80, model.VerdictAccept)
			s = newStage(t, Config{Limits: Limits{Policy: c.limits}})
			s.put(p)
			s.want("198.51.100.1", "10.0.1.1", 80, model.VerdictDrop)
			s.problem(p, TooLarge, c.text)
			s.remove(p)
			s.want("198.51.100.1", "10.0.1.1", 80, model.VerdictAccept)
		})
	}
}

// Of a namespace beyond its bound the oldest policies stay; others have their own bounds.
func TestNamespaceBeyondBounds(t *testing.T) {
	s := newStage(t, Config{Limits: Limits{Namespace: Bounds{Ports: 5}}})
	old, young := somePolicy("z", networkingv1.NetworkPolicyIngressRule{Ports: ports(80, 3)}),
		somePolicy("a", networkingv1.NetworkPolicyIngressRule{Ports: ports(90, 3)})
	old.CreationTimestamp, young.CreationTimestamp = metav1.Unix(1, 0), metav1.Unix(2, 0)
	s.put(young)
	s.want("198.51.100.1", "10.0.1.1", 90, model.VerdictAccept)
	s.put(old)
	s.want("198.51.100.1", "10.0.1.1", 80, model.VerdictAccept)
	s.want("198.51.100.1", "10.0.1.1", 90, model.VerdictDrop)
	s.problem(young, TooLarge, "the namespace's policies have 6 ports")
	s.remove(old)
	s.want("198.51.100.1", "10.0.1.1", 90, model.VerdictAccept)
	if l := s.Problems(); len(l) > 0 {
		t.Errorf("problems %v", l)
	}
}

// Policies that are small each and large together drop everything at the pods that they meet at, and name themselves.
func TestRulesetBeyondBounds(t *testing.T) {
	for name, limits := range map[string]Limits{"entries": {Ports: 4}, "products": {Products: 8}} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, Config{Limits: limits})
			a := somePolicy("a", networkingv1.NetworkPolicyIngressRule{Ports: ports(80, 1)})
			s.put(a)
			s.want("198.51.100.1", "10.0.1.1", 80, model.VerdictAccept)
			b := somePolicy("b")
			for i := range 5 {
				b.Spec.Ingress = append(b.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{Ports: ports(90+2*i, 1),
					From: blocks(fmt.Sprintf("10.%d.0.0/16", i))})
			}
			s.put(b)
			s.want("198.51.100.1", "10.0.1.1", 80, model.VerdictDrop)
			s.problem(a, TooLarge, "drops everything")
			s.problem(b, TooLarge, "drops everything")
			s.remove(b)
			s.want("198.51.100.1", "10.0.1.1", 80, model.VerdictAccept)
		})
	}
}

// Peer verdicts beyond the bound close the peer tables that have most of them, and those open again.
func TestVerdictsBeyondBounds(t *testing.T) {
	s := newStage(t, Config{Limits: Limits{Entries: 20}})
	s.sum.rebuilt = true
	wide := somePolicy("wide", networkingv1.NetworkPolicyIngressRule{Ports: ports(80, 1),
		From: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{}}}})
	wide.Spec.PodSelector.MatchLabels = map[string]string{"app": "wide"}
	s.put(wide, somePod("tenant", "wide", "10.0.1.2", wide.Spec.PodSelector.MatchLabels))
	for i := range 10 { // ten selectors distinguish pods
		s.put(somePolicy(fmt.Sprint("p", i), networkingv1.NetworkPolicyIngressRule{Ports: ports(90, 1),
			From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{
				"k": fmt.Sprint(i)}}}}}))
	}
	var pods []source.Object
	for i := range 10 {
		pods = append(pods, somePod("tenant", fmt.Sprint("k", i), fmt.Sprintf("10.0.2.%d", i), map[string]string{
			"k": fmt.Sprint(i)}))
	}
	s.put(pods[:3]...)
	s.want("10.0.2.0", "10.0.1.2", 80, model.VerdictAccept)
	s.put(pods...)
	if n := len(s.sum.now.Verdicts); n > 20 {
		t.Errorf("%d peer verdicts", n)
	}
	s.want("10.0.2.0", "10.0.1.2", 80, model.VerdictDrop)
	s.problem(wide, TooLarge, "entries of the kernel's tables")
	s.remove(pods[2:]...)
	s.want("10.0.2.0", "10.0.1.2", 80, model.VerdictAccept)
	if l := s.Problems(); len(l) > 0 {
		t.Errorf("problems %v", l)
	}
}

// nestedPorts returns a policy of rules whose port ranges nest, each with a peer of its own: about the square of the
// rules is what it costs.
func nestedPorts(ns, name, app string, age int64, rules int) *networkingv1.NetworkPolicy {
	p := somePolicy(name)
	p.Namespace, p.CreationTimestamp = ns, metav1.Unix(age, 0)
	p.Spec.PodSelector.MatchLabels = map[string]string{"app": app}
	for i := range rules {
		r := networkingv1.NetworkPolicyIngressRule{Ports: ports(1+i, 1), From: blocks(fmt.Sprintf("10.%d.0.0/16", i%250))}
		end := int32(65535 - i)
		r.Ports[0].EndPort = &end
		p.Spec.Ingress = append(p.Spec.Ingress, r)
	}
	return p
}

func tcpPort(n int) []cnpv1.ClusterNetworkPolicyProtocol {
	return []cnpv1.ClusterNetworkPolicyProtocol{{TCP: &cnpv1.ClusterNetworkPolicyProtocolTCP{
		DestinationPort: &cnpv1.Port{Number: int32(n)}}}}
}

func labelled(ns, app, ip string) *corev1.Pod {
	return somePod(ns, app, ip, map[string]string{"app": app})
}

// Of what all rulesets may cost each namespace has a fair share. Of a namespace that wants more, the oldest policies
// stay in force, the pods of others drop everything, and nothing of that is made; others' pods don't notice.
func TestCostsBeyondTheShareOfANamespace(t *testing.T) {
	s := newStage(t, Config{Limits: Limits{Total: 1200}})
	small := nestedPorts("tenant", "small", "small", 9, 10)
	s.put(small, labelled("tenant", "small", "10.0.1.2"))
	var evil []source.Object
	for i := range 20 {
		app := fmt.Sprint("p", i)
		evil = append(evil, nestedPorts("evil", app, app, int64(100-i), 20), labelled("evil", app, fmt.Sprint("10.0.3.", i)))
	}
	s.put(evil...)
	s.want("10.3.7.7", "10.0.1.2", 90, model.VerdictAccept)
	s.want("10.3.7.7", "10.0.3.19", 90, model.VerdictAccept) // the oldest
	s.want("10.3.7.7", "10.0.3.0", 90, model.VerdictDrop)
	s.problem(evil[0], TooLarge, "ingress by NetworkPolicy evil/p0 at pod evil/p0: its policies cost")
	s.problem(evil[0], TooLarge, "beyond the share of namespace evil in the 1200 of this node: it drops everything; "+
		"use fewer")
	for _, p := range s.Problems() {
		if p.Object.Namespace != "evil" {
			t.Errorf("problem of another namespace: %s", p)
		}
	}
	if n := len(s.sum.now.Tables); n > 150 {
		t.Errorf("%d peer tables", n)
	}
	s.remove(evil[38], evil[37]) // the oldest policy, and another pod
	s.want("10.3.7.7", "10.0.3.17", 90, model.VerdictAccept)
	s.remove(evil[:36]...)
	s.remove(evil[36])
	if l := s.Problems(); len(l) > 0 {
		t.Errorf("problems %v", l)
	}
}

// A ruleset that pods of several namespaces have is paid for by all of them, and drops everything for none but those
// beyond their share.
func TestSharedRulesetBeyondTheShareOfOneNamespace(t *testing.T) {
	s := newStage(t, Config{Limits: Limits{Total: 600}})
	all := &cnpv1.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}}
	all.Spec.Tier, all.Spec.Subject.Namespaces = cnpv1.AdminTier, &metav1.LabelSelector{}
	for i := range 100 {
		all.Spec.Ingress = append(all.Spec.Ingress, cnpv1.ClusterNetworkPolicyIngressRule{
			Action:    cnpv1.ClusterNetworkPolicyRuleActionDeny,
			From:      []cnpv1.ClusterNetworkPolicyIngressPeer{{Namespaces: &metav1.LabelSelector{}}},
			Protocols: tcpPort(100 + 2*i)})
	}
	s.put(all)
	for i := range 10 {
		s.put(labelled(fmt.Sprint("ns", i), "a", fmt.Sprint("10.0.2.", i)))
	}
	s.want("10.3.7.7", "10.0.2.3", 90, model.VerdictAccept)
	s.want("10.0.2.4", "10.0.2.3", 100, model.VerdictDrop)
	s.put(nestedPorts("evil", "large", "large", 5, 20), labelled("evil", "large", "10.0.3.1"))
	s.want("10.3.7.7", "10.0.2.3", 90, model.VerdictAccept)
	s.want("10.0.2.4", "10.0.2.3", 100, model.VerdictDrop)
	s.want("10.3.7.7", "10.0.3.1", 90, model.VerdictDrop)
}

// Selectors of one tenant that distinguish all pods multiply what others' policies and the cluster's come to: that
// tenant pays for it, also where it has two namespaces for that.
func TestSelectorsThatDistinguishPodsPay(t *testing.T) {
	for _, limits := range []Limits{{Entries: 4000}, {Evaluations: 4000}, {Matches: 20000}} {
		s := newStage(t, Config{Limits: limits})
		s.sum.rebuilt = true
		objects := []source.Object{labelled("tenant", "web", "10.0.1.2"), labelled("evil-1", "a", "10.0.1.3"),
			labelled("evil-2", "a", "10.0.1.4")}
		for i := range 20 { // of the cluster, each at a port of its own
			c := &cnpv1.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("c", i)}}
			c.Spec.Tier, c.Spec.Subject.Namespaces = cnpv1.AdminTier, &metav1.LabelSelector{}
			from := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: fmt.Sprint("x", i),
				Operator: metav1.LabelSelectorOpDoesNotExist}}}
			c.Spec.Ingress = []cnpv1.ClusterNetworkPolicyIngressRule{{Action: cnpv1.ClusterNetworkPolicyRuleActionDeny,
				From:      []cnpv1.ClusterNetworkPolicyIngressPeer{{Namespaces: from}},
				Protocols: tcpPort(100 + i)}}
			objects = append(objects, c)
		}
		for i := range 600 {
			labels := map[string]string{"app": "client"}
			for b := range 10 {
				labels[fmt.Sprint("b", b)] = fmt.Sprint(i >> b & 1)
			}
			p := somePod("other", fmt.Sprint("p", i), fmt.Sprintf("10.1.%d.%d", i/200, i%200), labels)
			p.Spec.NodeName = "n2"
			objects = append(objects, p)
		}
		web := somePolicy("web", networkingv1.NetworkPolicyIngressRule{Ports: ports(80, 1),
			From: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{}}}})
		s.put(append(objects, web)...)
		s.want("10.1.0.1", "10.0.1.2", 80, model.VerdictAccept)
		if l := s.Problems(); len(l) > 0 {
			t.Fatalf("before: %v", l)
		}
		var evil []source.Object
		for n, op := range []metav1.LabelSelectorOperator{metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn} {
			rule := networkingv1.NetworkPolicyIngressRule{Ports: ports(80, 1)}
			for b := range 10 {
				rule.From = append(rule.From, networkingv1.NetworkPolicyPeer{NamespaceSelector: &metav1.LabelSelector{},
					PodSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: fmt.Sprint("b", b),
						Operator: op, Values: []string{"1"}}}}})
			}
			p := somePolicy("apart", rule)
			p.Namespace, p.CreationTimestamp = fmt.Sprint("evil-", n+1), metav1.Unix(9, 0)
			evil = append(evil, p)
		}
		s.put(evil...)
		s.want("10.1.0.1", "10.0.1.2", 80, model.VerdictAccept)
		s.want("10.1.0.1", "10.0.1.2", 101, model.VerdictDrop)
		s.want("203.0.113.1", "10.0.1.3", 443, model.VerdictDrop)
		s.problem(evil[0], TooLarge, "beyond the share of namespace evil-1")
		s.problem(evil[1], TooLarge, "beyond the share of namespace evil-2")
		for _, p := range s.Problems() {
			if !strings.HasPrefix(p.Object.Namespace, "evil-") {
				t.Fatalf("%+v: problem of another: %s", limits, p)
			}
		}
		s.remove(evil...)
		s.want("10.1.0.1", "10.0.1.3", 443, model.VerdictAccept)
		if l := s.Problems(); len(l) > 0 {
			t.Errorf("after: %v", l)
		}
	}
}

// A tenant's names for ports don't make another's rule grow without bound, nor lose the numbers that most namespaces
// use.
func TestNumbersOfPortNamesAreBounded(t *testing.T) {
	s := newStage(t, Config{})
	http := intstr.FromString("http")
	p := somePolicy("p")
	p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
	p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{Ports: []networkingv1.NetworkPolicyPort{{Port: &http}}}}
	s.put(p, somePod("tenant", "web", "10.0.1.2", nil, corev1.ContainerPort{Name: "http", ContainerPort: 60000}),
		somePod("other", "web", "10.0.1.3", nil, corev1.ContainerPort{Name: "http", ContainerPort: 60000}))
	var many []corev1.ContainerPort
	for i := range 2000 {
		many = append(many, corev1.ContainerPort{Name: "http", ContainerPort: int32(1 + i)})
	}
	s.put(somePod("hostile", "many", "10.0.1.4", nil, many...))
	s.want("10.0.1.1", "10.0.1.2", 60000, model.VerdictAccept)
	s.want("10.0.1.1", "10.0.1.4", 1, model.VerdictAccept)
	s.want("10.0.1.1", "10.0.1.4", 1999, model.VerdictDrop)
	for _, rs := range s.sum.now.Rulesets {
		if len(rs.Ports) > maxNumbers {
			t.Errorf("%d port entries", len(rs.Ports))
		}
	}
}

// Selectors times the numbers of a port's name are bounded.
func TestPeersOfNamedPortsAreBounded(t *testing.T) {
	for name, peer := range map[string]networkingv1.NetworkPolicyPeer{
		"selectors": {PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{}}},
		"blocks":    {IPBlock: &networkingv1.IPBlock{}}} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, Config{})
			http := intstr.FromString("http")
			p := somePolicy("p")
			p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
			rule := networkingv1.NetworkPolicyEgressRule{Ports: []networkingv1.NetworkPolicyPort{{Port: &http}}}
			for i := range 2000 {
				one := peer.DeepCopy()
				if one.IPBlock != nil {
					one.IPBlock.CIDR = fmt.Sprintf("10.%d.%d.0/24", i/256, i%256)
				} else {
					one.PodSelector.MatchLabels["k"] = fmt.Sprint(i)
				}
				rule.To = append(rule.To, *one)
			}
			p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{rule}
			var many []corev1.ContainerPort
			for i := range 64 {
				many = append(many, corev1.ContainerPort{Name: "http", ContainerPort: int32(1 + i)})
			}
			s.put(p, somePod("tenant", "many", "10.0.1.4", map[string]string{"k": "7"}, many...))
			if n := len(s.sum.parts); n > 100 {
				t.Errorf("%d parts", n)
			}
			s.want("10.0.1.1", "10.0.1.4", 1, model.VerdictDrop)
			s.problem(p, TooLarge, "named ports come to more than")
			p = p.DeepCopy()
			p.Spec.Egress[0].To = p.Spec.Egress[0].To[:10]
			s.put(p)
			s.want("10.0.1.1", "10.0.1.4", 1, model.VerdictAccept)
			s.want("10.0.1.1", "10.0.1.4", 65, model.VerdictDrop)
		})
	}
}

// Objects of the size that an API server accepts, made to be expensive, are bounded.
func TestHostilePoliciesAreBounded(t *testing.T) {
	var wide []networkingv1.NetworkPolicyIngressRule
	for i := range 2000 { // rules at all ports, and as many at single ports
		end := int32(65535)
		first := intstr.FromInt32(1)
		from := blocks(fmt.Sprintf("10.%d.%d.0/24", i/256, i%256))
		wide = append(wide, networkingv1.NetworkPolicyIngressRule{From: from,
			Ports: []networkingv1.NetworkPolicyPort{{Port: &first, EndPort: &end}}},
			networkingv1.NetworkPolicyIngressRule{From: from, Ports: ports(1+2*i, 1)})
	}
	var nested []networkingv1.NetworkPolicyIngressRule
	for i := range 500 { // each with an exception of its own
		nested = append(nested, networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{{
			IPBlock: &networkingv1.IPBlock{CIDR: "0.0.0.0/0", Except: []string{fmt.Sprintf("10.%d.%d.0/24", i/256, i%256)}}}}})
	}
	for name, p := range map[string]*networkingv1.NetworkPolicy{"wide": somePolicy("p", wide...),
		"nested": somePolicy("p", nested...)} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, Config{})
			s.put(p)
			if n := len(s.sum.parts); n > 1<<16 {
				t.Errorf("%d parts", n)
			}
			if name == "wide" {
				s.want("10.0.0.1", "10.0.1.1", 5, model.VerdictDrop)
				s.problem(p, TooLarge, "drops everything")
			}
			s.remove(p)
			s.want("10.0.0.1", "10.0.1.1", 5, model.VerdictAccept)
		})
	}
}

// Two with one ID: the one with the greater digest has another, whichever came first.
func TestEqualIDs(t *testing.T) {
	const few, policies = 41, 14
	run := func(order []int) *stage {
		s := newStage(t, Config{})
		s.sum.rebuilt = true
		hash := s.hash
		s.hash = func(text string) uint64 { return hash(text) % few }
		for _, i := range order {
			s.put(somePolicy(fmt.Sprint("p", i), networkingv1.NetworkPolicyIngressRule{Ports: ports(80+i, 1),
				From: blocks(fmt.Sprintf("10.%d.0.0/16", i))}))
		}
		return s
	}
	first := run(rand.New(rand.NewPCG(30, 0)).Perm(policies))
	for seed := range uint64(30) {
		s := run(rand.New(rand.NewPCG(seed, 0)).Perm(policies))
		for i := range policies {
			for j := range policies {
				want := model.VerdictDrop
				if i == j {
					want = model.VerdictAccept
				}
				s.want(fmt.Sprintf("10.%d.1.1", i), "10.0.1.1", uint16(80+j), want)
			}
		}
		if x, y := describe(first.sum.now), describe(s.sum.now); fmt.Sprint(x) != fmt.Sprint(y) {
			t.Fatalf("IDs depend on the order:\n%v\n%v", x, y)
		}
	}
}
