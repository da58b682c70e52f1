package kube

import (
	"encoding/json"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/strip"
)

// FuzzObjects takes bytes for objects that an API server sends, which no one has validated here, down to the resolver.
// What is listed is what was put.
func FuzzObjects(f *testing.F) {
	for _, o := range []interface{ Marshal() ([]byte, error) }{
		&corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 80}}}},
		&discoveryv1.EndpointSlice{AddressType: "IPv4", Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
			Ports: []discoveryv1.EndpointPort{{}}},
		&corev1.Pod{Spec: corev1.PodSpec{NodeName: "a"}, Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}}},
		&networkingv1.NetworkPolicy{Spec: networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{
			{From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "0.0.0.0/0"}}}}}}},
		&corev1.Node{Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: "InternalIP", Address: "x"}}}},
	} {
		b, err := o.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"spec":{"tier":"Admin","subject":{"namespaces":{}},"egress":[{"action":"Deny","to":[{"nodes":{}}]}]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		kinds := append(resources("", ""), policyResources()...)
		n, words := newUpdates(kinds), strip.New()
		r := resolve.New(resolve.Config{Node: "a"})
		for _, k := range kinds {
			s := newStream(k, nil, n, words, Options{}.budget(k.kind))
			o := k.object.DeepCopyObject().(source.Object)
			l, listed := s.begin(t.Context()), 0
			if unmarshal(o, b) == nil {
				s.admit(l, o, true)
				listed++
			}
			if err := s.Replace(nil, ""); err != nil {
				t.Fatal(err)
			}
			if s.budget.len() != listed {
				t.Errorf("%d of %d objects are known", s.budget.len(), listed)
			}
			if listed > 0 {
				if err := s.Delete(o); err != nil || s.budget.len() > 0 {
					t.Errorf("%v, %d objects stay known", err, s.budget.len())
				}
				s.Update(o)
			}
		}
		batch, ok := n.collect()
		if !ok || batch.Waiting {
			t.Fatal("no batch though all is listed")
		}
		r.Apply(batch.Changes)
		r.Problems()
		p := policy.New(policy.Config{Node: "a"})
		p.Apply(batch.Changes)
		p.Problems()
	})
}

// unmarshal reads an object as the API server sends it: custom resources as JSON.
func unmarshal(o source.Object, b []byte) error {
	if o, ok := o.(interface{ Unmarshal([]byte) error }); ok {
		return o.Unmarshal(b)
	}
	return json.Unmarshal(b, o)
}
