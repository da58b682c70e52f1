// Package paths is the experiment that measures what each path between two pods costs against one hop between two
// hosts: on one node, and across nodes by routes, VXLAN and IPIP, each with and without the fast path.
package paths

import (
	"context"
	"net/netip"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:  "paths",
	Short: "What each path between two pods costs, with and without the fast path",
	Long: `Measure a round trip and a connection with one request between two pods: on one node, and across two nodes by routes, by
VXLAN and by IPIP. Agents with --network-mode Own connect the pods: in mode ebpf, with the fast path and without, in mode
nftables, and in one mode on each node. Beside them plain routed veths, and the paths of kindnet and kube-router; all of
it against the same between two hosts over the same wire. Count how many packets take the kernel's receive path, how many
of them the fast path redirects, and how many a tunnel carries: an arm whose packets go elsewhere than it says ends the
run. It takes minutes, and root.`,
	Rounds: true,
	Exact:  true,
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, func(p profile) profile { p.Rounds = experiment.ExactRounds; return p })
		p.Rounds = o.RoundsOr(p.Rounds)
		return newTrial(ctx, b, p)
	},
}

// profile is how much is measured.
type profile struct {
	Name   string
	Rounds int
	Warm   time.Duration // before each block, not measured
	Block  time.Duration
}

var (
	quick = profile{"quick", 31, 4 * time.Millisecond, 20 * time.Millisecond}
	full  = profile{"full", 101, 10 * time.Millisecond, 60 * time.Millisecond}
)

// trial is the experiment of that name at work.
type trial struct {
	bed     *testbed.Testbed
	out     *result.Writer
	traffic *testbed.Traffic
	profile profile
	arms    []arm                      // those that this machine can make
	noIPIP  string                     // why it can't make those by IPIP; "": it can
	nodes   map[string][]*testbed.Node // with agents, by arm
}

// newTrial finds out what this machine can do.
func newTrial(ctx context.Context, b *testbed.Testbed, p profile) (r *trial, err error) {
	b.Grouped = true
	r = &trial{bed: b, profile: p, nodes: map[string][]*testbed.Node{}}
	r.noIPIP, err = b.Try(ctx, "paths ipip", func(ctx context.Context, b *testbed.Testbed) (*testbed.Pair, error) {
		return b.AddPathPair(ctx, armIPIP, testbed.PathIPIP)
	})
	r.choose()
	return r, err
}

// choose chooses the arms that this machine can make.
func (r *trial) choose() {
	for _, a := range allArms {
		if !a.ipip || r.noIPIP == "" {
			r.arms = append(r.arms, a)
		}
	}
}

// ProfileName returns "quick" or "full".
func (r *trial) ProfileName() string { return r.profile.Name }

// Steps is the whole run in order.
func (r *trial) Steps(out *result.Writer) []experiment.Step {
	r.out, r.traffic = out, testbed.NewTraffic(r.bed, out)
	l := &experiment.Plan{}
	for _, a := range r.arms {
		planned := 100 * time.Millisecond
		if a.near != nil {
			planned = 2 * time.Second
		}
		l.Add("making "+a.Title, planned, func(ctx context.Context) error { return r.make(ctx, a) })
	}
	l.Add("starting servers", time.Second, r.serve)
	check := time.Duration(len(r.arms)) * 20 * time.Millisecond
	l.Add("checking how packets go", check, func(ctx context.Context) error { return r.check(ctx, 0) })
	block := r.profile.Warm + r.profile.Block + 6*time.Millisecond
	l.Times(r.profile.Rounds, "traffic, round", time.Duration(len(operations)*(len(r.arms)+1))*block, r.round)
	l.Add("checking how packets went", check, func(ctx context.Context) error { return r.check(ctx, 1) })
	return *l
}

// make makes an arm, and waits until its agents rest: pods were attached after they were ready. The wire of nodes with
// the fast path is no pod's device to it.
func (r *trial) make(ctx context.Context, a arm) (err error) {
	if r.nodes[a.ID], err = a.add(ctx, r.bed); err != nil {
		return err
	}
	for _, n := range r.nodes[a.ID] {
		if err := n.Agent.Settle(ctx); err != nil {
			return err
		}
	}
	_, err = r.excludeWires(a)
	return err
}

// excludeWires takes the wire of the arm's nodes out of the devices of pods that their fast path knows, and returns the
// names of those where it was one.
func (r *trial) excludeWires(a arm) (had []string, err error) {
	for k, own := range a.owners() {
		if !a.redirects(own) {
			continue
		}
		n := r.nodes[a.ID][k]
		found, err := n.ExcludeWire()
		if err != nil {
			return nil, err
		}
		if found {
			had = append(had, n.Pair.Near.Name)
		}
	}
	return had, nil
}

// serve starts the server of every pair.
func (r *trial) serve(context.Context) error {
	if err := r.bed.Isolate(r.out.Remark); err != nil {
		return err
	}
	for _, p := range r.bed.Pairs {
		if err := p.Serve(r.bed.ServerThread(p.Home()), testbed.Everywhere, testbed.Sizes, 1); err != nil {
			return err
		}
	}
	return nil
}

// operations are what is measured.
var operations = []load.Op{load.RR, load.CRR}

// round has a block of each operation in every arm.
func (r *trial) round(ctx context.Context, n int) error {
	var l []testbed.Operation
	for _, op := range operations {
		l = append(l, testbed.Operation{Measure: op.String(), Targets: targets, Warmup: true,
			Load: func(ctx context.Context, p *testbed.Pair, _ []netip.AddrPort) (load.Sample, *load.Trace, error) {
				s, err := r.client(p, r.profile.Warm).Run(ctx, op, r.profile.Block)
				return s, nil, err
			}})
	}
	return r.traffic.Round(ctx, n, l)
}

// targets returns where a pair's server is.
func targets(p *testbed.Pair) []netip.AddrPort {
	return []netip.AddrPort{netip.AddrPortFrom(p.ServerAddr(), testbed.ServerPort)}
}

// client returns a pair's client.
func (r *trial) client(p *testbed.Pair, warm time.Duration) load.Client {
	c := r.bed.Client(p, targets(p), warm)
	c.Thread.Enter = p.EnterClient
	return c
}
