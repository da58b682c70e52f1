package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/network-policy-api/apis/v1alpha2"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/source"
)

// property is what is read of a schema of OpenAPI 3.
type property struct {
	Properties map[string]property `json:"properties"`
	Items      *property           `json:"items"`
}

// NodePeers reports whether the server's ClusterNetworkPolicies have nodes as peers, which is a field of the
// experimental channel of their definition. It is an error where the server publishes no schema of the kind.
func (s *Source) NodePeers(ctx context.Context) (bool, error) {
	c, err := open(s.options)
	if err != nil {
		return false, err
	}
	has, err := c.nodePeers(ctx, schema.GroupVersion(cnpv1.GroupVersion))
	if err != nil {
		has, err = c.nodePeers(ctx, schema.GroupVersion(v1alpha2.GroupVersion))
	}
	return has, err
}

// nodePeers is NodePeers of a version.
func (c *client) nodePeers(ctx context.Context, v schema.GroupVersion) (bool, error) {
	path := "/openapi/v3/apis/" + v.String()
	b, err := c.get(v).AbsPath(path).DoRaw(ctx)
	if err != nil {
		return false, fmt.Errorf("API server %s: read %s: %s", c.host(), path, plain(err))
	}
	var doc struct {
		Components struct {
			Schemas map[string]property `json:"schemas"`
		} `json:"components"`
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		return false, fmt.Errorf("API server %s: read %s: %w", c.host(), path, err)
	}
	for name, of := range doc.Components.Schemas {
		if !strings.HasSuffix(name, "."+string(source.ClusterNetworkPolicy)) {
			continue
		}
		for _, field := range []string{"spec", "egress", "to"} {
			if of = of.Properties[field]; of.Items != nil {
				of = *of.Items
			}
		}
		_, has := of.Properties["nodes"]
		return has, nil
	}
	return false, fmt.Errorf("API server %s: %s has no %s", c.host(), path, source.ClusterNetworkPolicy)
}
