package policy

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/source"
)

// What matches nothing is named until a pod comes that it matches; CIDRs never are.
func TestUnmatched(t *testing.T) {
	selector := func(app string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
	}
	pod := func(app, ip string) source.Change {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: app, Labels: map[string]string{"app": app}},
			Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: ip}}}}
		return source.Change{Key: source.KeyOf(p), Object: p}
	}
	o := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p"}}
	o.Spec = networkingv1.NetworkPolicySpec{PodSelector: *selector("db"), Ingress: []networkingv1.NetworkPolicyIngressRule{
		{From: []networkingv1.NetworkPolicyPeer{{PodSelector: selector("web")},
			{IPBlock: &networkingv1.IPBlock{CIDR: "192.0.2.0/24"}}}}}}
	r := New(Config{AllNodes: true, ImpliedNamespaces: true})
	for _, step := range []struct {
		change source.Change
		want   string
	}{
		{source.Change{Key: source.KeyOf(o), Object: o},
			"NetworkPolicy shop/p: the source has no pod that it selects: nothing of it is evaluated (MatchesNothing)"},
		{pod("db", "10.0.0.1"), "NetworkPolicy shop/p: spec.ingress[0]: the source has no pod that matches peer " +
			"pods{app=web} in shop: connections with it are not evaluated (MatchesNothing)"},
		{pod("web", "10.0.0.2"), ""},
	} {
		r.Apply([]source.Change{step.change})
		got := ""
		for _, p := range r.Unmatched() {
			got += p.String()
		}
		if got != step.want {
			t.Errorf("%s: %q, want %q", step.change.Key, got, step.want)
		}
	}
}
