package service

import (
	"cmp"
	"fmt"
	"slices"
)

// claim is a Service's wish for something that only one can have, for its n-th entry, its n-th pool or its health
// check.
type claim struct {
	by *service
	n  int
}

// claims returns who has what. Who has it follows from who wants it, whatever the order in which they came.
type claims[K comparable] struct {
	holder map[K]claim
	rivals map[K][]claim // the others that want it, in the order they came
	before func(a, b claim) bool
}

func newClaims[K comparable](before func(a, b claim) bool) claims[K] {
	return claims[K]{map[K]claim{}, map[K][]claim{}, before}
}

// add adds a claim and returns the Service that may have lost by it, nil for none.
func (c *claims[K]) add(k K, x claim) *service {
	h, occupied := c.holder[k]
	if !occupied {
		c.holder[k] = x
		return nil
	}
	if c.before(x, h) {
		c.holder[k] = x
		x = h
	}
	c.rivals[k] = append(c.rivals[k], x)
	return x.by
}

// drop takes a claim away and returns the Service that won by it, nil for none.
func (c *claims[K]) drop(k K, x claim) *service {
	others := c.rivals[k]
	if c.holder[k] != x {
		c.setRivals(k, without(others, x))
		return nil
	}
	if len(others) == 0 {
		delete(c.holder, k)
		return nil
	}
	heir := others[0]
	for _, o := range others[1:] {
		if c.before(o, heir) {
			heir = o
		}
	}
	c.holder[k] = heir
	c.setRivals(k, without(others, heir))
	return heir.by
}

func (c *claims[K]) setRivals(k K, rivals []claim) {
	if len(rivals) == 0 {
		delete(c.rivals, k)
	} else {
		c.rivals[k] = rivals
	}
}

// has reports whether x is the claim that holds k.
func (c *claims[K]) has(k K, x claim) bool { return c.holder[k] == x }

// without takes x, which must be there, out of list.
func without[T comparable](list []T, x T) []T {
	i := slices.Index(list, x)
	return slices.Delete(list, i, i+1)
}

// byAge puts the older Service first, then the first by namespace, name and kind, then the first claim of one.
func byAge(a, b claim) int {
	return cmp.Or(
		cmp.Compare(a.by.created, b.by.created),
		cmp.Compare(a.by.key.Namespace, b.by.key.Namespace),
		cmp.Compare(a.by.key.Name, b.by.key.Name),
		cmp.Compare(b.by.key.Kind, a.by.key.Kind), // Services before pods
		cmp.Compare(a.n, b.n))
}

func older(a, b claim) bool { return byAge(a, b) < 0 }

// entryBefore puts clusterIPs before all else: nothing may take traffic meant for another Service by naming its
// clusterIP.
func entryBefore(a, b claim) bool {
	aIn, bIn := a.entry().via == viaClusterIP, b.entry().via == viaClusterIP
	return aIn && !bIn || aIn == bIn && older(a, b)
}

// entry returns the entry of a claim for one.
func (x claim) entry() *entry { return &x.by.entries[x.n] }

// pool returns the name of the pool of a claim for an ID.
func (x claim) pool() string { return x.by.groups[x.n/scopes].pools[x.n%scopes].name }

// repeats reports whether s has its i-th entry already by another of its addresses: named twice, as by MetalLB's
// ingress beside externalIPs, an address is served all the same.
func (s *service) repeats(r *Resolver, i int) bool {
	h, ok := r.entries.holder[s.entries[i].Entry]
	return ok && s.refused[i] == "" && h.by == s && h.entry().group == s.entries[i].group
}

// conflicts returns a problem for everything that s wants and may not have, or another has, or that is beyond its
// bounds.
func (r *Resolver) conflicts(s *service) problems {
	rep := report{object: s.key}
	r.reportBounds(s, &rep)
	if !s.claimed {
		return rep.problems
	}
	for i := range s.entries {
		if s.refused[i] == "" && r.entries.has(s.entries[i].Entry, claim{s, i}) || s.repeats(r, i) || rep.full() {
			continue
		}
		if s.refused[i] != "" {
			r.rejection(s, i, &rep)
			continue
		}
		e, h := &s.entries[i], r.entries.holder[s.entries[i].Entry]
		rep.addAt(e.Entry, e.field(), "EntryTaken", "%s leads to %s (%s, %s); its %s for %s is not served until that one is "+
			"deleted; use another address or port",
			e.Entry, h.by.groups[h.entry().group].label, h.entry().via, h.entry().field(), e.via, s.groups[e.group].label)
		rep.against(h.by, "%s leads to a Service of another namespace; the %s of this one is not served until that "+
			"one is deleted; use another address or port", e.Entry, e.via)
	}
	if h := s.declared.health; h != 0 && !r.health.has(h, claim{s, 0}) && !rep.full() {
		by := r.health.holder[h].by
		rep.add("spec.healthCheckNodePort", "HealthPortTaken",
			"%d answers for %s; no health check of this Service is served until that one is deleted; use another "+
				"port", h, by.label)
		rep.against(by, "%d answers for a Service of another namespace; no health check of this one is served "+
			"until that one is deleted; use another port", h)
	}
	for i := range s.groups {
		for scope, p := range s.groups[i].pools {
			if x := (claim{s, i*scopes + scope}); p.name != "" && !r.ids.has(p.id, x) && !rep.full() {
				rep.add("metadata.name", "PoolIDTaken", "the pools %q and %q have one ID, %s: what needs the first "+
					"is not served; rename this Service or its port",
					x.pool(), r.ids.holder[p.id].pool(), fmt.Sprintf("%016x", p.id))
				rep.against(r.ids.holder[p.id].by, "the pool %q has the ID of another one: what needs it is not "+
					"served; rename this Service or its port", x.pool())
			}
		}
	}
	return rep.problems
}
