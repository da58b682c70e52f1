package service

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// Bounds of what ServiceCIDRs come to. Cluster administrators make them; each range costs data planes something.
const (
	mostServiceCIDRs = 64 // ranges
	mostForeign      = 64 // ClusterIPs of Services that another proxy serves
)

// applyServiceCIDR records a ServiceCIDR, or without an object that it is gone.
func (r *Resolver) applyServiceCIDR(name string, obj *networkingv1.ServiceCIDR) {
	delete(r.serviceCIDRs, name)
	if obj != nil {
		r.serviceCIDRs[name] = obj.Spec.CIDRs
	}
}

// serviceRanges returns the addresses of node n's ServiceRanges, and what is wrong with ServiceCIDRs. A proxy that
// serves only Services with its name has none: whether an address is allocated is not for it to say.
func (r *Resolver) serviceRanges(n *model.Node) ([]model.Range, []source.Problem) {
	if r.set.ProxyName != "" || len(r.serviceCIDRs) == 0 {
		return nil, nil
	}
	var ranges []model.Range
	rep := &report{}
	for _, name := range slices.Sorted(maps.Keys(r.serviceCIDRs)) {
		rep.object = source.Key{Kind: source.ServiceCIDR, Name: name}
		for i, s := range r.serviceCIDRs[name] {
			p, err := parsePrefix(s)
			if err == nil {
				err = r.checkServiceCIDR(p, n)
			}
			if err == nil && len(ranges) == mostServiceCIDRs {
				err = &flaw{"TooManyServiceCIDRs", fmt.Sprintf("%d ranges are the most that count", mostServiceCIDRs)}
			}
			if err != nil {
				rep.flawed(fmt.Sprintf("spec.cidrs[%d]", i), err, "packets to its unallocated addresses are not dropped; "+
					"use another range")
				continue
			}
			ranges = append(ranges, rangeOf(p))
		}
	}
	if len(r.foreign) > mostForeign {
		rep.object = source.Key{}
		rep.add("", "TooManyForeignServices", "%d ClusterIPs are of Services for other proxies: packets to unallocated "+
			"addresses of ServiceCIDRs are not dropped; %d are the most with which they are", len(r.foreign), mostForeign)
		return nil, rep.list
	}
	return except(merge(ranges), slices.SortedFunc(maps.Keys(r.foreign), netip.Addr.Compare)), rep.list
}

// checkServiceCIDR returns why packets to a range must not be dropped: it holds addresses that are not Services'.
func (r *Resolver) checkServiceCIDR(p netip.Prefix, n *model.Node) *flaw {
	overlaps := func(o netip.Prefix) bool { return o.Overlaps(p) }
	switch {
	case p.Bits() < 8 || p.Addr().Is6() && p.Bits() < 64 || unusable(p.Addr()) != "":
		return &flaw{"UnusableRange", fmt.Sprintf("%s holds addresses that no Service has", p)}
	case slices.ContainsFunc(r.podRanges, overlaps):
		return &flaw{"ServiceCIDROverlaps", fmt.Sprintf("%s holds addresses of pods", p)}
	case slices.ContainsFunc(n.Addresses, p.Contains):
		return &flaw{"ServiceCIDROverlaps", fmt.Sprintf("%s holds an address of this node", p)}
	}
	return nil
}

// except returns ranges without some addresses, both sorted.
func except(ranges []model.Range, addresses []netip.Addr) (left []model.Range) {
	for _, r := range ranges {
		for _, a := range addresses {
			if !r.Contains(a) {
				continue
			}
			if r.First.Less(a) {
				left = append(left, model.Range{First: r.First, Last: a.Prev()})
			}
			r.First = a.Next()
		}
		if r.Contains(r.Last) {
			left = append(left, r)
		}
	}
	return left
}

// countForeign counts the ClusterIPs of a Service that another proxy serves, n times, and reports whether there are
// any.
func (r *Resolver) countForeign(d *declared, n int) bool {
	if d == nil {
		return false
	}
	for _, a := range d.foreign {
		if r.foreign[a] += n; r.foreign[a] == 0 {
			delete(r.foreign, a)
		}
	}
	return len(d.foreign) > 0
}

// readForeign records the ClusterIPs of a Service that another proxy serves.
func (r *reading) readForeign() {
	for _, s := range r.clusterIPs() {
		if a, err := parseAddr(s); err == nil {
			r.out.foreign = append(r.out.foreign, a)
		}
	}
}

// showClusterIPs adds to d which ClusterIPs came and went.
func (r *Resolver) showClusterIPs(d *difference) {
	if len(r.changedClusterIPs) == 0 {
		return
	}
	for _, a := range slices.SortedFunc(maps.Keys(r.changedClusterIPs), netip.Addr.Compare) {
		was, now := r.shownClusterIPs[a], r.clusterIP(a)
		if was != nil && now != nil && *was == *now {
			continue
		}
		delete(r.shownClusterIPs, a)
		if was != nil {
			d.delClusterIPs = append(d.delClusterIPs, was)
		}
		if now != nil {
			d.putClusterIPs = append(d.putClusterIPs, now)
			r.shownClusterIPs[a] = now
		}
	}
	r.changedClusterIPs = map[netip.Addr]struct{}{} // clearing one takes as long as it was large
}

// clusterIP returns the ClusterIP at a, of the oldest Service that has it; nil if none has.
func (r *Resolver) clusterIP(a netip.Addr) *model.ClusterIP {
	owners := r.clusterIPs[a]
	if len(owners) == 0 || r.nodeState.owns(a) {
		return nil
	}
	s := slices.MinFunc(owners, func(s, o *service) int { return byAge(claim{by: s}, claim{by: o}) })
	return &model.ClusterIP{Owner: ownerFrom(s.key), Addr: a}
}
