package kube_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"fairlead.dev/fairlead/source/kube"
)

// publishes returns a server that publishes the schema of ClusterNetworkPolicies, whose peers have a field.
func publishes(t *testing.T, version, kind, field string) kube.Access {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/openapi/v3/apis/policy.networking.k8s.io/"+version {
			http.NotFound(w, r)
			return
		}
		fmt.Fprintf(w, `{"openapi": "3.0.0", "components": {"schemas": {
"io.k8s.networking.policy.%s.%sList": {"type": "object"},
"io.k8s.networking.policy.%[1]s.%[2]s": {"type": "object", "properties": {"spec": {"type": "object", "properties": {
"egress": {"type": "array", "items": {"type": "object", "properties": {
"to": {"type": "array", "items": {"type": "object", "properties": {"pods": {"type": "object"}, %[3]q: {"type": "object"}}}}}}}
}}}}}}}`, version, kind, field)
	}))
	t.Cleanup(s.Close)
	return kube.Access{Master: s.URL}
}

func TestNodePeersByTheSchema(t *testing.T) {
	none := httptest.NewServer(http.NotFoundHandler())
	defer none.Close()
	for name, c := range map[string]struct {
		access kube.Access
		want   bool
		fails  bool
	}{
		"experimental channel": {publishes(t, "v1beta1", "ClusterNetworkPolicy", "nodes"), true, false},
		"older version":        {publishes(t, "v1alpha2", "ClusterNetworkPolicy", "nodes"), true, false},
		"standard channel":     {publishes(t, "v1beta1", "ClusterNetworkPolicy", "networks"), false, false},
		"another kind":         {publishes(t, "v1beta1", "AdminNetworkPolicy", "nodes"), false, true},
		"no schema":            {kube.Access{Master: none.URL}, false, true},
	} {
		got, err := kube.New(kube.Options{Access: c.access}).NodePeers(t.Context())
		if got != c.want || (err != nil) != c.fails {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}
