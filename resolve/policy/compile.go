package policy

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/model"
)

// span is destination ports that a rule is about.
type span struct {
	protocol    model.Protocol // 0: any
	first, last uint16
	name        string // of a port of the destination pod, in place of numbers
}

// clause is one rule of a policy, read.
type clause struct {
	ref      model.RuleRef
	refs     []model.RuleRef // ref alone
	refKey   refsKey         // of ref
	verdict  model.Verdict
	everyone bool        // it matches every address, else
	peers    []*peerSpec // any of these: sorted by text, each once
	digest   digest      // of the peers
	allPorts bool        // it matches every protocol and port, else
	spans    []span      // any of these: sorted and disjoint, those that are names last
	named    bool        // some of the spans are names
	weight   int         // of the peers, where it is named
}

// seal puts the peers in order and computes their digest.
func (c *clause) seal() {
	c.refs = []model.RuleRef{c.ref}
	key := sha256.Sum256(appendText(appendNumbers(appendRef(nil, c.ref.PolicyRef), uint64(c.ref.Index+1)), c.ref.RuleName))
	c.refKey = refsKey(key[:])
	if c.everyone {
		c.peers = nil
	}
	slices.SortFunc(c.peers, func(a, b *peerSpec) int { return strings.Compare(a.text, b.text) })
	c.peers = slices.CompactFunc(c.peers, func(a, b *peerSpec) bool { return a.text == b.text })
	h := sha256.New()
	for _, p := range c.peers {
		h.Write(p.digest[:])
	}
	h.Sum(c.digest[:0])
	c.spans = joined(c.spans)
	if c.named = len(c.spans) > 0 && c.spans[len(c.spans)-1].name != ""; c.named {
		c.weight = 1
		for _, p := range c.peers {
			c.weight += p.weight()
		}
	}
}

// joined returns spans in order, those of numbers that overlap or follow one another as one.
func joined(l []span) (out []span) {
	slices.SortFunc(l, func(a, b span) int {
		return cmp.Or(strings.Compare(a.name, b.name), cmp.Compare(a.protocol, b.protocol), cmp.Compare(a.first, b.first),
			cmp.Compare(b.last, a.last))
	})
	for _, s := range l {
		if n := len(out); n > 0 && out[n-1].name == s.name && out[n-1].protocol == s.protocol &&
			int(s.first) <= int(out[n-1].last)+1 {
			out[n-1].last = max(out[n-1].last, s.last)
		} else {
			out = append(out, s)
		}
	}
	return out
}

// empty reports whether c matches nothing.
func (c *clause) empty() bool {
	return !c.everyone && len(c.peers) == 0 || !c.allPorts && len(c.spans) == 0
}

// compiled is a policy, read.
type compiled struct {
	applies [2]bool // by direction: NetworkPolicies isolate, ClusterNetworkPolicies have rules
	clauses [2][]clause
	named   [2]bool // some of the clauses are about named ports
	problems
}

// reader reads the rules of a policy.
type reader struct {
	ref model.PolicyRef
	compiled
}

// readRules reads a NetworkPolicy. Where closed is not empty it is beyond a bound and allows nothing.
func readRules(s *networkingv1.NetworkPolicySpec, ref model.PolicyRef, closed string) *compiled {
	r := &reader{ref: ref}
	r.types(s)
	if closed != "" {
		r.add("spec", TooLarge, "%s: it allows nothing to the pods that it selects; make it smaller, or several of it",
			closed)
		return &r.compiled
	}
	for i := range s.Ingress {
		if rule := &s.Ingress[i]; r.applies[model.Ingress] {
			r.rule(model.Ingress, i, rule.From, "from", rule.Ports)
		}
	}
	for i := range s.Egress {
		if rule := &s.Egress[i]; r.applies[model.Egress] {
			r.rule(model.Egress, i, rule.To, "to", rule.Ports)
		}
	}
	return &r.compiled
}

// types reads in which directions a NetworkPolicy isolates.
func (r *reader) types(s *networkingv1.NetworkPolicySpec) {
	if len(s.PolicyTypes) == 0 { // an API server fills it in
		r.applies = [2]bool{model.Ingress: true, model.Egress: len(s.Egress) > 0}
	}
	for i, t := range s.PolicyTypes {
		switch t {
		case networkingv1.PolicyTypeIngress:
			r.applies[model.Ingress] = true
		case networkingv1.PolicyTypeEgress:
			r.applies[model.Egress] = true
		default:
			r.add(fmt.Sprintf("spec.policyTypes[%d]", i), NotKnown, "%q: it is ignored; use Ingress or Egress", t)
		}
	}
}

// rule reads a rule of a NetworkPolicy.
func (r *reader) rule(d model.Direction, i int, peers []networkingv1.NetworkPolicyPeer, from string,
	ports []networkingv1.NetworkPolicyPort) {
	field := fmt.Sprintf("spec.%s[%d]", d, i)
	c := clause{ref: model.RuleRef{PolicyRef: r.ref, Direction: d, Index: i}, verdict: model.VerdictAccept,
		everyone: len(peers) == 0, allPorts: len(ports) == 0}
	for j := range ports {
		s, err := readPort(&ports[j])
		if err != nil {
			r.add(fmt.Sprintf("%s.ports[%d]", field, j), Invalid, "%v: it opens nothing until it is corrected", err)
			continue
		}
		c.spans = append(c.spans, s)
	}
	for j := range peers {
		s, err := r.peer(&peers[j])
		if err != nil {
			r.add(fmt.Sprintf("%s.%s[%d]", field, from, j), Invalid, "%v: it matches nothing until it is corrected", err)
		} else if s != nil {
			c.peers = append(c.peers, s)
		}
	}
	r.addClause(c)
}

// addClause adds a clause, unless it matches nothing.
func (r *reader) addClause(c clause) {
	if c.seal(); !c.empty() {
		r.clauses[c.ref.Direction] = append(r.clauses[c.ref.Direction], c)
		r.named[c.ref.Direction] = r.named[c.ref.Direction] || c.named
	}
}

// peer reads a peer of a NetworkPolicy. It returns nil where nothing can match.
func (r *reader) peer(p *networkingv1.NetworkPolicyPeer) (*peerSpec, error) {
	selects := p.PodSelector != nil || p.NamespaceSelector != nil
	switch {
	case p.IPBlock != nil && selects:
		return nil, fmt.Errorf("both an ipBlock and a selector")
	case p.IPBlock != nil:
		return readBlock(p.IPBlock)
	case !selects:
		return nil, fmt.Errorf("neither podSelector, namespaceSelector nor ipBlock that is known here")
	}
	s := &peerSpec{kind: pods}
	var err error
	if p.PodSelector != nil {
		if s.labels, err = readSelector(p.PodSelector); err != nil {
			return nil, fmt.Errorf("podSelector: %w", err)
		}
	}
	if p.NamespaceSelector == nil {
		s.namespace = r.ref.Namespace
	} else if s.namespaces, err = readSelector(p.NamespaceSelector); err != nil {
		return nil, fmt.Errorf("namespaceSelector: %w", err)
	}
	return s.named(), nil
}

func readBlock(b *networkingv1.IPBlock) (*peerSpec, error) {
	cidr, err := readPrefix(b.CIDR)
	if err != nil {
		return nil, err
	}
	var except []netip.Prefix
	for _, e := range b.Except {
		p, err := readPrefix(e)
		if err != nil {
			return nil, fmt.Errorf("except: %w", err)
		}
		except = append(except, p)
	}
	return newBlock(cidr, except), nil
}

func protocolOf(p corev1.Protocol) (model.Protocol, error) {
	switch p {
	case "", corev1.ProtocolTCP:
		return model.TCP, nil
	case corev1.ProtocolUDP:
		return model.UDP, nil
	case corev1.ProtocolSCTP:
		return model.SCTP, nil
	}
	return 0, fmt.Errorf("unknown protocol %q", p)
}

// readPort reads a port of a NetworkPolicy.
func readPort(p *networkingv1.NetworkPolicyPort) (s span, err error) {
	var protocol corev1.Protocol
	if p.Protocol != nil {
		protocol = *p.Protocol
	}
	if s.protocol, err = protocolOf(protocol); err != nil {
		return s, err
	}
	switch {
	case p.Port == nil && p.EndPort != nil:
		return s, fmt.Errorf("endPort without port")
	case p.Port == nil:
		s.last = 65535
		return s, nil
	case p.Port.Type == intstr.String && p.EndPort != nil:
		return s, fmt.Errorf("endPort with a named port")
	case p.Port.Type == intstr.String && p.Port.StrVal == "":
		return s, fmt.Errorf("empty port name")
	case p.Port.Type == intstr.String:
		s.name = p.Port.StrVal
		return s, nil
	}
	end := p.Port.IntVal
	if p.EndPort != nil {
		end = *p.EndPort
	}
	return numbers(s.protocol, p.Port.IntVal, end)
}

// numbers returns the span from first to last.
func numbers(p model.Protocol, first, last int32) (span, error) {
	if first < 1 || last > 65535 || first > last {
		return span{}, fmt.Errorf("invalid ports %d to %d", first, last)
	}
	return span{protocol: p, first: uint16(first), last: uint16(last)}, nil
}
