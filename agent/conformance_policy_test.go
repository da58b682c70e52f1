package agent

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/policy/ebpf"
	"fairlead.dev/fairlead/dataplane/policy/nftables"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/sandbox/echo"
)

// engines are the policy engines to be judged beside each mode.
var engines = []*conformance.Engine{
	engine("nftables", nftables.New),
	engine("ebpf", func() (*ebpf.Plane, error) { return ebpf.Open(ebpf.Options{Sizes: bpf.PolicySizes{Flows: 1 << 12}}) }),
}

// policyRunner is a policy engine as a conformance.Runner.
type policyRunner[K dataplane.Key] struct {
	*reconcile.Loop[model.PolicyPart, K, string]
	open    func() (dataplane.Plane[model.PolicyPart, K, string], error)
	parts   map[model.PolicyPart]bool
	repairs uint64 // that there must be before the kernel is as told
	stop    context.CancelFunc
	ended   sync.WaitGroup
}

// engine returns an engine of a plane.
func engine[K dataplane.Key, P dataplane.Plane[model.PolicyPart, K, string]](
	name string, open func() (P, error)) *conformance.Engine {
	start := func() (conformance.Runner[model.PolicyPart], error) {
		plane, err := open()
		if err != nil {
			return nil, err
		}
		ctx, stop := context.WithCancel(context.Background())
		r := &policyRunner[K]{Loop: reconcile.New[model.PolicyPart, K, string](plane, reconcile.Options[model.PolicyPart]{}),
			open:  func() (dataplane.Plane[model.PolicyPart, K, string], error) { return open() },
			parts: map[model.PolicyPart]bool{}, stop: stop}
		r.ended.Go(func() { r.Run(ctx) })
		return r, nil
	}
	return &conformance.Engine{Name: name, Start: start}
}

// Change also keeps what is wanted, to remove some of it.
func (r *policyRunner[K]) Change(put, del []model.PolicyPart) {
	for _, p := range del {
		delete(r.parts, p)
	}
	for _, p := range put {
		r.parts[p] = true
	}
	r.Loop.Change(put, del)
}

// InjectFault implements conformance.FaultInjector: past the loop's knowledge it removes what pods and peers need.
func (r *policyRunner[K]) InjectFault(ctx context.Context) error {
	plane, err := r.open()
	if err != nil {
		return err
	}
	r.repairs = r.Status().Repairs + 1
	return harm(ctx, plane, slices.Collect(maps.Keys(r.parts)))
}

// Sync also waits for the repair of what InjectFault did.
func (r *policyRunner[K]) Sync(ctx context.Context) error {
	for r.Status().Repairs < r.repairs {
		select {
		case <-ctx.Done():
			return errors.New("drift was not repaired")
		case <-time.After(time.Millisecond):
		}
	}
	return r.Loop.Sync(ctx)
}

// Close ends the loop and leaves the kernel as it is.
func (r *policyRunner[K]) Close() error {
	r.stop()
	r.ended.Wait()
	return r.Loop.Close()
}

// unpoliced is why policy engines don't see clients of Services as they are in some modes: of what they send to any
// backend, and to themselves as the backend of a Service.
var unpoliced = map[string]struct{ services, own string }{
	"userspace": {services: "the agent itself connects to backends: policy engines see the node in place of the client"},
	"ebpf":      {own: "translated at connect(), what a pod sends to itself never leaves it"},
}

// pairs judges every mode beside every engine.
func pairs(t *testing.T, judge func(t *testing.T, s conformance.Implementation)) {
	here(t, func(t *testing.T, s conformance.Implementation) {
		for _, e := range engines {
			s.Engine, s.UnpolicedServices, s.UnpolicedOwn = e, unpoliced[s.Name].services, unpoliced[s.Name].own
			t.Run(e.Name, func(t *testing.T) { judge(t, s) })
		}
	})
}

func TestPolicyConformance(t *testing.T) { pairs(t, conformance.Run) }

// TestRandomPolicies has SCTP spoken by raw sockets, as TestRandomClusters.
func TestRandomPolicies(t *testing.T) {
	t.Setenv(echo.RawSCTP, "1")
	pairs(t, func(t *testing.T, s conformance.Implementation) { conformance.Random(t, s, *clusters/10) })
}
