package lab

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"slices"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// sizes of a request and its answer: a small HTTP exchange's.
var sizes = load.Sizes{Request: 100, Response: 1000}

// operations of the closed loop, by measure.
var operations = []struct {
	measure string
	op      load.Op
}{{"connect", load.Connect}, {"crr", load.CRR}, {"rr", load.RR}}

// aim gives a pair what its client connects to: the server's own addresses, or Services.
func (p *pair) aim() {
	if p.services == 0 {
		for i := range endpoints {
			p.targets = append(p.targets, netip.AddrPortFrom(serverAddr(i), serverPort))
		}
		return
	}
	for _, i := range targets(p.services) {
		p.targets = append(p.targets, entry(i))
	}
}

// kept is as many targets as connections are kept in every arm: sockets must be equally many, so that they are equally
// warm.
func (p *pair) kept() []netip.AddrPort {
	var l []netip.AddrPort
	for i := range endpoints {
		l = append(l, p.targets[i*len(p.targets)/endpoints])
	}
	return l
}

// round has every arm do every operation for a block, the baseline first and last.
func (r *run) round(ctx context.Context, n int) error {
	for _, i := range r.rand.Perm(len(operations)) {
		o := operations[i]
		order := slices.Clone(r.pairs[1:])
		r.rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		order = append(append([]*pair{r.pairs[0]}, order...), r.pairs[0])
		runtime.GC() // so that none falls into a block
		for _, p := range order {
			if err := r.block(ctx, n, p, o.measure, o.op); err != nil {
				return fmt.Errorf("round %d of %s: %w", n+1, p.node.Name, err)
			}
		}
	}
	return nil
}

// block has one arm do one operation for a while.
func (r *run) block(ctx context.Context, round int, p *pair, measure string, op load.Op) error {
	c := load.Client{
		Place: load.Place{Enter: p.node.Do, CPUs: r.cpus.load}, Targets: p.targets, Seed: r.rand.Uint64(),
		Sizes: sizes, Close: load.Reset, Warm: r.Profile.Warm, Servers: []*load.Server{p.server},
	}
	if op == load.RR {
		c.Targets = p.kept()
	}
	s, err := c.Run(ctx, op, r.Profile.Block)
	if err != nil {
		return err
	}
	b, err := result.Block{Measure: measure, Arm: p.arm, Round: round, Params: params(p.services)}.Timed(s)
	if err != nil {
		return err
	}
	n, err := p.tracked()
	if err != nil {
		return err
	}
	if r.tracked = max(r.tracked, n); n > 0 && p.services == 0 {
		return fmt.Errorf("%d connections are tracked where there should be no conntrack: something else writes rules into this namespace", n)
	}
	return r.out.Add(b)
}
