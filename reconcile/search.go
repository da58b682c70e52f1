package reconcile

import "time"

// patience is how many Writes in a row may fail before the search goes on group by group: one fact of a Write of 4096
// takes 13.
const patience = 26

// despair is how many may fail before facts are set aside by the Write.
const despair = patience + 16

// few is how many facts that were found before may be refused again in one turn, before the others have to wait for
// another.
const few = 8

// unhurried is how many attempts later than other facts those are that the plane named.
const unhurried = 8

// respite is how long after that the search for single facts begins again.
const respite = 30 * time.Second

// search is for the facts that the kernel refuses and the plane doesn't name: by halving among facts of unknown guilt,
// one by one among those that were found before. Where many groups have refused facts, each is tried by itself.
type search struct {
	on      bool      // a Write failed, in this turn or the one before
	among   int       // a culprit is one of so many next moves; 0: any
	failing int       // Writes that failed in a row
	groups  bool      // groups are tried by themselves
	respite time.Time // when the search goes on after too many

	alone   int // found facts to be tried together: doubled by success, 1 after a failure
	refused int // found facts refused again in this turn
}

// next returns how many of n moves of unknown guilt to try next.
func (s *search) next(n int) int {
	if s.among > 0 {
		return min(n, (s.among+1)/2)
	}
	return n
}

// worked records that n moves of unknown guilt were written.
func (s *search) worked(n int) { s.failing, s.among = 0, max(0, s.among-n) }

// failed records that n moves of unknown guilt were not written, and reports whether they are to be set aside now: one,
// or all that one group has, or whatever there is once the kernel counts as one that takes nothing.
func (s *search) failed(n int, group bool, now time.Time) bool {
	if s.hopeless() && now.After(s.respite) {
		s.failing = 0
	}
	switch s.failing++; s.failing {
	case patience:
		s.groups = true
	case despair:
		s.groups, s.respite = false, now.Add(respite)
	}
	s.among = 0
	if n == 1 || group || s.hopeless() {
		return true
	}
	if s.failing != patience { // else the order changes
		s.among = n
	}
	return false
}

// hopeless reports that the kernel takes nothing.
func (s *search) hopeless() bool { return s.failing >= despair }
