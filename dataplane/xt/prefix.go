package xt

import (
	"net/netip"
	"slices"
)

// Halves are items in the order of their addresses, all of one family.
type Halves[T any] struct {
	Items []T
	Addr  func(T) netip.Addr
}

func (h Halves[T]) at(i int) netip.Addr { return h.Addr(h.Items[i]) }

// Nearest returns those of items, from and end, that one prefix tells from all others and that are nearest to a half of
// them. It goes down the larger branch of the addresses' bits until that is no more than half of all. There must be two
// addresses.
func (h Halves[T]) Nearest() (from, end int) {
	n := len(h.Items)
	far := func(from, end int) int { return max(2*(end-from)-n, n-2*(end-from)) }
	end = h.Cut(0, n)
	for lo, hi := 0, n; 2*(hi-lo) > n && h.at(lo) != h.at(hi-1); {
		if mid := h.Cut(lo, hi); mid-lo >= hi-mid {
			hi = mid
		} else {
			lo = mid
		}
		if far(lo, hi) <= far(from, end) {
			from, end = lo, hi
		}
	}
	return from, end
}

// Cut returns the first of items from and up to end, not all of one address, that has 1 where their addresses first
// differ.
func (h Halves[T]) Cut(from, end int) int {
	bit := sharedBits(h.at(from), h.at(end-1))
	n, _ := slices.BinarySearchFunc(h.Items[from:end], true, func(t T, _ bool) int { return -1 + 2*bitOf(h.Addr(t), bit) })
	return from + n
}

// Shared returns the longest prefix that all items share.
func (h Halves[T]) Shared() netip.Prefix {
	a, b := h.at(0), h.at(len(h.Items)-1)
	return netip.PrefixFrom(a, sharedBits(a, b)).Masked()
}

// sharedBits counts the leading bits that two addresses of a family have in common.
func sharedBits(a, b netip.Addr) int {
	n := 0
	for n < a.BitLen() && bitOf(a, n) == bitOf(b, n) {
		n++
	}
	return n
}

// bitOf returns an address's n-th bit.
func bitOf(a netip.Addr, n int) int {
	b := a.As16()
	n += 128 - a.BitLen()
	return int(b[n/8]>>(7-n%8)) & 1
}
