package reconcile

import (
	"math"
	"slices"

	"fairlead.dev/fairlead/dataplane"
)

// Nobody is the owner of held facts that no part rendered as far as the loop knows: an earlier run's, or a stranger's.
const Nobody = "nobody"

// find sets the owners and the wave of every job. It renders the parts of the groups that only
// names (nil: all) and every part that is going, so it is for times of trouble. A job that is only other owners' has
// none then; one whose held value has no known origin has Nobody besides.
func (l *Loop[T, K, V]) find(only func(group string) bool) {
	over := l.changesOver()
	for _, j := range l.table.todo {
		j.owners, j.origin, j.signed, j.base, j.wave = nil, false, 0, false, lastWave
	}
	for _, p := range l.present() {
		if o := l.owner(p); only == nil || only(l.group(o)) {
			l.sign(p, o, l.waveOf(l.group(o), over))
		}
	}
	l.eachOfBase(func(j *job[K, V]) { j.base = true })
	for _, p := range l.gone {
		l.sign(p, l.owner(p), -1)
	}
	for _, j := range l.table.todo {
		if j.base || j.signed < j.refs { // what else needs it is in no wave of its own
			j.wave = 0
		}
		if j.held && !j.origin {
			j.owners = append(j.owners, Nobody)
		}
	}
}

// sign puts p's owner o into the jobs that p has to do with, and its wave; -1 is a part's that is not wanted.
func (l *Loop[T, K, V]) sign(p T, o string, wave int) {
	for _, f := range l.render(p) {
		j := l.table.job(f.Key)
		if j == nil {
			continue
		}
		if wave >= 0 && j.puts() && f.Value == j.value {
			j.signed++
			j.wave = min(j.wave, wave)
		}
		if !slices.Contains(j.owners, o) {
			j.owners = append(j.owners, o)
		}
		has, held := j.has()
		j.origin = j.origin || held && has == f.Value
	}
}

// named leaves Nobody out where there is somebody.
func named(owners []string) []string {
	if len(owners) < 2 {
		return owners
	}
	return slices.DeleteFunc(slices.Clone(owners), func(o string) bool { return o == Nobody })
}

// forget drops the parts that went, save those whose owners have held facts that could not go or change. Such a fact may
// stand on any other held fact of its owner, so one part is kept for each: for the key, and for the value that is held.
func (l *Loop[T, K, V]) forget() {
	type trace struct {
		owner  string
		key    K
		origin bool
	}
	stuck, kept := map[string]bool{}, map[trace]bool{}
	for _, j := range l.table.todo {
		for _, o := range j.owners {
			stuck[o] = stuck[o] || j.held
		}
	}
	l.gone = slices.DeleteFunc(l.gone, func(p T) bool {
		o, known := l.owner(p), true
		if !stuck[o] {
			return true
		}
		for _, f := range l.render(p) {
			e := l.table.entries[f.Key]
			if e == nil || !e.held {
				continue
			}
			has, _ := e.has()
			if t := (trace{o, f.Key, has == f.Value}); !kept[t] {
				kept[t], known = true, false
			}
		}
		return known
	})
}

// barrier is what jobs that can't be done mean for others: of the same owner, and where an owner is not known, of all.
type barrier[K dataplane.Key, V comparable] struct {
	floor map[string]int // by owner, the lowest rank not yet true: nothing above may come
	ceil  map[string]int // by owner, the highest rank not yet gone or rewritten: nothing below may go
	top   int            // the highest of ceil
}

// pass gives those of jobs, which are in order, that need not wait for any of stuck. What has to wait stops others in turn.
func pass[K dataplane.Key, V comparable](jobs, stuck []*job[K, V]) []*job[K, V] {
	b := barrier[K, V]{map[string]int{}, map[string]int{}, math.MinInt}
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
		if r, ok := b.floor[o]; j.puts() && o != Nobody && (!ok || j.rank < r) {
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
		return slices.ContainsFunc(j.owners, func(o string) bool { r, ok := b.floor[o]; return ok && j.rank > r })
	}
	below := func(o string) bool { r, ok := b.ceil[o]; return ok && j.rank < r }
	return below(Nobody) || slices.ContainsFunc(j.owners, below) || slices.Contains(j.owners, Nobody) && j.rank < b.top
}
