package services

import (
	"context"
	"errors"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// begin starts a node's agent with nothing in the kernel and waits until it is done and rests.
func (r *trial) begin(ctx context.Context, n *testbed.Node) error {
	if err := r.bed.StartAgent(n); err != nil {
		return err
	}
	r.bed.Defer(func() error { n.Agent.End(); return nil })
	if err := r.ready(ctx, n, 0, "empty"); err != nil {
		return err
	}
	return n.Agent.Settle(ctx)
}

// ready waits until a node's agent is ready and notes how long after its start that was.
func (r *trial) ready(ctx context.Context, n *testbed.Node, round int, kernel string) error {
	elapsed, err := n.WaitReady(ctx)
	if err != nil {
		return err
	}
	return r.started(n, experiment.ArmNFTables, round, kernel, elapsed)
}

// started records how long after its start a node's agent was ready.
func (r *trial) started(n *testbed.Node, arm string, round int, kernel string, elapsed time.Duration) error {
	b := result.Block{Arm: arm, Round: round,
		Params: testbed.ServiceParams(n.Pair.Services).With("kernel", kernel), Wall: elapsed}
	if r.kubeProxy != "" && kernel == "empty" && arm == experiment.ArmNFTables {
		used, err := n.Agent.Used()
		if err = errors.Join(err, r.out.AddValue(b, "ready-cpu", float64(used))); err != nil {
			return err
		}
	}
	return r.out.AddValue(b, "ready", float64(elapsed))
}

// samples is how many times memory is read, and into how many windows the idle time is divided: as many as an interval
// needs at least.
const samples = 5

// memory reads the resident memory of every agent.
func (r *trial) memory(ctx context.Context, after string) error {
	for _, n := range r.nodes {
		if err := n.Agent.Settle(ctx); err != nil {
			return err
		}
	}
	for i := range samples {
		if err := testbed.Sleep(ctx, 100*time.Millisecond); err != nil {
			return err
		}
		for _, n := range r.nodes {
			now, most, err := n.Agent.Memory()
			if err != nil {
				return err
			}
			b := result.Block{Arm: experiment.ArmNFTables, Round: i, Params: testbed.ServiceParams(n.Pair.Services).With("after",
				after), Counters: map[string]float64{"most": float64(most)}}
			if err := r.out.AddValue(b, "memory", float64(now)); err != nil {
				return err
			}
		}
	}
	return nil
}

// What goes on while an agent has nothing to do.
const (
	duringQuiet   = "quiet"
	duringTraffic = "traffic"
)

// idle sees what the agents use of a processor while nothing changes and nothing else runs here.
func (r *trial) idle(ctx context.Context) error {
	for i := range samples {
		if err := r.unchanged(i, duringQuiet, func() error {
			return testbed.Sleep(ctx, r.profile.Quiet/samples)
		}); err != nil {
			return err
		}
	}
	return nil
}

// unchanged records what the agents use of a processor while something goes on that changes nothing for them.
func (r *trial) unchanged(round int, during string, something func() error) error {
	before, err := r.activity()
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := something(); err != nil {
		return err
	}
	wall := time.Since(begin)
	after, err := r.activity()
	if err != nil {
		return err
	}
	for k, n := range r.nodes {
		b := result.Block{Arm: experiment.ArmNFTables, Round: round,
			Params: testbed.ServiceParams(n.Pair.Services).With("during", during), Start: begin, Wall: wall,
			Counters: map[string]float64{"wakeups": after[k].woken - before[k].woken}}
		if err := r.out.AddValue(b, "idle", float64(after[k].used-before[k].used)/float64(wall)); err != nil {
			return err
		}
	}
	return nil
}

type activity struct {
	used  time.Duration
	woken float64
}

// activity reads what every agent has used so far.
func (r *trial) activity() (l []activity, err error) {
	for _, n := range r.nodes {
		used, uerr := n.Agent.Used()
		woken, werr := n.Agent.Woken()
		l = append(l, activity{used, woken})
		err = errors.Join(err, uerr, werr)
	}
	return l, err
}
