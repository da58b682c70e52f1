package main

import (
	"fmt"
	"testing"

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
