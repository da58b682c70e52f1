package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// What goes on while losses are counted.
const (
	whileNothing = "nothing changes"
	whileOthers  = "other Services change"
	whileOwn     = "its endpoints are replaced"
	whileKilled  = "the agent is killed"
)

// pace is the time between two files saved while losses are counted: 200 a second.
const pace = 5 * time.Millisecond

// loss opens connections at a steady rate to one Service of the greatest number while something goes on, and counts
// those that fail.
func (r *run) loss(ctx context.Context, round int, while string, something func(context.Context, *watched) error) error {
	w := r.watched[len(r.watched)-1]
	before, err := w.loop()
	if err != nil {
		return err
	}
	loading, enough := context.WithCancel(ctx)
	defer enough()
	ended := make(chan error, 1)
	go func() {
		err := rest(ctx, 200*time.Millisecond) // of connections that are under way when it begins
		if err == nil {
			err = something(ctx, w)
		}
		if err == nil {
			err = rest(ctx, 200*time.Millisecond)
		}
		enough()
		ended <- err
	}()
	p := w.pair
	s, t, err := load.Open{
		Place: load.Place{Enter: p.node.Do, CPUs: r.cpus.load}, Targets: []netip.AddrPort{entry(0)}, Seed: 1,
		Sizes: sizes, Close: load.Fin, Rate: r.Profile.Rate, Timeout: 2 * time.Second, Servers: []*load.Server{p.server},
	}.Run(loading, time.Hour)
	enough()
	if err := errors.Join(err, <-ended, ctx.Err()); err != nil {
		return fmt.Errorf("count losses while %s: %w", while, err)
	}
	t.Cut = false // it was to end when something did
	b, err := result.Block{Measure: "loss", Arm: armNFT, Round: round, Params: with(p.services, "while", while)}.Timed(s)
	if err != nil {
		return err
	}
	b.Trace = &t
	after, err := w.loop()
	if err != nil {
		return err
	}
	if while != whileKilled { // a new agent counts from 0
		maps.Copy(b.Counters, written2(before, after))
	}
	return r.out.Add(b)
}

// calm lets nothing go on.
func (r *run) calm(ctx context.Context, _ *watched) error { return rest(ctx, r.Profile.Calm) }

// replaceOthers replaces endpoints of other Services.
func (r *run) replaceOthers(ctx context.Context, w *watched) error {
	return r.replace(ctx, r.Profile.Others, func(i int) (func() error, error) {
		s, k := 1+r.rand.IntN(w.services-1), r.rand.IntN(endpoints)
		return w.prepare(s, w.with(s, k, spare(s, k)))
	})
}

// replaceOwn replaces endpoints of the Service that is connected to, one after the other, by others that answer as well:
// nine of ten stay each time.
func (r *run) replaceOwn(ctx context.Context, w *watched) error {
	s := w.slice(0).DeepCopy()
	return r.replace(ctx, r.Profile.Own, func(i int) (func() error, error) {
		k := i % endpoints
		s.Endpoints[k].Addresses = []string{serverAddr(i % servers).String()}
		return w.prepare(0, s)
	})
}

// replace saves so many files at a steady pace.
func (r *run) replace(ctx context.Context, n int, next func(i int) (func() error, error)) error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for i := range n {
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

// killAgent kills the agent and starts it again, with everything in the kernel, and with a change to find that came
// while it was away.
func (r *run) killAgent(ctx context.Context, w *watched, round int) error {
	w.kill()
	save, err := w.next(r)
	if err == nil {
		err = save()
	}
	if err != nil {
		return err
	}
	a, err := r.hire(w.pair, w.dir)
	if err != nil {
		return err
	}
	*w.process = *a
	took, err := w.ready(ctx)
	if err != nil {
		return err
	}
	b := result.Block{Arm: armNFT, Round: round, Params: with(w.services, "kernel", "full"), Wall: took}
	return r.add(b, "ready", float64(took))
}
