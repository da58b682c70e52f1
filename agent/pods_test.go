package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"runtime"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// heldRunner is a loop that is held back: an owner's parts are in the kernel once the test lets go.
type heldRunner[T any] struct {
	reconcile.Runner[T]
	awaited chan model.Owner
	letGo   chan error
}

func hold[T any]() *heldRunner[T] {
	return &heldRunner[T]{awaited: make(chan model.Owner), letGo: make(chan error)}
}

func (r *heldRunner[T]) SyncOwner(_ context.Context, o model.Owner) error {
	r.awaited <- o
	return <-r.letGo
}

func (r *heldRunner[T]) Status() reconcile.Status { return reconcile.Status{FirstSync: time.Now()} }

// TestPodWaitsForWhatItNeeds has a pod attached before its Pod is known: it waits for that, for its policies and for
// its host ports.
func TestPodWaitsForWhatItNeeds(t *testing.T) {
	policies, services := hold[model.PolicyPart](), hold[model.ServicePart]()
	a := &Agent{services: &Services{planes: []*mode.Plane{{Runner: services}}},
		options:  Options{Log: slog.New(slog.DiscardHandler)},
		resolver: resolve.New(resolve.Config{Node: "a", Objects: resolve.Objects{HostPorts: true}}),
		subsystems: subsystems{policies: &Policies{plane: &mode.PolicyPlane{Runner: policies},
			resolver: policy.New(policy.Config{Node: "a"})}}}
	attached := make(chan error, 1)
	go func() {
		attached <- attachedPods{a}.Attach(t.Context(), &model.Attachment{Pod: "shop/web",
			Addresses: []netip.Addr{netip.MustParseAddr("10.244.1.2")}}, true)
	}()
	waits := func(what string, awaited <-chan model.Owner) {
		t.Helper()
		select {
		case o := <-awaited:
			if o != (model.Owner{Kind: model.KindPod, Namespace: "shop", Name: "web"}) {
				t.Errorf("%s: %v", what, o)
			}
		case err := <-attached:
			t.Fatalf("attached without its %s: %v", what, err)
		}
	}
	for waiting := false; !waiting; runtime.Gosched() {
		a.mu.Lock()
		waiting = len(a.batches.pods) == 1
		a.mu.Unlock()
		select {
		case <-policies.awaited:
			t.Fatal("its Pod was not waited for")
		default:
		}
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: corev1.PodSpec{NodeName: "a"}}
	changes := []source.Change{{Key: source.KeyOf(pod), Object: pod}}
	a.mu.Lock()
	a.policies.resolver.Apply(changes)
	attachedPods{a}.seen(changes)
	a.mu.Unlock()
	waits("policies", policies.awaited)
	policies.letGo <- nil
	waits("host ports", services.awaited)
	services.letGo <- nil
	if err := <-attached; err != nil {
		t.Error(err)
	}
}
