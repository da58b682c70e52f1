package nftables

import (
	"fairlead.dev/fairlead/dataplane/maglev"
	"fairlead.dev/fairlead/model"
)

// seated is the greatest number of slots that are given out as seats: the work grows with its square.
const seated = 64

// claim is a backend's wish for one slot.
type claim struct {
	who     uint64 // hash of the backend, another for each of its shares
	weight  uint64 // of the claim to the slot that it holds
	backend uint16
}

// assignSlots returns each of n slots one of a pool's backends, by index, and a backend as many as its shares. Where
// one backend replaces another two or three slots change; in the order of addresses it would be a third.
//
// It is the stable matching of backends and slots (Gale and Shapley, 1962) where both sides value a pair by its hash.
// There is only one, so it depends on nothing but who is there.
func assignSlots(p *model.Pool, n int) []uint16 {
	waiting := make([]claim, 0, n)
	for i, b := range p.Backends {
		who := maglev.Hash(b)
		for share := range shares(p, b) {
			waiting = append(waiting, claim{who: who + uint64(share)<<32, backend: uint16(i)})
		}
	}
	held := make([]claim, n)
	for len(waiting) > 0 {
		last := len(waiting) - 1
		c := waiting[last]
		slot := c.choose(held)
		if waiting = waiting[:last]; held[slot].weight > 0 {
			waiting = append(waiting, held[slot])
		}
		held[slot] = c
	}
	slots := make([]uint16, n)
	for s, c := range held {
		slots[s] = c.backend
	}
	return slots
}

// choose returns the slot that the claim has the greatest weight to, of those that are free or held by a lesser one.
func (c *claim) choose(held []claim) (slot int) {
	c.weight = 0
	for s, h := range held {
		if w := stir(c.who^uint64(s)) | 1; w > h.weight && w > c.weight {
			slot, c.weight = s, w
		}
	}
	return slot
}

// stir makes a hash of one, for pairs of hashes and small numbers: one round of a multiplication by 2^64 divided by the
// golden ratio, which spreads what differs over the upper half.
func stir(z uint64) uint64 {
	z *= 0x9e3779b97f4a7c15
	z ^= z >> 32
	return z * 0x9e3779b97f4a7c15
}
