package services

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
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
func (r *trial) loss(ctx context.Context, round int, while string,
	something func(context.Context, *testbed.Node) error) error {
	n := r.nodes[len(r.nodes)-1]
	before, err := n.Status()
	if err != nil {
		return err
	}
	p := n.Pair
	connections := load.Open{ // with the agent that is there before something may start another
		Thread: r.bed.ClientThread(p), Targets: []netip.AddrPort{testbed.ServiceEntry(0)}, Seed: 1,
		Sizes: testbed.Sizes, Close: load.Fin, Rate: r.profile.Rate, Timeout: 2 * time.Second, Workers: p.Workers(),
	}
	loading, enough := context.WithCancel(ctx)
	defer enough()
	ended := make(chan error, 1)
	go func() {
		err := testbed.Sleep(ctx, 200*time.Millisecond) // of connections that are under way when it begins
		if err == nil {
			err = something(ctx, n)
		}
		if err == nil {
			err = testbed.Sleep(ctx, 200*time.Millisecond)
		}
		enough()
		ended <- err
	}()
	s, t, err := connections.Run(loading, time.Hour)
	enough()
	if err := errors.Join(err, <-ended, ctx.Err()); err != nil {
		return fmt.Errorf("count losses while %s: %w", while, err)
	}
	t.Cut = false // it was to end when something did
	b, err := result.Block{Measure: "loss", Arm: experiment.ArmNFTables, Round: round,
		Params: testbed.ServiceParams(p.Services).With("while", while)}.Timed(s)
	if err != nil {
		return err
	}
	b.Trace, r.traffic.Late = &t, max(r.traffic.Late, time.Duration(t.Late))
	if while == whileOthers || while == whileOwn {
		after, err := n.Status()
		if err != nil {
			return err
		}
		r.out.Remark(fmt.Sprintf("While %s, %d connections were made, and the agent wrote %d facts in %d transactions.",
			while, s.Ops, after.Puts-before.Puts, after.Writes-before.Writes))
	}
	return r.out.Add(b)
}

// calm lets nothing go on.
func (r *trial) calm(ctx context.Context, _ *testbed.Node) error {
	return testbed.Sleep(ctx, r.profile.Calm)
}

// replaceOthers replaces endpoints of other Services.
func (r *trial) replaceOthers(ctx context.Context, n *testbed.Node) error {
	return r.replace(ctx, r.profile.Others, func(i int) (func() error, error) {
		s, k := 1+r.bed.Rand.IntN(n.Pair.Services-1), r.bed.Rand.IntN(testbed.Endpoints)
		return n.Folder.Prepare(s, n.Folder.Cluster.With(s, k, testbed.Spare(s, k)))
	})
}

// replaceOwn replaces endpoints of the Service that is connected to, one after the other, by others that answer as
// well: nine of ten stay each time.
func (r *trial) replaceOwn(ctx context.Context, n *testbed.Node) error {
	s := n.Folder.Cluster.Slice(0).DeepCopy()
	return r.replace(ctx, r.profile.Own, func(i int) (func() error, error) {
		k := i % testbed.Endpoints
		s.Endpoints[k].Addresses = []string{testbed.ServerAddr((i + testbed.Endpoints) % testbed.Servers).String()}
		return n.Folder.Prepare(0, s)
	})
}

// replace saves so many files at a steady pace.
func (r *trial) replace(ctx context.Context, times int, next func(i int) (func() error, error)) error {
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
func (r *trial) killAgent(ctx context.Context, n *testbed.Node, round int) error {
	n.Agent.Kill()
	if n.Pair.Services > 1 {
		s := 1 + r.bed.Rand.IntN(n.Pair.Services-1)
		save, err := n.Folder.Prepare(s, n.Folder.Cluster.With(s, 0, testbed.Spare(s, 1)))
		if err == nil {
			err = save()
		}
		if err != nil {
			return err
		}
	}
	if err := r.bed.StartAgent(n); err != nil {
		return err
	}
	return r.ready(ctx, n, round, "full")
}
