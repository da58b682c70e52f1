package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
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
	LastChange    time.Time     `json:"lastChange"`
	FirstSync     time.Time     `json:"firstSync"` // when all was written for the first time, refused facts aside, and the base's facts were true
	FirstSyncTook time.Duration `json:"firstSyncNanoseconds"`

	Serving    bool   `json:"serving"`    // the facts of the base were true at the end of the last turn
	NotServing string `json:"notServing"` // why they were not

	Error   string             `json:"error"`   // why nothing can be read or written now
	Failing map[string]Failing `json:"failing"` // owners of facts that are not true, by name
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
	for o, f := range failing {
		if b := before[o]; b.Error == f.Error && b.Since.Before(f.Since) {
			f.Since = b.Since
			failing[o] = f
		}
	}
	l.logFailing(before, failing)
	l.logRepairs()
	serving, why := l.serving(), ""
	if !serving {
		why = l.notServing(failing)
	}
	l.count(func(s *Status) {
		s.Parts, s.Held, s.Unsynced = len(l.parts), l.table.held, len(l.table.todo)
		s.Error, s.Failing = "", failing
		s.Serving, s.NotServing = serving, why
		if s.FirstSync.IsZero() && serving && !l.doubtful() {
			s.FirstSync = time.Now()
			s.FirstSyncTook = s.FirstSync.Sub(l.begin)
			close(l.served)
		}
	})
	return refusals(failing)
}

// failing gives the owners of facts that were refused or that parts want with different values. The owners of jobs are
// those that due has just found.
func (l *Loop[T, K, V]) failing() map[string]Failing {
	if len(l.table.todo)+len(l.table.claims) == 0 {
		l.gone = nil
		clear(l.suspects)
		clear(l.culprits)
		return nil
	}
	l.forget()
	failing := map[string]Failing{}
	for _, j := range l.table.todo {
		if f := j.why; f != nil {
			note(failing, j.owners, Failing{f.err.Error(), f.since, f.attempts, f.err, j.rank})
		}
	}
	l.suspects, l.culprits = map[string]bool{}, map[string]bool{}
	for _, j := range l.table.todo {
		l.suspect(j)
	}
	for k, owners := range l.claimants() {
		err := fmt.Errorf("%v is wanted with different values by parts of %s; the first stays", k, strings.Join(owners, " and "))
		note(failing, owners, Failing{err.Error(), time.Now(), 0, err, k.Rank()})
	}
	return failing
}

// doubts is how many attempts facts may have that were set aside with a refused one before they count as refused.
const doubts = 5

// doubtful reports whether facts were set aside that may not be refused by themselves.
func (l *Loop[T, K, V]) doubtful() bool {
	return slices.ContainsFunc(l.table.todo,
		func(j *job[K, V]) bool { return j.why != nil && !j.why.certain && j.why.attempts < doubts })
}

// notServing returns why facts of the base are not true.
func (l *Loop[T, K, V]) notServing(failing map[string]Failing) string {
	for p := range l.ground {
		if f, ok := failing[l.owner(p)]; ok {
			return f.Error
		}
	}
	return "facts that all others need are not written yet"
}

// claimants gives the owners of each key that parts want with different values.
func (l *Loop[T, K, V]) claimants() map[K][]string {
	if len(l.table.claims) == 0 {
		return nil
	}
	owners := map[K][]string{}
	for _, p := range l.present() {
		for _, f := range l.plane.Render(p) {
			if l.table.claims[f.Key] != nil && !slices.Contains(owners[f.Key], l.owner(p)) {
				owners[f.Key] = append(owners[f.Key], l.owner(p))
			}
		}
	}
	for _, o := range owners {
		slices.Sort(o)
	}
	return owners
}

// note adds f to what is known of owners. The fact of the lowest rank is the one to tell of: others stand on it.
func note(failing map[string]Failing, owners []string, f Failing) {
	for _, o := range named(owners) {
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
			l.log.Warn("kernel rejected facts of many owners", "failing", len(now))
			break
		}
		l.log.Warn("kernel rejected facts", "owner", o, "error", f.Error)
	}
	lines = 0
	for _, o := range slices.Sorted(maps.Keys(before)) {
		if _, ok := now[o]; ok {
			continue
		}
		if lines++; lines > told {
			l.log.Info("kernel accepts facts of most owners again", "failing", len(now))
			break
		}
		l.log.Info("kernel accepts facts again", "owner", o, "since", before[o].Since)
	}
}

// logRepairs tells whose drifted facts were repaired.
func (l *Loop[T, K, V]) logRepairs() {
	for _, o := range slices.Sorted(maps.Keys(l.repaired)) {
		l.log.Warn("drift repaired", "owner", o, "facts", l.repaired[o])
	}
	clear(l.repaired)
}
