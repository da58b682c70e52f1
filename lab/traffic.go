package lab

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// sizes of a request and its answer: a small HTTP exchange's.
var sizes = load.Sizes{Request: 100, Response: 1000}

// operations of the closed loop, by measure.
var operations = []operation{
	{"connect", load.Connect, false}, {"crr", load.CRR, false}, {"rr", load.RR, false}, {"connect-many", load.Connect, true},
}

// operation is what a client does in a block.
type operation struct {
	measure string
	op      load.Op
	many    bool // to all targets, which only arms of more Services than endpoints have
}

// aim gives a pair what its client may connect to: the server's own addresses, or Services.
func (p *pair) aim() {
	switch {
	case p.arm == armRule:
		p.targets = []netip.AddrPort{entry(0)}
		return
	case p.services == 0:
		for i := range fewTargets {
			p.targets = append(p.targets, netip.AddrPortFrom(serverAddr(i), serverPort))
		}
		return
	}
	for _, i := range targets(p.services) {
		p.targets = append(p.targets, entry(i))
	}
}

// has says whether an arm takes part in an operation.
func (o operation) has(p *pair) bool {
	return !o.many || p.arm == armDirect || p.arm == armAgain || p.services > fewTargets
}

// targets of an operation. A kept connection is kept for each: in every arm as many, so that sockets are equally warm.
func (o operation) targets(p *pair) (l []netip.AddrPort) {
	if o.many {
		return p.targets
	}
	for i := range fewTargets {
		l = append(l, p.targets[i*len(p.targets)/fewTargets])
	}
	return l
}

// place is where client and server run: on the processor set apart, and uninterrupted if that may be.
func (r *run) place(ns *netns.Namespace) load.Place {
	return load.Place{Enter: ns.Do, CPUs: r.cpus.load, Realtime: r.realtime}
}

// traffic is a round, in which the agents have nothing to do.
func (r *run) traffic(ctx context.Context, n int) error {
	return r.unchanged(n, duringTraffic, func() error { return r.round(ctx, n) })
}

// round has every arm do every operation for a block, the baseline first and last.
func (r *run) round(ctx context.Context, n int) error {
	for _, i := range r.rand.Perm(len(operations)) {
		o := operations[i]
		if o.many && r.Profile.most() <= fewTargets {
			continue
		}
		runtime.GC() // so that none falls into a block
		for _, p := range r.order(o) {
			if err := r.block(ctx, n, p, o); err != nil {
				return fmt.Errorf("round %d of %s: %w", n+1, p.node.Name, err)
			}
		}
	}
	return nil
}

// order draws one of the arms: the baseline, which is the first pair, at both ends.
func (r *run) order(o operation) []*pair {
	base, l := r.pairs[0], []*pair{}
	for _, p := range r.pairs[1:] {
		if o.has(p) {
			l = append(l, p)
		}
	}
	r.rand.Shuffle(len(l), func(i, j int) { l[i], l[j] = l[j], l[i] })
	return append(append([]*pair{base}, l...), base)
}

// block has one arm do one operation for a while.
func (r *run) block(ctx context.Context, round int, p *pair, o operation) error {
	s, err := load.Client{
		Place: r.place(p.node), Targets: o.targets(p), Seed: r.rand.Uint64(), Sizes: sizes, Close: load.Reset,
		Warm: r.Profile.Warm, Servers: []*load.Server{p.server},
	}.Run(ctx, o.op, r.Profile.Block)
	if err != nil {
		return err
	}
	b, err := result.Block{Measure: o.measure, Arm: p.arm, Round: round, Params: params(p.services)}.Timed(s)
	if err != nil {
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
