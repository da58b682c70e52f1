package reconcile

import (
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// entry is what is known of one key. There is one for each key that is wanted or held, so it is small.
type entry[K dataplane.Key, V comparable] struct {
	value  V          // the wanted value; where the key is not wanted, the held one
	job    *job[K, V] // what there is to do; nil: the kernel holds just what is wanted
	refs   int32      // how many times wanted parts render it
	held   bool       // the kernel holds the key
	seen   bool       // in the Read that is being taken in
	body   bool       // the wanted fact's Body is in table.bodies
	bodied bool       // the wanted fact has a Body
}

func (e *entry[K, V]) wanted() bool { return e.refs > 0 }

// has returns the value that the kernel holds.
func (e *entry[K, V]) has() (v V, held bool) {
	if e.job != nil && e.job.other {
		return e.job.old, true
	}
	return e.value, e.held
}

// job is a key that is not as wanted: it has to be put, to go, or, both, to change its value.
type job[K dataplane.Key, V comparable] struct {
	*entry[K, V]
	key   K
	rank  int
	n     uint64 // among jobs of the same rank
	at    int    // place in the list of all jobs
	other bool   // the key is held with another value than the wanted one:
	old   V

	why     *failure // nil: never refused
	drifted []unit   // owners, where it was others who undid it

	// Known in times of trouble, and of a large batch.
	owners []unit      // of this key, as far as asked for
	origin bool        // one of them has rendered the held value
	signed int32       // how many times their parts that are wanted render the wanted value
	base   bool        // a part of the base renders it
	wave   int         // puts of a lower wave come first
	group  model.Owner // the only one that needs it, where owners are tried by themselves
}

func (j *job[K, V]) puts() bool { return j.wanted() }
func (j *job[K, V]) dels() bool { return j.held }

// failure is why facts are not true, shared by all that were refused in one Write.
type failure struct {
	err       error
	since     time.Time
	attempts  int
	from, due time.Time // the next attempt: not before, and not much later
	alone     bool      // this one fact is the cause
	named     bool      // the plane said so
	certain   bool      // the cause is in their group, if not in each of them
}

// claim is a part's wish for a value of a key that other parts want with another value. While a change is taken in, it
// is the new value that waits for the old part to go; one that outlives the change is a bug of the plane.
type claim[T comparable, V comparable] struct {
	part  T
	value V
	body  any
}

// table holds every key that is wanted or held, and what there is to do.
type table[T comparable, K dataplane.Key, V comparable] struct {
	entries map[K]*entry[K, V]
	todo    []*job[K, V]        // in no order
	jobs    uint64              // jobs so far
	held    int                 // entries held
	claims  map[K][]claim[T, V] // wishes that wait behind another value, in the order they came
	known   bool                // a Read has come in; before, nothing is held and there are no jobs
	bodies  map[K]any           // of facts that are not written yet
}

func newTable[T comparable, K dataplane.Key, V comparable]() *table[T, K, V] {
	return &table[T, K, V]{entries: map[K]*entry[K, V]{}, claims: map[K][]claim[T, V]{}, bodies: map[K]any{}}
}

// at returns k's entry, a new one where there is none.
func (t *table[T, K, V]) at(k K) *entry[K, V] {
	e := t.entries[k]
	if e == nil {
		e = &entry[K, V]{}
		t.entries[k] = e
	}
	return e
}

// job returns what there is to do about k, or nil.
func (t *table[T, K, V]) job(k K) *job[K, V] {
	if e := t.entries[k]; e != nil {
		return e.job
	}
	return nil
}

// want counts one more wish for f. A second value for a key waits as a claim: the first stays.
func (t *table[T, K, V]) want(part T, f dataplane.Fact[K, V]) {
	switch e := t.at(f.Key); {
	case !e.wanted():
		t.adopt(f.Key, e, claim[T, V]{part, f.Value, f.Body}, 1)
	case e.value == f.Value:
		e.refs++
	default:
		t.claims[f.Key] = append(t.claims[f.Key], claim[T, V]{part, f.Value, f.Body})
	}
}

// drop takes back one wish of part for f.
func (t *table[T, K, V]) drop(part T, f dataplane.Fact[K, V]) {
	if t.unclaim(f.Key, part, f.Value) {
		return
	}
	e := t.at(f.Key)
	if e.refs > 1 {
		e.refs--
		return
	}
	c, refs := t.nextClaim(f.Key)
	t.adopt(f.Key, e, c, refs)
}

// adopt makes c, wished for refs times, what is wanted of k. What was refused before says nothing about it.
func (t *table[T, K, V]) adopt(k K, e *entry[K, V], c claim[T, V], refs int32) {
	has, held := e.has()
	e.value, e.refs, e.bodied = c.value, refs, c.body != nil
	t.setBody(k, e, c.body)
	if t.set(k, e, has, held); e.job != nil {
		e.job.why = nil
	}
}

// setBody holds the body of a wanted fact until it is written; nil forgets it.
func (t *table[T, K, V]) setBody(k K, e *entry[K, V], body any) {
	if body != nil {
		t.bodies[k], e.body = body, true
	} else if e.body {
		if delete(t.bodies, k); len(t.bodies) == 0 {
			t.bodies = map[K]any{} // a map never shrinks
		}
		e.body = false
	}
}

// unclaim forgets the claim of a part for a value, if it is there.
func (t *table[T, K, V]) unclaim(k K, part T, v V) bool {
	cs := t.claims[k]
	i := slices.IndexFunc(cs, func(c claim[T, V]) bool { return c.part == part && c.value == v })
	if i < 0 {
		return false
	}
	t.setClaims(k, slices.Delete(cs, i, i+1))
	return true
}

// nextClaim removes the oldest claim on k and all others for the same value, and returns it and how many they were.
func (t *table[T, K, V]) nextClaim(k K) (next claim[T, V], refs int32) {
	cs := t.claims[k]
	if len(cs) == 0 {
		return next, 0
	}
	next = cs[0]
	n := len(cs)
	cs = slices.DeleteFunc(cs, func(c claim[T, V]) bool { return c.value == next.value })
	t.setClaims(k, cs)
	return next, int32(n - len(cs))
}

func (t *table[T, K, V]) setClaims(k K, cs []claim[T, V]) {
	if len(cs) > 0 {
		t.claims[k] = cs
		return
	}
	if delete(t.claims, k); len(t.claims) == 0 {
		t.claims = map[K][]claim[T, V]{} // a map never shrinks
	}
}

// found takes in what the kernel holds, all of it, and returns the jobs that come of that alone.
func (t *table[T, K, V]) found(facts []dataplane.Fact[K, V]) (fresh []*job[K, V]) {
	t.known = true
	before := t.jobs
	for _, f := range facts {
		e := t.at(f.Key)
		e.seen = true
		t.set(f.Key, e, f.Value, true)
	}
	for k, e := range t.entries {
		if !e.seen {
			t.set(k, e, e.value, false)
		}
		e.seen = false
	}
	for _, j := range t.todo {
		if j.n > before {
			fresh = append(fresh, j)
		}
	}
	return fresh
}

// done records that the kernel holds what is wanted of j's key.
func (t *table[T, K, V]) done(j *job[K, V]) { t.set(j.key, j.entry, j.value, j.wanted()) }

// set records what the kernel holds for k, the value has or nothing, and with it what there is to do.
func (t *table[T, K, V]) set(k K, e *entry[K, V], has V, held bool) {
	if e.held != held {
		t.held += step(held)
		e.held = held
	}
	if !e.wanted() {
		e.value = has
	}
	other := held && e.value != has
	switch {
	case t.known && (other || held != e.wanted()):
		j := t.start(k, e)
		j.other, j.old = other, has
	case e.job != nil:
		t.finish(e.job)
	}
	if e.body && t.known && e.job == nil {
		t.setBody(k, e, nil)
	}
	if !e.wanted() && !held {
		delete(t.entries, k)
	}
}

func step(up bool) int {
	if up {
		return 1
	}
	return -1
}

// start returns e's job, a new one where there is none.
func (t *table[T, K, V]) start(k K, e *entry[K, V]) *job[K, V] {
	if e.job == nil {
		t.jobs++
		e.job = &job[K, V]{entry: e, key: k, rank: k.Rank(), n: t.jobs, at: len(t.todo)}
		t.todo = append(t.todo, e.job)
	}
	return e.job
}

// finish takes j off the list.
func (t *table[T, K, V]) finish(j *job[K, V]) {
	last := len(t.todo) - 1
	t.todo[j.at], t.todo[last].at = t.todo[last], j.at
	t.todo[last] = nil
	if t.todo = t.todo[:last]; last == 0 {
		t.todo = nil
	}
	j.entry.job = nil
}
