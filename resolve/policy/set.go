package policy

import (
	"iter"
	"math/bits"
)

// set holds pointers, found by a hash of what they point to. Where that has its key in it, a Go map would have each key
// once more. The hash must not change meanwhile.
type set[T any] struct {
	hash  func(*T) uint64
	slots []*T // by hash: where that slot is in use, the next that was free; at most four of five are in use
	count int
}

func (s *set[T]) len() int { return s.count }

// home returns which slot one of that hash has if it is free.
func (s *set[T]) home(hash uint64) int {
	at, _ := bits.Mul64(hash, uint64(len(s.slots)))
	return int(at)
}

func (s *set[T]) next(i int) int {
	if i++; i == len(s.slots) {
		return 0
	}
	return i
}

// find returns one of that hash of which is returns true, nil if there is none.
func (s *set[T]) find(hash uint64, is func(*T) bool) *T {
	if s.count == 0 {
		return nil
	}
	for i := s.home(hash); s.slots[i] != nil; i = s.next(i) {
		if is(s.slots[i]) {
			return s.slots[i]
		}
	}
	return nil
}

// add adds x, which is not in s.
func (s *set[T]) add(x *T) {
	if 5*(s.count+1) > 4*len(s.slots) {
		s.resize(len(s.slots) + len(s.slots)/2 + 8)
	}
	s.put(x)
	s.count++
}

func (s *set[T]) put(x *T) {
	i := s.home(s.hash(x))
	for s.slots[i] != nil {
		i = s.next(i)
	}
	s.slots[i] = x
}

func (s *set[T]) resize(slots int) {
	was := s.slots
	s.slots = make([]*T, slots)
	for _, x := range was {
		if x != nil {
			s.put(x)
		}
	}
}

// remove removes x, which is in s. What could not be found any more behind the free slot moves into it.
func (s *set[T]) remove(x *T) {
	free := s.home(s.hash(x))
	for s.slots[free] != x {
		free = s.next(free)
	}
	for i := s.next(free); s.slots[i] != nil; i = s.next(i) {
		if home := s.home(s.hash(s.slots[i])); s.behind(i, home) >= s.behind(i, free) {
			s.slots[free], free = s.slots[i], i
		}
	}
	s.slots[free] = nil
	if s.count--; 8*s.count < len(s.slots)-64 {
		s.resize(2*s.count + 8)
	}
}

// behind returns how many slots i is behind another.
func (s *set[T]) behind(i, other int) int {
	if i < other {
		i += len(s.slots)
	}
	return i - other
}

// all returns what is in s, in the order of hashes. Nothing may be added or removed meanwhile.
func (s *set[T]) all() iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for _, x := range s.slots {
			if x != nil && !yield(x) {
				return
			}
		}
	}
}
