// Package revoke cuts the connections that network policies no longer allow. Policy engines accept what is established,
// so that no connection ends because policies change elsewhere. Whenever a change is in the kernel a Revoker reads
// connection tracking, has verdict decide about each connection of a pod of this node, and sets a bit of the mark of
// those denied. While there are such, the engine cuts what has the bit (model.PolicyNode.CutMark). Deleting entries
// would not do: the kernel picks a connection up again by the packets of the end that may send.
//
// What was translated is evaluated as the engine saw it: from the client's own address to the backend.
package revoke

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// Revoker is a policy engine's loop that also cuts what its changes deny. The engine has a CutMark only while there is
// a connection to cut.
type Revoker struct {
	reconcile.Runner[model.PolicyPart] // the engine's
	marker                             *conntrack.Conn
	log                                *slog.Logger
	times                              times
	notified                           chan struct{} // holds one when there is a change
	begin                              sync.Once

	evaluating sync.Mutex // guards the evaluator; taken before mu
	evaluator  evaluator

	mu sync.Mutex
	changes
	node       *model.PolicyNode // as decided
	dispatched *model.PolicyNode // as the runner has it
	cutting    bool              // the runner has a node that says so
	foreign    bool              // another program uses the bit
	stay       func() bool       // see Stay; nil: they never do
	cuts       subsystem.Cuts
}

// times is when passes are made, as far as tests choose.
type times struct {
	burst time.Duration // how long passes may take at once
	calm  time.Duration // how long changes that only add wait for more
}

// changes is how far changes are.
type changes struct {
	waiting []model.Change[model.PolicyPart] // passed on, and not yet evaluated
	urgent  bool                             // one of them takes something away
	count   uint64                           // so far
	passed  uint64                           // of those, how many were evaluated
	passing chan struct{}                    // closed and made anew when passed grows
}

// Open returns a Revoker that stands before runner, for the calling thread's network namespace. It uses the bit of the
// connection mark that the first model.PolicyNode names, and cuts nothing where that is 0.
func Open(runner reconcile.Runner[model.PolicyPart], log *slog.Logger) (*Revoker, error) {
	m, err := conntrack.Open()
	if err != nil {
		return nil, fmt.Errorf("cut connections: %w", err)
	}
	r := &Revoker{Runner: runner, marker: m, log: log, times: times{burst: atOnce, calm: calm},
		notified: make(chan struct{}, 1), evaluator: newEvaluator(m),
		changes: changes{urgent: true, passing: make(chan struct{})}}
	r.evaluator.denied = func() { r.cut(true) }
	return r, nil
}

// Close implements reconcile.Runner. Connections that are cut stay so.
func (r *Revoker) Close() error { return errors.Join(r.Runner.Close(), r.marker.Close()) }

// Cuts returns what was done and found so far.
func (r *Revoker) Cuts() subsystem.Cuts {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cuts
}

// Policies calls f with the policies of now, which f may not change.
func (r *Revoker) Policies(f func(*model.Policies)) {
	r.evaluating.Lock()
	defer r.evaluating.Unlock()
	r.update()
	f(r.evaluator.now)
}

// update has the evaluator know all changes. The evaluator is held.
func (r *Revoker) update() {
	r.mu.Lock()
	waiting := r.waiting
	r.waiting = nil
	r.mu.Unlock()
	r.evaluator.apply(waiting...)
}

// Change dispatches a change. It returns at once but for the first time, when it reads connection tracking: connections
// that were being cut before a restart are cut without a gap.
func (r *Revoker) Change(put, del []model.PolicyPart) {
	r.mu.Lock()
	r.waiting = append(r.waiting, model.Change[model.PolicyPart]{Put: put, Del: del})
	r.urgent = r.urgent || len(del) > 0
	r.count++
	r.mu.Unlock()
	r.begin.Do(r.resume)
	r.mu.Lock()
	defer r.mu.Unlock()
	put, del = slices.Clone(put), slices.Clone(del)
	for i, p := range del {
		if n, ok := p.(*model.PolicyNode); ok && n == r.node {
			del[i] = r.dispatched
		}
	}
	for i, p := range put {
		if n, ok := p.(*model.PolicyNode); ok {
			r.node = n
			r.dispatched = r.marked(n)
			put[i] = r.dispatched
		}
	}
	r.Runner.Change(put, del)
	netlink.Signal(r.notified) // a signal that waits already will do
}

// resume finds out, by the first change, which bit to use and whether connections are being cut.
func (r *Revoker) resume() {
	r.evaluating.Lock()
	defer r.evaluating.Unlock()
	r.update()
	r.evaluator.bit = r.evaluator.now.Node.CutMark
	if r.evaluator.bit == 0 {
		return
	}
	found, err := r.evaluator.pass(false)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record(found, err, 0)
	r.cutting = found.marked > 0 && r.cuts.Problem == ""
}

// marked returns the node as the runner is to have it.
func (r *Revoker) marked(n *model.PolicyNode) *model.PolicyNode {
	with := *n
	if !r.cutting {
		with.CutMark = 0
	}
	return &with
}

// cut has the engine cut connections with the bit, or none.
func (r *Revoker) cut(cutting bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cutting == cutting || r.node == nil {
		return
	}
	before := r.dispatched
	r.cutting = cutting
	r.dispatched = r.marked(r.node)
	r.Runner.Change([]model.PolicyPart{r.dispatched}, []model.PolicyPart{before})
}

// SyncCut waits until all that was changed before the call is in the kernel, and what it denies is cut. The error says
// what is not in the kernel.
func (r *Revoker) SyncCut(ctx context.Context) error {
	r.mu.Lock()
	count := r.count
	r.mu.Unlock()
	for {
		r.mu.Lock()
		passed, passing := r.passed, r.passing
		r.mu.Unlock()
		if passed >= count {
			return r.Runner.Sync(ctx)
		}
		select {
		case <-passing:
		case <-ctx.Done():
			return fmt.Errorf("waiting for denied connections to be cut: %w", ctx.Err())
		}
	}
}

// When passes are made. Each takes some 9 ms for the kernel's table and about 2 µs for a connection.
const (
	again    = 10 * time.Millisecond  // after a change's pass: for what was let in while the rules changed
	calm     = 100 * time.Millisecond // after a change that only adds, as a new pod's: it ends no connection
	share    = 20                     // passes take one part in so many of the time
	atOnce   = time.Second            // and that much at once
	interval = time.Minute            // at least so often, for what others changed
	soon     = 10 * time.Second       // as often while connections are cut, or can't be
	early    = time.Second            // for the first time without a change, then twice that, and so on: running
	// connections appear (midstream, of dataplane/policy/nftables)
)

// Run runs the engine's loop and cuts connections until ctx ends.
func (r *Revoker) Run(ctx context.Context) error {
	var cutting sync.WaitGroup
	defer cutting.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	cutting.Go(func() { r.follow(ctx) })
	return r.Runner.Run(ctx)
}

// follow makes passes until ctx ends.
func (r *Revoker) follow(ctx context.Context) {
	pause, budget, last := early, r.times.burst, time.Now()
	for ctx.Err() == nil {
		due := time.NewTimer(pause)
		spent := time.Duration(0)
		select {
		case <-ctx.Done():
		case <-due.C:
			pause = min(2*pause, interval)
			spent = r.pass(ctx, true)
		case <-r.notified:
			r.gather(ctx)
			spent = r.twice(ctx)
		}
		due.Stop()
		if s := r.Cuts(); s.Marked > 0 || s.Problem != "" {
			pause = min(pause, soon)
		}
		budget = min(budget+time.Since(last)/share, r.times.burst) - spent
		if last = time.Now(); budget < 0 {
			sleep(ctx, -budget*share)
		}
	}
}

// gather waits a while for more changes, unless one takes something away, so that no pass competes with the attaching
// of pods that each change something.
func (r *Revoker) gather(ctx context.Context) {
	due := time.NewTimer(r.times.calm)
	defer due.Stop()
	for {
		r.mu.Lock()
		urgent := r.urgent
		r.mu.Unlock()
		if urgent {
			return
		}
		select {
		case <-r.notified:
		case <-due.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// twice makes the passes that a change needs, and returns how long they lasted.
func (r *Revoker) twice(ctx context.Context) time.Duration {
	r.mu.Lock()
	count := r.count
	r.urgent = false
	r.mu.Unlock()
	spent := r.pass(ctx, true)
	sleep(ctx, again)
	spent += r.pass(ctx, false)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.passed = count
	close(r.passing)
	r.passing = make(chan struct{})
	return spent
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// pass evaluates connections by what is in the kernel, all or those that are not being cut, and returns how long that
// lasted. While another program uses the bit it evaluates all, and sets none.
func (r *Revoker) pass(ctx context.Context, all bool) (elapsed time.Duration) {
	r.Runner.Sync(ctx) // what could not be written is in its status; what is denied is cut all the same
	r.evaluating.Lock()
	defer r.evaluating.Unlock()
	r.update()
	if r.evaluator.bit == 0 { // also before the first change
		return 0
	}
	r.mu.Lock()
	foreign, marked := r.foreign, r.cuts.Marked
	r.mu.Unlock()
	begin := time.Now()
	var found found
	var err error
	if all || foreign {
		found, err = r.evaluator.pass(!foreign)
	} else {
		found, err = r.evaluator.rest()
		found.marked += marked
	}
	if foreign && err == nil && found.foreign == 0 {
		found, err = r.evaluator.pass(true)
	}
	elapsed = time.Since(begin)
	r.mu.Lock()
	r.record(found, err, elapsed)
	cut, stay := r.cuts.Marked > 0 && !r.foreign, r.stay
	r.mu.Unlock()
	if cut || stay == nil || !stay() {
		r.cut(cut)
	}
	return elapsed
}

// Stay has the engine's hooks stay, once they are there, while a function reports true: whenever a hook of netfilter
// goes, the kernel drops all packets that wait in queues.
func (r *Revoker) Stay(stay func() bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stay = stay
}

// record records what a pass found. It is called under the mutex.
func (r *Revoker) record(f found, err error, elapsed time.Duration) {
	problem := ""
	switch r.foreign = f.foreign > 0; {
	case r.foreign:
		problem = fmt.Sprintf("bit %#x of the connection mark is in use by another program: %d connections that are not of "+
			"this node's pods have it, such as %s: set policy.cutMark to another bit", r.evaluator.bit, f.foreign, f.example)
	case err != nil:
		problem = err.Error()
	default:
		r.cuts.Marked = f.marked
	}
	r.cuts.Passes++
	r.cuts.LastPass = elapsed
	r.cuts.Cut += uint64(f.denied)
	r.cuts.Restored += uint64(f.restored)
	if problem != r.cuts.Problem && problem != "" {
		r.log.Warn("cut connections that policies no longer allow: not possible, retrying", "error", problem)
	}
	r.cuts.Problem = problem
	if f.denied > 0 && !r.foreign {
		r.log.Info("cut connections that policies no longer allow", "connections", f.denied, "first", f.example,
			"reason", f.reason)
	}
}
