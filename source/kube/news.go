package kube

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/source"
)

// news is what has been seen and not been handed on.
type news struct {
	told chan struct{} // holds one when there is something to hand on

	mu       sync.Mutex
	changes  []update
	seen     time.Time          // when the first of them came
	at       map[source.Key]int // places in changes
	kinds    []resource
	listed   map[source.Kind]bool
	troubles map[source.Kind]*trouble
	start    time.Time
	late     bool             // the first lists should all be there by now
	begun    bool             // the first batch has been handed on
	problems []source.Problem // as handed on last
	beyond   map[source.Kind][]source.Problem
}

// update is a change and whether the consumer has not been told of the object.
type update struct {
	source.Change
	first bool
}

func newNews(kinds []resource) *news {
	return &news{told: make(chan struct{}, 1), kinds: kinds, at: map[source.Key]int{},
		beyond: map[source.Kind][]source.Problem{}, listed: map[source.Kind]bool{}, troubles: map[source.Kind]*trouble{}, start: time.Now()}
}

// tell says that there may be something to hand on.
func (n *news) tell() {
	select {
	case n.told <- struct{}{}:
	default:
	}
}

// put adds changes. Of each object the latest counts.
func (n *news) put(changes ...update) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.add(changes)
	n.tell()
}

// add keeps one change of each object that there is or that the consumer knows of, so that what waits is bounded by
// both.
func (n *news) add(changes []update) {
	if len(n.changes) == 0 {
		n.seen = time.Now()
	}
	for _, c := range changes {
		if i, ok := n.at[c.Key]; ok {
			if c.first = n.changes[i].first; c.first && c.Object == nil {
				n.forget(i)
			} else {
				n.changes[i] = c
			}
			continue
		}
		n.at[c.Key] = len(n.changes)
		n.changes = append(n.changes, c)
	}
}

// forget drops a change: the last takes its place.
func (n *news) forget(i int) {
	end := len(n.changes) - 1
	delete(n.at, n.changes[i].Key)
	if i < end {
		n.changes[i] = n.changes[end]
		n.at[n.changes[i].Key] = i
	}
	n.changes[end] = update{}
	n.changes = n.changes[:end]
}

// exceeds says what of a kind is left out.
func (n *news) exceeds(k source.Kind, ps []source.Problem) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.Equal(n.beyond[k], ps) {
		n.beyond[k] = ps
		n.tell()
	}
}

// replace adds what a whole list of a kind changes.
func (n *news) replace(k source.Kind, changes []update) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listed[k] = true
	n.add(changes)
	n.tell()
}

// well says that a kind is followed.
func (n *news) well(k source.Kind) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.troubles[k] != nil {
		delete(n.troubles, k)
		n.tell()
	}
}

// ill says why a kind is not followed, and gives that trouble: the first with this reason since the kind was last well.
func (n *news) ill(k source.Kind, reason, message string) trouble {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.troubles[k]
	if t == nil {
		t = &trouble{since: time.Now()}
		n.troubles[k] = t
	}
	if t.reason != reason {
		t.reason, t.message, t.turned = reason, message, time.Now()
		n.tell()
	}
	return *t
}

// delay says that it has been long enough for the first lists.
func (n *news) delay() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.late = true
	n.tell()
}

// take gives a batch to hand on, if there is one.
func (n *news) take() (b source.Batch, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	was := n.problems
	n.problems = n.trouble()
	b.Problems = n.problems
	if b.Waiting = !n.begun && !n.whole(); b.Waiting {
		return b, !slices.Equal(was, n.problems)
	}
	first := !n.begun
	n.begun = true
	b.Changes, b.Seen = make([]source.Change, len(n.changes)), n.seen
	for i, c := range n.changes {
		b.Changes[i] = c.Change
	}
	n.changes = nil
	clear(n.at)
	if first {
		n.at = map[source.Key]int{} // its room was for everything
	}
	return b, first || len(b.Changes) > 0 || !slices.Equal(was, n.problems)
}

// whole says whether all is there that a node must know to begin.
func (n *news) whole() bool {
	for _, r := range n.kinds {
		t := n.troubles[r.kind]
		without := !r.needed && (n.late || r.optional) && t != nil && (t.reason == Forbidden || t.reason == NotServed)
		if !n.listed[r.kind] && !without {
			return false
		}
	}
	return true
}

// trouble gives all problems that stand. What is wrong with the server stands once, since it began.
func (n *news) trouble() (ps []source.Problem) {
	whole := map[string]int{}
	for _, r := range n.kinds {
		t := n.troubles[r.kind]
		if t == nil && n.late && !n.begun && !n.listed[r.kind] {
			t = &trouble{reason: Slow, message: fmt.Sprintf("the API server has not sent all %s yet: nothing changes until it has", r.GroupResource()), since: n.start}
		}
		switch {
		case t == nil, r.optional && t.reason == NotServed:
		case !t.whole():
			ps = append(ps, t.problem())
		default:
			if i, ok := whole[t.reason]; !ok {
				whole[t.reason] = len(ps)
				ps = append(ps, t.problem())
			} else if t.since.Before(ps[i].Since) {
				ps[i].Since = t.since
			}
		}
	}
	for _, r := range n.kinds {
		ps = append(ps, n.beyond[r.kind]...)
	}
	return ps
}
