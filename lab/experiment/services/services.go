// Package services is the experiment that measures what a Service costs a connection, and what it costs to keep the
// kernel as a cluster of so many Services says it should be.
package services

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

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:  "services",
	Short: "The cost of Services: to connections, and to keep the kernel up to date",
	Long: `Measure what a connection through a Service costs at 1 to 10,000 Services of ten endpoints, against the same
connection without any rule, and what it costs to keep the kernel up to date: cold sync, one change, a saved file,
memory, idle time, and connections lost while everything changes. All that in mode nftables; a connection in mode ebpf
at the most Services beside it. It takes about four minutes with --quick, one to two hours without, and root. The
control side of a kube-proxy given with --subject is measured beside, which takes about six minutes more with --quick.
--modes names others than ebpf, of which --exact counts the control side, too: a cold sync, a restart, changes.`,
	Services: full().Services,
	Compares: true,
	Subjects: []string{experiment.KubeProxyProgram.Name},
	Rounds:   true,
	Exact:    true,
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick(), full(), profile.exactly)
		if o.Services != nil {
			p.Services = o.Services
		}
		p.Rounds = o.RoundsOr(p.Rounds)
		if o.Exact {
			p.Cold = min(p.Cold, p.Rounds)
		}
		return newTrial(ctx, b, o, p)
	},
}

// trial is the experiment of that name at work.
type trial struct {
	bed       *testbed.Testbed
	out       *result.Writer
	traffic   *testbed.Traffic
	profile   profile
	nodes     []*testbed.Node // those of pairs with an agent
	watches   []*watch        // of their kernels
	worlds    []*testbed.Decided
	changing  []*changing
	beside    []string // modes whose connections are measured beside, at the most Services
	cannot    []testbed.Unable
	kubeProxy string // the program that was given; "": none
	exact     bool   // instructions are counted
}

// newTrial checks the profile and learns whether this kernel can do it.
func newTrial(ctx context.Context, b *testbed.Testbed, o experiment.Options, p profile) (experiment.Trial, error) {
	if err := experiment.CheckServices(p.Services); err != nil {
		return nil, err
	}
	if o.Exact && len(o.Subjects) > 0 {
		return nil, errors.New("--exact has no kube-proxy beside: leave --subject out")
	}
	s := &trial{bed: b, profile: p, exact: o.Exact}
	if err := s.probe(ctx); err != nil {
		return nil, err
	}
	var err error
	if s.beside, s.cannot, err = b.FindModes(ctx, o.Modes, experiment.ArmEBPF); err != nil {
		return nil, err
	}
	s.beside = slices.DeleteFunc(slices.Clone(s.beside), func(m string) bool { return m == experiment.ArmNFTables })
	s.kubeProxy, err = experiment.KubeProxyPath(ctx, b, o)
	return s, err
}

// ProfileName returns "quick" or "full".
func (r *trial) ProfileName() string { return r.profile.Name }

// Design returns the experiment in words and numbers.
func (r *trial) Design() result.Design {
	d := design(r.profile, r.exact)
	d.Arms, d.Missing = append(d.Arms, experiment.ModeArms(r.beside)...),
		append(experiment.NotMeasured(r.cannot), d.Missing...)
	if r.kubeProxy == "" {
		d.Missing = append(d.Missing, experiment.NoKubeProxy)
	} else {
		proxyDesign(&d)
	}
	if r.exact {
		exactDesign(&d)
	}
	return d
}

// Steps is the whole run in order: the control side while this process and the agents may use every processor, then,
// with a processor reserved, the packets.
func (r *trial) Steps(out *result.Writer) []experiment.Step {
	r.out, r.traffic = out, testbed.NewTraffic(r.bed, out)
	p, l := r.profile, &experiment.Plan{}
	l.Add("writing manifests", time.Second+r.perService(200*time.Microsecond), r.prepare)
	l.Times(p.Cold, "cold syncs", r.perService(250*time.Microsecond), r.colds)
	if r.kubeProxy != "" {
		for _, a := range experiment.KubeProxyArms {
			for i, n := range p.Services {
				l.Times(p.Cold, fmt.Sprintf("kube-proxy %s of %s Services", a.Mode, experiment.Thousands(n)),
					experiment.Moves*experiment.MoveAfter+2*time.Second+time.Duration(n)*1500*time.Microsecond,
					func(ctx context.Context, round int) error {
						return r.measureKubeProxy(ctx, round, a, r.worlds[i])
					})
			}
		}
	}
	l.Add("filling kernels for single changes", r.perService(250*time.Microsecond), r.prepareChanges)
	l.Times(p.Batches, "single changes", time.Duration(p.Batch)*time.Millisecond, r.batches)
	l.Add("making room", time.Second, func(context.Context) error { return r.endChanges() })
	if r.exact {
		for _, name := range r.beside {
			l.Add("syncs and changes of mode "+name, time.Second+time.Duration(p.most())*time.Millisecond,
				func(ctx context.Context) error { return r.syncBeside(ctx, name) })
		}
	}
	for i, n := range p.Services {
		l.Add(fmt.Sprintf("starting the agent of %d Services", n), 500*time.Millisecond+time.Duration(n)*400*time.Microsecond,
			func(ctx context.Context) error { return r.begin(ctx, r.nodes[i]) })
	}
	if !r.exact {
		r.addUpkeep(l)
	}
	for _, mode := range r.beside {
		l.Add("starting the agent of mode "+mode, 500*time.Millisecond+time.Duration(p.most())*400*time.Microsecond,
			func(ctx context.Context) error { return r.beginBeside(ctx, mode) })
	}
	l.Add("starting servers", 100*time.Millisecond, func(context.Context) error { return r.bed.Serve(out.Remark) })
	blocks := time.Duration(4 * (len(p.Services) + len(r.beside) + 4))
	l.Times(p.Rounds, "traffic, round", blocks*(p.Block+p.Warm+10*time.Millisecond), r.round)
	if !r.exact {
		r.addLosses(l)
	}
	l.Add("noting what was seen", 0, func(context.Context) error { r.remark(); return nil })
	return *l
}

// addUpkeep adds the steps that watch agents.
func (r *trial) addUpkeep(l *experiment.Plan) {
	p := r.profile
	l.Add("reading memory", 2*time.Second, func(ctx context.Context) error { return r.memory(ctx, "the first sync") })
	if r.kubeProxy != "" {
		l.Add("moving endpoints", time.Duration(p.Cold*len(p.Services)*experiment.Moves)*experiment.MoveAfter, r.moveOurs)
	}
	l.Add("watching idle agents", p.Quiet, r.idle)
	l.Add("watching the kernels", 100*time.Millisecond, r.watch)
	l.Times(p.Files, "saving files", time.Duration(p.PerFiles*len(p.Services))*8*time.Millisecond, r.files)
	l.Add("reading memory", 2*time.Second, func(ctx context.Context) error { return r.memory(ctx, "the changes") })
}

// addLosses adds the steps that count lost connections.
func (r *trial) addLosses(l *experiment.Plan) {
	p := r.profile
	l.Add("counting losses while "+whileNothing, p.Calm+time.Second,
		func(ctx context.Context) error { return r.loss(ctx, 0, whileNothing, r.calm) })
	if p.most() > 1 {
		l.Add("counting losses while "+whileOthers, time.Duration(p.Others)*pace,
			func(ctx context.Context) error { return r.loss(ctx, 0, whileOthers, r.replaceOthers) })
	}
	l.Add("counting losses while "+whileOwn, time.Duration(p.Own)*pace,
		func(ctx context.Context) error { return r.loss(ctx, 0, whileOwn, r.replaceOwn) })
	l.Times(p.Kills, "counting losses while "+whileKilled, time.Second+time.Duration(p.most())*300*time.Microsecond,
		func(ctx context.Context, i int) error {
			kill := func(ctx context.Context, n *testbed.Node) error { return r.killAgent(ctx, n, i) }
			return r.loss(ctx, i, whileKilled, kill)
		})
}

// perService is a time that grows with all Services of all arms.
func (r *trial) perService(each time.Duration) (d time.Duration) {
	for _, n := range r.profile.Services {
		d += time.Duration(n) * each
	}
	return d
}

// prepare makes the namespaces, the manifests, and the same clusters in this process.
func (r *trial) prepare(ctx context.Context) error {
	for _, arm := range []string{testbed.ArmDirect, testbed.ArmAgain, armRule} {
		if _, err := r.bed.AddPair(ctx, arm, 0); err != nil {
			return err
		}
	}
	if err := translate(r.bed.Pairs[2], testbed.ServiceEntry(0),
		netip.AddrPortFrom(testbed.ServerAddr(0), testbed.ServerPort)); err != nil {
		return err
	}
	for _, n := range r.profile.Services {
		p, err := r.bed.AddPair(ctx, experiment.ArmNFTables, n)
		if err != nil {
			return err
		}
		w, err := testbed.Decide(n)
		if err != nil {
			return err
		}
		r.worlds = append(r.worlds, w)
		f, err := w.Cluster.Write(r.bed.Dir, 1)
		if err != nil {
			return err
		}
		r.nodes = append(r.nodes, &testbed.Node{Pair: p, Folder: f, Mode: mode.Default})
	}
	return nil
}

// beginBeside starts the agent of a mode whose connections are measured beside.
func (r *trial) beginBeside(ctx context.Context, name string) error {
	f, err := testbed.NewCluster(r.profile.most()).WriteTo(r.bed.Dir, "beside-"+name, 1000)
	if err != nil {
		return err
	}
	var flags []string
	if n := r.mapEntries(); n > mode.DefaultMapEntries {
		flags = append(flags, "--ebpf-map-entries", fmt.Sprint(n)) // other modes take no notice
	}
	n, elapsed, err := r.bed.StartNode(ctx, name, name, f, flags...)
	if err != nil {
		return err
	}
	return r.started(n, name, 0, "empty", elapsed)
}

// mapEntries is how many entries the maps of mode ebpf have at the most Services.
func (r *trial) mapEntries() int { return max(16*r.profile.most(), mode.DefaultMapEntries) }

// operations are those of the closed loop.
func (r *trial) operations() (l []testbed.Operation) {
	p := r.profile
	for _, o := range []struct {
		measure string
		op      load.Op
	}{{"connect", load.Connect}, {"crr", load.CRR}, {"rr", load.RR}} {
		l = append(l, testbed.Operation{Measure: o.measure, Targets: few, Load: r.bed.ClosedLoop(o.op, p.Warm, p.Block)})
	}
	if p.most() > testbed.FewTargets {
		l = append(l, testbed.Operation{Measure: "connect-many", Targets: many,
			Load: r.bed.ClosedLoop(load.Connect, p.Warm, p.Block)})
	}
	return l
}

// many returns all that a pair's client may connect to: the server's own addresses, or Services, if more than
// endpoints.
func many(p *testbed.Pair) (l []netip.AddrPort) {
	switch {
	case p.Services == 0 && p.Arm != armRule:
		return testbed.DirectTargets(testbed.FewTargets)
	case p.Services > testbed.FewTargets:
		for _, i := range testbed.Targets(p.Services) {
			l = append(l, testbed.ServiceEntry(i))
		}
	}
	return l
}

// few returns as many targets in every arm. A kept connection is kept for each, so that sockets are equally warm.
func few(p *testbed.Pair) (l []netip.AddrPort) {
	switch {
	case p.Arm == armRule:
		return slices.Repeat([]netip.AddrPort{testbed.ServiceEntry(0)}, testbed.FewTargets)
	case p.Services == 0:
		return testbed.DirectTargets(testbed.FewTargets)
	}
	to := testbed.Targets(p.Services)
	for i := range testbed.FewTargets {
		l = append(l, testbed.ServiceEntry(to[i*len(to)/testbed.FewTargets]))
	}
	return l
}

// round is a round of traffic, in which the agents have nothing to do.
func (r *trial) round(ctx context.Context, n int) error {
	traffic := func() error { return r.traffic.Round(ctx, n, r.operations()) }
	if r.exact {
		return traffic()
	}
	return r.unchanged(n, duringTraffic, traffic)
}

// colds measures a cold sync and a restart at each number of Services, in random order.
func (r *trial) colds(ctx context.Context, round int) error {
	for _, i := range r.bed.Rand.Perm(len(r.worlds)) {
		w := r.worlds[i]
		if err := r.cold(ctx, round, w); err != nil {
			return err
		}
		// The kernel takes the old namespace apart in the background.
		if err := testbed.Sleep(ctx, time.Duration(w.Cluster.Services)*30*time.Microsecond); err != nil {
			return err
		}
	}
	return nil
}

// endChanges ends the loops in this process and frees their memory.
func (r *trial) endChanges() error {
	var errs []error
	for _, c := range r.changing {
		errs = append(errs, c.loop.stop(), testbed.RemoveNamespace(c.ns))
	}
	r.worlds, r.changing = nil, nil
	debug.FreeOSMemory()
	return errors.Join(errs...)
}

// watch begins to observe all nodes' kernels.
func (r *trial) watch(context.Context) error {
	for _, n := range r.nodes {
		w, err := newWatch(n)
		if err != nil {
			return err
		}
		r.watches = append(r.watches, w)
		r.bed.Defer(w.close)
	}
	return nil
}

// remark records what a reader of the numbers must know that only the run could find out.
func (r *trial) remark() {
	most, _ := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max")
	r.out.Remark(fmt.Sprintf("At most %d connections were tracked at once in one network namespace, of %s "+
		"(nf_conntrack_max).", r.traffic.Tracked, bytes.TrimSpace(most)))
	if r.exact {
		return
	}
	r.out.Remark(fmt.Sprintf("While losses were counted, connections began up to %v later than intended by the load's "+
		"own fault, which is part of their time.", r.traffic.Late.Round(10*time.Microsecond)))
}
