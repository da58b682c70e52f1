package nftables

import (
	"errors"
	"fmt"

	"fairlead.dev/fairlead/kernel/nlattr"
	"golang.org/x/sys/unix"
)

// TraceKind is what a trace event says about its chain.
type TraceKind uint32

// The kinds (enum nft_trace_types).
const (
	TracePolicy TraceKind = 1 // a chain with a hook has ended without a verdict
	TraceReturn TraceKind = 2 // a chain was left, by a rule or at its end
	TraceRule   TraceKind = 3 // a rule was done in full; Linux 6.18 tells so of what leaves chains too, at the end with Handle 0
)

// TraceEvent is one step of a traced packet.
type TraceEvent struct {
	Packet       uint32 // tells packets apart
	Kind         TraceKind
	Family       uint8 // NFPROTO_* of the table
	Table, Chain string
	Handle       uint64 // of the rule
	Verdict      Verdict
}

// SetTrace has the kernel tell of every rule that the packet meets from here on.
func SetTrace() []Expr {
	const nftrace = 12
	set := expr("meta", func(b *buffer) { b.u32(3, uint32(R(0))); b.u32(2, nftrace) })
	return []Expr{Load(R(0), []byte{1}), set}
}

// Tracer hears of traced packets in one network namespace.
type Tracer struct{ fd int }

// OpenTracer begins to listen in the calling thread's network namespace.
func OpenTracer() (*Tracer, error) {
	fd, _, err := socket()
	if err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTRACE); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("nftables: listen for traces: %w", err)
	}
	return &Tracer{fd}, nil
}

// Close ends listening.
func (t *Tracer) Close() error { return unix.Close(t.fd) }

// Heard gives the events that have come by now. It doesn't wait: the kernel tells of a rule when it meets it.
func (t *Tracer) Heard() (events []TraceEvent, err error) {
	b := make([]byte, 256<<10)
	for {
		n, _, err := unix.Recvfrom(t.fd, b, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return events, nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return events, fmt.Errorf("nftables: receive traces: %w", err)
		}
		eachMessage(b[:n], func(kind, _ uint16, _ uint32, body []byte) {
			const trace = unix.NFNL_SUBSYS_NFTABLES<<8 | 17
			if kind == trace && len(body) > 4 {
				events = append(events, traceEvent(body[0], body[4:]))
			}
		})
	}
}

func traceEvent(family uint8, b []byte) TraceEvent {
	e := TraceEvent{Packet: number(nlattr.Find(b, 6)), Kind: TraceKind(number(nlattr.Find(b, 4))), Family: family, Table: nlattr.Text(nlattr.Find(b, 1)), Chain: nlattr.Text(nlattr.Find(b, 2)), Handle: long(nlattr.Find(b, 3))}
	if v := nlattr.Find(b, 5); v != nil {
		e.Verdict = Verdict{int32(number(nlattr.Find(v, nftaVerdictCode))), nlattr.Text(nlattr.Find(v, nftaVerdictChain))}
	}
	return e
}
