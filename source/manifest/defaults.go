package manifest

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/source"
)

// setDefaults fills in what an API server would have, as far as traffic depends on it and it can be known from the
// object alone (kubernetes/pkg/apis/{core,discovery,networking}/v1/defaults.go). It allocates nothing: no cluster IPs,
// no node ports.
func setDefaults(o source.Object) {
	if o.GetNamespace() == "" && source.KeyOf(o).Kind.Namespaced() {
		o.SetNamespace("default")
	}
	switch o := o.(type) {
	case *corev1.Service:
		defaultService(&o.Spec)
		defaultIngress(o)
	case *discoveryv1.EndpointSlice:
		for i := range o.Ports {
			setNil(&o.Ports[i].Name, "")
			setNil(&o.Ports[i].Protocol, corev1.ProtocolTCP)
		}
	case *corev1.Namespace:
		if o.Name != "" {
			if o.Labels == nil {
				o.Labels = map[string]string{}
			}
			setEmpty(o.Labels, corev1.LabelMetadataName, o.Name)
		}
	case *corev1.Node:
		oneAndAll(&o.Spec.PodCIDR, &o.Spec.PodCIDRs)
	case *corev1.Pod:
		defaultPod(o)
	case *networkingv1.NetworkPolicy:
		defaultPolicy(&o.Spec)
	}
}

func setZero[T comparable](p *T, v T) {
	if *p == *new(T) {
		*p = v
	}
}

func setNil[T any](p **T, v T) {
	if *p == nil {
		*p = &v
	}
}

func setEmpty(m map[string]string, k, v string) {
	if m[k] == "" {
		m[k] = v
	}
}

// oneAndAll fills a field that holds the first value from the one that holds all, or the other way round.
func oneAndAll(one *string, all *[]string) {
	if *one == "" && len(*all) > 0 {
		*one = (*all)[0]
	} else if *one != "" && len(*all) == 0 {
		*all = []string{*one}
	}
}

func defaultService(s *corev1.ServiceSpec) {
	setZero(&s.Type, corev1.ServiceTypeClusterIP)
	setZero(&s.SessionAffinity, corev1.ServiceAffinityNone)
	switch s.SessionAffinity {
	case corev1.ServiceAffinityNone:
		s.SessionAffinityConfig = nil
	case corev1.ServiceAffinityClientIP:
		setNil(&s.SessionAffinityConfig, corev1.SessionAffinityConfig{})
		setNil(&s.SessionAffinityConfig.ClientIP, corev1.ClientIPConfig{})
		setNil(&s.SessionAffinityConfig.ClientIP.TimeoutSeconds, corev1.DefaultClientIPServiceAffinitySeconds)
	}
	for i := range s.Ports {
		p := &s.Ports[i]
		setZero(&p.Protocol, corev1.ProtocolTCP)
		if p.TargetPort == (intstr.IntOrString{}) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	if s.Type != corev1.ServiceTypeExternalName {
		setNil(&s.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster)
	}
	if fromExternal(s) {
		setZero(&s.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	if s.Type == corev1.ServiceTypeLoadBalancer {
		setNil(&s.AllocateLoadBalancerNodePorts, true)
	}
	oneAndAll(&s.ClusterIP, &s.ClusterIPs)
	defaultFamilies(s)
}

// fromExternal reports whether clients outside of the cluster may come: those Services have an externalTrafficPolicy.
func fromExternal(s *corev1.ServiceSpec) bool {
	return s.Type == corev1.ServiceTypeNodePort || s.Type == corev1.ServiceTypeLoadBalancer ||
		s.Type == corev1.ServiceTypeClusterIP && len(s.ExternalIPs) > 0
}

// defaultFamilies sets ipFamilies from clusterIPs; what is no address is left for validate.
func defaultFamilies(s *corev1.ServiceSpec) {
	if len(s.IPFamilies) > 0 || s.Type == corev1.ServiceTypeExternalName {
		return
	}
	for _, ip := range s.ClusterIPs {
		if a, err := netip.ParseAddr(ip); err == nil {
			s.IPFamilies = append(s.IPFamilies, family(a))
		}
	}
}

func family(a netip.Addr) corev1.IPFamily {
	if a.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

func defaultIngress(s *corev1.Service) {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return
	}
	for i := range s.Status.LoadBalancer.Ingress {
		if in := &s.Status.LoadBalancer.Ingress[i]; in.IP != "" {
			setNil(&in.IPMode, corev1.LoadBalancerIPModeVIP)
		}
	}
}

func defaultPod(p *corev1.Pod) {
	for _, cs := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for _, c := range cs {
			for i := range c.Ports {
				setZero(&c.Ports[i].Protocol, corev1.ProtocolTCP)
			}
		}
	}
	if st := &p.Status; st.PodIP == "" && len(st.PodIPs) > 0 {
		st.PodIP = st.PodIPs[0].IP
	} else if st.PodIP != "" && len(st.PodIPs) == 0 {
		st.PodIPs = []corev1.PodIP{{IP: st.PodIP}}
	}
}

func defaultPolicy(s *networkingv1.NetworkPolicySpec) {
	if len(s.PolicyTypes) == 0 {
		s.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		if len(s.Egress) > 0 {
			s.PolicyTypes = append(s.PolicyTypes, networkingv1.PolicyTypeEgress)
		}
	}
	for _, r := range s.Ingress {
		defaultPolicyPorts(r.Ports)
	}
	for _, r := range s.Egress {
		defaultPolicyPorts(r.Ports)
	}
}

func defaultPolicyPorts(ports []networkingv1.NetworkPolicyPort) {
	for i := range ports {
		setNil(&ports[i].Protocol, corev1.ProtocolTCP)
	}
}
