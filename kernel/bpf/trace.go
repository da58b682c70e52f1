package bpf

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
)

// Outcome is what became of a socket's question.
type Outcome uint8

// The outcomes.
const (
	Translated = Outcome(serviceOutcomeTRANSLATED)
	Refused    = Outcome(serviceOutcomeREFUSED)
	Left       = Outcome(serviceOutcomeLEFT) // to whoever serves packets
)

// String gives "translated", "refused" or "left".
func (o Outcome) String() string {
	if o > Left {
		return fmt.Sprintf("outcome %d", uint8(o))
	}
	return [...]string{"translated", "refused", "left"}[o]
}

// Event is one question of a socket: a connect(), or a datagram that began a flow.
type Event struct {
	Time      time.Duration // since boot
	Namespace uint64        // cookie of the socket's network namespace
	Pool      uint64
	Entry     netip.AddrPort
	Backend   netip.AddrPort // of Translated
	Protocol  uint8
	Outcome   Outcome
	Process   uint32
	Command   string
}

// Trace has the programs report what they decide, and calls take with each event until ctx ends: only of one pool or one
// network namespace, where these are not 0. One may trace at a time: two share the events.
func (m *Maps) Trace(ctx context.Context, pool, namespace uint64, take func(Event)) error {
	r, err := ringbuf.NewReader(m.named[serviceMapEvents])
	if err != nil {
		return fmt.Errorf("bpf: read events: %w", err)
	}
	defer r.Close()
	stop := context.AfterFunc(ctx, func() { r.Close() })
	defer stop()
	if err := m.trace(serviceTrace{On: 1, Pool: pool, Namespace: namespace}); err != nil {
		return err
	}
	defer m.trace(serviceTrace{})
	for {
		record, err := r.Read()
		if errors.Is(err, ringbuf.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("bpf: read events: %w", err)
		}
		if e, ok := event(record.RawSample); ok {
			take(e)
		}
	}
}

func (m *Maps) trace(t serviceTrace) error {
	if err := m.named[serviceMapTraced].Put(uint32(0), t); err != nil {
		return fmt.Errorf("bpf: turn tracing on or off: %w", err)
	}
	return nil
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
		Entry:   netip.AddrPortFrom(Addr(raw.Entry.Address.Word), Port(raw.Entry.Port)),
		Process: raw.Process, Protocol: raw.Protocol, Outcome: Outcome(raw.Outcome), Command: string(command),
	}
	if e.Outcome == Translated {
		e.Backend = netip.AddrPortFrom(Addr(raw.Backend.Address.Word), Port(raw.Backend.Port))
	}
	return e, true
}
