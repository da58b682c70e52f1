// Package romana is the experiment that measures what network policies delay an HTTP request by, by their number and by
// the size of the answer, with each policy engine and with a list of rules: the claims of "High performance network
// policies in Kubernetes clusters" (Romana, 2016).
package romana

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/rules"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:    "romana",
	Repeats: "Romana, High performance network policies in Kubernetes clusters, 2016",
	Short:   "What network policies delay a request by, by their number and the answer's size",
	Long: `Measure what "High performance network policies in Kubernetes clusters" (Romana, 2016) measured: HTTP requests
without keep-alive below saturation, answered by 0.5 kB to 1 MB, under 10 to 10,000 network policies of which the last one
matches. Each policy engine that this kernel supports is an arm, beside policies as a list of rules (iptables, nft), as the
article's were, connection tracking alone, and nothing at all. Prints the article's two tables and charts with its own
points beside ours, and counts the rules that a packet is tested against. It takes about four minutes with --quick, a
quarter of an hour without, and root.`,
	Rounds: true,
	Exact:  true,
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, func(profile) profile { return exact })
		p.Rounds = o.RoundsOr(p.Rounds)
		return newTrial(ctx, b, p)
	},
}

// profile is how much is measured.
type profile struct {
	Name   string
	Counts []int // of policies
	Rounds int
	Each   int           // requests of a block
	Warm   time.Duration // before each block, not measured
	Traces int           // the greatest number of policies as a list at which the kernel traces a packet
	Exact  bool          // instructions are counted: in a closed loop, for answers that one thread can send
}

var (
	quick = profile{"quick", []int{10, 50, 100, 200, 1000, 10000}, 31, 16, 4 * time.Millisecond, 1000, false}
	full  = profile{"full", []int{10, 50, 100, 200, 1000, 10000}, 101, 20, 10 * time.Millisecond, 10000, false}
	exact = profile{Name: "exact", Counts: []int{10, 200, 1000}, Rounds: experiment.ExactRounds, Exact: true}
)

// size is the length of an answer. Its requests come at a rate that keeps the processor idle most of the time.
type size struct {
	Name  string // as the article has it
	Text  string
	Bytes int
	Rate  float64 // requests a second
}

var sizes = []size{{".5k", "0.5 kB", 512, 1000}, {"1k", "1 kB", 1 << 10, 1000}, {"10k", "10 kB", 10 << 10, 1000},
	{"100k", "100 kB", 100 << 10, 1000}, {"1M", "1 MB", 1 << 20, 200}}

// sendable is the longest answer that a server sends whole before the client of the same thread reads: one that fits
// into a new connection's first window.
const sendable = 10 << 10

// sizes returns those of answers that are measured.
func (p profile) sizes() []size {
	if !p.Exact {
		return sizes
	}
	return slices.DeleteFunc(slices.Clone(sizes), func(s size) bool { return s.Bytes > sendable })
}

// measure returns the id of the measure of an answer's size.
func (s size) measure() string { return "http-" + s.Name }

// request is how long a request is.
const request = 100

// trial is the experiment of that name at work.
type trial struct {
	bed     *testbed.Testbed
	out     *result.Writer
	traffic *testbed.Traffic
	grid    *experiment.PolicyGrid
	profile profile
}

func newTrial(ctx context.Context, b *testbed.Testbed, p profile) (experiment.Trial, error) {
	g, err := experiment.NewPolicyGrid(ctx, b, p.Counts, len(sizes), false)
	return &trial{bed: b, grid: g, profile: p}, err
}

// ProfileName returns "quick" or "full".
func (r *trial) ProfileName() string { return r.profile.Name }

// Steps is the whole run in order.
func (r *trial) Steps(out *result.Writer) []experiment.Step {
	r.out, r.traffic = out, testbed.NewTraffic(r.bed, out)
	l := &experiment.Plan{}
	r.grid.AddSteps(l, out)
	l.Add("starting servers", 500*time.Millisecond, r.serve)
	if !r.profile.Exact {
		l.Add("counting rules", time.Duration(r.profile.Traces)*2*time.Millisecond+5*time.Second, r.countRules)
	}
	l.Times(r.profile.Rounds, "traffic, round", r.grid.Planned(r.operations()),
		func(ctx context.Context, i int) error { return r.traffic.Round(ctx, i, r.operations()) })
	if !r.profile.Exact {
		l.Add("noting what was seen", 0, func(context.Context) error { r.remark(); return nil })
	}
	return *l
}

// serve starts a server for each size of an answer in every pod.
func (r *trial) serve(context.Context) error {
	if err := r.bed.Isolate(r.out.Remark); err != nil {
		return err
	}
	for _, p := range r.bed.Pairs {
		for i, s := range r.profile.sizes() {
			if err := r.bed.ServePod(p, experiment.PolicyPort+uint16(i), load.Sizes{Request: request,
				Response: s.Bytes}); err != nil {
				return err
			}
		}
	}
	return nil
}

// operations are those of a round: requests for each size.
func (r *trial) operations() (l []testbed.Operation) {
	for i, s := range r.profile.sizes() {
		block := time.Duration(float64(r.profile.Each) / s.Rate * float64(time.Second))
		o := testbed.Operation{Measure: s.measure(), Targets: experiment.PolicyTargets(i),
			Planned: r.profile.Warm + block, Warmup: true,
			Load: func(ctx context.Context, p *testbed.Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
				sample, t, err := load.Open{Thread: r.bed.FarThread(p), Targets: to, Seed: r.bed.Rand.Uint64(),
					Sizes: load.Sizes{Request: request, Response: s.Bytes}, Close: load.Fin, Rate: s.Rate, Warm: r.profile.Warm,
					Workers: p.Workers()}.Run(ctx, block)
				if t.Cut && err == nil {
					err = ctx.Err()
				}
				return sample, &t, err
			}}
		if r.profile.Exact {
			o.Planned, o.Load = time.Second, r.counted(s)
		}
		l = append(l, o)
	}
	return l
}

// counted returns a closed loop of requests for a size, of which instructions are counted.
func (r *trial) counted(s size) testbed.Loader {
	return func(ctx context.Context, p *testbed.Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		c := r.bed.Client(p, to, 0)
		c.Thread, c.Sizes = r.bed.FarThread(p), load.Sizes{Request: request, Response: s.Bytes}
		sample, err := c.Run(ctx, load.CRR, 0)
		return sample, nil, err
	}
}

// packet returns the first packet of a connection to the server's pod, or a later one.
func packet(established bool) rules.Packet {
	return rules.Packet{Protocol: model.TCP, Path: rules.Forwarded, In: "eth0", Out: testbed.PodDevice,
		Src:         netip.AddrPortFrom(testbed.ClientPod, 40000),
		Dst:         netip.AddrPortFrom(testbed.ServerPod, experiment.PolicyPort),
		Established: established, Node: []netip.Addr{testbed.NodeAddr}}
}

// countRules counts, in every arm, the rules that a packet is tested against: on paper, and by the kernel.
func (r *trial) countRules(ctx context.Context) error {
	agreed := 0
	for _, p := range r.bed.Pairs {
		if p.Arm == experiment.ArmTrackedAgain {
			continue
		}
		if p.Arm == engineMaps {
			if err := r.countLookups(ctx, p); err != nil {
				return fmt.Errorf("count the lookups of %s, %s: %w", p.Arm, p.Params, err)
			}
			agreed++
			continue
		}
		set, err := experiment.ReadRules(ctx, p.Near)
		if err != nil {
			return err
		}
		for _, of := range []struct {
			measure     string
			established bool
		}{{"rules", false}, {"rules-established", true}} {
			n, err := set.Count(packet(of.established))
			if err != nil {
				return fmt.Errorf("count the rules of %s, %s: %w", p.Arm, p.Params, err)
			}
			if err := r.out.AddValue(result.Block{Arm: p.Arm, Params: p.Params}, of.measure, n.Mean); err != nil {
				return err
			}
			_, list := experiment.PolicyLists[p.Arm]
			if of.established || list && policies(p) > r.profile.Traces {
				continue
			}
			c := load.Client{Thread: load.Thread{Enter: p.Far.Do},
				Sizes: load.Sizes{Request: request, Response: sizes[0].Bytes}}
			if err := set.Agree(ctx, p.Near, packet(false), n, c); err != nil {
				return fmt.Errorf("trace a packet of %s, %s: %w", p.Arm, p.Params, err)
			}
			agreed++
		}
	}
	r.out.Remark(fmt.Sprintf("Rules per packet were counted on paper for every arm; the kernel, asked to trace a "+
		"connection's first packet, agreed in all %d cases in which it was asked: by engines under every number of "+
		"policies, by lists under up to %s. Of %s, lookups in maps were counted, by its program in the kernel's place.",
		agreed, experiment.Thousands(r.profile.Traces), engineMaps))
	return nil
}

// engineMaps is the engine that evaluates without a rule, by lookups in maps.
const engineMaps = "ebpf"

// countLookups counts an arm's lookups in maps in place of rules: on paper, and by the program itself.
func (r *trial) countLookups(ctx context.Context, p *testbed.Pair) error {
	decided, _, err := testbed.DecidePolicies(testbed.NodeName, r.grid.Objects(policies(p)))
	if err != nil {
		return err
	}
	exchange := func(i int) experiment.Exchange {
		return experiment.Exchange{Server: netip.AddrPortFrom(testbed.ServerPod, experiment.PolicyPort+uint16(i)),
			Sizes: load.Sizes{Request: request, Response: sizes[i].Bytes}}
	}
	first, err := experiment.AgreeLookups(ctx, p.Near, decided.Policies(), testbed.ClientPod,
		load.Client{Thread: load.Thread{Enter: p.Far.Do}}, exchange(0), exchange(len(sizes)-1))
	if err != nil {
		return err
	}
	b := result.Block{Arm: p.Arm, Params: p.Params}
	return errors.Join(r.out.AddValue(b, "rules", float64(first)), r.out.AddValue(b, "rules-established", 1))
}

// policies returns the number of an arm's policies, 0 for a baseline.
func policies(p *testbed.Pair) int {
	n, _ := strconv.Atoi(p.Params["policies"])
	return n
}

// remark records what only the run could find out.
func (r *trial) remark() {
	r.out.Remark(fmt.Sprintf("Requests began up to %v later than intended by the load's own fault, which is part of "+
		"their time. At most %d connections were tracked at once in one network namespace.",
		r.traffic.Late.Round(10*time.Microsecond), r.traffic.Tracked))
}
