package reconcile

import (
	"hash/maphash"
	"iter"
	"slices"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// entry is what is known of one key. There is one for each key that is wanted or held, so it is small and has no
// pointer: a fact that is as wanted is known by hashes, and rendered again where it is to be written once more.
type entry struct {
	digest uint64 // of the fact that is wanted, or, before a Read is compared, held
	refs   int32  // how many times wanted parts render it
	job    int32  // its number in table.todo, from 1; settled or unread
}

// The numbers of entries without a job.
const (
	settled = 0  // the kernel holds just what is wanted, or, before a Read is compared, what nothing wants so far
	unread  = -1 // it is wanted; whether it is held is not known
)

// job is a key that is not as wanted: it has to be put, to go, or, both, to change its value.
type job[K dataplane.Key, V comparable] struct {
	key    K
	value  V      // the wanted value
	has    V      // the held value
	body   any    // of the wanted fact
	id     uint64 // of its entry
	n      uint64 // among jobs of the same rank
	rank   int
	at     int32    // place in the list of all jobs
	refs   int32    // how many times wanted parts render it; 0: it has to go
	signed int32    // of these, by parts of the owners asked for
	wave   int8     // puts of a lower wave come first
	held   bool     // the kernel holds the key
	seen   bool     // in the Read that is being compared
	why    *failure // nil: never refused
	*needs          // never nil: noNeeds until asked for
}

// needs is which owners need a job: known in times of trouble, which few starts are, and they have a job for each fact.
type needs struct {
	owners  []unit      // of this key, as far as asked for
	origin  bool        // one of them has rendered the held value
	base    bool        // a part of the base renders it
	group   model.Owner // the only one that needs it, where owners are tried by themselves
	drifted []unit      // owners, where it was others who undid it
}

// noNeeds is never changed.
var noNeeds needs

// need returns j's needs, to be changed.
func (j *job[K, V]) need() *needs {
	if j.needs == &noNeeds {
		j.needs = &needs{}
	}
	return j.needs
}

// ungroup has j wait for no wave or group.
func (j *job[K, V]) ungroup() {
	if j.wave = 0; j.needs != &noNeeds {
		j.group = model.Owner{}
	}
}

func (j *job[K, V]) puts() bool { return j.refs > 0 }
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
type claim[T comparable, K dataplane.Key, V comparable] struct {
	part T
	dataplane.Fact[K, V]
}

// table holds every key that is wanted or held, and what there is to do. A key that is as wanted is known by a hash of
// itself and one of its fact, 64 bits each, both by seeds that no one else knows. Two facts are taken for one where
// both agree: of n facts by chance in one of 2^129/n² runs. Where the keys' hashes alone agree (2^65/n²), one of the
// two is reported as wanted with different values, until a restart draws other seeds.
type table[T comparable, K dataplane.Key, V comparable] struct {
	keys, facts maphash.Seed
	entries     entries
	todo        []*job[K, V]                // in no order
	jobs        uint64                      // jobs so far
	claims      map[uint64][]claim[T, K, V] // wishes that wait behind another value, in the order they came
	known       bool                        // a Read has come in; before, nothing is held and there are no jobs
}

func newTable[T comparable, K dataplane.Key, V comparable]() *table[T, K, V] {
	return &table[T, K, V]{keys: maphash.MakeSeed(), facts: maphash.MakeSeed(),
		claims: map[uint64][]claim[T, K, V]{}}
}

// id returns what a key is known by: not 0.
func (t *table[T, K, V]) id(k K) uint64 { return max(1, maphash.Comparable(t.keys, k)) }

// statement is what a fact says.
type statement[K dataplane.Key, V comparable] struct {
	key   K
	value V
}

// digest returns what a fact is known by among those of its key.
func (t *table[T, K, V]) digest(k K, v V) uint64 {
	return maphash.Comparable(t.facts, statement[K, V]{k, v})
}

// job returns what there is to do about k, or nil.
func (t *table[T, K, V]) job(k K) *job[K, V] {
	if len(t.todo) == 0 {
		return nil
	}
	e, _ := t.entries.get(t.id(k))
	return t.jobOf(e)
}

// jobOf returns what there is to do about an entry's key, or nil.
func (t *table[T, K, V]) jobOf(e entry) *job[K, V] {
	if e.job > 0 {
		return t.todo[e.job-1]
	}
	return nil
}

// wants reports whether f's key is wanted, and with f's value.
func (t *table[T, K, V]) wants(f dataplane.Fact[K, V]) (key, value bool) {
	e, _ := t.entries.get(t.id(f.Key))
	if j := t.jobOf(e); j != nil {
		return j.puts(), j.puts() && j.value == f.Value
	}
	return e.refs > 0, e.refs > 0 && e.digest == t.digest(f.Key, f.Value)
}

// holds reports whether the kernel holds f's key, and with f's value.
func (t *table[T, K, V]) holds(f dataplane.Fact[K, V]) (key, value bool) {
	e, known := t.entries.get(t.id(f.Key))
	if j := t.jobOf(e); j != nil {
		return j.held, j.held && j.has == f.Value
	}
	key = known && e.job == settled
	return key, key && e.digest == t.digest(f.Key, f.Value)
}

// held returns how many keys the kernel holds.
func (t *table[T, K, V]) held() (n int) {
	if !t.known {
		return 0
	}
	n = t.entries.len() - len(t.todo)
	for _, j := range t.todo {
		n += int(one(j.held))
	}
	return n
}

// want counts one more wish for f. A second value for a key waits as a claim: the first stays.
func (t *table[T, K, V]) want(part T, f dataplane.Fact[K, V]) {
	id := t.id(f.Key)
	e, known := t.entries.get(id)
	switch j := t.jobOf(e); {
	case j != nil && !j.puts():
		t.adopt(j, f, 1)
	case j != nil && j.value == f.Value:
		j.refs++
	case j != nil:
		t.claim(id, part, f)
	case known && e.digest == t.digest(f.Key, f.Value):
		e.refs++
		t.entries.set(id, e)
	case known && e.refs > 0:
		t.claim(id, part, f)
	case t.known: // it is not held, or another value is, which compare sets
		t.adopt(t.start(id, f.Key), f, 1)
	default:
		t.entries.set(id, entry{t.digest(f.Key, f.Value), 1, unread})
	}
}

// drop takes back one wish of part for f.
func (t *table[T, K, V]) drop(part T, f dataplane.Fact[K, V]) {
	id := t.id(f.Key)
	if t.unclaim(id, part, f.Value) {
		return
	}
	e, known := t.entries.get(id)
	j := t.jobOf(e)
	switch {
	case !known:
		return
	case j != nil && j.refs > 1:
		j.refs--
		return
	case j == nil && e.refs > 1:
		e.refs--
		t.entries.set(id, e)
		return
	}
	next, refs := t.nextClaim(id)
	switch {
	case j != nil:
	case e.job == settled:
		j = t.start(id, f.Key)
		j.held, j.has = true, f.Value
	case refs == 0:
		t.entries.remove(id)
		return
	default:
		t.entries.set(id, entry{t.digest(next.Key, next.Value), refs, unread})
		return
	}
	t.adopt(j, next, refs)
}

// adopt makes f, wished for refs times, what is wanted of j's key. What was refused before says nothing about it.
func (t *table[T, K, V]) adopt(j *job[K, V], f dataplane.Fact[K, V], refs int32) {
	j.value, j.body, j.refs, j.why = f.Value, f.Body, refs, nil
	t.set(j, j.has, j.held)
}

func (t *table[T, K, V]) claim(id uint64, part T, f dataplane.Fact[K, V]) {
	t.claims[id] = append(t.claims[id], claim[T, K, V]{part, f})
}

// unclaim forgets the claim of a part for a value, if it is there.
func (t *table[T, K, V]) unclaim(id uint64, part T, v V) bool {
	cs := t.claims[id]
	i := slices.IndexFunc(cs, func(c claim[T, K, V]) bool { return c.part == part && c.Value == v })
	if i < 0 {
		return false
	}
	t.setClaims(id, slices.Delete(cs, i, i+1))
	return true
}

// nextClaim removes the oldest claim on a key and all others for the same value, and returns it and how many they were.
func (t *table[T, K, V]) nextClaim(id uint64) (next dataplane.Fact[K, V], refs int32) {
	cs := t.claims[id]
	if len(cs) == 0 {
		return next, 0
	}
	next = cs[0].Fact
	n := len(cs)
	cs = slices.DeleteFunc(cs, func(c claim[T, K, V]) bool { return c.Value == next.Value })
	t.setClaims(id, cs)
	return next, int32(n - len(cs))
}

func (t *table[T, K, V]) setClaims(id uint64, cs []claim[T, K, V]) {
	if len(cs) > 0 {
		t.claims[id] = cs
		return
	}
	if delete(t.claims, id); len(t.claims) == 0 {
		t.claims = map[uint64][]claim[T, K, V]{} // a map never shrinks
	}
}

// learn takes in what the kernel holds at the first Read, so that what is wanted next is compared as it comes. compare
// must follow.
func (t *table[T, K, V]) learn(facts []dataplane.Fact[K, V]) {
	if t.known {
		return
	}
	t.known = true
	t.entries.reserve(len(facts))
	for _, f := range facts {
		id := t.id(f.Key)
		if _, known := t.entries.get(id); !known {
			t.entries.set(id, entry{digest: t.digest(f.Key, f.Value)})
		}
	}
}

// compare takes in what the kernel holds, all of it, and returns the jobs that come of that alone. wanted are the
// facts of all wanted parts.
func (t *table[T, K, V]) compare(facts []dataplane.Fact[K, V], wanted iter.Seq[dataplane.Fact[K, V]]) []*job[K, V] {
	before := t.jobs
	var same, due uint64    // sums of what keys are known by: a plane may read one twice, while its kernel changes
	other := map[uint64]V{} // held with another value than the wanted one, by what is known of a key
	for _, f := range facts {
		id := t.id(f.Key)
		e, known := t.entries.get(id)
		j := t.jobOf(e)
		switch {
		case j == nil && known && e.refs > 0 && e.digest == t.digest(f.Key, f.Value):
			same += id
			if e.job == unread {
				t.entries.set(id, entry{digest: e.digest, refs: e.refs})
			}
			continue
		case j == nil && known && e.refs > 0:
			other[id] = f.Value
			continue
		case j == nil:
			j = t.start(id, f.Key)
		}
		j.seen = true
		t.set(j, f.Value, true)
	}
	var none V
	for _, j := range slices.Clone(t.todo) {
		if !j.seen {
			t.set(j, none, false)
		}
		j.seen = false
	}
	for id, e := range t.entries.all() {
		if e.job <= 0 {
			due += id
		}
	}
	if same != due {
		t.lose(facts, other, wanted)
	}
	return slices.DeleteFunc(slices.Clone(t.todo), func(j *job[K, V]) bool { return j.n <= before })
}

// lose starts the jobs of the facts that are wanted and not among facts: of other, the held value.
func (t *table[T, K, V]) lose(facts []dataplane.Fact[K, V], other map[uint64]V, wanted iter.Seq[dataplane.Fact[K, V]]) {
	lost := make(map[uint64]struct{}, t.entries.len()-len(t.todo))
	for id, e := range t.entries.all() {
		if e.job <= 0 {
			lost[id] = struct{}{}
		}
	}
	for _, f := range facts {
		id := t.id(f.Key)
		if _, is := other[id]; !is {
			delete(lost, id)
		}
	}
	if len(lost) == 0 {
		return
	}
	for f := range wanted {
		id := t.id(f.Key)
		e, _ := t.entries.get(id)
		if _, is := lost[id]; !is || e.digest != t.digest(f.Key, f.Value) {
			continue
		}
		j := t.start(id, f.Key)
		j.has, j.held = other[id]
		t.adopt(j, f, e.refs)
		if delete(lost, id); len(lost) == 0 {
			return
		}
	}
}

// done records that the kernel holds what is wanted of j's key.
func (t *table[T, K, V]) done(j *job[K, V]) { t.set(j, j.value, j.puts()) }

// set records what the kernel holds for j's key, the value has or nothing. Where that is as wanted, j is done.
func (t *table[T, K, V]) set(j *job[K, V], has V, held bool) {
	switch j.has, j.held = has, held; {
	case j.puts() && held && j.value == has:
		t.finish(j)
		t.entries.set(j.id, entry{t.digest(j.key, j.value), j.refs, settled})
	case !j.puts() && !held:
		t.finish(j)
		t.entries.remove(j.id)
	}
}

// start returns a new job about a key.
func (t *table[T, K, V]) start(id uint64, k K) *job[K, V] {
	t.jobs++
	j := &job[K, V]{key: k, id: id, rank: k.Rank(), n: t.jobs, at: int32(len(t.todo)), needs: &noNeeds}
	t.todo = append(t.todo, j)
	t.entries.set(id, entry{job: int32(len(t.todo))})
	return j
}

// finish takes j off the list.
func (t *table[T, K, V]) finish(j *job[K, V]) {
	end := len(t.todo) - 1
	if last := t.todo[end]; last != j {
		t.todo[j.at], last.at = last, j.at
		t.entries.set(last.id, entry{job: j.at + 1})
	}
	t.todo[end] = nil
	if t.todo = t.todo[:end]; end == 0 {
		t.todo = nil
	}
}
