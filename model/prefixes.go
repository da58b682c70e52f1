package model

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// Prefixes returns the prefixes that make up the range.
func (r Range) Prefixes() []netip.Prefix {
	every := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if r.First.Is6() {
		every = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return r.PrefixesIn(every)
}

// PrefixCount returns how many prefixes make up the range, without making them.
func (r Range) PrefixCount() int {
	a, b := numberOf(r.First), numberOf(r.Last)
	differ := number{a.high ^ b.high, a.low ^ b.low}
	below := number{} // all bits below the highest that differs: the range has a part on both sides of that
	switch {
	case differ == number{}:
		return 1
	case differ.high > 0:
		below = number{1<<(bits.Len64(differ.high)-1) - 1, ^uint64(0)}
	default:
		below = number{0, 1<<(bits.Len64(differ.low)-1) - 1}
	}
	first, last := number{a.high & below.high, a.low & below.low}, number{b.high & below.high, b.low & below.low}
	if first == (number{}) && last == below {
		return 1
	}
	before := number{below.high &^ first.high, below.low &^ first.low}
	return before.next().ones() + last.next().ones()
}

// number is an address as a number.
type number struct{ high, low uint64 }

func numberOf(a netip.Addr) number {
	b := a.As16()
	return number{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func (n number) next() number {
	low, carry := bits.Add64(n.low, 1, 0)
	return number{n.high + carry, low}
}

func (n number) ones() int { return bits.OnesCount64(n.high) + bits.OnesCount64(n.low) }

// PrefixesIn returns the prefixes that make up those addresses of home that are in the range.
func (r Range) PrefixesIn(home netip.Prefix) []netip.Prefix {
	last := LastOf(home)
	switch {
	case home.Addr().BitLen() != r.First.BitLen(), last.Less(r.First), r.Last.Less(home.Addr()):
		return nil
	case r.Contains(home.Addr()) && r.Contains(last):
		return []netip.Prefix{home}
	}
	half := netip.PrefixFrom(home.Addr(), home.Bits()+1)
	other := netip.PrefixFrom(LastOf(half).Next(), half.Bits())
	return append(r.PrefixesIn(half), r.PrefixesIn(other)...)
}

// LastOf returns the last address of a prefix.
func LastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
