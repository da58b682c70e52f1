// Package maglev builds the look-up table of Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load
// Balancer" (NSDI 2016), section 3.4: consistent hashing that spreads clients evenly and moves few of them when
// backends change.
//
// It is a pure function of the backends. It keeps no table, hashes no packet and picks no backend: that is its users'.
package maglev

import "fairlead.dev/fairlead/model"

// Size is the usual number of a table's entries, a prime. With up to 655 backends of equal weight none gets 1 % more or
// less than its share. When one of N backends goes, at most 1/N + 0.5 % of the entries change up to N = 50, and 1/N + 1
// % up to 600: the paper's own algorithm moves that much with a table of this size.
const Size = model.MaxEntries

// Entries returns the size of a pool's table: what the model says, else at least each entries for every backend. With
// 100 each, shares are even to 1 % and 2 to 3 % of the clients whose backend stays are moved when another goes; with
// 1000 each, below 1 %.
func Entries(p *model.Pool, each int) int {
	if p.Entries > len(p.Backends) {
		return p.Entries
	}
	return model.TableSize(len(p.Backends), each)
}

// Table returns size entries, each the index of a backend: a packet whose hash is h goes to backends[t[h%size]]. A
// backend has as many entries as its weight asks for, and equal backends give equal tables on every node. Size must be
// a prime above the number of backends; without backends the table is nil.
func Table(backends []model.Backend, size int) []uint16 {
	if len(backends) == 0 {
		return nil
	}
	const free = 1<<16 - 1
	t := make([]uint16, size)
	for i := range t {
		t[i] = free
	}
	rows, heaviest := permutations(backends, uint32(size))
	for left := size; ; {
		for i := range rows {
			r := &rows[i]
			if r.credit += r.share; r.credit < heaviest {
				continue // a lighter one sits out some rounds
			}
			r.credit -= heaviest
			at := r.next
			for t[at] != free {
				at = r.step(at, uint32(size))
			}
			t[at] = uint16(i)
			r.next = r.step(at, uint32(size))
			if left--; left == 0 {
				return t
			}
		}
	}
}

// row is where a backend is in its permutation of the entries.
type row struct {
	next, skip    uint32
	share, credit int
}

// step returns the entry after at.
func (r *row) step(at, size uint32) uint32 {
	if at += r.skip; at >= size {
		at -= size
	}
	return at
}

// permutations returns each backend's, and the largest weight.
func permutations(backends []model.Backend, size uint32) (rows []row, heaviest int) {
	rows = make([]row, len(backends))
	for i, b := range backends {
		h := Hash(b)
		rows[i] = row{next: uint32(h>>32) % size, skip: uint32(h)%(size-1) + 1, share: b.Share()}
		heaviest = max(heaviest, rows[i].share)
	}
	for i := range rows {
		rows[i].credit = heaviest - rows[i].share // all of them take part in the first round
	}
	return rows, heaviest
}

// Hash is FNV-1a of the backend's address and port, stirred as in splitmix64, so that near addresses lie far apart.
func Hash(b model.Backend) uint64 {
	h := uint64(14695981039346656037)
	add := func(c byte) { h = (h ^ uint64(c)) * 1099511628211 }
	a := b.Addr.Addr().As16()
	for _, c := range a {
		add(c)
	}
	add(byte(b.Addr.Port() >> 8))
	add(byte(b.Addr.Port()))
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
