package testbed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/policy/revoke"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/source"
)

// The ends of the connections that network policies decide about: the server is a pod of the node, the client one of
// another node.
var (
	ServerPod = podAddr
	ClientPod = farAddr
)

// PodDevice is the node's end of its pod's veth.
const PodDevice = "pod"

// AddPodPair makes the namespaces of an arm and adds them to the testbed: the node has the pod ServerPod, and the far
// end is ClientPod.
func (b *Testbed) AddPodPair(ctx context.Context, arm string, params result.Params) (*Pair, error) {
	return b.addPair(ctx, arm, params, true)
}

// NewPodPair makes the namespaces of a pair whose node has the pod ServerPod, as part of no testbed.
func NewPodPair(ctx context.Context, name string) (*Pair, error) {
	p, err := NewPair(ctx, name)
	if err != nil {
		return nil, err
	}
	if err := p.addPod(ctx); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// Pod returns the namespace of the node's pod.
func (p *Pair) Pod() *netns.Namespace { return p.pod }

// ServePod starts a server in the node's pod, on the load's processor.
func (b *Testbed) ServePod(p *Pair, port uint16, sizes load.Sizes) error {
	return p.Serve(b.ServerThread(p.pod), netip.AddrPortFrom(netip.IPv4Unspecified(), port), sizes, 1)
}

// FarThread returns where a client in a pair's far end runs: on the load's processor.
func (b *Testbed) FarThread(p *Pair) load.Thread { return b.ServerThread(p.Far) }

// FarLoop is ClosedLoop from a pair's far end.
func (b *Testbed) FarLoop(op load.Op, warm, block time.Duration) Loader {
	return func(ctx context.Context, p *Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		c := b.Client(p, to, warm)
		c.Thread = b.FarThread(p)
		s, err := c.Run(ctx, op, block)
		return s, nil, err
	}
}

// FindEngines tries the policy engines, or these of them, in a namespace of their own, and returns those that this
// machine can run.
func (b *Testbed) FindEngines(ctx context.Context, these ...string) (can []mode.Engine, cannot []Unable, err error) {
	ns, err := NewNamespace(b.Name + "-try-policies")
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, RemoveNamespace(ns)) }()
	for _, e := range mode.Engines() {
		if len(these) > 0 && !slices.Contains(these, e.Name) {
			continue
		}
		switch err := ns.Do(func() error { return e.Probe(ctx) }); {
		case ctx.Err() != nil:
			return nil, nil, ctx.Err()
		case err != nil:
			cannot = append(cannot, Unable{Name: e.Name, Why: Brief(err.Error())})
		default:
			can = append(can, e)
		}
	}
	return can, cannot, nil
}

// Enforcer is a policy engine at work on a node.
type Enforcer struct {
	*mode.PolicyPlane
	Revoker *revoke.Revoker // cuts what changes deny; nil for an engine that cuts by itself
	end     func() error
}

// Enforce opens a policy engine in a namespace and runs its loop, as an agent does, until the testbed is closed or Stop
// is called.
func (b *Testbed) Enforce(ns *netns.Namespace, e mode.Engine) (*Enforcer, error) {
	r := &Enforcer{}
	err := ns.Do(func() (err error) {
		log := slog.New(slog.DiscardHandler)
		if r.PolicyPlane, err = e.Open(log); err != nil || !e.Marked {
			return err
		}
		r.Revoker, err = revoke.Open(r.Runner, log)
		r.Runner = r.Revoker
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("in %s: %w", ns.Name, err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.end = func() error {
		stop()
		err := errors.Join(<-ended, ns.Do(func() error { return r.Clean(context.Background()) }), r.Close())
		*r = Enforcer{end: func() error { return nil }} // the testbed holds it; policies take memory, and collections time
		return err
	}
	b.Defer(r.Stop)
	return r, nil
}

// Stop ends the loop and removes what the engine wrote.
func (r *Enforcer) Stop() error { return r.end() }

// Apply passes a change on and returns how long after that it was in the kernel.
func (r *Enforcer) Apply(ctx context.Context, c model.Change[model.PolicyPart]) (time.Duration, error) {
	begun := time.Now()
	r.Change(c.Put, c.Del)
	err := r.Sync(ctx)
	elapsed := time.Since(begun)
	if s := r.Status(); err == nil && (s.Error != "" || len(s.Failing) > 0) {
		err = fmt.Errorf("%s: %s %v", r.Name, s.Error, s.Failing)
	}
	return elapsed, err
}

// Cut is Apply until what the change denies is cut too.
func (r *Enforcer) Cut(ctx context.Context, c model.Change[model.PolicyPart]) (time.Duration, error) {
	begun := time.Now()
	r.Change(c.Put, c.Del)
	err := r.Revoker.SyncCut(ctx)
	return time.Since(begun), err
}

// cutMark is the bit of marks of connections that are cut.
const cutMark = 1 << 31

// DecidePolicies returns a resolver that knows objects, and what their policies come to on a node.
func DecidePolicies(node string, objects []source.Object) (*policy.Resolver, model.Change[model.PolicyPart], error) {
	r := policy.New(policy.Config{Node: node, Addresses: []netip.Addr{NodeAddr}, CutMark: cutMark})
	c := r.Apply(Put(objects...))
	if p := r.Problems(); len(p) > 0 {
		return nil, c, fmt.Errorf("decide policies: %s", p[0])
	}
	return r, c, nil
}
