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

// iterate does everything that can be done now. The channel it returns tells when there is more to do of itself; nil:
// never.
func (l *Loop[T, K, V]) iterate(ctx context.Context) <-chan time.Time {
	if l.acquire(ctx) != nil {
		return nil
	}
	defer l.release()
	now := time.Now()
	if now.Before(l.pause) {
		return time.After(l.pause.Sub(now))
	}
	l.blame.search.refused, l.blame.search.groups = 0, false
	requested := l.drainQueue()
	for ctx.Err() == nil {
		if err := l.read(ctx); err != nil {
			return l.retry(ctx, requested, err)
		}
		l.failClosed(false)
		l.answerOwners(false)
		jobs, held, due := l.due(now)
		if len(jobs) == 0 {
			if l.failClosed(true) {
				continue
			}
			if held == 0 {
				l.settle(requested)
			}
			l.answerOwners(true)
			return until(due)
		}
		if err := l.write(ctx, jobs); err != nil {
			return l.retry(ctx, requested, err)
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

// accept brings the table up to what was told. What comes is counted before what goes, so that a fact of both the old
// and the new is not touched at all.
func (l *Loop[T, K, V]) accept() {
	came, went := l.came, l.went
	l.came, l.went = nil, nil
	weights, total := make([]int, len(came)), 0
	for i, p := range came {
		facts := l.plane.Render(p)
		if l.options.Base(p) {
			l.ground[p] = withoutBodies(facts)
		}
		if weights[i] = len(facts); l.options.Weight != nil {
			weights[i] = l.options.Weight(p)
		}
		total += weights[i]
		for _, f := range facts {
			l.table.want(p, f)
			if j := l.table.job(f.Key); len(l.blame.suspects) > 0 && j != nil && j.why != nil {
				l.blame.suspects[l.options.Owner(p)] = true
			}
		}
	}
	for i, p := range went {
		if s := l.wantedPart(p); s != p {
			delete(l.standIns, p)
			went[i], p = s, s
		}
		for _, f := range l.plane.Render(p) {
			l.table.drop(p, f)
		}
		delete(l.ground, p)
	}
	if total > largeGroup {
		l.measure(came, weights)
	}
	l.gone = append(l.gone, went...)
}

// drainQueue moves the parts on from coming to here and from going to nowhere: accept is to take them in. It returns
// how many Changes and Checks that is.
func (l *Loop[T, K, V]) drainQueue() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.changed {
		switch ph, ok := l.parts[p]; {
		case ok && ph == coming:
			l.parts[p] = here
			l.came = append(l.came, p)
		case ok && ph == going:
			delete(l.parts, p)
			l.owned.remove(p)
			l.went = append(l.went, p)
		}
	}
	l.changed = nil
	l.stale = l.stale || l.readDue
	l.readDue = false
	l.reached = l.requested
	return l.reached
}

// present returns the parts whose facts the table counts as wanted.
func (l *Loop[T, K, V]) present() []T {
	parts := l.originals()
	for i, p := range parts {
		parts[i] = l.wantedPart(p)
	}
	return parts
}

// read learns what the kernel holds, where that is not known, and takes in what was told. The first time the Read comes
// first: then nothing that is held and wanted is ever a job.
func (l *Loop[T, K, V]) read(ctx context.Context) error {
	if !l.stale {
		l.accept()
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
	l.table.learn(facts)
	l.accept()
	drift := l.table.compare(facts, l.wanted)
	l.stale = false
	if start || len(drift) == 0 {
		return nil
	}
	// Whoever meddles may be in the middle of it, and not every plane hears of all that is done to it.
	time.AfterFunc(afterDrift, l.requestRead)
	l.respond(0, nil)
	l.find(nil, true)
	for _, j := range drift {
		j.need().drifted = named(j.owners)
	}
	return nil
}

// retry ends a turn that failed as a whole.
func (l *Loop[T, K, V]) retry(ctx context.Context, requested uint64, err error) <-chan time.Time {
	l.stale = true
	if ctx.Err() != nil {
		return nil
	}
	l.trouble++
	wait := max(1, l.options.Backoff(l.trouble))
	l.pause = time.Now().Add(wait)
	l.options.Log.Warn("sync failed, retrying", "error", err, "attempt", l.trouble, "retry_in", wait)
	l.count(func(s *Status) { s.Error = err.Error() })
	if l.trouble == 1 {
		requested = 0 // those who wait learn of it when it is repeated
	} else {
		l.failOwners(err)
	}
	l.respond(requested, err)
	return time.After(wait)
}

// settle ends a turn in which all was written that could be.
func (l *Loop[T, K, V]) settle(requested uint64) {
	if l.trouble > 0 {
		l.options.Log.Info("sync recovered", "attempts", l.trouble)
	}
	l.trouble, l.settled = 0, true
	clear(l.large)
	l.blame.search.on, l.blame.search.among = false, 0
	if l.blame.search.hopeless() {
		l.pause = time.Now().Add(l.options.Backoff(calm))
	}
	l.respond(requested, l.report())
}

func one(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}
