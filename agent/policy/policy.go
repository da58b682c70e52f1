// Package policy is the network policies of a node, as a subsystem of its agent: what they come to, the engine's data
// plane, the revocation and the denials of connections, and the addresses of domain names.
package policy

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/model"
	resolve "fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/source"
)

// Options is how network policies are enforced on a node.
type Options struct {
	Engine  mode.Engine
	Why     string // that engine, for people
	Resolve resolve.Config
	Devices Devices // by which pods are reached; nil: pods may send by any
	// AnySource has packets of pods' addresses pass whatever device they come in by, and a problem say so. With Devices
	// nil they pass too, since the pod network's guard drops forged ones.
	AnySource bool
	// Resolvers teach the addresses of domain names.
	Resolvers Resolvers
	NameFloor time.Duration // how long an address of a domain name lives at least; 0: a minute
	NameHold  time.Duration // how long a DNS answer waits for its addresses to be in force; 0: 50 ms
}

// Devices calls notify with the devices by which the node's pods are reached, as the node's routes have it, and again
// whenever they have changed, until ctx ends.
type Devices interface {
	Follow(ctx context.Context, notify func([]resolve.Device)) error
}

// Policies is the network policies of a node in one network namespace. It implements subsystem.Subsystem.
type Policies struct {
	Options
	plane *mode.PolicyPlane
	established
	names    *domainNames
	preDNAT  bool // policies' hooks see packets to Services before their translation
	log      *slog.Logger
	host     subsystem.Host // once started is closed
	started  chan struct{}
	progress *progress
	ctx      context.Context // of the loops
	stop     context.CancelFunc
	ended    sync.WaitGroup

	mu       sync.Mutex // guards what follows, and names
	resolver *resolve.Resolver
	awaited
}

// awaited is what must be known before anything is decided.
type awaited struct {
	listed   bool          // the source has said what is listed
	unlisted []source.Kind // what isn't known yet that policies need
	routed   bool          // by which devices pods are reached is known, or doesn't matter
	known    chan struct{} // closed once all is
}

var _ subsystem.Subsystem = (*Policies)(nil)

// Open opens the policies of the calling thread's network namespace. It begins with the first Change. preDNAT is
// model.Capabilities.PreDNAT of the mode of Services.
func Open(o Options, preDNAT bool, log *slog.Logger) (*Policies, error) {
	plane, err := o.Engine.Open(log)
	if err != nil {
		return nil, err
	}
	established, err := openEstablished(o.Engine, plane, log)
	if err != nil {
		return nil, errors.Join(err, plane.Close())
	}
	p := &Policies{Options: o, plane: plane, established: established, preDNAT: preDNAT, log: log, progress: newProgress(),
		started: make(chan struct{}), resolver: resolve.New(o.Resolve),
		awaited: awaited{unlisted: source.Kinds(), routed: o.Devices == nil, known: make(chan struct{})}}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.names = openNames(o, plane.Impl, p.learn, log)
	if p.revoker != nil {
		p.revoker.Stay(p.names.holds)
	}
	p.ended.Go(func() { p.plane.Run(p.ctx) })
	p.ended.Go(func() { p.names.run(p.ctx, log) }) // what an agent before has DNS answers wait for
	p.ended.Go(func() { p.readDenials(p.ctx, log) })
	return p, nil
}

// Start implements subsystem.Subsystem. It returns once it is known by which devices pods are reached, so that policies
// come with the Services of the first batch.
func (p *Policies) Start(h subsystem.Host) {
	p.host = h
	close(p.started)
	h.Go("policies", func(ctx context.Context) error {
		p.follow(ctx)
		return nil
	})
	if p.Devices != nil {
		known, once := make(chan struct{}), sync.Once{}
		h.Go("pods' devices", func(ctx context.Context) error {
			defer once.Do(func() { close(known) })
			return p.Devices.Follow(ctx, func(l []resolve.Device) {
				p.setDevices(l)
				once.Do(func() { close(known) })
			})
		})
		<-known
	}
}

// setDevices passes the devices by which pods are reached down the line.
func (p *Policies) setDevices(devices []resolve.Device) {
	p.mu.Lock()
	p.resolver.SetDevices(devices)
	p.routed = true
	p.mu.Unlock()
	p.host.Apply(subsystem.Update{Node: true})
}

// learn makes the addresses of domain names known, and returns when they are in force.
func (p *Policies) learn(ctx context.Context, names []source.Change) {
	select {
	case <-p.started:
	case <-ctx.Done():
		return
	}
	p.host.Apply(subsystem.Update{Names: names})
	p.plane.Sync(ctx) // what could not be written is in the loop's status
}

// Decide implements subsystem.Subsystem.
func (p *Policies) Decide(u subsystem.Update, d *model.Delta) (known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.observe(u)
	if d == nil {
		p.resolver.Observe(u.Changes)
	} else {
		p.decide(u, d)
	}
	return !slices.ContainsFunc(u.Attached, func(a *model.Attachment) bool {
		return !p.resolver.HasPod(subsystem.PodKey(a.Pod), a.UID)
	})
}

// decide decides what follows: nothing while kinds that policies need are not listed, nor while it isn't known by which
// devices pods are reached, since any source would pass without; then everything. p.mu is held.
func (p *Policies) decide(u subsystem.Update, d *model.Delta) {
	changes := u.Changes
	if u.Names != nil {
		changes = u.Names
	}
	if p.preDNAT {
		p.resolver.ApplyServices(d.Services)
	}
	p.names.followServices(d.Services)
	if changes = p.names.changes(changes); len(p.unlisted) > 0 || !p.routed {
		p.resolver.Observe(changes)
		return
	}
	if d.Policies = p.resolver.Apply(changes); !p.begun() {
		close(p.known)
	}
}

// observe records facts. p.mu is held.
func (p *Policies) observe(u subsystem.Update) {
	if u.Batch {
		p.listed, p.unlisted = true, u.Unlisted
	}
	if u.Addresses != nil {
		p.resolver.SetAddresses(u.Addresses)
	}
	for _, a := range u.Attached {
		p.resolver.AttachPod(subsystem.PodKey(a.Pod), a.UID, a.Addresses)
	}
	for _, a := range u.Detached {
		p.resolver.DetachPod(subsystem.PodKey(a.Pod), a.Addresses)
	}
}

// begun reports whether policies have been decided.
func (p *Policies) begun() bool {
	select {
	case <-p.known:
		return true
	default:
		return false
	}
}

// undecided returns why policies have not been decided, "" if they have. p.mu is held.
func (p *Policies) undecided() string {
	if p.begun() {
		return ""
	}
	var kinds []string
	for _, k := range p.unlisted {
		kinds = append(kinds, string(k))
	}
	if !p.routed {
		kinds = append(kinds, "the routes to pods")
	}
	return "not read yet: " + strings.Join(kinds, ", ")
}

// SyncOwner implements subsystem.Subsystem.
func (p *Policies) SyncOwner(ctx context.Context, o model.Owner) error {
	return p.plane.SyncOwner(ctx, o)
}

// Change implements subsystem.Subsystem.
func (p *Policies) Change(u subsystem.Update, d model.Delta) {
	if !p.begun() {
		return
	}
	p.names.follow(d.Policies) // also where nothing changes: what an agent before has left goes
	if !d.Policies.Empty() {
		p.plane.Change(d.Policies.Put, d.Policies.Del)
		p.progress.queue(d.Policies, u.Seen)
	}
}

// progress follows changes into the kernel: what is on its way, and how long it took.
type progress struct {
	latency  prometheus.Histogram
	notified chan struct{} // holds one when changes were dispatched

	mu      sync.Mutex
	waiting []time.Time // when changes came that the kernel may not have yet
	parts   inspect.PolicyParts
}

func newProgress() *progress {
	return &progress{latency: subsystem.Latency("policy_programming_seconds", " of policies, pods or namespaces"),
		notified: make(chan struct{}, 1), parts: inspect.NewPolicyParts()}
}

// queue records that a change seen at a time, zero: now, is on its way.
func (p *progress) queue(c model.Change[model.PolicyPart], seen time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if seen.IsZero() {
		seen = time.Now()
	}
	p.parts.Apply(c)
	p.waiting = append(p.waiting, seen)
	select {
	case p.notified <- struct{}{}:
	default: // it will be seen with what waits already
	}
}

// drain returns when changes came that the kernel may not have yet.
func (p *progress) drain() (waiting []time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	waiting, p.waiting = p.waiting, nil
	return waiting
}

// follow waits for the kernel to have each change, observes how many seconds that took, and has problems reported,
// until ctx ends.
func (p *Policies) follow(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.progress.notified:
		}
		waiting := p.progress.drain()
		p.plane.Sync(ctx) // what could not be written is in the loop's status
		if ctx.Err() != nil {
			return
		}
		for _, seen := range waiting {
			p.progress.latency.Observe(time.Since(seen).Seconds())
		}
		p.host.Report()
	}
}

// Problems implements subsystem.Subsystem.
func (p *Policies) Problems() subsystem.Problems {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.resolver.Problems()
	if p.AnySource {
		l = append([]source.Problem{{Object: source.Key{Kind: source.Node, Name: p.Resolve.Node},
			Reason: resolve.SourcesNotChecked,
			Message: "policy.sourceCheck is Never: policies take packets for a pod's by their address alone, whatever device " +
				"they come in by; have the network drop forged sources, or set it to Always"}}, l...)
	}
	return subsystem.Problems{Input: l, Events: append(p.nameProblems(), p.cutProblems()...)}
}

// Readiness implements subsystem.Subsystem.
func (p *Policies) Readiness() (r subsystem.Readiness) {
	p.mu.Lock()
	defer p.mu.Unlock()
	why := ""
	if r.Serving, why = p.plane.Serving(); !r.Serving && why != "" {
		r.Why = "policies are not enforced: " + why
	}
	if undecided := p.undecided(); undecided != "" && p.listed {
		r = subsystem.Readiness{Undecided: true, Why: "policies are not decided: " + undecided}
	}
	return r
}

// FirstSync implements subsystem.Subsystem. It logs where policies can't be enforced.
func (p *Policies) FirstSync(ctx context.Context) error {
	select {
	case <-p.known:
	case <-ctx.Done():
	}
	err := p.plane.Sync(ctx)
	if enforced, why := p.plane.Serving(); !enforced && ctx.Err() == nil {
		p.log.Error("policies are not enforced: the kernel rejects what all need; retrying", "engine", p.Engine.Name,
			"reason", why, "error", err)
		select {
		case <-p.plane.Ready():
		case <-ctx.Done():
		}
		err = p.plane.Sync(ctx)
	}
	return err
}

// Loops implements subsystem.Subsystem.
func (p *Policies) Loops() map[string]subsystem.Loop {
	return map[string]subsystem.Loop{p.plane.Name: {Status: p.plane.Status(), Without: "enforces no policy"}}
}

// Close implements subsystem.Subsystem: policies stay in force.
func (p *Policies) Close() error {
	p.stop()
	p.ended.Wait()
	return errors.Join(p.plane.Close(), p.closeDenials(), p.names.close())
}

// Status implements subsystem.Subsystem.
func (p *Policies) Status(s *subsystem.State) {
	enforced, _ := p.plane.Serving()
	s.Policies = &subsystem.PolicyState{Engine: p.Engine.Name, Why: p.Why, Audit: p.Resolve.Audit,
		Sources: !p.AnySource, Enforced: enforced, Parts: p.progress.counts(), Cuts: p.cuts()}
}

// Decided implements subsystem.Subsystem: without all that policies need, none is.
func (p *Policies) Decided(d *inspect.Decided) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.Undecided = p.undecided(); d.Undecided == "" {
		d.Services.Policies = p.resolver.Policies()
	}
}

// counts returns how many parts of each kind there are.
func (p *progress) counts() inspect.PolicyParts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.parts)
}
