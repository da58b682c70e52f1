package manifest

import (
	"fmt"
	"regexp"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"
)

// The bounds that the CustomResourceDefinition of ClusterNetworkPolicies sets.
const (
	mostItems    = 25
	mostPriority = 1000
	longestName  = 100
)

// cluster names what the CustomResourceDefinition of ClusterNetworkPolicies refuses.
func (c *check) cluster(s *cnpv1.ClusterNetworkPolicySpec) {
	c.invalid(one(s.Tier, cnpv1.AdminTier, cnpv1.BaselineTier), "spec.tier")
	if s.Priority < 0 || s.Priority > mostPriority {
		c.invalid(fmt.Sprintf("%d is no priority: use 0 to %d", s.Priority, mostPriority), "spec.priority")
	}
	c.exactlyOne("spec.subject", "namespaces or pods", s.Subject.Namespaces != nil, s.Subject.Pods != nil)
	c.selector(s.Subject.Namespaces, "spec.subject.namespaces")
	c.pods(s.Subject.Pods, "spec.subject.pods")
	c.atMost(len(s.Ingress), "spec.ingress")
	c.atMost(len(s.Egress), "spec.egress")
	for i := range s.Ingress {
		r, field := &s.Ingress[i], fmt.Sprintf("spec.ingress[%d]", i)
		c.clusterRule(field, "from", r.Name, r.Action, len(r.From), r.Protocols)
		for j, p := range r.From {
			field := fmt.Sprintf("%s.from[%d]", field, j)
			c.exactlyOne(field, "namespaces or pods", p.Namespaces != nil, p.Pods != nil)
			c.selector(p.Namespaces, field+".namespaces")
			c.pods(p.Pods, field+".pods")
		}
	}
	for i := range s.Egress {
		r, field := &s.Egress[i], fmt.Sprintf("spec.egress[%d]", i)
		c.clusterRule(field, "to", r.Name, r.Action, len(r.To), r.Protocols)
		for j := range r.To {
			c.clusterPeer(fmt.Sprintf("%s.to[%d]", field, j), &r.To[j], r)
		}
	}
}

func (c *check) atMost(n int, field string) {
	if n > mostItems {
		c.invalid(fmt.Sprintf("%d are too many: at most %d", n, mostItems), "%s", field)
	}
}

// exactlyOne names a field of which not exactly one part is set.
func (c *check) exactlyOne(field, parts string, set ...bool) {
	n := 0
	for _, s := range set {
		if s {
			n++
		}
	}
	switch {
	case n == 0:
		c.bad(Required, "is empty: write "+parts, "%s", field)
	case n > 1:
		c.invalid("has several fields where one is allowed: write "+parts, "%s", field)
	}
}

func (c *check) pods(p *cnpv1.NamespacedPod, field string) {
	if p != nil {
		c.selector(&p.NamespaceSelector, field+".namespaceSelector")
		c.selector(&p.PodSelector, field+".podSelector")
	}
}

// clusterRule looks at what rules of both directions have.
func (c *check) clusterRule(field, peers, name string, action cnpv1.ClusterNetworkPolicyRuleAction, n int,
	protocols []cnpv1.ClusterNetworkPolicyProtocol) {
	if len(name) > longestName {
		c.invalid(fmt.Sprintf("has %d characters: at most %d", len(name), longestName), "%s.name", field)
	}
	c.invalid(one(action, cnpv1.ClusterNetworkPolicyRuleActionAccept, cnpv1.ClusterNetworkPolicyRuleActionDeny,
		cnpv1.ClusterNetworkPolicyRuleActionPass), "%s.action", field)
	if n == 0 {
		c.bad(Required, "is missing: name at least one peer", "%s.%s", field, peers)
	}
	c.atMost(n, field+"."+peers)
	c.atMost(len(protocols), field+".protocols")
	for i := range protocols {
		p, field := &protocols[i], fmt.Sprintf("%s.protocols[%d]", field, i)
		c.exactlyOne(field, "tcp, udp, sctp or destinationNamedPort", p.TCP != nil, p.UDP != nil, p.SCTP != nil,
			p.DestinationNamedPort != "")
		if p.TCP != nil {
			c.destination(p.TCP.DestinationPort, field+".tcp.destinationPort")
		}
		if p.UDP != nil {
			c.destination(p.UDP.DestinationPort, field+".udp.destinationPort")
		}
		if p.SCTP != nil {
			c.destination(p.SCTP.DestinationPort, field+".sctp.destinationPort")
		}
	}
}

func (c *check) destination(p *cnpv1.Port, field string) {
	if p == nil {
		return
	}
	c.exactlyOne(field, "number or range", p.Number != 0, p.Range != nil)
	c.invalid(portOrZero(p.Number), "%s.number", field)
	if r := p.Range; r != nil {
		c.invalid(portNumber(r.Start), "%s.range.start", field)
		c.invalid(portNumber(r.End), "%s.range.end", field)
		if r.Start >= r.End {
			c.invalid(fmt.Sprintf("%d is not below the end, %d", r.Start, r.End), "%s.range.start", field)
		}
	}
}

// notCanonical returns what is wrong with a CIDR that may have no bits set beyond its prefix.
func notCanonical(s string) string {
	p, msg := parseCIDR(s)
	if msg == "" && p != p.Masked() {
		return fmt.Sprintf("%q has bits set beyond its prefix of %d bits: write %s", s, p.Bits(), p.Masked())
	}
	return msg
}

// domain is what a domain name may be, as the CustomResourceDefinition has it but for a slip in its pattern.
var domain = regexp.MustCompile(`^(\*\.)?([a-zA-Z0-9]([-a-zA-Z0-9_]*[a-zA-Z0-9])?\.)+` +
	`[a-zA-Z0-9]([-a-zA-Z0-9_]*[a-zA-Z0-9])?\.?$`)

func (c *check) clusterPeer(field string, p *cnpv1.ClusterNetworkPolicyEgressPeer,
	r *cnpv1.ClusterNetworkPolicyEgressRule) {
	c.exactlyOne(field, "namespaces, pods, nodes, networks or domainNames", p.Namespaces != nil, p.Pods != nil,
		p.Nodes != nil, p.Networks != nil, p.DomainNames != nil)
	for _, s := range []struct {
		name string
		*metav1.LabelSelector
	}{{"namespaces", p.Namespaces}, {"nodes", p.Nodes}} {
		c.selector(s.LabelSelector, field+"."+s.name)
	}
	c.pods(p.Pods, field+".pods")
	c.atMost(len(p.Networks), field+".networks")
	for i, n := range p.Networks {
		c.invalid(notCanonical(string(n)), "%s.networks[%d]", field, i)
	}
	c.atMost(len(p.DomainNames), field+".domainNames")
	for i, n := range p.DomainNames {
		if !domain.MatchString(string(n)) {
			c.invalid(fmt.Sprintf("%q is no domain name: use labels with dots between them, '*' as the first alone", n),
				"%s.domainNames[%d]", field, i)
		}
	}
	if p.DomainNames != nil && r.Action != cnpv1.ClusterNetworkPolicyRuleActionAccept {
		c.invalid("only counts in rules with action Accept: use networks", "%s.domainNames", field)
	}
	for i := range r.Protocols {
		if r.Protocols[i].DestinationNamedPort != "" && (p.Nodes != nil || p.Networks != nil || p.DomainNames != nil) {
			c.invalid(fmt.Sprintf("has no named ports, and protocols[%d] names one: use numbers", i), "%s", field)
			return
		}
	}
}
