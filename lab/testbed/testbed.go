package testbed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/sysctl"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// Config is what a testbed is opened with.
type Config struct {
	Seed  uint64   // of everything that is drawn
	Agent []string // the program whose "run" is the agent, with arguments that come before
	Exact bool     // instructions are counted instead of time, on a machine that can
}

// Testbed is what one experiment measures on: this machine's processors, and the network namespaces and programs that
// were added.
type Testbed struct {
	Config   Config
	Name     string // prefix of the names of its namespaces
	Dir      string // for manifests and what programs write
	Rand     *rand.Rand
	CPUs     Processors
	Machine  result.Machine
	Grouped  bool    // every arm's processes are in a cgroup of their own
	WithPods bool    // every arm's node has a pod
	WithIPv6 bool    // every arm's node has IPv6
	Pairs    []*Pair // of all arms, the baseline's first

	trace    string            // the file for a trace of what the next client does; "": none
	realtime bool              // client and server may have real-time priority
	undo     []func() error    // of what was made, in that order
	tried    map[string]string // modes, and why they can't run here
}

// Open removes what earlier runs left over and returns a testbed without any network yet. The caller closes it.
func Open(c Config) (*Testbed, error) {
	if _, err := Sweep(); err != nil {
		return nil, fmt.Errorf("remove what an earlier run left over: %w", err)
	}
	cpus, err := readProcessors()
	if err != nil {
		return nil, err
	}
	b := &Testbed{Config: c, Name: spacePrefix + owner(), Rand: rand.New(rand.NewPCG(c.Seed, 0)), CPUs: cpus,
		Machine: ReadMachine(), tried: map[string]string{}}
	return b, b.makeDir()
}

// NewFolder makes a folder for what doesn't outlast this process. The caller removes it; of a process that was killed,
// Sweep does.
func NewFolder() (string, error) {
	dir, err := os.MkdirTemp("", folderPrefix+owner()+"-")
	if err != nil {
		return "", fmt.Errorf("make a temporary folder: %w", err)
	}
	return dir, nil
}

// makeDir makes the testbed's folder.
func (b *Testbed) makeDir() (err error) {
	if b.Dir, err = NewFolder(); err != nil {
		return err
	}
	b.Defer(func() error { return os.RemoveAll(b.Dir) })
	return nil
}

// Defer calls f when the testbed is closed, before everything that was deferred earlier.
func (b *Testbed) Defer(f func() error) { b.undo = append(b.undo, f) }

// LeftError is that a run could not remove what it made.
type LeftError struct{ Why error }

// Error implements error.
func (e *LeftError) Error() string {
	return fmt.Sprintf("not all that the run made is removed: %v; the next run removes it", e.Why)
}

// Unwrap returns the reason.
func (e *LeftError) Unwrap() error { return e.Why }

// Close removes everything, the last first. The error is a LeftError.
func (b *Testbed) Close() error {
	var errs []error
	for _, f := range slices.Backward(b.undo) {
		errs = append(errs, f())
	}
	b.undo = nil
	if err := errors.Join(errs...); err != nil {
		return &LeftError{err}
	}
	return nil
}

// Emulated reports whether the processor is a program.
func (b *Testbed) Emulated() bool { return b.Machine.Emulated() }

// Within returns how long what takes d at most may take here: on an emulated processor, ten times as long.
func (b *Testbed) Within(d time.Duration) time.Duration {
	if b.Emulated() {
		return 10 * d
	}
	return d
}

// RemoveNamespace removes a namespace.
func RemoveNamespace(ns *netns.Namespace) error {
	return errors.Join(ns.Close(), netns.Delete(ns.Name))
}

// AddPair makes the namespaces of an arm and adds them to the testbed.
func (b *Testbed) AddPair(ctx context.Context, arm string, services int) (*Pair, error) {
	p, err := b.addPair(ctx, arm, ServiceParams(services), b.WithPods)
	if p != nil {
		p.Services = services
	}
	return p, err
}

// addPair makes the namespaces of an arm, with a pod on its node or without, and adds them.
func (b *Testbed) addPair(ctx context.Context, arm string, params result.Params, pod bool) (*Pair, error) {
	name := b.Name + "-" + arm
	for _, k := range slices.Sorted(maps.Keys(params)) {
		name += params[k]
	}
	p, err := NewPair(ctx, name)
	if err != nil {
		return nil, err
	}
	p.Arm, p.Params, p.exact = arm, params, b.Config.Exact
	if b.Grouped {
		p.Group()
	}
	b.Pairs = append(b.Pairs, p)
	b.Defer(p.Close)
	if b.WithIPv6 {
		if err := sysctl.Set(p.Near, withIPv6...); err != nil {
			return p, err
		}
	}
	if pod {
		return p, p.addPod(ctx)
	}
	return p, nil
}

// Isolate reserves a processor for the load: everything else of this run leaves it. It calls remark where that can't be
// done in full.
func (b *Testbed) Isolate(remark func(string)) error {
	// A Go thread needs one of these to return from a system call; none must ever wait for one.
	before := runtime.GOMAXPROCS(len(b.Pairs) + runtime.NumCPU() + 2)
	b.Defer(func() error { runtime.GOMAXPROCS(before); return pin(os.Getpid(), b.CPUs.All) })
	if err := pin(os.Getpid(), b.CPUs.rest); err != nil {
		return err
	}
	if b.Config.Exact {
		b.Defer(quiet())
		if err := preferSoftirqs(); err != nil {
			return err
		}
	}
	if b.realtime = load.MayRealtime(); !b.realtime {
		remark("Client and server may not have real-time priority here (CAP_SYS_NICE is missing): other threads can come " +
			"between, and connect() scatters more.")
	}
	for _, p := range b.Pairs {
		for _, a := range p.agents() {
			if err := pin(a.Child.PID, b.CPUs.rest); err != nil {
				return err
			}
		}
		if p.KubeProxy != nil {
			if err := pin(p.KubeProxy.PID(), b.CPUs.rest); err != nil {
				return err
			}
		}
		if p.KubeRouter != nil {
			if err := pin(p.KubeRouter.PID(), b.CPUs.rest); err != nil {
				return err
			}
		}
	}
	return nil
}

// Serve reserves a processor for the load and starts a server on it in every pair.
func (b *Testbed) Serve(remark func(string)) error {
	if err := b.Isolate(remark); err != nil {
		return err
	}
	for _, p := range b.Pairs {
		if err := p.Serve(b.ServerThread(p.Far), Everywhere, Sizes, 1); err != nil {
			return err
		}
	}
	return nil
}
