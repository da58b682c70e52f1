// Package tigera is the experiment that measures round trips, processor time and rules per connection in every mode and
// with kube-proxy's rules, by number of Services: the claims of "Comparing kube-proxy modes: iptables or IPVS?"
// (Tigera, 2019), and Calico's rules of policies beside them.
package tigera

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/rules"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/model"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:    "tigera",
	Repeats: "Tigera, Comparing kube-proxy modes: iptables or IPVS?, 2019",
	Short:   "Round trips, processor time and rules of each mode and of kube-proxy, by Services",
	Long: `Measure what "Comparing kube-proxy modes: iptables or IPVS?" (Tigera, 2019) measured, in every mode that this
kernel can do and with the rules that kube-proxy writes and wrote: HTTP round trips at 1,000 requests a second with and
without kept connections, connect(), whole connections, processor time, and the rules that a packet is tested against,
from 1 (10 with --quick) to 10,000 Services of ten endpoints. The article's claims are tested one by one, as far as the blocks
tell: some stay inconclusive with --quick. It takes about six minutes with --quick, some hours without, and root. A
kube-proxy given with --subject makes two more arms, iptables and nftables, as the real program writes them.`,
	Services: full.Services,
	Compares: true,
	Layouts:  experiment.LayoutNames(classic.Layouts),
	Subjects: []string{experiment.KubeProxyProgram.Name},
	Rounds:   true,
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, nil)
		if o.Services != nil {
			p.Services = o.Services
		}
		p.Rounds = o.RoundsOr(p.Rounds)
		if b.Emulated() {
			p = p.emulated()
		}
		return newTrial(ctx, b, o, p)
	},
}

// profile is how much of everything is measured.
type profile struct {
	Name     string
	Services []int
	Rounds   int
	Closed   time.Duration // a block of a closed loop
	Open     time.Duration // a block of an open loop
	Warm     time.Duration // before each block, not measured
	Rate     float64       // requests a second of the open loop
	Each     int           // requests on a kept connection
	Work     time.Duration // that the client computes for each request, where it does
	// first and last Services, kept connections, and traces of all ways, at every number of Services, not only the
	// greatest
	Everywhere bool
	Resyncs    int  // full writes of kube-proxy's rules
	Emulated   bool // the processor is a program: what takes a share of it says nothing
}

// emulated returns the profile for a processor that is some thirty times slower than a real one: so many fewer requests
// a second, in longer blocks and fewer rounds.
func (p profile) emulated() profile {
	const slower = 30
	p.Name += ", emulated"
	p.Rate, p.Open, p.Closed, p.Warm = p.Rate/slower, p.Open*slower, p.Closed*slower, p.Warm*slower
	p.Rounds, p.Resyncs, p.Emulated = min(p.Rounds, 9), 1, true
	return p
}

var (
	quick = profile{Name: "quick", Services: []int{10, 1000, 10000}, Rounds: 25, Closed: 15 * time.Millisecond,
		Open: 40 * time.Millisecond, Warm: 4 * time.Millisecond,
		Rate: 1000, Each: 100, Work: 200 * time.Microsecond, Resyncs: 1}
	full = profile{Name: "full", Services: []int{1, 10, 100, 1000, 10000}, Rounds: 101, Closed: 250 * time.Millisecond,
		Open: time.Second, Warm: 50 * time.Millisecond,
		Rate: 1000, Each: 100, Work: 200 * time.Microsecond, Everywhere: true, Resyncs: 11}
)

// trial is the experiment of that name at work.
type trial struct {
	bed       *testbed.Testbed
	out       *result.Writer
	traffic   *testbed.Traffic
	grid      *experiment.Grid
	profile   profile
	nginx     string // the program; "": the lab's own server answers
	version   string
	kubeProxy string        // the program that was given; "": none
	engines   []mode.Engine // of policies, whose rules are counted beside Calico's
	noCalico  string        // why its rules are not counted, "" if they are
}

// newTrial finds out what this machine can do.
func newTrial(ctx context.Context, b *testbed.Testbed, o experiment.Options, p profile) (experiment.Trial, error) {
	t := &trial{bed: b, profile: p}
	t.nginx, t.version = testbed.FindNginx()
	var err error
	if t.grid, err = experiment.NewGrid(ctx, b, o, p.Services, p.Resyncs, classic.Layouts); err != nil {
		return nil, err
	}
	if t.kubeProxy, err = experiment.KubeProxyPath(ctx, b, o); err != nil {
		return nil, err
	}
	if t.engines, _, err = b.FindEngines(ctx); err != nil {
		return nil, err
	}
	if !slices.Contains(t.grid.Layouts, classic.IPTables19) {
		t.noCalico = "it wants " + experiment.LayoutIPTables19 + " beside it"
	} else if err := tryCalico(ctx, b); err != nil {
		t.noCalico = "Calico's rules can't be written here: " + testbed.Brief(err.Error())
	}
	return t, ctx.Err()
}

// ProfileName returns "quick" or "full".
func (r *trial) ProfileName() string { return r.profile.Name }

// Steps is the whole run in order.
func (r *trial) Steps(out *result.Writer) []experiment.Step {
	r.out, r.traffic = out, testbed.NewTraffic(r.bed, out)
	p, l := r.profile, &experiment.Plan{}
	r.grid.AddSteps(l, out)
	for _, a := range r.proxies() {
		for _, n := range p.Services {
			l.Add(fmt.Sprintf("starting kube-proxy %s of %s Services", a.Mode, experiment.Thousands(n)),
				2*time.Second+time.Duration(n)*1500*time.Microsecond, func(ctx context.Context) error {
					return r.addProxy(ctx, a, n)
				})
		}
	}
	l.Add("starting servers", time.Second, r.serve)
	traced := map[bool]time.Duration{true: 2 * time.Millisecond, false: 700 * time.Microsecond}[p.Everywhere]
	l.Add("counting rules", time.Duration(r.grid.Most()*len(r.grid.Layouts))*traced, r.countRules)
	var proxied []*testbed.Pair
	for _, a := range r.proxies() {
		for _, n := range p.Services {
			proxied = append(proxied, &testbed.Pair{Arm: a.ID, Services: n, KubeProxy: &kubeproxy.Node{}})
		}
	}
	l.Times(p.Rounds, "traffic, round", r.grid.Planned(r.operations(), proxied...),
		func(ctx context.Context, i int) error { return r.traffic.Round(ctx, i, r.operations()) })
	l.Add("noting what was seen", 0, func(context.Context) error { r.remark(); return nil })
	return *l
}

// proxies are the arms of the kube-proxy that was given.
func (r *trial) proxies() []experiment.KubeProxyArm {
	if r.kubeProxy == "" {
		return nil
	}
	return experiment.KubeProxyArms
}

// addProxy starts a kube-proxy and waits until all is in the kernel and it rests.
func (r *trial) addProxy(ctx context.Context, a experiment.KubeProxyArm, services int) error {
	p, err := r.bed.AddPair(ctx, a.ID, services)
	if err != nil {
		return err
	}
	c := testbed.NewCluster(services, append(testbed.Evenly(services, testbed.FewTargets),
		experiment.ServiceAt(experiment.Middle, services))...)
	limited, stop := experiment.WithColdSyncTimeout(ctx, r.bed, services)
	defer stop()
	n, cold, err := experiment.StartKubeProxy(limited, r.bed, r.kubeProxy, a, p, c.Objects...)
	if err != nil {
		return err
	}
	r.bed.Defer(n.Close)
	p.KubeProxy = n
	if err := r.out.AddValue(result.Block{Arm: a.ID, Params: testbed.ServiceParams(services), Wall: cold.Wall}, "load",
		float64(cold.Wall)); err != nil {
		return err
	}
	return testbed.Settle(limited, n.CPU)
}

// serve starts the servers: nginx, where there is one, or the lab's own.
func (r *trial) serve(ctx context.Context) error {
	if r.nginx == "" {
		return r.bed.Serve(r.out.Remark)
	}
	if err := r.bed.Isolate(r.out.Remark); err != nil {
		return err
	}
	for _, p := range r.bed.Pairs {
		if err := r.bed.ServeNginx(ctx, p, r.nginx, r.profile.Each); err != nil {
			return err
		}
	}
	return nil
}

// to returns what an operation connects to: a Service at a position, with ten endpoints, or those endpoints themselves.
func (r *trial) to(position string, includes func(*testbed.Pair) bool) func(*testbed.Pair) []netip.AddrPort {
	return func(p *testbed.Pair) []netip.AddrPort {
		switch {
		case p.Services == 0:
			return testbed.DirectTargets(testbed.FewTargets)
		case !includes(p):
			return nil
		case position == experiment.None:
			return testbed.DirectTargets(testbed.FewTargets)
		case p.KubeProxy != nil && position != experiment.Middle:
			return nil // its rules are in no order that lasts
		case p.Arm == experiment.ArmKubeProxyIPTables:
			return anywhere(p.Services)
		}
		return []netip.AddrPort{testbed.ServiceEntry(experiment.ServiceAt(position, p.Services))}
	}
}

// anywhere returns Services spread over all: kube-proxy draws the order of its list at each sync, so that one Service
// alone would be at the list's begin or end by chance.
func anywhere(services int) (l []netip.AddrPort) {
	for _, i := range testbed.Evenly(services, testbed.FewTargets) {
		l = append(l, testbed.ServiceEntry(i))
	}
	return l
}

// operations are those of a round.
func (r *trial) operations() (l []testbed.Operation) {
	p := r.profile
	all := func(*testbed.Pair) bool { return true }
	most := func(a *testbed.Pair) bool { return a.Services == r.grid.Most() }
	beside := func(a *testbed.Pair) bool { return a.Services > 1 && (p.Everywhere || most(a)) }
	persistent := func(a *testbed.Pair) bool { return p.Everywhere || most(a) }
	two := func(a *testbed.Pair) bool {
		return most(a) && (a.Arm == classic.IPTables19.String() || a.Arm == r.constant())
	}
	add := func(measure, position string, includes func(*testbed.Pair) bool, load testbed.Loader) {
		o := testbed.Operation{Measure: measure, Targets: r.to(position, includes), Load: load, Planned: p.Warm + p.Closed}
		if strings.HasPrefix(measure, "http") {
			o.Planned = p.Warm + p.open(1)
		}
		if measure == "http-kept" {
			o.Planned = p.Warm + p.open(p.Each)
		}
		l = append(l, o)
	}
	add("connect", experiment.Middle, all, r.bed.ClosedLoop(load.Connect, p.Warm, p.Closed))
	crr := r.bed.ClosedLoop(load.CRR, p.Warm, p.Closed)
	add("crr", experiment.Middle, all, crr)
	add("crr-first", experiment.First, beside, crr)
	add("crr-last", experiment.Last, beside, crr)
	add("crr-none", experiment.None, beside, crr)
	add("http", experiment.Middle, all, r.open(1, 0))
	add("http-last", experiment.Last, beside, r.open(1, 0))
	add("http-kept", experiment.Middle, persistent, r.open(p.Each, 0))
	if r.constant() != "" {
		add("http-work", experiment.Middle, two, r.open(1, p.Work))
	}
	return l
}

// open is how long a block of the open loop is: so that each connection can have all its requests.
func (p profile) open(each int) time.Duration {
	return max(p.Open, time.Duration(float64(each)/p.Rate*float64(time.Second)))
}

// open is the open loop of so many requests on a connection.
func (r *trial) open(each int, work time.Duration) testbed.Loader {
	p := r.profile
	return func(ctx context.Context, a *testbed.Pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		s, t, err := load.Open{Thread: r.bed.ClientThread(a), Targets: to, Seed: r.bed.Rand.Uint64(), Sizes: testbed.Sizes,
			Words: a.Words, Close: load.Fin,
			Rate: p.Rate, Each: each, Work: work, Warm: p.Warm, Workers: a.Workers()}.Run(ctx, p.open(each))
		if t.Cut && err == nil {
			err = ctx.Err()
		}
		return s, &t, err
	}
}

// countRules counts, in every arm, the rules that a packet is tested against: on paper, and by the kernel.
func (r *trial) countRules(ctx context.Context) error {
	agreed := 0
	for _, p := range r.bed.Pairs {
		if p.Services == 0 || p.KubeProxy != nil {
			continue
		}
		n, err := r.countArm(ctx, p)
		if err != nil {
			return fmt.Errorf("count the rules of %s at %d Services: %w", p.Arm, p.Services, err)
		}
		agreed += n
	}
	if r.noCalico == "" {
		n, err := r.countCalico(ctx)
		if err == nil {
			err = r.countFew()
		}
		if err != nil {
			return fmt.Errorf("count Calico's rules: %w", err)
		}
		agreed += n
	}
	r.out.Remark(fmt.Sprintf("Rules per packet were counted on paper for every arm; the kernel, asked to trace a packet, "+
		"agreed in all %d cases in which it was asked.", agreed))
	return nil
}

// countArm counts the rules of one arm. It returns in how many cases the kernel traced a packet too.
func (r *trial) countArm(ctx context.Context, p *testbed.Pair) (traced int, err error) {
	set, err := experiment.ReadRules(ctx, p.Near)
	if err != nil {
		return 0, err
	}
	for _, position := range []string{experiment.Middle, experiment.First, experiment.Last, experiment.None} {
		to := serverEntry
		if position != experiment.None && p.Arm != experiment.ArmEBPF { // which translates before there is a packet
			to = testbed.ServiceEntry(experiment.ServiceAt(position, p.Services))
		}
		if p.Services == 1 && (position == experiment.First || position == experiment.Last) {
			continue
		}
		packet := redirected(p, sent(to))
		n, err := set.Count(packet)
		if err != nil {
			return traced, err
		}
		measure := "rules"
		if position != experiment.Middle {
			measure += "-" + position
		}
		mean := n.Mean
		if position == experiment.Middle {
			if mean, err = r.average(set, p); err != nil {
				return traced, err
			}
		}
		if err := r.out.AddValue(result.Block{Arm: p.Arm, Params: testbed.ServiceParams(p.Services)}, measure,
			mean); err != nil {
			return traced, err
		}
		if !r.traces(p, position) {
			continue
		}
		if err := set.Agree(ctx, p.Near, packet, n, r.bed.Client(p, nil, 0)); err != nil {
			return traced, err
		}
		traced++
	}
	known := redirected(p, sent(testbed.ServiceEntry(experiment.ServiceAt(experiment.Middle, p.Services))))
	known.Established, known.To = true, serverEntry
	if p.Arm == experiment.ArmEBPF {
		known.Dst, known.To = serverEntry, netip.AddrPort{}
	}
	n, err := set.Count(known)
	if err != nil {
		return traced, err
	}
	return traced, r.out.AddValue(result.Block{Arm: p.Arm, Params: testbed.ServiceParams(p.Services)}, "rules-established",
		n.Mean)
}

// traces reports whether the kernel traces a packet too: of the greatest numbers of rules, which take seconds to be
// listed or changed each time, a short run traces the longest path alone.
func (r *trial) traces(p *testbed.Pair, position string) bool {
	return r.profile.Everywhere || p.Services < r.grid.Most() || position == experiment.Last
}

// average is how many rules a connection meets, over Services spread evenly.
func (r *trial) average(set experiment.Ruleset, p *testbed.Pair) (mean float64, err error) {
	const most = 100
	k := min(p.Services, most)
	for i := range k {
		to := serverEntry
		if p.Arm != experiment.ArmEBPF {
			to = testbed.ServiceEntry((2*i + 1) * p.Services / (2 * k))
		}
		n, err := set.Count(redirected(p, sent(to)))
		if err != nil {
			return 0, err
		}
		mean += n.Mean / float64(k)
	}
	return mean, nil
}

// redirected returns a packet as the pair's rules meet it: IPVS sends what it redirects as this host's output once
// more.
func redirected(p *testbed.Pair, packet rules.Packet) rules.Packet {
	if p.Arm == "ipvs" && packet.Dst != serverEntry {
		packet.Path, packet.To = rules.Redirected, serverEntry
	}
	return packet
}

// sent is a packet of the node's own client.
func sent(to netip.AddrPort) rules.Packet {
	return rules.Packet{Src: netip.AddrPortFrom(testbed.NodeAddr, 40000), Dst: to, Protocol: model.TCP, Path: rules.Sent,
		Out: "eth0", Node: []netip.Addr{testbed.NodeAddr}}
}

// serverEntry is one of the server's own addresses.
var serverEntry = netip.AddrPortFrom(testbed.ServerAddr(0), testbed.ServerPort)

// remark records what only the run could find out.
func (r *trial) remark() {
	most, _ := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max")
	r.out.Remark(fmt.Sprintf("At most %d connections were tracked at once in one network namespace, of %s "+
		"(nf_conntrack_max).", r.traffic.Tracked, bytes.TrimSpace(most)))
	r.out.Remark(fmt.Sprintf("Requests of the open loop began up to %v later than intended by the load's own fault, "+
		"which is part of their time.", r.traffic.Late.Round(10*time.Microsecond)))
	for _, c := range [][]string{{"iptables-legacy", "--version"}, {"nft", "--version"}} {
		if out, err := exec.Command(c[0], c[1:]...).Output(); err == nil {
			r.out.Remark(c[0] + ": " + string(bytes.TrimSpace(out)))
		}
	}
}
