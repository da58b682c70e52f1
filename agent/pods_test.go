package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/network/attach"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/cni"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// heldSubsystem is a subsystem that is held back: a pod is known, and its parts are in the kernel, once the test lets
// go.
type heldSubsystem struct {
	subsystem.Subsystem
	known   atomic.Bool
	awaited chan model.Owner
	letGo   chan error
}

func hold() *heldSubsystem {
	return &heldSubsystem{awaited: make(chan model.Owner), letGo: make(chan error)}
}

func (s *heldSubsystem) Decide(subsystem.Update, *model.Delta) bool { return s.known.Load() }

func (s *heldSubsystem) SyncOwner(_ context.Context, o model.Owner) error {
	s.awaited <- o
	return <-s.letGo
}

func agentOf(l ...subsystem.Subsystem) *Agent {
	return &Agent{options: Options{Log: slog.New(slog.DiscardHandler)}, subsystems: l}
}

// ready is a subsystem that is as ready.
type ready struct {
	subsystem.Subsystem
	is subsystem.Readiness
}

func (r ready) Readiness() subsystem.Readiness { return r.is }

// TestStatusCodes has STATUS say whether what isn't ready may cut off pods that run.
func TestStatusCodes(t *testing.T) {
	serves := ready{is: subsystem.Readiness{Serving: true, Limited: true}}
	for name, c := range map[string]struct {
		second subsystem.Readiness
		code   uint
	}{
		"limited":       {subsystem.Readiness{Why: "refused", Limited: true}, cni.CodeLimited},
		"not limited":   {subsystem.Readiness{Why: "refused"}, cni.CodeUnavailable},
		"not tried yet": {subsystem.Readiness{Limited: true}, cni.CodeUnavailable},
		"a fresh start": {serves.is, cni.CodeUnavailable},
	} {
		if err := attach.NotReady(agentOf(serves, ready{is: c.second}).notReady()); cni.ErrorOf(err).Code != c.code {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestWaitForPodThatEnds has an ADD end while it waits for its Pod.
func TestWaitForPodThatEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := agentOf(hold())
		ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
		defer stop()
		err := attachedPods{a}.Attach(ctx, &model.Attachment{Pod: "shop/web"}, true)
		if err == nil || !strings.Contains(err.Error(), "waited 3s for pod shop/web") {
			t.Error(err)
		}
	})
}

// TestPodWaitsForWhatItNeeds has a pod attached before its Pod is known: it waits for that, for its policies and for
// its host ports.
func TestPodWaitsForWhatItNeeds(t *testing.T) {
	services, policies := hold(), hold()
	a := agentOf(services, policies)
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
	services.known.Store(true)
	policies.known.Store(true)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: corev1.PodSpec{NodeName: "a"}}
	changes := []source.Change{{Key: source.KeyOf(pod), Object: pod}}
	a.mu.Lock()
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
