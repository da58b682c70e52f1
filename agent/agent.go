package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"runtime/debug"
	"sync"
	"time"

	"fairlead.dev/fairlead/dataplane/health"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/resolve"
	"fairlead.dev/fairlead/source"
)

// Options is what a node's agent is told.
type Options struct {
	Mode    Mode
	Source  source.Source
	Resolve resolve.Config
	Log     *slog.Logger
	Status  string // address of the status page, such as 127.0.0.1:10249; empty: none
}

// Agent serves one node.
type Agent struct {
	options  Options
	services *Services
	health   *reconcile.Loop[*model.HealthCheck, health.Key, health.State]

	programming *programming

	mu       sync.Mutex // guards the resolver and what follows
	resolver *resolve.Resolver
	problems []source.Problem     // the source's
	known    map[string]time.Time // problems that were logged, and since when they stand where that is said
	synced   bool                 // the first batch is in the kernel
	batches  int
}

// Run serves a node in the calling thread's network namespace until ctx ends, and leaves the kernel as it is then.
func Run(ctx context.Context, o Options) error {
	if err := o.Resolve.Validate(); err != nil {
		return err
	}
	o.Resolve = o.Mode.Resolve(o.Resolve)
	services, err := OpenServices(o.Mode, o.Log)
	if err != nil {
		return err
	}
	defer services.Close()
	checks := health.New(nil)
	defer checks.Close()
	a := &Agent{
		options: o, services: services, programming: newProgramming(), resolver: resolve.New(o.Resolve), known: map[string]time.Time{},
		health: reconcile.New(checks, reconcile.Options[*model.HealthCheck]{
			Owner: func(h *model.HealthCheck) string { return h.Service }, Log: o.Log.With("plane", "health")}),
	}
	var listener net.Listener
	if o.Status != "" {
		if listener, err = net.Listen("tcp", o.Status); err != nil {
			return fmt.Errorf("agent: listen for the status page: %w; choose another address or none with --status-address", err)
		}
	}
	return a.run(ctx, listener)
}

// run holds the loops, the status page and the source together: the first that can't go on ends all.
func (a *Agent) run(ctx context.Context, status net.Listener) error {
	ctx, stop := context.WithCancelCause(ctx)
	var ended sync.WaitGroup
	start := func(what string, run func(context.Context) error) {
		ended.Go(func() {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				stop(fmt.Errorf("agent: %s: %w", what, err))
			}
		})
	}
	start("health checks", a.health.Run)
	start("programming time", func(ctx context.Context) error { return a.programming.run(ctx, a.services.syncPlanes) })
	if status != nil {
		start("status page", func(ctx context.Context) error { return serve(ctx, status, a.handler()) })
	}
	start("source", func(ctx context.Context) error {
		return a.options.Source.Run(ctx, func(b source.Batch) { a.take(ctx, b) })
	})
	<-ctx.Done()
	ended.Wait()
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
		a.tell(b.Problems)
		return
	}
	delta := a.resolver.Apply(b.Changes)
	first := a.batches == 0
	a.batches++
	if first || !delta.Empty() {
		a.services.Change(delta.Put, delta.Del)
		a.programming.begin(b.Seen)
		a.health.Change(delta.PutHealth, delta.DelHealth)
	}
	a.tell(append(a.problems[:len(a.problems):len(a.problems)], a.resolver.Problems()...))
	if first {
		go a.arrive(ctx)
	}
}

// tell logs each problem once while it lasts, and the end of those that can pass by themselves.
func (a *Agent) tell(problems []source.Problem) {
	now := make(map[string]time.Time, len(problems))
	for _, p := range problems {
		s := p.String()
		now[s] = p.Since
		if _, known := a.known[s]; !known {
			a.options.Log.Warn("problem in the input", "problem", s)
		}
	}
	for s, since := range a.known {
		if _, stands := now[s]; !stands && !since.IsZero() {
			a.options.Log.Info("problem in the input is over", "problem", s, "lasted", time.Since(since).Round(time.Millisecond))
		}
	}
	a.known = now
}

// arrive waits until the first batch is in the kernel, then says so and gives memory of the start back.
func (a *Agent) arrive(ctx context.Context) {
	start := time.Now()
	err := a.services.Sync(ctx)
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
	a.options.Log.Info("serving", "node", a.options.Resolve.Node, "mode", a.options.Mode.Name, "facts", facts, "took", time.Since(start).Round(time.Microsecond), "error", err)
}

// ready says whether the first batch is in the kernel.
func (a *Agent) ready() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.synced
}

// serve answers on a listener until ctx ends.
func serve(ctx context.Context, l net.Listener, h http.Handler) error {
	s := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Addresses gives the calling thread's namespace's own addresses that others can reach: not loopback, not link-local.
func Addresses() ([]netip.Addr, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("agent: list the node's addresses: %w", err)
	}
	var addrs []netip.Addr
	for _, a := range list {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
			addrs = append(addrs, p.Addr())
		}
	}
	return addrs, nil
}
