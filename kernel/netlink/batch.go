package netlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// Batch is a list of requests that are sent together. Unless the family makes a transaction of them they are not
// atomic: the kernel tries each, in order.
type Batch struct {
	Begin, End []byte // markers around what is sent at once; nil: none
	Portion    int    // how many bytes of requests are sent at once; 0: all
	Type       uint16 // of requests that were added with type 0

	b        Buffer
	requests []request
}

type request struct {
	start int
	said  func() string // what it does, for errors
	fine  []unix.Errno  // rejections that mean that nothing is left to do
}

// Add adds a request, whose header body follows. said says what it does, for errors; rejections in fine are none.
func (b *Batch) Add(kind, flags uint16, said func() string, body func(*Buffer), fine ...unix.Errno) {
	b.requests = append(b.requests, request{len(b.b), said, fine})
	at := b.b.begin(kind, unix.NLM_F_REQUEST|flags, 0)
	body(&b.b)
	b.b.end(at)
}

// Copy adds request i of another batch.
func (b *Batch) Copy(of *Batch, i int) {
	r := of.requests[i]
	m := of.b[r.start:of.end(i)]
	r.start = len(b.b)
	b.requests, b.b = append(b.requests, r), append(b.b, m...)
}

// Len returns the number of requests.
func (b *Batch) Len() int { return len(b.requests) }

// Body returns what follows the header of request i.
func (b *Batch) Body(i int) []byte { return b.b[b.requests[i].start+unix.NLMSG_HDRLEN : b.end(i)] }

// Said returns what request i does.
func (b *Batch) Said(i int) string { return b.requests[i].said() }

// end returns where request i ends.
func (b *Batch) end(i int) int {
	if i+1 < len(b.requests) {
		return b.requests[i+1].start
	}
	return len(b.b)
}

// Run sends the requests and calls refused with each that the kernel refuses, by its number, -1 for a transaction as a
// whole. It tries all.
func (s *Socket) Run(b *Batch, refused func(i int, err error)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for from := 0; from < b.Len(); {
		to := from + 1
		for to < b.Len() && (b.Portion == 0 || b.end(to)-b.requests[from].start <= b.Portion) {
			to++
		}
		if err := s.send(b, from, to); err != nil {
			return fmt.Errorf("send %d netlink requests, the first to %s: %w", to-from, b.Said(from), err)
		}
		if err := s.replies(b, from, to, refused); err != nil {
			return err
		}
		from = to
	}
	return nil
}

// send sends requests from and up to, of which the last is to be acknowledged.
func (s *Socket) send(b *Batch, from, to int) error {
	for _, r := range b.requests[from:to] {
		s.seq++
		binary.NativeEndian.PutUint32(b.b[r.start+8:], s.seq)
		if kind := b.b[r.start+4:]; binary.NativeEndian.Uint16(kind) == 0 {
			binary.NativeEndian.PutUint16(kind, b.Type)
		}
	}
	flags := b.b[b.requests[to-1].start+6:]
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
	_, err := unix.Writev(s.fd, [][]byte{b.Begin, b.b[b.requests[from].start:b.end(to-1)], b.End})
	return err
}

// replies reads what the kernel said of the requests that were sent last. It handles them within the send, so that
// every reply waits already.
func (s *Socket) replies(b *Batch, from, to int, refused func(i int, err error)) error {
	done, some := false, false
	for {
		n, err := s.receive(unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			return err
		}
		for m := range Messages(s.reader[:n]) {
			i := to - 1 - int(int32(s.seq-m.Seq))
			if m.Type != unix.NLMSG_ERROR || m.Seq != 0 && (i < from || i >= to) {
				continue
			}
			if m.Seq == 0 { // of a marker
				i = -1
			}
			done = done || i == to-1
			if err := m.Err(); err != nil && (i < 0 || !b.fine(i, err)) {
				some = true
				refused(i, err)
			}
		}
	}
	if !done && !some {
		return errors.New("the kernel did not acknowledge netlink requests")
	}
	return nil
}

// fine reports whether a rejection of request i means that nothing is left to do.
func (b *Batch) fine(i int, err error) bool {
	return slices.ContainsFunc(b.requests[i].fine, func(e unix.Errno) bool { return errors.Is(err, e) })
}

// Apply sends the requests and returns all that the kernel refuses in one error. It tries all.
func (s *Socket) Apply(b *Batch) error {
	var errs []error
	err := s.Run(b, func(i int, err error) { errs = append(errs, fmt.Errorf("%s: %w", b.Said(i), err)) })
	return errors.Join(append(errs, err)...)
}
