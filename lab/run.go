package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/progress"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/result"
)

// Options is what a run is told.
type Options struct {
	Profile Profile
	Seed    uint64
	Out     string    // folder in which the run's own is made
	Agent   []string  // the program whose "run" is the agent, with arguments that come before
	Command []string  // that repeats the run, for the report
	Output  io.Writer // for progress
}

// step is a piece of a run, between two looks at the progress bar.
type step struct {
	what    string
	planned time.Duration
	do      func(context.Context) error
}

// run is an experiment at work.
type run struct {
	Options
	id       string // begins the names of all that it makes
	tmp      string // folder for manifests
	out      *result.Writer
	rand     *rand.Rand
	cpus     processors
	realtime bool // client and server may have real-time priority
	spawn    func(func() error) error
	undo     []func() error // what is to be taken down, last first

	pairs    []*pair // direct, direct again, one rule, and one for each number of Services
	nodes    []*node // those of pairs with an agent
	worlds   []*world
	changing []*changing
	tracked  int           // the most connections that conntrack knew of in one namespace
	late     time.Duration // the most that the open loop was late by its own fault
}

// Services runs the experiment of that name and gives the folder with its results. Where ctx ends before the run does,
// all that the run made is taken down, the report is of what was measured so far, and the error is ctx's.
func Services(ctx context.Context, o Options) (dir string, err error) {
	if err := o.Profile.check(); err != nil {
		return "", err
	}
	if os.Geteuid() != 0 {
		return "", errors.New("the lab makes network namespaces and programs nf_tables in them, which takes root: run it with sudo; nothing outside its own namespaces is changed")
	}
	if _, err := Sweep(); err != nil {
		return "", fmt.Errorf("remove what an earlier run left over: %w", err)
	}
	r := &run{Options: o, id: spacePrefix + owner(), rand: rand.New(rand.NewPCG(o.Seed, 0))}
	if r.cpus, err = readProcessors(); err != nil {
		return "", err
	}
	if err := r.probe(ctx); errors.Is(err, unix.EPERM) {
		return "", fmt.Errorf("%w\nThe lab needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN, to make network namespaces and program them: in a container, run it with --privileged", err)
	} else if err != nil {
		return "", err
	}
	dir = filepath.Join(o.Out, "services-"+time.Now().Format("20060102-150405"))
	if r.out, err = result.Create(dir, result.NewManifest(design(o.Profile), o.Profile.Name, o.Seed, o.Command)); err != nil {
		return "", err
	}
	err = r.all(ctx)
	outcome := ""
	switch {
	case ctx.Err() != nil:
		err, outcome = ctx.Err(), "it was interrupted"
	case err != nil:
		outcome = err.Error()
	}
	return dir, errors.Join(err, r.out.Close(outcome), report.Build(dir))
}

// all does every step and takes everything down.
func (r *run) all(ctx context.Context) (err error) {
	spawning, stop := context.WithCancel(context.Background())
	defer stop()
	r.spawn = spawner(spawning)
	defer func() { err = errors.Join(err, r.takeDown()) }()
	steps := r.steps()
	var work time.Duration
	for _, s := range steps {
		work += s.planned
	}
	bar := progress.New(r.Output, len(steps), work)
	for _, s := range steps {
		if err := ctx.Err(); err != nil {
			return err
		}
		bar.Step(s.what, s.planned)
		if err := s.do(ctx); err != nil {
			if ctx.Err() != nil {
				bar.Stop("interrupted: taking everything down")
			} else {
				bar.Stop(err.Error())
			}
			return err
		}
	}
	bar.Finish()
	return nil
}

// steps is the whole run in order: the control side while this process and the agents may use every processor, then,
// with a processor set apart, the packets.
func (r *run) steps() (l []step) {
	p := r.Profile
	add := func(what string, planned time.Duration, do func(context.Context) error) {
		l = append(l, step{what, planned, do})
	}
	add("writing manifests", time.Second+r.perService(200*time.Microsecond), r.prepare)
	for i := range p.Cold {
		add(fmt.Sprintf("cold syncs, %d of %d", i+1, p.Cold), r.perService(250*time.Microsecond), func(ctx context.Context) error { return r.colds(ctx, i) })
	}
	add("filling kernels for single changes", r.perService(250*time.Microsecond), r.prepareChanges)
	for i := range p.Batches {
		add(fmt.Sprintf("single changes, %d of %d", i+1, p.Batches), time.Duration(p.Batch)*time.Millisecond, func(ctx context.Context) error { return r.batches(ctx, i) })
	}
	add("making room", time.Second, func(context.Context) error { return r.endChanges() })
	for i, n := range p.Services {
		add(fmt.Sprintf("starting the agent of %d Services", n), 500*time.Millisecond+time.Duration(n)*400*time.Microsecond,
			func(ctx context.Context) error { return r.begin(ctx, r.nodes[i]) })
	}
	add("reading memory", 2*time.Second, func(ctx context.Context) error { return r.memory(ctx, "the first sync") })
	add("watching idle agents", p.Quiet, r.idle)
	add("watching the kernels", 100*time.Millisecond, r.watch)
	for i := range p.Files {
		add(fmt.Sprintf("saving files, %d of %d", i+1, p.Files), time.Duration(p.PerFiles*len(p.Services))*8*time.Millisecond,
			func(ctx context.Context) error { return r.files(ctx, i) })
	}
	add("reading memory", 2*time.Second, func(ctx context.Context) error { return r.memory(ctx, "the changes") })
	add("starting servers", 100*time.Millisecond, r.serve)
	blocks := time.Duration(4 * (len(p.Services) + 4))
	for i := range p.Rounds {
		add(fmt.Sprintf("traffic, round %d of %d", i+1, p.Rounds), blocks*(p.Block+p.Warm+10*time.Millisecond), func(ctx context.Context) error { return r.traffic(ctx, i) })
	}
	add("counting losses while "+whileNothing, p.Calm+time.Second, func(ctx context.Context) error { return r.loss(ctx, 0, whileNothing, r.calm) })
	if p.most() > 1 {
		add("counting losses while "+whileOthers, time.Duration(p.Others)*pace, func(ctx context.Context) error { return r.loss(ctx, 0, whileOthers, r.replaceOthers) })
	}
	add("counting losses while "+whileOwn, time.Duration(p.Own)*pace, func(ctx context.Context) error { return r.loss(ctx, 0, whileOwn, r.replaceOwn) })
	for i := range p.Kills {
		add("counting losses while "+whileKilled, time.Second+time.Duration(p.most())*300*time.Microsecond, func(ctx context.Context) error {
			return r.loss(ctx, i, whileKilled, func(ctx context.Context, n *node) error { return r.killAgent(ctx, n, i) })
		})
	}
	add("noting what was seen", 0, func(context.Context) error { r.note(); return nil })
	add("taking everything down", time.Second, func(context.Context) error { return r.takeDown() })
	return l
}

// perService is a time that grows with all Services of all arms.
func (r *run) perService(each time.Duration) (d time.Duration) {
	for _, n := range r.Profile.Services {
		d += time.Duration(n) * each
	}
	return d
}

// later has something done when the run ends, after all that is said later.
func (r *run) later(f func() error) { r.undo = append(r.undo, f) }

// takeDown does what is to be done at the end.
func (r *run) takeDown() error {
	var errs []error
	for _, f := range slices.Backward(r.undo) {
		errs = append(errs, f())
	}
	r.undo = nil
	return errors.Join(errs...)
}

// drop removes a namespace.
func (r *run) drop(ns *netns.Namespace) error { return errors.Join(ns.Close(), netns.Delete(ns.Name)) }

// prepare makes the namespaces, the manifests, and the same clusters in this process.
func (r *run) prepare(ctx context.Context) (err error) {
	r.tmp = filepath.Join(os.TempDir(), folderPrefix+owner())
	if err := os.MkdirAll(r.tmp, 0o700); err != nil {
		return fmt.Errorf("make a folder for manifests: %w", err)
	}
	r.later(func() error { return os.RemoveAll(r.tmp) })
	if len(r.cpus.all) == 1 {
		r.out.Remark("This machine has one processor for us: the load shares it with everything else.")
	}
	for _, arm := range []string{armDirect, armAgain, armRule} {
		if err := r.pair(ctx, arm, 0); err != nil {
			return err
		}
	}
	if err := r.pairs[2].translate(entry(0), netip.AddrPortFrom(serverAddr(0), serverPort)); err != nil {
		return err
	}
	for _, n := range r.Profile.Services {
		if err := r.pair(ctx, armNFT, n); err != nil {
			return err
		}
		w, err := newWorld(n)
		if err != nil {
			return err
		}
		r.worlds = append(r.worlds, w)
		f, err := w.write(r.tmp)
		if err != nil {
			return err
		}
		r.nodes = append(r.nodes, &node{pair: r.pairs[len(r.pairs)-1], folder: f, service: -1})
	}
	return nil
}

// pair makes the namespaces of an arm.
func (r *run) pair(ctx context.Context, arm string, services int) error {
	name := arm
	if services > 0 {
		name += fmt.Sprint(services)
	}
	p, err := newPair(ctx, r.id+"-"+name)
	if err != nil {
		return err
	}
	p.arm, p.services = arm, services
	p.aim()
	r.pairs = append(r.pairs, p)
	r.later(p.close)
	return nil
}

// colds measures a cold sync and a restart at each number of Services, in random order.
func (r *run) colds(ctx context.Context, round int) error {
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
func (r *run) endChanges() error {
	var errs []error
	for _, c := range r.changing {
		errs = append(errs, c.stop(), r.drop(c.ns))
	}
	r.worlds, r.changing = nil, nil
	debug.FreeOSMemory()
	return errors.Join(errs...)
}

// watch looks at all nodes' kernels from now on.
func (r *run) watch(context.Context) error {
	for _, n := range r.nodes {
		if err := n.watch(); err != nil {
			return err
		}
		r.later(n.blind)
	}
	return nil
}

// serve sets a processor apart for the load and starts the servers on it.
func (r *run) serve(context.Context) error {
	// A Go thread that returns from a system call needs one of these to go on; none must ever wait for one.
	before := runtime.GOMAXPROCS(len(r.pairs) + runtime.NumCPU() + 2)
	r.later(func() error { runtime.GOMAXPROCS(before); return pin(os.Getpid(), r.cpus.all) })
	if err := pin(os.Getpid(), r.cpus.rest); err != nil {
		return err
	}
	if r.realtime = load.MayRealtime(); !r.realtime {
		r.out.Remark("Client and server may not have real-time priority here (CAP_SYS_NICE is missing): other threads can come between, and connect() scatters more.")
	}
	for _, n := range r.nodes {
		if err := pin(n.cmd.Process.Pid, r.cpus.rest); err != nil {
			return err
		}
	}
	for _, p := range r.pairs {
		if err := p.serve(r.place(p.far)); err != nil {
			return err
		}
	}
	return nil
}

// note tells what a reader of the numbers should know that only the run could find out.
func (r *run) note() {
	most, _ := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max")
	r.out.Remark(fmt.Sprintf("At most %d connections were tracked at once in one network namespace, of %s (nf_conntrack_max).", r.tracked, bytes.TrimSpace(most)))
	r.out.Remark(fmt.Sprintf("While losses were counted, connections began up to %v later than intended by the load's own fault, which is part of their time.", r.late.Round(10*time.Microsecond)))
}

// add writes a block that is one number.
func (r *run) add(b result.Block, measure string, value float64) error {
	b.Measure = measure
	return r.out.Add(b.Is(value))
}

// addTimes writes a block of single times.
func (r *run) addTimes(b result.Block, measure string, ns []int64) error {
	b.Measure = measure
	b, err := b.Times(ns)
	if err != nil {
		return err
	}
	return r.out.Add(b)
}
