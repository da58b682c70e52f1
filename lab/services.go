package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"time"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

var servicesExperiment = Experiment{
	Name:  "services",
	Short: "The cost of Services: to connections, and to keep the kernel up to date",
	Long: `Measure what a connection through a Service costs at 1 to 10,000 Services of ten endpoints, against the same
connection without any rule, and what it costs to keep the kernel up to date: cold sync, one change, a saved file,
memory, idle time, and connections lost while everything changes. All that in mode nftables; a connection in mode ebpf
at the most Services beside it. It takes about four minutes with --quick, one to two hours without, and root. The
control side of a kube-proxy given with --subject is measured beside, which takes about six minutes more with --quick.`,
	Services: Full().Services,
	Subjects: []string{kubeProxyProgram.name},
	Rounds:   true,
	begin: func(ctx context.Context, r *run) (work, error) {
		p := Full()
		if r.Quick {
			p = Quick()
		}
		if r.Services != nil {
			p.Services = r.Services
		}
		p.Rounds = r.rounds(p.Rounds)
		return newServices(ctx, r, p)
	},
}

// services is the experiment of that name at work.
type services struct {
	*run
	Profile   Profile
	nodes     []*node // those of pairs with an agent
	worlds    []*world
	changing  []*changing
	beside    []string // modes whose connections are measured beside, at the most Services
	cannot    []unable
	kubeProxy string // the program that was given; "": none
}

// newServices checks the profile and learns whether this kernel can do it.
func newServices(ctx context.Context, r *run, p Profile) (work, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	s := &services{run: r, Profile: p}
	if err := s.probe(ctx); err != nil {
		return nil, err
	}
	var err error
	if s.beside, s.cannot, err = r.findModes(ctx, armEBPF); err != nil {
		return nil, err
	}
	s.kubeProxy, err = r.trySubject(ctx)
	return s, err
}

func (r *services) profile() string { return r.Profile.Name }

func (r *services) design() result.Design {
	d := design(r.Profile)
	d.Arms, d.Missing = append(d.Arms, modeArms(r.beside)...), append(unableWords(r.cannot), d.Missing...)
	if r.kubeProxy == "" {
		d.Missing = append(d.Missing, noSubject)
	} else {
		proxyDesign(&d)
	}
	return d
}

// steps is the whole run in order: the control side while this process and the agents may use every processor, then,
// with a processor set apart, the packets.
func (r *services) steps() []step {
	p, l := r.Profile, &plan{}
	l.add("writing manifests", time.Second+r.perService(200*time.Microsecond), r.prepare)
	l.times(p.Cold, "cold syncs", r.perService(250*time.Microsecond), r.colds)
	if r.kubeProxy != "" {
		for _, a := range proxyArms {
			for i, n := range p.Services {
				l.times(p.Cold, fmt.Sprintf("kube-proxy %s of %s Services", a.mode, thousands(n)), moves*moveAfter+2*time.Second+time.Duration(n)*1500*time.Microsecond, func(ctx context.Context, round int) error {
					return r.subject(ctx, round, a, r.worlds[i])
				})
			}
		}
	}
	l.add("filling kernels for single changes", r.perService(250*time.Microsecond), r.prepareChanges)
	l.times(p.Batches, "single changes", time.Duration(p.Batch)*time.Millisecond, r.batches)
	l.add("making room", time.Second, func(context.Context) error { return r.endChanges() })
	for i, n := range p.Services {
		l.add(fmt.Sprintf("starting the agent of %d Services", n), 500*time.Millisecond+time.Duration(n)*400*time.Microsecond,
			func(ctx context.Context) error { return r.begin(ctx, r.nodes[i]) })
	}
	l.add("reading memory", 2*time.Second, func(ctx context.Context) error { return r.memory(ctx, "the first sync") })
	if r.kubeProxy != "" {
		l.add("moving endpoints", time.Duration(p.Cold*len(p.Services)*moves)*moveAfter, r.moveOurs)
	}
	l.add("watching idle agents", p.Quiet, r.idle)
	l.add("watching the kernels", 100*time.Millisecond, r.watch)
	l.times(p.Files, "saving files", time.Duration(p.PerFiles*len(p.Services))*8*time.Millisecond, r.files)
	l.add("reading memory", 2*time.Second, func(ctx context.Context) error { return r.memory(ctx, "the changes") })
	for _, mode := range r.beside {
		l.add("starting the agent of mode "+mode, 500*time.Millisecond+time.Duration(p.most())*400*time.Microsecond,
			func(ctx context.Context) error { return r.beginBeside(ctx, mode) })
	}
	l.add("starting servers", 100*time.Millisecond, r.serve)
	blocks := time.Duration(4 * (len(p.Services) + len(r.beside) + 4))
	l.times(p.Rounds, "traffic, round", blocks*(p.Block+p.Warm+10*time.Millisecond), r.traffic)
	l.add("counting losses while "+whileNothing, p.Calm+time.Second, func(ctx context.Context) error { return r.loss(ctx, 0, whileNothing, r.calm) })
	if p.most() > 1 {
		l.add("counting losses while "+whileOthers, time.Duration(p.Others)*pace, func(ctx context.Context) error { return r.loss(ctx, 0, whileOthers, r.replaceOthers) })
	}
	l.add("counting losses while "+whileOwn, time.Duration(p.Own)*pace, func(ctx context.Context) error { return r.loss(ctx, 0, whileOwn, r.replaceOwn) })
	l.times(p.Kills, "counting losses while "+whileKilled, time.Second+time.Duration(p.most())*300*time.Microsecond, func(ctx context.Context, i int) error {
		return r.loss(ctx, i, whileKilled, func(ctx context.Context, n *node) error { return r.killAgent(ctx, n, i) })
	})
	l.add("noting what was seen", 0, func(context.Context) error { r.note(); return nil })
	return *l
}

// perService is a time that grows with all Services of all arms.
func (r *services) perService(each time.Duration) (d time.Duration) {
	for _, n := range r.Profile.Services {
		d += time.Duration(n) * each
	}
	return d
}

// prepare makes the namespaces, the manifests, and the same clusters in this process.
func (r *services) prepare(ctx context.Context) error {
	for _, arm := range []string{armDirect, armAgain, armRule} {
		if _, err := r.pair(ctx, arm, 0); err != nil {
			return err
		}
	}
	if err := r.pairs[2].translate(entry(0), netip.AddrPortFrom(serverAddr(0), serverPort)); err != nil {
		return err
	}
	for _, n := range r.Profile.Services {
		p, err := r.pair(ctx, armNFT, n)
		if err != nil {
			return err
		}
		w, err := newWorld(n)
		if err != nil {
			return err
		}
		r.worlds = append(r.worlds, w)
		f, err := w.write(r.tmp, 1)
		if err != nil {
			return err
		}
		r.nodes = append(r.nodes, &node{pair: p, folder: f, service: -1, mode: agent.Default})
	}
	return nil
}

// beginBeside starts the agent of a mode whose connections are measured beside.
func (r *services) beginBeside(ctx context.Context, mode string) error {
	f, err := newCluster(r.Profile.most()).writeTo(r.tmp, "beside-"+mode, 1000)
	if err != nil {
		return err
	}
	var flags []string
	if slots := 16 * r.Profile.most(); slots > agent.DefaultRoom {
		flags = append(flags, "--ebpf-map-entries", fmt.Sprint(slots)) // other modes take no notice
	}
	_, _, err = r.staff(ctx, mode, mode, f, flags...)
	return err
}

// operations are those of the closed loop.
func (r *services) operations() (l []operation) {
	p := r.Profile
	for _, o := range []struct {
		measure string
		op      load.Op
	}{{"connect", load.Connect}, {"crr", load.CRR}, {"rr", load.RR}} {
		l = append(l, operation{measure: o.measure, targets: (*pair).fewTargets, load: r.closed(o.op, p.Warm, p.Block)})
	}
	if p.most() > fewTargets {
		l = append(l, operation{measure: "connect-many", targets: (*pair).manyTargets, load: r.closed(load.Connect, p.Warm, p.Block)})
	}
	return l
}

// manyTargets are all that a pair's client may connect to: the server's own addresses, or Services, if more than endpoints.
func (p *pair) manyTargets() (l []netip.AddrPort) {
	switch {
	case p.services == 0 && p.arm != armRule:
		return direct(fewTargets)
	case p.services > fewTargets:
		for _, i := range targets(p.services) {
			l = append(l, entry(i))
		}
	}
	return l
}

// fewTargets are as many in every arm. A kept connection is kept for each, so that sockets are equally warm.
func (p *pair) fewTargets() (l []netip.AddrPort) {
	switch {
	case p.arm == armRule:
		return slices.Repeat([]netip.AddrPort{entry(0)}, fewTargets)
	case p.services == 0:
		return direct(fewTargets)
	}
	to := targets(p.services)
	for i := range fewTargets {
		l = append(l, entry(to[i*len(to)/fewTargets]))
	}
	return l
}

// traffic is a round, in which the agents have nothing to do.
func (r *services) traffic(ctx context.Context, n int) error {
	return r.unchanged(n, duringTraffic, func() error { return r.round(ctx, n, r.operations()) })
}

// colds measures a cold sync and a restart at each number of Services, in random order.
func (r *services) colds(ctx context.Context, round int) error {
	for _, i := range r.rand.Perm(len(r.worlds)) {
		w := r.worlds[i]
		if err := r.cold(ctx, round, w); err != nil {
			return err
		}
		// The kernel takes the old namespace apart in the background.
		if err := rest(ctx, time.Duration(w.services)*30*time.Microsecond); err != nil {
			return err
		}
	}
	return nil
}

// endChanges gives back what the control side in this process took.
func (r *services) endChanges() error {
	var errs []error
	for _, c := range r.changing {
		errs = append(errs, c.stop(), r.drop(c.ns))
	}
	r.worlds, r.changing = nil, nil
	debug.FreeOSMemory()
	return errors.Join(errs...)
}

// watch looks at all nodes' kernels from now on.
func (r *services) watch(context.Context) error {
	for _, n := range r.nodes {
		if err := n.watch(); err != nil {
			return err
		}
		r.later(n.blind)
	}
	return nil
}

// note tells what a reader of the numbers should know that only the run could find out.
func (r *services) note() {
	most, _ := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max")
	r.out.Remark(fmt.Sprintf("At most %d connections were tracked at once in one network namespace, of %s (nf_conntrack_max).", r.tracked, bytes.TrimSpace(most)))
	r.out.Remark(fmt.Sprintf("While losses were counted, connections began up to %v later than intended by the load's own fault, which is part of their time.", r.late.Round(10*time.Microsecond)))
}
