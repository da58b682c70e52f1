package kube_test

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/sandbox/apiserver"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// needsNodes reports whether an object is a Service with external IPs.
func needsNodes(o source.Object) bool {
	s, ok := o.(*corev1.Service)
	return ok && len(s.Spec.ExternalIPs) > 0
}

func external(name string) *corev1.Service {
	s := service(name, 80)
	s.Spec.ExternalIPs = []string{"192.0.2.1"}
	return s
}

// requestedNodes reports whether a request was for all Nodes.
func (w *fixture) requestedNodes() bool {
	return slices.ContainsFunc(w.requestLog(), func(r string) bool { return strings.HasPrefix(r, "/api/v1/nodes   ") })
}

// All Nodes are read from the first object on that needs them, and it waits for them.
func TestNodesAreReadOnceNeeded(t *testing.T) {
	w := newFixture(t)
	s := apiserver.New(service("web", 80), node("a"), node("b"))
	w.serve(s)
	w.follow(kube.Options{NeedsNodes: needsNodes})
	w.holds("a", "web:80")
	if w.requestedNodes() {
		t.Fatal("all Nodes were read before an object needed them")
	}
	go w.checkOrder(t)
	s.Apply(put(external("web")))
	w.holds("a", "b", "web:80")
	s.Apply(put(node("c")), del(external("web")))
	w.holds("a", "b", "c")
	if n := w.notified()[source.KeyOf(node("a"))]; n != 1 {
		t.Errorf("this node's Node was told %d times", n)
	}
	s.Apply(del(node("b")))
	w.holds("a", "c")
	w.reason("")

	t.Run("of no such name", func(t *testing.T) {
		w := newFixture(t)
		w.serve(apiserver.New(node("b"), service("web", 80)))
		w.follow(kube.Options{NeedsNodes: needsNodes})
		w.holds("b", "web:80")
	})
	t.Run("at the start", func(t *testing.T) {
		w := newFixture(t)
		w.serve(apiserver.New(external("web"), node("a"), node("b")))
		go w.checkOrder(t)
		w.follow(kube.Options{NeedsNodes: needsNodes})
		w.holds("a", "b", "web:80")
	})
}

// checkOrder fails where the Service with external IPs is to be decided before the Node b.
func (w *fixture) checkOrder(t *testing.T) {
	w.until("the Service has external IPs", func() bool {
		o := w.objects[source.KeyOf(external("web"))]
		if o == nil || !needsNodes(o) || !w.begun {
			return false
		}
		if w.objects[source.KeyOf(node("b"))] == nil {
			t.Error("the Service was told before the Nodes")
		}
		return true
	})
}

// Pods without an address are not read, nor those that have ended, which are told as gone when they end.
func TestOnlyPodsThatCountAreRead(t *testing.T) {
	pod := func(name, node, ip string, phase corev1.PodPhase) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
		p.Spec.NodeName, p.Status.Phase, p.Status.PodIP = node, phase, ip
		return p
	}
	s := apiserver.New(node("a"), pod("unbound", "", "", corev1.PodPending), pod("bound", "a", "", corev1.PodPending),
		pod("remote", "b", "", corev1.PodPending), pod("up", "b", "10.0.0.1", corev1.PodRunning),
		pod("done", "a", "10.0.0.2", corev1.PodSucceeded), pod("failed", "a", "10.0.0.3", corev1.PodFailed))
	follow := func(o kube.Options) *fixture {
		w := newFixture(t)
		w.serve(s)
		w.follow(o)
		return w
	}
	policies, attaching := follow(kube.Options{Kinds: policyKinds}), follow(kube.Options{Kinds: policyKinds, Pods: true})
	ports := follow(kube.Options{Pods: true})
	policies.holds("a", "up")
	attaching.holds("a", "bound", "remote", "up")
	ports.holds("a", "bound")
	s.Apply(put(pod("up", "b", "10.0.0.1", corev1.PodFailed)), put(pod("bound", "a", "10.0.0.4", corev1.PodRunning)))
	policies.holds("a", "bound")
	attaching.holds("a", "bound", "remote")
	s.Apply(put(pod("bound", "a", "10.0.0.4", corev1.PodSucceeded)))
	policies.holds("a")
	attaching.holds("a", "remote")
	ports.holds("a")
}

// A permission that goes while all Nodes are asked for holds nothing up for good.
func TestNodesMayNotBeRead(t *testing.T) {
	w := newFixture(t)
	s := apiserver.New(service("web", 80), node("a"), node("b"))
	w.serve(s)
	w.follow(kube.Options{NeedsNodes: needsNodes})
	w.holds("a", "web:80")
	w.ill(func(rw http.ResponseWriter, r *http.Request) bool { return refuse(rw, r, "nodes") })
	began := time.Now()
	s.Apply(put(external("db")))
	w.holds("a", "db:80", "web:80")
	if elapsed := time.Since(began); elapsed > 2*kube.Patience {
		t.Errorf("it took %s", elapsed)
	}
	w.reason(kube.Forbidden)
}
