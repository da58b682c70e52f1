// Package control is the experiment that measures what it takes to keep a node as an API server says: start, restart,
// changes, idle time and memory, of every mode and of a real kube-proxy. control.go is the order of it, life.go what
// each implementation lives through, instance.go the programs, api.go the API servers.
package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/generate"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:  "control",
	Short: "Start, restart, changes, idle time and memory of the agent, beside a real kube-proxy",
	Long: `Measure the control side of every mode that this kernel can do: from the start of the program until all is in the kernel,
a restart, one change from its PATCH to the first connection that reaches the new endpoint, the same among 100 changes a
second, processor time at rest, and memory after the start and after the changes; at 1,000, 10,000 and 30,000 Services of
ten endpoints and 5,000 of fifty. It takes about four minutes with --quick, which has 100 and 1,000 Services, a night
without, and root. --subject kube-proxy=PATH measures a kube-proxy in the same run, in its modes iptables and nftables,
which takes as long again; --subject control-plane=PATH has etcd and kube-apiserver tell everybody, instead of a small API
server of the lab's own.`,
	Services: []int{1000, 10000, 30000},
	Sizes:    true,
	Compares: true,
	Rounds:   true,
	Subjects: []string{experiment.KubeProxyProgram.Name, experiment.ControlPlaneProgram.Name},
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, nil)
		if o.Services != nil {
			p.Sizes = nil
			for _, n := range o.Services {
				p.Sizes = append(p.Sizes, size{n, testbed.Endpoints})
			}
		}
		p.Sizes = p.of(o.Endpoints)
		p.Rounds = o.RoundsOr(p.Rounds)
		return newTrial(ctx, b, o, p)
	},
}

// profile is how much is measured.
type profile struct {
	Name   string
	Sizes  []size        // of clusters
	Rounds int           // in each, every subject lives once, from an empty kernel to its end
	Quiet  time.Duration // that it is watched at rest
	Moves  int           // changes from rest
	Rate   float64       // changes a second, while others are waited for
	Churn  time.Duration // that these go on at least
	Least  int           // changes that are waited for meanwhile, at least
}

var (
	quick = profile{Name: "quick", Sizes: []size{{100, testbed.Endpoints}, {1000, testbed.Endpoints}}, Rounds: 4,
		Quiet: 600 * time.Millisecond,
		Moves: 8, Rate: 100, Churn: 1500 * time.Millisecond, Least: 4}
	full = profile{Name: "full", Sizes: []size{{1000, testbed.Endpoints}, {5000, 50}, {10000, testbed.Endpoints},
		{30000, testbed.Endpoints}}, Rounds: 5, Quiet: time.Minute,
		Moves: 50, Rate: 100, Churn: time.Minute, Least: 10}
)

// size is how large a cluster is: Services, and endpoints of each.
type size struct{ services, endpoints int }

// of returns the sizes with so many endpoints of each Service, if they are to have others than their own.
func (p profile) of(endpoints int) (l []size) {
	if endpoints == 0 {
		return p.Sizes
	}
	for _, s := range p.Sizes {
		l = append(l, size{s.services, endpoints})
	}
	return l
}

// check returns an error where the sizes can't be measured.
func (p profile) check() error {
	if len(p.Sizes) == 0 {
		return errors.New("numbers of Services: give at least one, such as 1000,10000")
	}
	for i, s := range p.Sizes {
		if s.services < 2 || slices.Contains(p.Sizes[:i], s) { // one never changes, another one does
			return fmt.Errorf("numbers of Services: %d: give each once, and at least 2", s.services)
		}
		if s.endpoints > generate.PerSlice {
			return fmt.Errorf("%d endpoints of each Service: give at most %d, as many as a slice has", s.endpoints,
				generate.PerSlice)
		}
		if err := generate.Check(s.services+1, s.endpoints); err != nil {
			return err
		}
	}
	return nil
}

// params of a size's blocks. Only another number of endpoints than ten is named.
func (s size) params() result.Params {
	if s.endpoints == testbed.Endpoints {
		return testbed.ServiceParams(s.services)
	}
	return testbed.ServiceParams(s.services).With("endpoints", fmt.Sprint(s.endpoints))
}

// String returns "10,000 × 10".
func (s size) String() string {
	return fmt.Sprintf("%s × %d", experiment.Thousands(s.services), s.endpoints)
}

// trial is the experiment at work.
type trial struct {
	bed          *testbed.Testbed
	out          *result.Writer
	profile      profile
	modes        []string
	cannot       []testbed.Unable
	programs     map[string]string // of others, that were given: paths by name
	apiNamespace *netns.Namespace  // where the API server is
	joined       int               // nodes, so far
	cluster      *served           // that the API server serves at present; nil: none
}

// newTrial finds out what this machine can do.
func newTrial(ctx context.Context, b *testbed.Testbed, o experiment.Options, p profile) (experiment.Trial, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	c := &trial{bed: b, profile: p}
	var err error
	if c.programs, err = o.Programs(experiment.KubeProxyProgram, experiment.ControlPlaneProgram); err != nil {
		return nil, err
	}
	if err := experiment.TryKubeProxy(ctx, b, c.programs[experiment.KubeProxyProgram.Name]); err != nil {
		return nil, err
	}
	c.modes, c.cannot, err = b.FindModes(ctx, o.Modes)
	return c, err
}

// ProfileName returns "quick" or "full".
func (r *trial) ProfileName() string { return r.profile.Name }

// implementation is a program that is measured.
type implementation struct {
	arm   string
	most  int           // Services that it is measured with; 0: any number
	moves int           // changes from rest
	pause time.Duration // before each
	begin time.Duration // planned for its start, at a thousand Services
	make  func(p *testbed.Pair, kubeconfig string) instance
}

// fewListeners is the most Services that the mode userspace is measured with: it opens sockets for each.
const fewListeners = 1000

// implementations are the modes, and those of a kube-proxy that was given.
func (r *trial) implementations() (l []implementation) {
	for _, m := range r.modes {
		s := implementation{arm: m, moves: r.profile.Moves, pause: 20 * time.Millisecond, begin: 300 * time.Millisecond,
			make: func(p *testbed.Pair, kubeconfig string) instance {
				return &agentInstance{r.bed, &testbed.Node{Pair: p, Mode: m, Kubeconfig: kubeconfig}}
			}}
		if m == "userspace" {
			s.most = fewListeners
		}
		l = append(l, s)
	}
	if binary := r.programs[experiment.KubeProxyProgram.Name]; binary != "" {
		for _, a := range experiment.KubeProxyArms {
			l = append(l, implementation{arm: a.ID, moves: experiment.Moves, pause: experiment.MoveAfter,
				begin: 1500 * time.Millisecond, make: func(p *testbed.Pair, kubeconfig string) instance {
					return &kubeProxyInstance{options: proxyOptions(r.bed, binary, a, p, kubeconfig)}
				}})
		}
	}
	return l
}

// serves reports whether an implementation is measured with a cluster of a size.
func (s implementation) serves(n size) bool { return s.most == 0 || n.services <= s.most }

// planned returns how long an implementation's life is expected to take.
func (r *trial) planned(s implementation, n size) time.Duration {
	p, cold := r.profile, s.begin*time.Duration(1+n.services*n.endpoints/(1000*testbed.Endpoints))
	move := cold / 10
	return 2*cold + max(afterStart, p.Quiet/4) + p.Quiet + 1500*time.Millisecond + time.Duration(s.moves)*(s.pause+move) +
		max(p.Churn, time.Duration(p.Least)*(s.pause+move))
}

// Steps is the whole run in order: one cluster after the other, each served by one implementation at a time, in a
// random order.
func (r *trial) Steps(out *result.Writer) []experiment.Step {
	r.out = out
	l, all := &experiment.Plan{}, r.implementations()
	l.Add("making room for an API server", 100*time.Millisecond, r.openAPI)
	for _, n := range r.profile.Sizes {
		l.Add(fmt.Sprintf("telling an API server of %s", n), 5*time.Second+time.Duration(n.services)*4*time.Millisecond,
			func(ctx context.Context) error { return r.publish(ctx, n) })
		for round := range r.profile.Rounds {
			for _, i := range r.bed.Rand.Perm(len(all)) {
				s := all[i]
				if !s.serves(n) {
					continue
				}
				l.Add(fmt.Sprintf("%s, %s, %d of %d", n, s.arm, round+1, r.profile.Rounds), r.planned(s, n),
					func(ctx context.Context) error {
						if err := r.live(ctx, round, s); err != nil {
							return fmt.Errorf("%s at %s: %w", s.arm, n, err)
						}
						return nil
					})
			}
		}
	}
	l.Add("ending the API server", time.Second, func(context.Context) error { return r.closeAPI() })
	return *l
}

// life is an implementation that runs on a node of its own.
type life struct {
	trial          *trial
	instance       instance
	implementation implementation
	block          result.Block // what all of its blocks have in common
	pair           *testbed.Pair
	probe          *kubeproxy.Probe
}

// live runs an implementation through everything, from an empty kernel to its end.
func (r *trial) live(ctx context.Context, round int, s implementation) (err error) {
	p, err := testbed.NewPair(ctx, r.bed.Name+"-"+s.arm)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	err = errors.Join(r.connect(p), p.Serve(load.Thread{Enter: p.Far.Do}, testbed.Everywhere, testbed.Sizes, 1))
	if err != nil {
		return err
	}
	if testbed.Hooks(s.arm) {
		p.Group()
	}
	probe, err := kubeproxy.NewProbe(entrance{p}, p.Far, experiment.ProbeService, experiment.ProbeEndpoints)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, probe.Close()) }()
	// it may take minutes beside others
	ctx, stop := context.WithTimeout(ctx, testbed.Patience+10*r.planned(s, r.cluster.size))
	defer stop()
	l := &life{r, s.make(p, r.cluster.kubeconfig), s,
		result.Block{Arm: s.arm, Round: round, Params: r.cluster.size.params()}, p, probe}
	defer func() { err = errors.Join(err, l.instance.end()) }()
	if err := r.cluster.publish(ctx, probe.Slice()); err != nil { // where it stood for the one before
		return err
	}
	for _, part := range []func(context.Context) error{l.cold, l.rest, l.changes, l.churn, l.restart} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}
