package network

import (
	"fmt"
	"net/netip"
	"slices"
)

// claim is a range that a Node says is its pods'.
type claim struct {
	node *node
	age  int // of the node: its index in byAge
	podRange
}

// accept returns the ranges that count, sorted and disjoint. Addresses of Nodes in them that don't count are void.
func (s *survey) accept() []claim {
	var claims []claim
	for age, n := range s.known.byAge {
		for i, p := range n.ranges {
			twice := slices.ContainsFunc(n.ranges[:i], func(o podRange) bool { return o.prefix == p.prefix })
			if c := (claim{n, age, p}); !twice && s.possible(c) {
				claims = append(claims, c)
			}
		}
	}
	return s.withoutNodes(s.disjoint(claims))
}

// refuse records that a claim doesn't count.
func (s *survey) refuse(c claim, reason, format string, args ...any) {
	s.add(c.node.key(), fmt.Sprintf("spec.podCIDRs[%d]", c.index), reason, "%s %s: its pods can't be reached from "+
		"node %s; "+
		"assign another range", c.prefix, fmt.Sprintf(format, args...), s.known.config.Node)
}

// possible reports whether a claim meets no Service range and no address of its own Node.
func (s *survey) possible(c claim) bool {
	for _, p := range s.serviceRanges() {
		if p.Overlaps(c.prefix) {
			s.refuse(c, "OverlapsServices", "overlaps %s, where Services are", p)
			return false
		}
	}
	for _, a := range c.node.all {
		if c.prefix.Contains(a) {
			s.refuse(c, "HoldsNode", "holds %s, an address of the Node itself", a)
			return false
		}
	}
	return true
}

func (s *survey) serviceRanges() []netip.Prefix {
	if s.reserved == nil {
		s.reserved = slices.Clone(s.known.config.ServiceCIDRs)
		for _, l := range s.known.services {
			s.reserved = append(s.reserved, l...)
		}
		slices.SortFunc(s.reserved, netip.Prefix.Compare)
		s.reserved = append(slices.Compact(s.reserved), netip.Prefix{}) // never nil; that overlaps nothing
	}
	return s.reserved
}

// disjoint returns the claims that overlap no older one that counts, sorted. Prefixes that overlap are nested, so that
// those that may be in conflict follow on each other.
func (s *survey) disjoint(claims []claim) []claim {
	slices.SortFunc(claims, func(a, b claim) int {
		if c := a.prefix.Compare(b.prefix); c != 0 {
			return c
		}
		return a.age - b.age
	})
	out := claims[:0]
	for len(claims) > 0 {
		n := 1 // claims inside the first, with it
		for n < len(claims) && claims[0].prefix.Overlaps(claims[n].prefix) {
			n++
		}
		if group := claims[:n]; n == 1 {
			out = append(out, group[0])
		} else {
			out = append(out, s.oldest(slices.Clone(group))...)
		}
		claims = claims[n:]
	}
	return out
}

// oldest returns those of a group that overlap no older one that counts, sorted.
func (s *survey) oldest(group []claim) (out []claim) {
	slices.SortStableFunc(group, func(a, b claim) int { return a.age - b.age })
	for _, c := range group {
		i := slices.IndexFunc(out, func(o claim) bool { return o.prefix.Overlaps(c.prefix) })
		if i < 0 {
			out = append(out, c)
			continue
		}
		s.refuse(c, "OverlapsNode", "overlaps %s of the older Node %s", out[i].prefix, out[i].node.name)
	}
	slices.SortFunc(out, func(a, b claim) int { return a.prefix.Compare(b.prefix) })
	return out
}

// withoutNodes returns the claims that hold no address of this node or an older one. An address of a younger Node in
// one
// is void.
func (s *survey) withoutNodes(claims []claim) []claim {
	refused := map[netip.Prefix]bool{}
	for age, n := range s.known.byAge {
		for _, a := range n.all {
			i := find(claims, a)
			switch {
			case i < 0:
			case n.name == s.known.config.Node || age < claims[i].age:
				if c := claims[i]; !refused[c.prefix] {
					refused[c.prefix] = true
					s.refuse(c, "HoldsNode", "holds %s, an address of Node %s", a, n.name)
				}
			default:
				s.void[a] = true
				s.add(n.key(), "status.addresses", "AddressOfPods", "%s is inside %s, addresses of pods of the older Node %s, and "+
					"doesn't count; change the address, or that Node's podCIDRs", a, claims[i].prefix, claims[i].node.name)
			}
		}
	}
	if len(refused) == 0 {
		return claims
	}
	return slices.DeleteFunc(claims, func(c claim) bool { return refused[c.prefix] })
}

// find returns the index of the claim that holds an address, -1 where none does.
func find(claims []claim, a netip.Addr) int {
	i, found := slices.BinarySearchFunc(claims, netip.PrefixFrom(a, a.BitLen()), func(c claim, p netip.Prefix) int {
		return c.prefix.Compare(p)
	})
	if !found {
		i--
	}
	if i >= 0 && claims[i].prefix.Contains(a) {
		return i
	}
	return -1
}
