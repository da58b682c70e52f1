package nftables

import (
	"fmt"

	"fairlead.dev/fairlead/kernel/netlink"
	"golang.org/x/sys/unix"
)

// TraceKind is what a trace event says about its chain.
type TraceKind uint32

// The kinds (enum nft_trace_types).
const (
	TracePolicy TraceKind = 1 // a chain with a hook has ended without a verdict
	TraceReturn TraceKind = 2 // a chain was left, by a rule or at its end
	// a rule was done in full; Linux 6.18 tells so of what leaves chains too, at the end with Handle 0
	TraceRule TraceKind = 3
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
	set := expr("meta", func(b *netlink.Buffer) { b.BE32(3, uint32(R(0))); b.BE32(2, nftrace) })
	return []Expr{Load(R(0), []byte{1}), set}
}

// Tracer hears of traced packets in one network namespace.
type Tracer struct{ s *netlink.Socket }

// OpenTracer begins to listen in the calling thread's network namespace.
func OpenTracer() (*Tracer, error) {
	s, err := netlink.Listen(unix.NETLINK_NETFILTER, bufferSize, unix.NFNLGRP_NFTRACE)
	if err != nil {
		return nil, fmt.Errorf("nftables: listen for traces: %w", err)
	}
	return &Tracer{s}, nil
}

// Close ends listening.
func (t *Tracer) Close() error { return t.s.Close() }

// Receive returns the events that have come by now. It doesn't wait: the kernel notifies of a rule when it evaluates
// it.
func (t *Tracer) Receive() (events []TraceEvent, err error) {
	err = t.s.Pending(func(m netlink.Message) {
		const trace = unix.NFNL_SUBSYS_NFTABLES<<8 | 17
		if m.Type == trace && len(m.Body) > header {
			events = append(events, traceEvent(m.Body[0], m.Body[header:]))
		}
	})
	if err != nil {
		return events, fmt.Errorf("nftables: receive traces: %w", err)
	}
	return events, nil
}

func traceEvent(family uint8, b []byte) TraceEvent {
	e := TraceEvent{
		Packet: number(netlink.Find(b, 6)), Kind: TraceKind(number(netlink.Find(b, 4))), Family: family,
		Table: netlink.Text(netlink.Find(b, 1)), Chain: netlink.Text(netlink.Find(b, 2)),
		Handle: netlink.BE(netlink.Find(b, 3)),
	}
	if v := netlink.Find(b, 5); v != nil {
		e.Verdict = Verdict{int32(number(netlink.Find(v, nftaVerdictCode))), netlink.Text(netlink.Find(v, nftaVerdictChain))}
	}
	return e
}
