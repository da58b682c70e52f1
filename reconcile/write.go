package reconcile

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// due gives the moves that may be made now, in order, and the time when one of those set aside is to be tried again. Facts
// known to be refused come when there is nothing else.
func (l *Loop[T, K, V]) due(now time.Time) (moves []move[K], next time.Time) {
	var alone, waiting []move[K]
	for k, j := range l.table.todo {
		m := l.table.move(k)
		switch f := j.why; {
		case f != nil && now.Before(f.from):
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
	owners, stuck := l.owners(l.suspects), slices.Concat(alone, waiting)
	if moves = pass(moves, stuck, owners); len(moves) > 0 {
		return moves, next
	}
	order(alone)
	return l.oldest(pass(alone, stuck, owners)), next
}

// oldest gives those of moves, each refused by itself before, that have waited longest: as many as to be tried at once.
func (l *Loop[T, K, V]) oldest(moves []move[K]) []move[K] {
	if l.search.refused >= few {
		return nil
	}
	due := func(m move[K]) time.Time { return l.table.todo[m.key].why.due }
	slices.SortStableFunc(moves, func(a, b move[K]) int { return due(a).Compare(due(b)) })
	moves = moves[:min(len(moves), max(1, l.search.alone))]
	order(moves)
	return moves
}

// write makes moves, in one Write or several. It ends at the first that fails; the error is for the whole turn, and nil
// where the search for the cause goes on.
func (l *Loop[T, K, V]) write(ctx context.Context, moves []move[K]) error {
	for len(moves) > 0 && ctx.Err() == nil {
		n := portion(moves, l.maxFacts)
		why := l.table.todo[moves[0].key].why
		alone := why != nil && why.alone
		if !alone {
			n = l.search.next(n)
		}
		again := l.search.on || l.known(moves[:n])
		if err := l.tell(ctx, moves[:n], again); err != nil {
			return l.refused(ctx, moves[:n], alone, again, err)
		}
		l.made(moves[:n], alone)
		moves = moves[n:]
	}
	return nil
}

// known says that one of moves was refused before.
func (l *Loop[T, K, V]) known(moves []move[K]) bool {
	return len(l.suspects) > 0 && slices.ContainsFunc(moves, func(m move[K]) bool { return l.table.todo[m.key].why != nil })
}

// tell makes one Write of moves, and counts it.
func (l *Loop[T, K, V]) tell(ctx context.Context, moves []move[K], again bool) error {
	put, del := l.table.facts(moves)
	begin := time.Now()
	err := l.plane.Write(ctx, put, del)
	took := time.Since(begin)
	l.log.Debug("write", "put", len(put), "del", len(del), "took", took, "error", err)
	l.count(func(s *Status) {
		s.Writes++
		s.LastWrite = took
		s.Retries += one(again)
		if err == nil {
			s.Puts += uint64(len(put))
			s.Dels += uint64(len(del))
		} else if ctx.Err() == nil {
			s.Failures++
		}
	})
	return err
}

// made notes that moves are true.
func (l *Loop[T, K, V]) made(moves []move[K], alone bool) {
	l.search.worked(len(moves))
	if alone {
		l.search.alone = 2 * len(moves)
	}
	repairs := 0
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
	if repairs > 0 {
		l.count(func(s *Status) { s.Repairs += uint64(repairs) })
	}
}

// refused notes that a Write of moves failed. A first failure is the whole turn's, which is tried again; from then on the
// culprit is searched for and set aside.
func (l *Loop[T, K, V]) refused(ctx context.Context, moves []move[K], alone, again bool, err error) error {
	l.stale = true
	switch {
	case ctx.Err() != nil:
	case !again:
		l.search.on = true
		return fmt.Errorf("writing %d facts: %w", len(moves), err)
	case alone:
		l.search.alone = 1
		if len(moves) == 1 {
			l.search.refused++
			l.setAside(moves, err)
		}
	case l.search.failed(len(moves), time.Now()):
		l.setAside(moves, err)
	}
	return nil
}

// setAside puts moves off: they are tried again with back-off, and what stands on them waits. Facts that are due at about
// the same time are tried at the same time: many that fail must not mean a Read for each.
func (l *Loop[T, K, V]) setAside(moves []move[K], err error) {
	now := time.Now()
	f := &failure{err: err, since: now, attempts: 1, alone: len(moves) == 1}
	if f.alone {
		f.err = fmt.Errorf("writing %v: %w", moves[0].key, err)
	}
	for _, m := range moves {
		j := l.table.todo[m.key]
		if j.why != nil {
			f.attempts = max(f.attempts, j.why.attempts+1)
			if j.why.since.Before(f.since) {
				f.since = j.why.since
			}
		}
		j.why = f
		l.table.todo[m.key] = j
	}
	wait := max(2, l.backoff(f.attempts))
	f.from, f.due = now.Add(wait/2), now.Add(wait)
	owners := l.owners(nil)
	for _, m := range moves {
		for _, o := range owners[m.key] {
			l.suspects[o] = true
		}
	}
}
