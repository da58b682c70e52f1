// Package service is the Services of a node, as a subsystem of its agent: what they come to, the data planes of a mode,
// health checks of load balancers, session affinity, the metrics and pages of a kube-proxy, and connections that the
// agent proxies itself.
package service

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/health"
	plane "fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// Options is how a node serves Services.
type Options struct {
	Mode     mode.Mode
	Resolve  resolve.Config
	Policies bool          // policies are evaluated of connections that the agent proxies
	Previous *Previous     // the mode that served before in this process; nil: none
	Late     time.Duration // how long a change may wait for the kernel before the node counts as unhealthy; 0: a minute
	Log      *slog.Logger
}

// Services is the Services of a node in one network namespace. It implements subsystem.Subsystem.
type Services struct {
	Options
	planes   *Planes
	started  bool
	host     subsystem.Host // since Start
	checks   *health.Plane
	health   reconcile.Runner[*model.HealthCheck]
	checked  chan struct{} // holds one when health checks changed
	metrics  *proxyMetrics
	progress *progress
	proxied  *proxied // nil: the kernel translates all connections, or policies are off

	mu       sync.Mutex // guards what follows
	resolver *resolve.Resolver
	begun    bool // the planes have the first parts
	names    servicesOf
	affinity []plane.AffinityUse // as last counted
}

var _ subsystem.Subsystem = (*Services)(nil)

// New returns the Services that planes serve, which Close closes.
func New(o Options, planes *Planes) *Services {
	s := &Services{Options: o, planes: planes, checked: make(chan struct{}, 1), metrics: newProxyMetrics(),
		resolver: resolve.New(o.Resolve), names: servicesOf{}}
	s.progress = newProgress(s.metrics, o.Late)
	if o.Policies {
		s.proxied = planes.restrict()
	}
	s.checks = health.New(nil, func() bool { _, healthy := s.progress.health(time.Now()); return healthy })
	s.health = reconcile.New(s.checks, reconcile.Options[*model.HealthCheck]{
		Owner: func(h *model.HealthCheck) model.Owner { return h.Owner }, Log: o.Log.With("plane", healthPlane)})
	return s
}

// healthPlane is the data plane of healthCheckNodePort.
const healthPlane = "health"

// Start implements subsystem.Subsystem. The previous mode of the process ends where this one needs its sockets.
func (s *Services) Start(h subsystem.Host) {
	s.started, s.host = true, h
	if s.Mode.Ends {
		s.Previous.end(s.Log)
	}
	h.Go("health checks", s.health.Run)
	loops := []func(context.Context){s.followChecks, s.followAffinity,
		func(ctx context.Context) { s.progress.follow(ctx, s.sync) }}
	if s.proxied != nil {
		loops = append(loops, s.proxied.run)
	}
	for _, run := range loops {
		h.Go("services", func(ctx context.Context) error {
			run(ctx)
			return nil
		})
	}
}

// Decide implements subsystem.Subsystem.
func (s *Services) Decide(u subsystem.Update, d *model.Delta) (known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u.Addresses != nil {
		s.resolver.SetAddresses(u.Addresses)
	}
	for _, a := range u.Attached {
		s.resolver.AttachPod(subsystem.PodKey(a.Pod), a.UID, a.Addresses)
	}
	for _, a := range u.Detached {
		s.resolver.DetachPod(subsystem.PodKey(a.Pod), a.Addresses)
	}
	if d == nil {
		s.resolver.Observe(u.Changes)
	} else if u.Names == nil {
		c := s.resolver.Apply(u.Changes)
		d.Services, d.Health, d.Triggered = c.Services, c.Health, c.Triggered
	}
	return !u.Ports || !slices.ContainsFunc(u.Attached, func(a *model.Attachment) bool {
		return !s.resolver.HasHostPorts(subsystem.PodKey(a.Pod), a.UID)
	})
}

// Change implements subsystem.Subsystem.
func (s *Services) Change(u subsystem.Update, d model.Delta) {
	if s.proxied != nil {
		s.proxied.change(d.Services, d.Policies)
	}
	if u.Names != nil {
		return
	}
	s.mu.Lock()
	first := !s.begun
	s.begun = true
	s.names.follow(d.Services.Put, d.Services.Del)
	s.mu.Unlock()
	if first || !d.Empty() {
		s.pass(d)
	}
	switch q := count(u.Changes, d.Triggered); {
	case first || q.services+q.slices > 0:
		q.seen = []time.Time{u.Seen}
		s.progress.queue(q)
	case u.Node && !d.Empty():
		s.progress.queue(queued{seen: []time.Time{{}}})
	}
}

// pass passes what was decided to the planes.
func (s *Services) pass(d model.Delta) {
	s.metrics.changed(d)
	c := d.Services
	if s.Mode.Accepts {
		c = model.Change[model.ServicePart]{Put: mode.WithHealth(c.Put, d.Health.Put),
			Del: mode.WithHealth(c.Del, d.Health.Del)}
	}
	s.planes.Change(c.Put, c.Del)
	s.health.Change(d.Health.Put, d.Health.Del)
	if len(d.Health.Put) > 0 {
		select {
		case s.checked <- struct{}{}:
		default: // it will be seen with what changed already
		}
	}
}

// followChecks has health checks reported that can't be served, after each change of some, until ctx ends. No Service
// waits for them.
func (s *Services) followChecks(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.checked:
		}
		if s.health.Sync(ctx) != nil && ctx.Err() == nil {
			s.host.Report()
		}
	}
}

// count returns what a batch changes.
func count(changes []source.Change, triggered []time.Time) queued {
	q := queued{triggered: triggered}
	for _, c := range changes {
		switch c.Key.Kind {
		case source.Service:
			q.services++
		case source.EndpointSlice:
			q.slices++
		}
	}
	return q
}

// sync waits for the planes to have what they were told, has what the kernel rejects reported, and reports whether it
// accepts anything.
func (s *Services) sync(ctx context.Context) bool {
	s.planes.syncPlanes(ctx) // what could not be written is in the loops' states
	if ctx.Err() != nil {
		return false
	}
	s.host.Report()
	for _, l := range s.planes.Status() {
		if l.Error != "" {
			return false
		}
	}
	serving, _ := s.planes.Serving()
	return serving
}

// FirstSync implements subsystem.Subsystem. It logs where Services can't be served.
func (s *Services) FirstSync(ctx context.Context) error {
	err := s.planes.Sync(ctx)
	if serving, why := s.planes.Serving(); !serving && ctx.Err() == nil {
		s.Log.Error("not serving: the kernel rejects what all Services need; retrying", "mode", s.Mode.Name, "reason", why,
			"error", err)
		s.planes.WaitReady(ctx)
		err = s.planes.Sync(ctx)
	}
	return err
}

// SyncOwner implements subsystem.Subsystem.
func (s *Services) SyncOwner(ctx context.Context, o model.Owner) error {
	return s.planes.SyncOwner(ctx, o)
}

// Readiness implements subsystem.Subsystem.
func (s *Services) Readiness() subsystem.Readiness {
	serving, why := s.planes.Serving()
	r := subsystem.Readiness{Serving: serving, Limited: true}
	if !serving && why != "" {
		r.Why = "not serving: " + why
	}
	return r
}

// Problems implements subsystem.Subsystem.
func (s *Services) Problems() subsystem.Problems {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := subsystem.Problems{Input: s.resolver.Problems(), Status: s.affinityProblems()}
	if s.proxied != nil {
		if l := s.proxied.problems(s.Resolve.Node); len(l) > 0 {
			p.Input = append(l, p.Input...)
		}
	}
	return p
}

// Loops implements subsystem.Subsystem.
func (s *Services) Loops() map[string]subsystem.Loop {
	const without = "serves no Service"
	m := map[string]subsystem.Loop{healthPlane: {Status: s.health.Status(), Without: without, Rejected: s.rejectedCheck}}
	for name, l := range s.planes.Status() {
		m[name] = subsystem.Loop{Status: l, Without: without}
	}
	return m
}

// rejectedCheck returns the problem of a health check that can't be served, as kube-proxy has it.
func (s *Services) rejectedCheck(f reconcile.Failing) (reason, message string) {
	return "FailedToStartServiceHealthcheck", fmt.Sprintf("node %s: %s", s.Resolve.Node, f.Error)
}

// Status implements subsystem.Subsystem.
func (s *Services) Status(state *subsystem.State) {
	if path, err := s.planes.FastPath(); err == nil { // else /metrics has the error
		state.FastPath = path
	}
	facts := 0
	for _, l := range s.planes.Status() {
		facts += l.Held
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	state.Leaving = s.resolver.Leaving()
	state.About = append(state.About, "services", s.resolver.ServedCount(), "facts", facts)
}

// Decided implements subsystem.Subsystem.
func (s *Services) Decided(d *inspect.Decided) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*d = *inspect.OfServices(s.resolver)
}

// EndPrevious ends the mode that served before in this process, and deletes the connection tracking entries that it
// left.
func (s *Services) EndPrevious() {
	if !s.Previous.holds() {
		return
	}
	s.Previous.end(s.Log)
	s.mu.Lock()
	entries := flows.EntriesOf(s.resolver.Services().Parts())
	s.mu.Unlock()
	if err := flows.CutUntranslated(entries); err != nil {
		s.Log.Warn("connections of the mode before may keep their ports from being served for some seconds", "error", err)
	}
}

// Close implements subsystem.Subsystem: traffic goes on, in a mode that serves only while it runs until the next ends
// it, where there is an Options.Previous.
func (s *Services) Close() error {
	defer s.checks.Close()
	if s.started && s.Mode.Ends && s.Previous != nil {
		return s.Previous.hold(s.planes)
	}
	return s.planes.Close()
}
