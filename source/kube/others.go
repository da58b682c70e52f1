package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/source"
)

// PoliciesNotEnforced is the reason of the problem of a Node that the cluster has AdminNetworkPolicies, or may have.
const PoliciesNotEnforced = "PoliciesNotEnforced"

// read gets what a path has as JSON, with parameters in pairs.
func (c *client) read(ctx context.Context, path, accept string, into any, parameters ...string) error {
	r := c.get(schema.GroupVersion(cnpv1.GroupVersion)).AbsPath(path).SetHeader("Accept", accept)
	for p := range slices.Chunk(parameters, 2) {
		r = r.Param(p[0], p[1])
	}
	b, err := r.DoRaw(ctx)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, into)
}

// namesOnly is a list's form without what objects say.
const namesOnly = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1," + runtime.ContentTypeJSON

// otherPolicies returns a problem for each policy that the server has of a kind that Fairlead doesn't evaluate, and for
// each such kind that may not be listed, and why others could not be. To learn which kinds there are needs no right.
func (c *client) otherPolicies(ctx context.Context) (problems []source.Problem, err error) {
	var groups metav1.APIGroupList
	if err := c.read(ctx, "/apis", runtime.ContentTypeJSON, &groups); err != nil {
		return nil, err
	}
	seen := map[source.Kind]bool{}
	for _, k := range source.OtherPolicyKinds() {
		// Calico may serve in one group what it has in the other.
		if name := source.Kind(strings.Replace(string(k.Name()), ".crd.", ".", 1)); !seen[name] {
			served, ps, failed := c.otherKind(ctx, groups.Groups, k)
			seen[name], problems, err = served, append(problems, ps...), errors.Join(err, failed)
		}
	}
	return problems, err
}

// otherKind reports whether a server with these groups has a kind of policies, and returns their problems.
func (c *client) otherKind(ctx context.Context, groups []metav1.APIGroup, k source.PolicyKind) (served bool,
	problems []source.Problem, err error) {
	i := slices.IndexFunc(groups, func(g metav1.APIGroup) bool { return g.Name == k.Group })
	if i < 0 {
		return false, nil, nil
	}
	for _, v := range groups[i].Versions {
		var resources metav1.APIResourceList
		path := "/apis/" + v.GroupVersion
		if err := c.read(ctx, path, runtime.ContentTypeJSON, &resources); err != nil {
			continue // what serves one group may be away
		}
		if !slices.ContainsFunc(resources.APIResources, func(r metav1.APIResource) bool { return r.Name == k.Resource }) {
			continue
		}
		switch problems, err = c.otherNames(ctx, path+"/"+k.Resource, k); {
		case err == nil:
			return true, problems, nil
		case reasonOf(err) == Forbidden:
			return true, []source.Problem{k.NotListed()}, nil
		}
		return false, nil, err
	}
	return false, nil, nil
}

// otherNames returns a problem for each object of a list.
func (c *client) otherNames(ctx context.Context, path string, k source.PolicyKind) (problems []source.Problem,
	err error) {
	for next := ""; ; {
		var list metav1.PartialObjectMetadataList
		if err := c.read(ctx, path, namesOnly, &list, "limit", "500", "continue", next); err != nil {
			return nil, err
		}
		for _, o := range list.Items {
			problems = append(problems, k.Problem(source.Key{Namespace: o.Namespace, Name: o.Name}))
		}
		if next = list.Continue; next == "" {
			return problems, nil
		}
	}
}

// followOthers finds out from time to time which policies the server has that Fairlead doesn't evaluate, until ctx
// ends. AdminNetworkPolicies, and that they may not be listed, are a problem of the Node; others are logged once.
func (s *Source) followOthers(ctx context.Context, c *client, n *updates) {
	logged := ""
	for ctx.Err() == nil {
		problems, err := c.otherPolicies(ctx)
		words, _ := source.Unevaluated(problems)
		admin := slices.ContainsFunc(problems, func(p source.Problem) bool { return source.IsAdminPolicy(p.Object.Kind) })
		switch {
		case err != nil: // the streams say what is wrong with the server
		case admin:
			n.setOthers(&source.Problem{Object: source.Key{Kind: source.Node, Name: s.options.Node},
				Reason: PoliciesNotEnforced, Message: words})
		default:
			if words != "" && words != logged && s.options.Log != nil {
				logged = words
				s.options.Log.Warn(words)
			}
			n.setOthers(nil)
		}
		pause := cmp.Or(s.retry, unserved)
		select {
		case <-ctx.Done():
		case <-time.After(pause/2 + rand.N(pause/2)):
		}
	}
}
