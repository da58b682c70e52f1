// Package connect is the experiment that measures new connections in so many blocks that 1 % shows, with warm and with
// cold caches, of clients on the node and in a pod; and how often each eBPF program runs and how long that takes.
package connect

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:  "connect",
	Short: "New connections in mode ebpf, to within 1 %, with warm and cold caches",
	Long: `Measure connect() alone, and a connection with one request, at 10 and 10,000 Services of ten endpoints, in modes ebpf,
nftables and iptables and with kube-proxy's iptables rules, against direct, of clients on the node and in a pod: in as many
blocks as it takes to tell 1 %, with what was looked up a moment ago still in the processor's caches, and with all of these
cold before each. Then have the kernel count how often each eBPF program runs and how long that takes. It takes
minutes, and root.`,
	Services: full.Services,
	Compares: true,
	Layouts:  experiment.LayoutNames(layouts),
	Rounds:   true,
	Exact:    true,
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, func(p profile) profile {
			p.Rounds, p.Cold, p.Counted = experiment.ExactRounds, 0, 0
			if o.Quick {
				p.Policies = exactPolicies
			}
			return p
		})
		if o.Services != nil {
			p.Services = o.Services
		}
		p.Rounds = o.RoundsOr(p.Rounds)
		return newTrial(ctx, b, o, p)
	},
}

// profile is how much is measured.
type profile struct {
	Name     string
	Services []int
	Rounds   int
	Block    time.Duration // of a closed loop with warm caches
	Warm     time.Duration // before it, not measured
	Cold     int           // operations of a block with cold caches
	Counted  int           // rounds in which programs' runs are counted
	Each     int           // exchanges of a block in which they are
	Policies int           // of the variant with some
}

var (
	quick = profile{"quick", []int{10, 10000}, 15, 20 * time.Millisecond, 4 * time.Millisecond, 4, 5, 500, policies}
	full  = profile{"full", []int{10, 10000}, 101, 30 * time.Millisecond, 5 * time.Millisecond, 6, 21, 2000, policies}
)

// trial is the experiment of that name at work.
type trial struct {
	bed      *testbed.Testbed
	out      *result.Writer
	traffic  *testbed.Traffic
	grid     *experiment.Grid
	profile  profile
	memory   *load.Memory    // that is walked to make caches cold
	variants []variant       // of mode ebpf, if that is measured
	nodes    []*testbed.Node // of variants
	floors   []floorArm      // if instructions are counted
	exact    bool            // instructions are counted
	kubelet  bool            // beside what kubelet leaves, too
}

var layouts = []classic.Layout{classic.IPTables19, classic.IPTables, classic.NFTables}

// compared returns the layouts to choose from: without a choice, a quick exact run has those that an aim is about,
// since others take an emulated processor long to write.
func compared(o experiment.Options) []classic.Layout {
	if o.Exact && o.Quick && o.Layouts == nil {
		return []classic.Layout{classic.IPTables19}
	}
	return layouts
}

// newTrial finds out what this machine can do.
func newTrial(ctx context.Context, b *testbed.Testbed, o experiment.Options, p profile) (experiment.Trial, error) {
	s, err := experiment.NewGrid(ctx, b, o, p.Services, 0, compared(o), experiment.ArmEBPF, experiment.ArmNFTables,
		"iptables")
	if err != nil {
		return nil, err
	}
	b.Grouped, b.WithPods = true, true
	c := &trial{bed: b, grid: s, profile: p, exact: o.Exact}
	if o.Exact {
		c.findFloors()
	}
	if slices.Contains(s.Modes, experiment.ArmEBPF) {
		if err := c.findVariants(ctx); err != nil {
			return nil, err
		}
	}
	return c, c.mapMemory()
}

// What is walked to make caches cold: twice the largest of them, within these bounds, of which the first also stands
// for one that the kernel doesn't list.
const (
	leastWalk = 16 << 20
	mostWalk  = 256 << 20
)

// mapMemory makes the memory that is walked.
func (r *trial) mapMemory() (err error) {
	if r.profile.Cold == 0 {
		return nil
	}
	size := min(max(2*load.LastCache(r.bed.CPUs.Load[0]), leastWalk), mostWalk)
	if r.memory, err = load.NewMemory(size); err == nil {
		r.bed.Defer(r.memory.Close)
	}
	return err
}

// ProfileName returns "quick" or "full".
func (r *trial) ProfileName() string { return r.profile.Name }

// arms are those that are compared.
func (r *trial) arms() []result.Arm {
	l := slices.Concat(experiment.Baselines(), experiment.ModeArms(r.grid.Modes), experiment.LayoutArms(r.grid.Layouts))
	if i := slices.IndexFunc(l, func(a result.Arm) bool { return a.ID == experiment.ArmEBPF }); i >= 0 {
		for _, v := range r.variants {
			i++
			l = slices.Insert(l, i, v.arm)
		}
	}
	for _, f := range r.floors {
		l = append(l, f.arm)
	}
	if r.kubelet {
		l = append(l, directKubelet)
	}
	return l
}

// Steps is the whole run in order.
func (r *trial) Steps(out *result.Writer) []experiment.Step {
	r.out, r.traffic = out, testbed.NewTraffic(r.bed, out)
	p, l := r.profile, &experiment.Plan{}
	r.grid.AddSteps(l, out)
	var others []*testbed.Pair
	for _, v := range r.variants {
		l.Add("starting "+v.arm.Title, time.Second/2+time.Duration(r.grid.Most())*300*time.Microsecond,
			func(ctx context.Context) error { return r.startVariant(ctx, v) })
		others = append(others, &testbed.Pair{Arm: v.arm.ID, Services: r.grid.Most()})
	}
	for _, f := range r.floors {
		l.Add("attaching "+f.arm.Title, 100*time.Millisecond,
			func(ctx context.Context) error { return r.addFloor(ctx, f.arm.ID, f.program) })
		others = append(others, &testbed.Pair{Arm: f.arm.ID})
	}
	if r.kubelet {
		l.Add("preparing "+directKubelet.Title, 100*time.Millisecond, func(ctx context.Context) error {
			_, err := r.addNode(ctx, armDirectKubelet, 0, true)
			return err
		})
		others = append(others, &testbed.Pair{Arm: armDirectKubelet})
	}
	l.Add("starting servers", 100*time.Millisecond, func(context.Context) error { return r.bed.Serve(out.Remark) })
	l.Times(p.Rounds, "traffic, round", r.grid.Planned(r.operations(), others...),
		func(ctx context.Context, i int) error { return r.traffic.Round(ctx, i, r.operations()) })
	if slices.Contains(r.grid.Modes, experiment.ArmEBPF) {
		l.Add("checking how packets went", 10*time.Millisecond, r.checkVariants)
	}
	if slices.Contains(r.grid.Modes, experiment.ArmEBPF) && p.Counted > 0 {
		l.Add("reading programs", time.Second, r.readPrograms)
		exchanges := time.Duration(len(p.Services)*len(exchanges)*p.Each) * 60 * time.Microsecond
		l.Times(p.Counted, "counting programs' runs, round", exchanges, r.countRuns)
	}
	return *l
}

// walked is about how many bytes a processor reads in a second.
const walked = 10 << 30

// operations are those of a round.
func (r *trial) operations() (l []testbed.Operation) {
	p := r.profile
	for _, op := range []load.Op{load.Connect, load.CRR} {
		for _, by := range []string{"", experiment.SuffixPod} {
			to := func(p *testbed.Pair) []netip.AddrPort {
				switch {
				case p.Services == 0:
					return testbed.DirectTargets(testbed.FewTargets)
				case isVariant(p.Arm) && by != experiment.SuffixPod:
					return nil
				}
				return []netip.AddrPort{testbed.ServiceEntry(experiment.ServiceAt(experiment.Middle, p.Services))}
			}
			l = append(l, testbed.Operation{Measure: op.String() + by, Targets: to, Load: r.warm(op, by),
				Planned: p.Warm + p.Block})
			if p.Cold > 0 {
				walks := time.Duration(p.Cold*2*r.memory.Size()) * time.Second / walked
				l = append(l, testbed.Operation{Measure: op.String() + by + experiment.SuffixCold, Targets: to,
					Load: r.cold(op, by), Planned: walks, Warmup: true})
			}
		}
	}
	return l
}

// by is a client where that says.
func (r *trial) by(who string, p *testbed.Pair, to []netip.AddrPort, warm time.Duration) load.Client {
	c := r.bed.Client(p, to, warm)
	if who == experiment.SuffixPod {
		c.Thread.Enter = p.EnterPod
	}
	return c
}

// warm is a closed loop for a block's time.
func (r *trial) warm(op load.Op, by string) testbed.Loader {
	return func(ctx context.Context, p *testbed.Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		s, err := r.by(by, p, to, r.profile.Warm).Run(ctx, op, r.profile.Block)
		return s, nil, err
	}
}

// cold is a closed loop of so many operations, each with cold caches.
func (r *trial) cold(op load.Op, by string) testbed.Loader {
	return func(ctx context.Context, p *testbed.Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		c := r.by(by, p, to, 0)
		c.Cold, c.Most = r.memory, r.profile.Cold
		s, err := c.Run(ctx, op, time.Minute)
		return s, nil, err
	}
}

// Design returns the experiment in words and numbers.
func (r *trial) Design() result.Design {
	p := r.profile
	d := result.Design{
		ID: "connect", Title: "connect() and a connection, to 1 %",
		Question: "What does a new connection through a Service cost in mode ebpf against the same connection without any " +
			"rule, against iptables and nftables, hot and cold; and what do the eBPF programs themselves take?",
		Vary: result.Axis{Param: "services", Title: fmt.Sprintf("Services × %d endpoints", testbed.Endpoints),
			Short: "Services"},
		Arms:     r.arms(),
		Baseline: testbed.ArmDirect, Again: testbed.ArmAgain, Margin: 0.01, Rounds: p.Rounds,
		Measures: r.measures(),
		Aims:     r.aims(), Answer: r.answer(),
		Method: r.method(),
		Missing: append(experiment.NotMeasured(r.grid.Cannot),
			"Other numbers of Services, HTTP, processor time: the experiment tigera has them."),
	}
	if p.Counted > 0 {
		d.Missing = append(d.Missing, "The run time of sendmsg6, which Linux calls for IPv6 addresses alone: there are none "+
			"here. Its instructions are counted.")
	}
	return d
}

// method returns what the design says of it.
func (r *trial) method() []string {
	p := r.profile
	block := fmt.Sprintf(" Client and server share one processor and have real-time priority; agents are kept on the "+
		"others. A block with warm caches is %v after %v that don't count.", p.Block, p.Warm)
	if p.Cold == 0 {
		block = ""
	}
	l := []string{
		fmt.Sprintf("Every arm has two network namespaces of its own, joined by a veth: a node, where the client runs, and "+
			"a far end, where the lab's server answers at ten addresses. Direct means: to those addresses in turn, through a "+
			"node without any rule and without conntrack. On the node is a pod besides, a third namespace behind a veth of "+
			"its own, whose packets the node forwards: a measure says where its client is. All arms' clients are in a cgroup "+
			"of their own, as a pod's are, which takes time, too. All arms stand at the same time, each connects to one "+
			"Service with those ten endpoints, in the middle of all. In each round every arm has a block of each operation, "+
			"in an order drawn for each, direct first and last.%s", block),
	}
	if p.Cold > 0 {
		l = append(l, fmt.Sprintf("With cold caches: just before the clock of each connect() starts, the client's thread "+
			"reads %d MiB of memory, twice the largest cache of its processor (or %d MiB, where the kernel tells of none; at "+
			"most %d), a line at a time, each half twice: read but once, it left more and more in the caches. Then neither "+
			"code nor data of client, server and kernel is in a cache, and few translations of addresses are; what the "+
			"processor has learned of branches it may still know. A block has %d operations, and a round begins with a block "+
			"that doesn't count.", r.memory.Size()>>20, leastWalk>>20, mostWalk>>20, p.Cold))
	}
	l = append(l, "kube-proxy's rules are written by the lab itself, in kube-proxy's layout and order, those of iptables "+
		"through iptables-legacy.")
	if p.Counted > 0 {
		l = append(l, fmt.Sprintf("Programs' runs are counted by the kernel's own statistics (BPF_ENABLE_STATS), which are "+
			"on in blocks of their own, after all others, since they cost time: what they show of a program that does nothing "+
			"and what they add to each run stands with them. A block is %d exchanges of one kind. IPv6's programs are asked "+
			"by IPv6 sockets for an IPv4 address (::ffff:a.b.c.d), which they look up in the same maps.", p.Each))
	}
	return l
}

// measures returns those of the profile.
func (r *trial) measures() []result.Measure {
	l := measures(r.profile.Cold > 0)
	if r.profile.Counted > 0 {
		l = append(l, programMeasures(r.profile)...)
	}
	return l
}

// answer returns which cells answer the question.
func (r *trial) answer() *result.Answer {
	most, many := testbed.ServiceParams(r.grid.Most()), experiment.Thousands(r.grid.Most())
	arms := []string{experiment.ArmEBPF, experiment.ArmNFTables, "iptables"}
	a := &result.Answer{Chart: "crr", Findings: []result.Finding{
		{Subject: "a connection with one request to one of " + many + " Services", Verb: "takes", Object: "time",
			Of: result.Ratio, Cells: experiment.Cells("crr", most, arms...)}}}
	if r.profile.Cold > 0 {
		a.Findings = append(a.Findings, result.Finding{Subject: "one with cold caches", Verb: "takes", Object: "time",
			Of: result.Ratio, Cells: experiment.Cells("crr"+experiment.SuffixCold, most, arms...)})
	}
	a.Findings = append(a.Findings, result.Finding{Tally: result.TallyAims})
	return a
}

// measures are those of connections.
func measures(cold bool) (l []result.Measure) {
	exchange := fmt.Sprintf("connect(2), %d bytes there, %d bytes back, close(2) with a reset", testbed.Sizes.Request,
		testbed.Sizes.Response)
	for _, by := range []struct{ id, title string }{{"", ""}, {experiment.SuffixPod, ", client in a pod"}} {
		for _, how := range []struct{ id, title, text string }{{"", "", ""},
			{experiment.SuffixCold, ", cold caches", "; each after a walk through more memory than caches hold"}} {
			if how.id != "" && !cold {
				continue
			}
			id, title := by.id+how.id, by.title+how.title
			l = append(l,
				result.Measure{ID: "connect" + id, Title: "connect() alone" + title, Unit: "µs", Stat: result.P50, Ratio: true,
					Text: "connect(2) from call to return; the connection is reset afterwards" + how.text},
				result.Measure{ID: "crr" + id, Title: "connect, request, close" + title, Unit: "µs", Stat: result.P50, Ratio: true,
					Text: exchange + how.text})
		}
	}
	first := experiment.LoadMeasure
	first.Detail = true
	return append(l, first)
}

// aims are those of clients on the node and in a pod, with warm and with cold caches.
func (r *trial) aims() (l []result.Aim) {
	if r.exact {
		return r.exactAims()
	}
	for _, by := range []string{"", experiment.SuffixPod} {
		l = append(l, experiment.ConnectionAims(r.grid.Modes, r.grid.Layouts, by)...)
		if r.profile.Cold > 0 {
			l = append(l, experiment.ConnectionAims(r.grid.Modes, r.grid.Layouts, by+experiment.SuffixCold)...)
		}
	}
	if slices.Contains(r.grid.Modes, experiment.ArmEBPF) && r.profile.Policies == policies {
		l = append(l, policiesAim)
	}
	return l
}
