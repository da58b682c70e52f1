package reconcile

import (
	"math"
	"math/bits"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// largeGroup is the weight above which a group that comes in one batch is written after the smaller ones: a quarter of
// what resolve lets one Service have by default, so that a few of those don't hold others.
const largeGroup = 1024

// baseWave is the wave of facts of the base that stand above those of groups, where groups are tried by themselves.
const baseWave = 1

// lastWave is the wave of groups in which single facts were refused: what is left of them comes after everything else.
const lastWave = 64

// measure records the groups of parts that are large.
func (l *Loop[T, K, V]) measure(parts []T, weights []int) {
	sizes := map[model.Owner]int{}
	for i, p := range parts {
		sizes[l.options.Owner(p)] += weights[i]
	}
	for g, n := range sizes {
		if g != (model.Owner{}) && n > largeGroup {
			l.large[g] = max(l.large[g], baseWave+int8(bits.Len(uint(n/largeGroup))))
		}
	}
}

// waveOf returns the wave of facts that only parts of group need. A base that changes over to new values waits for
// large groups: until then the old one serves them.
func (l *Loop[T, K, V]) waveOf(group model.Owner, changesOver bool) int8 {
	switch {
	case l.blame.culprits[group]:
		return lastWave
	case changesOver:
		return 0
	}
	return l.large[group]
}

// divide sets the group of each job. Facts of the base that rank above all others come after all groups; facts of
// several groups come before them. find must have run for all owners.
func (l *Loop[T, K, V]) divide() {
	top := math.MinInt
	for _, j := range l.table.todo {
		if j.base {
			continue
		}
		for i, o := range j.owners {
			if i == 0 || o.owner == j.group {
				j.need().group = o.owner
			} else {
				j.need().group = model.Owner{}
				break
			}
		}
		top = max(top, j.rank)
	}
	for _, j := range l.table.todo {
		if j.base && j.rank >= top {
			j.wave = baseWave
		}
	}
}

// changesOver reports whether a fact of the base is held with another value than the wanted one.
func (l *Loop[T, K, V]) changesOver() (does bool) {
	l.eachOfBase(func(j *job[K, V]) { does = does || j.puts() && j.held })
	return does
}

// serving reports whether the facts of the base are true.
func (l *Loop[T, K, V]) serving() bool {
	serves := l.table.known
	l.eachOfBase(func(j *job[K, V]) { serves = serves && !j.puts() })
	return serves
}

// eachOfBase calls f with what there is to do about facts of the base.
func (l *Loop[T, K, V]) eachOfBase(f func(*job[K, V])) {
	if len(l.table.todo) == 0 {
		return
	}
	for _, facts := range l.ground {
		for _, fact := range facts {
			if j := l.table.job(fact.Key); j != nil {
				f(j)
			}
		}
	}
}

// render returns the facts of p. Those of the base are rendered once.
func (l *Loop[T, K, V]) render(p T) []dataplane.Fact[K, V] {
	if facts, ok := l.ground[p]; ok {
		return facts
	}
	return l.plane.Render(p)
}

// withoutBodies returns facts without what only a Write needs.
func withoutBodies[K dataplane.Key, V comparable](facts []dataplane.Fact[K, V]) []dataplane.Fact[K, V] {
	l := make([]dataplane.Fact[K, V], len(facts))
	for i, f := range facts {
		l[i] = dataplane.Fact[K, V]{Key: f.Key, Value: f.Value}
	}
	return l
}

// wanted returns the facts of all parts that the table has as wanted, rendered again.
func (l *Loop[T, K, V]) wanted(yield func(dataplane.Fact[K, V]) bool) {
	for _, p := range l.present() {
		for _, f := range l.plane.Render(p) {
			if !yield(f) {
				return
			}
		}
	}
}
