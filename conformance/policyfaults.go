package conformance

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// Killer is a policy engine's Runner that can be killed in the middle of a change.
type Killer interface {
	// Kill has the runner write so many more transactions and then none, as if its process were killed.
	Kill(after int)
}

// forbiddenProbes is how many connections are tried all the time.
const forbiddenProbes = 40

// forbiddenWait is how long each of them waits for an answer.
const forbiddenWait = 100 * time.Millisecond

// Faults changes the policies of random worlds and kills the policy engines of both nodes between two transactions of
// each change, or has them not hear of it, and starts them anew. Connections that a pod's policies forbid before and
// after a change are tried all the while: none must ever be answered.
func Faults(t *testing.T, s Implementation, worlds int) {
	seed := seedOf(t)
	log, wrong := faulted(t.Context(), s, seed, worlds)
	t.Logf("%s=%d: %s", SeedVariable, seed, log)
	if wrong != "" {
		t.Error(wrong)
	}
}

// faulted does it and returns the counts and what went wrong.
func faulted(ctx context.Context, s Implementation, seed uint64, worlds int) (log, wrong string) {
	w, err := newTestbed(ctx, s, Config{})
	if err != nil {
		return "", err.Error()
	}
	defer w.close()
	f := faultWalk{walk: walk{generator: newGenerator(seed), w: w, path: []*scene{{}}}}
	f.origin()
	if err := w.sync(ctx); err != nil {
		return "", err.Error()
	}
	for range worlds {
		if wrong = f.step(ctx); wrong != "" {
			break
		}
	}
	return fmt.Sprintf("%d worlds, %d connections forbidden before and after, tried %d times, %d nodes killed in a change",
		worlds, f.forbidden, f.tries, f.killed), wrong
}

// faultWalk is a walk from world to world under faults.
type faultWalk struct {
	walk
	forbidden, killed int
	tries             int64
}

// attempt is a connection that is tried again and again.
type attempt struct {
	line     *packetLine
	drops    map[string]string // by node: which end's policies drop it there
	tries    atomic.Int64
	answered atomic.Int64 // how often
}

// step goes to the next world while connections are tried.
func (f *faultWalk) step(ctx context.Context) string {
	before := f.path[len(f.path)-1]
	here := *before
	f.isolate(&here.isolation)
	f.path = append(f.path, &here)
	var attempts []*attempt
	for len(attempts) < forbiddenProbes {
		a := &attempt{line: f.generator.direct()}
		if a.drops = f.w.drops(a.line); len(a.drops) > 0 {
			attempts = append(attempts, a)
		} else if f.chance(1) {
			break // worlds may forbid nothing
		}
	}
	stop := f.w.try(ctx, attempts)
	err := f.change(ctx, before, &here)
	stop()
	if err != nil {
		return err.Error()
	}
	for _, a := range attempts {
		f.tries += a.tries.Load()
		why := a.still(f.w.drops(a.line))
		if why == "" {
			continue
		}
		if f.forbidden++; a.answered.Load() > 0 {
			return fmt.Sprintf("%s -> %s/%s was answered %d times in a change, though before and after %s\n%s",
				a.line.Clients[0].Name, a.line.To, a.line.Proto, a.answered.Load(), why, formatChanges(&here, before))
		}
	}
	return ""
}

// still returns which policies drop the connection before and after, or "".
func (a *attempt) still(now map[string]string) string {
	for node, end := range a.drops {
		if now[node] == end {
			return fmt.Sprintf("the %s drops it on node %s", end, node)
		}
	}
	return ""
}

// drops returns by node which end's policies drop the packet there.
func (w *testbed) drops(l *packetLine) map[string]string {
	m := map[string]string{}
	p := verdict.Packet{Src: netip.AddrPortFrom(l.Clients[0].Addr, 40000), Dst: l.To, Protocol: l.Proto}
	if p.Src.Addr() == p.Dst.Addr() {
		return m
	}
	for _, n := range nodes {
		o := verdict.Policy(w.agents[n].services.Policies, p)
		if len(o.Steps) > 0 && o.Verdict == model.VerdictDrop {
			m[n] = o.Steps[len(o.Steps)-1].Direction.String() + " of " + o.Steps[len(o.Steps)-1].Subject.Pod
		}
	}
	return m
}

// try has all connections tried again and again until stop, which waits until each was tried once more.
func (w *testbed) try(ctx context.Context, attempts []*attempt) (stop func()) {
	var wg sync.WaitGroup
	done := make(chan struct{})
	for _, a := range attempts {
		wg.Go(func() {
			for last := false; !last; a.tries.Add(1) {
				select {
				case <-done:
					last = true
				default:
				}
				p := probe{w: w, l: a.line, c: a.line.Clients[0]}
				if _, err := p.request(ctx, forbiddenWait); err == nil {
					a.answered.Add(1)
				}
			}
		})
	}
	return func() { close(done); wg.Wait() }
}

// change makes the change known, but the engine of each node is killed in the middle of it, or has never heard of it.
// Then agents start anew.
func (f *faultWalk) change(ctx context.Context, before, here *scene) error {
	changes := here.changesFrom(before)
	for _, n := range nodes {
		a := f.w.agents[n]
		if f.chance(20) { // the API is away
			continue
		}
		k, ok := a.policies.runner.(Killer)
		if !ok {
			return fmt.Errorf("the Runner of policy engine %s is no Killer", f.w.implementation.Engine.Name)
		}
		k.Kill(f.IntN(6))
		a.change(changes)
		ctx, cancel := context.WithTimeout(ctx, f.w.implementation.within(syncTime))
		if err := a.policies.runner.Sync(ctx); err != nil {
			f.killed++
		}
		cancel()
	}
	if err := f.w.change(changes, nodes...); err != nil {
		return err
	}
	for end := time.Now().Add(f.w.implementation.within(repairTime)); ; {
		if err := f.w.sync(ctx); err == nil || time.Now().After(end) {
			return err
		}
	}
}
