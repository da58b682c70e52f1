package lab

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/kubeproxy"
	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/sandbox/generate"
)

var controlExperiment = Experiment{
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
	Subjects: []string{kubeProxyProgram.name, controlPlaneProgram.name},
	begin: func(ctx context.Context, r *run) (work, error) {
		p := fullControl
		if r.Quick {
			p = quickControl
		}
		if r.Services != nil {
			p.Sizes = nil
			for _, n := range r.Services {
				p.Sizes = append(p.Sizes, size{n, endpoints})
			}
		}
		p.Sizes = p.of(r.Endpoints)
		p.Rounds = r.rounds(p.Rounds)
		return newControlSide(ctx, r, p)
	},
}

// controlProfile says how much is measured.
type controlProfile struct {
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
	quickControl = controlProfile{Name: "quick", Sizes: []size{{100, endpoints}, {1000, endpoints}}, Rounds: 5, Quiet: 600 * time.Millisecond,
		Moves: 8, Rate: 100, Churn: 1500 * time.Millisecond, Least: 4}
	fullControl = controlProfile{Name: "full", Sizes: []size{{1000, endpoints}, {5000, 50}, {10000, endpoints}, {30000, endpoints}}, Rounds: 5, Quiet: time.Minute,
		Moves: 50, Rate: 100, Churn: time.Minute, Least: 10}
)

// of gives the sizes with so many endpoints of each Service, if they are to have others than their own.
func (p controlProfile) of(endpoints int) (l []size) {
	if endpoints == 0 {
		return p.Sizes
	}
	for _, s := range p.Sizes {
		l = append(l, size{s.services, endpoints})
	}
	return l
}

// check says what is wrong with the sizes.
func (p controlProfile) check() error {
	if len(p.Sizes) == 0 {
		return errors.New("numbers of Services: give at least one, such as 1000,10000")
	}
	for i, s := range p.Sizes {
		if s.services < 2 || slices.Contains(p.Sizes[:i], s) { // one never changes, another one does
			return fmt.Errorf("numbers of Services: %d: give each once, and at least 2", s.services)
		}
		if s.endpoints > generate.PerSlice {
			return fmt.Errorf("%d endpoints of each Service: give at most %d, as many as a slice has", s.endpoints, generate.PerSlice)
		}
		if err := generate.Check(s.services+1, s.endpoints); err != nil {
			return err
		}
	}
	return nil
}

// params of a size's blocks. Only another number of endpoints than ten is named.
func (s size) params() map[string]string {
	if s.endpoints == endpoints {
		return params(s.services)
	}
	return with(s.services, also("endpoints", fmt.Sprint(s.endpoints)))
}

func (s size) String() string { return fmt.Sprintf("%s × %d", thousands(s.services), s.endpoints) }

// controlSide is the experiment at work.
type controlSide struct {
	*run
	Profile controlProfile
	modes   []string
	cannot  []unable
	given   map[string]string // others' programs
	office  *netns.Namespace  // where the API server is
	joined  int               // nodes, so far
	cluster *announced        // that the API server tells of at present; nil: none
}

// newControlSide finds out what this machine can do.
func newControlSide(ctx context.Context, r *run, p controlProfile) (work, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	c := &controlSide{run: r, Profile: p}
	var err error
	if c.given, err = r.programs(kubeProxyProgram, controlPlaneProgram); err != nil {
		return nil, err
	}
	if err := r.tryProxies(ctx, c.given[kubeProxyProgram.name]); err != nil {
		return nil, err
	}
	c.modes, c.cannot, err = r.findModes(ctx)
	return c, err
}

func (r *controlSide) profile() string { return r.Profile.Name }

// subject is a program that is measured.
type subject struct {
	arm   string
	most  int           // Services that it is asked to serve; 0: any number
	moves int           // changes from rest
	pause time.Duration // before each
	begin time.Duration // planned for its start, at a thousand Services
	make  func(p *pair, kubeconfig string) keeper
}

// fewListeners is how many Services the mode userspace is asked to serve: it opens sockets for each.
const fewListeners = 1000

// subjects are the modes, and those of a kube-proxy that was given.
func (r *controlSide) subjects() (l []subject) {
	for _, m := range r.modes {
		s := subject{arm: m, moves: r.Profile.Moves, pause: 20 * time.Millisecond, begin: 300 * time.Millisecond, make: func(p *pair, kubeconfig string) keeper {
			return &ourKeeper{r.run, &node{pair: p, service: -1, mode: m, api: kubeconfig}}
		}}
		if m == "userspace" {
			s.most = fewListeners
		}
		l = append(l, s)
	}
	if binary := r.given[kubeProxyProgram.name]; binary != "" {
		for _, a := range proxyArms {
			l = append(l, subject{arm: a.id, moves: moves, pause: moveAfter, begin: 1500 * time.Millisecond, make: func(p *pair, kubeconfig string) keeper {
				return &proxyKeeper{options: r.proxyOptions(binary, a, p, kubeconfig)}
			}})
		}
	}
	return l
}

// takes says whether a subject is asked to serve a cluster.
func (s subject) takes(n size) bool { return s.most == 0 || n.services <= s.most }

// planned is how long a subject's life is thought to take.
func (r *controlSide) planned(s subject, n size) time.Duration {
	p, cold := r.Profile, s.begin*time.Duration(1+n.services*n.endpoints/(1000*endpoints))
	move := cold / 10
	return 2*cold + max(afterStart, p.Quiet/4) + p.Quiet + 1500*time.Millisecond + time.Duration(s.moves)*(s.pause+move) + max(p.Churn, time.Duration(p.Least)*(s.pause+move))
}

// steps is the whole run in order: one cluster after the other, each served by one subject at a time, in a drawn order.
func (r *controlSide) steps() []step {
	l, all := &plan{}, r.subjects()
	l.add("making room for an API server", 100*time.Millisecond, r.open)
	for _, n := range r.Profile.Sizes {
		l.add(fmt.Sprintf("telling an API server of %s", n), 5*time.Second+time.Duration(n.services)*4*time.Millisecond, func(ctx context.Context) error { return r.tell(ctx, n) })
		for round := range r.Profile.Rounds {
			for _, i := range r.rand.Perm(len(all)) {
				s := all[i]
				if !s.takes(n) {
					continue
				}
				l.add(fmt.Sprintf("%s, %s, %d of %d", n, s.arm, round+1, r.Profile.Rounds), r.planned(s, n), func(ctx context.Context) error {
					if err := r.live(ctx, round, s); err != nil {
						return fmt.Errorf("%s at %s: %w", s.arm, n, err)
					}
					return nil
				})
			}
		}
	}
	l.add("ending the API server", time.Second, func(context.Context) error { return r.silence() })
	return *l
}

// life is a subject at work on a node of its own.
type life struct {
	*controlSide
	keeper
	of    subject
	block result.Block // what all of its blocks have in common
	pair  *pair
	probe *kubeproxy.Probe
}

// live has a subject live through everything, from an empty kernel to its end.
func (r *controlSide) live(ctx context.Context, round int, s subject) (err error) {
	p, err := newPair(ctx, r.id+"-"+s.arm)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := errors.Join(r.connect(p), p.serve(load.Place{Enter: p.far.Do}, everywhere, sizes, 1)); err != nil {
		return err
	}
	if hooks(s.arm) {
		p.group()
	}
	probe, err := kubeproxy.NewProbe(entrance{p}, p.far, probeService, probePlaces)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, probe.Close()) }()
	ctx, stop := context.WithTimeout(ctx, patience+10*r.planned(s, r.cluster.size)) // it may take minutes beside others
	defer stop()
	l := &life{r, s.make(p, r.cluster.kubeconfig), s, result.Block{Arm: s.arm, Round: round, Params: r.cluster.params()}, p, probe}
	defer func() { err = errors.Join(err, l.end()) }()
	if err := r.cluster.tell(ctx, probe.Slice()); err != nil { // where it stood for the one before
		return err
	}
	for _, part := range []func(context.Context) error{l.cold, l.rest, l.changes, l.churn, l.restart} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}
