package reconcile

import "time"

// patience is how many Writes in a row may fail before the kernel counts as one that takes nothing.
const patience = 32

// few is how many facts that were found before may be refused again in one turn, before the others have to wait for another.
const few = 8

// respite is how long after that the search for single facts begins again.
const respite = 30 * time.Second

// search is for the facts that the kernel refuses and the plane doesn't name: by halving among facts of unknown guilt, one by one
// among those that were found before. While nothing is written, the facts that are given up on together become twice as many
// each time.
type search struct {
	on      bool      // a Write failed, in this turn or the one before
	among   int       // a culprit is one of so many next moves; 0: any
	failing int       // Writes that failed in a row
	least   int       // so many facts are searched no further
	respite time.Time // when the search goes on after too many

	alone   int // found facts to be tried together: doubled by success, 1 after a failure
	refused int // found facts refused again in this turn
}

// next says how many of n moves of unknown guilt to try next.
func (s *search) next(n int) int {
	if s.among > 0 {
		return min(n, (s.among+1)/2)
	}
	return n
}

// worked notes that n moves of unknown guilt were written.
func (s *search) worked(n int) { s.failing, s.least, s.among = 0, 1, max(0, s.among-n) }

// failed notes that n moves of unknown guilt were not written, and says whether they are to be set aside now.
func (s *search) failed(n int, now time.Time) bool {
	if s.failing >= patience && now.After(s.respite) {
		s.failing, s.least = 0, 1
	}
	if s.failing++; s.failing == patience {
		s.respite = now.Add(respite)
	}
	if s.among = n; n > max(1, s.least) {
		return false
	}
	s.among, s.least = 0, 2*max(1, s.least)
	return true
}

// hopeless says that the kernel takes nothing.
func (s *search) hopeless() bool { return s.failing >= patience }
