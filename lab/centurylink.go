package lab

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

var centurylinkExperiment = Experiment{
	Name:  "centurylink",
	Short: "Round trips and throughput of userspace, iptables and all other modes",
	Long: `Measure what "Consider … kube-proxy IPTables mode" (CenturyLink Labs, 2016) showed: netperf's round trips on a kept
connection and with a connection for each (1,000 measurements in a row, over and over), in mode userspace against iptables
and all others, as histograms and as mean and standard deviation; and the throughput of one stream. Every single time goes
into samples.csv. It takes about a minute with --quick, ten without, and root.`,
	Compares: true,
	Rounds:   true,
	begin: func(ctx context.Context, r *run) (work, error) {
		p := fullCenturylink
		if r.Quick {
			p = quickCenturylink
		}
		p.Rounds = r.rounds(p.Rounds)
		return newCenturylink(ctx, r, p)
	},
}

// centurylinkProfile says how much is measured.
type centurylinkProfile struct {
	Name     string
	Services int
	Rounds   int
	Each     int           // measurements in a block
	Warm     time.Duration // before each block
	Stream   time.Duration // a block of the stream
}

var (
	quickCenturylink = centurylinkProfile{"quick", 100, 21, 1000, 5 * time.Millisecond, 80 * time.Millisecond}
	fullCenturylink  = centurylinkProfile{"full", 100, 101, 1000, 20 * time.Millisecond, 500 * time.Millisecond}
)

// netperf's sizes of a request and its answer, and how much of a stream is one operation.
var (
	single = load.Sizes{Request: 1, Response: 1}
	stream = load.Sizes{Request: 16 << 20, Response: 1}
)

// streamPort is where the second Service's endpoints take streams.
const streamPort = serverPort + 1

// centurylink is the experiment of that name at work.
type centurylink struct {
	*run
	Profile centurylinkProfile
	modes   []string
	cannot  []unable
	folder  *folder
}

func newCenturylink(ctx context.Context, r *run, p centurylinkProfile) (work, error) {
	c := &centurylink{run: r, Profile: p}
	var err error
	if c.modes, c.cannot, err = r.findModes(ctx); err != nil {
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

func (r *centurylink) profile() string { return r.Profile.Name }

func (r *centurylink) steps() []step {
	p, l := r.Profile, &plan{}
	l.add("writing manifests", time.Second, r.prepare)
	for _, m := range r.modes {
		l.add("starting "+m, time.Second, func(ctx context.Context) error {
			_, _, err := r.staff(ctx, m, m, r.folder)
			return err
		})
	}
	l.add("starting servers", 100*time.Millisecond, r.serve)
	blocks := time.Duration(3+len(r.modes)) * (time.Duration(p.Each)*150*time.Microsecond + p.Stream + 3*p.Warm)
	l.times(p.Rounds, "traffic, round", blocks, func(ctx context.Context, i int) error { return r.round(ctx, i, r.operations()) })
	return *l
}

// prepare makes the baselines' namespaces and the manifests: the first Service answers single requests, the second streams.
func (r *centurylink) prepare(ctx context.Context) (err error) {
	for _, arm := range []string{armDirect, armAgain} {
		if _, err := r.pair(ctx, arm, 0); err != nil {
			return err
		}
	}
	c := newCluster(r.Profile.Services, 0, 1)
	port := int32(streamPort)
	c.slice(1).Ports[0].Port = &port
	r.folder, err = c.write(r.tmp, 1000)
	return err
}

// serve starts two servers in every pair.
func (r *centurylink) serve(context.Context) error {
	if err := r.apart(); err != nil {
		return err
	}
	for _, p := range r.pairs {
		if err := p.serve(r.far(p.far), everywhere, single, 1); err != nil {
			return err
		}
		if err := p.serve(r.far(p.far), netip.AddrPortFrom(everywhere.Addr(), streamPort), stream, 1); err != nil {
			return err
		}
	}
	return nil
}

// operations are those of a round.
func (r *centurylink) operations() []operation {
	p := r.Profile
	to := func(service int, port uint16) func(*pair) []netip.AddrPort {
		return func(a *pair) []netip.AddrPort {
			if a.services == 0 {
				return []netip.AddrPort{netip.AddrPortFrom(serverAddr(0), port)}
			}
			return []netip.AddrPort{entry(service)}
		}
	}
	each := func(op load.Op) loader {
		return func(ctx context.Context, a *pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
			c := r.client(a, to, p.Warm)
			c.Sizes, c.Most, c.Keep = single, p.Each, true
			s, err := c.Run(ctx, op, time.Minute)
			return s, nil, err
		}
	}
	return []operation{
		{measure: "rr", targets: to(0, serverPort), load: each(load.RR)},
		{measure: "crr", targets: to(0, serverPort), load: each(load.CRR)},
		{measure: "stream", targets: to(1, streamPort), bytes: stream.Request, load: func(ctx context.Context, a *pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
			c := r.client(a, to, p.Warm)
			c.Sizes = stream
			s, err := c.Run(ctx, load.Stream, p.Stream)
			return s, nil, err
		}},
	}
}

const byCenturyLink = "CenturyLink 2016"

func (r *centurylink) design() result.Design {
	p := r.Profile
	d := result.Design{
		ID: "centurylink", Title: "userspace against iptables, and every other mode",
		Question: "How long do netperf's round trips take through kube-proxy's first two ways of working, userspace and iptables, and through the others? " +
			"Does iptables still beat userspace, as in “Consider … kube-proxy IPTables mode” (CenturyLink, 2016)?",
		Vary:     result.Axis{Param: "services", Title: fmt.Sprintf("Services × %d endpoints", endpoints), Short: "Services"},
		Arms:     slices.Concat(baselines(), modeArms(r.modes)),
		Baseline: armDirect, Again: armAgain, Margin: 0.02, Rounds: p.Rounds,
		Measures: []result.Measure{
			{ID: "rr", Title: "round trip on a kept connection", Unit: "µs", Stat: "p50", Ratio: true, Text: fmt.Sprintf("netperf's TCP_RR: one byte there and one back, %s in a row", thousands(p.Each))},
			{ID: "rr-mean", Detail: true, From: "rr", Title: "its mean", Unit: "µs", Stat: "mean", Ratio: true, Text: "the mean of a block's, which slow ones move"},
			{ID: "crr", Title: "round trip with a new connection", Unit: "µs", Stat: "p50", Ratio: true, Text: fmt.Sprintf("netperf's TCP_CRR: connect, one byte there and one back, close with a reset, %s in a row", thousands(p.Each))},
			{ID: "crr-mean", Detail: true, From: "crr", Title: "its mean", Unit: "µs", Stat: "mean", Ratio: true, Text: "the mean of a block's"},
			{ID: "stream", Title: "throughput of a stream", Unit: "Gbit/s", Stat: "rate:bytes", Ratio: true, Text: fmt.Sprintf("one connection; every %d MiB are answered by a byte", stream.Request>>20)},
			{ID: "stream-spent", From: "stream", Title: "processor time of a stream", Unit: "ns/B", Stat: "spent:bytes", Ratio: true, Margin: 0.05, Text: "of client, server and agent, for each byte"},
		},
		Method: []string{
			fmt.Sprintf("Every arm has two network namespaces of its own, joined by a veth: a node with %s Services of %d endpoints, where the client runs, and a far end with the server. "+
				"Client and server share one processor and have real-time priority; the agents have the others. For userspace that means that each message wakes a thread on another processor, twice in each direction, "+
				"as on a node with processors to spare; and that a stream is copied by a processor of its own.", thousands(p.Services), endpoints),
			"TCP is controlled as the machine says (net.ipv4.tcp_congestion_control, in manifest.json): where that is BBR, whose timers pace every packet, a stream carries half of what it does with Cubic, and userspace's connections to endpoints have Cubic.",
			"The article's machines were two, with a network between them, of 2016; its charts hold no numbers. What is compared is which mode is faster, and the shape.",
		},
		Missing: append(unableWords(r.cannot),
			"Bare metal against virtual machines: a comparison of two machines' results, which one machine can't give.",
			"A network between two machines, which would add its own time to every round trip and make ratios smaller."),
		Pictures: []result.Picture{
			{ID: "rr-overlay", Kind: result.Overlay, Title: "Round trip on a kept connection: userspace red, iptables blue", Measures: []string{"rr"}, Arms: []string{"iptables", "userspace"}},
			{ID: "rr-deviation", Kind: result.Deviation, Title: "Round trip on a kept connection: mean and standard deviation", Measures: []string{"rr"}},
			{ID: "crr-overlay", Kind: result.Overlay, Title: "Round trip with a new connection: userspace red, iptables blue", Measures: []string{"crr"}, Arms: []string{"iptables", "userspace"}},
			{ID: "crr-deviation", Kind: result.Deviation, Title: "Round trip with a new connection: mean and standard deviation", Measures: []string{"crr"}},
		},
	}
	d.Aims = r.aims()
	return d
}

// aims are the article's claims and ours.
func (r *centurylink) aims() (l []result.Aim) {
	at := params(r.Profile.Services)
	both := slices.Contains(r.modes, "iptables") && slices.Contains(r.modes, "userspace")
	for _, c := range []struct{ id, text, measure string }{
		{"C10, request", "iptables takes less time than userspace: a round trip on a kept connection", "rr"},
		{"C10, request's mean", "the same of the mean, as the article has it", "rr-mean"},
		{"C10, connection", "the same with a new connection for each", "crr"},
	} {
		l = append(l, result.Aim{ID: c.id, Text: c.text, Claim: byCenturyLink, Measure: c.measure, Arm: "iptables", Params: at, Of: "value", Over: &result.CellRef{Arm: "userspace", Params: at}, Bound: 1})
	}
	l = append(l, result.Aim{ID: "C10, stream", Text: "and carries more: the throughput of a stream", Claim: byCenturyLink, Measure: "stream", Arm: "iptables", Params: at, Of: "value", Over: &result.CellRef{Arm: "userspace", Params: at}, Bound: 1, Least: true})
	for i := range l {
		if !both {
			l[i].Cannot = "it wants the modes iptables and userspace"
		}
	}
	l = append(l, result.Aim{ID: "C11", Text: "bare metal has a third of a virtual machine's latency, and less jitter", Claim: byCenturyLink, Cannot: "it compares two machines"})
	if slices.Contains(r.modes, "userspace") {
		l = append(l, result.Aim{ID: "stream", Text: "userspace: a stream has ≥ 0.85 × direct's throughput (0.36 × in 2015)", Measure: "stream", Arm: "userspace", Params: at, Of: "ratio", Bound: 0.85, Least: true})
	}
	return l
}
