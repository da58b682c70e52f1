package reconcile

import (
	"cmp"
	"slices"

	"fairlead.dev/fairlead/dataplane"
)

// order sorts jobs so that each state in between is safe: what comes or changes by wave, group and rising rank, then
// what goes by falling rank. It returns the same order each time, or a search would lose its way. What comes together
// often fails together: a search is for facts that are scattered.
func order[K dataplane.Key, V comparable](jobs []*job[K, V], scatter bool) {
	slices.SortFunc(jobs, func(a, b *job[K, V]) int {
		switch puts := a.puts(); {
		case puts != b.puts() && puts:
			return -1
		case puts != b.puts():
			return 1
		case puts && a.wave != b.wave:
			return cmp.Compare(a.wave, b.wave)
		case puts && a.group != b.group:
			return a.group.Compare(b.group)
		case a.rank == b.rank:
			if scatter {
				return cmp.Compare(a.id, b.id)
			}
			return cmp.Compare(a.n, b.n)
		case puts:
			return cmp.Compare(a.rank, b.rank)
		}
		return cmp.Compare(b.rank, a.rank)
	})
}

// portion returns how many of jobs the next Write takes: at most limit facts and puts of one wave and group, but always
// one job.
func portion[K dataplane.Key, V comparable](jobs []*job[K, V], limit int) (n int) {
	for facts := 0; n < len(jobs); n++ {
		if n > 0 && jobs[n].puts() && (jobs[n].wave != jobs[0].wave || jobs[n].group != jobs[0].group) {
			break
		}
		if facts++; jobs[n].puts() && jobs[n].dels() {
			facts++
		}
		if facts > limit && n > 0 {
			break
		}
	}
	return n
}

// written returns what a Write does for jobs: put by rising rank, del by falling rank.
func written[K dataplane.Key, V comparable](jobs []*job[K, V]) (put, del []dataplane.Fact[K, V]) {
	for _, j := range jobs {
		if j.puts() {
			put = append(put, dataplane.Fact[K, V]{Key: j.key, Value: j.value, Body: j.body})
		}
		if j.dels() {
			del = append(del, dataplane.Fact[K, V]{Key: j.key, Value: j.has})
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
