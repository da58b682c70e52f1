// Package centurylink is the experiment that measures round trips and a stream's throughput through userspace, iptables
// and all other modes: the claims of "Consider … kube-proxy IPTables mode" (CenturyLink Labs, 2016).
package centurylink

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
	Name:    "centurylink",
	Repeats: "CenturyLink Labs, Consider … kube-proxy IPTables mode, 2016",
	Short:   "Round trips and throughput of userspace, iptables and all other modes",
	Long: `Measure what "Consider … kube-proxy IPTables mode" (CenturyLink Labs, 2016) showed: netperf's round trips on a kept
connection and with a connection for each (1,000 measurements in a row, over and over), in mode userspace against iptables
and all others, as histograms and as mean and standard deviation; and the throughput of one stream. Every single time goes
into samples.csv. It takes about a minute with --quick, ten without, and root.`,
	Compares: true,
	Rounds:   true,
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, nil)
		p.Rounds = o.RoundsOr(p.Rounds)
		return newTrial(ctx, b, o, p)
	},
}

// profile is how much is measured.
type profile struct {
	Name     string
	Services int
	Rounds   int
	Each     int           // measurements in a block
	Warm     time.Duration // before each block
	Stream   time.Duration // a block of the stream
}

var (
	quick = profile{"quick", 100, 21, 1000, 5 * time.Millisecond, 80 * time.Millisecond}
	full  = profile{"full", 100, 101, 1000, 20 * time.Millisecond, 500 * time.Millisecond}
)

// stream is how much of a stream is one operation.
var stream = load.Sizes{Request: 16 << 20, Response: 1}

// streamPort is where the second Service's endpoints take streams.
const streamPort = testbed.ServerPort + 1

// trial is the experiment of that name at work.
type trial struct {
	bed     *testbed.Testbed
	out     *result.Writer
	traffic *testbed.Traffic
	profile profile
	modes   []string
	cannot  []testbed.Unable
	folder  *testbed.Folder
}

func newTrial(ctx context.Context, b *testbed.Testbed, o experiment.Options, p profile) (experiment.Trial, error) {
	c := &trial{bed: b, profile: p}
	var err error
	if c.modes, c.cannot, err = b.FindModes(ctx, o.Modes); err != nil {
		return nil, err
	}
	two := []string{"iptables", "userspace"} // which the article compares: they come first
	slices.SortStableFunc(c.modes, func(a, b string) int { return rank(two, a) - rank(two, b) })
	return c, nil
}

// rank is where a word stands in a list, behind all of it if nowhere.
func rank(l []string, s string) int {
	if i := slices.Index(l, s); i >= 0 {
		return i
	}
	return len(l)
}

// ProfileName returns "quick" or "full".
func (r *trial) ProfileName() string { return r.profile.Name }

// Steps is the whole run in order.
func (r *trial) Steps(out *result.Writer) []experiment.Step {
	r.out, r.traffic = out, testbed.NewTraffic(r.bed, out)
	p, l := r.profile, &experiment.Plan{}
	l.Add("writing manifests", time.Second, r.prepare)
	for _, m := range r.modes {
		l.Add("starting "+m, time.Second, func(ctx context.Context) error {
			_, _, err := r.bed.StartNode(ctx, m, m, r.folder)
			return err
		})
	}
	l.Add("starting servers", 100*time.Millisecond, r.serve)
	blocks := time.Duration(3+len(r.modes)) * (time.Duration(p.Each)*150*time.Microsecond + p.Stream + 3*p.Warm)
	l.Times(p.Rounds, "traffic, round", blocks, func(ctx context.Context,
		i int) error {
		return r.traffic.Round(ctx, i, r.operations())
	})
	return *l
}

// prepare makes the baselines' namespaces and the manifests: the first Service answers single requests, the second
// streams.
func (r *trial) prepare(ctx context.Context) (err error) {
	for _, arm := range []string{testbed.ArmDirect, testbed.ArmAgain} {
		if _, err := r.bed.AddPair(ctx, arm, 0); err != nil {
			return err
		}
	}
	c := testbed.NewCluster(r.profile.Services, 0, 1)
	port := int32(streamPort)
	c.Slice(1).Ports[0].Port = &port
	r.folder, err = c.Write(r.bed.Dir, 1000)
	return err
}

// serve starts two servers in every pair.
func (r *trial) serve(context.Context) error {
	if err := r.bed.Isolate(r.out.Remark); err != nil {
		return err
	}
	for _, p := range r.bed.Pairs {
		if err := p.Serve(r.bed.ServerThread(p.Far), testbed.Everywhere, testbed.OneByte, 1); err != nil {
			return err
		}
		if err := p.Serve(r.bed.ServerThread(p.Far), netip.AddrPortFrom(testbed.Everywhere.Addr(), streamPort), stream,
			1); err != nil {
			return err
		}
	}
	return nil
}

// operations are those of a round.
func (r *trial) operations() []testbed.Operation {
	p := r.profile
	to := func(service int, port uint16) func(*testbed.Pair) []netip.AddrPort {
		return func(a *testbed.Pair) []netip.AddrPort {
			if a.Services == 0 {
				return []netip.AddrPort{netip.AddrPortFrom(testbed.ServerAddr(0), port)}
			}
			return []netip.AddrPort{testbed.ServiceEntry(service)}
		}
	}
	each := func(op load.Op) testbed.Loader {
		return func(ctx context.Context, a *testbed.Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
			c := r.bed.Client(a, to, p.Warm)
			c.Sizes, c.Most, c.Record = testbed.OneByte, p.Each, true
			s, err := c.Run(ctx, op, time.Minute)
			return s, nil, err
		}
	}
	return []testbed.Operation{
		{Measure: "rr", Targets: to(0, testbed.ServerPort), Load: each(load.RR)},
		{Measure: "crr", Targets: to(0, testbed.ServerPort), Load: each(load.CRR)},
		{Measure: "stream", Targets: to(1, streamPort), Bytes: stream.Request,
			Load: func(ctx context.Context, a *testbed.Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
				c := r.bed.Client(a, to, p.Warm)
				c.Sizes = stream
				s, err := c.Run(ctx, load.Stream, p.Stream)
				return s, nil, err
			}},
	}
}

const byCenturyLink = "CenturyLink 2016"

// Design returns the experiment in words and numbers.
func (r *trial) Design() result.Design {
	p := r.profile
	d := result.Design{
		ID: "centurylink", Title: "userspace against iptables, and every other mode",
		Question: "How long do netperf's round trips take through kube-proxy's first two ways of working, userspace and " +
			"iptables, and through the others? Does iptables still beat userspace, as in “Consider … kube-proxy " +
			"IPTables mode” (CenturyLink, 2016)?",
		Vary: result.Axis{Param: "services", Title: fmt.Sprintf("Services × %d endpoints", testbed.Endpoints),
			Short: "Services"},
		Arms:     slices.Concat(experiment.Baselines(), experiment.ModeArms(r.modes)),
		Baseline: testbed.ArmDirect, Again: testbed.ArmAgain, Margin: 0.02, Rounds: p.Rounds,
		Measures: []result.Measure{
			{ID: "rr", Title: "round trip on a kept connection", Unit: "µs", Stat: result.P50, Ratio: true,
				Text: fmt.Sprintf("netperf's TCP_RR: one byte there and one back, %s in a row", experiment.Thousands(p.Each))},
			{ID: "rr-mean", Detail: true, From: "rr", Title: "its mean", Unit: "µs", Stat: result.Mean, Ratio: true,
				Text: "the mean of a block's, which slow ones move"},
			{ID: "rr-jitter", Detail: true, From: "rr", Title: "its standard deviation", Unit: "µs", Stat: result.StdDev,
				Text: "of the times of a block, which a few slow ones make"},
			{ID: "crr", Title: "round trip with a new connection", Unit: "µs", Stat: result.P50, Ratio: true,
				Text: fmt.Sprintf("netperf's TCP_CRR: connect, one byte there and one back, close with a reset, %s in a row",
					experiment.Thousands(p.Each))},
			{ID: "crr-mean", Detail: true, From: "crr", Title: "its mean", Unit: "µs", Stat: result.Mean, Ratio: true,
				Text: "the mean of a block's"},
			{ID: "stream", Title: "throughput of a stream", Unit: "Gbit/s", Stat: result.Rate("bytes"), Ratio: true,
				Text: fmt.Sprintf("one connection; every %d MiB are answered by a byte", stream.Request>>20)},
			{ID: "stream-spent", From: "stream", Title: "processor time of a stream", Unit: "ns/B", Stat: result.Spent("bytes"),
				Ratio: true, Margin: 0.05, Text: "of client, server and agent, for each byte"},
		},
		Method: []string{
			fmt.Sprintf("Every arm has two network namespaces of its own, joined by a veth: a node with %s Services of %d "+
				"endpoints, where the client runs, and a far end with the server. Client and server share one processor and have "+
				"real-time priority; the agents have the others. For userspace that means that each message wakes a thread on "+
				"another processor, twice in each direction, as on a node with processors to spare; and that a stream is copied "+
				"by a processor of its own.", experiment.Thousands(p.Services), testbed.Endpoints),
			"TCP is controlled as the machine says (net.ipv4.tcp_congestion_control, in manifest.json): where that is BBR, " +
				"whose timers pace every packet, a stream carries half of what it does with Cubic, and userspace's " +
				"connections to endpoints have Cubic.",
			"The article's machines were two, with a network between them, of 2016; its charts hold no numbers. What is " +
				"compared is which mode is faster, and the shape.",
		},
		Missing: append(experiment.NotMeasured(r.cannot),
			"Bare metal against virtual machines: run this on both, and compare the two folders with `fairlead lab compare`.",
			"A network between two machines, which would add its own time to every round trip and make ratios smaller."),
		Pictures: []result.Picture{
			{ID: "rr-overlay", Kind: result.Overlay, Title: "Round trip on a kept connection: userspace red, iptables blue",
				Measures: []string{"rr"}, Arms: []string{"iptables", "userspace"}},
			{ID: "rr-deviation", Kind: result.Deviation, Title: "Round trip on a kept connection: mean and standard deviation",
				Measures: []string{"rr"}},
			{ID: "crr-overlay", Kind: result.Overlay, Title: "Round trip with a new connection: userspace red, iptables blue",
				Measures: []string{"crr"}, Arms: []string{"iptables", "userspace"}},
			{ID: "crr-deviation", Kind: result.Deviation, Title: "Round trip with a new connection: mean and standard deviation",
				Measures: []string{"crr"}},
		},
	}
	d.Aims, d.Answer = r.aims(), r.answer()
	return d
}

// answer is which cells answer the question.
func (r *trial) answer() *result.Answer {
	at := testbed.ServiceParams(r.profile.Services)
	versus := func(measure, subject, verb, object string) result.Finding {
		return result.Finding{Subject: subject, Verb: verb, Object: object, Against: "userspace", Of: result.Value,
			Cells: experiment.Cells(measure, at, "iptables"), Over: &result.CellRef{Arm: "userspace", Params: at}}
	}
	return &result.Answer{Chart: "rr-overlay", Findings: []result.Finding{
		versus("rr", "a round trip on a kept connection", "takes", "time"),
		versus("crr", "one with a new connection for each", "takes", "time"),
		versus("stream", "a stream", "carries", "bytes a second"),
	}}
}

// aims are the article's claims and ours.
func (r *trial) aims() (l []result.Aim) {
	at := testbed.ServiceParams(r.profile.Services)
	both := slices.Contains(r.modes, "iptables") && slices.Contains(r.modes, "userspace")
	for _, c := range []struct{ id, text, measure string }{
		{"C10, request", "iptables takes less time than userspace: a round trip on a kept connection", "rr"},
		{"C10, request's mean", "the same of the mean, as the article has it", "rr-mean"},
		{"C10, connection", "the same with a new connection for each", "crr"},
	} {
		l = append(l, result.Aim{ID: c.id, Text: c.text, Claim: byCenturyLink, Measure: c.measure, Arm: "iptables",
			Params: at, Of: result.Value, Over: &result.CellRef{Arm: "userspace", Params: at}, Bound: 1})
	}
	l = append(l, result.Aim{ID: "C10, stream", Text: "and carries more: the throughput of a stream", Claim: byCenturyLink,
		Measure: "stream", Arm: "iptables", Params: at, Of: result.Value, Over: &result.CellRef{Arm: "userspace", Params: at},
		Bound: 1, Least: true})
	for i := range l {
		if !both {
			l[i].Cannot = "it wants the modes iptables and userspace"
		}
	}
	l = append(l,
		result.Aim{ID: "C11, latency", Text: "a virtual machine has three times the latency of bare metal, ±25 %: the " +
			"mean, direct", Claim: byCenturyLink, Measure: "rr-mean", Arm: testbed.ArmDirect, Of: result.Value,
			Across: result.Hypervisor, Bound: 3, Margin: 0.25},
		result.Aim{ID: "C11, jitter", Text: "and more jitter: the standard deviation, direct", Claim: byCenturyLink,
			Measure: "rr-jitter", Arm: testbed.ArmDirect, Of: result.Value, Across: result.Hypervisor, Bound: 1, Least: true})
	if slices.Contains(r.modes, "userspace") {
		l = append(l, result.Aim{ID: "stream", Text: "userspace: a stream has ≥ 0.85 × direct's throughput (0.36 × in 2015)",
			Measure: "stream", Arm: "userspace", Params: at, Of: result.Ratio, Bound: 0.85, Least: true})
	}
	return l
}
