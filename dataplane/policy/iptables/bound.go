package iptables

import (
	"cmp"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/model"
)

// bound closes peer tables where all are beyond a bound: of those whose policies' namespaces have more than their fair
// share, the largest. It opens those again for which there is space.
func (j *Join) bound() {
	elements, sets := j.maxElements(), cmp.Or(j.MaxSets, MaxSets)
	if j.closed > 0 {
		j.reopen(elements, sets)
	}
	j.closeBeyond(elements, (*joinedTable).size, func(t *joinedTable) string {
		return fmt.Sprintf("its %d addresses are beyond the bound of %d prefixes in all sets", t.size(), elements)
	})
	j.closeBeyond(sets, (*joinedTable).setCount, func(*joinedTable) string {
		return fmt.Sprintf("its sets are beyond the bound of %d sets", sets)
	})
}

// maxElements returns how many elements there may be.
func (j *Join) maxElements() int {
	if j.MaxElements > 0 {
		return j.MaxElements
	}
	return min(MaxElements, baseElements+elementsByPeer*(len(j.singles)+len(j.ranges)))
}

// size returns how many elements the table comes to at most.
func (t *joinedTable) size() (n int) {
	for f, users := range t.users {
		if users > 0 {
			n += t.members[f]
		}
	}
	return n
}

// setCount returns how many sets the table has.
func (t *joinedTable) setCount() (n int) {
	for _, users := range t.users {
		if users > 0 {
			n += len(t.sets[0])
		}
	}
	return n
}

// sum returns what all open tables come to.
func (j *Join) sum(of func(*joinedTable) int) (n int) {
	for _, t := range j.tables {
		if t.closed == "" {
			n += of(t)
		}
	}
	return n
}

// closeBeyond closes tables until all come to no more than a limit.
func (j *Join) closeBeyond(limit int, of func(*joinedTable) int, why func(*joinedTable) string) {
	sum := j.sum(of)
	if sum <= limit {
		return
	}
	owners := j.owners()
	demands := make([]int, len(owners))
	for i, o := range owners {
		slices.SortFunc(o.tables, func(a, b *joinedTable) int {
			return cmp.Or(-cmp.Compare(of(a), of(b)), -cmp.Compare(a.ID, b.ID))
		})
		for _, t := range o.tables {
			demands[i] += of(t) / t.owners
		}
	}
	for level := model.FairShare(limit, demands); sum > limit; level -= max(1, level/8) {
		for i, o := range owners {
			for ; demands[i] > level && len(o.tables) > 0; o.tables = o.tables[1:] {
				t := o.tables[0]
				demands[i] -= of(t) / t.owners
				if t.others--; t.others < 0 {
					sum -= of(t)
					j.close(t, why(t))
				}
			}
		}
	}
}

// close has a table drop everything.
func (j *Join) close(t *joinedTable, why string) {
	t.closed = why
	j.closed++
	j.flipped[t.ID] = true
}

// reopen opens closed tables that are within the bounds, the smallest first. A tenth is left free, so that tables don't
// come and go.
func (j *Join) reopen(elements, sets int) {
	elements, sets = elements-elements/10-j.sum((*joinedTable).size), sets-sets/10-j.sum((*joinedTable).setCount)
	var closed []*joinedTable
	for _, t := range j.tables {
		if t.closed != "" {
			closed = append(closed, t)
		}
	}
	slices.SortFunc(closed, func(a, b *joinedTable) int {
		return cmp.Or(cmp.Compare(a.size(), b.size()), cmp.Compare(a.ID, b.ID))
	})
	for _, t := range closed {
		if t.size() <= elements && t.setCount() <= sets {
			elements, sets = elements-t.size(), sets-t.setCount()
			t.closed = ""
			j.closed--
			j.flipped[t.ID] = true
		}
	}
}

// owner is a namespace of policies, "" for those of the cluster.
type owner struct{ tables []*joinedTable }

// owners returns the namespaces whose policies have open tables.
func (j *Join) owners() (out []*owner) {
	all, seen := map[string]*owner{}, map[string]map[*joinedTable]bool{}
	for _, u := range j.uses {
		namespace := ""
		for _, p := range u.ruleset.Policies {
			namespace = cmp.Or(namespace, p.Namespace)
		}
		o := all[namespace]
		if o == nil {
			o = &owner{}
			all[namespace], seen[namespace] = o, map[*joinedTable]bool{}
			out = append(out, o)
		}
		for _, m := range tablesOf(u.ruleset) {
			t := j.tables[m.ID]
			if t.closed != "" || seen[namespace][t] {
				continue
			}
			seen[namespace][t] = true
			o.tables = append(o.tables, t)
		}
	}
	for _, o := range out {
		for _, t := range o.tables {
			t.owners, t.others = 0, -1
		}
	}
	for _, o := range out {
		for _, t := range o.tables {
			t.owners++
			t.others++
		}
	}
	return out
}
