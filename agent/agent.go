package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/health"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/resolve"
	"fairlead.dev/fairlead/source"
)

// Options is what a node's agent is told.
type Options struct {
	Mode    Mode
	Why     string // that mode, for people
	Source  source.Source
	Resolve resolve.Config
	Log     *slog.Logger
	Servers Servers

	Addresses Addresses // of the node's interfaces, in place of Resolve's; nil: those stay

	Tell   func([]source.Problem) // is called with all problems that stand when they may have changed; nil: they are logged alone
	Served func(context.Context)  // is called once the first batch is in the kernel and what other modes left is not; Run waits for it; nil: nobody waits for that
}

// Addresses calls tell with the addresses of the node's interfaces, and again whenever they have changed, until ctx ends.
type Addresses interface {
	Follow(ctx context.Context, tell func([]netip.Addr)) error
}

// Agent serves one node.
type Agent struct {
	options  Options
	services *Services
	health   *reconcile.Loop[*model.HealthCheck, health.Key, health.State]
	registry *prometheus.Registry
	metrics  *proxyMetrics
	progress *progress
	ended    sync.WaitGroup // of what Run has begun

	mu        sync.Mutex // guards the resolver and what follows
	resolver  *resolve.Resolver
	problems  []source.Problem            // the source's
	known     map[source.Problem]struct{} // problems that were logged
	sourced   []source.Problem            // the source's, and
	resolved  []source.Problem            // the resolver's, when they were last logged
	names     servicesOf
	addresses []netip.Addr // of the node's interfaces
	synced    bool         // the first batch is in the kernel
	batches   int
	affinity  []service.AffinityUse // as last counted
}

// Run serves a node in the calling thread's network namespace until ctx ends, and leaves the kernel as it is then.
func Run(ctx context.Context, o Options) error {
	if err := o.Resolve.Validate(); err != nil {
		return err
	}
	o.Resolve = o.Mode.Resolve(o.Resolve)
	if err := keepOthers(o.Mode); err != nil {
		o.Log.Warn("connections that began before this mode may end with what began them", "error", err)
	}
	services, err := OpenServices(o.Mode, o.Log)
	if err != nil {
		return impossible(ctx, err)
	}
	defer services.Close()
	registry := prometheus.NewRegistry()
	metrics := newProxyMetrics(registry)
	a := &Agent{options: o, services: services, registry: registry, metrics: metrics, progress: newProgress(metrics, o.Servers.Late),
		resolver: resolve.New(o.Resolve), known: map[source.Problem]struct{}{}, names: servicesOf{}, addresses: o.Resolve.Addresses}
	checks := health.New(nil, func() bool { _, healthy := a.progress.health(time.Now()); return healthy })
	defer checks.Close()
	a.health = reconcile.New(checks, reconcile.Options[*model.HealthCheck]{
		Owner: func(h *model.HealthCheck) string { return h.Service }, Log: o.Log.With("plane", "health")})
	registry.MustRegister(collector{a}, collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collectors.NewGoCollector())
	return a.run(ctx)
}

// run holds the loops, the servers and the source together: the first that can't go on ends all.
func (a *Agent) run(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	start := func(what string, run func(context.Context) error) {
		a.ended.Go(func() {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				stop(fmt.Errorf("agent: %s: %w", what, err))
			}
		})
	}
	for _, s := range []struct {
		what, address, flag string
		handler             http.Handler
	}{
		{"metrics", a.options.Servers.Metrics, "--metrics-bind-address", a.handler()},
		{"health", a.options.Servers.Health, "--healthz-bind-address", a.healthHandler()},
	} {
		if s.address == "" {
			continue
		}
		l, err := a.options.Servers.listen(a.options.Log, s.address, s.flag)
		if err != nil {
			stop(err)
			break
		}
		start(s.what, func(ctx context.Context) error {
			return a.options.Servers.serve(ctx, a.options.Log, l, s.address, s.handler)
		})
	}
	start("health checks", a.health.Run)
	if a.options.Addresses != nil {
		start("addresses", func(ctx context.Context) error { return a.options.Addresses.Follow(ctx, a.setAddresses) })
	}
	a.ended.Go(func() { a.progress.follow(ctx, a.sync) })
	a.ended.Go(func() { a.followAffinity(ctx) })
	start("source", func(ctx context.Context) error {
		return a.options.Source.Run(ctx, func(b source.Batch) { a.take(ctx, b) })
	})
	<-ctx.Done()
	a.ended.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// take passes what the source saw down the line.
func (a *Agent) take(ctx context.Context, b source.Batch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.problems = b.Problems
	if b.Waiting {
		a.tellAll()
		return
	}
	delta := a.resolver.Apply(b.Changes)
	first := a.batches == 0
	a.batches++
	if first || !delta.Empty() {
		a.hand(delta)
	}
	if q := count(b.Changes, delta.Triggered); first || q.services+q.slices > 0 {
		q.seen = []time.Time{b.Seen}
		a.progress.queue(q)
	}
	a.tellAll()
	if first {
		left := others{mode: a.options.Mode, log: a.options.Log}
		if !left.mode.tracks() {
			left.entries = flows.EntriesOf(delta.Put)
		}
		a.ended.Go(func() { a.arrive(ctx, left) })
	}
}

// hand hands a difference on to those who tell the kernel.
func (a *Agent) hand(d model.Delta) {
	a.metrics.changed(d)
	a.services.Change(d.Put, d.Del)
	a.names.follow(d.Put, d.Del)
	a.health.Change(d.PutHealth, d.DelHealth)
}

// count says what a batch changes.
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

// sync waits for the planes to have what they were told, tells what the kernel refuses, and says whether it takes anything.
func (a *Agent) sync(ctx context.Context) bool {
	a.services.syncPlanes(ctx) // what could not be written is in the loops' states
	if ctx.Err() != nil {
		return false
	}
	if a.options.Tell != nil {
		a.options.Tell(a.standing())
	}
	for _, s := range a.services.Status() {
		if s.Error != "" {
			return false
		}
	}
	serving, _ := a.services.Serving()
	return serving
}

// standing gives every problem that stands now: the source's, the resolver's, and what the kernel refuses.
func (a *Agent) standing() []source.Problem {
	a.mu.Lock()
	all := slices.Concat(a.problems, a.resolver.Problems(), a.affinityProblems())
	a.mu.Unlock()
	for plane, s := range a.loops() {
		if s.NotServing != "" {
			all = append(all, source.Problem{Object: source.Key{Kind: source.Node, Name: a.options.Resolve.Node},
				Reason:  "NotServing",
				Message: fmt.Sprintf("the data plane %s serves no Service on this node: %s", plane, s.NotServing)})
		}
		few, others := fewPerService(s.Failing)
		for _, owner := range sortedKeys(few) {
			all = append(all, source.Problem{Object: ownerKey(owner), Reason: "Refused",
				Message: fmt.Sprintf("the data plane %s can't serve %s: %s", plane, owner, few[owner].Error)})
		}
		for _, service := range sortedKeys(others) { // their number changes: that is no news
			all = append(all, source.Problem{Object: ownerKey(service), Reason: "Refused",
				Message: fmt.Sprintf("the data plane %s can't serve more ports of %s: /status counts them", plane,
					service)})
		}
	}
	return all
}

// ownerKey gives the Service of an owner such as "shop/web:http"; the zero key for others.
func ownerKey(owner string) (k source.Key) {
	namespace, rest, ok := strings.Cut(owner, "/")
	if name, _, _ := strings.Cut(rest, ":"); ok && !strings.Contains(namespace, " ") {
		k = source.Key{Kind: source.Service, Namespace: namespace, Name: name}
	}
	return k
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// tellAll logs what stands, but for what the kernel refuses. It costs next to nothing while that is what it was.
func (a *Agent) tellAll() {
	resolved := a.resolver.Problems()
	if len(resolved) == len(a.resolved) && (len(resolved) == 0 || &resolved[0] == &a.resolved[0]) &&
		slices.Equal(a.problems, a.sourced) {
		return
	}
	a.sourced, a.resolved = a.problems, resolved
	a.tell(a.problems, resolved)
}

// tell logs each problem once while it lasts, and the end of those that can pass by themselves.
func (a *Agent) tell(problems ...[]source.Problem) {
	now := map[source.Problem]struct{}{}
	for _, list := range problems {
		for _, p := range list {
			now[p] = struct{}{}
			if _, known := a.known[p]; !known {
				a.options.Log.Warn("problem in the input", "problem", p.String())
			}
		}
	}
	for p := range a.known {
		if _, stands := now[p]; !stands && !p.Since.IsZero() {
			a.options.Log.Info("problem in the input is over", "problem", p.String(), "lasted",
				time.Since(p.Since).Round(time.Millisecond))
		}
	}
	a.known = now
}

// arrive waits until the first batch is in the kernel, then says so, gives memory of the start back, and removes what is left of others.
func (a *Agent) arrive(ctx context.Context, left others) {
	start := time.Now()
	err := a.services.Sync(ctx)
	if serving, why := a.services.Serving(); !serving && ctx.Err() == nil {
		a.options.Log.Error("not serving: what all Services need is not in the kernel; trying again", "mode",
			a.options.Mode.Name, "reason", why, "error", err)
		a.services.Served(ctx)
		err = a.services.Sync(ctx)
	}
	if ctx.Err() != nil {
		return
	}
	a.mu.Lock()
	a.synced = true
	a.mu.Unlock()
	rest() // from now on memory and peace count more than time
	debug.FreeOSMemory()
	facts := 0
	for _, s := range a.services.Status() {
		facts += s.Held
	}
	a.options.Log.Info("serving", "node", a.options.Resolve.Node, "mode", a.options.Mode.Name, "why", a.options.Why, "facts", facts, "took", time.Since(start).Round(time.Microsecond), "error", err)
	left.clean(ctx) // what fails is tried again
	if a.options.Served != nil {
		a.options.Served(ctx)
	}
	left.release(ctx)
}

// notReady returns why the node serves nothing yet, or no more; "" where it serves. What the kernel refuses of single
// Services is no reason.
func (a *Agent) notReady() string {
	serving, why := a.services.Serving()
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case !serving && why != "":
		return "not serving: " + why
	case !serving || !a.synced:
		return "the first state of the source is not in the kernel yet"
	}
	return ""
}
