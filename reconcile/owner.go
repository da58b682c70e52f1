package reconcile

import (
	"math"
	"slices"

	"fairlead.dev/fairlead/dataplane"
)

// Nobody is the owner of held facts that no part rendered as far as the loop knows: an earlier run's, or a stranger's.
const Nobody = "nobody"

// owners says to whom unsettled keys belong: owner names by key. It renders the parts of the owners in only (nil: all)
// and every part that is going, so it is for times of trouble. A key that only other owners want has none here; one whose
// held value has no known origin has Nobody besides.
func (l *Loop[T, K, V]) owners(only map[string]bool) map[K][]string {
	owners, origin := map[K][]string{}, map[K]bool{}
	note := func(p T, o string) {
		for _, f := range l.plane.Render(p) {
			_, unsettled := l.table.todo[f.Key]
			_, claimed := l.table.claims[f.Key]
			if (unsettled || claimed) && !slices.Contains(owners[f.Key], o) {
				owners[f.Key] = append(owners[f.Key], o)
			}
			if v, ok := l.table.holds(f.Key); unsettled && ok && v == f.Value {
				origin[f.Key] = true
			}
		}
	}
	for _, p := range l.present() {
		if o := l.owner(p); only == nil || only[o] {
			note(p, o)
		}
	}
	for _, p := range l.gone {
		note(p, l.owner(p))
	}
	for k := range l.table.todo {
		if _, ok := l.table.holds(k); ok && !origin[k] {
			owners[k] = append(owners[k], Nobody)
		}
	}
	return owners
}

// barrier is what facts that can't be written mean for others: of the same owner, and where an owner is not known, of all.
type barrier[K dataplane.Key] struct {
	owners map[K][]string
	floor  map[string]int // by owner, the lowest rank not yet true: nothing above may come
	ceil   map[string]int // by owner, the highest rank not yet gone or rewritten: nothing below may go
	top    int            // the highest of ceil
}

// pass gives those of moves, which are in order, that need not wait for any of stuck. What has to wait stops others in turn.
func pass[K dataplane.Key](moves, stuck []move[K], owners map[K][]string) []move[K] {
	b := barrier[K]{owners, map[string]int{}, map[string]int{}, math.MinInt}
	for _, m := range stuck {
		b.add(m)
	}
	return slices.DeleteFunc(moves, func(m move[K]) bool {
		stops := b.stops(m)
		if stops {
			b.add(m)
		}
		return stops
	})
}

func (b *barrier[K]) add(m move[K]) {
	for _, o := range b.owners[m.key] {
		if r, ok := b.floor[o]; m.put && o != Nobody && (!ok || m.rank < r) {
			b.floor[o] = m.rank
		}
		if r, ok := b.ceil[o]; m.del && (!ok || m.rank > r) {
			b.ceil[o] = m.rank
			b.top = max(b.top, m.rank)
		}
	}
}

func (b *barrier[K]) stops(m move[K]) bool {
	owners := b.owners[m.key]
	if m.put {
		return slices.ContainsFunc(owners, func(o string) bool { r, ok := b.floor[o]; return ok && m.rank > r })
	}
	below := func(o string) bool { r, ok := b.ceil[o]; return ok && m.rank < r }
	return below(Nobody) || slices.ContainsFunc(owners, below) || slices.Contains(owners, Nobody) && m.rank < b.top
}
