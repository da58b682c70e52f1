package reconcile

import (
	"context"
	"fmt"
	"slices"
	"sort"

	"fairlead.dev/fairlead/dataplane"
)

// replaces reports whether a fact that holds all others is to get another value: then all that is wanted is one Write.
// What the kernel refused of what is held says nothing about that.
func (l *Loop[T, K, V]) replaces() bool {
	before := l.replacing
	l.replacing = slices.ContainsFunc(l.table.todo, func(j *job[K, V]) bool {
		if !j.dels() || !j.puts() {
			return false
		}
		f, is := any(j.key).(dataplane.Foundation)
		return is && f.Foundation()
	})
	if l.replacing && !before {
		for _, j := range l.table.todo {
			j.why = nil
		}
	}
	return l.replacing
}

// join makes one Write of jobs, whatever waves and groups they are of.
func join[K dataplane.Key, V comparable](jobs []*job[K, V]) {
	for _, j := range jobs {
		j.ungroup()
	}
}

// replace does jobs, which is all there is to do but what was refused, in one Write. Until that succeeds, what is held
// stays in force: a part of what is wanted would be written in its place, not beside it. So the search for a culprit
// tries Writes, and makes none. Where it is the base's, or is not found, nothing is written.
func (l *Loop[T, K, V]) replace(ctx context.Context, jobs []*job[K, V]) error {
	again := l.blame.search.on || l.known(jobs)
	err := l.apply(ctx, jobs, again)
	if err == nil {
		l.made(jobs, false)
		l.answerOwners(false)
		return nil
	}
	l.stale, l.blame.search.on = true, true
	if c, can := l.plane.(dataplane.Checker[K, V]); can && again && l.blame.search.refused < despair {
		l.find(nil, true)
		j, why := l.culprit(ctx, c, jobs)
		if j != nil && !j.base {
			l.blame.search.refused++
			l.setAside([]*job[K, V]{j}, why)
			return nil
		}
		if j != nil {
			err = fmt.Errorf("%v: %w", j.key, why)
		}
	}
	return fmt.Errorf("replacing all that the kernel holds, which stays in force: %w", err)
}

// culprit returns the first of jobs with which a Write of those before it fails, and why; nil where none is known.
func (l *Loop[T, K, V]) culprit(ctx context.Context, c dataplane.Checker[K, V], jobs []*job[K, V]) (*job[K, V], error) {
	var why error
	n := sort.Search(len(jobs), func(n int) bool {
		put, del := written(jobs[:n+1])
		err := c.Check(ctx, put, del)
		if err != nil {
			why = err
		}
		return err != nil
	})
	if n == len(jobs) || ctx.Err() != nil {
		return nil, nil
	}
	return jobs[n], why
}
