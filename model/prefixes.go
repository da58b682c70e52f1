package model

import "net/netip"

// Prefixes returns the prefixes that make up the range.
func (r Range) Prefixes() []netip.Prefix {
	every := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if r.First.Is6() {
		every = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return r.PrefixesIn(every)
}

// PrefixesIn returns the prefixes that make up those addresses of home that are in the range.
func (r Range) PrefixesIn(home netip.Prefix) []netip.Prefix {
	last := lastOf(home)
	switch {
	case home.Addr().BitLen() != r.First.BitLen(), last.Less(r.First), r.Last.Less(home.Addr()):
		return nil
	case r.Contains(home.Addr()) && r.Contains(last):
		return []netip.Prefix{home}
	}
	half := netip.PrefixFrom(home.Addr(), home.Bits()+1)
	other := netip.PrefixFrom(lastOf(half).Next(), half.Bits())
	return append(r.PrefixesIn(half), r.PrefixesIn(other)...)
}

// lastOf returns the last address of a prefix.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
