package netlink

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// open opens a socket for routes.
func open(t *testing.T, groups ...int) *Socket {
	s, err := Listen(unix.NETLINK_ROUTE, 0, groups...)
	if err != nil {
		t.Error(err)
		return nil
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestAttributesAreReadAsWritten(t *testing.T) {
	var b Buffer
	b.Nest(1, func() { b.Uint8(1, 8); b.Uint16(2, 16); b.Uint32(3, 32) })
	b.BE16(2, 16)
	b.BE32(3, 32)
	b.BE64(4, 64)
	b.Text(5, "text")
	b.Bytes(6, []byte("bytes"))
	var got []string
	for t, v := range Attributes(b) {
		switch t {
		case 1:
			got = append(got, fmt.Sprint(Uint(Find(v, 1)), Uint(Find(v, 2)), Uint(Find(v, 3))))
		case 2, 3, 4:
			got = append(got, fmt.Sprint(BE(v)))
		case 5:
			got = append(got, Text(v))
		default:
			got = append(got, string(v))
		}
	}
	if want := []string{"8 16 32", "16", "32", "64", "text", "bytes"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	for cut := range b { // no attribute is read that isn't whole
		for _, v := range Attributes(b[:cut]) {
			if len(v) > cut {
				t.Errorf("%d bytes in %d", len(v), cut)
			}
		}
	}
}

func FuzzMessages(f *testing.F) {
	f.Add(append(Marker(16, 1, 2, 3, 4, 8, 0, 1, 0, 9, 9, 9, 9), Marker(unix.NLMSG_ERROR, 1, 0, 0, 0)...))
	f.Fuzz(func(_ *testing.T, b []byte) {
		for m := range Messages(b) {
			_ = m.Err()
			for _, v := range m.Attributes(4) {
				Find(v, 1)
				Text(v)
				Uint(v)
				BE(v)
			}
		}
	})
}

// address adds a request that adds an address to the loopback device, of 10.0.0.0/8, or removes it.
func address(b *Batch, n int, gone bool, fine ...unix.Errno) {
	kind, flags := uint16(unix.RTM_NEWADDR), uint16(unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	if gone {
		kind, flags = unix.RTM_DELADDR, 0
	}
	b.Add(kind, flags, func() string { return fmt.Sprint("address ", n) }, func(m *Buffer) {
		*m = append(*m, unix.AF_INET, 32, 0, 0, 1, 0, 0, 0)
		m.Bytes(unix.IFA_LOCAL, []byte{10, 0, byte(n >> 8), byte(n)})
	}, fine...)
}

func TestBatch(t *testing.T) {
	netnstest.Do(t, func() {
		s := open(t)
		if s == nil {
			return
		}
		const many = 300
		b := Batch{Portion: 1000}
		for n := range many {
			address(&b, n, false)
		}
		if err := s.Apply(&b); err != nil {
			t.Error(err)
		}
		list := func() (n int) {
			err := s.Request(unix.RTM_GETADDR, unix.NLM_F_DUMP,
				func(b *Buffer) { *b = append(*b, make([]byte, unix.SizeofIfAddrmsg)...) },
				func(Message) { n++ })
			if err != nil {
				t.Error(err)
			}
			return n
		}
		if n := list(); n != many {
			t.Errorf("%d addresses, want %d", n, many)
		}
		var refused []int
		if err := s.Run(&b, func(i int, err error) {
			if refused = append(refused, i); !errors.Is(err, unix.EEXIST) {
				t.Errorf("%s: %v", b.Said(i), err)
			}
		}); err != nil || len(refused) != many || !slices.IsSorted(refused) {
			t.Errorf("%d of %d are refused, %v", len(refused), many, err)
		}
		var again Batch
		again.Copy(&b, 7)
		address(&again, 8, false, unix.EEXIST)
		address(&again, many, false)
		if err := s.Apply(&again); err == nil || err.Error() != "address 7: file exists" &&
			!bytes.HasPrefix([]byte(err.Error()), []byte("address 7: file exists (")) {
			t.Errorf("%v", err)
		}
		if n := list(); n != many+1 {
			t.Errorf("%d addresses, want %d: a refusal ends a batch", n, many+1)
		}
	})
}

func TestRequestThatIsRefused(t *testing.T) {
	netnstest.Do(t, func() {
		s := open(t)
		if s == nil {
			return
		}
		byIndex := func(b *Buffer) { *b = append(*b, 0, 0, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) }
		if err := s.Request(unix.RTM_GETLINK, 0, byIndex, func(Message) {}); !errors.Is(err, unix.ENODEV) {
			t.Errorf("no interface 99: %v", err)
		}
	})
}

func TestWatchIgnoresOwnRequests(t *testing.T) {
	netnstest.Do(t, func() {
		own, other := open(t), open(t)
		events := open(t, unix.RTNLGRP_IPV4_IFADDR)
		if own == nil || other == nil || events == nil {
			return
		}
		if err := events.Ignore(own.Port()); err != nil {
			t.Error(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		signals, err := events.Watch(ctx, true, func(m Message) bool { return m.Type == unix.RTM_NEWADDR })
		if err != nil {
			t.Error(err)
			return
		}
		<-signals // at once
		change := func(s *Socket, n int, gone bool) {
			var b Batch
			address(&b, n, gone)
			if err := s.Apply(&b); err != nil {
				t.Error(err)
			}
		}
		change(own, 1, false)
		change(other, 1, true) // not what is watched for
		select {
		case <-signals:
			t.Error("a signal for an own request, or one that doesn't concern us")
		case <-time.After(50 * time.Millisecond):
		}
		change(other, 2, false)
		<-signals
		stop()
		for range signals {
		}
		again, err := events.Watch(t.Context(), false, func(Message) bool { return true })
		if err != nil {
			t.Error(err)
			return
		}
		change(other, 3, false)
		<-again
	})
}

func TestWatchSignalsThatNotificationsWereLost(t *testing.T) {
	netnstest.Do(t, func() {
		s, events := open(t), open(t, unix.RTNLGRP_IPV4_IFADDR)
		if s == nil || events == nil {
			return
		}
		if err := unix.SetsockoptInt(events.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1); err != nil {
			t.Error(err)
		}
		var b Batch
		for n := range 100 {
			address(&b, n, false)
		}
		if err := s.Apply(&b); err != nil {
			t.Error(err)
		}
		signals, err := events.Watch(t.Context(), false, func(Message) bool { return false })
		if err != nil {
			t.Error(err)
			return
		}
		<-signals
	})
}
