package lab

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/source"
)

// entrance is a pair's node, as a probe enters it.
type entrance struct{ *pair }

// Do runs f as one of the node's processes.
func (e entrance) Do(f func() error) error { return e.enter(f) }

// cold starts the subject with nothing in the kernel.
func (l *life) cold(ctx context.Context) error {
	b, err := l.start(ctx)
	if err != nil {
		return err
	}
	return errors.Join(l.is("cold", b.wall), l.is("sync", b.sync), l.is("cold-cpu", b.cpu), l.probe.Reach(ctx))
}

// restart starts it once more, with everything in the kernel already.
func (l *life) restart(ctx context.Context) error {
	if err := l.stop(); err != nil {
		return err
	}
	b, err := l.start(ctx)
	if err != nil {
		return err
	}
	return errors.Join(l.is("restart", b.wall), l.probe.Reach(ctx))
}

// is writes a block of one number.
func (l *life) is(measure string, v time.Duration) error {
	return l.add(l.block, measure, float64(v))
}

// look reads the subject's memory once it rests.
func (l *life) look(ctx context.Context, measure string) error {
	if err := settle(ctx, l.used); err != nil {
		return err
	}
	now, most, err := l.memory()
	if err != nil {
		return err
	}
	b := l.block
	b.Counters = map[string]float64{"most": float64(most)}
	return l.add(b, measure, float64(now))
}

// afterStart is how long what a start leaves to do is let go: second looks at the kernel, garbage.
const afterStart = time.Second

// rest watches it while nothing changes.
func (l *life) rest(ctx context.Context) error {
	if err := l.look(ctx, "memory"); err != nil {
		return err
	}
	if err := rest(ctx, max(afterStart, l.Profile.Quiet/4)); err != nil {
		return err
	}
	used, wall, err := l.spent(func() error { return rest(ctx, l.Profile.Quiet) })
	if err != nil {
		return err
	}
	b := l.block
	b.Wall = wall
	return l.add(b, "idle", float64(used)/float64(wall))
}

// spent is what the subject used of processors while something went on, and how long that went on.
func (l *life) spent(something func() error) (used, wall time.Duration, err error) {
	before, err := l.used()
	if err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	if err := something(); err != nil {
		return 0, 0, err
	}
	wall = time.Since(begin)
	after, err := l.used()
	return after - before, wall, err
}

// changes moves the probe's endpoint, each time from rest.
func (l *life) changes(ctx context.Context) error {
	b := l.block
	var took []int64
	used, wall, err := l.spent(func() error {
		for range l.of.moves {
			if err := l.move(ctx, &took, l.of.pause); err != nil {
				return err
			}
		}
		return settle(ctx, l.used) // it may have something to do yet
	})
	if err != nil {
		return err
	}
	b.Wall = wall
	return errors.Join(l.is("moved-cpu", used/time.Duration(l.of.moves)), l.addTimes(b, "moved", took))
}

// move moves the probe's endpoint once, up to half as long again after a pause so as to be in step with nothing, and notes how
// long it took from the PATCH's begin to the first connection at the new place.
func (l *life) move(ctx context.Context, took *[]int64, pause time.Duration) error {
	if err := rest(ctx, pause+time.Duration(l.rand.Int64N(int64(pause/2)))); err != nil {
		return err
	}
	d, err := l.probe.Move(ctx, func(o source.Object) error { return l.cluster.tell(ctx, o) })
	*took = append(*took, int64(d))
	return err
}

// churn moves it while endpoints of other Services change, and somebody connects to a Service that doesn't.
func (l *life) churn(ctx context.Context) error {
	before, err := l.delays(ctx)
	if err != nil {
		return err
	}
	b, p := l.block, l.Profile
	var took []int64
	changes := int64(0)
	steady := l.connects(ctx)
	used, wall, err := l.spent(func() (err error) {
		stop := l.cluster.stir(ctx, p.Rate)
		for begin := time.Now(); err == nil && (len(took) < p.Least || time.Since(begin) < p.Churn); {
			err = l.move(ctx, &took, 10*time.Millisecond)
		}
		n, serr := stop()
		changes = n + int64(len(took))
		return errors.Join(err, serr)
	})
	if err := errors.Join(err, steady()); err != nil {
		return err
	}
	b.Wall = wall
	counted := b
	counted.Counters = map[string]float64{"changes": float64(changes)}
	if err := errors.Join(l.add(counted, "churn-cpu", float64(used)/float64(wall)), l.is("change-cpu", used/time.Duration(changes)), l.addTimes(b, "moved-churn", took)); err != nil {
		return err
	}
	if before != nil {
		if err := l.arrivals(ctx, b, before); err != nil {
			return err
		}
	}
	return l.look(ctx, "memory-churn")
}

// arrivals notes the times from a change's arrival to the kernel since an earlier look.
func (l *life) arrivals(ctx context.Context, b result.Block, before delays) error {
	now, err := l.delays(ctx)
	if err != nil {
		return err
	}
	return l.addTimes(b, "event", now.since(before))
}

// connects opens connections at a steady rate to a Service that does not change, until it is stopped.
func (l *life) connects(ctx context.Context) (stop func() error) {
	ctx, enough := context.WithCancel(ctx)
	done := make(chan error, 1)
	seed := l.rand.Uint64()
	go func() {
		s, t, err := load.Open{Place: load.Place{Enter: l.pair.enter}, Targets: []netip.AddrPort{entry(steadyService)}, Seed: seed,
			Sizes: sizes, Close: load.Fin, Rate: steadyRate, Timeout: 2 * time.Second}.Run(ctx, time.Hour)
		if err == nil {
			t.Cut = false // it was to end
			b := l.block
			b.Measure = "steady"
			if b, err = b.Timed(s); err == nil {
				b.Trace = &t
				err = l.out.Add(b)
			}
		}
		done <- err
	}()
	return func() error {
		enough()
		return <-done
	}
}

// steadyRate is how many connections a second are made to a Service that does not change.
const steadyRate = 100
