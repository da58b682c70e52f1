package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
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
	Quick     bool
	Rounds    int      // 0: as many as the profile has
	Services  []int    // numbers of Services, rising; nil: the experiment's own
	Endpoints int      // of each Service; 0: the experiment's own
	Modes     []string // to be compared; nil: all that run here
	Layouts   []string // of kube-proxy's rules, or NoLayouts alone; nil: all that run here
	Subjects  []string // others' programs to be measured beside ours, such as kube-proxy=PATH
	Seed      uint64
	Out       string    // folder in which the run's own is made
	Agent     []string  // the program whose "run" is the agent, with arguments that come before
	Command   []string  // that repeats the run, for the report
	Output    io.Writer // for progress
}

// run is an experiment at work: what they all share.
type run struct {
	Options
	id       string // begins the names of all that it makes
	tmp      string // folder for manifests
	out      *result.Writer
	rand     *rand.Rand
	cpus     processors
	realtime bool           // client and server may have real-time priority
	undo     []func() error // what is to be taken down, last first

	grouped bool          // every arm's processes are in a cgroup of their own
	podded  bool          // every arm's node has a pod
	pairs   []*pair       // of all arms, the baseline's first
	tracked int           // the most connections that conntrack knew of in one namespace
	late    time.Duration // the most that the open loop was late by its own fault
}

// perform runs the experiment that begin begins.
func perform(ctx context.Context, o Options, begin func(context.Context, *run) (work, error)) (dir string, err error) {
	if os.Geteuid() != 0 {
		return "", errors.New("the lab makes network namespaces and programs the kernel in them, which takes root: run it with sudo; nothing outside its own namespaces is changed")
	}
	if _, err := Sweep(); err != nil {
		return "", fmt.Errorf("remove what an earlier run left over: %w", err)
	}
	r := &run{Options: o, id: spacePrefix + owner(), rand: rand.New(rand.NewPCG(o.Seed, 0))}
	defer func() { err = errors.Join(err, r.takeDown()) }()
	if r.cpus, err = readProcessors(); err != nil {
		return "", err
	}
	if err := r.room(); err != nil {
		return "", err
	}
	w, err := begin(ctx, r)
	if errors.Is(err, unix.EPERM) {
		return "", fmt.Errorf("%w\nThe lab needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN, to make network namespaces and program them: in a container, run it with --privileged", err)
	} else if err != nil {
		return "", err
	}
	d := w.design()
	dir = filepath.Join(o.Out, d.ID+"-"+time.Now().Format("20060102-150405"))
	if r.out, err = result.Create(dir, result.NewManifest(d, w.profile(), o.Seed, o.Command)); err != nil {
		return "", err
	}
	if len(r.cpus.all) == 1 {
		r.out.Remark("This machine has one processor for us: the load shares it with everything else.")
	}
	err = r.all(ctx, w.steps())
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
func (r *run) all(ctx context.Context, steps []step) (err error) {
	defer func() { err = errors.Join(err, r.takeDown()) }()
	steps = append(steps, step{"taking everything down", time.Second, func(context.Context) error { return r.takeDown() }})
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

// room makes the folder for manifests.
func (r *run) room() (err error) {
	if r.tmp, err = os.MkdirTemp("", folderPrefix+owner()+"-"); err != nil {
		return fmt.Errorf("make a folder for manifests: %w", err)
	}
	r.later(func() error { return os.RemoveAll(r.tmp) })
	return nil
}

// rounds is how many there are: as many as was asked for, or the profile's.
func (r *run) rounds(profile int) int {
	if r.Options.Rounds > 0 {
		return r.Options.Rounds
	}
	return profile
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

// pair makes the namespaces of an arm.
func (r *run) pair(ctx context.Context, arm string, services int) (*pair, error) {
	name := arm
	if services > 0 {
		name += fmt.Sprint(services)
	}
	p, err := newPair(ctx, r.id+"-"+name)
	if err != nil {
		return nil, err
	}
	p.arm, p.services = arm, services
	if r.grouped {
		p.group()
	}
	r.pairs = append(r.pairs, p)
	r.later(p.close)
	if r.podded {
		return p, p.addPod(ctx)
	}
	return p, nil
}

// apart sets a processor apart for the load.
func (r *run) apart() error {
	// A Go thread that returns from a system call needs one of these to go on; none must ever wait for one.
	before := runtime.GOMAXPROCS(len(r.pairs) + runtime.NumCPU() + 2)
	r.later(func() error { runtime.GOMAXPROCS(before); return pin(os.Getpid(), r.cpus.all) })
	if err := pin(os.Getpid(), r.cpus.rest); err != nil {
		return err
	}
	if r.realtime = load.MayRealtime(); !r.realtime {
		r.out.Remark("Client and server may not have real-time priority here (CAP_SYS_NICE is missing): other threads can come between, and connect() scatters more.")
	}
	for _, p := range r.pairs {
		if p.agent != nil {
			if err := pin(p.agent.child.PID, r.cpus.rest); err != nil {
				return err
			}
		}
		if p.proxy != nil {
			if err := pin(p.proxy.PID(), r.cpus.rest); err != nil {
				return err
			}
		}
	}
	return nil
}

// serve sets a processor apart for the load and starts a server on it in every pair.
func (r *run) serve(context.Context) error {
	if err := r.apart(); err != nil {
		return err
	}
	for _, p := range r.pairs {
		if err := p.serve(r.far(p.far), everywhere, sizes, 1); err != nil {
			return err
		}
	}
	return nil
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
