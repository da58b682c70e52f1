package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// What goes on while losses are counted.
const (
	whileNothing = "nothing changes"
	whileOthers  = "other Services change"
	whileOwn     = "its own endpoints change"
	whileKilled  = "the agent is killed"
)

// pace is the time between two files saved while losses are counted: 200 a second.
const pace = 5 * time.Millisecond

// loss opens connections at a steady rate to one Service of the greatest number while something goes on, and counts
// those that fail.
func (r *services) loss(ctx context.Context, round int, while string, something func(context.Context, *node) error) error {
	n := r.nodes[len(r.nodes)-1]
	before, err := n.loop()
	if err != nil {
		return err
	}
	loading, enough := context.WithCancel(ctx)
	defer enough()
	ended := make(chan error, 1)
	go func() {
		err := rest(ctx, 200*time.Millisecond) // of connections that are under way when it begins
		if err == nil {
			err = something(ctx, n)
		}
		if err == nil {
			err = rest(ctx, 200*time.Millisecond)
		}
		enough()
		ended <- err
	}()
	p := n.pair
	s, t, err := load.Open{
		Place: r.place(p), Targets: []netip.AddrPort{entry(0)}, Seed: 1,
		Sizes: sizes, Close: load.Fin, Rate: r.Profile.Rate, Timeout: 2 * time.Second, Workers: p.workers(),
	}.Run(loading, time.Hour)
	enough()
	if err := errors.Join(err, <-ended, ctx.Err()); err != nil {
		return fmt.Errorf("count losses while %s: %w", while, err)
	}
	t.Cut = false // it was to end when something did
	b, err := result.Block{Measure: "loss", Arm: armNFT, Round: round, Params: with(p.services, also("while", while))}.Timed(s)
	if err != nil {
		return err
	}
	b.Trace, r.late = &t, max(r.late, time.Duration(t.Late))
	if while == whileOthers || while == whileOwn {
		after, err := n.loop()
		if err != nil {
			return err
		}
		r.out.Remark(fmt.Sprintf("While %s, %d connections were made, and the agent wrote %d facts in %d transactions.",
			while, s.Ops, after.Puts-before.Puts, after.Writes-before.Writes))
	}
	return r.out.Add(b)
}

// calm lets nothing go on.
func (r *services) calm(ctx context.Context, _ *node) error { return rest(ctx, r.Profile.Calm) }

// replaceOthers replaces endpoints of other Services.
func (r *services) replaceOthers(ctx context.Context, n *node) error {
	return r.replace(ctx, r.Profile.Others, func(i int) (func() error, error) {
		s, k := 1+r.rand.IntN(n.services-1), r.rand.IntN(endpoints)
		return n.prepare(s, n.with(s, k, spare(s, k)))
	})
}

// replaceOwn replaces endpoints of the Service that is connected to, one after the other, by others that answer as well:
// nine of ten stay each time.
func (r *services) replaceOwn(ctx context.Context, n *node) error {
	s := n.slice(0).DeepCopy()
	return r.replace(ctx, r.Profile.Own, func(i int) (func() error, error) {
		k := i % endpoints
		s.Endpoints[k].Addresses = []string{serverAddr((i + endpoints) % servers).String()}
		return n.prepare(0, s)
	})
}

// replace saves so many files at a steady pace.
func (r *services) replace(ctx context.Context, times int, next func(i int) (func() error, error)) error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for i := range times {
		save, err := next(i)
		if err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := save(); err != nil {
			return err
		}
	}
	return nil
}

// killAgent kills the agent and starts it again, with everything in the kernel, and with a change to find that was made
// while it was away.
func (r *services) killAgent(ctx context.Context, n *node, round int) error {
	n.kill()
	if n.services > 1 {
		s := 1 + r.rand.IntN(n.services-1)
		save, err := n.prepare(s, n.with(s, 0, spare(s, 1)))
		if err == nil {
			err = save()
		}
		if err != nil {
			return err
		}
	}
	if err := r.hire(n); err != nil {
		return err
	}
	return r.ready(ctx, n, round, "full")
}
