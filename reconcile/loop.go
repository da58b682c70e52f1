package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Options returns how a Loop works. The zero value will do.
type Options[T comparable] struct {
	// the object that a part is made for: its parts stand or fall together; default: T's type
	Owner func(T) model.Owner
	// for people, what of its owner a part is for, such as a port of a Service; default: the owner
	Label func(T) string
	// reports whether all others need that part: without its facts nothing is served; default: none
	Base func(T) bool
	// returns what is wanted in place of parts that depend on refused ones, by part; before is what it returned last.
	// It is pure; default: nothing
	StandIns func(refused, wanted []T, before map[T]T) map[T]T
	// about how much time and capacity of the kernel a part takes; default: its facts
	Weight   func(T) int
	Log      *slog.Logger                    // default: none
	MaxFacts int                             // facts in one Write at most, save for replacements; default 4096
	Backoff  func(attempt int) time.Duration // how long to wait after failure number attempt, from 1; default Backoff
}

// Backoff returns 50 ms, doubling with every attempt up to 30 s, less up to a half drawn at random.
func Backoff(attempt int) time.Duration {
	d := 30 * time.Second
	if attempt <= 10 {
		d = 50 * time.Millisecond << attempt / 2
	}
	return d - rand.N(d/2)
}

// Loop makes the kernel hold what the wanted parts need. Its methods may be called from any goroutine.
type Loop[T comparable, K dataplane.Key, V comparable] struct {
	plane   dataplane.Plane[T, K, V]
	options Options[T]
	signals
	busy chan struct{} // holds one while a goroutine uses the plane or the fields below requests

	mu sync.Mutex
	requests[T]

	table   *table[T, K, V]
	ground  map[T][]dataplane.Fact[K, V] // facts of the parts of the base
	large   map[model.Owner]int8         // waves of large owners whose parts are on their way
	reached uint64                       // of requested, what the table has, or is to have next:
	came    []T                          // parts that are wanted
	went    []T                          // parts that are wanted no more
	gone    []T                          // parts no longer wanted of which some fact may still be held
	blame   refusedOwners
	iteration
	standIns map[T]T // what is wanted in place of parts that depend on refused ones
}

// signals are what goroutines wait for.
type signals struct {
	started atomic.Bool
	first   chan struct{}   // closed by the first Change
	ready   chan struct{}   // closed when all was written for the first time, and serves
	ended   chan struct{}   // closed when Run has returned
	wake    chan struct{}   // holds one: there is something to do
	until   <-chan struct{} // nothing goes before that is closed; nil: no more, or never held
}

// requests is what is wanted of a loop, and how far it is: under its mutex.
type requests[T comparable] struct {
	parts     map[T]phase   // every part that is wanted, or was when last taken in
	owned     ownedParts[T] // the same by owner
	changed   []T           // parts whose phase may have changed since then
	readDue   bool          // a Read is requested
	requested uint64        // Changes and Checks so far
	completed uint64        // how many of those are true in the kernel, or refused
	outcome   error         // what was refused
	progress  chan struct{} // closed and made anew when completed or outcome change
	waiters   []*waiter[T]  // for the parts of single owners
	status    Status

	join func(put, del []T) (puts, dels []T) // of a plane that is a dataplane.Joiner; nil: parts are as they come
}

// refusedOwners is whose facts the kernel refuses, and the search for a fact that can't be written.
type refusedOwners struct {
	suspects map[model.Owner]bool // owners of refused facts, and perhaps some more
	culprits map[model.Owner]bool // those of them of which single facts were refused
	search   search
}

// iteration is the state of one pass of Run and of those before it.
type iteration struct {
	settled  bool           // a pass has done all that could be done
	repaired map[string]int // facts repaired in this pass, by label
	begin    time.Time      // when the first Change was there
	stale    bool           // what the kernel holds is not known: Read first
	pause    time.Time      // when to go on after a failure of the whole
	trouble  int            // failures of the whole in a row

	replacing bool // a fact that holds all others is to get another value
}

// phase is where a part stands between Change and the table.
type phase uint8

const (
	coming phase = iota // wanted, not yet in the table
	here                // wanted and in the table
	going               // in the table, no longer wanted
)

// New makes a loop for p. It does nothing before Run, Plan aside.
func New[T comparable, K dataplane.Key, V comparable](p dataplane.Plane[T, K, V], o Options[T]) *Loop[T, K, V] {
	if o.Owner == nil {
		o.Owner = func(p T) model.Owner { return model.Owner{Name: fmt.Sprintf("%T", p)} }
	}
	if o.Base == nil {
		o.Base = func(T) bool { return false }
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.MaxFacts <= 0 {
		o.MaxFacts = 4096
	}
	if o.Backoff == nil {
		o.Backoff = Backoff
	}
	l := &Loop[T, K, V]{
		plane: p, options: o,
		signals: signals{first: make(chan struct{}), ready: make(chan struct{}), ended: make(chan struct{}),
			wake: make(chan struct{}, 1)},
		busy:     make(chan struct{}, 1),
		requests: requests[T]{parts: map[T]phase{}, owned: ownedParts[T]{of: o.Owner}, progress: make(chan struct{})},
		table:    newTable[T, K, V](),
		ground:   map[T][]dataplane.Fact[K, V]{}, large: map[model.Owner]int8{},
		blame:     refusedOwners{suspects: map[model.Owner]bool{}, culprits: map[model.Owner]bool{}},
		iteration: iteration{repaired: map[string]int{}, stale: true},
	}
	if j, ok := any(p).(dataplane.Joiner[T]); ok {
		l.join = j.Join()
	}
	return l
}

// Change reports what is wanted, as a change: put are parts that are wanted from now on, del parts that are not any
// more. A part is known by its value (==): del names what an earlier put named; a changed part is in both, as two
// values. Change returns at once; changes that come while a write is under way are merged. The first Change holds
// everything there is, and without one nothing is ever deleted: an empty world is Change(nil, nil).
func (l *Loop[T, K, V]) Change(put, del []T) {
	l.mu.Lock()
	if l.join != nil {
		put, del = l.join(put, del)
	}
	for _, p := range del {
		l.leave(p)
	}
	for _, p := range put {
		l.enter(p)
	}
	l.requested++
	l.status.LastChange = time.Now()
	if l.requested == 1 {
		close(l.first)
	}
	l.mu.Unlock()
	l.awake()
}

func (l *Loop[T, K, V]) enter(p T) {
	if ph, ok := l.parts[p]; !ok {
		l.parts[p] = coming
		l.owned.add(p)
		l.changed = append(l.changed, p)
	} else if ph == going {
		l.parts[p] = here
	}
}

func (l *Loop[T, K, V]) leave(p T) {
	switch ph, ok := l.parts[p]; {
	case ok && ph == coming:
		delete(l.parts, p)
		l.owned.remove(p)
	case ok && ph == here:
		l.parts[p] = going
		l.changed = append(l.changed, p)
	}
}

// awake makes Run take another turn.
func (l *Loop[T, K, V]) awake() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// After defers all deletions until ch is closed, so that this plane keeps serving until its successor is ready. Sync
// waits for them too. It comes before Run.
func (l *Loop[T, K, V]) After(ch <-chan struct{}) { l.until = ch }

// Ready returns a channel that is closed once all that was wanted has been written for the first time, refused facts
// aside, and the base's facts are true.
func (l *Loop[T, K, V]) Ready() <-chan struct{} { return l.ready }

// Serving reports whether the facts of the base were true at the end of the last turn. If they were not, why is the
// reason, "" before the first turn that did all that could be done.
func (l *Loop[T, K, V]) Serving() (serving bool, why string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status.Serving, l.status.NotServing
}

// Run waits for the first Change, then keeps the kernel as wanted until ctx ends, and leaves the kernel as it is then:
// traffic goes on. A loop runs once; a second Run is an error.
func (l *Loop[T, K, V]) Run(ctx context.Context) error {
	if l.started.Swap(true) {
		return errors.New("reconcile: this loop has been run already")
	}
	defer close(l.ended)
	select {
	case <-ctx.Done():
		return nil
	case <-l.first:
	}
	l.begin = time.Now()
	var watching sync.WaitGroup
	defer watching.Wait()
	for first := true; ctx.Err() == nil; {
		again := l.iterate(ctx)
		if first && l.settled {
			first = false
			watching.Go(func() { l.watch(ctx) })
		}
		select {
		case <-ctx.Done():
		case <-l.wake:
		case <-l.until:
			l.until = nil
		case <-again:
		}
	}
	return nil
}

// watch requests a Read whenever the plane says that others may have written.
func (l *Loop[T, K, V]) watch(ctx context.Context) {
	w, ok := l.plane.(dataplane.Watcher)
	for attempt := 1; ok && ctx.Err() == nil; attempt++ {
		begin := time.Now()
		signals, err := w.Watch(ctx)
		if err == nil {
			l.follow(signals)
			err = errors.New("the watch ended by itself")
		}
		if ctx.Err() != nil {
			return
		}
		if time.Since(begin) > time.Minute {
			attempt = 1
		}
		wait := l.options.Backoff(attempt)
		l.options.Log.Warn("watching for drift failed, retrying", "error", err, "retry_in", wait)
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// follow requests a Read at each signal, until there will be no more. It leaves nine times as long as a Read takes
// between two, so that whoever writes without end costs a tenth of a processor, not all of it.
func (l *Loop[T, K, V]) follow(signals <-chan struct{}) {
	var rest <-chan time.Time
	for signalled := false; ; {
		if signalled && rest == nil {
			signalled = false
			l.requestRead()
			rest = time.After(9 * l.Status().LastRead)
		}
		select {
		case _, ok := <-signals:
			if !ok {
				return
			}
			signalled = true
		case <-rest:
			rest = nil
		}
	}
}

func (l *Loop[T, K, V]) requestRead() {
	l.mu.Lock()
	l.readDue = true
	l.mu.Unlock()
	l.awake()
}

// Sync waits until all that was changed before is true in the kernel. Where the kernel refuses facts, it returns what
// and whose, once everything else has been written. It needs a Run, and returns an error when that has ended.
func (l *Loop[T, K, V]) Sync(ctx context.Context) error {
	l.mu.Lock()
	n := l.requested
	l.mu.Unlock()
	return l.wait(ctx, n)
}

// Check searches for drift now: Read, compare, repair. It waits and returns like Sync.
func (l *Loop[T, K, V]) Check(ctx context.Context) error {
	l.mu.Lock()
	if l.requested == 0 {
		l.mu.Unlock()
		return errors.New("reconcile: nothing to check against: there has been no Change yet")
	}
	l.requested++
	n := l.requested
	l.readDue = true
	l.mu.Unlock()
	l.awake()
	return l.wait(ctx, n)
}

// wait waits until n Changes and Checks are answered.
func (l *Loop[T, K, V]) wait(ctx context.Context, n uint64) error {
	for {
		l.mu.Lock()
		completed, outcome, progress := l.completed, l.outcome, l.progress
		l.mu.Unlock()
		if completed >= n && completed > 0 {
			return outcome
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("waiting for the kernel to be as wanted: %w", ctx.Err()), outcome)
		case <-l.ended:
			return errEnded
		}
	}
}

// errEnded is the error of those who wait for a loop that has ended.
var errEnded = errors.New("reconcile: the loop has ended")

// respond notifies those who wait that n Changes and Checks are true in the kernel, or why they are not. An n of 0
// takes back the last answer.
func (l *Loop[T, K, V]) respond(n uint64, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.completed, l.outcome = n, why
	close(l.progress)
	l.progress = make(chan struct{})
}

// acquire waits for the plane and the loop's state to be free.
func (l *Loop[T, K, V]) acquire(ctx context.Context) error {
	select {
	case l.busy <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l *Loop[T, K, V]) release() { <-l.busy }
