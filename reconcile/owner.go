package reconcile

import (
	"hash/maphash"
	"math"
	"slices"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// NoOwner is the label of held facts that no part rendered as far as the loop knows: an earlier run's, or another
// program's.
const NoOwner = "nobody"

// unit is what is refused or written by itself where an owner's parts differ: an owner's parts of one label.
type unit struct {
	owner model.Owner
	label string
}

// unowned is the unit of facts that no part rendered.
var unowned = unit{label: NoOwner}

// unitOf returns the unit of a part.
func (l *Loop[T, K, V]) unitOf(p T) unit {
	o := l.options.Owner(p)
	if l.options.Label == nil {
		return unit{o, o.String()}
	}
	return unit{o, l.options.Label(p)}
}

// ownedParts is the parts of each owner, by a hash of it, so that they are found without a look at all others. It is
// empty until they are asked for: most loops never are.
type ownedParts[T comparable] struct {
	of    func(T) model.Owner
	seed  maphash.Seed
	parts map[uint64][]T // nil: not asked for
}

// by returns the parts of o among all, which are those that were added and not removed.
func (x *ownedParts[T]) by(o model.Owner, all map[T]phase) []T {
	if x.parts == nil {
		x.seed, x.parts = maphash.MakeSeed(), make(map[uint64][]T, len(all))
		for p := range all {
			x.add(p)
		}
	}
	same := slices.Clone(x.parts[maphash.Comparable(x.seed, o)])
	return slices.DeleteFunc(same, func(p T) bool { return x.of(p) != o })
}

// hash returns by what p is found, if it is.
func (x *ownedParts[T]) hash(p T) (h uint64, is bool) {
	if x.parts == nil {
		return 0, false
	}
	o := x.of(p)
	return maphash.Comparable(x.seed, o), o != (model.Owner{})
}

func (x *ownedParts[T]) add(p T) {
	if h, is := x.hash(p); is {
		x.parts[h] = append(x.parts[h], p)
	}
}

func (x *ownedParts[T]) remove(p T) {
	h, is := x.hash(p)
	if !is {
		return
	}
	list := x.parts[h]
	i, end := slices.Index(list, p), len(list)-1
	var none T
	list[i], list[end] = list[end], none
	if x.parts[h] = list[:end]; end == 0 {
		delete(x.parts, h)
	}
}

// find sets the wave of every job, and with owners those: they take as much memory as a job. It renders the parts of
// the owners that only names (nil: all) and every part that is going, so it is for times of trouble. A job that is only
// other owners' has none then; one whose held value has no known origin has NoOwner besides.
func (l *Loop[T, K, V]) find(only func(model.Owner) bool, owners bool) {
	over := l.changesOver()
	for _, j := range l.table.todo {
		j.signed, j.wave = 0, lastWave
		if j.needs != &noNeeds {
			*j.needs = needs{drifted: j.drifted}
		}
	}
	for _, p := range l.present() {
		if o := l.options.Owner(p); only == nil || only(o) {
			l.sign(p, l.waveOf(o, over), owners)
		}
	}
	l.eachOfBase(func(j *job[K, V]) { j.need().base = true })
	if owners {
		for _, p := range l.gone {
			l.sign(p, -1, owners)
		}
	}
	for _, j := range l.table.todo {
		if j.base || j.signed < j.refs { // what else needs it is in no wave of its own
			j.wave = 0
		}
		if owners && j.held && !j.origin {
			j.need().owners = append(j.owners, unowned)
		}
	}
}

// sign puts p into the jobs that p has to do with: its wave, -1 where it is not wanted, and with owners its unit.
func (l *Loop[T, K, V]) sign(p T, wave int8, owners bool) {
	var o unit
	if owners {
		o = l.unitOf(p)
	}
	for _, f := range l.render(p) {
		j := l.table.job(f.Key)
		if j == nil {
			continue
		}
		if wave >= 0 && j.puts() && f.Value == j.value {
			j.signed++
			j.wave = min(j.wave, wave)
		}
		if !owners {
			continue
		}
		n := j.need()
		if !slices.Contains(n.owners, o) {
			n.owners = append(n.owners, o)
		}
		n.origin = n.origin || j.held && j.has == f.Value
	}
}

// named returns owners without unowned where there is another.
func named(owners []unit) []unit {
	if len(owners) < 2 {
		return owners
	}
	return slices.DeleteFunc(slices.Clone(owners), func(o unit) bool { return o == unowned })
}

// forget drops the parts that went, save those whose owners have held facts that could not go or change. Such a fact
// may stand on any other held fact of its owner, so one part is kept for each: for the key, and for the value that is
// held.
func (l *Loop[T, K, V]) forget() {
	type trace struct {
		owner  unit
		key    K
		origin bool
	}
	stuck, recorded := map[unit]bool{}, map[trace]bool{}
	for _, j := range l.table.todo {
		for _, o := range j.owners {
			stuck[o] = stuck[o] || j.held
		}
	}
	l.gone = slices.DeleteFunc(l.gone, func(p T) bool {
		o, known := l.unitOf(p), true
		if !stuck[o] {
			return true
		}
		for _, f := range l.render(p) {
			held, same := l.table.holds(f)
			if !held {
				continue
			}
			if t := (trace{o, f.Key, same}); !recorded[t] {
				recorded[t], known = true, false
			}
		}
		return known
	})
}

// barrier is what jobs that can't be done mean for others: of the same owner, and where an owner is not known, of all.
type barrier[K dataplane.Key, V comparable] struct {
	floor map[unit]int // by owner, the lowest rank not yet true: nothing above may come
	ceil  map[unit]int // by owner, the highest rank not yet gone or rewritten: nothing below may go
	top   int          // the highest of ceil
}

// pass returns those of jobs, which are in order, that need not wait for any of stuck. What has to wait stops others in
// turn.
func pass[K dataplane.Key, V comparable](jobs, stuck []*job[K, V]) []*job[K, V] {
	b := barrier[K, V]{map[unit]int{}, map[unit]int{}, math.MinInt}
	for _, j := range stuck {
		b.add(j)
	}
	return slices.DeleteFunc(jobs, func(j *job[K, V]) bool {
		stops := b.stops(j)
		if stops {
			b.add(j)
		}
		return stops
	})
}

func (b *barrier[K, V]) add(j *job[K, V]) {
	for _, o := range j.owners {
		if r, ok := b.floor[o]; j.puts() && o != unowned && (!ok || j.rank < r) {
			b.floor[o] = j.rank
		}
		if r, ok := b.ceil[o]; j.dels() && (!ok || j.rank > r) {
			b.ceil[o] = j.rank
			b.top = max(b.top, j.rank)
		}
	}
}

func (b *barrier[K, V]) stops(j *job[K, V]) bool {
	if j.puts() {
		return slices.ContainsFunc(j.owners, func(o unit) bool { r, ok := b.floor[o]; return ok && j.rank > r })
	}
	below := func(o unit) bool { r, ok := b.ceil[o]; return ok && j.rank < r }
	return below(unowned) || slices.ContainsFunc(j.owners, below) || slices.Contains(j.owners, unowned) && j.rank < b.top
}
