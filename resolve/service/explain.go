package service

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// TrafficPolicy quotes the policy, of the Service among objects that f is of, that chose f's pools; "" without that
// Service.
func TrafficPolicy(objects []source.Object, f *model.Frontend) string {
	for _, o := range objects {
		s, ok := o.(*corev1.Service)
		if !ok || ownerFrom(source.KeyOf(s)) != f.Owner {
			continue
		}
		policy := "internalTrafficPolicy " + string(corev1.ServiceInternalTrafficPolicyCluster)
		if s.Spec.InternalTrafficPolicy != nil {
			policy = "internalTrafficPolicy " + string(*s.Spec.InternalTrafficPolicy)
		}
		if f.Via != model.ViaClusterIP {
			policy = "externalTrafficPolicy " + string(s.Spec.ExternalTrafficPolicy)
		}
		if s.Spec.TrafficDistribution != nil {
			policy += ", trafficDistribution " + *s.Spec.TrafficDistribution
		}
		return policy
	}
	return ""
}

// UnservedAt returns why the Service among objects whose ClusterIP is a has no frontend, as the end of a sentence; ""
// if it is to have one.
func UnservedAt(objects []source.Object, a netip.Addr, proxyName string) string {
	for _, o := range objects {
		s, ok := o.(*corev1.Service)
		if !ok {
			continue
		}
		has := func(ip string) bool { at, err := ParseAddr(ip); return err == nil && at == a }
		why := Unserved(s, proxyName)
		if why != "" && (has(s.Spec.ClusterIP) || slices.ContainsFunc(s.Spec.ClusterIPs, has)) {
			return fmt.Sprintf(": Service %s/%s is not served: %s", s.Namespace, s.Name, why)
		}
	}
	return ""
}
