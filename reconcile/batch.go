package reconcile

import (
	"cmp"
	"slices"

	"fairlead.dev/fairlead/dataplane"
)

// move is what a key needs: put (come), del (go), or both (its value changes).
type move[K dataplane.Key] struct {
	key      K
	rank     int
	n        uint64 // among moves of the same rank
	put, del bool
}

// facts says how many facts the move brings into a Write.
func (m move[K]) facts() int {
	if m.put && m.del {
		return 2
	}
	return 1
}

// move gives what the unsettled key k needs.
func (t *table[T, K, V]) move(k K) move[K] {
	e := t.entries[k]
	return move[K]{key: k, rank: k.Rank(), n: t.todo[k].n, put: e.wanted(), del: e.held}
}

// order sorts moves so that each state in between is safe: what comes or changes by rising rank, then what goes by
// falling rank. It gives the same order each time, or a search would lose its way.
func order[K dataplane.Key](moves []move[K]) {
	slices.SortFunc(moves, func(a, b move[K]) int {
		switch {
		case a.put != b.put && a.put:
			return -1
		case a.put != b.put:
			return 1
		case a.rank == b.rank:
			return cmp.Compare(a.n, b.n)
		case a.put:
			return cmp.Compare(a.rank, b.rank)
		}
		return cmp.Compare(b.rank, a.rank)
	})
}

// portion says how many of moves the next Write takes: at most limit facts, but always one move.
func portion[K dataplane.Key](moves []move[K], limit int) (n int) {
	for facts := 0; n < len(moves); n++ {
		if facts += moves[n].facts(); facts > limit && n > 0 {
			break
		}
	}
	return n
}

// facts gives what a Write is told for moves: put by rising rank, del by falling rank.
func (t *table[T, K, V]) facts(moves []move[K]) (put, del []dataplane.Fact[K, V]) {
	for _, m := range moves {
		if m.put {
			put = append(put, dataplane.Fact[K, V]{Key: m.key, Value: t.entries[m.key].value})
		}
		if m.del {
			held, _ := t.holds(m.key)
			del = append(del, dataplane.Fact[K, V]{Key: m.key, Value: held})
		}
	}
	falling(del)
	return put, del
}

// rising sorts facts as they are put, falling as they are deleted.
func rising[K dataplane.Key, V comparable](facts []dataplane.Fact[K, V]) {
	slices.SortStableFunc(facts, func(a, b dataplane.Fact[K, V]) int { return cmp.Compare(a.Key.Rank(), b.Key.Rank()) })
}

func falling[K dataplane.Key, V comparable](facts []dataplane.Fact[K, V]) {
	slices.SortStableFunc(facts, func(a, b dataplane.Fact[K, V]) int { return cmp.Compare(b.Key.Rank(), a.Key.Rank()) })
}
