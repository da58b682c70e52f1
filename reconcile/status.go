package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/model"
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

	LastRead   time.Duration `json:"lastReadNanoseconds"`  // how long the last Read took
	LastWrite  time.Duration `json:"lastWriteNanoseconds"` // how long the last Write took
	LastChange time.Time     `json:"lastChange"`
	// when all was written for the first time, refused facts aside, and the base's facts were true
	FirstSync         time.Time     `json:"firstSync"`
	FirstSyncDuration time.Duration `json:"firstSyncNanoseconds"`

	Serving    bool   `json:"serving"`    // the facts of the base were true at the end of the last turn
	NotServing string `json:"notServing"` // why they were not

	Error   string             `json:"error"`            // why nothing can be read or written now
	Failing map[string]Failing `json:"failing"`          // owners of facts that are not true, by label
	Closed  []string           `json:"closed,omitempty"` // labels of parts that are wanted in another form meanwhile, sorted
}

// Failing is why some fact of an owner is not true.
type Failing struct {
	Error    string    `json:"error"`
	Since    time.Time `json:"since"`
	Attempts int       `json:"attempts"`

	Owner model.Owner `json:"-"`

	err  error
	rank int
}

// Status returns a copy.
func (l *Loop[T, K, V]) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.status
	s.Failing, s.Closed = maps.Clone(s.Failing), slices.Clone(s.Closed)
	return s
}

// count changes the status.
func (l *Loop[T, K, V]) count(f func(*Status)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(&l.status)
}

// report brings the status up to date after a turn, logs what is new in it, and returns the failing owners as an error.
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
		s.Parts, s.Held, s.Unsynced = len(l.parts), l.table.held(), len(l.table.todo)
		s.Error, s.Failing, s.Closed = "", failing, l.closed()
		s.Serving, s.NotServing = serving, why
		if s.FirstSync.IsZero() && serving && !l.doubtful() {
			s.FirstSync = time.Now()
			s.FirstSyncDuration = s.FirstSync.Sub(l.begin)
			close(l.ready)
		}
	})
	return rejections(failing)
}

// failing returns the owners of facts that were refused or that parts want with different values. The owners of jobs
// are those that due has just found.
func (l *Loop[T, K, V]) failing() map[string]Failing {
	if len(l.table.todo)+len(l.table.claims) == 0 {
		l.gone = nil
		clear(l.blame.suspects)
		clear(l.blame.culprits)
		return nil
	}
	l.forget()
	failing := map[string]Failing{}
	for _, j := range l.table.todo {
		if f := j.why; f != nil {
			record(failing, j.owners, Failing{Error: f.err.Error(), Since: f.since, Attempts: f.attempts, err: f.err,
				rank: j.rank})
		}
	}
	l.blame.suspects, l.blame.culprits = map[model.Owner]bool{}, map[model.Owner]bool{}
	for _, j := range l.table.todo {
		l.suspect(j)
	}
	for k, owners := range l.claimants() {
		err := fmt.Errorf("%v is wanted with different values by parts of %s; the first stays", k,
			strings.Join(labels(owners), " and "))
		record(failing, owners, Failing{Error: err.Error(), Since: time.Now(), err: err, rank: k.Rank()})
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
		if f, ok := failing[l.unitOf(p).label]; ok {
			return f.Error
		}
	}
	return "facts that all others need are not written yet"
}

// claimants returns the owners of each key that parts want with different values.
func (l *Loop[T, K, V]) claimants() map[K][]unit {
	if len(l.table.claims) == 0 {
		return nil
	}
	owners := map[K][]unit{}
	for _, p := range l.present() {
		for _, f := range l.plane.Render(p) {
			if l.table.claims[l.table.id(f.Key)] != nil && !slices.Contains(owners[f.Key], l.unitOf(p)) {
				owners[f.Key] = append(owners[f.Key], l.unitOf(p))
			}
		}
	}
	for _, o := range owners {
		slices.SortFunc(o, func(a, b unit) int { return strings.Compare(a.label, b.label) })
	}
	return owners
}

// labels returns the labels of owners.
func labels(owners []unit) (l []string) {
	for _, o := range owners {
		l = append(l, o.label)
	}
	return l
}

// record adds f to what is known of owners. The fact of the lowest rank is the one to tell of: others stand on it.
func record(failing map[string]Failing, owners []unit, f Failing) {
	for _, o := range named(owners) {
		n := f
		n.Owner = o.owner
		if b, ok := failing[o.label]; ok {
			if b.rank < n.rank || b.rank == n.rank && b.Error < n.Error {
				n.Error, n.err, n.rank = b.Error, b.err, b.rank
			}
			n.Attempts = max(n.Attempts, b.Attempts)
			if b.Since.Before(n.Since) {
				n.Since = b.Since
			}
		}
		failing[o.label] = n
	}
}

// maxListed is how many owners a log or an error names before it only counts.
const maxListed = 10

// rejections returns failing owners as one error, nil for none.
func rejections(failing map[string]Failing) error {
	var errs []error
	for i, o := range slices.Sorted(maps.Keys(failing)) {
		if i == maxListed {
			errs = append(errs, fmt.Errorf("and %d more", len(failing)-maxListed))
			break
		}
		errs = append(errs, fmt.Errorf("%s: %w", o, failing[o].err))
	}
	return errors.Join(errs...)
}

// logFailing reports which owners came to fail, or for another reason, and which do no more.
func (l *Loop[T, K, V]) logFailing(before, now map[string]Failing) {
	lines := 0
	for _, o := range slices.Sorted(maps.Keys(now)) {
		f := now[o]
		if before[o].Error == f.Error {
			continue
		}
		if lines++; lines > maxListed {
			l.options.Log.Warn("kernel rejected facts of many owners", "failing", len(now))
			break
		}
		l.options.Log.Warn("kernel rejected facts", "owner", o, "error", f.Error)
	}
	lines = 0
	for _, o := range slices.Sorted(maps.Keys(before)) {
		if _, ok := now[o]; ok {
			continue
		}
		if lines++; lines > maxListed {
			l.options.Log.Info("kernel accepts facts of most owners again", "failing", len(now))
			break
		}
		l.options.Log.Info("kernel accepts facts again", "owner", o, "since", before[o].Since)
	}
}

// logRepairs notifies whose drifted facts were repaired.
func (l *Loop[T, K, V]) logRepairs() {
	for _, o := range slices.Sorted(maps.Keys(l.repaired)) {
		l.options.Log.Warn("drift repaired", "owner", o, "facts", l.repaired[o])
	}
	clear(l.repaired)
}
