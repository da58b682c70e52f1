package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/dataplane/health"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
)

// Options is what a node's agent is told.
type Options struct {
	Mode    mode.Mode
	Why     string // that mode, for people
	Source  source.Source
	Resolve resolve.Config
	// Policies is how network policies are enforced; nil: they are not, and what is left of them is removed
	Policies *PolicyOptions
	Network  *NetworkOptions // how the node connects its pods; nil: others do
	Log      *slog.Logger
	Servers  Servers
	About    []any // attributes of the log line of a start: version, source, configuration

	Addresses Addresses // of the node's interfaces, in place of Resolve's; nil: those stay
	Firewall  Firewall  // what drops packets that the mode has the node forward; nil: that isn't looked for

	// is called before anything of the node is changed, once nothing can refuse the start any more; nil: nothing is to be
	// prepared
	Prepare     func()
	Predecessor *Predecessor // what served before in this process, and may serve after; nil: nothing
	Refusal     *Refusal     // why the newest configuration is not in force; nil: it is

	// is called with all problems that stand when they may have changed; nil: they are logged alone
	Report func([]source.Problem)
	// is called once the first batch is in the kernel and what other modes left is not; Run waits for it; nil: nothing
	// waits for that
	OnReady func(context.Context)
}

// Addresses calls tell with the addresses of the node's interfaces, and again whenever they have changed, until ctx
// ends.
type Addresses interface {
	Follow(ctx context.Context, notify func([]netip.Addr)) error
}

// Firewall is what rules that aren't ours do with packets that the node forwards.
type Firewall interface {
	// Dropping returns the chains whose policy drops them, each as the command that lists it.
	Dropping() (commands []string, err error)
}

// Agent serves one node.
type Agent struct {
	options  Options
	services *Services
	subsystems
	health   reconcile.Runner[*model.HealthCheck]
	registry *prometheus.Registry
	metrics  *proxyMetrics
	progress *progress
	ended    sync.WaitGroup // of what Run has begun
	checks   chan struct{}  // holds one when health checks changed

	mu       sync.Mutex // guards the resolver and what follows
	resolver *resolve.Resolver
	problems []source.Problem // the source's
	logged   logged
	counted
	addresses []netip.Addr // of the node's interfaces
	batches   batches
}

// counted is what is counted of Services.
type counted struct {
	names    servicesOf
	affinity []service.AffinityUse // as last counted
}

// subsystems are what a node may be without.
type subsystems struct {
	policies *Policies // nil: they are off
	network  *Network  // nil: others connect pods
}

// batches is how far the source's batches are.
type batches struct {
	synced bool // the first is in the kernel
	count  int
	pods   map[source.Key]chan struct{} // closed once the Pod of that name has been seen, or is awaited no more
}

// logged is what the log has of problems.
type logged struct {
	known    map[source.Problem]struct{} // each of them
	unread   string                      // of documents of no use
	sourced  []source.Problem            // the source's, and
	resolved [3][]source.Problem         // the resolvers', when they were last logged
}

// Run serves a node in the calling thread's network namespace until ctx ends, and leaves the kernel as it is then.
func Run(ctx context.Context, o Options) error {
	if err := o.Resolve.Validate(); err != nil {
		return err
	}
	o.Resolve = o.Mode.Resolve(o.Resolve)
	services, err := OpenServices(o.Mode, o.Log)
	if err != nil {
		return mode.Unsupported(ctx, err)
	}
	var a *Agent
	learn := func(ctx context.Context, changes []source.Change) { a.learnNames(ctx, changes) } // after the first batch
	policies, err := OpenPolicies(o.Policies, o.Mode, services, learn, o.Log)
	if err != nil {
		return errors.Join(err, services.Close())
	}
	defer policies.Close()
	begun := false // the planes may have written
	defer func() {
		if begun {
			o.Predecessor.succeed(o.Mode, services)
		} else {
			services.Close() // what served before does still
		}
	}()
	registry := prometheus.NewRegistry()
	metrics := newProxyMetrics(registry)
	a = &Agent{options: o, services: services, subsystems: subsystems{policies: policies}, registry: registry,
		metrics:  metrics,
		progress: newProgress(metrics, o.Servers.Late),
		checks:   make(chan struct{}, 1),
		resolver: resolve.New(o.Resolve), logged: logged{known: map[source.Problem]struct{}{}},
		counted: counted{names: servicesOf{}}, addresses: o.Resolve.Addresses}
	a.network, err = OpenNetwork(o.Network, o.Mode.MasqueradesAtDevices(),
		func() error { return errNotReady(a.notReady()) }, attachedPods{a}, o.Log)
	if err != nil {
		return err
	}
	attachedPods{a}.adopt()
	defer a.network.Close()
	checks := health.New(nil, func() bool { _, healthy := a.progress.health(time.Now()); return healthy })
	defer checks.Close()
	a.health = reconcile.New(checks, reconcile.Options[*model.HealthCheck]{
		Owner: func(h *model.HealthCheck) model.Owner { return h.Owner }, Log: o.Log.With("plane", "health")})
	registry.MustRegister(collector{a})
	return a.run(ctx, &begun)
}

// run holds the loops, the servers and the source together: the first that can't go on ends all.
// It reports in begun that it came to that.
func (a *Agent) run(ctx context.Context, begun *bool) error {
	ctx, stop := context.WithCancelCause(ctx)
	start := func(what string, run func(context.Context) error) {
		a.ended.Go(func() {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				stop(fmt.Errorf("agent: %s: %w", what, err))
			}
		})
	}
	servers, err := a.listen()
	if err != nil {
		return err
	}
	a.begin()
	*begun = true
	for _, s := range servers {
		start(s.what, func(ctx context.Context) error {
			return a.options.Servers.serve(ctx, a.options.Log, s.listener, s.address, s.handler)
		})
	}
	if a.options.Report != nil {
		a.options.Refusal.follow(func() { a.options.Report(a.standing()) })
		defer a.options.Refusal.follow(nil)
	}
	start("health checks", a.health.Run)
	if a.options.Addresses != nil {
		start("addresses", func(ctx context.Context) error { return a.options.Addresses.Follow(ctx, a.setAddresses) })
	}
	start("devices", func(ctx context.Context) error { return a.network.follow(ctx, a.setDevices) })
	start("pods' devices", func(ctx context.Context) error { return a.policies.followDevices(ctx, a.setPodDevices) })
	start("network files", a.followFiles)
	a.ended.Go(func() { a.progress.follow(ctx, a.sync) })
	a.ended.Go(func() { a.followChecks(ctx) })
	a.ended.Go(func() { a.policies.follow(ctx, a.metrics.policyLatency, a.report) })
	a.ended.Go(func() { a.followAffinity(ctx) })
	start("source", func(ctx context.Context) error {
		return a.options.Source.Run(ctx, func(b source.Batch) { a.consume(ctx, b) })
	})
	<-ctx.Done()
	a.ended.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// server is one of the agent's pages, at an address.
type server struct {
	what, address, flag string
	handler             http.Handler
	listener            net.Listener // nil where the address is still to be had
}

// listen opens the addresses of the agent's servers. On an error none is open.
func (a *Agent) listen() (open []server, err error) {
	for _, s := range []server{
		{"metrics", a.options.Servers.Metrics, "--metrics-bind-address", a.handler(), nil},
		{"health", a.options.Servers.Health, "--healthz-bind-address", a.healthHandler(), nil},
	} {
		if s.address == "" {
			continue
		}
		if s.listener, err = a.options.Servers.listen(a.options.Log, s.address, s.flag); err != nil {
			for _, o := range open {
				if o.listener != nil {
					o.listener.Close()
				}
			}
			return nil, err
		}
		open = append(open, s)
	}
	return open, nil
}

// consume passes what the source saw down the line.
func (a *Agent) consume(ctx context.Context, b source.Batch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.problems = b.Problems
	if b.Waiting {
		a.notifyAll()
		return
	}
	delta := a.apply(b.Changes)
	first := a.batches.count == 0
	a.batches.count++
	attachedPods{a}.seen(b.Changes)
	if first || !delta.Empty() {
		a.hand(delta, b.Seen)
	}
	if q := count(b.Changes, delta.Triggered); first || q.services+q.slices > 0 {
		q.seen = []time.Time{b.Seen}
		a.progress.queue(q)
	}
	a.notifyAll()
	if first {
		left := mode.Remains{Mode: a.options.Mode, Engine: a.policies.engine(), Log: a.options.Log}
		if !left.Mode.Tracks() {
			left.Entries = flows.EntriesOf(delta.Services.Put)
		}
		a.ended.Go(func() { a.arrive(ctx, left) })
	}
}

// apply takes changes of objects and returns what changes on the node by them.
func (a *Agent) apply(changes []source.Change) model.Delta {
	delta := a.resolver.Apply(changes)
	delta.Policies = a.policies.Apply(changes, delta.Services)
	a.network.Apply(changes)
	return delta
}

// hand hands a difference on to those who tell the kernel, with the time when its cause was seen; zero: now.
func (a *Agent) hand(d model.Delta, seen time.Time) {
	a.metrics.changed(d)
	c := d.Services
	if a.options.Mode.Accepts {
		c = model.Change[model.ServicePart]{Put: mode.WithHealth(c.Put, d.Health.Put),
			Del: mode.WithHealth(c.Del, d.Health.Del)}
	}
	a.services.Change(c.Put, c.Del)
	a.policies.Change(d.Policies, seen)
	a.names.follow(c.Put, c.Del)
	a.health.Change(d.Health.Put, d.Health.Del)
	if len(d.Health.Put) > 0 {
		select {
		case a.checks <- struct{}{}:
		default: // it will be seen with what changed already
		}
	}
}

// report reports all problems, if they are wanted.
func (a *Agent) report() {
	if a.options.Report != nil {
		a.options.Report(a.standing())
	}
}

// followChecks reports health checks that can't be served, after each change of some, until ctx ends. No Service waits
// for them.
func (a *Agent) followChecks(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.checks:
		}
		if a.health.Sync(ctx) != nil && ctx.Err() == nil {
			a.report()
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

// sync waits for the planes to have what they were told, tells what the kernel refuses, and reports whether it takes
// anything.
func (a *Agent) sync(ctx context.Context) bool {
	a.services.syncPlanes(ctx) // what could not be written is in the loops' states
	if ctx.Err() != nil {
		return false
	}
	a.report()
	for _, s := range a.services.Status() {
		if s.Error != "" {
			return false
		}
	}
	serving, _ := a.services.Serving()
	return serving
}

// standing returns every problem that stands now: the source's, the resolver's, and what the kernel refuses.
func (a *Agent) standing() []source.Problem {
	a.mu.Lock()
	all := append(a.inputProblems(), a.policies.nameProblems()...)
	a.mu.Unlock()
	all = append(all, a.options.Refusal.problems(a.options.Resolve.Node)...)
	all = append(all, a.forwardProblems()...)
	all = append(all, a.policies.cutProblems()...)
	for plane, s := range a.loops() {
		if s.NotServing != "" {
			all = append(all, source.Problem{Object: source.Key{Kind: source.Node, Name: a.options.Resolve.Node},
				Reason:  "NotServing",
				Message: fmt.Sprintf("data plane %s %s on this node: %s", plane, a.notServing(plane), s.NotServing)})
		}
		few, others := fewPerService(s.Failing)
		for _, owner := range sortedKeys(few) {
			p := source.Problem{Object: keyOf(few[owner].Owner), Reason: "Refused",
				Message: fmt.Sprintf("data plane %s can't serve %s: %s", plane, owner, few[owner].Error)}
			if plane == healthPlane {
				p.Reason = "FailedToStartServiceHealthcheck" // as kube-proxy has it
				p.Message = fmt.Sprintf("node %s: %s", a.options.Resolve.Node, few[owner].Error)
			}
			all = append(all, p)
		}
		for _, service := range sortedOwners(others) { // their number changes: that is no news
			all = append(all, source.Problem{Object: keyOf(service), Reason: "Refused",
				Message: fmt.Sprintf("data plane %s can't serve more ports of %s: /status counts them", plane,
					service)})
		}
	}
	return all
}

// inputProblems returns the problems of the source and the resolvers, and those of limits. a.mu is held.
func (a *Agent) inputProblems() []source.Problem {
	return slices.Concat(a.problems, a.resolver.Problems(), a.policies.Problems(), a.network.Problems(),
		a.affinityProblems())
}

// forwardProblems returns the problem that the node drops forwarded packets by default, if the mode doesn't accept
// them itself.
func (a *Agent) forwardProblems() []source.Problem {
	if a.options.Firewall == nil || a.options.Mode.Accepts {
		return nil
	}
	commands, err := a.options.Firewall.Dropping()
	if err != nil || len(commands) == 0 {
		return nil // what can't be read is no problem of the node's
	}
	return []source.Problem{{Object: source.Key{Kind: source.Node, Name: a.options.Resolve.Node},
		Reason: "ForwardPolicyDrop",
		Message: fmt.Sprintf("this node drops forwarded packets by default (%s): connections to Services time out unless a "+
			"rule there accepts their packets; add such rules, set the policy to ACCEPT, or use mode iptables where the chain "+
			"is iptables' FORWARD",
			strings.Join(commands, ", "))}}
}

// keyOf returns the key of a Service, a pod or a policy; the zero key for other owners.
func keyOf(o model.Owner) (k source.Key) {
	switch o.Kind {
	case model.KindService, model.KindPod, model.KindNetworkPolicy, model.KindClusterNetworkPolicy:
		k = source.Key{Kind: source.Kind(o.Kind), Namespace: o.Namespace, Name: o.Name}
	}
	return k
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func sortedOwners[V any](m map[model.Owner]V) []model.Owner {
	return slices.SortedFunc(maps.Keys(m), model.Owner.Compare)
}

// notifyAll logs what stands, but for what the kernel refuses. It costs next to nothing while that is what it was.
func (a *Agent) notifyAll() {
	resolved := [...][]source.Problem{a.resolver.Problems(), a.policies.Problems(), a.network.Problems()}
	same := slices.Equal(a.problems, a.logged.sourced)
	for i, now := range resolved {
		was := a.logged.resolved[i]
		same = same && len(now) == len(was) && (len(now) == 0 || &now[0] == &was[0])
	}
	if same {
		return
	}
	a.logged.sourced, a.logged.resolved = a.problems, resolved
	a.notify(a.problems, resolved[0], resolved[1], resolved[2])
}

// notify logs each problem once while it lasts, and the end of those that can pass by themselves.
func (a *Agent) notify(problems ...[]source.Problem) {
	now := map[source.Problem]struct{}{}
	for _, list := range problems {
		for _, p := range list {
			now[p] = struct{}{}
			if _, known := a.logged.known[p]; known {
				continue
			}
			level := slog.LevelWarn
			if p.Reason == source.KindNotRead {
				level = slog.LevelDebug // they are counted below
			}
			a.options.Log.Log(context.Background(), level, "problem", "problem", p.String())
		}
		if unread, _ := source.Unread(list); unread != "" && unread != a.logged.unread {
			a.logged.unread = unread
			a.options.Log.Info(unread + "; -v 4 lists them")
		}
	}
	for p := range a.logged.known {
		if _, stands := now[p]; !stands && !p.Since.IsZero() {
			a.options.Log.Info("problem resolved", "problem", p.String(), "lasted",
				time.Since(p.Since).Round(time.Millisecond))
		}
	}
	a.logged.known = now
}

// logServing logs the end of a start: what serves, how many Services, and how long the start took.
func (a *Agent) logServing(start time.Time, err error) {
	facts := 0
	for _, s := range a.services.Status() {
		facts += s.Held
	}
	a.mu.Lock()
	services := a.resolver.ServedCount()
	a.mu.Unlock()
	line := append([]any{"node", a.options.Resolve.Node, "mode", a.options.Mode.Name, "why", a.options.Why},
		a.options.About...)
	line = append(line, a.policies.about()...)
	line = append(line, "services", services, "facts", facts, "took", time.Since(start).Round(time.Millisecond))
	if err != nil {
		line = append(line, "error", err)
	}
	a.options.Log.Info("serving", line...)
}

// arrive waits until the first batch is in the kernel, then says so, returns memory of the start to the system, and
// removes what is left of others.
func (a *Agent) arrive(ctx context.Context, left mode.Remains) {
	start := time.Now()
	err := a.services.Sync(ctx)
	if serving, why := a.services.Serving(); !serving && ctx.Err() == nil {
		a.options.Log.Error("not serving: the kernel rejects what all Services need; retrying", "mode",
			a.options.Mode.Name, "reason", why, "error", err)
		a.services.WaitReady(ctx)
		err = a.services.Sync(ctx)
	}
	err = errors.Join(err, a.arrivePolicies(ctx), a.network.arrive(ctx))
	if ctx.Err() != nil {
		return
	}
	a.mu.Lock()
	a.batches.synced = true
	a.mu.Unlock()
	rest() // from now on memory and peace count more than time
	debug.FreeOSMemory()
	a.logServing(start, err)
	a.endPredecessor()
	for _, p := range a.forwardProblems() {
		a.options.Log.Warn("problem of the node", "problem", p.String())
	}
	left.Clean(ctx) // what fails is tried again
	if a.options.OnReady != nil {
		a.options.OnReady(ctx)
	}
	left.Release(ctx)
}

// endPredecessor ends what served before through this process, and deletes the connection tracking entries that it
// left.
func (a *Agent) endPredecessor() {
	if !a.options.Predecessor.holds() {
		return
	}
	closePredecessor(a.options.Log, a.options.Predecessor)
	a.mu.Lock()
	entries := flows.EntriesOf(a.resolver.Services().Parts())
	a.mu.Unlock()
	if err := flows.CutUntranslated(entries); err != nil {
		a.options.Log.Warn("connections of the mode before may keep their ports from being served for some seconds", "error",
			err)
	}
}

// notReady returns why the node serves nothing yet, or no more; "" where it serves. What the kernel refuses of single
// Services is no reason.
func (a *Agent) notReady() string {
	serving, why := a.services.Serving()
	enforced, whyNot := a.policies.Serving()
	connected, whyApart := a.network.Serving()
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case !serving && why != "":
		return "not serving: " + why
	case !enforced && whyNot != "":
		return "policies are not enforced: " + whyNot
	case !connected && whyApart != "":
		return "pods are not connected: " + whyApart
	case !serving || !enforced || !connected || !a.batches.synced:
		return "the first state of the source is not in the kernel yet"
	}
	return ""
}
