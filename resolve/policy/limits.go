package policy

import (
	"cmp"
	"fmt"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// Limits bounds what policies come to on a node: tenants write them. A field that is zero stands for the same field of
// DefaultLimits.
type Limits struct {
	Policy    Bounds // of one policy
	Namespace Bounds // of the NetworkPolicies of one namespace; the oldest come first
	Ports     int    // port entries of one ruleset
	Products  int    // port entries of one ruleset, each times the rules that it has
	// Of these, each namespace with pods on this node has a fair share; the oldest policies come first.
	Total       int // what all rulesets cost: see figures.cost
	Comparisons int // of selectors with pods' labels, in one change
	Matches     int // selectors and CIDRs, each times the identities that it matches
	Evaluations int // rules of peer tables, each times the identities that its peers match
	Entries     int // of the kernel: peer verdicts, prefixes of ports, and half of those of CIDRs' pieces
	ByAddress   int // and so many for each address of a pod or node that is known
}

// Bounds are numbers of what policies say.
type Bounds struct {
	Peers   int // rules and their peers, CIDRs each by itself
	Ports   int
	Terms   int // keys and values of selectors
	Excepts int // CIDRs in except lists, each times the ipBlocks of a rule that have one
}

// DefaultLimits holds what is many times what people write by hand, and a fraction of what a node can hold.
var DefaultLimits = Limits{
	Policy:    Bounds{Peers: 8192, Ports: 8192, Terms: 16384, Excepts: 512},
	Namespace: Bounds{Peers: 65536, Ports: 65536, Terms: 131072, Excepts: 1024},
	Ports:     16384, Products: 1 << 17, Total: 1 << 18, Comparisons: 1 << 24, Matches: 1 << 18, Evaluations: 1 << 22,
	Entries: 3 << 15, ByAddress: 2,
}

// textUnit is how long a key or value of a selector may be to count once.
const textUnit = 64

// maxNumbers is how many numbers a port's name stands for in an egress rule: those that most namespaces use.
const maxNumbers = 64

func (l Limits) or(o Limits) Limits {
	if l.Entries == 0 {
		l.Entries, l.ByAddress = o.Entries, o.ByAddress
	}
	return Limits{l.Policy.or(o.Policy), l.Namespace.or(o.Namespace), cmp.Or(l.Ports, o.Ports),
		cmp.Or(l.Products, o.Products), cmp.Or(l.Total, o.Total), cmp.Or(l.Comparisons, o.Comparisons),
		cmp.Or(l.Matches, o.Matches), cmp.Or(l.Evaluations, o.Evaluations), l.Entries, l.ByAddress}
}

// Times returns l with n times as much of what all policies of a node share.
func (l Limits) Times(n int) Limits {
	l.Total, l.Comparisons, l.Matches, l.Evaluations = n*l.Total, n*l.Comparisons, n*l.Matches, n*l.Evaluations
	l.Entries *= n
	return l
}

func (b Bounds) or(o Bounds) Bounds {
	return Bounds{cmp.Or(b.Peers, o.Peers), cmp.Or(b.Ports, o.Ports), cmp.Or(b.Terms, o.Terms),
		cmp.Or(b.Excepts, o.Excepts)}
}

func (b Bounds) plus(o Bounds) Bounds {
	return Bounds{b.Peers + o.Peers, b.Ports + o.Ports, b.Terms + o.Terms, b.Excepts + o.Excepts}
}

func (b Bounds) minus(o Bounds) Bounds {
	return Bounds{b.Peers - o.Peers, b.Ports - o.Ports, b.Terms - o.Terms, b.Excepts - o.Excepts}
}

// excess returns what of b is beyond l, "" if nothing is.
func (b Bounds) excess(l Bounds) string {
	switch {
	case b.Peers > l.Peers:
		return fmt.Sprintf("%d rules and peers, %d are the limit", b.Peers, l.Peers)
	case b.Ports > l.Ports:
		return fmt.Sprintf("%d ports, %d are the limit", b.Ports, l.Ports)
	case b.Terms > l.Terms:
		return fmt.Sprintf("%d keys and values of selectors, %d are the limit", b.Terms, l.Terms)
	case b.Excepts > l.Excepts:
		return fmt.Sprintf("%d exceptions of CIDRs, %d are the limit", b.Excepts, l.Excepts)
	}
	return ""
}

// sizeOf counts what a NetworkPolicy says.
func sizeOf(o *networkingv1.NetworkPolicy) (b Bounds) {
	b.selector(&o.Spec.PodSelector)
	for i := range o.Spec.Ingress {
		r := &o.Spec.Ingress[i]
		b.rule(len(r.Ports), r.From)
	}
	for i := range o.Spec.Egress {
		r := &o.Spec.Egress[i]
		b.rule(len(r.Ports), r.To)
	}
	return b
}

func (b *Bounds) rule(ports int, peers []networkingv1.NetworkPolicyPeer) {
	b.Peers += 1 + len(peers)
	b.Ports += ports
	for i := range peers {
		p := &peers[i]
		b.selector(p.PodSelector)
		b.selector(p.NamespaceSelector)
		if p.IPBlock != nil {
			b.Excepts += len(p.IPBlock.Except)
		}
	}
}

func (b *Bounds) selector(s *metav1.LabelSelector) {
	if s == nil {
		return
	}
	for k, v := range s.MatchLabels {
		b.Terms += 2 + len(k)/textUnit + len(v)/textUnit
	}
	for i := range s.MatchExpressions {
		e := &s.MatchExpressions[i]
		b.Terms += 1 + len(e.Key)/textUnit
		for _, v := range e.Values {
			b.Terms += 1 + len(v)/textUnit
		}
	}
}

// sizeOfCluster counts what a ClusterNetworkPolicy says.
func sizeOfCluster(o *cnpv1.ClusterNetworkPolicy) (b Bounds) {
	pods := func(p *cnpv1.NamespacedPod) {
		if p != nil {
			b.selector(&p.NamespaceSelector)
			b.selector(&p.PodSelector)
		}
	}
	b.selector(o.Spec.Subject.Namespaces)
	pods(o.Spec.Subject.Pods)
	for i := range o.Spec.Ingress {
		r := &o.Spec.Ingress[i]
		b.Peers += 1 + len(r.From)
		b.Ports += len(r.Protocols)
		for j := range r.From {
			b.selector(r.From[j].Namespaces)
			pods(r.From[j].Pods)
		}
	}
	for i := range o.Spec.Egress {
		r := &o.Spec.Egress[i]
		b.Peers += 1 + len(r.To)
		b.Ports += len(r.Protocols)
		for j := range r.To {
			p := &r.To[j]
			b.Peers += len(p.Networks) + len(p.DomainNames)
			b.selector(p.Namespaces)
			b.selector(p.Nodes)
			pods(p.Pods)
		}
	}
	return b
}
