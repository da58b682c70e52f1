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
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// Marker reads connections and sets bits of their marks, as conntrack.Marker does.
type Marker interface {
	Remark(mask uint32, f func(conntrack.Tracked) uint32) (changed int, err error)
}

// Status is what a Revoker has done and found.
type Status struct {
	Cut      uint64        `json:"cut"`      // connections that were denied after they had begun
	Restored uint64        `json:"restored"` // of those, how many were allowed again
	Marked   int           `json:"marked"`   // connections that are being cut
	Passes   uint64        `json:"passes"`   // how often connection tracking was read
	LastPass time.Duration `json:"lastPassNanoseconds"`
	Problem  string        `json:"problem"` // why denied connections are not cut; "": they are
}

// Revoker hands changes on to a policy engine's loop and cuts what they deny.
type Revoker struct {
	runner    reconcile.Runner[model.PolicyPart]
	log       *slog.Logger
	evaluator evaluator
	burst     time.Duration // how long passes may take at once
	notified  chan struct{} // holds one when there is a change

	mu      sync.Mutex
	begun   bool
	waiting []model.Change[model.PolicyPart] // handed on, and not yet evaluated
	node    *model.PolicyNode                // as decided
	handed  *model.PolicyNode                // as the runner has it
	cutting bool                             // the runner has a node that says so
	foreign bool                             // another program uses the bit
	changes uint64                           // so far
	passed  uint64                           // of those, how many were evaluated
	passing chan struct{}                    // closed and made anew when passed grows
	status  Status
}

// New returns a Revoker that stands before runner and uses one bit of the connection mark.
func New(runner reconcile.Runner[model.PolicyPart], marker Marker, bit uint32, log *slog.Logger) (*Revoker, error) {
	if bit == 0 || bit&(bit-1) != 0 {
		return nil, fmt.Errorf("revoke: invalid connection mark %#x: use one bit, such as 0x80000000", bit)
	}
	r := &Revoker{runner: runner, log: log, evaluator: newEvaluator(marker, bit), burst: atOnce,
		notified: make(chan struct{}, 1), passing: make(chan struct{})}
	r.evaluator.denied = func() { r.cut(true) }
	return r, nil
}

// Clear takes a bit from all connections: none is cut by it any more.
func Clear(marker Marker, bit uint32) error {
	_, err := marker.Remark(bit, func(conntrack.Tracked) uint32 { return 0 })
	return err
}

// Status returns what was done and found so far.
func (r *Revoker) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status
}

// Change hands a change on. It returns at once but for the first time, when it reads connection tracking: connections
// that were being cut before a restart are cut without a gap.
func (r *Revoker) Change(put, del []model.PolicyPart) {
	c := model.Change[model.PolicyPart]{Put: put, Del: del}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.begun {
		r.waiting = append(r.waiting, c)
	} else {
		r.begun = true
		r.evaluator.apply(c)
		found, err := r.evaluator.pass(false)
		r.record(found, err, 0)
		r.cutting = found.marked > 0 && r.status.Problem == ""
	}
	r.changes++
	put, del = slices.Clone(put), slices.Clone(del)
	for i, p := range del {
		if n, ok := p.(*model.PolicyNode); ok && n == r.node {
			del[i] = r.handed
		}
	}
	for i, p := range put {
		if n, ok := p.(*model.PolicyNode); ok {
			r.node = n
			r.handed = r.marked(n)
			put[i] = r.handed
		}
	}
	r.runner.Change(put, del)
	select {
	case r.notified <- struct{}{}:
	default: // it will be seen with what waits already
	}
}

// marked returns the node as the runner is to have it.
func (r *Revoker) marked(n *model.PolicyNode) *model.PolicyNode {
	with := *n
	if with.CutMark = 0; r.cutting {
		with.CutMark = r.evaluator.bit
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
	before := r.handed
	r.cutting = cutting
	r.handed = r.marked(r.node)
	r.runner.Change([]model.PolicyPart{r.handed}, []model.PolicyPart{before})
}

// Sync waits until all that was changed before the call is in the kernel, and what it denies is cut. The error says
// what is not in the kernel.
func (r *Revoker) Sync(ctx context.Context) error {
	r.mu.Lock()
	changes := r.changes
	r.mu.Unlock()
	for {
		r.mu.Lock()
		passed, passing := r.passed, r.passing
		r.mu.Unlock()
		if passed >= changes {
			return r.runner.Sync(ctx)
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
	again    = 20 * time.Millisecond // after a change's pass: for what was let in while the rules changed
	share    = 20                    // passes take one part in so many of the time
	atOnce   = time.Second           // and that much at once
	interval = time.Minute           // at least so often, for what others changed
	soon     = 10 * time.Second      // as often while connections are cut, or can't be
	early    = time.Second           // for the first time without a change, then twice that, and so on: running
	// connections appear (midstream, of dataplane/policy/nftables)
)

// Run cuts connections until ctx ends.
func (r *Revoker) Run(ctx context.Context) {
	pause, budget, last := early, r.burst, time.Now()
	for ctx.Err() == nil {
		due := time.NewTimer(pause)
		spent := time.Duration(0)
		select {
		case <-ctx.Done():
		case <-due.C:
			pause = min(2*pause, interval)
			spent, _ = r.pass(ctx)
		case <-r.notified:
			spent = r.twice(ctx)
		}
		due.Stop()
		if s := r.Status(); s.Marked > 0 || s.Problem != "" {
			pause = min(pause, soon)
		}
		budget = min(budget+time.Since(last)/share, r.burst) - spent
		if last = time.Now(); budget < 0 {
			sleep(ctx, -budget*share)
		}
	}
}

// twice makes the passes that a change needs, and returns how long they lasted.
func (r *Revoker) twice(ctx context.Context) time.Duration {
	first, changes := r.pass(ctx)
	sleep(ctx, again)
	second, _ := r.pass(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.passed = changes
	close(r.passing)
	r.passing = make(chan struct{})
	return first + second
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// pass evaluates all connections by what is in the kernel, and returns how long that lasted and how many changes it has
// seen. While another program uses the bit it sets none.
func (r *Revoker) pass(ctx context.Context) (elapsed time.Duration, changes uint64) {
	r.mu.Lock()
	begun, waiting, foreign := r.begun, r.waiting, r.foreign
	changes, r.waiting = r.changes, nil
	r.mu.Unlock()
	if !begun {
		return 0, 0
	}
	r.runner.Sync(ctx) // what could not be written is in its status; what is denied is cut all the same
	begin := time.Now()
	r.evaluator.apply(waiting...)
	found, err := r.evaluator.pass(!foreign)
	if foreign && err == nil && found.foreign == 0 {
		found, err = r.evaluator.pass(true)
	}
	elapsed = time.Since(begin)
	r.mu.Lock()
	r.record(found, err, elapsed)
	cut := r.status.Marked > 0 && !r.foreign
	r.mu.Unlock()
	r.cut(cut)
	return elapsed, changes
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
		r.status.Marked = f.marked
	}
	r.status.Passes++
	r.status.LastPass = elapsed
	r.status.Cut += uint64(f.denied)
	r.status.Restored += uint64(f.restored)
	if problem != r.status.Problem && problem != "" {
		r.log.Warn("cut connections that policies no longer allow: not possible, retrying", "error", problem)
	}
	r.status.Problem = problem
	if f.denied > 0 && !r.foreign {
		r.log.Info("cut connections that policies no longer allow", "connections", f.denied, "first", f.example,
			"reason", f.reason)
	}
}
