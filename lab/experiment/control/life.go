package control

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/source"
)

// entrance is where a probe's client runs: among the node's processes.
type entrance struct{ pair *testbed.Pair }

// Do runs f as one of the node's processes.
func (e entrance) Do(f func() error) error { return e.pair.Enter(f) }

// cold starts the implementation with nothing in the kernel.
func (l *life) cold(ctx context.Context) error {
	b, err := l.instance.start(ctx)
	if err != nil {
		return err
	}
	return errors.Join(l.is("cold", b.wall), l.is("sync", b.sync), l.is("cold-cpu", b.cpu), l.probe.Reach(ctx))
}

// restart starts it once more, with everything in the kernel already.
func (l *life) restart(ctx context.Context) error {
	if err := l.instance.stop(); err != nil {
		return err
	}
	b, err := l.instance.start(ctx)
	if err != nil {
		return err
	}
	return errors.Join(l.is("restart", b.wall), l.probe.Reach(ctx))
}

// is writes a block of one number.
func (l *life) is(measure string, v time.Duration) error {
	return l.trial.out.AddValue(l.block, measure, float64(v))
}

// recordMemory records the implementation's memory once it rests.
func (l *life) recordMemory(ctx context.Context, measure string) error {
	if err := testbed.Settle(ctx, l.instance.used); err != nil {
		return err
	}
	now, most, err := l.instance.memory()
	if err != nil {
		return err
	}
	b := l.block
	b.Counters = map[string]float64{"most": float64(most)}
	return l.trial.out.AddValue(b, measure, float64(now))
}

// afterStart is how long a start's later work may take: a second read of the kernel, garbage collection.
const afterStart = time.Second

// rest watches it while nothing changes.
func (l *life) rest(ctx context.Context) error {
	if err := l.recordMemory(ctx, "memory"); err != nil {
		return err
	}
	if err := testbed.Sleep(ctx, max(afterStart, l.trial.profile.Quiet/4)); err != nil {
		return err
	}
	used, wall, err := l.spent(func() error { return testbed.Sleep(ctx, l.trial.profile.Quiet) })
	if err != nil {
		return err
	}
	b := l.block
	b.Wall = wall
	return l.trial.out.AddValue(b, "idle", float64(used)/float64(wall))
}

// spent is what the subject used of processors while something went on, and how long that went on.
func (l *life) spent(something func() error) (used, wall time.Duration, err error) {
	return testbed.Spent(l.instance.used, something)
}

// changes moves the probe's endpoint, each time from rest.
func (l *life) changes(ctx context.Context) error {
	b := l.block
	var elapsed []int64
	used, wall, err := l.spent(func() error {
		for range l.implementation.moves {
			if err := l.move(ctx, &elapsed, l.implementation.pause); err != nil {
				return err
			}
		}
		return testbed.Settle(ctx, l.instance.used) // it may have something to do yet
	})
	if err != nil {
		return err
	}
	b.Wall = wall
	return errors.Join(l.is("moved-cpu", used/time.Duration(l.implementation.moves)),
		l.trial.out.AddTimes(b, "moved", elapsed))
}

// move moves the probe's endpoint once, up to half as long again after a pause so as to be in step with nothing, and
// notes how long it took from the PATCH's begin to the first connection at the new place.
func (l *life) move(ctx context.Context, elapsed *[]int64, pause time.Duration) error {
	if err := testbed.Sleep(ctx, pause+time.Duration(l.trial.bed.Rand.Int64N(int64(pause/2)))); err != nil {
		return err
	}
	d, err := l.probe.Move(ctx, func(o source.Object) error { return l.trial.cluster.publish(ctx, o) })
	*elapsed = append(*elapsed, int64(d))
	return err
}

// churn moves it while endpoints of other Services change, and a client connects to a Service that doesn't.
func (l *life) churn(ctx context.Context) error {
	before, err := l.instance.delays(ctx)
	if err != nil {
		return err
	}
	b, p := l.block, l.trial.profile
	var elapsed []int64
	changes := int64(0)
	steady := l.connects(ctx)
	used, wall, err := l.spent(func() (err error) {
		stop := l.trial.cluster.stir(ctx, p.Rate)
		for begin := time.Now(); err == nil && (len(elapsed) < p.Least || time.Since(begin) < p.Churn); {
			err = l.move(ctx, &elapsed, 10*time.Millisecond)
		}
		n, serr := stop()
		changes = n + int64(len(elapsed))
		return errors.Join(err, serr)
	})
	if err := errors.Join(err, steady()); err != nil {
		return err
	}
	b.Wall = wall
	counted := b
	counted.Counters = map[string]float64{"changes": float64(changes)}
	if err := errors.Join(l.trial.out.AddValue(counted, "churn-cpu", float64(used)/float64(wall)),
		l.is("change-cpu", used/time.Duration(changes)), l.trial.out.AddTimes(b, "moved-churn", elapsed)); err != nil {
		return err
	}
	if before != nil {
		if err := l.arrivals(ctx, b, before); err != nil {
			return err
		}
	}
	return l.recordMemory(ctx, "memory-churn")
}

// arrivals records the times from a change's arrival to the kernel since an earlier look.
func (l *life) arrivals(ctx context.Context, b result.Block, before delays) error {
	now, err := l.instance.delays(ctx)
	if err != nil {
		return err
	}
	return l.trial.out.AddTimes(b, "event", now.since(before))
}

// connects opens connections at a steady rate to a Service that does not change, until it is stopped.
func (l *life) connects(ctx context.Context) (stop func() error) {
	ctx, enough := context.WithCancel(ctx)
	done := make(chan error, 1)
	seed := l.trial.bed.Rand.Uint64()
	go func() {
		s, t, err := load.Open{Thread: load.Thread{Enter: l.pair.Enter},
			Targets: []netip.AddrPort{testbed.ServiceEntry(steadyService)}, Seed: seed,
			Sizes: testbed.Sizes, Close: load.Fin, Rate: steadyRate, Timeout: 2 * time.Second}.Run(ctx, time.Hour)
		if err == nil {
			t.Cut = false // it was to end
			b := l.block
			b.Measure = "steady"
			if b, err = b.Timed(s); err == nil {
				b.Trace = &t
				err = l.trial.out.Add(b)
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
