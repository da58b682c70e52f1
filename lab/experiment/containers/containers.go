// Package containers is the experiment that measures what a pod's network costs a server against a process of the node:
// the claims of "Why containers slow applications down" and its remedies, each factor on its own.
package containers

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:    "containers",
	Repeats: "Why containers slow applications down (softirq, ipvlan, Cilium)",
	Short:   "What a pod's network costs a server, and what else makes a container slow",
	Long: `Measure what "Why containers slow applications down" measured: the same server as a process of the node and
in a pod, behind a routed veth, a bridge, macvlan, Fairlead's own pod network with and without VXLAN, mode ebpf's
fast path, and with policies; and in the second kernel ipvlan, netkit and IPIP. Round trips and connections in a
closed loop, requests at a fixed rate, an application that computes 1.4 ms for each request, and a stream; the
packets that the kernel's receive path takes for a request; and, each on its own, connection tracking and a limit of
processor time. It takes about four minutes with --quick, three quarters of an hour without, and root. For the
second kernel's panel, run it there first, then name its folder (docs/measurements/containers.md has the commands).`,
	Rounds: true,
	Exact:  true,
	Second: func(folder string) error { _, err := readPanel(folder); return err },
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, func(profile) profile { return exact })
		if b.Emulated() && !o.Exact {
			p = emulated
		}
		p.Rounds = o.RoundsOr(p.Rounds)
		return newTrial(ctx, b, o, p)
	},
}

// profile is how much is measured.
type profile struct {
	Name   string
	Rounds int
	Warm   time.Duration // before each block, not measured
	Loop   time.Duration // a block of round trips, or of connections
	Open   time.Duration // of requests at a fixed rate; 0: none
	App    time.Duration // of an application's; 0: none
	Stream time.Duration // 0: none
	Exact  bool          // instructions are counted
}

var (
	quick = profile{"quick", 21, 4 * time.Millisecond, 15 * time.Millisecond, 60 * time.Millisecond,
		300 * time.Millisecond, 40 * time.Millisecond, false}
	full = profile{"full", 101, 10 * time.Millisecond, 60 * time.Millisecond, 200 * time.Millisecond, time.Second,
		300 * time.Millisecond, false}
	// times on an emulated processor mean nothing: counts and ratios alone
	emulated = profile{"emulated", 21, 20 * time.Millisecond, 100 * time.Millisecond, 0, 0, 300 * time.Millisecond,
		false}
	exact = profile{Name: "exact", Rounds: experiment.ExactRounds, Loop: time.Second, Exact: true}
)

// What the load is, as the article has it.
const (
	rate        = 700                     // requests a second
	application = 1400 * time.Microsecond // of processor time for a request
	limit       = 0.8                     // processors
)

// The ports of a pair's servers.
const (
	barePort = testbed.ServerPort + iota
	appPort
	streamPort
)

// stream is how much of a stream is one operation.
var stream = load.Sizes{Request: 4 << 20, Response: 1}

// trial is the experiment of that name at work.
type trial struct {
	bed     *testbed.Testbed
	out     *result.Writer
	traffic *testbed.Traffic
	profile profile
	arms    []arm // those that this machine can make
	cannot  []testbed.Unable
	second  *panel // nil: none was named
	quotas  map[string]*testbed.Quota
	noQuota string // why there are none; "": there are
}

func newTrial(ctx context.Context, b *testbed.Testbed, o experiment.Options, p profile) (experiment.Trial, error) {
	r := &trial{bed: b, profile: p, quotas: map[string]*testbed.Quota{}}
	var err error
	if r.second, err = readPanel(o.Second); err != nil {
		return nil, err
	}
	for _, a := range allArms {
		if p.leavesOut(a) {
			continue
		}
		why, err := r.try(ctx, a)
		if err != nil {
			return nil, err
		}
		if why == "" {
			r.arms = append(r.arms, a)
			continue
		}
		if a.ID == testbed.ArmDirect {
			return nil, fmt.Errorf("try the baseline: %s", why)
		}
		r.cannot = append(r.cannot, testbed.Unable{Name: a.Title, Why: why})
	}
	return r, nil
}

// leavesOut reports whether a profile has no such arm: an emulated processor's times say nothing of limits, and agents
// start slowly there, and their paths are on every kernel. Instructions are counted of these, too.
func (p profile) leavesOut(a arm) bool { return p.App == 0 && (a.limit > 0 || a.agent && !p.Exact) }

// try returns why this machine can't make an arm, "" if it can.
func (r *trial) try(ctx context.Context, a arm) (string, error) {
	return r.bed.Try(ctx, "containers "+a.ID, func(ctx context.Context, b *testbed.Testbed) (*testbed.Pair, error) {
		if a.limit > 0 {
			if _, err := b.NewQuota(a.ID, a.limit); err != nil {
				return nil, err
			}
		}
		return a.add(ctx, b, a.ID)
	})
}

// ProfileName returns "quick", "full" or "emulated".
func (r *trial) ProfileName() string { return r.profile.Name }

// has reports whether this machine can make an arm.
func (r *trial) has(id string) bool {
	return slices.ContainsFunc(r.arms, func(a arm) bool { return a.ID == id })
}

// Steps is the whole run in order.
func (r *trial) Steps(out *result.Writer) []experiment.Step {
	r.out, r.traffic = out, testbed.NewTraffic(r.bed, out)
	l := &experiment.Plan{}
	for _, a := range r.arms {
		l.Add("making "+a.Title, time.Second, func(ctx context.Context) error { return r.make(ctx, a) })
	}
	l.Add("starting servers", time.Second, r.serve)
	l.Times(r.profile.Rounds, "traffic, round", r.planned(),
		func(ctx context.Context, i int) error { return r.traffic.Round(ctx, i, r.operations()) })
	if r.second != nil {
		l.Add("copying the second kernel's panel", 0, func(context.Context) error { return r.second.copy(out) })
	}
	return *l
}

// make makes an arm, and the group of its application beforehand, so that that goes last.
func (r *trial) make(ctx context.Context, a arm) error {
	if r.profile.App > 0 && r.noQuota == "" {
		q, err := r.bed.NewQuota(a.ID, a.limit)
		if err != nil {
			r.noQuota = testbed.Brief(err.Error())
			r.out.Remark("Applications have no cgroup of their own: " + r.noQuota)
		}
		r.quotas[a.ID] = q
	}
	_, err := a.add(ctx, r.bed, a.ID)
	return err
}

// planned is how long a round takes.
func (r *trial) planned() (d time.Duration) {
	for _, o := range r.operations() {
		blocks := 2 // the baseline at both ends, of which one is counted below, and a block to warm up
		for _, a := range r.arms {
			if a.does(o.Measure) {
				blocks++
			}
		}
		d += time.Duration(blocks) * (o.Planned + 6*time.Millisecond)
	}
	return d
}

// serve starts the servers of every pair: a bare one, an application and one for streams.
func (r *trial) serve(context.Context) error {
	if err := r.bed.Isolate(r.out.Remark); err != nil {
		return err
	}
	bare := func(p *testbed.Pair) load.ServerConfig {
		return load.ServerConfig{Thread: r.bed.ServerThread(p.Home()), Sizes: testbed.Sizes, Listen: listen(barePort)}
	}
	if r.profile.Exact {
		for _, p := range r.bed.Pairs {
			if err := p.ServeAs(bare(p)); err != nil {
				return err
			}
		}
		return nil
	}
	work, err := load.MeasureWork(r.bed.ServerThread(r.bed.Pairs[0].Near), application)
	if err != nil {
		return err
	}
	for _, p := range r.bed.Pairs {
		for _, s := range []load.ServerConfig{
			bare(p),
			{Thread: r.appThread(p), Sizes: testbed.Sizes, Work: work, Listen: listen(appPort)},
			{Thread: r.bed.ServerThread(p.Home()), Sizes: stream, Listen: listen(streamPort)}} {
			if err := p.ServeAs(s); err != nil {
				return err
			}
		}
	}
	return nil
}

// listen returns a port of all addresses.
func listen(port uint16) []netip.AddrPort {
	return []netip.AddrPort{netip.AddrPortFrom(netip.IPv4Unspecified(), port)}
}

// appThread returns where an application runs: in its cgroup.
func (r *trial) appThread(p *testbed.Pair) load.Thread {
	if q := r.quotas[p.Arm]; q != nil {
		return r.bed.QuotaThread(p.Home(), q)
	}
	return r.bed.ServerThread(p.Home())
}

// operations are those of a round.
func (r *trial) operations() (l []testbed.Operation) {
	p := r.profile
	add := func(measure string, port uint16, block time.Duration, do testbed.Loader) {
		if block == 0 {
			return
		}
		bytes := 0
		if measure == "stream" {
			bytes = stream.Request
		}
		l = append(l, testbed.Operation{Measure: measure, Planned: p.Warm + block, Warmup: true, Load: counted(do),
			Bytes: bytes, Targets: func(a *testbed.Pair) []netip.AddrPort {
				if !armOf(a.Arm).does(measure) {
					return nil
				}
				return []netip.AddrPort{netip.AddrPortFrom(a.ServerAddr(), port)}
			}})
	}
	add("rr", barePort, p.Loop, r.bed.FarLoop(load.RR, p.Warm, p.Loop))
	add("crr", barePort, p.Loop, r.bed.FarLoop(load.CRR, p.Warm, p.Loop))
	add("open", barePort, p.Open, r.open)
	add("app", appPort, p.App, r.bed.FarLoop(load.RR, max(p.Warm, p.App/3), p.App)) // a limit is reached beforehand
	add("stream", streamPort, p.Stream, func(ctx context.Context, a *testbed.Pair, to []netip.AddrPort) (load.Sample,
		*load.Trace, error) {
		c := r.bed.Client(a, to, p.Warm)
		c.Thread, c.Sizes = r.bed.FarThread(a), stream
		s, err := c.Run(ctx, load.Stream, p.Stream)
		return s, nil, err
	})
	return l
}

// open has requests begin at a fixed rate, on a kept connection, whatever became of those before.
func (r *trial) open(ctx context.Context, a *testbed.Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
	s, t, err := load.Open{Thread: r.bed.FarThread(a), Targets: to, Seed: r.bed.Rand.Uint64(), Sizes: testbed.Sizes,
		Rate: rate, Each: 1 << 30, Warm: r.profile.Warm, Workers: a.Workers()}.Run(ctx, r.profile.Open)
	if t.Cut && err == nil {
		err = ctx.Err()
	}
	return s, &t, err
}

// counted has the sample of a loader count its requests.
func counted(do testbed.Loader) testbed.Loader {
	return func(ctx context.Context, a *testbed.Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		s, t, err := do(ctx, a, to)
		if err == nil {
			s.Counters["requests"] = float64(s.Ops)
		}
		return s, t, err
	}
}
