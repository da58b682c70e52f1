package policy

import (
	"hash/maphash"
	"maps"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
)

// resource is something of which the policies of a node may use so much, and each namespace a fair share of that. What
// is used is counted before it is made, or while it is made.
type resource struct {
	limit func(*Resolver) int
	// weigh computes what peers use; nil: that doesn't count
	weigh func(*Resolver)
	// items calls visit for the items that a plan uses; plans share items
	items  func(p *plan, visit func(*charge, use))
	splits bool   // what is used follows the number of identities
	what   string // formats a figure
	advice string
}

// use is what an item uses of a resource.
type use struct {
	fixed    int
	multiple int // in proportion to the number of identities
	matches  int // of a peer, where that number counts: how many identities it matches
}

// charge is an item's account while shares are computed.
type charge struct {
	share   uint64    // that all but turn is of
	tenants []*tenant // that use the item
	cluster bool      // policies of the cluster use the item
	turn    uint64    // in which it was counted last
}

// rejection is why a plan drops everything in a namespace.
type rejection struct {
	resource *resource
	cost     int // of what would be made if it didn't
}

// rejectionKey is a plan and a namespace with pods that have it.
type rejectionKey struct {
	plan      *plan
	namespace *namespace
}

// The resources.
var (
	costs = &resource{
		limit: func(r *Resolver) int { return r.limits.Total },
		items: func(p *plan, visit func(*charge, use)) { visit(&p.charge, use{fixed: p.figures.cost()}) },
		what:  "its policies cost %d (rules in port entries)", advice: "use fewer or smaller policies, fewer port ranges " +
			"that overlap, or fewer such pods on one node",
	}
	comparisons = &resource{
		limit: func(r *Resolver) int { return r.limits.Comparisons }, weigh: (*Resolver).weighComparisons,
		items: func(p *plan, visit func(*charge, use)) {
			p.eachPeer(func(q *peer) { visit(&q.charge, use{fixed: q.weight}) })
		},
		what: "its selectors are compared with pods about %d times", advice: "use fewer selectors, or such as name a " +
			"namespace and a value of a label",
	}
	matches = &resource{
		limit: func(r *Resolver) int { return r.limits.Matches }, weigh: (*Resolver).weighMatches, splits: true,
		items: func(p *plan, visit func(*charge, use)) {
			p.eachPeer(func(q *peer) {
				visit(&q.charge, use{fixed: q.span, multiple: max(0, q.weight-q.span), matches: q.weight})
			})
		},
		what: "its selectors and CIDRs match %d times", advice: "use fewer or narrower ones, or fewer exceptions of CIDRs",
	}
	evaluations = &resource{
		limit: func(r *Resolver) int { return r.limits.Evaluations }, weigh: (*Resolver).weighMatches, splits: true,
		items: func(p *plan, visit func(*charge, use)) {
			for _, t := range p.tables() {
				visit(&t.charge, use{multiple: t.evaluations()})
			}
			p.eachPeer(func(q *peer) { visit(&q.charge, use{matches: q.weight}) })
		},
		what: "its rules in port entries match %d times", advice: "use fewer or narrower selectors, or fewer port ranges",
	}
	kernelEntries = &resource{
		limit: (*Resolver).maxEntries, weigh: (*Resolver).weighMatches, splits: true,
		items: func(p *plan, visit func(*charge, use)) {
			visit(&p.charge, use{fixed: p.figures.pieces})
			for _, t := range p.tables() {
				visit(&t.charge, use{multiple: len(t.verdicts)})
			}
			p.eachPeer(func(q *peer) { visit(&q.charge, use{fixed: q.pieces, matches: q.weight}) })
		},
		what: "its policies come to %d entries of the kernel's tables", advice: "use fewer or narrower selectors, fewer " +
			"port ranges, or CIDRs that don't nest",
	}
)

// eachPeer calls visit for the peers of a plan.
func (p *plan) eachPeer(visit func(*peer)) {
	for _, t := range p.tables() {
		for _, g := range t.groups {
			if g == nil {
				continue
			}
			for _, q := range g.peers {
				visit(q)
			}
		}
	}
}

// evaluations returns how many identities the rules of t match, each for itself.
func (t *table) evaluations() (n int) {
	for _, g := range t.groups {
		if g != nil {
			n += g.matches
		}
	}
	return n
}

// tables returns the peer tables of the ruleset that p comes to.
func (p *plan) tables() []*table {
	if p.ruleset == nil {
		return nil
	}
	return p.ruleset.tables
}

// entriesUsed returns how many entries of the kernel's tables what there is comes to, without one for each address.
func (r *Resolver) entriesUsed() int { return r.verdicts + r.portPieces + r.prefixes/2 }

// maxEntries returns how many of them there may be.
func (r *Resolver) maxEntries() int { return r.limits.Entries + r.limits.ByAddress*r.addresses.len() }

// weighMatches sets the peers' weights to how often they match.
func (r *Resolver) weighMatches() {
	for _, p := range r.peers {
		p.weight = 0
	}
	for _, s := range r.signatures {
		for _, p := range s.peers {
			p.weight++
		}
	}
}

// sampleSize is with how many classes peers are compared again to find out which are compared most.
const sampleSize = 64

// weighComparisons sets the peers' weights to about how often they are compared with classes.
func (r *Resolver) weighComparisons() {
	for _, p := range r.peers {
		p.weight = 0
	}
	left := sampleSize
	each := r.classes.len()/sampleSize + 1
	for c := range r.classes.all() {
		if left--; left < 0 {
			break
		}
		r.index.each(c, func(l []*peer) {
			for _, p := range l {
				p.weight += each
			}
		})
	}
}

// tenant is a namespace with pods on this node.
type tenant struct {
	*namespace
	plans    []*plan             // the oldest first
	distinct map[uint64]struct{} // identities that its policies' peers distinguish, beside those of the cluster's
	scale    float64             // what part of all identities there would be without other namespaces' policies
	extra    int                 // what others use more, for the identities that its policies make
	own      int                 // matches of its policies' peers
}

// tenants returns the namespaces whose pods have plans, sorted by name, without plans that drop everything. Those that
// are beyond another limit still count by their costs: else others would be made in their place, one after another.
func (r *Resolver) tenants(x *resource) (out []*tenant) {
	all := map[*namespace]*tenant{}
	for c := range r.local {
		t := all[c.namespace]
		if t == nil {
			t = &tenant{namespace: c.namespace}
			all[c.namespace] = t
			out = append(out, t)
		}
		for _, of := range c.here.plans {
			for _, p := range of {
				if p == nil || p.excess != "" {
					continue
				}
				if x == costs || r.rejections[rejectionKey{p, c.namespace}] == nil {
					t.plans = append(t.plans, p)
				}
			}
		}
	}
	for _, t := range out {
		slices.SortFunc(t.plans, (*plan).compare)
		t.plans = slices.Compact(t.plans)
	}
	slices.SortFunc(out, func(a, b *tenant) int { return strings.Compare(a.name, b.name) })
	return out
}

// share returns the plans that are beyond their namespaces' fair shares of a limit, and what they cost. What several
// namespaces use, each pays a part of. Of a namespace beyond its share, the oldest plans stay.
func (r *Resolver) share(x *resource, limit int) map[rejectionKey]*rejection {
	a := &accounts{x: x, tenants: r.tenants(x), turn: &r.turn, scale: 1}
	a.open()
	if x.splits {
		r.splitIdentities(a)
	}
	demands := make([]int, len(a.tenants))
	for i, t := range a.tenants {
		a.next()
		for _, p := range t.plans {
			n, _, _ := a.cost(t, p)
			demands[i] += n
		}
	}
	for left := limit; ; {
		beyond, used := a.divide(demands, model.FairShare(left, demands))
		if used <= limit || left <= 0 || x.splits { // those use less once others distinguish fewer
			return beyond
		}
		left = min(left-1, left*limit/used) // some pay for what others don't use after all
	}
}

// accounts are how shares of a resource are computed.
type accounts struct {
	x       *resource
	tenants []*tenant
	share   uint64
	turn    *uint64
	scale   float64 // what part of all identities there would be with the cluster's policies alone
}

// scaleOf returns what part of an item's multiples t pays for as if there were no others.
func (a *accounts) scaleOf(t *tenant, c *charge) float64 {
	if c.cluster {
		return a.scale
	}
	return t.scale
}

// next begins another turn, in which each item is counted once.
func (a *accounts) next() { *a.turn++ }

// open finds out which namespaces use each item.
func (a *accounts) open() {
	a.next()
	a.share = *a.turn
	for _, t := range a.tenants {
		a.next()
		t.scale = 1
		for _, p := range t.plans {
			a.x.items(p, func(c *charge, _ use) {
				if c.share != a.share {
					*c = charge{share: a.share}
				}
				if c.cluster = c.cluster || p.ofCluster(); c.turn != *a.turn {
					c.turn = *a.turn
					c.tenants = append(c.tenants, t)
				}
			})
		}
	}
}

// splitIdentities computes what policies use more for identities that others make, and has those pay. A tenant pays for
// its own policies as if there were none of other tenants, for the cluster's as if there were none of tenants, and a
// part of the rest.
func (r *Resolver) splitIdentities(a *accounts) {
	identities := float64(len(r.signatures) - 1)
	if identities == 0 { // there will be
		return
	}
	ofCluster, distinct := r.countDistinct(a), 0
	a.scale = min(1, float64(ofCluster)/identities)
	for _, t := range a.tenants {
		distinct += len(t.distinct)
		t.scale = min(1, float64(ofCluster+len(t.distinct))/identities)
	}
	rest := 0.0
	for _, t := range a.tenants {
		a.next()
		for _, p := range t.plans {
			a.x.items(p, func(c *charge, u use) {
				if c.turn == *a.turn {
					return
				}
				c.turn = *a.turn
				rest += float64(u.multiple) * (1 - a.scaleOf(t, c)) / float64(len(c.tenants))
				if !c.cluster {
					t.own += u.matches
				}
			})
		}
	}
	for _, t := range a.tenants {
		t.extra = int(rest * float64(len(t.distinct)) / float64(max(distinct, 1)))
	}
}

// countDistinct counts the identities that the peers of each tenant's policies distinguish, and returns how many those
// of the cluster's do.
func (r *Resolver) countDistinct(a *accounts) (ofCluster int) {
	for _, t := range a.tenants {
		t.distinct = map[uint64]struct{}{}
	}
	all, by := map[uint64]struct{}{}, map[*tenant]uint64{}
	for _, s := range r.signatures {
		if len(s.peers) == 0 {
			continue
		}
		cluster := uint64(0)
		clear(by)
		for _, p := range s.peers {
			tag := maphash.Comparable(r.seed, p.sequence)
			switch {
			case p.share != a.share:
			case p.cluster:
				cluster ^= tag
			default:
				for _, t := range p.tenants {
					by[t] ^= tag
				}
			}
		}
		all[cluster] = struct{}{}
		for t, own := range by {
			t.distinct[cluster^own] = struct{}{}
		}
	}
	return len(all)
}

// cost returns what a tenant pays for the items of p that aren't counted in this turn yet, what they use in all, and
// these items.
func (a *accounts) cost(t *tenant, p *plan) (part, whole int, counted []*charge) {
	sum := 0.0
	a.x.items(p, func(c *charge, u use) {
		if c.turn == *a.turn {
			return
		}
		c.turn, counted = *a.turn, append(counted, c)
		whole += u.fixed + u.multiple
		sum += (float64(u.fixed) + float64(u.multiple)*a.scaleOf(t, c)) / float64(len(c.tenants))
		if !c.cluster && t.own > 0 {
			sum += float64(t.extra) * float64(u.matches) / float64(t.own)
		}
	})
	return int(math.Ceil(sum)), whole, counted
}

// divide returns the plans that are beyond a level of their namespaces, and what the others use.
func (a *accounts) divide(demands []int, level int) (beyond map[rejectionKey]*rejection, used int) {
	beyond = map[rejectionKey]*rejection{}
	var admitted []*plan
	for i, t := range a.tenants {
		if demands[i] <= level {
			admitted = append(admitted, t.plans...)
			continue
		}
		a.next()
		sum := 0
		for _, p := range t.plans {
			n, whole, counted := a.cost(t, p)
			if sum+n <= level {
				sum += n
				admitted = append(admitted, p)
				continue
			}
			for _, c := range counted {
				c.turn = 0
			}
			beyond[rejectionKey{p, t.namespace}] = &rejection{a.x, whole}
		}
	}
	a.next()
	for _, p := range admitted {
		_, whole, _ := a.cost(a.tenants[0], p)
		used += whole
	}
	return beyond, used
}

// admit decides by the plans' costs which drop everything, before any is built.
func (r *Resolver) admit() {
	r.forgetRejections()
	var now map[rejectionKey]*rejection
	if r.wanted > r.limits.Total {
		now = r.share(costs, r.limits.Total)
	}
	for k, f := range r.rejections {
		if f.resource == costs && now[k] == nil {
			delete(r.rejections, k)
			r.reshow = true
		}
	}
	for k, f := range now {
		if was := r.rejections[k]; was == nil || was.resource == costs {
			r.reshow = r.reshow || was == nil
			r.rejections[k] = f
		}
	}
}

// forgetRejections forgets rejections of plans that no class has.
func (r *Resolver) forgetRejections() {
	for k, f := range r.rejections {
		if r.plans[k.plan.key] != k.plan {
			delete(r.rejections, k)
			r.freed[f.resource] = true
		}
	}
}

// beyond returns a resource of which more is used than there is while classes, pieces and addresses are matched, nil if
// there is none. What isn't in use any more still counts then, so that matches may be twice as many.
func (r *Resolver) beyond() *resource {
	switch l := &r.limits; {
	case r.lifted:
		return nil
	case r.compared > l.Comparisons:
		return comparisons
	case r.matches > 2*l.Matches:
		return matches
	}
	return nil
}

// beyondNow returns a resource of which more is used than there is, nil if there is none. What isn't in use any more
// must be gone.
func (r *Resolver) beyondNow() *resource {
	r.shrink()
	switch l := &r.limits; {
	case r.lifted:
		return nil
	case r.matches > l.Matches:
		return matches
	case r.evaluations > l.Evaluations:
		return evaluations
	case r.entriesUsed() > r.maxEntries():
		return kernelEntries
	}
	return nil
}

// refuse has plans drop everything, so that what the others use of x is within the limit.
func (r *Resolver) refuse(x *resource) {
	r.collect()
	if x.weigh != nil {
		x.weigh(r)
	}
	limit := x.limit(r) * 3 / 4 // some is left free, so that little more is no reason to do it again
	now := r.share(x, int(float64(limit)*r.done))
	for ; len(now) == 0 && limit > 0; limit /= 2 {
		now = r.share(x, int(float64(limit/2)*r.done))
	}
	maps.Copy(r.rejections, now)
	r.reshow, r.compared, r.refusedAt = true, 0, r.classes.len()
	r.lifted = len(now) == 0 // nothing of what is used is a policy's
}

// reopen has plans that drop everything come to what they should again, where there is space for that. It reports
// whether there are such.
func (r *Resolver) reopen() bool {
	if len(r.rejections) == 0 {
		return false
	}
	again := map[*resource]bool{comparisons: r.freed[comparisons] || r.classes.len() < r.refusedAt/2}
	for x, used := range map[*resource]int{matches: r.matches, evaluations: r.evaluations,
		kernelEntries: r.entriesUsed()} {
		for _, f := range r.rejections {
			if f.resource == x {
				used += f.cost
			}
		}
		again[x] = r.freed[x] || used <= x.limit(r)*3/4
	}
	before := len(r.rejections)
	maps.DeleteFunc(r.rejections, func(_ rejectionKey, f *rejection) bool { return again[f.resource] })
	clear(r.freed)
	if len(r.rejections) == before {
		return false
	}
	r.reshow, r.lifted = true, false
	return true
}
