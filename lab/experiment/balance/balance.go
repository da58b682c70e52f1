// Package balance is the experiment that counts how evenly each scheduler spreads connections, and whose clients a hash
// moves when a backend goes.
package balance

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/dataplane/maglev"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/service"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:  "balance",
	Short: "How evenly each scheduler spreads connections, and what Maglev moves",
	Long: `Count which of ten backends answers, for every scheduler of every mode that this kernel can do: 100,000 connections
each, from as many addresses, tested against equal shares (chi-square). For schedulers that hash the client, count how many
clients are moved whose own backend stayed when another one goes. It takes about a minute with --quick, a quarter of an hour
without, and root.`,
	Compares: true,
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, nil)
		return newTrial(ctx, b, o, p)
	},
}

// profile is how much is counted.
type profile struct {
	Name  string
	Each  int // connections of a block
	Parts int // blocks for each scheduler
}

var (
	quick = profile{"quick", 1000, 5}
	full  = profile{"full", 10000, 10}
)

// clients are the addresses that connections come from, one after the other.
var clients = netip.MustParsePrefix("172.20.0.0/15")

// trial is the experiment of that name at work.
type trial struct {
	bed     *testbed.Testbed
	out     *result.Writer
	profile profile
	modes   []string
	cannot  []testbed.Unable
	nodes   []*testbed.Node
}

func newTrial(ctx context.Context, b *testbed.Testbed, o experiment.Options, p profile) (experiment.Trial, error) {
	e := &trial{bed: b, profile: p}
	var err error
	e.modes, e.cannot, err = b.FindModes(ctx, o.Modes)
	return e, err
}

// ProfileName returns "quick" or "full".
func (r *trial) ProfileName() string { return r.profile.Name }

// schedulers of a mode: each has a Service of its own, in their order.
func schedulers(name string) []model.Scheduler {
	m, err := mode.Of(name)
	if err != nil {
		return nil
	}
	return m.Schedulers.List()
}

// Steps is the whole run in order.
func (r *trial) Steps(out *result.Writer) []experiment.Step {
	r.out = out
	p, l := r.profile, &experiment.Plan{}
	for _, m := range r.modes {
		l.Add("starting "+m, time.Second, func(ctx context.Context) error { return r.start(ctx, m) })
	}
	l.Add("starting servers", 100*time.Millisecond, r.serve)
	for i, m := range r.modes {
		for k, s := range schedulers(m) {
			l.Add(fmt.Sprintf("connecting: %s, %s", m, s), time.Duration(p.Each*p.Parts)*150*time.Microsecond,
				func(ctx context.Context) error { return r.spread(ctx, r.nodes[i], k, s) })
		}
	}
	for i, m := range r.modes {
		for k, s := range schedulers(m) {
			if s != model.SourceHash && s != model.Maglev {
				continue
			}
			l.Add(fmt.Sprintf("taking a backend away: %s, %s", m, s), time.Duration(2*p.Each)*150*time.Microsecond,
				func(ctx context.Context) error { return r.disrupt(ctx, r.nodes[i], k, s) })
		}
	}
	l.Add("computing Maglev's table", 100*time.Millisecond, r.table)
	return *l
}

// start starts an agent with a Service for each of its mode's schedulers.
func (r *trial) start(ctx context.Context, mode string) error {
	list := schedulers(mode)
	var all []int
	for i := range list {
		all = append(all, i)
	}
	c := testbed.NewCluster(len(list), all...)
	for i, s := range list {
		c.Objects[1+2*i].(*corev1.Service).Annotations = map[string]string{resolve.SchedulerAnnotation: s.String()}
	}
	f, err := c.WriteTo(r.bed.Dir, mode, 1)
	if err != nil {
		return err
	}
	n, _, err := r.bed.StartNode(ctx, mode, mode, f, "--maglev-table-size", fmt.Sprint(maglev.Size))
	if err != nil {
		return err
	}
	r.nodes = append(r.nodes, n)
	return n.Pair.Own(clients)
}

// serve starts a server for each backend in every pair.
func (r *trial) serve(context.Context) error {
	if err := r.bed.Isolate(r.out.Remark); err != nil {
		return err
	}
	for _, p := range r.bed.Pairs {
		for i := range testbed.Endpoints {
			if err := p.Serve(r.bed.ServerThread(p.Far), netip.AddrPortFrom(testbed.ServerAddr(i), testbed.ServerPort),
				testbed.Sizes, byte(1+i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// connect makes connections to a Service from the clients from one on, one each.
func (r *trial) connect(ctx context.Context, n *testbed.Node, service, from, count int) (load.Sample, error) {
	c := r.bed.Client(n.Pair, []netip.AddrPort{testbed.ServiceEntry(service)}, 0)
	c.Most, c.Record = count, true
	a := clients.Addr().As4()
	first := uint32(a[0])<<24 | uint32(a[1])<<16 | uint32(a[2])<<8 | uint32(a[3])
	for i := range count {
		v := first + uint32(1+from+i)
		c.Sources = append(c.Sources, netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)}))
	}
	return c.Run(ctx, load.CRR, 10*time.Minute)
}

// spread counts which backends answer.
func (r *trial) spread(ctx context.Context, n *testbed.Node, service int, s model.Scheduler) error {
	p := r.profile
	for i := range p.Parts {
		sample, err := r.connect(ctx, n, service, i*p.Each, p.Each)
		if err != nil {
			return err
		}
		b, err := result.Block{Measure: "spread", Arm: n.Mode, Round: i, Params: scheduled(s)}.Timed(sample)
		if err != nil {
			return err
		}
		b.Counters["servers"] = testbed.Endpoints
		if err := r.out.Add(b); err != nil {
			return err
		}
	}
	return nil
}

func scheduled(s model.Scheduler) result.Params {
	return result.Params{"scheduler": s.String()}
}

// disrupt takes a backend away and counts the clients that are moved though theirs stayed.
func (r *trial) disrupt(ctx context.Context, n *testbed.Node, service int, s model.Scheduler) error {
	count := r.profile.Each
	before, err := r.connect(ctx, n, service, 0, count)
	if err != nil {
		return err
	}
	less := n.Folder.Cluster.Slice(service).DeepCopy()
	less.Endpoints = less.Endpoints[:testbed.Endpoints-1]
	save, err := n.Folder.Prepare(service, less)
	if err == nil {
		err = n.Change(ctx, save)
	}
	if err != nil {
		return fmt.Errorf("take a backend away: %w", err)
	}
	after, err := r.connect(ctx, n, service, 0, count)
	if err != nil {
		return err
	}
	if before.Failed()+after.Failed() > 0 {
		return fmt.Errorf("connections failed: %v, %v", before.Errors, after.Errors)
	}
	moved, stayed := 0, 0
	for i, id := range before.Said {
		if id == testbed.Endpoints { // the one that went
			continue
		}
		stayed++
		if after.Said[i] != id {
			moved++
		}
	}
	b := result.Block{Arm: n.Mode, Params: scheduled(s),
		Counters: map[string]float64{"clients": float64(stayed), "moved": float64(moved)}}
	return r.out.AddValue(b, "moved", float64(moved)/float64(max(1, stayed)))
}

// table computes what the table itself promises, without a packet: how far its fullest backend is above the mean, and
// how many entries of other backends change when one goes.
func (r *trial) table(context.Context) error {
	var backends []model.Backend
	for i := range testbed.Endpoints {
		backends = append(backends, model.Backend{Addr: netip.AddrPortFrom(testbed.ServerAddr(i), testbed.ServerPort)})
	}
	begin := time.Now()
	before := maglev.Table(backends, maglev.Size)
	elapsed := time.Since(begin)
	after := maglev.Table(backends[:testbed.Endpoints-1], maglev.Size)
	counts := map[uint16]int{}
	moved := 0
	for i, b := range before {
		counts[b]++
		if b != testbed.Endpoints-1 && after[i] != b {
			moved++
		}
	}
	most := slices.Max(slices.Collect(maps.Values(counts)))
	at := scheduled(model.Maglev)
	for _, m := range []struct {
		id    string
		value float64
	}{{"table-imbalance", float64(most)*testbed.Endpoints/float64(maglev.Size) - 1},
		{"table-moved", float64(moved) / float64(maglev.Size)}, {"table-time", float64(elapsed)}} {
		if err := r.out.AddValue(result.Block{Arm: armTable, Params: at}, m.id, m.value); err != nil {
			return err
		}
	}
	return nil
}

// armTable is Maglev's table, computed.
const armTable = "table"

// Design returns the experiment in words and numbers.
func (r *trial) Design() result.Design {
	p := r.profile
	n := experiment.Thousands(p.Each * p.Parts)
	return result.Design{
		ID: "balance", Title: "How evenly connections are spread",
		Question: fmt.Sprintf("Which of %d backends answers a connection, in every mode and with every scheduler that it "+
			"has, and which clients does a hash move when a backend goes?", testbed.Endpoints),
		Vary: result.Axis{Param: "scheduler", Title: "scheduler", Short: "by scheduler"},
		Arms: append(experiment.ModeArms(r.modes), result.Arm{ID: armTable, Title: "Maglev's table, computed",
			Text: "the table that modes fill, of ten backends, without a packet"}),
		Rounds: p.Parts,
		Measures: []result.Measure{
			{ID: "spread", Detail: true, Title: "fullest backend above the mean", Unit: "%", Stat: result.Imbalance,
				Text: fmt.Sprintf("median over %d blocks of %s connections, each from an address of its own; chance alone "+
					"makes some", p.Parts, experiment.Thousands(p.Each))},
			{ID: "moved", Title: "clients moved though their backend stayed", Unit: "%", Stat: result.Value, Exact: true,
				Text: fmt.Sprintf("of %s clients, after one of %d backends went", experiment.Thousands(p.Each), testbed.Endpoints)},
			{ID: "table-imbalance", Title: "Maglev's table: fullest backend above the mean", Unit: "%", Stat: result.Value,
				Exact: true, Text: fmt.Sprintf("computed, %d entries", maglev.Size)},
			{ID: "table-moved", Title: "Maglev's table: entries of other backends that change when one goes", Unit: "%",
				Stat: result.Value, Exact: true, Text: "computed"},
			{ID: "table-time", Title: "Maglev's table: time to build", Unit: "ms", Stat: result.Value, Text: "once"},
		},
		Aims: r.aims(n), Answer: r.answer(n),
		Method: []string{
			fmt.Sprintf("In each mode there is a Service for each of its schedulers, asked for by the annotation %s, with the "+
				"same %d backends of equal weight, each a server of its own that says who it is. %s connections are made to each, "+
				"one after the other, each from another address of the node's, so that a hash of the client has as many clients. "+
				"Maglev's tables have %s entries (run --maglev-table-size), but IPVS's.", resolve.SchedulerAnnotation,
				testbed.Endpoints, n, experiment.Thousands(maglev.Size)),
			"The test is Pearson's chi-square of all counts against equal shares. Random draws and hashes should look like " +
				"chance (p is anywhere between 0 and 1, below 0.001 once in a thousand); taking turns should be more even than " +
				"chance (p near 1). Schedulers that count connections see one at a time here, and one that hashes the " +
				"destination has but one: these are shown and not judged.",
		},
		Missing: append(experiment.NotMeasured(r.cannot), "Weights, other than equal ones.",
			"Schedulers under many connections at once.", "Clients outside the node."),
		Pictures: []result.Picture{{ID: "shares", Kind: result.Shares, Title: "Who answered: the shares of ten backends",
			Measures: []string{"spread"}, Alone: true}},
	}
}

// answer is which cells answer the question.
func (r *trial) answer(n string) *result.Answer {
	return &result.Answer{Chart: "shares", Findings: []result.Finding{
		{Subject: "equal shares, and few clients moved", Tally: result.TallyAims},
		{Subject: "of " + n + " connections to backends drawn at random, the fullest one has", Object: "more than the mean",
			Of: result.Value, Cells: experiment.Cells("spread", scheduled(model.Random), r.modes...)},
		{Subject: fmt.Sprintf("when one of %d backends goes, Maglev moves", testbed.Endpoints), Of: result.Value,
			Object: "of the clients whose backend stays", Cells: experiment.Cells("moved", scheduled(model.Maglev), r.modes...)},
	}}
}

// judged are the schedulers whose shares must look equal, or be so.
var judged = []model.Scheduler{model.Random, model.RoundRobin, model.WeightedRoundRobin, model.SourceHash, model.Maglev}

func (r *trial) aims(n string) (l []result.Aim) {
	const least = 0.001
	for _, m := range r.modes {
		for _, s := range schedulers(m) {
			if !slices.Contains(judged, s) {
				continue
			}
			a := result.Aim{ID: m + ", " + s.String(), Text: fmt.Sprintf("equal shares of %s connections: p ≥ %g", n, least),
				Measure: "spread", Arm: m, Params: scheduled(s), Of: result.Fit, Bound: least, Least: true}
			if m == "iptables" && s == model.Random {
				a.ID, a.Text, a.Claim = "A4", "iptables draws backends at random, each as likely: "+a.Text, experiment.ByTigera
			}
			l = append(l, a)
			if s == model.Maglev {
				l = append(l, result.Aim{ID: m + ", moved", Text: "Maglev moves ≤ 0.5 % of the clients whose backend stays",
					Measure: "moved", Arm: m, Params: scheduled(s), Of: result.Value, Bound: 0.005})
			}
		}
	}
	at := scheduled(model.Maglev)
	return append(l,
		result.Aim{ID: "table, imbalance", Text: "Maglev's table: no backend has more than 1 % above the mean",
			Measure: "table-imbalance", Arm: armTable, Params: at, Of: result.Value, Bound: 0.01},
		result.Aim{ID: "table, moved", Text: "Maglev's table: ≤ 0.5 % of all entries are other backends' and change " +
			"when one goes", Measure: "table-moved", Arm: armTable, Params: at, Of: result.Value, Bound: 0.005})
}
