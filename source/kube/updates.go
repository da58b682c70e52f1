package kube

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/source"
)

// updates is what has been seen and not been delivered.
type updates struct {
	notified chan struct{} // holds one when there is something to deliver

	mu       sync.Mutex
	changes  []update
	seen     time.Time          // when the first of them came
	at       map[source.Key]int // places in changes
	kinds    []resource
	listed   map[source.Kind]bool
	troubles map[source.Kind]*trouble
	start    time.Time
	late     bool             // the first lists should all be there by now
	begun    bool             // the first batch has been delivered
	unlisted []source.Kind    // as delivered last
	problems []source.Problem // as delivered last
	beyond   map[source.Kind][]source.Problem
	others   *source.Problem // of policies that aren't evaluated
	nodes    widening
}

// update is a change and whether the consumer has not been told of the object.
type update struct {
	source.Change
	first bool
}

func newUpdates(kinds []resource) *updates {
	return &updates{notified: make(chan struct{}, 1), kinds: kinds, at: map[source.Key]int{},
		beyond: map[source.Kind][]source.Problem{}, listed: map[source.Kind]bool{}, troubles: map[source.Kind]*trouble{},
		start: time.Now(), nodes: widening{begin: make(chan struct{})}}
}

// signal reports that there may be something to deliver.
func (n *updates) signal() {
	select {
	case n.notified <- struct{}{}:
	default:
	}
}

// put adds changes. Of each object the latest counts.
func (n *updates) put(changes ...update) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.add(changes)
	n.signal()
}

// add keeps one change of each object that there is or that the consumer knows of, so that what waits is bounded by
// both.
func (n *updates) add(changes []update) {
	if len(n.changes) == 0 {
		n.seen = time.Now()
	}
	for _, c := range changes {
		n.nodes.see(c.Object)
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
func (n *updates) forget(i int) {
	end := len(n.changes) - 1
	delete(n.at, n.changes[i].Key)
	if i < end {
		n.changes[i] = n.changes[end]
		n.at[n.changes[i].Key] = i
	}
	n.changes[end] = update{}
	n.changes = n.changes[:end]
}

// exceeds returns what of a kind is left out.
func (n *updates) exceeds(k source.Kind, ps []source.Problem) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.Equal(n.beyond[k], ps) {
		n.beyond[k] = ps
		n.signal()
	}
}

// setOthers takes in the problem of policies that are not evaluated, nil: there are none.
func (n *updates) setOthers(p *source.Problem) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if was := n.others; was != nil && p != nil && was.Message == p.Message {
		return
	}
	if p != nil {
		p.Since = time.Now()
	}
	n.others = p
	n.signal()
}

// replace adds what a whole list of a kind changes, which may be empty.
func (n *updates) replace(k source.Kind, changes []update, empty bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listed[k] = true
	if k == source.Node && empty {
		n.nodes.need() // a name that no Node has can be told from a cluster without Nodes
	}
	n.add(changes)
	n.signal()
}

// isListed reports whether a whole list of a kind has come.
func (n *updates) isListed(k source.Kind) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.listed[k]
}

// well reports that a kind is followed.
func (n *updates) well(k source.Kind) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.troubles[k] != nil {
		delete(n.troubles, k)
		n.signal()
	}
}

// ill returns why a kind is not followed, and returns that trouble: the first with this reason since the kind was last
// well.
func (n *updates) ill(k source.Kind, reason, message string) trouble {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.troubles[k]
	if t == nil {
		t = &trouble{since: time.Now()}
		n.troubles[k] = t
	}
	if t.reason != reason {
		t.reason, t.message, t.turned = reason, message, time.Now()
		n.signal()
	}
	return *t
}

// delay reports that it has been long enough for the first lists.
func (n *updates) delay() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.late = true
	n.signal()
}

// collect returns a batch to deliver, if there is one.
func (n *updates) collect() (b source.Batch, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	was := n.problems
	n.problems = n.trouble()
	b.Problems = n.problems
	waits := n.waitsForNodes()
	if b.Waiting = !n.begun && (waits || len(n.missing(false)) > 0); b.Waiting {
		n.drain(&b)
		return b, len(b.Changes) > 0 || !slices.Equal(was, n.problems)
	}
	before := n.unlisted
	if b.Unlisted = before; waits {
		return b, !slices.Equal(was, n.problems)
	}
	if !n.begun || len(before) > 0 {
		n.unlisted = n.missing(true)
	}
	b.Unlisted = n.unlisted
	news := !n.begun || len(before) != len(n.unlisted)
	n.begun = true
	n.drain(&b)
	if news {
		at := make(map[source.Key]int, len(n.at)) // the room of the other was for everything
		maps.Copy(at, n.at)
		n.at = at
	}
	return b, news || len(b.Changes) > 0 || !slices.Equal(was, n.problems)
}

// drain delivers the changes, but for those of a kind whose first list is not whole. Those of kinds that can't be done
// without are delivered as they come while nothing is decided by them yet.
func (n *updates) drain(b *source.Batch) {
	b.Changes, b.Seen = make([]source.Change, 0, len(n.changes)), n.seen
	changes, early := n.changes, b.Waiting || len(b.Unlisted) > 0
	n.changes = nil
	clear(n.at)
	for _, c := range changes {
		if !n.listed[c.Key.Kind] && !(early && n.isNeeded(c.Key.Kind)) {
			n.at[c.Key] = len(n.changes)
			n.changes = append(n.changes, c)
		} else {
			b.Changes = append(b.Changes, c.Change)
		}
	}
}

// isNeeded reports whether nothing begins without a kind, or no policies do.
func (n *updates) isNeeded(k source.Kind) bool {
	return slices.ContainsFunc(n.kinds, func(r resource) bool { return r.kind == k && r.needed })
}

// missing returns the kinds for policies, or the others, that are not listed and can't be done without.
func (n *updates) missing(policies bool) (l []source.Kind) {
	for _, r := range n.kinds {
		t := n.troubles[r.kind]
		without := t != nil && (r.optional && (t.reason == NotServed || t.reason == VersionNotRead) ||
			!r.needed && (n.late || r.optional) && (t.reason == Forbidden || t.reason == NotServed))
		if r.policies == policies && !n.listed[r.kind] && !without {
			l = append(l, r.kind)
		}
	}
	return l
}

// trouble returns all problems that stand. What is wrong with the server stands once, since it began.
func (n *updates) trouble() (ps []source.Problem) {
	whole := map[string]int{}
	for _, r := range n.kinds {
		t := n.troubles[r.kind]
		if t == nil && n.late && !n.listed[r.kind] && (!n.begun || slices.Contains(n.unlisted, r.kind)) {
			t = &trouble{reason: Slow, message: fmt.Sprintf("the API server has not sent all %s yet", r.GroupResource()),
				since: n.start}
			if !r.policies {
				t.message += ": nothing changes until it has"
			}
		}
		switch {
		case t == nil, r.optional && t.reason == NotServed:
		case !t.whole():
			p := t.problem()
			if r.policies && !n.listed[r.kind] {
				p.Message += ": until then no policy of this node changes, and no pod is attached that one may concern"
			}
			ps = append(ps, p)
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
	if n.others != nil {
		ps = append(ps, *n.others)
	}
	return ps
}
