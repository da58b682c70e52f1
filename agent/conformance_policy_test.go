package agent

import (
	"context"
	"errors"
	"flag"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/policy/revoke"
	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/policy/ebpf"
	"fairlead.dev/fairlead/dataplane/policy/iptables"
	"fairlead.dev/fairlead/dataplane/policy/nftables"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

var (
	maxFacts = flag.Int("max-facts", mode.PolicyFacts, "facts in one transaction of a policy engine")
	matrix   = flag.Bool("matrix", false, "judge every mode beside every policy engine by every case of policies")
)

// engines are the policy engines to be judged beside each mode.
var engines = []*conformance.Engine{
	engine("nftables", nftables.New),
	engine("iptables-nft", func() (*iptables.Plane, error) { return iptables.NewVariant(iptables.NFT) }),
	engine("iptables-legacy", func() (*iptables.Plane, error) { return iptables.NewVariant(iptables.Legacy) }),
	engine("ebpf", func() (*ebpf.Plane, error) { // as it is once it no longer picks older connections up
		return ebpf.Open(ebpf.Options{Sizes: policy.Sizes{Flows: 1 << 12}, Installing: -1})
	}),
}

// fastPath counts what the engine ebpf evaluated: connections, and packets that it redirected.
type fastPath struct{ flows, redirected atomic.Uint64 }

// tallied returns e with runners that add to c when they are closed.
func tallied(c *fastPath, e *conformance.Engine) *conformance.Engine {
	return &conformance.Engine{Name: e.Name, Start: func() (conformance.Runner[model.PolicyPart], error) {
		r, err := e.Start()
		if to, is := r.(interface{ countIn(*fastPath) }); is && err == nil {
			to.countIn(c)
		}
		return r, err
	}}
}

// policyRunner is a policy engine as a conformance.Runner.
type policyRunner[K dataplane.Key] struct {
	reconcile.Runner[model.PolicyPart]
	open    func() (dataplane.Plane[model.PolicyPart, K, string], error)
	parts   map[model.PolicyPart]bool
	repairs uint64 // that there must be before the kernel is as told
	stop    context.CancelFunc
	ended   sync.WaitGroup
	mortal  *mortal[K]
	counts  *fastPath // nil: they are not read
}

func (r *policyRunner[K]) countIn(c *fastPath) { r.counts = c }

// mortal is a plane whose process may be killed between two transactions.
type mortal[K dataplane.Key] struct {
	dataplane.Plane[model.PolicyPart, K, string]
	left atomic.Int64 // transactions until it is dead; negative: it lives for ever
}

// Write implements dataplane.Plane.
func (m *mortal[K]) Write(ctx context.Context, put, del []dataplane.Fact[K, string]) error {
	if left := m.left.Load(); left == 0 {
		return errors.New("killed")
	} else if left > 0 {
		m.left.Add(-1)
	}
	return m.Plane.Write(ctx, put, del)
}

// Join implements dataplane.Joiner. Where the plane is none, it is given the model's parts.
func (m *mortal[K]) Join() func(put, del []model.PolicyPart) (puts, dels []model.PolicyPart) {
	if j, ok := m.Plane.(dataplane.Joiner[model.PolicyPart]); ok {
		return j.Join()
	}
	return func(put, del []model.PolicyPart) ([]model.PolicyPart, []model.PolicyPart) { return put, del }
}

// Watch implements dataplane.Watcher. Where the plane is none, nothing is ever sent.
func (m *mortal[K]) Watch(ctx context.Context) (<-chan struct{}, error) {
	if w, ok := m.Plane.(dataplane.Watcher); ok {
		return w.Watch(ctx)
	}
	none := make(chan struct{})
	context.AfterFunc(ctx, func() { close(none) })
	return none, nil
}

// Close closes the plane.
func (m *mortal[K]) Close() error { return m.Plane.(io.Closer).Close() }

// Kill implements conformance.Killer.
func (r *policyRunner[K]) Kill(after int) { r.mortal.left.Store(int64(after)) }

// engine returns an engine of a plane.
func engine[K dataplane.Key, P dataplane.Plane[model.PolicyPart, K, string]](
	name string, open func() (P, error)) *conformance.Engine {
	start := func() (conformance.Runner[model.PolicyPart], error) {
		plane, err := open()
		if err != nil {
			return nil, err
		}
		ctx, stop := context.WithCancel(context.Background())
		m := &mortal[K]{Plane: plane}
		m.left.Store(-1)
		var loop reconcile.Runner[model.PolicyPart] = reconcile.New[model.PolicyPart, K, string](m,
			reconcile.Options[model.PolicyPart]{Owner: model.PolicyOwnerOf, Label: model.PolicyLabelOf, Base: isPolicyNode,
				MaxFacts: *maxFacts, StandIns: model.FailClosed})
		if name != "ebpf" { // which has flows of its own, and cuts them
			if loop, err = revoke.Open(loop, slog.New(slog.DiscardHandler)); err != nil {
				stop()
				return nil, err
			}
		}
		r := &policyRunner[K]{mortal: m, Runner: loop,
			open:  func() (dataplane.Plane[model.PolicyPart, K, string], error) { return open() },
			parts: map[model.PolicyPart]bool{}, stop: stop}
		r.ended.Go(func() { r.Run(ctx) })
		return r, nil
	}
	return &conformance.Engine{Name: name, Start: start}
}

func isPolicyNode(p model.PolicyPart) bool { _, is := p.(*model.PolicyNode); return is }

// Change also keeps what is wanted, to remove some of it.
func (r *policyRunner[K]) Change(put, del []model.PolicyPart) {
	for _, p := range del {
		delete(r.parts, p)
	}
	for _, p := range put {
		r.parts[p] = true
	}
	r.Runner.Change(put, del)
}

// InjectFault implements conformance.FaultInjector: past the loop's knowledge it removes what pods and peers need.
// Where the kernel lets the engine's process alone change that, there is nothing to repair.
func (r *policyRunner[K]) InjectFault(ctx context.Context) error {
	plane, err := r.open()
	if err != nil {
		return err
	}
	parts := slices.Collect(maps.Keys(r.parts))
	if j, ok := plane.(dataplane.Joiner[model.PolicyPart]); ok {
		parts, _ = j.Join()(parts, nil)
	}
	repairs := r.Status().Repairs + 1
	if err := harm(ctx, plane, parts); err != nil {
		if errors.Is(err, unix.EPERM) {
			return nil
		}
		return err
	}
	r.repairs = repairs
	return nil
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
	if cuts, ok := r.Runner.(*revoke.Revoker); ok {
		return cuts.SyncCut(ctx)
	}
	return r.Runner.Sync(ctx)
}

// Close ends the loop and leaves the kernel as it is.
func (r *policyRunner[K]) Close() error {
	r.stop()
	r.ended.Wait()
	if p, is := any(r.mortal.Plane).(*ebpf.Plane); is && r.counts != nil {
		if n, err := p.PolicyPackets(); err == nil {
			r.counts.flows.Add(n[policy.FlowBegan.String()])
			r.counts.redirected.Add(n[policy.Redirected.String()])
		}
	}
	return r.Runner.Close()
}

// unpoliced is why policy engines don't see clients of Services as they are in some modes.
var unpoliced = map[string]string{
	"userspace": "the agent itself connects to backends: engines see the node in place of the client",
}

// pairs judges modes beside engines. Without the flag matrix each mode and each engine has its turn in every part: of
// as many parts as there are engines, each pair is given one, another for each mode.
func pairs(t *testing.T, judge func(t *testing.T, s conformance.Implementation, part, parts int)) {
	here(t, func(t *testing.T, s conformance.Implementation) {
		m, err := mode.Of(s.Name)
		if err != nil {
			t.Fatal(err)
		}
		turn := max(0, slices.Index(onHost, s.Name))
		s = implementation(m.With(mode.Options{Policies: true}))
		for i, e := range engines {
			counts := &fastPath{}
			s.Engine, s.UnpolicedServices = tallied(counts, e), unpoliced[s.Name]
			part, parts := (i+turn)%len(engines), len(engines)
			if *matrix {
				part, parts = 0, 1
			}
			t.Run(e.Name, func(t *testing.T) { judge(t, s, part, parts) })
			flows, redirected := counts.flows.Load(), counts.redirected.Load()
			switch both := s.Name == "ebpf" && e.Name == "ebpf"; {
			case both && flows > 1500 && redirected == 0: // a few cases or two worlds may have none that could be
				t.Errorf("policies were evaluated for %d connections, and no packet was redirected", flows)
			case !both && redirected > 0:
				t.Errorf("mode %s redirected %d packets", s.Name, redirected)
			}
		}
	})
}

func TestPolicyConformance(t *testing.T) { pairs(t, conformance.RunPart) }

// TestRandomPolicies has SCTP spoken by raw sockets, as TestRandomClusters.
func TestRandomPolicies(t *testing.T) {
	rawSCTP(t)
	pairs(t, func(t *testing.T, s conformance.Implementation, _, parts int) {
		conformance.Random(t, s, max(1, *clusters/20/parts))
	})
}

// TestPolicyFaults has SCTP spoken by raw sockets, as TestRandomClusters. The mode matters little to it. With
// -max-facts 8 it shows what mode.PolicyFacts is for.
func TestPolicyFaults(t *testing.T) {
	rawSCTP(t)
	pairs(t, func(t *testing.T, s conformance.Implementation, part, _ int) {
		if part == 0 {
			conformance.Faults(t, s, max(1, *clusters/10))
		}
	})
}
