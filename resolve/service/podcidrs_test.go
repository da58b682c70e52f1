package service

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// With direct server return a Node's podCIDRs say which pods are behind it, also where others count as pods; a wrong
// one is told.
func TestPodCIDRsOfANode(t *testing.T) {
	pods, other := netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("10.9.0.0/16")
	node := &corev1.Node{Spec: corev1.NodeSpec{PodCIDRs: []string{pods.String(), "10.244.2.0/99"}}}
	for _, dsr := range []bool{false, true} {
		set := &settings{Config: Config{DirectServerReturn: dsr, ClusterCIDRs: []netip.Prefix{other}}, podsConfigured: true}
		p := locate(set, node, nil, false, nil, nil)
		if !slices.Equal(p.model.Pods, set.ClusterCIDRs) || slices.Contains(p.model.PodCIDRs, pods) != dsr ||
			(len(p.problems) == 1) != dsr {
			t.Errorf("direct %v: pods %v, behind %v, problems %v", dsr, p.model.Pods, p.model.PodCIDRs, p.problems)
		}
	}
}
