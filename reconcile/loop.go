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
)

// Options says how a Loop works. The zero value will do.
type Options[T comparable] struct {
	Owner    func(T) string                  // for people: the Service that a part belongs to, or "node"; default: T's type
	Group    func(owner string) string       // the owners that stand or fall together, by a name; default: each its own
	Base     func(T) bool                    // reports whether all others need that part: without its facts nothing is served; default: none
	Weight   func(T) int                     // about how much time and capacity of the kernel a part takes; default: its facts
	Log      *slog.Logger                    // default: none
	MaxFacts int                             // facts in one Write at most, save for one that is replaced; default 4096
	Backoff  func(attempt int) time.Duration // how long to wait after failure number attempt, from 1; default Backoff
}

// Backoff gives 50 ms, doubling with every attempt up to 30 s, less up to a half drawn at random.
func Backoff(attempt int) time.Duration {
	d := 30 * time.Second
	if attempt <= 10 {
		d = 50 * time.Millisecond << attempt / 2
	}
	return d - rand.N(d/2)
}

// Loop makes the kernel hold what the wanted parts need. Its methods may be called from any goroutine.
type Loop[T comparable, K dataplane.Key, V comparable] struct {
	plane    dataplane.Plane[T, K, V]
	owner    func(T) string
	group    func(string) string
	base     func(T) bool
	weight   func(T) int
	log      *slog.Logger
	maxFacts int
	backoff  func(int) time.Duration

	started atomic.Bool
	first   chan struct{}   // closed by the first Change
	served  chan struct{}   // closed when all was written for the first time, and serves
	ended   chan struct{}   // closed when Run has returned
	wake    chan struct{}   // holds one: there is something to do
	until   <-chan struct{} // nothing goes before that is closed; nil: no more, or never held
	busy    chan struct{}   // holds one while somebody uses the plane or the second group of fields below

	mu       sync.Mutex
	parts    map[T]phase   // every part that is wanted, or was when last taken in
	changed  []T           // parts whose phase may have changed since then
	look     bool          // a Read is asked for
	asked    uint64        // Changes and Checks so far
	answered uint64        // how many of those are true in the kernel, or refused
	answer   error         // what was refused
	news     chan struct{} // closed and made anew when answered or answer change
	status   Status

	table    *table[T, K, V]
	ground   map[T][]dataplane.Fact[K, V] // facts of the parts of the base
	large    map[string]int               // waves of large groups that are on their way
	gone     []T                          // parts no longer wanted of which some fact may still be held
	suspects map[string]bool              // groups of refused facts, and perhaps some more
	culprits map[string]bool              // those of them in which single facts were refused
	settled  bool                         // a turn has done all that could be done
	repaired map[string]int               // facts repaired in this turn, by owner
	begin    time.Time                    // when the first Change was there
	stale    bool                         // what the kernel holds is not known: Read first
	pause    time.Time                    // when to go on after a failure of the whole
	trouble  int                          // failures of the whole in a row
	search   search                       // for a fact that can't be written
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
	l := &Loop[T, K, V]{
		plane: p, owner: o.Owner, group: o.Group, base: o.Base, weight: o.Weight, log: o.Log, maxFacts: o.MaxFacts, backoff: o.Backoff,
		first: make(chan struct{}), served: make(chan struct{}), ended: make(chan struct{}),
		wake: make(chan struct{}, 1), busy: make(chan struct{}, 1), news: make(chan struct{}),
		parts: map[T]phase{}, table: newTable[T, K, V](), suspects: map[string]bool{},
		ground: map[T][]dataplane.Fact[K, V]{}, large: map[string]int{}, culprits: map[string]bool{}, repaired: map[string]int{}, stale: true,
	}
	if l.owner == nil {
		l.owner = func(p T) string { return fmt.Sprintf("%T", p) }
	}
	if l.group == nil {
		l.group = func(owner string) string { return owner }
	}
	if l.base == nil {
		l.base = func(T) bool { return false }
	}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	if l.maxFacts <= 0 {
		l.maxFacts = 4096
	}
	if l.backoff == nil {
		l.backoff = Backoff
	}
	return l
}

// Change tells what is wanted, as a change: put are parts that are wanted from now on, del parts that are not any more.
// A part is known by its value (==): del names what an earlier put named; a changed part is in both, as two values. Change
// returns at once; changes that come while a write is under way are merged. The first Change holds everything there is,
// and without one nothing is ever deleted: an empty world is Change(nil, nil).
func (l *Loop[T, K, V]) Change(put, del []T) {
	l.mu.Lock()
	for _, p := range del {
		l.leave(p)
	}
	for _, p := range put {
		l.enter(p)
	}
	l.asked++
	l.status.LastChange = time.Now()
	if l.asked == 1 {
		close(l.first)
	}
	l.mu.Unlock()
	l.awake()
}

func (l *Loop[T, K, V]) enter(p T) {
	if ph, ok := l.parts[p]; !ok {
		l.parts[p] = coming
		l.changed = append(l.changed, p)
	} else if ph == going {
		l.parts[p] = here
	}
}

func (l *Loop[T, K, V]) leave(p T) {
	switch ph, ok := l.parts[p]; {
	case ok && ph == coming:
		delete(l.parts, p)
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

// Hold has everything stand that would go, until a channel is closed: it still serves whom somebody else is to serve from then on.
// Those who Sync wait too. It comes before Run.
func (l *Loop[T, K, V]) Hold(until <-chan struct{}) { l.until = until }

// Served is closed once all that was wanted has been written for the first time, refused facts aside, and the base's
// facts are true.
func (l *Loop[T, K, V]) Served() <-chan struct{} { return l.served }

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
		again := l.turn(ctx)
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

// watch asks for a Read whenever the plane says that others may have written.
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
		wait := l.backoff(attempt)
		l.log.Warn("watching for drift failed, retrying", "error", err, "retry_in", wait)
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// follow asks for a Read at each signal, until there will be no more. It leaves nine times as long as a Read takes
// between two, so that whoever writes without end costs a tenth of a processor, not all of it.
func (l *Loop[T, K, V]) follow(signals <-chan struct{}) {
	var rest <-chan time.Time
	for signalled := false; ; {
		if signalled && rest == nil {
			signalled = false
			l.lookAgain()
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

func (l *Loop[T, K, V]) lookAgain() {
	l.mu.Lock()
	l.look = true
	l.mu.Unlock()
	l.awake()
}

// Sync waits until all that was changed before is true in the kernel. Where the kernel refuses facts, it returns what and
// whose, once everything else has been written. It needs a Run, and returns an error when that has ended.
func (l *Loop[T, K, V]) Sync(ctx context.Context) error {
	l.mu.Lock()
	n := l.asked
	l.mu.Unlock()
	return l.wait(ctx, n)
}

// Check looks for drift now: Read, compare, repair. It waits and returns like Sync.
func (l *Loop[T, K, V]) Check(ctx context.Context) error {
	l.mu.Lock()
	if l.asked == 0 {
		l.mu.Unlock()
		return errors.New("reconcile: nothing to check against: there has been no Change yet")
	}
	l.asked++
	n := l.asked
	l.look = true
	l.mu.Unlock()
	l.awake()
	return l.wait(ctx, n)
}

// wait waits until n Changes and Checks are answered.
func (l *Loop[T, K, V]) wait(ctx context.Context, n uint64) error {
	for {
		l.mu.Lock()
		answered, answer, news := l.answered, l.answer, l.news
		l.mu.Unlock()
		if answered >= n && answered > 0 {
			return answer
		}
		select {
		case <-news:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("waiting for the kernel to be as wanted: %w", ctx.Err()), answer)
		case <-l.ended:
			return errors.New("reconcile: the loop has ended")
		}
	}
}

// respond tells those who wait that n Changes and Checks are true in the kernel, or why they are not. An n of 0 takes back
// the last answer.
func (l *Loop[T, K, V]) respond(n uint64, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered, l.answer = n, why
	close(l.news)
	l.news = make(chan struct{})
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
