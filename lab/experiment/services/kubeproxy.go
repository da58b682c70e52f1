package services

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/source"
)

// measureKubeProxy measures the control side of a kube-proxy: a cold sync, its memory, and an endpoint's moves.
func (r *trial) measureKubeProxy(ctx context.Context, round int, a experiment.KubeProxyArm,
	w *testbed.Decided) (err error) {
	p, err := testbed.NewPair(ctx, r.bed.Name+"-"+a.ID)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	probe, err := kubeproxy.NewProbe(p.Near, p.Far, experiment.ProbeService, experiment.ProbeEndpoints)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, probe.Close()) }()
	limited, stop := experiment.WithColdSyncTimeout(ctx, r.bed, w.Cluster.Services)
	defer stop()
	n, cold, err := experiment.StartKubeProxy(limited, r.bed, r.kubeProxy, a, p,
		append(w.Cluster.Objects[:len(w.Cluster.Objects):len(w.Cluster.Objects)], probe.Objects()...)...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	b := result.Block{Arm: a.ID, Round: round, Params: testbed.ServiceParams(w.Cluster.Services)}
	started, held := b, b
	started.Params = testbed.ServiceParams(w.Cluster.Services).With("kernel", "empty")
	held.Params = testbed.ServiceParams(w.Cluster.Services).With("after", "the first sync")
	if err := errors.Join(r.out.AddValue(b, "cold", float64(cold.Sync)), r.out.AddValue(started, "ready",
		float64(cold.Wall)), r.out.AddValue(started, "ready-cpu", float64(cold.CPU()))); err != nil {
		return err
	}
	if err := testbed.Settle(limited, n.CPU); err != nil {
		return err
	}
	used, err := n.Usage()
	if err != nil {
		return err
	}
	held.Counters = map[string]float64{"most": float64(used.Peak)}
	if err := r.out.AddValue(held, "memory", float64(used.Resident)); err != nil {
		return err
	}
	return r.move(limited, b, probe, n.Apply)
}

// move moves a probe's endpoint, and records how long it took until a connection reached the new one.
func (r *trial) move(ctx context.Context, b result.Block, probe *kubeproxy.Probe,
	apply func(source.Object) error) error {
	if err := probe.Reach(ctx); err != nil {
		return err
	}
	b.Start = time.Now()
	var elapsed []int64
	for range experiment.Moves {
		if err := testbed.Sleep(ctx, experiment.MoveAfter); err != nil {
			return err
		}
		d, err := probe.Move(ctx, apply)
		if err != nil {
			return err
		}
		elapsed = append(elapsed, int64(d))
	}
	b.Wall = time.Since(b.Start)
	return r.out.AddTimes(b, "moved", elapsed)
}

// moveOurs moves a probe's endpoint at every node of ours, whose source is a folder.
func (r *trial) moveOurs(ctx context.Context) error {
	for _, n := range r.nodes {
		if err := r.moveOne(ctx, n); err != nil {
			return fmt.Errorf("move an endpoint beside %d Services: %w", n.Pair.Services, err)
		}
	}
	return nil
}

func (r *trial) moveOne(ctx context.Context, n *testbed.Node) (err error) {
	probe, err := kubeproxy.NewProbe(n.Pair.Near, n.Pair.Far, experiment.ProbeService, experiment.ProbeEndpoints)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, probe.Close()) }()
	limited, stop := context.WithTimeout(ctx, r.bed.Within(testbed.Patience))
	defer stop()
	var saved []string
	apply := func(o source.Object) error {
		path, err := n.Folder.Save(o)
		saved = append(saved, path)
		return err
	}
	defer func() {
		for _, path := range saved {
			if rerr := os.Remove(path); !errors.Is(rerr, os.ErrNotExist) {
				err = errors.Join(err, rerr)
			}
		}
		err = errors.Join(err, n.Agent.Settle(ctx))
	}()
	for _, o := range probe.Objects() {
		if err := apply(o); err != nil {
			return err
		}
	}
	for round := range r.profile.Cold {
		if err := r.move(limited, result.Block{Arm: experiment.ArmNFTables, Round: round,
			Params: testbed.ServiceParams(n.Pair.Services)}, probe, apply); err != nil {
			return err
		}
	}
	return nil
}

// proxyDesign adds to the design of services what a kube-proxy brings.
func proxyDesign(d *result.Design) {
	for _, a := range experiment.KubeProxyArms {
		d.Arms = append(d.Arms, a.Arm())
	}
	for i := range d.Measures {
		switch m := &d.Measures[i]; m.ID {
		case "cold":
			m.Text += "; kube-proxy: its first sync, of which it says itself how long it took"
		case "ready":
			m.Text += "; kube-proxy: until the end of its first sync"
		case "memory":
			m.Text += "; kube-proxy: one look after each cold sync, its own memory without the commands that it runs"
		}
	}
	d.Measures = append(d.Measures,
		result.Measure{ID: "ready-cpu", Title: "processor time from start to ready", Unit: "s", Stat: result.Value,
			Text: "of all threads, kube-proxy's with that of the commands that it ran, in steps of 10 ms"},
		result.Measure{ID: "moved", Title: "one endpoint moved, told to first connection", Unit: "ms", Stat: result.P50,
			Text: fmt.Sprintf("a Service's only endpoint moves; until a connection comes to its new place, %v after the last "+
				"move: kube-proxy, told by the API server, as upstream configures it; ours, told by a saved file",
				experiment.MoveAfter)})
	d.Aims = append(d.Aims,
		result.Aim{ID: "G5", Text: "G5: cold sync at 10,000 × 10 ≥ 100 × faster than kube-proxy's nftables mode",
			Measure: "cold", Arm: experiment.ArmKubeProxyNFTables, Params: testbed.ServiceParams(10000), Of: result.Value,
			Over: &result.CellRef{Arm: experiment.ArmNFTables}, Bound: 100, Least: true})
	d.Missing = append(d.Missing, "Traffic through kube-proxy's rules, and its idle time: the experiment tigera has "+
		"the former.")
	d.Method = append(d.Method, "kube-proxy is the program that was given, one at a time, started with nothing in its "+
		"kernel against an API server within the lab's process on the loopback of its node, which costs it nothing. Its "+
		"configuration is upstream's, with the limits of conntrack left alone.")
}
