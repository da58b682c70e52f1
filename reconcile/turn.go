package reconcile

import (
	"context"
	"fmt"
	"time"
)

// calm is the back-off, as a number of failures, between two turns while the kernel takes nothing at all.
const calm = 5

// afterDrift is how long after drift was found the loop looks again, until it finds none.
const afterDrift = time.Second

// turn does everything that can be done now. The channel it returns tells when there is more to do of itself; nil: never.
func (l *Loop[T, K, V]) turn(ctx context.Context) <-chan time.Time {
	if l.acquire(ctx) != nil {
		return nil
	}
	defer l.release()
	now := time.Now()
	if now.Before(l.pause) {
		return time.After(l.pause.Sub(now))
	}
	l.search.refused, l.search.groups = 0, false
	asked := l.take()
	for ctx.Err() == nil {
		if err := l.read(ctx); err != nil {
			return l.retry(ctx, asked, err)
		}
		jobs, held, due := l.due(now)
		if len(jobs) == 0 {
			if held == 0 {
				l.settle(asked)
			}
			return until(due)
		}
		if err := l.write(ctx, jobs); err != nil {
			return l.retry(ctx, asked, err)
		}
	}
	return nil
}

func until(t time.Time) <-chan time.Time {
	if t.IsZero() {
		return nil
	}
	return time.After(time.Until(t))
}

// take brings the table up to what was told, and returns how many Changes and Checks that is. What comes is counted
// before what goes, so that a fact of both the old and the new is not touched at all.
func (l *Loop[T, K, V]) take() uint64 {
	came, went, asked := l.taken()
	weights, total := make([]int, len(came)), 0
	for i, p := range came {
		facts := l.plane.Render(p)
		if l.base(p) {
			l.ground[p] = facts
		}
		if weights[i] = len(facts); l.weight != nil {
			weights[i] = l.weight(p)
		}
		total += weights[i]
		for _, f := range facts {
			l.table.want(p, f)
			if j := l.table.job(f.Key); len(l.suspects) > 0 && j != nil && j.why != nil {
				l.suspects[l.group(l.owner(p))] = true
			}
		}
	}
	for _, p := range went {
		for _, f := range l.plane.Render(p) {
			l.table.drop(p, f)
		}
		delete(l.ground, p)
	}
	if total > largeGroup {
		l.measure(came, weights)
	}
	l.gone = append(l.gone, went...)
	return asked
}

// taken moves the parts on from coming to here and from going to nowhere.
func (l *Loop[T, K, V]) taken() (came, went []T, asked uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.changed {
		switch ph, ok := l.parts[p]; {
		case ok && ph == coming:
			l.parts[p] = here
			came = append(came, p)
		case ok && ph == going:
			delete(l.parts, p)
			went = append(went, p)
		}
	}
	l.changed = nil
	l.stale = l.stale || l.look
	l.look = false
	return came, went, l.asked
}

// present gives the parts whose facts the table counts as wanted.
func (l *Loop[T, K, V]) present() []T {
	l.mu.Lock()
	defer l.mu.Unlock()
	parts := make([]T, 0, len(l.parts))
	for p, ph := range l.parts {
		if ph != coming {
			parts = append(parts, p)
		}
	}
	return parts
}

// read learns what the kernel holds, where that is not known.
func (l *Loop[T, K, V]) read(ctx context.Context) error {
	if !l.stale {
		return nil
	}
	begin := time.Now()
	facts, err := l.plane.Read(ctx)
	l.count(func(s *Status) {
		s.LastRead = time.Since(begin)
		s.Retries += one(l.trouble > 0)
		s.Failures += one(err != nil && ctx.Err() == nil)
	})
	if err != nil {
		return fmt.Errorf("reading what the kernel holds: %w", err)
	}
	start := !l.table.known
	drift := l.table.found(facts)
	l.stale = false
	if start || len(drift) == 0 {
		return nil
	}
	// Whoever meddles may be in the middle of it, and not every plane hears of all that is done to it.
	time.AfterFunc(afterDrift, l.lookAgain)
	l.respond(0, nil)
	l.find(nil)
	for _, j := range drift {
		j.drifted = named(j.owners)
	}
	return nil
}

// retry ends a turn that failed as a whole.
func (l *Loop[T, K, V]) retry(ctx context.Context, asked uint64, err error) <-chan time.Time {
	l.stale = true
	if ctx.Err() != nil {
		return nil
	}
	l.trouble++
	wait := max(1, l.backoff(l.trouble))
	l.pause = time.Now().Add(wait)
	l.log.Warn("sync failed, retrying", "error", err, "attempt", l.trouble, "retry_in", wait)
	l.count(func(s *Status) { s.Error = err.Error() })
	if l.trouble == 1 {
		asked = 0 // those who wait learn of it when it is repeated
	}
	l.respond(asked, err)
	return time.After(wait)
}

// settle ends a turn in which all was written that could be.
func (l *Loop[T, K, V]) settle(asked uint64) {
	if l.trouble > 0 {
		l.log.Info("sync recovered", "attempts", l.trouble)
	}
	l.trouble, l.settled = 0, true
	clear(l.large)
	l.search.on, l.search.among = false, 0
	if l.search.hopeless() {
		l.pause = time.Now().Add(l.backoff(calm))
	}
	l.respond(asked, l.report())
}

func one(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}
