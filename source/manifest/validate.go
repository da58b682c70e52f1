package manifest

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/source"
)

// validate names what an API server would refuse in o and what would be nonsense further down the line
// (kubernetes/pkg/apis/{core,discovery,networking}/validation). Defaults must have been set.
func validate(o source.Object) []source.Problem {
	c := &check{}
	c.metadata(o)
	switch o := o.(type) {
	case *corev1.Service:
		c.service(o)
	case *discoveryv1.EndpointSlice:
		c.slice(o)
	case *corev1.Node:
		c.node(o)
	case *corev1.Pod:
		c.pod(o)
	case *networkingv1.NetworkPolicy:
		c.policy(&o.Spec)
	case *networkingv1.ServiceCIDR:
		c.serviceCIDR(&o.Spec)
	case *cnpv1.ClusterNetworkPolicy:
		c.cluster(&o.Spec)
	}
	return c.problems
}

// A check gathers problems. Its methods say nothing where all is well; fields are formats, so that they cost only then.
type check struct{ problems []source.Problem }

func (c *check) bad(reason, message, field string, at ...any) {
	if message != "" {
		c.problems = append(c.problems, source.Problem{Field: fmt.Sprintf(field, at...), Reason: reason, Message: message})
	}
}

func (c *check) invalid(message, field string, at ...any) { c.bad(Invalid, message, field, at...) }

func (c *check) metadata(o source.Object) {
	kind := source.KeyOf(o).Kind
	switch {
	case o.GetName() == "" && o.GetGenerateName() != "":
		c.bad(Required, "is missing: generateName needs an API server, so write a name", "metadata.name")
	case o.GetName() == "":
		c.bad(Required, "is missing", "metadata.name")
	default:
		c.invalid(nameProblem(kind, o.GetName()), "metadata.name")
	}
	if kind.Namespaced() {
		c.invalid(labelProblem(o.GetNamespace()), "metadata.namespace")
	} else if o.GetNamespace() != "" {
		c.invalid(fmt.Sprintf("a %s has no namespace: remove it", kind), "metadata.namespace")
	}
	c.labels(o.GetLabels(), "metadata.labels")
}

// labels inspects a map of labels, in the order of its keys only where something is wrong.
func (c *check) labels(m map[string]string, field string, at ...any) {
	for k, v := range m {
		if !isQualified(k) || !isValue(v) {
			c.badLabels(m, fmt.Sprintf(field, at...))
			return
		}
	}
}

func (c *check) badLabels(m map[string]string, field string) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if !isQualified(k) {
			c.invalid(fmt.Sprintf("%q is no label: use letters, digits, '-', '_' and '.', at most 63, perhaps behind a "+
				"domain and '/'", k), "%s", field)
		} else if !isValue(m[k]) {
			c.invalid(fmt.Sprintf("%q is no label's value: use letters, digits, '-', '_' and '.', begin and end with a letter "+
				"or digit, at most 63", m[k]), "%s[%s]", field, k)
		}
	}
}

// one returns what is wrong with v, if it must be one of all.
func one[T ~string](v T, all ...T) string {
	if slices.Contains(all, v) {
		return ""
	}
	var names []string
	for _, a := range all {
		names = append(names, string(a))
	}
	hint := ": use one of " + strings.Join(names, ", ")
	if near := Nearest(string(v), names); near != "" {
		hint = ": did you mean " + near + "?"
	}
	return fmt.Sprintf("%q is not known here%s", v, hint)
}

func oneProtocol(p corev1.Protocol) string {
	return one(p, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
}

func portNumber(n int32) string {
	if n < 1 || n > 65535 {
		return fmt.Sprintf("%d is no port: use 1 to 65535", n)
	}
	return ""
}

func portOrZero(n int32) string {
	if n == 0 {
		return ""
	}
	return portNumber(n)
}

func portOrName(p intstr.IntOrString) string {
	if p.Type == intstr.Int {
		return portNumber(p.IntVal)
	}
	if isPortName(p.StrVal) {
		return ""
	}
	return fmt.Sprintf("%q is no port: use a number (without quotes) or a port's name: small letters, digits and single "+
		"'-', with a letter, at most 15", p.StrVal)
}

// parseIP returns the IP address s, or what is wrong with it.
func parseIP(s string) (netip.Addr, string) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		return a, fmt.Sprintf("%q is no IP address", s) + detail(err)
	case a.Zone() != "":
		return a, fmt.Sprintf("%q has a zone: write the address without %%%s", s, a.Zone())
	case a.Is4In6():
		return a, fmt.Sprintf("%q is an IPv4 address in IPv6 dress: write %s", s, a.Unmap())
	}
	return a, ""
}

// detail returns the last part of a parser's error, in parentheses.
func detail(err error) string {
	s := err.Error()
	return " (" + s[strings.LastIndex(s, ": ")+2:] + ")"
}

func badIP(s string) string {
	_, msg := parseIP(s)
	return msg
}

// parseCIDR returns the address range s, or what is wrong with it.
func parseCIDR(s string) (netip.Prefix, string) {
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil && badIP(s) == "":
		a := netip.MustParseAddr(s)
		return p, fmt.Sprintf("%q is no address range: for this one address write %s/%d", s, s, a.BitLen())
	case err != nil:
		return p, fmt.Sprintf("%q is no address range", s) + detail(err)
	case p.Addr().Is4In6():
		return p, fmt.Sprintf("%q is an IPv4 range in IPv6 dress: write it as IPv4", s)
	}
	return p, ""
}

func badCIDR(s string) string {
	_, msg := parseCIDR(s)
	return msg
}

func (c *check) service(o *corev1.Service) {
	s := &o.Spec
	c.invalid(one(s.Type, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer,
		corev1.ServiceTypeExternalName), "spec.type")
	if s.Type == corev1.ServiceTypeExternalName {
		if !isSubdomain(strings.TrimSuffix(s.ExternalName, ".")) {
			c.invalid(fmt.Sprintf("%q is no DNS name, and type ExternalName needs one", s.ExternalName), "spec.externalName")
		}
	} else if len(s.Ports) == 0 && s.ClusterIP != corev1.ClusterIPNone {
		c.bad(Required, "is missing: name at least one port", "spec.ports")
	}
	c.labels(s.Selector, "spec.selector")
	c.servicePorts(s)
	c.clusterIPs(s)
	c.policies(s)
	for i, ip := range s.ExternalIPs {
		c.invalid(badIP(ip), "spec.externalIPs[%d]", i)
	}
	for i, r := range s.LoadBalancerSourceRanges {
		c.invalid(badCIDR(strings.TrimSpace(r)), "spec.loadBalancerSourceRanges[%d]", i)
	}
	if len(s.LoadBalancerSourceRanges) > 0 && s.Type != corev1.ServiceTypeLoadBalancer {
		c.invalid("only counts for type LoadBalancer: remove it", "spec.loadBalancerSourceRanges")
	}
	for i, in := range o.Status.LoadBalancer.Ingress {
		if in.IP != "" {
			c.invalid(badIP(in.IP), "status.loadBalancer.ingress[%d].ip", i)
		}
		if in.IPMode != nil {
			c.invalid(one(*in.IPMode, corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy),
				"status.loadBalancer.ingress[%d].ipMode", i)
		}
	}
}

func (c *check) servicePorts(s *corev1.ServiceSpec) {
	for i := range s.Ports {
		p := &s.Ports[i]
		if p.Name != "" && !isLabel(p.Name) {
			c.invalid(labelProblem(p.Name), "spec.ports[%d].name", i)
		} else if p.Name == "" && len(s.Ports) > 1 {
			c.bad(Required, "is missing: with several ports each needs a name", "spec.ports[%d].name", i)
		}
		c.invalid(portNumber(p.Port), "spec.ports[%d].port", i)
		c.invalid(oneProtocol(p.Protocol), "spec.ports[%d].protocol", i)
		if p.TargetPort != intstr.FromInt32(p.Port) {
			c.invalid(portOrName(p.TargetPort), "spec.ports[%d].targetPort", i)
		}
		c.invalid(portOrZero(p.NodePort), "spec.ports[%d].nodePort", i)
		if p.NodePort > 0 && s.Type == corev1.ServiceTypeClusterIP {
			c.invalid("type ClusterIP has no node ports: remove it, or write type NodePort", "spec.ports[%d].nodePort", i)
		}
		c.repeatedPort(s, i)
	}
}

// repeatedPort names what port i has that an earlier one has.
func (c *check) repeatedPort(s *corev1.ServiceSpec, i int) {
	p := &s.Ports[i]
	for j := range i {
		q := &s.Ports[j]
		if p.Name != "" && p.Name == q.Name {
			c.invalid(fmt.Sprintf("%q is the name of spec.ports[%d] too", p.Name, j), "spec.ports[%d].name", i)
		}
		if p.Protocol != q.Protocol {
			continue
		}
		if p.Port == q.Port {
			c.invalid(fmt.Sprintf("%d/%s is spec.ports[%d] too", p.Port, p.Protocol, j), "spec.ports[%d].port", i)
		}
		if p.NodePort != 0 && p.NodePort == q.NodePort {
			c.invalid(fmt.Sprintf("%d/%s is the node port of spec.ports[%d] too", p.NodePort, p.Protocol, j),
				"spec.ports[%d].nodePort", i)
		}
	}
}

func (c *check) clusterIPs(s *corev1.ServiceSpec) {
	if s.Type == corev1.ServiceTypeExternalName {
		if s.ClusterIP != "" {
			c.invalid("type ExternalName has no cluster IP: remove it", "spec.clusterIP")
		}
		return
	}
	if s.ClusterIP == corev1.ClusterIPNone && len(s.ClusterIPs) == 1 && s.ClusterIPs[0] == s.ClusterIP {
		if s.Type != corev1.ServiceTypeClusterIP {
			c.invalid(fmt.Sprintf("a headless Service can't be of type %s", s.Type), "spec.clusterIP")
		}
		c.families(s.IPFamilies, nil)
		return
	}
	var families []corev1.IPFamily
	for i, ip := range s.ClusterIPs {
		a, msg := parseIP(ip)
		if msg != "" {
			c.invalid(msg, "spec.clusterIPs[%d]", i)
			return
		}
		families = append(families, family(a))
	}
	switch {
	case len(s.ClusterIPs) > 0 && s.ClusterIPs[0] != s.ClusterIP:
		c.invalid(fmt.Sprintf("%q is not the first of spec.clusterIPs, %q", s.ClusterIP, s.ClusterIPs[0]), "spec.clusterIP")
	case len(families) > 2, len(families) == 2 && families[0] == families[1]:
		c.invalid("hold at most one IPv4 and one IPv6 address", "spec.clusterIPs")
	default:
		c.families(s.IPFamilies, families)
	}
}

// families compares ipFamilies with those of the cluster IPs, as far as both are known.
func (c *check) families(said, are []corev1.IPFamily) {
	if len(said) > 2 || len(said) == 2 && said[0] == said[1] {
		c.invalid("hold each of IPv4 and IPv6 at most once", "spec.ipFamilies")
	}
	for i, f := range said {
		if msg := one(f, corev1.IPv4Protocol, corev1.IPv6Protocol); msg != "" {
			c.invalid(msg, "spec.ipFamilies[%d]", i)
		} else if i < len(are) && f != are[i] && len(c.problems) == 0 {
			c.invalid(fmt.Sprintf("is %s, but spec.clusterIPs[%d] is %s", f, i, are[i]), "spec.ipFamilies[%d]", i)
		}
	}
}

func (c *check) policies(s *corev1.ServiceSpec) {
	c.invalid(one(s.SessionAffinity, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP), "spec.sessionAffinity")
	if a := s.SessionAffinityConfig; a != nil && a.ClientIP != nil && a.ClientIP.TimeoutSeconds != nil {
		if n := *a.ClientIP.TimeoutSeconds; n < 1 || n > 86400 {
			c.invalid(fmt.Sprintf("%d s is no timeout: use 1 to 86400", n), "spec.sessionAffinityConfig.clientIP.timeoutSeconds")
		}
	}
	if p := s.InternalTrafficPolicy; p != nil {
		c.invalid(one(*p, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal),
			"spec.internalTrafficPolicy")
	}
	if p := s.ExternalTrafficPolicy; p != "" {
		c.invalid(one(p, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal),
			"spec.externalTrafficPolicy")
		if !fromExternal(s) {
			c.invalid("only counts for types NodePort and LoadBalancer, and with externalIPs: remove it",
				"spec.externalTrafficPolicy")
		}
	}
	if d := s.TrafficDistribution; d != nil {
		c.invalid(one(*d, corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone,
			corev1.ServiceTrafficDistributionPreferSameNode), "spec.trafficDistribution")
	}
	if p := s.IPFamilyPolicy; p != nil {
		c.invalid(one(*p, corev1.IPFamilyPolicySingleStack, corev1.IPFamilyPolicyPreferDualStack,
			corev1.IPFamilyPolicyRequireDualStack), "spec.ipFamilyPolicy")
	}
	c.invalid(portOrZero(s.HealthCheckNodePort), "spec.healthCheckNodePort")
}

func (c *check) slice(s *discoveryv1.EndpointSlice) {
	c.invalid(one(s.AddressType, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN),
		"addressType")
	if len(s.Endpoints) > 1000 {
		c.invalid(fmt.Sprintf("%d are too many: an EndpointSlice holds at most 1000", len(s.Endpoints)), "endpoints")
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if len(e.Addresses) == 0 {
			c.bad(Required, "is missing: name an address", "endpoints[%d].addresses", i)
		}
		for j, a := range e.Addresses {
			c.invalid(badAddress(s.AddressType, a), "endpoints[%d].addresses[%d]", i, j)
		}
		if e.NodeName != nil && !isSubdomain(*e.NodeName) {
			c.invalid(nameProblem(source.Node, *e.NodeName), "endpoints[%d].nodeName", i)
		}
	}
	for i := range s.Ports {
		c.slicePort(s.Ports, i)
	}
}

func badAddress(t discoveryv1.AddressType, s string) string {
	if t == discoveryv1.AddressTypeFQDN {
		if isSubdomain(strings.TrimSuffix(s, ".")) {
			return ""
		}
		return fmt.Sprintf("%q is no DNS name", s)
	}
	a, msg := parseIP(s)
	if msg == "" && t == discoveryv1.AddressTypeIPv4 != a.Is4() {
		return fmt.Sprintf("%s is no %s address, and addressType says so", s, t)
	}
	return msg
}

func (c *check) slicePort(ports []discoveryv1.EndpointPort, i int) {
	p := &ports[i]
	if *p.Name != "" && !isLabel(*p.Name) {
		c.invalid(labelProblem(*p.Name), "ports[%d].name", i)
	}
	for j := range i {
		if *ports[j].Name == *p.Name {
			c.invalid(fmt.Sprintf("%q is the name of ports[%d] too: names tell the ports apart", *p.Name, j), "ports[%d].name",
				i)
		}
	}
	c.invalid(oneProtocol(*p.Protocol), "ports[%d].protocol", i)
	if p.Port != nil {
		c.invalid(portNumber(*p.Port), "ports[%d].port", i)
	}
}

func (c *check) node(n *corev1.Node) {
	for i, r := range n.Spec.PodCIDRs {
		c.invalid(badCIDR(r), "spec.podCIDRs[%d]", i)
	}
	if len(n.Spec.PodCIDRs) > 0 && n.Spec.PodCIDRs[0] != n.Spec.PodCIDR {
		c.invalid(fmt.Sprintf("%q is not the first of spec.podCIDRs, %q", n.Spec.PodCIDR, n.Spec.PodCIDRs[0]), "spec.podCIDR")
	}
	for i, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP {
			c.invalid(badIP(a.Address), "status.addresses[%d].address", i)
		}
	}
}

func (c *check) serviceCIDR(s *networkingv1.ServiceCIDRSpec) {
	if n := len(s.CIDRs); n < 1 || n > 2 {
		c.invalid(fmt.Sprintf("has %d ranges: give one, or one of each family", n), "spec.cidrs")
	}
	for i, r := range s.CIDRs {
		c.invalid(badCIDR(r), "spec.cidrs[%d]", i)
	}
}

func (c *check) pod(p *corev1.Pod) {
	if n := p.Spec.NodeName; n != "" && !isSubdomain(n) {
		c.invalid(nameProblem(source.Node, n), "spec.nodeName")
	}
	c.containers(p.Spec.InitContainers, "spec.initContainers")
	c.containers(p.Spec.Containers, "spec.containers")
	for i, ip := range p.Status.PodIPs {
		c.invalid(badIP(ip.IP), "status.podIPs[%d].ip", i)
	}
	if len(p.Status.PodIPs) > 0 && p.Status.PodIPs[0].IP != p.Status.PodIP {
		c.invalid(fmt.Sprintf("%q is not the first of status.podIPs, %q", p.Status.PodIP, p.Status.PodIPs[0].IP),
			"status.podIP")
	}
}

func (c *check) containers(cs []corev1.Container, field string) {
	for i := range cs {
		for j, p := range cs[i].Ports {
			if p.Name != "" && !isPortName(p.Name) {
				c.invalid(portOrName(intstr.FromString(p.Name)), "%s[%d].ports[%d].name", field, i, j)
			}
			c.invalid(portNumber(p.ContainerPort), "%s[%d].ports[%d].containerPort", field, i, j)
			c.invalid(portOrZero(p.HostPort), "%s[%d].ports[%d].hostPort", field, i, j)
			c.invalid(oneProtocol(p.Protocol), "%s[%d].ports[%d].protocol", field, i, j)
		}
	}
}

func (c *check) policy(s *networkingv1.NetworkPolicySpec) {
	c.selector(&s.PodSelector, "spec.podSelector")
	for i, t := range s.PolicyTypes {
		c.invalid(one(t, networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress), "spec.policyTypes[%d]", i)
	}
	for i, r := range s.Ingress {
		c.policyPorts(r.Ports, "spec.ingress[%d]", i)
		c.peers(r.From, "spec.ingress[%d].from", i)
	}
	for i, r := range s.Egress {
		c.policyPorts(r.Ports, "spec.egress[%d]", i)
		c.peers(r.To, "spec.egress[%d].to", i)
	}
}

func (c *check) policyPorts(ports []networkingv1.NetworkPolicyPort, field string, at int) {
	for i, p := range ports {
		c.invalid(oneProtocol(*p.Protocol), field+".ports[%d].protocol", at, i)
		if p.Port != nil {
			c.invalid(portOrName(*p.Port), field+".ports[%d].port", at, i)
		}
		if p.EndPort == nil {
			continue
		}
		switch {
		case p.Port == nil || p.Port.Type == intstr.String:
			c.invalid("needs a port that is a number, to begin with", field+".ports[%d].endPort", at, i)
		case *p.EndPort < p.Port.IntVal || *p.EndPort > 65535:
			c.invalid(fmt.Sprintf("%d is no end: use %d to 65535", *p.EndPort, p.Port.IntVal), field+".ports[%d].endPort", at, i)
		}
	}
}

func (c *check) peers(peers []networkingv1.NetworkPolicyPeer, field string, at int) {
	for i, p := range peers {
		selects := p.PodSelector != nil || p.NamespaceSelector != nil
		switch {
		case p.IPBlock != nil && selects:
			c.invalid("has both ipBlock and a selector: make two items of it", field+"[%d]", at, i)
		case p.IPBlock != nil:
			c.block(p.IPBlock, fmt.Sprintf(field+"[%d].ipBlock", at, i))
		case !selects:
			c.bad(Required, "is empty: write podSelector, namespaceSelector or ipBlock", field+"[%d]", at, i)
		}
		c.selector(p.PodSelector, field+"[%d].podSelector", at, i)
		c.selector(p.NamespaceSelector, field+"[%d].namespaceSelector", at, i)
	}
}

func (c *check) block(b *networkingv1.IPBlock, field string) {
	cidr, msg := parseCIDR(b.CIDR)
	c.invalid(msg, "%s.cidr", field)
	for i, e := range b.Except {
		except, emsg := parseCIDR(e)
		if emsg == "" && msg == "" && (!cidr.Contains(except.Addr()) || except.Bits() <= cidr.Bits()) {
			emsg = fmt.Sprintf("%s is not a part of %s", e, b.CIDR)
		}
		c.invalid(emsg, "%s.except[%d]", field, i)
	}
}

func (c *check) selector(s *metav1.LabelSelector, field string, at ...any) {
	if s == nil {
		return
	}
	c.labels(s.MatchLabels, field+".matchLabels", at...)
	for i, r := range s.MatchExpressions {
		in := append(slices.Clone(at), i)
		if !isQualified(r.Key) {
			c.invalid(fmt.Sprintf("%q is no label", r.Key), field+".matchExpressions[%d].key", in...)
		}
		msg := one(r.Operator, metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpExists,
			metav1.LabelSelectorOpDoesNotExist)
		c.invalid(msg, field+".matchExpressions[%d].operator", in...)
		set := r.Operator == metav1.LabelSelectorOpIn || r.Operator == metav1.LabelSelectorOpNotIn
		if msg == "" && set != (len(r.Values) > 0) {
			c.invalid(fmt.Sprintf("operator In and NotIn need values, and only they; here is %s with %d", r.Operator,
				len(r.Values)), field+".matchExpressions[%d].values", in...)
		}
		for j, v := range r.Values {
			if !isValue(v) {
				c.invalid(fmt.Sprintf("%q is no label's value", v), field+".matchExpressions[%d].values[%d]", append(in, j)...)
			}
		}
	}
}
