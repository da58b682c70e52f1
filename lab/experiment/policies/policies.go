// Package policies is the experiment that measures what network policies cost: a connection and a round trip under few
// and many of them, by each policy engine, and what it takes to keep a large cluster's policies in the kernel.
package policies

import (
	"context"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/generate"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:  "policies",
	Short: "What network policies cost a connection, a round trip and the node's upkeep",
	Long: `Measure what network policies cost with each policy engine that this kernel supports: a connection and a round
trip of a pod under 10, 1,000 and 10,000 policies, against connection tracking alone and against nothing at all, beside a
list of rules, and beside kube-router given with --subject, up to 1,000 policies; then, with the policies of a large
cluster, the time from a change of a label, or of a namespace's, to the kernel, the first write, and how fast connections
are cut that a change denies. It takes about five minutes with --quick, half an hour without, and root.`,
	Rounds:   true,
	Exact:    true,
	Subjects: []string{experiment.KubeRouterProgram.Name},
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, profile.exact)
		p.Rounds = o.RoundsOr(p.Rounds)
		programs, err := o.Programs(experiment.KubeRouterProgram)
		if err != nil {
			return nil, err
		}
		return newTrial(ctx, b, p, programs[experiment.KubeRouterProgram.Name])
	},
}

// profile is how much is measured.
type profile struct {
	Name        string
	Counts      []int // of policies
	Rounds      int
	Block, Warm time.Duration
	Large       generate.PolicySize // in which labels of pods change
	Wide        generate.PolicySize // in which labels of namespaces change
	Events      int                 // changes of labels of pods, at 100 a second
	Relabelled  int                 // changes of a namespace's
	Peers       int                 // of a first write
	Writes      int                 // first writes
	Flows       []int               // connections that are cut
	Cuts        int                 // of each number of connections
	Patience    time.Duration       // with one of these steps: what takes longer is left out, by name
	Added       int                 // of a policy to those of Large, counted; 0: all but an exact run
}

var (
	quick = profile{Name: "quick", Counts: []int{10, 1000, 10000}, Rounds: 51, Block: 15 * time.Millisecond,
		Warm:  4 * time.Millisecond,
		Large: generate.PolicySize{Pods: 100_000, Namespaces: 25_000, Here: 110, Cluster: 20},
		Wide:  generate.PolicySize{Pods: 20_000, Namespaces: 40, Here: 250, Cluster: 50}, Events: 400, Relabelled: 300,
		Peers: 100_000, Writes: 6, Flows: []int{1_000, 100_000}, Cuts: 6, Patience: 40 * time.Second}
	full = profile{Name: "full", Counts: []int{10, 1000, 10000}, Rounds: 501, Block: 50 * time.Millisecond,
		Warm:  10 * time.Millisecond,
		Large: generate.PolicySize{Pods: 100_000, Namespaces: 25_000, Here: 110, Cluster: 20},
		Wide:  generate.PolicySize{Pods: 100_000, Namespaces: 200, Here: 250, Cluster: 50}, Events: 6000, Relabelled: 300,
		Peers: 100_000, Writes: 15, Flows: []int{1_000, 100_000}, Cuts: 15, Patience: 5 * time.Minute}
)

// exact returns the profile of an exact run.
func (p profile) exact() profile {
	if p.Name == quick.Name { // for the processor is slow
		p.Large = generate.PolicySize{Pods: 10_000, Namespaces: 2_500, Here: 110, Cluster: 20}
	}
	p.Patience = 0 // nor does its clock say how long anything takes
	p.Rounds, p.Added = experiment.ExactRounds, experiment.ExactRounds
	return p
}

// trial is the experiment of that name at work.
type trial struct {
	bed     *testbed.Testbed
	out     *result.Writer
	traffic *testbed.Traffic
	grid    *experiment.PolicyGrid
	profile profile
}

// newTrial finds out what this machine can do. router is a program of kube-router, "" for none.
func newTrial(ctx context.Context, b *testbed.Testbed, p profile, router string) (experiment.Trial, error) {
	g, err := experiment.NewPolicyGrid(ctx, b, p.Counts, 1, true)
	if err == nil && router != "" {
		err = g.SetKubeRouter(ctx, router)
	}
	return &trial{bed: b, grid: g, profile: p}, err
}

// ProfileName returns "quick" or "full".
func (r *trial) ProfileName() string { return r.profile.Name }

// Steps is the whole run in order: upkeep first, since the load takes a processor for itself from then on.
func (r *trial) Steps(out *result.Writer) []experiment.Step {
	r.out, r.traffic = out, testbed.NewTraffic(r.bed, out)
	l := &experiment.Plan{}
	if r.profile.Added > 0 {
		r.addAdditions(l)
	} else {
		r.addUpkeep(l)
	}
	r.grid.AddSteps(l, out)
	for _, e := range r.bothEnds() {
		l.Add("writing policies of both ends, "+e.Name, time.Second, func(ctx context.Context) error {
			few := r.grid.Counts[0]
			return r.grid.Enforce(ctx, e, e.Name+both, few, r.grid.BothEnds(few))
		})
	}
	l.Add("starting servers", 100*time.Millisecond, r.serve)
	l.Times(r.profile.Rounds, "traffic, round", r.grid.Planned(r.operations()),
		func(ctx context.Context, i int) error { return r.traffic.Round(ctx, i, r.operations()) })
	return *l
}

// both ends the name of an engine's arm with policies for both ends.
const both = "-both"

// bothEnds returns the engines that have such an arm: in an exact run, all.
func (r *trial) bothEnds() []mode.Engine {
	if r.profile.Added == 0 {
		return nil
	}
	return r.grid.Engines
}

// serve starts a server in every pod.
func (r *trial) serve(context.Context) error {
	if err := r.bed.Isolate(r.out.Remark); err != nil {
		return err
	}
	for _, p := range r.bed.Pairs {
		if err := r.bed.ServePod(p, experiment.PolicyPort, testbed.Sizes); err != nil {
			return err
		}
	}
	return nil
}

// operations are those of a round: a connection, and a round trip on a kept one.
func (r *trial) operations() (l []testbed.Operation) {
	for _, op := range []load.Op{load.CRR, load.RR} {
		l = append(l, testbed.Operation{Measure: op.String(), Targets: experiment.PolicyTargets(0), Warmup: true,
			Planned: r.profile.Warm + r.profile.Block,
			Load:    r.bed.FarLoop(op, r.profile.Warm, r.profile.Block)})
	}
	return l
}
