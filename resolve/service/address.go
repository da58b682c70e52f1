package service

import (
	"fmt"
	"net/netip"
	"slices"

	netutils "k8s.io/utils/net"

	"fairlead.dev/fairlead/model"
)

// family is an IP family by its version number. The zero family is none.
type family uint8

const (
	ipv4 family = 4
	ipv6 family = 6
)

var bothFamilies = [...]family{ipv4, ipv6}

// familyOf returns the family of a valid address.
func familyOf(a netip.Addr) family {
	if a.Is4() {
		return ipv4
	}
	return ipv6
}

// String returns "ipv4" or "ipv6".
func (f family) String() string { return fmt.Sprintf("ipv%d", uint8(f)) }

// index returns the family's place in bothFamilies.
func (f family) index() int {
	if f == ipv4 {
		return 0
	}
	return 1
}

// any returns the unspecified address of the family.
func (f family) any() netip.Addr {
	if f == ipv4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// families is a set of families.
type families struct{ v4, v6 bool }

func (s families) has(f family) bool { return f == ipv4 && s.v4 || f == ipv6 && s.v6 }

func (s *families) add(f family) {
	s.v4 = s.v4 || f == ipv4
	s.v6 = s.v6 || f == ipv6
}

func (s *families) remove(f family) {
	s.v4 = s.v4 && f != ipv4
	s.v6 = s.v6 && f != ipv6
}

// flaw returns why a text can't be taken: a Problem's reason, and what is wrong.
type flaw struct{ reason, text string }

// ParseAddr returns the address that s says to kube-proxy: leading zeros of IPv4 are decimal, and an IPv4-mapped IPv6
// address is IPv4. An API server before Kubernetes 1.36 accepted both, and its objects live on.
func ParseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		if sloppy, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(s)); ok {
			a, err = sloppy, nil
		}
	}
	return a.Unmap(), err
}

// ParsePrefix returns the range of addresses that s says to kube-proxy, with its addresses as ParseAddr reads them.
func ParsePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		if _, sloppy, e := netutils.ParseCIDRSloppy(s); e == nil {
			a, _ := netip.AddrFromSlice(sloppy.IP)
			bits, _ := sloppy.Mask.Size()
			p, err = netip.PrefixFrom(a, bits), nil
		}
	}
	if v4 := p.Bits() - 96; p.Addr().Is4In6() && v4 >= 0 {
		p = netip.PrefixFrom(p.Addr().Unmap(), v4)
	}
	return p, err
}

// parseAddr reads the address of one host, such as a Service or an endpoint may have.
func parseAddr(s string) (netip.Addr, *flaw) {
	a, err := ParseAddr(s)
	if err != nil {
		return a, &flaw{"InvalidAddress", fmt.Sprintf("%q is not an IP address", s)}
	}
	if what := unusable(a); what != "" {
		return a, &flaw{"UnusableAddress", fmt.Sprintf("%s is %s", a, what)}
	}
	return a, nil
}

// unusable returns what kind of address a is if Services and endpoints can't have it, else "".
func unusable(a netip.Addr) string {
	switch {
	case a.Zone() != "":
		return "an address with a zone"
	case a.IsUnspecified():
		return "the unspecified address"
	case a.IsLoopback():
		return "a loopback address"
	case a.IsLinkLocalUnicast():
		return "a link-local address"
	case a.IsMulticast():
		return "a multicast address"
	}
	return ""
}

// parsePrefix reads a range of addresses, "10.0.0.0/8", and clears the bits after its length.
func parsePrefix(s string) (netip.Prefix, *flaw) {
	p, err := ParsePrefix(s)
	if err != nil || p.Addr().Is4In6() {
		return netip.Prefix{}, &flaw{"InvalidRange", fmt.Sprintf("%q is not a CIDR such as 192.0.2.0/24", s)}
	}
	return p.Masked(), nil
}

// hostPrefix returns the range that holds a alone.
func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// outermost sorts masked prefixes in place and drops those inside another.
func outermost(ps []netip.Prefix) []netip.Prefix {
	slices.SortFunc(ps, netip.Prefix.Compare)
	merged := ps[:0]
	for _, p := range ps {
		if n := len(merged); n == 0 || !merged[n-1].Contains(p.Addr()) {
			merged = append(merged, p)
		}
	}
	return merged
}

// contains reports whether one of prefixes, sorted, none inside another, holds a.
func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	i, found := slices.BinarySearchFunc(prefixes, a,
		func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
	return found || i > 0 && prefixes[i-1].Contains(a)
}

// rangeOf returns the addresses of a masked prefix.
func rangeOf(p netip.Prefix) model.Range {
	last := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(last)*8; bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(last)
	return model.Range{First: p.Addr(), Last: a}
}

// merge sorts ranges in place and joins those that touch or overlap.
func merge(rs []model.Range) []model.Range {
	slices.SortFunc(rs, func(a, b model.Range) int { return a.First.Compare(b.First) })
	merged := rs[:0]
	for _, r := range rs {
		n := len(merged)
		if n == 0 || !touches(merged[n-1], r) {
			merged = append(merged, r)
		} else if merged[n-1].Last.Less(r.Last) {
			merged[n-1].Last = r.Last
		}
	}
	return merged
}

// touches reports whether b, which doesn't begin before a, leaves no gap after a.
func touches(a, b model.Range) bool { return a.Contains(b.First) || a.Last.Next() == b.First }
