package reconcile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Runner is a Loop of any plane for parts of type T: it hides the plane's keys and values.
type Runner[T any] interface {
	Change(put, del []T)
	Run(context.Context) error
	After(ch <-chan struct{})
	Ready() <-chan struct{}
	Serving() (serving bool, why string)
	Sync(context.Context) error
	SyncOwner(context.Context, model.Owner) error
	Status() Status
	Plan(context.Context) (Plan[T], error)
	Clean(context.Context) error
	Drain(context.Context) (connections int, err error)
	Close() error
}

// Clean removes everything that the plane ever wrote.
func (l *Loop[T, K, V]) Clean(ctx context.Context) error {
	c, ok := l.plane.(dataplane.Cleaner)
	if !ok {
		return fmt.Errorf("clean: %T leaves nothing to remove", l.plane)
	}
	return c.Clean(ctx)
}

// Drain stops accepting new connections where the plane can drain, and returns how many are still open; at zero, and
// where the plane can't drain, it is Clean.
func (l *Loop[T, K, V]) Drain(ctx context.Context) (connections int, err error) {
	if d, ok := l.plane.(dataplane.Drainer); ok {
		return d.Drain(ctx)
	}
	return 0, l.Clean(ctx)
}

// Close closes the plane, which keeps what it wrote. It comes after Run.
func (l *Loop[T, K, V]) Close() error {
	if c, ok := l.plane.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// waiter waits for the parts of an owner.
type waiter[T comparable] struct {
	requested uint64     // Changes and Checks before it
	parts     []T        // that were wanted then
	done      chan error // holds one: how it ended
}

// SyncOwner waits until the parts of an owner that are wanted now are in the kernel, whatever becomes of other owners'.
// Parts that are no longer wanted meanwhile are not waited for. Where the kernel refuses facts of such a part, it
// returns what; else it returns as Sync does. Before the first Change it waits for that one. Parts without an owner,
// which many share, are waited for by Sync alone.
func (l *Loop[T, K, V]) SyncOwner(ctx context.Context, o model.Owner) error {
	select {
	case <-l.first:
	case <-ctx.Done():
		return fmt.Errorf("waiting for %s to be in the kernel: %w", o, ctx.Err())
	case <-l.ended:
		return errEnded
	}
	w := &waiter[T]{done: make(chan error, 1)}
	l.mu.Lock()
	w.requested = l.requested
	for _, p := range l.owned.by(o, l.parts) {
		if l.parts[p] != going {
			w.parts = append(w.parts, p)
		}
	}
	none := len(w.parts) == 0
	if !none {
		l.waiters = append(l.waiters, w)
	}
	l.mu.Unlock()
	if none {
		return nil
	}
	defer l.leaveOwner(w)
	l.awake()
	select {
	case err := <-w.done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("waiting for %s to be in the kernel: %w", o, ctx.Err())
	case <-l.ended:
		return errEnded
	}
}

// leaveOwner forgets a waiter.
func (l *Loop[T, K, V]) leaveOwner(w *waiter[T]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.waiters, w); i >= 0 {
		l.waiters = slices.Delete(l.waiters, i, i+1)
	}
}

// answerOwners answers the waiters whose parts are in the kernel, or refused. settled: all was written that can be now,
// so that what else a refused part needs waits for that.
func (l *Loop[T, K, V]) answerOwners(settled bool) {
	if l.stale || !l.table.known {
		return
	}
	for _, w := range l.dueOwners() {
		if done, err := l.ownerDone(w.parts, settled); done {
			w.done <- err
			l.leaveOwner(w)
		}
	}
}

// failOwners answers the waiters that nothing can be read or written.
func (l *Loop[T, K, V]) failOwners(err error) {
	for _, w := range l.dueOwners() {
		w.done <- err
		l.leaveOwner(w)
	}
}

// dueOwners returns the waiters whose Changes the table has.
func (l *Loop[T, K, V]) dueOwners() (due []*waiter[T]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.waiters {
		if w.requested <= l.reached {
			w.parts = slices.DeleteFunc(w.parts, func(p T) bool {
				phase, wanted := l.parts[p]
				return !wanted || phase == going
			})
			due = append(due, w)
		}
	}
	return due
}

// ownerDone reports whether the facts of parts are true, or refused; then err says which.
func (l *Loop[T, K, V]) ownerDone(parts []T, settled bool) (done bool, err error) {
	waiting := false
	refused := map[string]error{}
	for _, p := range parts {
		for _, f := range l.render(l.wantedPart(p)) {
			wanted, so := l.table.wants(f)
			switch j := l.table.job(f.Key); {
			case !wanted:
				waiting = true
			case !so:
				refused[fmt.Sprint(f.Key)] = fmt.Errorf("%v is wanted with different values", f.Key)
			case j == nil:
			case j.why != nil && (j.why.certain || j.why.attempts >= doubts):
				refused[fmt.Sprint(f.Key)] = j.why.err
			default:
				waiting = true
			}
		}
	}
	if waiting && (len(refused) == 0 || !settled) {
		return false, nil
	}
	return true, joined(refused)
}

// joined returns the first of errors by their keys as one, nil for none.
func joined(errs map[string]error) error {
	var l []error
	for i, k := range slices.Sorted(maps.Keys(errs)) {
		if i == maxListed {
			l = append(l, fmt.Errorf("and %d more", len(errs)-maxListed))
			break
		}
		l = append(l, errs[k])
	}
	return errors.Join(l...)
}
