package main

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// The API server's address and port come from where the agent reads; what can't be found is none, and no error.
func TestAPIServers(t *testing.T) {
	for url, want := range map[string]string{
		"https://192.0.2.9:6443":      "[192.0.2.9:6443]",
		"https://192.0.2.9":           "[192.0.2.9:443]",
		"http://[2001:db8::1]:8080":   "[[2001:db8::1]:8080]",
		"https://192.0.2.9:nonsense":  "[]",
		"https://name.invalid:6443":   "[]",
		"https://192.0.2.9:6443/path": "[192.0.2.9:6443]",
	} {
		if got := fmt.Sprint(apiServers(t.Context(), kube.Access{Master: url})); got != want {
			t.Errorf("%s: %s, want %s", url, got, want)
		}
	}
	if got := apiServers(t.Context(), kube.Access{Kubeconfig: "/no/such/file"}); got != nil {
		t.Errorf("without a kubeconfig: %v", got)
	}
}

func TestIgnoredPoliciesAreNamed(t *testing.T) {
	policy, cluster := &networkingv1.NetworkPolicy{}, &cnpv1.ClusterNetworkPolicy{}
	for _, tt := range []struct {
		objects []source.Object
		want    string
	}{
		{[]source.Object{&corev1.Service{}, &corev1.Node{}}, ""},
		{[]source.Object{policy, &corev1.Node{}, policy}, "(NetworkPolicies: 2, ClusterNetworkPolicies: 0)"},
		{[]source.Object{policy, cluster}, "(NetworkPolicies: 1, ClusterNetworkPolicies: 1)"},
	} {
		if got := ignoredPolicies(tt.objects); !strings.Contains(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}
