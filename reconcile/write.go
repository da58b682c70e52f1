package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// due returns the jobs that may be done now, in order, how many are held, and the time when one of those set aside is
// to be tried again. Facts known to be refused come when there is nothing else.
func (l *Loop[T, K, V]) due(now time.Time) (jobs []*job[K, V], held int, next time.Time) {
	var alone, waiting []*job[K, V]
	whole := l.replaces()
	jobs = make([]*job[K, V], 0, len(l.table.todo))
	for _, j := range l.table.todo {
		j.ungroup()
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
	switch {
	case l.blame.search.groups:
		l.find(nil, true)
		l.divide()
	case len(alone)+len(waiting)+len(l.large) > 0:
		l.find(func(o model.Owner) bool { return l.blame.suspects[o] || l.large[o] > 0 }, len(alone)+len(waiting) > 0)
	}
	if whole {
		join(jobs)
	}
	order(jobs, l.blame.search.on)
	if len(alone)+len(waiting) == 0 {
		return jobs, held, next
	}
	stuck := slices.Concat(alone, waiting)
	if jobs = pass(jobs, stuck); len(jobs) > 0 {
		return jobs, held, next
	}
	order(alone, l.blame.search.on)
	return l.oldest(pass(alone, stuck)), held, next
}

// oldest returns those of jobs, each refused by itself before, that have waited longest, the base's first: as many as
// to be tried at once. Those that the plane named are tried together: if they are refused again, it names them.
func (l *Loop[T, K, V]) oldest(jobs []*job[K, V]) []*job[K, V] {
	named := slices.DeleteFunc(slices.Clone(jobs), func(j *job[K, V]) bool { return !j.why.named })
	if len(named) > 0 {
		return named
	}
	if l.blame.search.refused >= few {
		return nil
	}
	slices.SortStableFunc(jobs, func(a, b *job[K, V]) int {
		if a.base != b.base {
			return int(one(b.base)) - int(one(a.base))
		}
		return a.why.due.Compare(b.why.due)
	})
	jobs = jobs[:min(len(jobs), max(1, l.blame.search.alone))]
	order(jobs, l.blame.search.on)
	return jobs
}

// write does jobs, in one Write or several. It ends at the first that fails; the error is for the whole turn, and nil
// where the search for the cause goes on.
func (l *Loop[T, K, V]) write(ctx context.Context, jobs []*job[K, V]) error {
	if l.replacing {
		return l.replace(ctx, jobs)
	}
	for len(jobs) > 0 && ctx.Err() == nil {
		n := portion(jobs, l.options.MaxFacts)
		alone := jobs[0].why != nil && jobs[0].why.alone
		if !alone {
			n = l.blame.search.next(n)
		}
		again := l.blame.search.on || l.known(jobs[:n])
		if err := l.apply(ctx, jobs[:n], again); err != nil {
			return l.refused(ctx, jobs[:n], alone, again, err)
		}
		l.made(jobs[:n], alone)
		l.answerOwners(false)
		clear(jobs[:n]) // what is written needn't stay until all is
		jobs = jobs[n:]
	}
	return nil
}

// known reports that one of jobs was refused before.
func (l *Loop[T, K, V]) known(jobs []*job[K, V]) bool {
	return len(l.blame.suspects) > 0 && slices.ContainsFunc(jobs, func(j *job[K, V]) bool { return j.why != nil })
}

// apply makes one Write of jobs, and counts it.
func (l *Loop[T, K, V]) apply(ctx context.Context, jobs []*job[K, V], again bool) error {
	put, del := written(jobs)
	begin := time.Now()
	err := l.plane.Write(ctx, put, del)
	latency := time.Since(begin)
	l.options.Log.Debug("write", "put", len(put), "del", len(del), "took", latency, "error", err)
	l.count(func(s *Status) {
		s.Writes++
		s.LastWrite = latency
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

// made records that jobs are true.
func (l *Loop[T, K, V]) made(jobs []*job[K, V], alone bool) {
	l.blame.search.worked(len(jobs))
	if alone {
		l.blame.search.alone = 2 * len(jobs)
	}
	repairs := 0
	for _, j := range jobs {
		l.table.done(j)
		if j.drifted != nil {
			repairs++
		}
		for _, o := range j.drifted {
			l.repaired[o.label]++
		}
	}
	if repairs > 0 {
		l.count(func(s *Status) { s.Repairs += uint64(repairs) })
	}
}

// refused records that a Write of jobs failed. A first failure is the whole turn's, which is tried again; from then on
// the culprit is searched for and set aside.
func (l *Loop[T, K, V]) refused(ctx context.Context, jobs []*job[K, V], alone, again bool, err error) error {
	var r *dataplane.Refused[K]
	if ctx.Err() == nil && errors.As(err, &r) && l.partly(jobs, r.Facts) {
		return nil
	}
	l.stale = true
	for _, j := range jobs {
		if j.why != nil && j.why.named { // from now on one by one
			why := *j.why
			why.named = false
			j.why = &why
		}
	}
	switch {
	case ctx.Err() != nil:
	case !again:
		l.blame.search.on = true
		return fmt.Errorf("writing %d facts: %w", len(jobs), err)
	case alone:
		l.blame.search.alone = 1
		if len(jobs) == 1 {
			l.blame.search.refused++
			l.setAside(jobs, err)
		}
	case l.blame.search.failed(len(jobs), jobs[0].group != (model.Owner{}), time.Now()):
		l.setAside(jobs, err)
	}
	return nil
}

// partly takes in that of jobs the facts of refused were refused, and all others up to their rank written. It reports
// whether any is among jobs.
func (l *Loop[T, K, V]) partly(jobs []*job[K, V], refused map[K]error) bool {
	var bad, good []*job[K, V]
	for _, j := range jobs {
		if j.puts() && refused[j.key] != nil {
			bad = append(bad, j)
		}
	}
	if len(bad) == 0 {
		return false
	}
	rank := slices.MaxFunc(bad, func(a, b *job[K, V]) int { return cmp.Compare(a.rank, b.rank) }).rank
	for _, j := range jobs {
		if j.puts() && j.rank <= rank && refused[j.key] == nil {
			good = append(good, j)
		}
	}
	l.made(good, false)
	l.blame.search.among = 0
	l.count(func(s *Status) { s.Puts += uint64(len(good)) })
	fresh := slices.ContainsFunc(bad, func(j *job[K, V]) bool { return j.why == nil })
	for _, j := range bad {
		l.putOff(&failure{alone: true, named: true, err: fmt.Errorf("writing %v: %w", j.key, refused[j.key])}, j)
	}
	if fresh {
		l.find(nil, true)
	}
	l.suspectAll(bad)
	return true
}

// setAside puts jobs off: they are tried again with back-off, and what stands on them waits. Facts that are due at
// about the same time are tried at the same time: many that fail must not mean a Read for each. Those of the base are
// not put off with others: nothing is served while they wait.
func (l *Loop[T, K, V]) setAside(jobs []*job[K, V], err error) {
	f := &failure{err: err, alone: len(jobs) == 1}
	if f.alone {
		f.err = fmt.Errorf("writing %v: %w", jobs[0].key, err)
	} else {
		l.find(nil, true)
		if others := slices.DeleteFunc(slices.Clone(jobs), func(j *job[K, V]) bool { return j.base }); len(others) > 0 {
			jobs = others
		}
	}
	l.putOff(f, jobs...)
	l.find(nil, true)
	l.suspectAll(jobs)
}

// putOff records f as what holds jobs, with the time of the next attempt.
func (l *Loop[T, K, V]) putOff(f *failure, jobs ...*job[K, V]) {
	now := time.Now()
	f.since, f.attempts = now, 1
	for _, j := range jobs {
		if j.why != nil {
			f.attempts = max(f.attempts, j.why.attempts+1)
			if j.why.since.Before(f.since) {
				f.since = j.why.since
			}
		}
		j.why = f
	}
	attempt := f.attempts
	if f.named { // for want of capacity: there is more when something goes, not soon
		attempt += unhurried
	}
	wait := max(2, l.options.Backoff(attempt))
	f.from, f.due = now.Add(wait/2), now.Add(wait)
}

// suspectAll records the groups of jobs that were put off.
func (l *Loop[T, K, V]) suspectAll(jobs []*job[K, V]) {
	groups := map[model.Owner]bool{}
	for _, j := range jobs {
		for _, o := range j.owners {
			groups[o.owner] = true
		}
	}
	for _, j := range jobs {
		j.why.certain = j.why.alone || len(groups) == 1
		l.suspect(j)
	}
}

// suspect records the groups of a job that was put off: they are culprits where the cause is certainly theirs.
func (l *Loop[T, K, V]) suspect(j *job[K, V]) {
	if j.why == nil {
		return
	}
	for _, o := range j.owners {
		l.blame.suspects[o.owner] = true
		if j.why.certain {
			l.blame.culprits[o.owner] = true
		}
	}
}
