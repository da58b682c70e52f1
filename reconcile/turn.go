package reconcile

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// patience is how many Writes in a row may fail before facts are set aside by the batch, no longer one by one.
const patience = 32

// search is a search, by halving, for a fact that makes a Write fail.
type search struct {
	on      bool // a Write failed, in this turn or the one before
	among   int  // the culprit is one of so many next moves; 0: any
	failing int  // Writes that failed in a row
}

// next says how many of n moves to try next.
func (s *search) next(n int) int {
	if s.among > 0 {
		return min(n, (s.among+1)/2)
	}
	return n
}

// worked notes that n moves were written.
func (s *search) worked(n int) { s.failing, s.among = 0, max(0, s.among-n) }

// failed notes that n moves were not written, and says whether the search is over: they are to be set aside.
func (s *search) failed(n int) bool {
	s.failing++
	if s.among = n; n > 1 && s.failing < patience {
		return false
	}
	s.among = 0
	return true
}

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
	asked := l.take()
	for ctx.Err() == nil {
		if err := l.read(ctx); err != nil {
			return l.retry(ctx, asked, err)
		}
		moves, due := l.due(now)
		if len(moves) == 0 {
			l.settle(asked)
			return until(due)
		}
		if err := l.write(ctx, moves); err != nil {
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
	for _, p := range came {
		for _, f := range l.plane.Render(p) {
			if l.table.todo[f.Key] != nil {
				l.suspects[l.owner(p)] = true
			}
			l.table.want(p, f)
		}
	}
	for _, p := range went {
		for _, f := range l.plane.Render(p) {
			l.table.drop(p, f)
		}
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
	l.respond(0, nil)
	owners := l.owners(nil)
	for _, k := range drift {
		l.drifted[k] = owners[k]
	}
	return nil
}

// due gives the moves that may be made now, in order, and the time when one of those set aside may be tried again. What
// was refused by itself comes when there is nothing else, one at a time.
func (l *Loop[T, K, V]) due(now time.Time) (moves []move[K], next time.Time) {
	var alone, waiting []move[K]
	for k, f := range l.table.todo {
		m := l.table.move(k)
		switch {
		case f != nil && now.Before(f.due):
			waiting = append(waiting, m)
			if next.IsZero() || f.due.Before(next) {
				next = f.due
			}
		case f != nil && f.alone:
			alone = append(alone, m)
		default:
			moves = append(moves, m)
		}
	}
	order(moves)
	if len(alone)+len(waiting) == 0 {
		return moves, next
	}
	owners := l.owners(l.suspects)
	order(alone)
	if moves = pass(moves, append(alone, waiting...), owners); len(moves) > 0 {
		return moves, next
	}
	alone = pass(alone, waiting, owners)
	return alone[:min(1, len(alone))], next
}

// write makes moves, in one Write or several. It ends at the first that fails; the error is for the whole turn, and nil
// where the search for the cause goes on.
func (l *Loop[T, K, V]) write(ctx context.Context, moves []move[K]) error {
	for len(moves) > 0 && ctx.Err() == nil {
		n := l.search.next(portion(moves, l.maxFacts))
		again := l.search.on || len(l.suspects) > 0 && slices.ContainsFunc(moves[:n], func(m move[K]) bool { return l.table.todo[m.key] != nil })
		put, del := l.table.facts(moves[:n])
		begin := time.Now()
		err := l.plane.Write(ctx, put, del)
		took := time.Since(begin)
		l.log.Debug("write", "put", len(put), "del", len(del), "took", took, "error", err)
		l.count(func(s *Status) {
			s.Writes++
			s.LastWrite = took
			s.Retries += one(again)
			s.Failures += one(err != nil && ctx.Err() == nil)
		})
		if err != nil {
			return l.refused(ctx, moves[:n], again, err)
		}
		l.made(moves[:n], len(put), len(del))
		moves = moves[n:]
	}
	return nil
}

// made notes that moves are true.
func (l *Loop[T, K, V]) made(moves []move[K], puts, dels int) {
	l.search.worked(len(moves))
	var repairs uint64
	for _, m := range moves {
		l.table.done(m.key)
		if owners, ok := l.drifted[m.key]; ok {
			delete(l.drifted, m.key)
			repairs++
			for _, o := range owners {
				l.repaired[o]++
			}
		}
	}
	l.count(func(s *Status) {
		s.Puts += uint64(puts)
		s.Dels += uint64(dels)
		s.Repairs += repairs
	})
}

func one(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// refused notes that a Write of moves failed. The first failure is the whole turn's, which is tried again; from then on
// the culprit is searched for and set aside.
func (l *Loop[T, K, V]) refused(ctx context.Context, moves []move[K], again bool, err error) error {
	l.stale = true
	if ctx.Err() != nil {
		return nil
	}
	if !again {
		l.search = search{on: true}
		return fmt.Errorf("writing %d facts: %w", len(moves), err)
	}
	if l.search.failed(len(moves)) {
		l.setAside(moves, err)
	}
	return nil
}

// setAside puts moves off: they are tried again with back-off, and what stands on them waits.
func (l *Loop[T, K, V]) setAside(moves []move[K], err error) {
	now := time.Now()
	f := &failure{err: err, since: now, attempts: 1, alone: len(moves) == 1}
	if f.alone {
		f.err = fmt.Errorf("writing %v: %w", moves[0].key, err)
	}
	for _, m := range moves {
		if before := l.table.todo[m.key]; before != nil {
			f.attempts = max(f.attempts, before.attempts+1)
			if before.since.Before(f.since) {
				f.since = before.since
			}
		}
		l.table.todo[m.key] = f
	}
	f.due = now.Add(max(1, l.backoff(f.attempts)))
	owners := l.owners(nil)
	for _, m := range moves {
		for _, o := range owners[m.key] {
			l.suspects[o] = true
		}
	}
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
	l.log.Warn("failed; trying again", "error", err, "attempt", l.trouble, "in", wait)
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
		l.log.Info("recovered", "attempts", l.trouble)
	}
	l.trouble, l.search = 0, search{}
	l.respond(asked, l.report())
}
