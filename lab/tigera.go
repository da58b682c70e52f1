package lab

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

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/rules"
)

var tigeraExperiment = Experiment{
	Name:  "tigera",
	Short: "Round trips, processor time and rules of each mode and of kube-proxy, by Services",
	Long: `Measure what "Comparing kube-proxy modes: iptables or IPVS?" (Tigera, 2019) measured, in every mode that this
kernel can do and with the rules that kube-proxy writes and wrote: HTTP round trips at 1,000 requests a second with and
without kept connections, connect(), whole connections, processor time, and the rules that a packet is tested against,
from 1 (10 with --quick) to 10,000 Services of ten endpoints. The article's claims are tested one by one, as far as the blocks
tell: some stay inconclusive with --quick. It takes three to five minutes with --quick, some hours without, and root. A
kube-proxy given with --subject makes two more arms, iptables and nftables, as the real program writes them.`,
	Services: fullTigera.Services,
	Compares: true,
	Layouts:  names(classic.Layouts),
	Subjects: []string{kubeProxyProgram.name},
	Rounds:   true,
	begin: func(ctx context.Context, r *run) (work, error) {
		p := fullTigera
		if r.Quick {
			p = quickTigera
		}
		if r.Services != nil {
			p.Services = r.Services
		}
		p.Rounds = r.rounds(p.Rounds)
		if emulated() {
			p = p.emulated()
		}
		return newTigera(ctx, r, p)
	},
}

// tigeraProfile says how much of everything is measured.
type tigeraProfile struct {
	Name       string
	Services   []int
	Rounds     int
	Closed     time.Duration // a block of a closed loop
	Open       time.Duration // a block of an open loop
	Warm       time.Duration // before each block, not measured
	Rate       float64       // requests a second of the open loop
	Each       int           // requests on a kept connection
	Work       time.Duration // that the client computes for each request, where it does
	Everywhere bool          // first and last Services, kept connections, and traces of all ways, at every number of Services, not only the greatest
	Resyncs    int           // full writes of kube-proxy's rules
	Emulated   bool          // the processor is a program: what takes a share of it says nothing
}

// emulated gives the profile for a processor that is some thirty times slower than a real one: so many fewer requests a second, in
// longer blocks and fewer rounds.
func (p tigeraProfile) emulated() tigeraProfile {
	const slower = 30
	p.Name += ", emulated"
	p.Rate, p.Open, p.Closed, p.Warm = p.Rate/slower, p.Open*slower, p.Closed*slower, p.Warm*slower
	p.Rounds, p.Resyncs, p.Emulated = min(p.Rounds, 9), 1, true
	return p
}

var (
	quickTigera = tigeraProfile{Name: "quick", Services: []int{10, 1000, 10000}, Rounds: 13, Closed: 15 * time.Millisecond, Open: 40 * time.Millisecond, Warm: 4 * time.Millisecond,
		Rate: 1000, Each: 100, Work: 200 * time.Microsecond, Resyncs: 1}
	fullTigera = tigeraProfile{Name: "full", Services: []int{1, 10, 100, 1000, 10000}, Rounds: 101, Closed: 250 * time.Millisecond, Open: time.Second, Warm: 50 * time.Millisecond,
		Rate: 1000, Each: 100, Work: 200 * time.Microsecond, Everywhere: true, Resyncs: 11}
)

// tigera is the experiment of that name at work.
type tigera struct {
	*stage
	Profile   tigeraProfile
	nginx     string // the program; "": the lab's own server answers
	version   string
	kubeProxy string // the program that was given; "": none
	noCalico  string // why its rules are not counted, "" if they are
}

// newTigera finds out what this machine can do.
func newTigera(ctx context.Context, r *run, p tigeraProfile) (work, error) {
	t := &tigera{Profile: p}
	t.nginx, t.version = findNginx()
	var err error
	if t.stage, err = newStage(ctx, r, p.Services, p.Resyncs, classic.Layouts); err != nil {
		return nil, err
	}
	if t.kubeProxy, err = r.trySubject(ctx); err != nil {
		return nil, err
	}
	if !slices.Contains(t.layouts, classic.IPTables19) {
		t.noCalico = "it wants " + old + " beside it"
	} else if err := r.tryCalico(ctx); err != nil {
		t.noCalico = "Calico's rules can't be written here: " + brief(err.Error())
	}
	return t, ctx.Err()
}

func (r *tigera) profile() string { return r.Profile.Name }

// steps is the whole run in order.
func (r *tigera) steps() []step {
	p, l := r.Profile, &plan{}
	r.raise(l)
	for _, a := range r.proxies() {
		for _, n := range p.Services {
			l.add(fmt.Sprintf("starting kube-proxy %s of %s Services", a.mode, thousands(n)), 2*time.Second+time.Duration(n)*1500*time.Microsecond, func(ctx context.Context) error {
				return r.startProxy(ctx, a, n)
			})
		}
	}
	l.add("starting servers", time.Second, r.serve)
	traced := map[bool]time.Duration{true: 2 * time.Millisecond, false: 700 * time.Microsecond}[p.Everywhere]
	l.add("counting rules", time.Duration(r.most()*len(r.layouts))*traced, r.countRules)
	var proxied []*pair
	for _, a := range r.proxies() {
		for _, n := range p.Services {
			proxied = append(proxied, &pair{arm: a.id, services: n, proxy: &kubeproxy.Node{}})
		}
	}
	l.times(p.Rounds, "traffic, round", r.planned(r.operations(), proxied...), func(ctx context.Context, i int) error { return r.round(ctx, i, r.operations()) })
	l.add("noting what was seen", 0, func(context.Context) error { r.note(); return nil })
	return *l
}

// proxies are the arms of the kube-proxy that was given.
func (r *tigera) proxies() []proxyArm {
	if r.kubeProxy == "" {
		return nil
	}
	return proxyArms
}

// startProxy starts a kube-proxy and waits until all is in the kernel and it rests.
func (r *tigera) startProxy(ctx context.Context, a proxyArm, services int) error {
	p, err := r.pair(ctx, a.id, services)
	if err != nil {
		return err
	}
	c := newCluster(services, append(spread(services, fewTargets), service(middle, services))...)
	limited, stop := slowly(ctx, services)
	defer stop()
	n, cold, err := r.proxy(limited, r.kubeProxy, a, p, c.objects...)
	if err != nil {
		return err
	}
	r.later(n.Close)
	p.proxy = n
	if err := r.add(result.Block{Arm: a.id, Params: params(services), Wall: cold.Wall}, "load", float64(cold.Wall)); err != nil {
		return err
	}
	return settle(limited, n.CPU)
}

// serve starts the servers: nginx, where there is one, or the lab's own.
func (r *tigera) serve(ctx context.Context) error {
	if r.nginx == "" {
		return r.run.serve(ctx)
	}
	if err := r.apart(); err != nil {
		return err
	}
	for _, p := range r.pairs {
		if err := r.serveWeb(ctx, p, r.nginx, r.Profile.Each); err != nil {
			return err
		}
	}
	return nil
}

// to gives whom an operation connects to: a Service at a position, with ten endpoints, or those endpoints themselves.
func (r *tigera) to(position string, takes func(*pair) bool) func(*pair) []netip.AddrPort {
	return func(p *pair) []netip.AddrPort {
		switch {
		case p.services == 0:
			return direct(fewTargets)
		case !takes(p):
			return nil
		case position == none:
			return direct(fewTargets)
		case p.proxy != nil && position != middle:
			return nil // its rules are in no order that lasts
		case p.arm == armProxyIPT:
			return anywhere(p.services)
		}
		return []netip.AddrPort{entry(service(position, p.services))}
	}
}

// anywhere gives Services spread over all: kube-proxy draws the order of its list at each sync, so that one Service alone
// would be at the list's begin or end by chance.
func anywhere(services int) (l []netip.AddrPort) {
	for _, i := range spread(services, fewTargets) {
		l = append(l, entry(i))
	}
	return l
}

// operations are those of a round.
func (r *tigera) operations() (l []operation) {
	p := r.Profile
	all := func(*pair) bool { return true }
	most := func(a *pair) bool { return a.services == r.most() }
	beside := func(a *pair) bool { return a.services > 1 && (p.Everywhere || most(a)) }
	kept := func(a *pair) bool { return p.Everywhere || most(a) }
	two := func(a *pair) bool { return most(a) && (a.arm == classic.IPTables19.String() || a.arm == r.constant()) }
	add := func(measure, position string, takes func(*pair) bool, load loader) {
		o := operation{measure: measure, targets: r.to(position, takes), load: load, takes: p.Warm + p.Closed}
		if strings.HasPrefix(measure, "http") {
			o.takes = p.Warm + p.open(1)
		}
		if measure == "http-kept" {
			o.takes = p.Warm + p.open(p.Each)
		}
		l = append(l, o)
	}
	add("connect", middle, all, r.closed(load.Connect, p.Warm, p.Closed))
	crr := r.closed(load.CRR, p.Warm, p.Closed)
	add("crr", middle, all, crr)
	add("crr-first", first, beside, crr)
	add("crr-last", last, beside, crr)
	add("crr-none", none, beside, crr)
	add("http", middle, all, r.open(1, 0))
	add("http-last", last, beside, r.open(1, 0))
	add("http-kept", middle, kept, r.open(p.Each, 0))
	if r.constant() != "" {
		add("http-work", middle, two, r.open(1, p.Work))
	}
	return l
}

// open is how long a block of the open loop is: so that each connection can have all its requests.
func (p tigeraProfile) open(each int) time.Duration {
	return max(p.Open, time.Duration(float64(each)/p.Rate*float64(time.Second)))
}

// open is the open loop of so many requests on a connection.
func (r *tigera) open(each int, work time.Duration) loader {
	p := r.Profile
	return func(ctx context.Context, a *pair, to []netip.AddrPort) (load.Sample, *load.Trace, error) {
		s, t, err := load.Open{Place: r.place(a), Targets: to, Seed: r.rand.Uint64(), Sizes: sizes, Words: a.words, Close: load.Fin,
			Rate: p.Rate, Each: each, Work: work, Warm: p.Warm, Workers: a.workers()}.Run(ctx, p.open(each))
		if t.Cut && err == nil {
			err = ctx.Err()
		}
		return s, &t, err
	}
}

// countRules counts, in every arm, the rules that a packet is tested against: on paper, and by the kernel.
func (r *tigera) countRules(ctx context.Context) error {
	agreed := 0
	for _, p := range r.pairs {
		if p.services == 0 || p.proxy != nil {
			continue
		}
		n, err := r.countArm(ctx, p)
		if err != nil {
			return fmt.Errorf("count the rules of %s at %d Services: %w", p.arm, p.services, err)
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
	r.out.Remark(fmt.Sprintf("Rules per packet were counted on paper for every arm; the kernel, asked to trace a packet, agreed in all %d cases in which it was asked.", agreed))
	return nil
}

// countArm counts those of one arm. It gives in how many cases the kernel was asked too.
func (r *tigera) countArm(ctx context.Context, p *pair) (asked int, err error) {
	set, err := readRules(ctx, p.node)
	if err != nil {
		return 0, err
	}
	for _, position := range []string{middle, first, last, none} {
		to := serverEntry
		if position != none && p.arm != armEBPF { // which translates before there is a packet
			to = entry(service(position, p.services))
		}
		if p.services == 1 && (position == first || position == last) {
			continue
		}
		packet := p.carried(sent(to))
		n, err := set.count(packet)
		if err != nil {
			return asked, err
		}
		measure := "rules"
		if position != middle {
			measure += "-" + position
		}
		mean := n.Mean
		if position == middle {
			if mean, err = r.average(set, p); err != nil {
				return asked, err
			}
		}
		if err := r.add(result.Block{Arm: p.arm, Params: params(p.services)}, measure, mean); err != nil {
			return asked, err
		}
		if !r.traces(p, position) {
			continue
		}
		if err := set.agree(ctx, p.node, packet, n, r.client(p, nil, 0)); err != nil {
			return asked, err
		}
		asked++
	}
	known := p.carried(sent(entry(service(middle, p.services))))
	known.Established, known.To = true, serverEntry
	if p.arm == armEBPF {
		known.Dst, known.To = serverEntry, netip.AddrPort{}
	}
	n, err := set.count(known)
	if err != nil {
		return asked, err
	}
	return asked, r.add(result.Block{Arm: p.arm, Params: params(p.services)}, "rules-established", n.Mean)
}

// traces says whether the kernel is asked too: of the greatest numbers of rules, which take seconds to be listed or changed
// each time, a short run asks for the longest way alone.
func (r *tigera) traces(p *pair, position string) bool {
	return r.Profile.Everywhere || p.services < r.most() || position == last
}

// average is how many rules a connection meets, over Services spread evenly.
func (r *tigera) average(set ruleset, p *pair) (mean float64, err error) {
	const most = 100
	k := min(p.services, most)
	for i := range k {
		to := serverEntry
		if p.arm != armEBPF {
			to = entry((2*i + 1) * p.services / (2 * k))
		}
		n, err := set.count(p.carried(sent(to)))
		if err != nil {
			return 0, err
		}
		mean += n.Mean / float64(k)
	}
	return mean, nil
}

// carried is a packet as the pair's rules meet it: IPVS sends what it carries as this host's output once more.
func (p *pair) carried(packet rules.Packet) rules.Packet {
	if p.arm == "ipvs" && packet.Dst != serverEntry {
		packet.Path, packet.To = rules.Carried, serverEntry
	}
	return packet
}

// serverEntry is one of the server's own addresses.
var serverEntry = netip.AddrPortFrom(serverAddr(0), serverPort)

// note tells what only the run could find out.
func (r *tigera) note() {
	most, _ := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max")
	r.out.Remark(fmt.Sprintf("At most %d connections were tracked at once in one network namespace, of %s (nf_conntrack_max).", r.tracked, bytes.TrimSpace(most)))
	r.out.Remark(fmt.Sprintf("Requests of the open loop began up to %v later than intended by the load's own fault, which is part of their time.", r.late.Round(10*time.Microsecond)))
	for _, c := range [][]string{{"iptables-legacy", "--version"}, {"nft", "--version"}} {
		if out, err := exec.Command(c[0], c[1:]...).Output(); err == nil {
			r.out.Remark(c[0] + ": " + string(bytes.TrimSpace(out)))
		}
	}
}
