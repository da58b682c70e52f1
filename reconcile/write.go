package reconcile

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// due gives the jobs that may be done now, in order, how many are held, and the time when one of those set aside is to be tried
// again. Facts known to be refused come when there is nothing else.
func (l *Loop[T, K, V]) due(now time.Time) (jobs []*job[K, V], held int, next time.Time) {
	var alone, waiting []*job[K, V]
	jobs = make([]*job[K, V], 0, len(l.table.todo))
	for _, j := range l.table.todo {
		switch f := j.why; {
		case l.until != nil && !j.puts():
			held++
		case f != nil && now.Before(f.from):
			waiting = append(waiting, j)
			if next.IsZero() || f.due.Before(next) {
				next = f.due
			}
		case f != nil && f.alone:
			alone = append(alone, j)
		default:
			jobs = append(jobs, j)
		}
	}
	order(jobs)
	if len(alone)+len(waiting) == 0 {
		return jobs, held, next
	}
	l.find(l.suspects)
	stuck := slices.Concat(alone, waiting)
	if jobs = pass(jobs, stuck); len(jobs) > 0 {
		return jobs, held, next
	}
	order(alone)
	return l.oldest(pass(alone, stuck)), held, next
}

// oldest gives those of jobs, each refused by itself before, that have waited longest: as many as to be tried at once.
func (l *Loop[T, K, V]) oldest(jobs []*job[K, V]) []*job[K, V] {
	if l.search.refused >= few {
		return nil
	}
	slices.SortStableFunc(jobs, func(a, b *job[K, V]) int { return a.why.due.Compare(b.why.due) })
	jobs = jobs[:min(len(jobs), max(1, l.search.alone))]
	order(jobs)
	return jobs
}

// write does jobs, in one Write or several. It ends at the first that fails; the error is for the whole turn, and nil
// where the search for the cause goes on.
func (l *Loop[T, K, V]) write(ctx context.Context, jobs []*job[K, V]) error {
	for len(jobs) > 0 && ctx.Err() == nil {
		n := portion(jobs, l.maxFacts)
		alone := jobs[0].why != nil && jobs[0].why.alone
		if !alone {
			n = l.search.next(n)
		}
		again := l.search.on || l.known(jobs[:n])
		if err := l.tell(ctx, jobs[:n], again); err != nil {
			return l.refused(ctx, jobs[:n], alone, again, err)
		}
		l.made(jobs[:n], alone)
		jobs = jobs[n:]
	}
	return nil
}

// known says that one of jobs was refused before.
func (l *Loop[T, K, V]) known(jobs []*job[K, V]) bool {
	return len(l.suspects) > 0 && slices.ContainsFunc(jobs, func(j *job[K, V]) bool { return j.why != nil })
}

// tell makes one Write of jobs, and counts it.
func (l *Loop[T, K, V]) tell(ctx context.Context, jobs []*job[K, V], again bool) error {
	put, del := facts(jobs)
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

// made notes that jobs are true.
func (l *Loop[T, K, V]) made(jobs []*job[K, V], alone bool) {
	l.search.worked(len(jobs))
	if alone {
		l.search.alone = 2 * len(jobs)
	}
	repairs := 0
	for _, j := range jobs {
		l.table.done(j)
		if j.drifted != nil {
			repairs++
		}
		for _, o := range j.drifted {
			l.repaired[o]++
		}
	}
	if repairs > 0 {
		l.count(func(s *Status) { s.Repairs += uint64(repairs) })
	}
}

// refused notes that a Write of jobs failed. A first failure is the whole turn's, which is tried again; from then on the
// culprit is searched for and set aside.
func (l *Loop[T, K, V]) refused(ctx context.Context, jobs []*job[K, V], alone, again bool, err error) error {
	l.stale = true
	switch {
	case ctx.Err() != nil:
	case !again:
		l.search.on = true
		return fmt.Errorf("writing %d facts: %w", len(jobs), err)
	case alone:
		l.search.alone = 1
		if len(jobs) == 1 {
			l.search.refused++
			l.setAside(jobs, err)
		}
	case l.search.failed(len(jobs), time.Now()):
		l.setAside(jobs, err)
	}
	return nil
}

// setAside puts jobs off: they are tried again with back-off, and what stands on them waits. Facts that are due at about
// the same time are tried at the same time: many that fail must not mean a Read for each.
func (l *Loop[T, K, V]) setAside(jobs []*job[K, V], err error) {
	now := time.Now()
	f := &failure{err: err, since: now, attempts: 1, alone: len(jobs) == 1}
	if f.alone {
		f.err = fmt.Errorf("writing %v: %w", jobs[0].key, err)
	}
	for _, j := range jobs {
		if j.why != nil {
			f.attempts = max(f.attempts, j.why.attempts+1)
			if j.why.since.Before(f.since) {
				f.since = j.why.since
			}
		}
		j.why = f
	}
	wait := max(2, l.backoff(f.attempts))
	f.from, f.due = now.Add(wait/2), now.Add(wait)
	l.find(nil)
	for _, j := range jobs {
		for _, o := range j.owners {
			l.suspects[o] = true
		}
	}
}
