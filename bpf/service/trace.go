package service

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Outcome is the outcome of a socket's lookup.
type Outcome uint8

// The outcomes.
const (
	Translated = Outcome(serviceOutcomeTRANSLATED)
	Refused    = Outcome(serviceOutcomeREFUSED)
	Left       = Outcome(serviceOutcomeFALLBACK) // left to programs at devices or another plane
	Silent     = Outcome(serviceOutcomeDROPPED)  // no backend, and no reply
)

// String returns what people read.
func (o Outcome) String() string {
	if o > Silent {
		return fmt.Sprintf("outcome %d", uint8(o))
	}
	return [...]string{"translated", "no endpoint, refused", "left to packets", "no endpoint, silent"}[o]
}

// Event is one lookup of a socket: a connect(), or a datagram that began a flow.
type Event struct {
	Time      time.Duration // as Now
	Namespace uint64        // cookie of the socket's network namespace
	Pool      uint64
	Entry     netip.AddrPort
	Backend   netip.AddrPort // of Translated
	Protocol  uint8
	Outcome   Outcome
	Process   uint32
	Command   string
}

// At returns the event's calendar time.
func (e Event) At() time.Time { return time.Now().Add(e.Time - bpf.Now()) }

// Filter selects events.
type Filter struct {
	Namespace uint64   // the cookie of the sockets' network namespace; 0: any
	Pools     []uint64 // of which one serves them; none: any
}

// matches reports whether an event is wanted. The programs leave out most of the others, not all.
func (f Filter) matches(e Event) bool {
	return (f.Namespace == 0 || f.Namespace == e.Namespace) && (len(f.Pools) == 0 || slices.Contains(f.Pools, e.Pool))
}

// Trace has the programs report what they decide, and calls yield with each event until ctx ends. It returns how many
// were lost because yield was too slow. One process may trace a node at a time.
func (m *Maps) Trace(ctx context.Context, f Filter, yield func(Event)) (lost uint64, err error) {
	lock, err := m.lock()
	if err != nil {
		return 0, err
	}
	defer lock.Close()
	r, err := ringbuf.NewReader(m.named[serviceMapFlEvents])
	if err != nil {
		return 0, fmt.Errorf("bpf: read events: %w", err)
	}
	defer r.Close()
	begin, before := bpf.Now(), atomic.LoadUint64(&m.traced.Lost)
	m.traced.Namespace, m.traced.Pool = f.Namespace, [len(m.traced.Pool)]uint64{}
	if len(f.Pools) <= len(m.traced.Pool) {
		copy(m.traced.Pool[:], f.Pools)
	}
	ctx, stop := context.WithCancel(ctx)
	var ended sync.WaitGroup
	ended.Go(func() { m.listen(ctx); r.Flush() })
	defer ended.Wait()
	defer stop()
	for {
		record, err := r.Read()
		if errors.Is(err, ringbuf.ErrFlushed) {
			return atomic.LoadUint64(&m.traced.Lost) - before, nil
		}
		if err != nil {
			return 0, fmt.Errorf("bpf: read events: %w", err)
		}
		if e, ok := event(record.RawSample); ok && e.Time >= begin && f.matches(e) {
			yield(e)
		}
	}
}

// lock locks the folder of the maps' pins, which root alone may open, for as long as the file is open.
func (m *Maps) lock() (*os.File, error) {
	f, err := os.Open(m.folder)
	if err != nil {
		return nil, fmt.Errorf("bpf: lock the events: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("bpf: events go to one listener at a time, and another process traces this node: "+
			"end it first (%w)", err)
	}
	return f, nil
}

// CountSockets has the programs count the sockets of pools that are scheduled by that.
func (m *Maps) CountSockets() { atomic.StoreUint64(&m.traced.Counting, 1) }

// attention is how long the programs report without being asked again: the reader may have been killed.
const attention = 10 * time.Second

// listen has the programs report until ctx ends.
func (m *Maps) listen(ctx context.Context) {
	again := time.NewTicker(attention / 4)
	defer again.Stop()
	for {
		atomic.StoreUint64(&m.traced.Until, uint64(bpf.Now()+attention))
		select {
		case <-ctx.Done():
			atomic.StoreUint64(&m.traced.Until, 0)
			return
		case <-again.C:
		}
	}
}

// event reads a struct event.
func event(b []byte) (e Event, ok bool) {
	var raw serviceEvent
	if len(b) < int(unsafe.Sizeof(raw)) || binary.Read(bytes.NewReader(b), binary.NativeEndian, &raw) != nil {
		return e, false
	}
	command := make([]byte, 0, len(raw.Command))
	for _, c := range raw.Command {
		if c == 0 {
			break
		}
		command = append(command, byte(c))
	}
	e = Event{
		Time: time.Duration(raw.Time), Namespace: raw.Namespace, Pool: raw.Pool,
		Entry:   netip.AddrPortFrom(bpf.Addr(raw.Entry.Address.Word), bpf.Port(raw.Entry.Port)),
		Process: raw.Process, Protocol: raw.Protocol, Outcome: Outcome(raw.Outcome), Command: string(command),
	}
	if e.Outcome == Translated {
		e.Backend = netip.AddrPortFrom(bpf.Addr(raw.Backend.Address.Word), bpf.Port(raw.Backend.Port))
	}
	return e, true
}
