package kube_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

var policyKinds = []source.Kind{source.Namespace, source.Pod, source.NetworkPolicy, source.ClusterNetworkPolicy}

func policyObjects() []source.Object {
	deny := &cnpv1.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "deny"}}
	deny.Spec = cnpv1.ClusterNetworkPolicySpec{Tier: cnpv1.AdminTier, Priority: 7,
		Subject: cnpv1.ClusterNetworkPolicySubject{Namespaces: &metav1.LabelSelector{}}}
	return []source.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{"team": "a"}}},
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "pod"}},
		&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "isolate"}}, deny,
	}
}

func TestFollowsPoliciesWhereWanted(t *testing.T) {
	w := newFixture(t)
	s := apiserver.New(append(policyObjects(), service("web", 80), node("a"))...)
	w.serve(s)
	w.follow(kube.Options{Kinds: policyKinds})
	w.holds("a", "deny", "isolate", "pod", "shop", "web:80")
	w.reason("")
	w.mu.Lock()
	deny, ok := w.objects[source.Key{Kind: source.ClusterNetworkPolicy, Name: "deny"}].(*cnpv1.ClusterNetworkPolicy)
	if !ok || deny.Spec.Priority != 7 || deny.Spec.Subject.Namespaces == nil {
		t.Errorf("got %+v", deny)
	}
	w.mu.Unlock()
	deny = deny.DeepCopy()
	deny.Name = "other"
	s.Apply(put(deny), del(policyObjects()[2]))
	w.holds("a", "deny", "other", "pod", "shop", "web:80")

	without := newFixture(t)
	without.serve(s)
	without.follow(kube.Options{})
	without.holds("a", "web:80")
	for _, a := range without.requestLog() {
		if strings.Contains(a, "policies") || strings.Contains(a, "pods") || strings.Contains(a, "namespaces ") {
			t.Errorf("asked for: %s", a)
		}
	}
}

// A server without the CustomResourceDefinition of ClusterNetworkPolicies is no problem; once it has it, they count.
func TestClusterNetworkPoliciesMayComeLater(t *testing.T) {
	w := newFixture(t)
	s := apiserver.New(append(policyObjects(), node("a"))...)
	w.serve(s)
	w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "clusternetworkpolicies") {
			return false
		}
		http.NotFound(rw, r)
		return true
	})
	w.retry = 20 * time.Millisecond
	w.follow(kube.Options{Kinds: policyKinds})
	w.holds("a", "isolate", "pod", "shop")
	w.reason("")
	once := kube.New(kube.Options{Access: kube.Access{Kubeconfig: w.kubeconfig}, Node: "a", Kinds: policyKinds})
	objects, problems, err := once.Load(t.Context(), false)
	if err != nil || len(problems) > 0 || len(objects) != 4 {
		t.Errorf("read once: %d objects, want 4: %v %v", len(objects), problems, err)
	}
	w.ill(nil)
	w.holds("a", "deny", "isolate", "pod", "shop")
	w.reason("")
}

// Without permission to read policies nothing begins: a node that doesn't know them would let pass what they forbid.
func TestNothingBeginsWithoutPolicies(t *testing.T) {
	for _, resource := range []string{"clusternetworkpolicies", "networkpolicies", "pods", "namespaces"} {
		t.Run(resource, func(t *testing.T) {
			w := newFixture(t)
			w.serve(apiserver.New(append(policyObjects(), node("a"))...))
			w.ill(func(rw http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, "/"+resource) {
					return false
				}
				status := apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", nil).ErrStatus
				status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
				rw.Header().Set("Content-Type", "application/json")
				rw.WriteHeader(http.StatusForbidden)
				check(t, json.NewEncoder(rw).Encode(status))
				return true
			})
			w.follow(kube.Options{Kinds: policyKinds})
			w.reason(kube.Forbidden, resource)
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.begun || !w.last.Waiting {
				t.Errorf("it has begun with %q", w.names())
			}
		})
	}
}

// A namespace of more policies than the bound lets in is closed, not open, until they fit.
func TestPoliciesLeftOutCloseTheirNamespace(t *testing.T) {
	w := newFixture(t)
	objects := append(policyObjects(), node("a"))
	var hoard []source.Change
	for i := range 200 {
		p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: fmt.Sprintf("p-%03d", i)}}
		for range 100 {
			p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: []networkingv1.
				NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "198.51.100.0/24"}}}})
		}
		hoard = append(hoard, put(p))
	}
	s := apiserver.New(objects...)
	w.serve(s)
	w.follow(kube.Options{Kinds: policyKinds, NamespaceBytes: 1 << 20})
	w.holds("a", "deny", "isolate", "pod", "shop")
	s.Apply(hoard...)
	substitute := source.Key{Kind: source.NetworkPolicy, Namespace: "tenant", Name: kube.Substitute}
	w.until("the namespace is closed", func() bool { return w.objects[substitute] != nil })
	w.reason(kube.NamespaceTooLarge, "networkpolicies.networking.k8s.io")
	p := w.objects[substitute].(*networkingv1.NetworkPolicy)
	if len(p.Spec.PodSelector.MatchLabels)+len(p.Spec.Ingress)+len(p.Spec.Egress) > 0 || len(p.Spec.PolicyTypes) != 2 {
		t.Errorf("it is closed by %v", p.Spec)
	}
	var gone []source.Change
	for _, c := range hoard {
		gone = append(gone, source.Change{Key: c.Key})
	}
	s.Apply(gone[10:]...)
	w.until("it is open again", func() bool { return w.objects[substitute] == nil && len(w.objects) == 15 })
	w.reason("")
}
