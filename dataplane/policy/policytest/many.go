package policytest

import (
	"fmt"
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// many has 10,000 policies select a pod, of which the last allows a client: the engine holds as much as with ten, so
// that a packet meets as much.
func (s Suite[K]) many(t *testing.T) {
	e := s.open(t)
	_, objects := Worlds(t)
	held := 0
	for _, n := range []int{10, 10_000} {
		world := slices.Clone(objects["none.yaml"])
		for i := range n {
			from := metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprint("client-", i)}}
			if i == n-1 {
				from.MatchLabels["app"] = "client"
			}
			world = append(world, source.Object(&networkingv1.NetworkPolicy{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprintf("p%05d", i)},
				Spec: networkingv1.NetworkPolicySpec{
					PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
					Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{
						NamespaceSelector: &metav1.LabelSelector{}, PodSelector: &from}}}}}}))
		}
		d := Decide(world)
		facts := e.hold(d)
		if held == 0 {
			held = facts
		}
		if facts != held {
			t.Errorf("%d facts of %d policies, want %d as of ten", facts, n, held)
		}
		var packets []verdict.Packet
		for _, to := range Served[:2] {
			for i, web := range Behind[0] {
				packets = append(packets, e.Packet(Behind[2][i], web, to), e.Packet(Behind[1][i], web, to))
			}
		}
		if accepted, dropped := e.judge(fmt.Sprint(n, " policies"), d.Now, packets); accepted != 4 || dropped != 4 {
			t.Errorf("%d policies: %d packets accepted, %d dropped", n, accepted, dropped)
		}
	}
}
