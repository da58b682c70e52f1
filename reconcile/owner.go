package reconcile

import (
	"slices"

	"fairlead.dev/fairlead/dataplane"
)

// Nobody is the owner of facts that no part rendered as far as the loop knows: an earlier run's, or a stranger's.
const Nobody = "nobody"

// owners says to whom unsettled keys belong: owner names by key. It renders the parts of the owners in only (nil: all)
// and every part that is going, so it is for times of trouble. A key of other owners than those has none here.
func (l *Loop[T, K, V]) owners(only map[string]bool) map[K][]string {
	owners := map[K][]string{}
	note := func(p T, o string) {
		for _, f := range l.plane.Render(p) {
			_, unsettled := l.table.todo[f.Key]
			_, claimed := l.table.claims[f.Key]
			if (unsettled || claimed) && !slices.Contains(owners[f.Key], o) {
				owners[f.Key] = append(owners[f.Key], o)
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
		if len(owners[k]) == 0 && !l.table.entries[k].wanted() {
			owners[k] = []string{Nobody}
		}
	}
	return owners
}

// barrier is what facts that can't be written mean for others of the same owner.
type barrier[K dataplane.Key] struct {
	owners map[K][]string
	floor  map[string]int // lowest rank not yet true: nothing above may come
	ceil   map[string]int // highest rank not yet gone or rewritten: nothing below may go
}

// pass gives those of moves, which are in order, that need not wait for any of stuck. What has to wait stops others in turn.
func pass[K dataplane.Key](moves, stuck []move[K], owners map[K][]string) []move[K] {
	b := barrier[K]{owners, map[string]int{}, map[string]int{}}
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

func (b barrier[K]) add(m move[K]) {
	for _, o := range b.owners[m.key] {
		if r, ok := b.floor[o]; m.put && (!ok || m.rank < r) {
			b.floor[o] = m.rank
		}
		if r, ok := b.ceil[o]; m.del && (!ok || m.rank > r) {
			b.ceil[o] = m.rank
		}
	}
}

func (b barrier[K]) stops(m move[K]) bool {
	return slices.ContainsFunc(b.owners[m.key], func(o string) bool {
		floor, low := b.floor[o]
		ceil, high := b.ceil[o]
		return m.put && low && m.rank > floor || !m.put && high && m.rank < ceil
	})
}
