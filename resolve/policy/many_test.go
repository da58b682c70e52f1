package policy

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// allows returns a policy of tenant by which pods with a label may come to all of its pods.
func allows(name, label string) *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: name},
		Spec: networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{{
			From: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{},
				PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": label}}}}}}}}
}

// Of 10,000 policies on one pod the last allows, and engines look up what they do with ten.
func TestManyPoliciesOfOnePod(t *testing.T) {
	shape := ""
	for _, n := range []int{10, 10_000} {
		s := newStage(t, Config{})
		objects := []source.Object{somePod("other", "client", "10.0.2.1", map[string]string{"app": "client"}),
			somePod("other", "stranger", "10.0.2.2", map[string]string{"app": "stranger"})}
		for i := range n - 1 {
			objects = append(objects, allows(fmt.Sprint("p", i), fmt.Sprint("a", i)))
		}
		s.put(append(objects, allows("z", "client"))...)
		s.want("10.0.2.1", "10.0.1.1", 80, model.VerdictAccept)
		s.want("10.0.2.2", "10.0.1.1", 80, model.VerdictDrop)
		now := s.sum.now
		got := fmt.Sprintf("%d rulesets, %d port entries, %d peer tables, %d peers, %d peer verdicts", len(now.Rulesets),
			len(now.Subjects[netip.MustParseAddr("10.0.1.1")].In[model.StageLast].Ports), len(now.Tables), len(now.Singles),
			len(now.Verdicts))
		if shape == "" {
			shape = got
		}
		if got != shape || len(s.Problems()) > 0 {
			t.Errorf("%d policies: %s, problems %v; want %s as with ten", n, got, s.Problems(), shape)
		}
	}
}

// A pod that a selector matches beside many others moves among nodes with its address: a peer throughout, but while no
// pod has the address. What changes doesn't grow with those others.
func TestPodMovesWithItsAddress(t *testing.T) {
	s := newStage(t, Config{})
	objects := []source.Object{allows("p", "client")}
	for i := range 5000 {
		p := somePod("other", fmt.Sprint("c", i), fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250),
			map[string]string{"app": "client", "own": fmt.Sprint(i)})
		p.Spec.NodeName = fmt.Sprint("n", 2+i%2)
		objects = append(objects, p)
	}
	s.put(objects...)
	moving := func(name, node string, age time.Duration) *corev1.Pod {
		p := somePod("other", name, "10.2.0.1", map[string]string{"app": "client"})
		p.Spec.NodeName, p.CreationTimestamp = node, metav1.NewTime(time.Unix(1e9, 0).Add(age))
		return p
	}
	first, second, third := moving("m-1", "n2", 0), moving("m-2", "n3", time.Minute), moving("m-3", "n1", time.Hour)
	ending := first.DeepCopy()
	ending.DeletionTimestamp = &metav1.Time{Time: time.Unix(2e9, 0)}
	step := func(what string, want model.Verdict, changes ...source.Change) {
		t.Helper()
		c := s.Apply(changes)
		s.sum.apply(seedDice{T: t}, c)
		s.want("10.2.0.1", "10.0.1.1", 80, want)
		if n := len(c.Put) + len(c.Del); n > 4 {
			t.Errorf("%s: %d parts change", what, n)
		}
	}
	put := func(p *corev1.Pod) source.Change { return source.Change{Key: source.KeyOf(p), Object: p} }
	gone := func(p *corev1.Pod) source.Change { return source.Change{Key: source.KeyOf(p)} }
	step("comes", model.VerdictAccept, put(first))
	step("ends", model.VerdictAccept, put(ending))
	step("is on another node", model.VerdictAccept, put(second))
	step("is gone from the first", model.VerdictAccept, gone(ending))
	step("comes to this node", model.VerdictAccept, put(third))
	step("is gone from the other", model.VerdictAccept, gone(second))
	step("is gone", model.VerdictDrop, gone(third))
	step("comes back", model.VerdictAccept, put(first))
	step("moves at once", model.VerdictAccept, gone(first), put(second))
}
