package ebpf

import (
	"cmp"
	"fmt"
	"slices"
)

// span is a run of indices in an array.
type span struct{ at, size uint32 }

// space allocates runs of an array. What is released is not allocated again before a grace period: a running program
// may still read it.
type space struct {
	what     string // for errors
	capacity uint32
	run      span                // allocated from its beginning
	free     map[uint32][]uint32 // other runs, by size
	limbo    []span              // released, perhaps still read
	grace    func() error
}

// newSpace returns a space of the indices from 1 to end, excluding end: 0 stands for none.
func newSpace(what string, end uint32, grace func() error) *space {
	return &space{what: what, capacity: end - 1, run: span{1, end - 1}, free: map[uint32][]uint32{}, grace: grace}
}

// allocate returns a run.
func (s *space) allocate(size uint32) (uint32, error) {
	if at, ok := s.reuse(size); ok {
		return at, nil
	}
	if s.run.size < size && !s.longer(size) {
		if err := s.gather(); err != nil {
			return 0, err
		}
		if !s.longer(size) {
			return 0, fmt.Errorf("ebpf: %d more %s don't fit: there is room for %d", size, s.what, s.capacity)
		}
	}
	s.run.at += size
	s.run.size -= size
	return s.run.at - size, nil
}

// reuse returns a free run of just that size.
func (s *space) reuse(size uint32) (uint32, bool) {
	l := s.free[size]
	if len(l) == 0 {
		return 0, false
	}
	if s.free[size] = l[:len(l)-1]; len(l) == 1 {
		delete(s.free, size)
	}
	return l[len(l)-1], true
}

// release frees a run.
func (s *space) release(at, size uint32) { s.limbo = append(s.limbo, span{at, size}) }

// longer continues with the longest free run, if that is long enough.
func (s *space) longer(size uint32) bool {
	best := uint32(0)
	for n := range s.free {
		best = max(best, n)
	}
	if best < size {
		return false
	}
	rest := s.run
	at, _ := s.reuse(best)
	s.run = span{at, best}
	s.put(rest)
	return true
}

// put records a free run.
func (s *space) put(r span) {
	if r.size > 0 {
		s.free[r.size] = append(s.free[r.size], r.at)
	}
}

// gather waits until no program reads what was released, and joins free runs.
func (s *space) gather() error {
	if len(s.limbo) > 0 {
		if err := s.grace(); err != nil {
			return err
		}
	}
	s.put(s.run)
	all := s.limbo
	for size, l := range s.free {
		for _, at := range l {
			all = append(all, span{at, size})
		}
	}
	s.run, s.limbo = span{}, nil
	clear(s.free)
	sortSpans(all)
	for i := 0; i < len(all); {
		run := all[i]
		for i++; i < len(all) && all[i].at == run.at+run.size; i++ {
			run.size += all[i].size
		}
		s.put(run)
	}
	return nil
}

func sortSpans(l []span) {
	slices.SortFunc(l, func(a, b span) int { return cmp.Compare(a.at, b.at) })
}

// fill marks the runs that are in use, in any order, and what lies between them as free. It is for a new space.
func (s *space) fill(used []span) {
	sortSpans(used)
	at := uint32(1)
	for _, u := range used {
		if u.at > at {
			s.put(span{at, u.at - at})
		}
		at = max(at, min(u.at+u.size, s.capacity+1))
	}
	s.run = span{at, s.capacity + 1 - at}
}
