package service

import (
	"cmp"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/model"
)

// Limits bounds what Services come to on a node, so that one Service or one namespace can't take what all share. A
// field that is zero stands for the same field of DefaultLimits.
type Limits struct {
	Service Bounds // of one Service; what is beyond is left out
	Total   Bounds // of all Services together; TableEntries don't count here, since slots hold them
	// NamespacePercent is how much of each of Total's bounds the Services of one namespace may take while other
	// namespaces want the rest: from 1 to 100.
	NamespacePercent int
}

// Bounds are numbers of what Services come to.
type Bounds struct {
	Frontends    int // address, port and protocol; also how many pools, and how many source ranges of frontends
	Slots        int // pools and their backends; entries of tables as the data plane stores them
	TableEntries int // entries of Maglev's tables, and turns of backends with different weights
}

// DefaultLimits holds what Kubernetes documents as supported: 10,000 Services, 150,000 endpoints, and 5,000 endpoints
// of one Service
// (https://github.com/kubernetes/community/blob/master/sig-scalability/configs-and-limits/thresholds.md).
var DefaultLimits = Limits{
	Service:          Bounds{Frontends: 4096, Slots: 1 << 16, TableEntries: 1 << 17},
	Total:            Bounds{Frontends: 1 << 18, Slots: 1 << 19},
	NamespacePercent: 50,
}

// or returns l with what it doesn't say taken from o.
func (l Limits) or(o Limits) Limits {
	return Limits{l.Service.or(o.Service), l.Total.or(o.Total), cmp.Or(l.NamespacePercent, o.NamespacePercent)}
}

func (b Bounds) or(o Bounds) Bounds {
	return Bounds{cmp.Or(b.Frontends, o.Frontends), cmp.Or(b.Slots, o.Slots), cmp.Or(b.TableEntries, o.TableEntries)}
}

// Within returns b, or what is usual where b has no bound, with none above that of capacity; a bound of capacity that
// is zero is none.
func (b Bounds) Within(usual, capacity Bounds) Bounds {
	b = b.or(usual)
	if capacity.Frontends > 0 {
		b.Frontends = min(b.Frontends, capacity.Frontends)
	}
	if capacity.Slots > 0 {
		b.Slots = min(b.Slots, capacity.Slots)
	}
	return b
}

// check reports what is wrong with l.
func (l Limits) check(rep *report) {
	for field, n := range map[string]int{"Service.Frontends": l.Service.Frontends, "Service.Slots": l.Service.Slots,
		"Service.TableEntries": l.Service.TableEntries, "Total.Frontends": l.Total.Frontends, "Total.Slots": l.Total.Slots} {
		if n < 0 {
			rep.add("Limits."+field, "InvalidLimit", "%d: use a number above 0, or 0 for the default", n)
		}
	}
	if p := l.NamespacePercent; p < 0 || p > 100 {
		rep.add("Limits.NamespacePercent", "InvalidLimit", "%d: use a number from 1 to 100, or 0 for the default", p)
	}
}

// cost is what a Service, or several, take of what all share.
type cost struct{ frontends, pools, ranges, slots int }

func (c cost) plus(o cost) cost {
	return cost{c.frontends + o.frontends, c.pools + o.pools, c.ranges + o.ranges, c.slots + o.slots}
}

func (c cost) minus(o cost) cost {
	return cost{c.frontends - o.frontends, c.pools - o.pools, c.ranges - o.ranges, c.slots - o.slots}
}

// fits reports whether c is within percent of each bound of b.
func (c cost) fits(b Bounds, percent int) bool {
	f, s := b.Frontends*percent/100, b.Slots*percent/100
	return c.frontends <= f && c.pools <= f && c.ranges <= f && c.slots <= s
}

// String returns the numbers for people.
func (c cost) String() string {
	s := fmt.Sprintf("%d frontends and %d slots", c.frontends, c.slots)
	if c.ranges > 0 {
		s += fmt.Sprintf(" and %d source ranges", c.ranges)
	}
	return s
}

// size is what a Service comes to at most, known before any of it is made.
type size struct {
	cost
	perPool int  // backends of one pool at most; 0: as many as there are
	wanted  int  // backends that the Service's pools would have without that
	tables  int  // entries of tables that its pools would have
	noTable bool // those are too many: it is served by a scheduler without a table, and weights don't count
}

// measure returns what the Service d comes to at most, with hits as the slice ports that match it. It only counts.
func (set *settings) measure(d *declared, hits []hit) size {
	z := size{cost: cost{frontends: d.frontends, ranges: d.ranges}}
	eachGroup(d, hits, func(g *group, n, weights int) {
		for _, needed := range g.needs {
			if needed {
				z.pools++
				z.wanted += n
				z.tables += set.table(d, n, weights)
			}
		}
	})
	limit := set.limits.Service
	if z.wanted > limit.Slots {
		z.perPool = max(1, limit.Slots/z.pools)
	}
	z.noTable = z.tables > limit.TableEntries
	z.slots = z.pools
	eachGroup(d, hits, func(g *group, n, _ int) {
		if z.perPool > 0 {
			n = min(n, z.perPool)
		}
		for _, needed := range g.needs {
			if needed {
				z.slots += n
				if g.protocol != model.TCP {
					z.slots++ // the number of endpoints that get no new flow
				}
			}
		}
	})
	if !z.noTable {
		z.slots += z.tables / max(1, set.Capabilities.TableEntriesPerSlot)
	}
	return z
}

// eachGroup calls visit for each group of d with the number of its endpoints in hits, one of several slices several
// times, and the sum of their weights, 0 where all weigh the same.
func eachGroup(d *declared, hits []hit, visit func(g *group, n, weights int)) {
	for i := range d.groups {
		n, weights, weight, differ := 0, 0, 0, false
		for len(hits) > 0 && int(hits[0].group) == i {
			k, w := len(hits[0].slice.endpoints), int(hits[0].slice.weight)
			if hits = hits[1:]; k == 0 {
				continue
			}
			n += k
			weights += k * w
			differ = differ || weight != 0 && weight != w
			weight = w
		}
		if !differ {
			weights = 0
		}
		visit(&d.groups[i], n, weights)
	}
}

// table returns how many entries the table of a pool of n backends has at most; weights is the sum of theirs, 0 where
// all weigh the same.
func (set *settings) table(d *declared, n, weights int) int {
	if d.scheduler == model.Maglev && n > 0 {
		return set.tableSize(n)
	}
	return weights
}

// tableSize returns the number of entries of Maglev's table for n backends.
func (set *settings) tableSize(n int) int {
	if set.Entries > n {
		return set.Entries
	}
	return model.TableSize(n, cmp.Or(set.Capabilities.TableEntriesPerBackend, 100))
}

// schedulerWithoutTable returns what stands in for a scheduler with too large a table.
func (set *settings) schedulerWithoutTable(s model.Scheduler) model.Scheduler {
	can := set.Capabilities.Schedulers
	if can == 0 {
		can = model.AllSchedulers
	}
	can &^= model.SchedulersOf(model.Maglev)
	return can.Instead(s)
}

// namespace is what the Services of one namespace want.
type namespace struct {
	name     string
	services map[*service]struct{}
	cost
	troubled map[*service]struct{} // those with problems
	listed   problems              // the first of those problems
	stale    bool                  // listed is out of date
}

// namespaceOf returns the namespace of that name, a new one if it had no Service.
func (r *Resolver) namespaceOf(name string) *namespace {
	n := r.namespaces[name]
	if n == nil {
		n = &namespace{name: name, services: map[*service]struct{}{}, troubled: map[*service]struct{}{}}
		r.namespaces[name] = n
	}
	return n
}

// weigh measures s anew.
func (r *Resolver) weigh(s *service) {
	was := s.size.cost
	if s.declared == nil || s.frontends == 0 {
		s.size = size{}
	} else {
		r.hits = match(r.hits[:0], s.declared, s.slices)
		s.size = r.set.measure(s.declared, r.hits)
	}
	if s.size.cost == (cost{}) {
		delete(r.excluded, s)
	}
	change := s.size.cost.minus(was)
	r.costsChanged = r.costsChanged || change != (cost{})
	s.namespace.cost = s.namespace.cost.plus(change)
	r.wanted = r.wanted.plus(change)
}

// admit decides which Services are served where all together want more than there is. First, the oldest Services come
// first and a namespace takes no more than its share; then what is left goes to the others, again by age.
func (r *Resolver) admit() {
	if !r.costsChanged {
		return
	}
	r.costsChanged = false
	total := r.set.limits.Total
	if r.wanted.fits(total, 100) {
		if r.scarce {
			r.scarce = false
			for s := range r.excluded {
				r.setAdmitted(s, true)
			}
		}
		return
	}
	r.scarce = true
	if r.oldestFirst == nil {
		for _, s := range r.services {
			if s.declared != nil {
				r.oldestFirst = append(r.oldestFirst, s)
			}
		}
		slices.SortFunc(r.oldestFirst, func(a, b *service) int { return byAge(claim{a, 0}, claim{b, 0}) })
	}
	used, by := cost{}, map[*namespace]cost{}
	var over []*service
	for _, s := range r.oldestFirst {
		if s.size.cost == (cost{}) {
			continue
		}
		own, sum := by[s.namespace].plus(s.size.cost), used.plus(s.size.cost)
		if own.fits(total, r.set.limits.NamespacePercent) && sum.fits(total, 100) {
			by[s.namespace], used = own, sum
			r.setAdmitted(s, true)
		} else {
			over = append(over, s)
		}
	}
	for _, s := range over {
		sum := used.plus(s.size.cost)
		fits := sum.fits(total, 100)
		if fits {
			used = sum
		}
		r.setAdmitted(s, fits)
	}
}

// setAdmitted records whether s is served.
func (r *Resolver) setAdmitted(s *service, yes bool) {
	if _, excluded := r.excluded[s]; excluded != yes {
		return
	}
	if yes {
		delete(r.excluded, s)
	} else {
		r.excluded[s] = struct{}{}
	}
	r.touch(s, true)
}

// reportBounds reports what of s is left out by a bound.
func (r *Resolver) reportBounds(s *service, rep *report) {
	limits := r.set.limits
	if _, excluded := r.excluded[s]; excluded {
		rep.add("", "ShareExceeded", "not served: it needs %s, and all Services are limited to %d frontends and %d "+
			"slots, of which "+
			"one namespace may use %d %% while others need the rest; delete Services of this namespace, or raise "+
			"the limits",
			s.size.cost, limits.Total.Frontends, limits.Total.Slots, limits.NamespacePercent)
		return
	}
	if z := &s.size; z.perPool > 0 {
		rep.add("", "TooManyEndpoints", "its ports have %d backends in all, the limit for one Service is %d: "+
			"each port has its first %d; "+
			"use fewer ports or endpoints, or raise the limit", z.wanted, limits.Service.Slots, z.perPool)
	}
	if z := &s.size; z.noTable {
		rep.add("", "TableTooLarge", "the tables of its scheduler %s would have %d entries, the limit for one "+
			"Service is %d: served by %s, "+
			"and weights don't count; use fewer ports or endpoints, a smaller maglevTableSize, or raise the limit",
			s.scheduler, z.tables, limits.Service.TableEntries, r.set.schedulerWithoutTable(s.scheduler))
	}
}
