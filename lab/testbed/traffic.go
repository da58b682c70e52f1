package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// Sizes are those of a request and its answer: a small HTTP exchange's.
var Sizes = load.Sizes{Request: 100, Response: 1000}

// The arms without any Service and without conntrack: the baseline, and the baseline again.
const (
	ArmDirect = "direct"
	ArmAgain  = "again"
)

// OneByte is the size of netperf's requests and answers.
var OneByte = load.Sizes{Request: 1, Response: 1}

// Operation is what every arm with targets does for one block in each round.
type Operation struct {
	Measure string
	Targets func(*Pair) []netip.AddrPort // that an arm's client connects to; none: the arm is left out
	Load    Loader
	Planned time.Duration // of a block
	// each round begins with a block of the baseline that doesn't count: the first differs from others; so does each of an
	// exact run
	Warmup bool
	Bytes  int // carried by each operation, where that is measured
}

// Loader loads targets for one block, by the client of an arm.
type Loader func(ctx context.Context, p *Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error)

// ClosedLoop returns a loader that does an operation over and over for a block's time, after a warm-up that isn't
// measured.
func (b *Testbed) ClosedLoop(op load.Op, warm, block time.Duration) Loader {
	return func(ctx context.Context, p *Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		s, err := b.Client(p, to, warm).Run(ctx, op, block)
		return s, nil, err
	}
}

// Client returns a closed loop's client, which ends connections with a reset.
func (b *Testbed) Client(p *Pair, to []netip.AddrPort, warm time.Duration) load.Client {
	return load.Client{Thread: b.ClientThread(p), Targets: to, Seed: b.Rand.Uint64(), Sizes: Sizes, Words: p.Words,
		Close: load.Reset, Warm: warm, Exact: b.exact(p, to), Workers: p.Workers()}
}

// ClientThread returns where a pair's client runs: on the reserved processor, with real-time priority if permitted,
// where the node's own processes are.
func (b *Testbed) ClientThread(p *Pair) load.Thread {
	return load.Thread{Enter: p.Enter, CPUs: b.CPUs.Load, Realtime: b.realtime}
}

// ServerThread returns where a server runs: on the same processor, in ns.
func (b *Testbed) ServerThread(ns *netns.Namespace) load.Thread {
	return load.Thread{Enter: ns.Do, CPUs: b.CPUs.Load, Realtime: b.realtime}
}

// Traffic runs operations in all arms of a testbed, round by round, and records their blocks.
type Traffic struct {
	bed     *Testbed
	out     *result.Writer
	Tracked int           // the most connections that conntrack knew of in one namespace
	Late    time.Duration // the most that an open loop began an operation late by its own fault
}

// NewTraffic returns the traffic of a testbed, of which the blocks go to out.
func NewTraffic(b *Testbed, out *result.Writer) *Traffic { return &Traffic{bed: b, out: out} }

// Round runs every operation for one block in every arm, in an order drawn for each, the baseline first and last.
func (t *Traffic) Round(ctx context.Context, n int, operations []Operation) error {
	for _, i := range t.bed.Rand.Perm(len(operations)) {
		o := operations[i]
		runtime.GC() // so that none falls into a block
		if base := t.bed.Pairs[0]; o.Warmup || t.bed.Config.Exact {
			if _, _, err := o.Load(ctx, base, o.Targets(base)); err != nil {
				return fmt.Errorf("round %d, %s of %s: %w", n+1, o.Measure, base.Near.Name, err)
			}
		}
		for _, p := range t.order(o) {
			if err := t.block(ctx, n, p, o); err != nil {
				return fmt.Errorf("round %d, %s of %s: %w", n+1, o.Measure, p.Near.Name, err)
			}
		}
	}
	return nil
}

// order returns the arms that have targets in a random order, the baseline, which is the first pair, at both ends.
func (t *Traffic) order(o Operation) []*Pair {
	base, l := t.bed.Pairs[0], []*Pair{}
	for _, p := range t.bed.Pairs[1:] {
		if len(o.Targets(p)) > 0 {
			l = append(l, p)
		}
	}
	t.bed.Rand.Shuffle(len(l), func(i, j int) { l[i], l[j] = l[j], l[i] })
	return append(append([]*Pair{base}, l...), base)
}

// block runs one operation in one arm and records the block.
func (t *Traffic) block(ctx context.Context, round int, p *Pair, o Operation) error {
	path, err := t.traceFile(round, p, o)
	if err != nil {
		return err
	}
	t.bed.trace = path
	s, trace, err := o.Load(ctx, p, o.Targets(p))
	t.bed.trace = ""
	for _, a := range p.agents() {
		err = errors.Join(err, a.Err())
	}
	if err == nil && p.exact && s.Failed() > 0 {
		err = fmt.Errorf("operations failed, of which the others' counts may have a part: %v", s.Errors)
	}
	if err != nil {
		return err
	}
	b, err := result.Block{Measure: o.Measure, Arm: p.Arm, Round: round, Params: p.Params}.Timed(s)
	if err != nil {
		return err
	}
	if trace != nil {
		trace.Slowest = nil
		b.Trace, t.Late = trace, max(t.Late, time.Duration(trace.Late))
	}
	if o.Bytes > 0 {
		b.Counters["bytes"] = float64(o.Bytes) * float64(s.Ops)
	}
	if err := t.out.Samples(b, s.Times); err != nil {
		return err
	}
	n, err := p.Tracked()
	if err != nil {
		return err
	}
	if t.Tracked = max(t.Tracked, n); n > 0 && (p.Arm == ArmDirect || p.Arm == ArmAgain) {
		return fmt.Errorf("%d connections are tracked where there should be no conntrack: something else writes rules into "+
			"this namespace", n)
	}
	return t.out.Add(b)
}

// ServiceParams returns the parameters of a block beside so many Services, nil for none.
func ServiceParams(services int) result.Params {
	if services == 0 {
		return nil
	}
	return result.Params{"services": fmt.Sprint(services)}
}
