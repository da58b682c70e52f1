package policy

import (
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/model"
)

// clusterRule is a rule of a ClusterNetworkPolicy of either direction, with the peers of egress.
type clusterRule struct {
	model.Direction
	index     int
	name      string
	action    cnpv1.ClusterNetworkPolicyRuleAction
	peers     []cnpv1.ClusterNetworkPolicyEgressPeer
	protocols []cnpv1.ClusterNetworkPolicyProtocol
}

func clusterRules(o *cnpv1.ClusterNetworkPolicy) (out []clusterRule) {
	for i, r := range o.Spec.Ingress {
		c := clusterRule{model.Ingress, i, r.Name, r.Action, nil, r.Protocols}
		for _, p := range r.From {
			c.peers = append(c.peers, cnpv1.ClusterNetworkPolicyEgressPeer{Namespaces: p.Namespaces, Pods: p.Pods})
		}
		out = append(out, c)
	}
	for i, r := range o.Spec.Egress {
		out = append(out, clusterRule{model.Egress, i, r.Name, r.Action, r.To, r.Protocols})
	}
	return out
}

// readCluster reads the rules of a ClusterNetworkPolicy. Where closed is not empty it is beyond a bound, and each of
// its rules fails closed.
func readCluster(o *cnpv1.ClusterNetworkPolicy, ref model.PolicyRef, closed string, unknownMatch bool) *compiled {
	r := &reader{ref: ref}
	if closed != "" {
		r.add("spec", TooLarge, "%s: its Accept rules match nothing, its other rules drop everything; make it smaller, "+
			"or several of it", closed)
	}
	for _, rule := range clusterRules(o) {
		r.applies[rule.Direction] = true
		r.clusterRule(&rule, closed != "", unknownMatch)
	}
	return &r.compiled
}

// clusterRule reads one rule. What can't be read has the rule fail closed.
func (r *reader) clusterRule(rule *clusterRule, closed, unknownMatch bool) {
	c := clause{ref: model.RuleRef{PolicyRef: r.ref, Direction: rule.Direction, Index: rule.index, RuleName: rule.name},
		allPorts: len(rule.protocols) == 0}
	field := fmt.Sprintf("spec.%s[%d]", rule.Direction, rule.index)
	bad := func(field string, err error) {
		if err == nil {
			return
		}
		instead := "the rule drops everything"
		if rule.action == cnpv1.ClusterNetworkPolicyRuleActionAccept {
			instead = "the rule matches nothing"
		}
		r.add(field, NotKnown, "%v: until this is corrected %s", err, instead)
		closed = true
	}
	switch rule.action {
	case cnpv1.ClusterNetworkPolicyRuleActionAccept:
		c.verdict = model.VerdictAccept
	case cnpv1.ClusterNetworkPolicyRuleActionDeny:
		c.verdict = model.VerdictDrop
	case cnpv1.ClusterNetworkPolicyRuleActionPass:
		c.verdict = model.VerdictNext
	default:
		bad(field+".action", fmt.Errorf("unknown action %q", rule.action))
	}
	named, unnamed := false, false
	for i := range rule.protocols {
		spans, err := readProtocol(&rule.protocols[i])
		c.spans, named = append(c.spans, spans...), named || rule.protocols[i].DestinationNamedPort != ""
		bad(fmt.Sprintf("%s.protocols[%d]", field, i), err)
	}
	if len(rule.peers) == 0 {
		bad(field, errors.New("no peers"))
	}
	for i := range rule.peers {
		at := fmt.Sprintf("%s.%s[%d]", field, [...]string{"to", "from"}[rule.Direction], i)
		if named && notPods(&rule.peers[i]) {
			r.add(at, Invalid, "it has no named ports, and a protocol of the rule is one: the rule matches nothing until this "+
				"is corrected; use numbers")
			unnamed = true
		}
		r.clusterPeer(rule, i, &c, func(err error) { bad(at, err) })
	}
	switch {
	case closed && rule.action == cnpv1.ClusterNetworkPolicyRuleActionAccept, unnamed && !closed:
		return
	case closed:
		c.everyone, c.allPorts, c.spans, c.verdict = true, true, nil, model.VerdictDrop
	case unknownMatch && c.verdict != model.VerdictAccept:
		for _, p := range c.peers {
			if p.kind == pods {
				c.peers = append(c.peers, unknown)
				break
			}
		}
	}
	r.addClause(c)
}

// notPods reports whether p is of what has no named ports.
func notPods(p *cnpv1.ClusterNetworkPolicyEgressPeer) bool {
	return p.Nodes != nil || p.Networks != nil || p.DomainNames != nil
}

// clusterPeer reads a peer into c.
func (r *reader) clusterPeer(rule *clusterRule, i int, c *clause, bad func(error)) {
	p := &rule.peers[i]
	selects := 0
	for _, set := range []bool{p.Namespaces != nil, p.Pods != nil, p.Nodes != nil, p.Networks != nil,
		p.DomainNames != nil} {
		if set {
			selects++
		}
	}
	switch {
	case selects == 0:
		bad(errors.New("no field that is known here"))
		return
	case selects > 1:
		bad(errors.New("several fields, where one is allowed"))
		return
	}
	var ns, labels *metav1.LabelSelector
	s := &peerSpec{kind: pods}
	switch {
	case p.Namespaces != nil:
		ns = p.Namespaces
	case p.Pods != nil:
		ns, labels = &p.Pods.NamespaceSelector, &p.Pods.PodSelector
	case p.Nodes != nil:
		s.kind, labels = nodes, p.Nodes
	case p.Networks != nil:
		r.networks(rule, i, c, bad)
		return
	default:
		r.domainNames(rule, i, c, bad)
		return
	}
	var err, err2 error
	if ns != nil {
		s.namespaces, err = readSelector(ns)
	}
	if labels != nil {
		s.labels, err2 = readSelector(labels)
	}
	if err = errors.Join(err, err2); err != nil {
		bad(err)
		return
	}
	c.peers = append(c.peers, s.named())
}

// networks reads CIDRs into c. One that can't be read matches nothing of an Accept rule.
func (r *reader) networks(rule *clusterRule, i int, c *clause, bad func(error)) {
	for j, n := range rule.peers[i].Networks {
		cidr, err := readPrefix(string(n))
		switch {
		case err == nil:
			c.peers = append(c.peers, newBlock(cidr, nil))
		case rule.action == cnpv1.ClusterNetworkPolicyRuleActionAccept:
			r.add(fmt.Sprintf("spec.%s[%d].to[%d].networks[%d]", rule.Direction, rule.index, i, j), Invalid,
				"%v: it matches nothing until it is corrected", err)
		default:
			bad(err)
		}
	}
	if len(rule.peers[i].Networks) == 0 {
		bad(errors.New("no networks"))
	}
}

// domainNames reads domain names into c. One that can't be read matches nothing.
func (r *reader) domainNames(rule *clusterRule, i int, c *clause, bad func(error)) {
	if rule.action != cnpv1.ClusterNetworkPolicyRuleActionAccept {
		bad(errors.New("domainNames are for Accept rules alone"))
		return
	}
	for j, n := range rule.peers[i].DomainNames {
		name, err := domainName(string(n))
		if err != nil {
			r.add(fmt.Sprintf("spec.%s[%d].to[%d].domainNames[%d]", rule.Direction, rule.index, i, j), Invalid,
				"%v: it matches nothing until it is corrected", err)
			continue
		}
		c.peers = append(c.peers, (&peerSpec{kind: domains, domain: name}).named())
	}
	if len(rule.peers[i].DomainNames) == 0 {
		bad(errors.New("no domainNames"))
	}
}

// readProtocol reads an item of a rule's protocols.
func readProtocol(p *cnpv1.ClusterNetworkPolicyProtocol) (spans []span, err error) {
	n := 0
	for _, set := range []bool{p.TCP != nil, p.UDP != nil, p.SCTP != nil, p.DestinationNamedPort != ""} {
		if set {
			n++
		}
	}
	switch {
	case n == 0:
		return nil, errors.New("no field that is known here")
	case n > 1:
		return nil, errors.New("several fields, where one is allowed")
	case p.TCP != nil:
		return readDestination(model.TCP, p.TCP.DestinationPort)
	case p.UDP != nil:
		return readDestination(model.UDP, p.UDP.DestinationPort)
	case p.SCTP != nil:
		return readDestination(model.SCTP, p.SCTP.DestinationPort)
	}
	return []span{{name: p.DestinationNamedPort}}, nil
}

func readDestination(protocol model.Protocol, p *cnpv1.Port) ([]span, error) {
	if p == nil {
		return []span{{protocol: protocol, last: 65535}}, nil
	}
	first, last := p.Number, p.Number
	switch {
	case p.Range != nil && p.Number != 0:
		return nil, errors.New("both a number and a range")
	case p.Range != nil:
		first, last = p.Range.Start, p.Range.End
	case p.Number == 0:
		return nil, errors.New("no number and no range")
	}
	s, err := numbers(protocol, first, last)
	return []span{s}, err
}

// readSubject returns which pods a ClusterNetworkPolicy selects.
func readSubject(s *cnpv1.ClusterNetworkPolicySubject) (namespaces, labels selector, err error) {
	switch {
	case (s.Namespaces != nil) == (s.Pods != nil):
		return nil, nil, errors.New("one of namespaces and pods must be set")
	case s.Namespaces != nil:
		namespaces, err = readSelector(s.Namespaces)
		return namespaces, nil, err
	}
	if namespaces, err = readSelector(&s.Pods.NamespaceSelector); err == nil {
		labels, err = readSelector(&s.Pods.PodSelector)
	}
	return namespaces, labels, err
}
