package reconcile

import (
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
)

// entry is what is known of one key. Most keys are wanted and held with one value, so there is room for one; a held value
// that is not the wanted one stands in table.old.
type entry[V comparable] struct {
	value V     // the wanted value; where the key is not wanted, the held one
	refs  int32 // how many times wanted parts render it
	held  bool  // the kernel holds the key
	other bool  // held, with another value than the wanted one
}

func (e entry[V]) wanted() bool { return e.refs > 0 }

// settled says that the kernel holds just what is wanted.
func (e entry[V]) settled() bool { return e.wanted() == e.held && !e.other }

// claim is a part's wish for a value of a key that other parts want with another value. While a change is taken in, it is
// the new value that waits for the old part to go; one that outlives the change is a bug of the plane.
type claim[T comparable, V comparable] struct {
	part  T
	value V
}

// job is a key that is not settled.
type job struct {
	n   uint64   // jobs of one rank are done by rising n
	why *failure // nil: never refused
}

// failure is why facts are not true, shared by all that were refused in one Write.
type failure struct {
	err       error
	since     time.Time
	attempts  int
	from, due time.Time // the next attempt: not before, and not much later
	alone     bool      // this one fact is the cause
}

// table holds every key that is wanted or held, and which of them are not settled.
type table[T comparable, K dataplane.Key, V comparable] struct {
	entries map[K]entry[V]
	old     map[K]V             // held values of entries with other set
	todo    map[K]job           // keys that are not settled
	jobs    uint64              // jobs so far
	claims  map[K][]claim[T, V] // wishes that wait behind another value, in the order they came
	known   bool                // a Read has come in: held means something, and todo is kept
	held    int                 // entries held
}

func newTable[T comparable, K dataplane.Key, V comparable]() *table[T, K, V] {
	return &table[T, K, V]{
		entries: map[K]entry[V]{}, old: map[K]V{}, todo: map[K]job{}, claims: map[K][]claim[T, V]{},
	}
}

// want counts one more wish for f. A second value for a key waits as a claim: the first stays.
func (t *table[T, K, V]) want(part T, f dataplane.Fact[K, V]) {
	e := t.entries[f.Key]
	switch {
	case !e.wanted():
		t.adopt(f.Key, e, f.Value, 1)
	case e.value == f.Value:
		e.refs++
		t.entries[f.Key] = e
	default:
		t.claims[f.Key] = append(t.claims[f.Key], claim[T, V]{part, f.Value})
	}
}

// adopt makes v, wished for refs times, the wanted value of k, whose entry e is not wanted.
func (t *table[T, K, V]) adopt(k K, e entry[V], v V, refs int32) {
	if e.held && e.value != v {
		t.old[k], e.other = e.value, true
	}
	e.value, e.refs = v, refs
	t.entries[k] = e
	t.touch(k, e)
}

// drop takes back one wish of part for f.
func (t *table[T, K, V]) drop(part T, f dataplane.Fact[K, V]) {
	if t.unclaim(f.Key, claim[T, V]{part, f.Value}) {
		return
	}
	e := t.entries[f.Key]
	if e.refs--; e.refs > 0 {
		t.entries[f.Key] = e
		return
	}
	if e.other {
		e.value, e.other = t.old[f.Key], false
		delete(t.old, f.Key)
	}
	if v, refs, ok := t.nextClaim(f.Key); ok {
		t.adopt(f.Key, e, v, refs)
		return
	}
	if e.held {
		t.entries[f.Key] = e
	} else {
		delete(t.entries, f.Key)
	}
	t.touch(f.Key, e)
}

// unclaim forgets c, if it is there.
func (t *table[T, K, V]) unclaim(k K, c claim[T, V]) bool {
	cs := t.claims[k]
	i := slices.Index(cs, c)
	if i < 0 {
		return false
	}
	t.setClaims(k, slices.Delete(cs, i, i+1))
	return true
}

// nextClaim takes the oldest claim on k and all others for the same value.
func (t *table[T, K, V]) nextClaim(k K) (v V, refs int32, ok bool) {
	cs := t.claims[k]
	if len(cs) == 0 {
		return v, 0, false
	}
	v = cs[0].value
	n := len(cs)
	cs = slices.DeleteFunc(cs, func(c claim[T, V]) bool { return c.value == v })
	t.setClaims(k, cs)
	return v, int32(n - len(cs)), true
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

// touch notes that what is wanted of k has changed: there is something to do, or nothing more, and an earlier refusal
// says nothing about it.
func (t *table[T, K, V]) touch(k K, e entry[V]) {
	switch {
	case !t.known:
	case e.settled():
		delete(t.todo, k)
	default:
		t.add(k)
	}
}

func (t *table[T, K, V]) add(k K) {
	t.jobs++
	t.todo[k] = job{n: t.jobs}
}

// found takes in what the kernel holds, all of it, and gives the keys that came to be unsettled by that alone.
func (t *table[T, K, V]) found(facts []dataplane.Fact[K, V]) (drift []K) {
	t.forget()
	for _, f := range facts {
		t.hold(f)
	}
	for k := range t.todo {
		if e, ok := t.entries[k]; !ok || e.settled() {
			delete(t.todo, k)
		}
	}
	for k, e := range t.entries {
		if e.held {
			t.held++
		}
		if _, ok := t.todo[k]; !ok && !e.settled() {
			t.add(k)
			drift = append(drift, k)
		}
	}
	t.known = true
	return drift
}

// forget leaves what is wanted, and of what is held nothing.
func (t *table[T, K, V]) forget() {
	t.held = 0
	clear(t.old)
	for k, e := range t.entries {
		if !e.wanted() {
			delete(t.entries, k)
		} else if e.held {
			e.held, e.other = false, false
			t.entries[k] = e
		}
	}
}

// hold notes that the kernel holds f.
func (t *table[T, K, V]) hold(f dataplane.Fact[K, V]) {
	e := t.entries[f.Key]
	e.held = true
	if !e.wanted() {
		e.value = f.Value
	} else if e.value != f.Value {
		e.other, t.old[f.Key] = true, f.Value
	}
	t.entries[f.Key] = e
}

// holds gives the value that the kernel holds for k.
func (t *table[T, K, V]) holds(k K) (v V, ok bool) {
	e := t.entries[k]
	if e.other {
		return t.old[k], true
	}
	return e.value, e.held
}

// done notes that the kernel now holds what is wanted of k.
func (t *table[T, K, V]) done(k K) {
	e := t.entries[k]
	if !e.held {
		t.held++
	}
	if e.other {
		delete(t.old, k)
	}
	if e.wanted() {
		e.held, e.other = true, false
		t.entries[k] = e
	} else {
		t.held--
		delete(t.entries, k)
	}
	if delete(t.todo, k); len(t.todo) == 0 {
		t.todo = map[K]job{} // a map never shrinks
	}
}
