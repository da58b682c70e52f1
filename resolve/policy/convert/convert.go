// Package convert writes network policies of older kinds and versions as those of the kinds that Fairlead evaluates, so
// that they decide as before. A policy of which something can't be said that way is left out whole, and named: without
// one of its rules it would decide something else.
package convert

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/network-policy-api/apis/v1alpha1"
	"sigs.k8s.io/network-policy-api/apis/v1alpha2"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// NotConverted is the reason of the problem that a policy says what has no counterpart.
const NotConverted = "NotConverted"

// baselinePriority is that of a BaselineAdminNetworkPolicy, which has none: other policies of the tier come before it.
const baselinePriority = 1000

// baselinePrefix is before the name of a BaselineAdminNetworkPolicy, which an AdminNetworkPolicy may have as well.
const baselinePrefix = "baseline-"

// most is how many peers, ports and networks a rule of a ClusterNetworkPolicy may have. Older kinds may have more.
const most = 25

// Converted is a policy in the form that Fairlead evaluates.
type Converted struct {
	source.Object
	Line int // of the text, where its document begins
}

// Policies returns the policies of a text in YAML or JSON as NetworkPolicies and ClusterNetworkPolicies, in its order.
// Each policy that is left out has a problem. Objects that need no change, and those that are no policies, are passed
// over.
func Policies(text []byte) (out []Converted, problems []source.Problem) {
	docs, problems := manifest.Documents(text)
	known := map[source.Key]bool{}
	for _, d := range docs {
		o, bad := policy(d)
		if o != nil && len(bad) == 0 {
			namespace := o.GetNamespace()
			bad = manifest.Complete(o)
			o.SetNamespace(namespace) // which kubectl chooses where none is named
		}
		if o != nil && len(bad) == 0 && known[source.KeyOf(o)] {
			bad = []source.Problem{{Reason: manifest.Duplicate, Message: fmt.Sprintf("another policy becomes %s as well",
				source.KeyOf(o))}}
		}
		for _, p := range bad {
			p.Line, p.Message = d.Line, p.Message+"; it is left out"
			if p.Object == (source.Key{}) {
				p.Object = d.Key()
			}
			problems = append(problems, p)
		}
		if o != nil && len(bad) == 0 {
			known[source.KeyOf(o)] = true
			out = append(out, Converted{o, d.Line})
		}
	}
	return out, problems
}

// policy converts a document, nil where it is no policy of an older kind.
func policy(d manifest.Document) (source.Object, []source.Problem) {
	switch d.Version + " " + d.Kind {
	case v1alpha1.GroupVersion.String() + " AdminNetworkPolicy":
		return admin(d, cnpv1.AdminTier)
	case v1alpha1.GroupVersion.String() + " BaselineAdminNetworkPolicy":
		return admin(d, cnpv1.BaselineTier)
	case v1alpha2.GroupVersion.String() + " ClusterNetworkPolicy":
		o := &cnpv1.ClusterNetworkPolicy{}
		bad := d.Decode(o)
		o.TypeMeta, o.ObjectMeta = clusterMeta, meta(o.ObjectMeta)
		for i := range o.Spec.Egress {
			for j := range o.Spec.Egress[i].To {
				networks := o.Spec.Egress[i].To[j].Networks
				for n := range networks {
					networks[n] = masked(networks[n])
				}
			}
		}
		return o, bad
	case "extensions/v1beta1 NetworkPolicy": // with the same fields and defaults
		o := &networkingv1.NetworkPolicy{}
		bad := d.Decode(o)
		o.TypeMeta = metav1.TypeMeta{APIVersion: networkingv1.SchemeGroupVersion.String(), Kind: "NetworkPolicy"}
		o.ObjectMeta = meta(o.ObjectMeta)
		return o, bad
	}
	if k, ok := source.OtherPolicyKind(d.Version, d.Kind); ok {
		key := d.Key()
		key.Kind = k.Name()
		return nil, []source.Problem{{Object: key, Reason: NotConverted,
			Message: "policies of this kind are not converted: write a NetworkPolicy or a ClusterNetworkPolicy"}}
	}
	return nil, nil
}

var clusterMeta = metav1.TypeMeta{APIVersion: cnpv1.GroupVersion.String(), Kind: "ClusterNetworkPolicy"}

// meta returns what of an object's metadata is its author's.
func meta(m metav1.ObjectMeta) metav1.ObjectMeta {
	a := maps.Clone(m.Annotations)
	delete(a, corev1.LastAppliedConfigAnnotation)
	return metav1.ObjectMeta{Name: m.Name, Namespace: m.Namespace, Labels: m.Labels, Annotations: a}
}

// rules converts rules, and gathers what has no counterpart.
type rules struct{ problems []source.Problem }

func (r *rules) bad(field, message string, args ...any) {
	r.problems = append(r.problems, source.Problem{Field: field, Reason: NotConverted,
		Message: fmt.Sprintf(message, args...)})
}

// admin converts an AdminNetworkPolicy, or a BaselineAdminNetworkPolicy: that has the same fields, without a priority.
func admin(d manifest.Document, tier cnpv1.Tier) (source.Object, []source.Problem) {
	from := &v1alpha1.AdminNetworkPolicy{}
	if bad := d.Decode(from); bad != nil {
		for i := range bad {
			if bad[i].Reason == manifest.UnknownField { // such as sameLabels, which the kind had at first
				bad[i].Message = "has no counterpart in a ClusterNetworkPolicy"
			}
		}
		return nil, bad
	}
	s := &from.Spec
	o := &cnpv1.ClusterNetworkPolicy{TypeMeta: clusterMeta, ObjectMeta: meta(from.ObjectMeta)}
	o.Spec = cnpv1.ClusterNetworkPolicySpec{Tier: tier, Priority: s.Priority, Subject: cnpv1.ClusterNetworkPolicySubject{
		Namespaces: s.Subject.Namespaces, Pods: (*cnpv1.NamespacedPod)(s.Subject.Pods)}}
	if tier == cnpv1.BaselineTier {
		o.Name, o.Spec.Priority = baselinePrefix+o.Name, baselinePriority
	}
	r := &rules{}
	for i := range s.Ingress {
		o.Spec.Ingress = append(o.Spec.Ingress, r.ingress(&s.Ingress[i], fmt.Sprintf("spec.ingress[%d]", i))...)
	}
	for i := range s.Egress {
		o.Spec.Egress = append(o.Spec.Egress, r.egress(&s.Egress[i], fmt.Sprintf("spec.egress[%d]", i))...)
	}
	return o, r.problems
}

// ingress converts a rule: into several with the same action, where one may not have as many peers or ports.
func (r *rules) ingress(from *v1alpha1.AdminNetworkPolicyIngressRule,
	field string) (out []cnpv1.ClusterNetworkPolicyIngressRule) {
	action, protocols := r.action(from.Action, field), r.protocols(from.Ports, field)
	var peers []cnpv1.ClusterNetworkPolicyIngressPeer
	for _, p := range from.From {
		peers = append(peers, cnpv1.ClusterNetworkPolicyIngressPeer{Namespaces: p.Namespaces,
			Pods: (*cnpv1.NamespacedPod)(p.Pods)})
	}
	for _, peers := range parts(peers) {
		for _, protocols := range parts(protocols) {
			out = append(out, cnpv1.ClusterNetworkPolicyIngressRule{Name: from.Name, Action: action, From: peers,
				Protocols: protocols})
		}
	}
	return out
}

// egress converts a rule, as ingress does.
func (r *rules) egress(from *v1alpha1.AdminNetworkPolicyEgressRule,
	field string) (out []cnpv1.ClusterNetworkPolicyEgressRule) {
	action, protocols := r.action(from.Action, field), r.protocols(from.Ports, field)
	var peers []cnpv1.ClusterNetworkPolicyEgressPeer
	for i := range from.To {
		peers = append(peers, egressPeers(&from.To[i])...)
	}
	for _, peers := range parts(peers) {
		for _, protocols := range parts(protocols) {
			out = append(out, cnpv1.ClusterNetworkPolicyEgressRule{Name: from.Name, Action: action, To: peers,
				Protocols: protocols})
		}
	}
	return out
}

// egressPeers converts a peer: into several where one may not have as many networks or domain names.
func egressPeers(p *v1alpha1.AdminNetworkPolicyEgressPeer) (out []cnpv1.ClusterNetworkPolicyEgressPeer) {
	rest := cnpv1.ClusterNetworkPolicyEgressPeer{Namespaces: p.Namespaces, Pods: (*cnpv1.NamespacedPod)(p.Pods),
		Nodes: p.Nodes}
	var networks []cnpv1.CIDR
	for _, n := range p.Networks {
		networks = append(networks, masked(cnpv1.CIDR(n)))
	}
	var names []cnpv1.DomainName
	for _, n := range p.DomainNames {
		names = append(names, cnpv1.DomainName(n))
	}
	for _, networks := range parts(networks) {
		for _, names := range parts(names) {
			rest.Networks, rest.DomainNames = networks, names
			out = append(out, rest)
		}
	}
	return out
}

// masked returns a CIDR without bits beyond its prefix, which mean nothing; what is none stays as it is.
func masked(c cnpv1.CIDR) cnpv1.CIDR {
	if p, err := netip.ParsePrefix(string(c)); err == nil {
		return cnpv1.CIDR(p.Masked().String())
	}
	return c
}

// parts splits a list into as many as a rule may have; one that is empty is one part.
func parts[T any](list []T) [][]T {
	if len(list) == 0 {
		return [][]T{nil}
	}
	return slices.Collect(slices.Chunk(list, most))
}

func (r *rules) action(a v1alpha1.AdminNetworkPolicyRuleAction, field string) cnpv1.ClusterNetworkPolicyRuleAction {
	switch a {
	case v1alpha1.AdminNetworkPolicyRuleActionAllow:
		return cnpv1.ClusterNetworkPolicyRuleActionAccept
	case v1alpha1.AdminNetworkPolicyRuleActionDeny:
		return cnpv1.ClusterNetworkPolicyRuleActionDeny
	case v1alpha1.AdminNetworkPolicyRuleActionPass:
		return cnpv1.ClusterNetworkPolicyRuleActionPass
	}
	r.bad(field+".action", "unknown action %q: use Allow, Deny or Pass", a)
	return ""
}

// protocols converts ports.
func (r *rules) protocols(ports *[]v1alpha1.AdminNetworkPolicyPort,
	field string) (out []cnpv1.ClusterNetworkPolicyProtocol) {
	if ports == nil {
		return nil
	}
	if len(*ports) == 0 {
		r.bad(field+".ports", "is empty: remove it, or name a port")
	}
	for i, p := range *ports {
		at := fmt.Sprintf("%s.ports[%d]", field, i)
		switch number, named, span := p.PortNumber, p.NamedPort, p.PortRange; {
		case number != nil && named == nil && span == nil:
			out = append(out, r.protocol(number.Protocol, &cnpv1.Port{Number: number.Port}, at+".portNumber"))
		case number == nil && named != nil && span == nil:
			out = append(out, cnpv1.ClusterNetworkPolicyProtocol{DestinationNamedPort: *named})
		case number == nil && named == nil && span != nil:
			port := &cnpv1.Port{Range: &cnpv1.PortRange{Start: span.Start, End: span.End}}
			if span.Start == span.End {
				port = &cnpv1.Port{Number: span.Start}
			}
			out = append(out, r.protocol(span.Protocol, port, at+".portRange"))
		default:
			r.bad(at, "has not exactly one of portNumber, namedPort and portRange")
		}
	}
	return out
}

// protocol returns a port of a protocol, TCP where none is named.
func (r *rules) protocol(p corev1.Protocol, port *cnpv1.Port, field string) (out cnpv1.ClusterNetworkPolicyProtocol) {
	switch p {
	case "", corev1.ProtocolTCP:
		out.TCP = &cnpv1.ClusterNetworkPolicyProtocolTCP{DestinationPort: port}
	case corev1.ProtocolUDP:
		out.UDP = &cnpv1.ClusterNetworkPolicyProtocolUDP{DestinationPort: port}
	case corev1.ProtocolSCTP:
		out.SCTP = &cnpv1.ClusterNetworkPolicyProtocolSCTP{DestinationPort: port}
	default:
		r.bad(field+".protocol", "unknown protocol %q: use TCP, UDP or SCTP", p)
	}
	return out
}

// YAML returns objects as documents, without a status.
func YAML(policies []Converted) (out []byte, err error) {
	for _, p := range policies {
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(p.Object)
		if err != nil {
			return nil, err
		}
		delete(fields, "status")
		b, err := yaml.Marshal(fields)
		if err != nil {
			return nil, err
		}
		out = append(append(out, "---\n"...), b...)
	}
	return out, nil
}
