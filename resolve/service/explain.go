package service

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// TrafficPolicy quotes the policies that chose the pools of the frontend at an entry; "" without a Service there.
func (r *Resolver) TrafficPolicy(e model.Entry) string {
	x, ok := r.entries.holder[e]
	if !ok || x.entry().via == viaHostPort {
		return ""
	}
	d := &x.by.declared.distributed
	policy, local := "internalTrafficPolicy ", d.internal
	if x.entry().via != viaClusterIP {
		policy, local = "externalTrafficPolicy ", d.external
	}
	if local {
		policy += string(corev1.ServiceExternalTrafficPolicyLocal)
	} else {
		policy += string(corev1.ServiceExternalTrafficPolicyCluster)
	}
	if d.spread != anywhere {
		policy += ", trafficDistribution " + d.spread.String()
	}
	return policy
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
