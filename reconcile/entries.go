package reconcile

import (
	"iter"
	"math/bits"
)

// entries are what is known of keys, by their ids. Those are hashes already, and a Go map, which doubles, has up to 57
// bytes for each of these 24.
type entries struct {
	slots []slot // by id: where that slot is in use, the next that was free; at most four of five are in use
	count int
}

// slot has an entry, or the id 0: it is free.
type slot struct {
	id uint64
	entry
}

func (e *entries) len() int { return e.count }

// home returns which slot an id has if it is free.
func (e *entries) home(id uint64) int {
	at, _ := bits.Mul64(id, uint64(len(e.slots)))
	return int(at)
}

func (e *entries) next(i int) int {
	if i++; i == len(e.slots) {
		return 0
	}
	return i
}

// find returns where an id is, or would be: -1 where there are no slots.
func (e *entries) find(id uint64) (at int, there bool) {
	if len(e.slots) == 0 {
		return -1, false
	}
	for at = e.home(id); e.slots[at].id != 0; at = e.next(at) {
		if e.slots[at].id == id {
			return at, true
		}
	}
	return at, false
}

func (e *entries) get(id uint64) (x entry, there bool) {
	if at, there := e.find(id); there {
		return e.slots[at].entry, true
	}
	return x, false
}

func (e *entries) set(id uint64, x entry) {
	at, there := e.find(id)
	if !there && 5*(e.count+1) > 4*len(e.slots) {
		e.resize(len(e.slots) + len(e.slots)/4 + 16)
		at, _ = e.find(id)
	}
	if e.slots[at] = (slot{id, x}); !there {
		e.count++
	}
}

// reserve makes room for as many.
func (e *entries) reserve(count int) {
	if n := count + count/4 + 16; n > len(e.slots) {
		e.resize(n)
	}
}

func (e *entries) resize(n int) {
	was := e.slots
	e.slots = make([]slot, n)
	for _, s := range was {
		if s.id != 0 {
			at, _ := e.find(s.id)
			e.slots[at] = s
		}
	}
}

// remove removes an id, if it is there. What could not be found any more behind the free slot moves into it.
func (e *entries) remove(id uint64) {
	free, there := e.find(id)
	if !there {
		return
	}
	for i := e.next(free); e.slots[i].id != 0; i = e.next(i) {
		if home := e.home(e.slots[i].id); e.behind(i, home) >= e.behind(i, free) {
			e.slots[free], free = e.slots[i], i
		}
	}
	e.slots[free] = slot{}
	if e.count--; 4*e.count < len(e.slots)-64 {
		e.resize(e.count + e.count/2 + 16)
	}
}

// behind returns how many slots i is behind another.
func (e *entries) behind(i, other int) int {
	if i < other {
		i += len(e.slots)
	}
	return i - other
}

// all returns the entries, in the order of ids. None may be added or removed meanwhile.
func (e *entries) all() iter.Seq2[uint64, entry] {
	return func(yield func(uint64, entry) bool) {
		for _, s := range e.slots {
			if s.id != 0 && !yield(s.id, s.entry) {
				return
			}
		}
	}
}
