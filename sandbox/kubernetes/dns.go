package kubernetes

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"net/http"

	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/sandbox/controlplane"
)

// dnsImage is the name of CoreDNS's image in dns.yaml.
const dnsImage = "fairlead.dev/coredns:1"

//go:embed dns.yaml
var dnsObjects []byte

// collections are where objects of dns.yaml are made, by kind.
var collections = map[string]string{
	"ServiceAccount":     "/api/v1/namespaces/kube-system/serviceaccounts",
	"ConfigMap":          "/api/v1/namespaces/kube-system/configmaps",
	"Service":            "/api/v1/namespaces/kube-system/services",
	"Deployment":         "/apis/apps/v1/namespaces/kube-system/deployments",
	"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
	"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}

// startDNS makes the objects of the cluster's DNS and waits until it is available, which without a network it can't be.
func (c *Cluster) startDNS(ctx context.Context) error {
	for _, text := range bytes.Split(dnsObjects, []byte("\n---\n")) {
		var o map[string]any
		if err := yaml.Unmarshal(text, &o); err != nil {
			return fmt.Errorf("read dns.yaml: %w", err)
		}
		at := collections[o["kind"].(string)]
		if err := c.Plane.Call(ctx, controlplane.First, http.MethodPost, at, o, nil); err != nil {
			return err
		}
	}
	if c.Bare {
		return nil
	}
	return c.await(ctx, "no pod of Deployment kube-system/coredns is ready", func() (bool, error) {
		var d appsv1.Deployment
		err := c.Plane.Call(ctx, controlplane.First, http.MethodGet, collections["Deployment"]+"/coredns", nil, &d)
		return d.Status.AvailableReplicas > 0, err
	})
}
