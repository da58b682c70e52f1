package lab

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// sizes of a request and its answer: a small HTTP exchange's.
var sizes = load.Sizes{Request: 100, Response: 1000}

// operation is what every arm that takes part does for a block in each round.
type operation struct {
	measure string
	targets func(*pair) []netip.AddrPort // whom an arm's client connects to; none: the arm takes no part
	load    loader
	takes   time.Duration // a block, as planned
	tried   bool          // each round begins with a block of the baseline that doesn't count: the first differs from others
	bytes   int           // carried by each operation, where that is measured
}

// loader has the client of an arm load targets for a while.
type loader func(ctx context.Context, p *pair, to []netip.AddrPort) (load.Sample, *load.Trace, error)

// closed is a closed loop for a time.
func (r *run) closed(op load.Op, warm, block time.Duration) loader {
	return func(ctx context.Context, p *pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		s, err := r.client(p, to, warm).Run(ctx, op, block)
		return s, nil, err
	}
}

// client is a closed loop's that ends connections with a reset.
func (r *run) client(p *pair, to []netip.AddrPort, warm time.Duration) load.Client {
	return load.Client{Place: r.place(p), Targets: to, Seed: r.rand.Uint64(), Sizes: sizes, Words: p.words, Close: load.Reset, Warm: warm, Workers: p.workers()}
}

// place is where a pair's client runs: on the processor set apart, uninterrupted if that may be, where the node's own
// processes are.
func (r *run) place(p *pair) load.Place {
	return load.Place{Enter: p.enter, CPUs: r.cpus.load, Realtime: r.realtime}
}

// far is where a server runs: on the same processor.
func (r *run) far(ns *netns.Namespace) load.Place {
	return load.Place{Enter: ns.Do, CPUs: r.cpus.load, Realtime: r.realtime}
}

// round has every arm do every operation for a block, in an order drawn for each, the baseline first and last.
func (r *run) round(ctx context.Context, n int, operations []operation) error {
	for _, i := range r.rand.Perm(len(operations)) {
		o := operations[i]
		runtime.GC() // so that none falls into a block
		if base := r.pairs[0]; o.tried {
			if _, _, err := o.load(ctx, base, o.targets(base)); err != nil {
				return fmt.Errorf("round %d, %s of %s: %w", n+1, o.measure, base.node.Name, err)
			}
		}
		for _, p := range r.order(o) {
			if err := r.block(ctx, n, p, o); err != nil {
				return fmt.Errorf("round %d, %s of %s: %w", n+1, o.measure, p.node.Name, err)
			}
		}
	}
	return nil
}

// order draws one of the arms that take part: the baseline, which is the first pair, at both ends.
func (r *run) order(o operation) []*pair {
	base, l := r.pairs[0], []*pair{}
	for _, p := range r.pairs[1:] {
		if len(o.targets(p)) > 0 {
			l = append(l, p)
		}
	}
	r.rand.Shuffle(len(l), func(i, j int) { l[i], l[j] = l[j], l[i] })
	return append(append([]*pair{base}, l...), base)
}

// block has one arm do one operation for a while.
func (r *run) block(ctx context.Context, round int, p *pair, o operation) error {
	s, t, err := o.load(ctx, p, o.targets(p))
	if err == nil && p.agent != nil {
		err = p.agent.ended()
	}
	if err != nil {
		return err
	}
	b, err := result.Block{Measure: o.measure, Arm: p.arm, Round: round, Params: params(p.services)}.Timed(s)
	if err != nil {
		return err
	}
	if t != nil {
		t.Slowest = nil
		b.Trace, r.late = t, max(r.late, time.Duration(t.Late))
	}
	if o.bytes > 0 {
		b.Counters["bytes"] = float64(o.bytes) * float64(s.Ops)
	}
	if err := r.out.Samples(b, s.Times); err != nil {
		return err
	}
	n, err := p.tracked()
	if err != nil {
		return err
	}
	if r.tracked = max(r.tracked, n); n > 0 && (p.arm == armDirect || p.arm == armAgain) {
		return fmt.Errorf("%d connections are tracked where there should be no conntrack: something else writes rules into this namespace", n)
	}
	return r.out.Add(b)
}
