package policy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// mostPreDNAT is how many addresses of Services outside of every ServiceCIDR are evaluated only after translation.
const mostPreDNAT = 1024

// destinations are those of Services, for a mode that delivers their packets to this node before it translates them.
type destinations struct {
	ranges    []model.Range      // of ServiceCIDRs: only Services have these addresses
	frontends map[netip.Addr]int // by their address
	excess    int                // addresses beyond mostPreDNAT
}

// in reports whether a is in one of the ranges.
func (d *destinations) in(a netip.Addr) bool {
	return slices.ContainsFunc(d.ranges, func(r model.Range) bool { return r.Contains(a) })
}

// apply takes changes, and reports whether other destinations follow from them.
func (d *destinations) apply(c model.Change[model.ServicePart]) (changed bool) {
	count := func(parts []model.ServicePart, n int) {
		for _, x := range parts {
			f, ok := x.(*model.Frontend)
			if !ok || f.Entry.AnyAddr() || f.Via == model.ViaHostPort { // addresses of the node's, not Services' alone
				continue
			}
			before := d.frontends[f.Entry.Addr]
			if d.frontends[f.Entry.Addr] = before + n; before+n == 0 {
				delete(d.frontends, f.Entry.Addr)
			}
			changed = changed || (before == 0 || before+n == 0) && !d.in(f.Entry.Addr)
		}
	}
	for _, x := range c.Put {
		if n, ok := x.(*model.ServiceNode); ok && !slices.Equal(d.ranges, n.ServiceRanges) {
			d.ranges, changed = n.ServiceRanges, true
		}
	}
	count(c.Put, 1) // first, so that an address that stays is one throughout
	count(c.Del, -1)
	return changed
}

// prefixes returns the ranges, and the addresses outside of them, sorted: so many of those as count.
func (d *destinations) prefixes() (l []netip.Prefix) {
	for _, r := range d.ranges {
		l = append(l, r.Prefixes()...)
	}
	var outside []netip.Addr
	for a := range maps.Keys(d.frontends) {
		if !d.in(a) {
			outside = append(outside, a)
		}
	}
	slices.SortFunc(outside, netip.Addr.Compare)
	d.excess = max(0, len(outside)-mostPreDNAT)
	for _, a := range outside[:len(outside)-d.excess] {
		l = append(l, netip.PrefixFrom(a, a.BitLen()))
	}
	slices.SortFunc(l, netip.Prefix.Compare)
	return slices.Compact(l)
}

// ApplyServices takes changes of Services in a mode that delivers their packets to this node before it translates
// them: Config.PreDNAT follows. It is the ServiceCIDRs, which don't grow with Services, and what is outside of them.
// The next change has what follows from it, without the node's own addresses (see others).
func (r *Resolver) ApplyServices(c model.Change[model.ServicePart]) {
	if r.services.apply(c) {
		r.config.PreDNAT, r.staleNode, r.staleProblems = r.services.prefixes(), true, true
	}
}

// others returns destinations without those that are the node's own, which are sorted: what else is sent there goes to
// the node, and is evaluated as such.
func others(l []netip.Prefix, own []netip.Addr) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(l), func(p netip.Prefix) bool {
		_, found := slices.BinarySearchFunc(own, p.Addr(), netip.Addr.Compare)
		return found && p.IsSingleIP()
	})
}

// problems returns that there are too many destinations.
func (d *destinations) problems(node string) []source.Problem {
	if d.excess == 0 {
		return nil
	}
	return []source.Problem{{Object: source.Key{Kind: source.Node, Name: node}, Reason: TooLarge,
		Message: fmt.Sprintf("Services have %d external addresses outside of every ServiceCIDR, and in this mode policies "+
			"of clients know %d of them: pods with egress policies can't reach the others; use fewer, or another mode",
			mostPreDNAT+d.excess, mostPreDNAT)}}
}
