package advise

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// Candidate is a mode, and the policy engine beside it, "" where no policy is enforced.
type Candidate struct {
	Mode   string `json:"mode"`
	Engine string `json:"engine,omitempty"`
}

// String returns "nftables", or "nftables (policies: ebpf)".
func (c Candidate) String() string {
	if c.Engine == "" {
		return c.Mode
	}
	return c.Mode + " (policies: " + c.Engine + ")"
}

// arm returns the candidate's name in a result.
func (c Candidate) arm() string {
	if c.Engine == "" {
		return c.Mode
	}
	return c.Mode + "+" + c.Engine
}

// Config is what is measured.
type Config struct {
	Cluster *Cluster
	Current Candidate     // what the others are compared with
	Time    time.Duration // that all of it may take, about
	// mode ebpf redirects no packet past the host stack: on the advised node hooks would see it there
	NoFastPath bool
}

// The measures.
const (
	connection = "crr"    // from a pod, by a Service
	roundTrip  = "rr"     // likewise, on a kept connection
	incoming   = "in"     // to a pod that policies select
	upkeep     = "upkeep" // processor time of one change of an endpoint
	memory     = "memory"
	start      = "load"
)

// least is how many rounds there are whatever the time: fewer say nothing.
const least = 6

// experiment returns the measurement as an experiment of the lab.
func (t *trial) experiment() experiment.Experiment {
	return experiment.Experiment{Name: "advise",
		Prepare: func(ctx context.Context, b *testbed.Testbed, _ experiment.Options) (experiment.Trial, error) {
			b.WithPods, b.Grouped, t.bed, t.begun = true, true, b, time.Now()
			return t, t.find(ctx)
		}}
}

func newTrial(c Config, quick bool) *trial {
	return &trial{Config: c, cannot: map[string]string{}, quick: quick}
}

// trial is a measurement at work.
type trial struct {
	Config
	bed     *testbed.Testbed
	out     *result.Writer
	traffic *testbed.Traffic
	begun   time.Time
	quick   bool
	list    []Candidate
	cannot  map[string]string // by arm: why it is not measured
	folder  *testbed.Folder
	nodes   []*testbed.Node
	changed int // changes of the endpoint so far
}

// enforced reports whether policies are measured.
func (t *trial) enforced() bool { return t.Cluster.Sizes.Policies > 0 }

// find finds out which candidates this machine can run, the current one first.
func (t *trial) find(ctx context.Context) error {
	modes, cannot, err := t.bed.FindModes(ctx, nil)
	if err != nil {
		return err
	}
	if c := t.Current.Mode; !slices.Contains(modes, c) {
		more, no, err := t.bed.FindModes(ctx, nil, c)
		if err != nil {
			return err
		}
		modes, cannot = append(modes, more...), append(cannot, no...)
	}
	for _, u := range cannot {
		t.cannot[u.Name] = u.Why
	}
	var engines []string
	if t.enforced() {
		can, cannot, err := t.bed.FindEngines(ctx)
		if err != nil {
			return err
		}
		for _, e := range can {
			engines = append(engines, e.Name)
		}
		for _, u := range cannot {
			t.cannot["policies by "+u.Name] = u.Why
		}
		if len(engines) == 0 {
			return fmt.Errorf("no policy engine is supported here: %v; leave policies out with --policy-mode Ignore", cannot)
		}
	}
	if t.list = candidates(modes, engines, t.Current); len(t.list) == 0 {
		return fmt.Errorf("no mode is supported here: %v", cannot)
	}
	return ctx.Err()
}

// candidates returns what is measured of modes and engines, the current one first: each mode with the engine of its
// name or else the first one, and eBPF for the one with nf_tables for the other.
func candidates(modes, engines []string, current Candidate) (l []Candidate) {
	add := func(c Candidate) {
		known := slices.Contains(modes, c.Mode) && (c.Engine == "" || slices.Contains(engines, c.Engine))
		if known && (c.Engine == "") == (len(engines) == 0) && !slices.Contains(l, c) {
			l = append(l, c)
		}
	}
	add(current)
	for _, m := range modes {
		switch {
		case len(engines) == 0:
			add(Candidate{Mode: m})
		case slices.Contains(engines, m):
			add(Candidate{m, m})
		default:
			add(Candidate{m, engines[0]})
		}
	}
	add(Candidate{"ebpf", "nftables"})
	add(Candidate{"nftables", "ebpf"})
	return l
}

// ProfileName returns "quick" or "full".
func (t *trial) ProfileName() string {
	if t.quick {
		return "quick"
	}
	return "full"
}

// How long blocks and changes take.
const (
	warm     = 4 * time.Millisecond
	block    = 25 * time.Millisecond
	perRound = 3 // changes
)

// pace is the time between two changes: so much that every candidate has written one before the next.
func (t *trial) pace() time.Duration {
	return 50*time.Millisecond + time.Duration(t.Cluster.Sizes.Services)*40*time.Microsecond
}

// Steps is the whole measurement in order.
func (t *trial) Steps(out *result.Writer) []experiment.Step {
	t.out, t.traffic = out, testbed.NewTraffic(t.bed, out)
	l, deadline := &experiment.Plan{}, t.begun.Add(t.Time)
	n := time.Duration(t.Cluster.Sizes.Services)
	l.Add("writing the cluster", time.Second+n*50*time.Microsecond, t.prepare)
	each := time.Second + n*500*time.Microsecond
	for _, c := range t.list {
		l.Add("starting "+c.String(), each, func(ctx context.Context) error { return t.start(ctx, c) })
	}
	l.Add("trying each", time.Second, t.serve)
	round := time.Duration(len(t.operations())*(len(t.list)+3))*(warm+block+5*time.Millisecond) + perRound*t.pace()
	rounds := max(least, int((t.Time-time.Since(t.begun)-each*time.Duration(len(t.list)))/round))
	l.Times(rounds, "measuring, round", round, func(ctx context.Context, i int) error {
		if i >= least && time.Now().After(deadline) {
			return nil
		}
		if err := t.traffic.Round(ctx, i, t.operations()); err != nil {
			return err
		}
		return t.change(ctx, i)
	})
	l.Add("reading memory", 0, t.memory)
	return *l
}

// prepare makes the baseline and the cluster's folder.
func (t *trial) prepare(ctx context.Context) error {
	for _, arm := range []string{testbed.ArmDirect, testbed.ArmAgain} {
		if _, err := t.bed.AddPair(ctx, arm, 0); err != nil {
			return err
		}
	}
	all := &testbed.Cluster{Services: max(1, t.Cluster.Sizes.Services), Objects: t.Cluster.Objects}
	var err error
	if t.folder, err = all.WriteTo(t.bed.Dir, "cluster", 1000); err != nil {
		return err
	}
	_, err = t.folder.Save(t.Cluster.change(0, 0))
	return err
}

// flags returns the agent's flags for a candidate.
func (t *trial) flags(c Candidate) (l []string) {
	if c.Engine != "" {
		l = append(l, "--policy-mode", "Enforce", "--policy-engine", c.Engine)
	}
	if t.NoFastPath && c.Mode == "ebpf" {
		l = append(l, "--ebpf-fast-path", "Never")
	}
	if slots := 4 * (t.Cluster.Sizes.Endpoints + t.Cluster.Sizes.Services); slots > mode.DefaultMapEntries {
		l = append(l, "--ebpf-map-entries", fmt.Sprint(slots)) // other modes take no notice
	}
	return l
}

// patience limits a candidate's start.
const patience = 45 * time.Second

// start starts an agent. One that can't start is left out, by name.
func (t *trial) start(ctx context.Context, c Candidate) error {
	limited, stop := context.WithTimeout(ctx, t.bed.Within(patience))
	defer stop()
	n, elapsed, err := t.bed.StartNode(limited, c.arm(), c.Mode, t.folder, t.flags(c)...)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return t.leave(ctx, c, err.Error())
	}
	t.nodes = append(t.nodes, n)
	return t.out.AddValue(result.Block{Arm: c.arm(), Params: n.Pair.Params, Wall: elapsed}, start, float64(elapsed))
}

// leave leaves a candidate out and ends its agent.
func (t *trial) leave(ctx context.Context, c Candidate, why string) error {
	t.cannot[c.arm()] = testbed.Brief(why)
	t.out.Remark(c.String() + " is not measured: " + testbed.Brief(why))
	t.nodes = slices.DeleteFunc(t.nodes, func(n *testbed.Node) bool { return n.Pair.Arm == c.arm() })
	for _, p := range t.bed.Pairs {
		if p.Arm == c.arm() && p.Agent != nil {
			p.Agent.End()
			p.Agent = nil
			return p.Enter(func() error { return mode.Clean(ctx) })
		}
	}
	return nil
}

// serve starts the servers and tries each candidate with a few connections. What carries none is left out.
func (t *trial) serve(ctx context.Context) error {
	if err := t.bed.Serve(t.out.Remark); err != nil {
		return err
	}
	for _, p := range t.bed.Pairs {
		if err := t.bed.ServePod(p, testbed.ServerPort, testbed.Sizes); err != nil {
			return err
		}
	}
	for _, c := range t.list {
		i := slices.IndexFunc(t.nodes, func(n *testbed.Node) bool { return n.Pair.Arm == c.arm() })
		if i < 0 {
			continue
		}
		for _, o := range t.operations() {
			p := t.nodes[i].Pair
			s, _, err := o.Load(ctx, p, o.Targets(p))
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err == nil && s.Ops > 0 {
				continue
			}
			if err == nil {
				err = fmt.Errorf("no %s comes through: %v", titles[o.Measure], s.Errors)
			}
			if err := t.leave(ctx, c, err.Error()); err != nil {
				return err
			}
			break
		}
	}
	if len(t.nodes) == 0 {
		return fmt.Errorf("no candidate carries packets here: %v", t.cannot)
	}
	return nil
}

// titles of measures.
var titles = map[string]string{connection: "new connection from a pod to a Service",
	roundTrip: "round trip on a kept connection", incoming: "new connection to a pod that policies select",
	upkeep: "processor time of one endpoint's change", memory: "agent's resident memory", start: "agent's start to ready"}

// operations are those of a round.
func (t *trial) operations() (l []testbed.Operation) {
	out := func(p *testbed.Pair) []netip.AddrPort {
		switch {
		case p.Services == 0:
			return testbed.DirectTargets(probes)
		case t.cannot[p.Arm] != "":
			return nil
		}
		return t.Cluster.entries
	}
	in := func(p *testbed.Pair) []netip.AddrPort {
		if t.cannot[p.Arm] != "" {
			return nil
		}
		return []netip.AddrPort{netip.AddrPortFrom(testbed.ServerPod, testbed.ServerPort)}
	}
	pod := func(op load.Op) testbed.Loader {
		return func(ctx context.Context, p *testbed.Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
			c := t.bed.Client(p, to, warm)
			c.Thread.Enter = p.EnterPod
			s, err := c.Run(ctx, op, block)
			return s, nil, err
		}
	}
	l = []testbed.Operation{{Measure: connection, Targets: out, Load: pod(load.CRR), Planned: warm + block},
		{Measure: roundTrip, Targets: out, Load: pod(load.RR), Planned: warm + block}}
	if t.enforced() {
		l = append(l, testbed.Operation{Measure: incoming, Targets: in, Load: t.bed.FarLoop(load.CRR, warm, block),
			Planned: warm + block})
	}
	return l
}

// change replaces an endpoint a few times and records what processor time that took each agent and its commands.
func (t *trial) change(ctx context.Context, round int) error {
	used := func() (l []time.Duration, err error) {
		for _, n := range t.nodes {
			d, err := n.Agent.UsedByAll()
			if err != nil {
				return nil, err
			}
			l = append(l, d)
		}
		return l, nil
	}
	before, err := used()
	if err != nil {
		return err
	}
	for range perRound {
		t.changed++
		if _, err := t.folder.Save(t.Cluster.change(t.changed, t.changed)); err != nil {
			return err
		}
		if err := testbed.Sleep(ctx, t.pace()); err != nil {
			return err
		}
	}
	after, err := used()
	if err != nil {
		return err
	}
	for i, n := range t.nodes {
		b := result.Block{Arm: n.Pair.Arm, Round: round, Params: n.Pair.Params, Wall: perRound * t.pace()}
		if err := t.out.AddValue(b, upkeep, float64(after[i]-before[i])/perRound); err != nil {
			return err
		}
	}
	return nil
}

// memory records what each agent holds.
func (t *trial) memory(context.Context) error {
	for _, n := range t.nodes {
		now, _, err := n.Agent.Memory()
		if err != nil {
			return err
		}
		b := result.Block{Arm: n.Pair.Arm, Params: n.Pair.Params}
		if err := t.out.AddValue(b, memory, float64(now)); err != nil {
			return err
		}
	}
	return nil
}

// margin is within what two candidates are the same.
const margin = 0.02

// Design returns the measurement in words and numbers.
func (t *trial) Design() result.Design {
	d := result.Design{ID: "advise", Title: "The mode and the policy engine for this cluster",
		Question: "What do connections cost and what does the upkeep cost on a node of this cluster, by mode and engine?",
		Vary:     result.Axis{Param: "services", Title: "Services of the cluster", Short: "Services"},
		Arms:     experiment.Baselines(), Baseline: testbed.ArmDirect, Again: testbed.ArmAgain, Margin: margin,
		Answer: &result.Answer{Chart: connection},
		Method: []string{"Each candidate has a node with a pod, and a far end with a server, in network namespaces of its " +
			"own; the node is served by this program's own agent with the cluster's objects. A pod like the one that the most " +
			"policies select connects to ten Services besides, and is connected to. In each round every candidate has a block " +
			"of each operation in an order drawn for each, direct first and last; then one endpoint of a Service is replaced " +
			"a few times, and the agents' processor time and that of their commands is read.",
			"The cluster: " + t.Cluster.Sizes.String() + "."},
		Missing: append(slices.Clone(t.Cluster.Remarks), "Clients outside the cluster, UDP, SCTP and IPv6; streams; "+
			"other nodes' pods through a tunnel.")}
	for _, c := range t.list {
		d.Arms = append(d.Arms, result.Arm{ID: c.arm(), Title: c.arm(), Style: experiment.Styles[c.Mode],
			Text: "`fairlead run --mode " + strings.Join(append([]string{c.Mode}, t.flags(c)...), " ") + "`"})
	}
	measure := func(id, unit, text string, m result.Measure) {
		m.ID, m.Title, m.Unit, m.Text = id, titles[id], unit, text
		d.Measures = append(d.Measures, m)
	}
	measure(connection, "µs", "connect, request, close by a reset", result.Measure{Stat: result.P50, Ratio: true})
	measure(roundTrip, "µs", "the same without connect and close", result.Measure{Stat: result.P50, Ratio: true})
	if t.enforced() {
		measure(incoming, "µs", "connect, request, close by a reset, from another node's pod",
			result.Measure{Stat: result.P50, Ratio: true})
	}
	measure(upkeep, "ms", "of the agent and the commands that it runs", result.Measure{Stat: result.Value, Mean: true})
	measure(memory, "MiB", "VmRSS", result.Measure{Stat: result.Value})
	measure(start, "ms", "with an empty kernel", result.Measure{Stat: result.Value})
	at, over := testbed.ServiceParams(max(1, t.Cluster.Sizes.Services)), t.Current.arm()
	for _, m := range d.Measures {
		if !m.Ratio {
			continue
		}
		f := result.Finding{Subject: "a " + m.Title, Verb: "takes", Object: "time", Of: result.Value,
			Over: &result.CellRef{Arm: over, Params: at}, Against: "one in mode " + t.Current.String()}
		for _, c := range t.list {
			if c != t.Current {
				f.Cells = append(f.Cells, result.CellRef{Measure: m.ID, Arm: c.arm(), Params: at})
			}
		}
		d.Answer.Findings = append(d.Answer.Findings, f)
	}
	return d
}
