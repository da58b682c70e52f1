package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/dataplane"
)

// Status is how a loop does. Counters count since New.
type Status struct {
	Parts    int `json:"parts"`    // parts wanted
	Held     int `json:"held"`     // facts held in the kernel, as far as known
	Unsynced int `json:"unsynced"` // facts that are not as wanted, counted at the end of the last turn

	Writes   uint64 `json:"writes"`   // Writes, also failed ones
	Puts     uint64 `json:"puts"`     // facts put
	Dels     uint64 `json:"dels"`     // facts deleted; a replaced fact counts in both
	Repairs  uint64 `json:"repairs"`  // facts that others had changed and that were made true again
	Retries  uint64 `json:"retries"`  // Reads and Writes made because an earlier one failed
	Failures uint64 `json:"failures"` // Reads and Writes that failed

	LastRead      time.Duration `json:"lastReadNanoseconds"`  // how long the last Read took
	LastWrite     time.Duration `json:"lastWriteNanoseconds"` // how long the last Write took
	LastChange    time.Time     `json:"lastChange,omitzero"`
	FirstSync     time.Time     `json:"firstSync,omitzero"` // when all was written for the first time, refused facts aside
	FirstSyncTook time.Duration `json:"firstSyncNanoseconds"`

	Error   string             `json:"error,omitempty"`   // why nothing can be read or written now
	Failing map[string]Failing `json:"failing,omitempty"` // owners of facts that are not true, by name
}

// Failing is why some fact of an owner is not true.
type Failing struct {
	Error    string    `json:"error"`
	Since    time.Time `json:"since"`
	Attempts int       `json:"attempts"`

	err  error
	rank int
}

// Status gives a copy.
func (l *Loop[T, K, V]) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.status
	s.Failing = maps.Clone(s.Failing)
	return s
}

// count changes the status.
func (l *Loop[T, K, V]) count(f func(*Status)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(&l.status)
}

// report brings the status up to date after a turn, logs what is new in it, and gives the failing owners as an error.
func (l *Loop[T, K, V]) report() error {
	failing := l.failing()
	before := l.Status().Failing
	l.logFailing(before, failing)
	l.logRepairs()
	l.count(func(s *Status) {
		s.Parts, s.Held, s.Unsynced = len(l.parts), l.table.held, len(l.table.todo)
		s.Error, s.Failing = "", failing
		if s.FirstSync.IsZero() {
			s.FirstSync = time.Now()
			s.FirstSyncTook = s.FirstSync.Sub(l.begin)
		}
	})
	return refusals(failing)
}

// failing gives the owners of facts that were refused or that parts want with different values. It forgets parts that
// went without a trace: none of their facts is left to be written, and nothing of their owner that is held may stand on
// one.
func (l *Loop[T, K, V]) failing() map[string]Failing {
	if len(l.table.todo)+len(l.table.claims) == 0 {
		l.gone, l.suspects = nil, map[string]bool{}
		return nil
	}
	only := l.suspects
	if len(l.table.claims) > 0 {
		only = nil
	}
	owners := l.owners(only)
	failing, held := map[string]Failing{}, map[string]bool{}
	for k, j := range l.table.todo {
		if f := j.why; f != nil {
			for _, o := range owners[k] {
				held[o] = held[o] || l.table.entries[k].held
			}
			note(failing, owners[k], Failing{f.err.Error(), f.since, f.attempts, f.err, k.Rank()})
		}
	}
	l.suspects = map[string]bool{}
	for o := range failing {
		l.suspects[o] = true
	}
	for k := range l.table.claims {
		err := fmt.Errorf("%v is wanted with different values by parts of %s; the first stays", k, strings.Join(owners[k], " and "))
		note(failing, owners[k], Failing{err.Error(), time.Now(), 0, err, k.Rank()})
	}
	l.gone = slices.DeleteFunc(l.gone, func(p T) bool {
		return !held[l.owner(p)] && !slices.ContainsFunc(l.plane.Render(p), func(f dataplane.Fact[K, V]) bool { _, ok := l.table.todo[f.Key]; return ok })
	})
	return failing
}

// note adds f to what is known of owners. The fact of the lowest rank is the one to tell of: others stand on it.
func note(failing map[string]Failing, owners []string, f Failing) {
	for _, o := range owners {
		if o == Nobody && len(owners) > 1 {
			continue
		}
		n := f
		if b, ok := failing[o]; ok {
			if b.rank < n.rank || b.rank == n.rank && b.Error < n.Error {
				n.Error, n.err, n.rank = b.Error, b.err, b.rank
			}
			n.Attempts = max(n.Attempts, b.Attempts)
			if b.Since.Before(n.Since) {
				n.Since = b.Since
			}
		}
		failing[o] = n
	}
}

// told is how many owners a log or an error names before it only counts.
const told = 10

// refusals gives failing owners as one error, nil for none.
func refusals(failing map[string]Failing) error {
	var errs []error
	for i, o := range slices.Sorted(maps.Keys(failing)) {
		if i == told {
			errs = append(errs, fmt.Errorf("and %d more", len(failing)-told))
			break
		}
		errs = append(errs, fmt.Errorf("%s: %w", o, failing[o].err))
	}
	return errors.Join(errs...)
}

// logFailing tells which owners came to fail, or for another reason, and which do no more.
func (l *Loop[T, K, V]) logFailing(before, now map[string]Failing) {
	lines := 0
	for _, o := range slices.Sorted(maps.Keys(now)) {
		f := now[o]
		if before[o].Error == f.Error {
			continue
		}
		if lines++; lines > told {
			l.log.Warn("facts refused, of many owners", "failing", len(now))
			break
		}
		l.log.Warn("facts refused", "owner", o, "error", f.Error)
	}
	lines = 0
	for _, o := range slices.Sorted(maps.Keys(before)) {
		if _, ok := now[o]; ok {
			continue
		}
		if lines++; lines > told {
			l.log.Info("no longer failing, many owners", "failing", len(now))
			break
		}
		l.log.Info("no longer failing", "owner", o, "since", before[o].Since)
	}
}

// logRepairs tells whose drifted facts were repaired, and forgets drift that is no more.
func (l *Loop[T, K, V]) logRepairs() {
	for _, o := range slices.Sorted(maps.Keys(l.repaired)) {
		l.log.Warn("drift repaired", "owner", o, "facts", l.repaired[o])
	}
	clear(l.repaired)
	for k := range l.drifted {
		if _, ok := l.table.todo[k]; !ok {
			delete(l.drifted, k)
		}
	}
}
