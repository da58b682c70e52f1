package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/dataplane/flows"
	plane "fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// Planes are the data planes of a mode in one network namespace and, behind them, the cutting of stale flows where they
// leave any.
type Planes struct {
	planes []*mode.Plane // each is the fallback of the next
	stale  *flows.Plane
	flows  *mode.Share
	after  reconcile.Runner[model.ServicePart] // nil where the mode leaves no flows

	stop        context.CancelFunc
	ended       sync.WaitGroup
	notified    chan struct{} // holds one when there is something to dispatch
	mu          sync.Mutex
	settled     *sync.Cond // signals that dispatching may have changed
	dispatching bool       // changes are on their way to after
	waiting     []change   // what the data plane was told of and after not yet, in its order
}

// change is what one Change told.
type change struct{ put, del []model.ServicePart }

// OpenPlanes opens the data planes of a mode in the calling thread's network namespace. They begin with the first
// Change.
func OpenPlanes(m mode.Mode, log *slog.Logger) (s *Planes, err error) {
	ctx, stop := context.WithCancel(context.Background())
	s = &Planes{stop: stop, notified: make(chan struct{}, 1), flows: m.TrackedShare()}
	s.settled = sync.NewCond(&s.mu)
	if s.planes, err = m.Open(log); err != nil {
		return nil, errors.Join(fmt.Errorf("mode %s: %w", m.Name, err), s.Close())
	}
	if m.Tracked {
		if s.stale, err = flows.New(); err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.after = reconcile.New(s.stale, reconcile.Options[model.ServicePart]{Owner: model.OwnerOf, Label: model.LabelOf,
			Log: log.With("plane", "flows")})
		s.ended.Go(func() { s.after.Run(ctx) })
		s.ended.Go(func() { s.follow(ctx) })
	}
	for i, p := range s.planes {
		if i+1 < len(s.planes) { // it may hold another mode's frontends, which the next is to serve
			p.After(s.planes[i+1].Ready())
		}
		s.ended.Go(func() { p.Run(ctx) })
	}
	return s, nil
}

// Change reports what is wanted, as a change. It returns at once.
func (s *Planes) Change(put, del []model.ServicePart) {
	for _, l := range s.planes {
		l.Change(put, del)
	}
	if s.after == nil {
		return
	}
	put, del = s.flows.Of(put, del)
	s.mu.Lock()
	s.waiting = append(s.waiting, change{put, del})
	s.dispatching = true
	s.mu.Unlock()
	select {
	case s.notified <- struct{}{}:
	default: // it will be seen with what waits already
	}
}

// follow notifies after of changes once the data plane has them. To look for stale flows the kernel walks all its
// flows: follow leaves as long as that took until the next time, and tells of what changed meanwhile together.
func (s *Planes) follow(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.notified:
		}
		s.mu.Lock()
		changes := s.waiting
		s.waiting = nil
		s.mu.Unlock()
		s.syncPlanes(ctx) // what could not be written is in the loop's status; the rest is
		writes := s.after.Status().Writes
		for _, c := range changes {
			s.after.Change(c.put, c.del)
		}
		s.after.Sync(ctx) // likewise
		s.mu.Lock()
		s.dispatching = len(s.waiting) > 0
		s.settled.Broadcast()
		s.mu.Unlock()
		if checked := s.after.Status(); checked.Writes > writes {
			select {
			case <-ctx.Done():
			case <-time.After(checked.LastWrite):
			}
		}
	}
}

// Sync waits until the kernel has what was changed before the call and no flow is stale. The error says what it has
// not.
func (s *Planes) Sync(ctx context.Context) error {
	err := s.syncPlanes(ctx)
	if s.after == nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { s.mu.Lock(); s.settled.Broadcast(); s.mu.Unlock() })
	defer stop()
	s.mu.Lock()
	for s.dispatching && ctx.Err() == nil {
		s.settled.Wait()
	}
	s.mu.Unlock()
	return errors.Join(err, s.after.Sync(ctx))
}

// syncPlanes waits until the planes have what was changed before the call. Those behind one that serves nothing yet are
// not waited for: they wait for it themselves.
func (s *Planes) syncPlanes(ctx context.Context) error {
	var errs []error
	for _, l := range slices.Backward(s.planes) {
		errs = append(errs, l.Sync(ctx))
		if l.Status().FirstSync.IsZero() {
			break
		}
	}
	return errors.Join(errs...)
}

// Serving reports whether what all Services need is in the kernel: hooks, base chains, devices' programs. If not, why
// is the reason, "" while nothing has been tried yet.
func (s *Planes) Serving() (serving bool, why string) {
	for _, l := range slices.Backward(s.planes) {
		if serving, why = l.Serving(); !serving {
			return false, why
		}
	}
	return len(s.planes) > 0, ""
}

// WaitReady waits until all planes have served for the first time.
func (s *Planes) WaitReady(ctx context.Context) {
	for _, l := range slices.Backward(s.planes) {
		select {
		case <-l.Ready():
		case <-ctx.Done():
			return
		}
	}
}

// Status returns the loops' states by data plane.
func (s *Planes) Status() map[string]reconcile.Status {
	m := map[string]reconcile.Status{}
	for _, p := range s.planes {
		m[p.Name] = p.Status()
	}
	if s.after != nil {
		m["flows"] = s.after.Status()
	}
	return m
}

// SyncOwner waits until the parts of an owner that are wanted now are in the kernel, whatever becomes of other owners'.
// It returns what the kernel refuses of them.
func (s *Planes) SyncOwner(ctx context.Context, o model.Owner) error {
	var errs []error
	for _, p := range slices.Backward(s.planes) {
		errs = append(errs, p.SyncOwner(ctx, o))
		if p.Status().FirstSync.IsZero() {
			break // those behind it wait for it themselves
		}
	}
	return errors.Join(errs...)
}

// Counts returns what became of pools' clients on this node, by the pools' IDs; nil where the mode counts nothing.
func (s *Planes) Counts() (counts map[uint64]plane.Count, err error) {
	for _, p := range s.planes {
		c, err := p.Counts()
		if err != nil {
			return nil, err
		}
		if counts == nil {
			counts = c
		} else {
			maps.Copy(counts, c)
		}
	}
	return counts, nil
}

// firstOf returns what the first plane has that has any, or its error.
func firstOf[T any](planes []*mode.Plane, of func(*mode.Plane) (T, error), has func(T) bool) (none T, err error) {
	for _, p := range planes {
		if x, err := of(p); has(x) || err != nil {
			return x, err
		}
	}
	return none, nil
}

// Packets returns what became of packets at the node's devices; nil where the mode serves none there.
func (s *Planes) Packets() ([]plane.Outcome, error) {
	return firstOf(s.planes, (*mode.Plane).Packets, func(l []plane.Outcome) bool { return l != nil })
}

// FastPath returns whether packets to pods bypass the host stack; nil where the mode has no programs at devices.
func (s *Planes) FastPath() (*plane.FastPath, error) {
	return firstOf(s.planes, (*mode.Plane).FastPath, func(f *plane.FastPath) bool { return f != nil })
}

// Rejections returns how many connections the mode rejected beyond a limit; nil where it has none.
func (s *Planes) Rejections() *plane.Rejections {
	for _, p := range s.planes {
		if r := p.Rejections(); r != nil {
			return r
		}
	}
	return nil
}

// RuleCounts returns what the mode's rules counted; nil where they count nothing.
func (s *Planes) RuleCounts() (*plane.RuleCounts, error) {
	return firstOf(s.planes, (*mode.Plane).RuleCounts, func(c *plane.RuleCounts) bool { return c != nil })
}

// Affinity returns how much of its capacity for session affinity the mode uses; nil where it has no limit.
func (s *Planes) Affinity() ([]plane.AffinityUse, error) {
	return firstOf(s.planes, (*mode.Plane).Affinity, func(l []plane.AffinityUse) bool { return l != nil })
}

// Invalid returns how many packets connection tracking has called invalid; tracks is false where the mode needs none.
func (s *Planes) Invalid() (packets uint64, tracks bool, err error) {
	if s.stale == nil {
		return 0, false, nil
	}
	packets, err = s.stale.Invalid()
	return packets, true, err
}

// Close ends the loops and leaves the kernel as it is: traffic goes on.
func (s *Planes) Close() error {
	s.stop()
	s.ended.Wait()
	var errs []error
	if s.stale != nil {
		errs = append(errs, s.stale.Close())
	}
	for _, l := range s.planes {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
