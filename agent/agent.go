// Package agent is the straight line, joined: source → resolve → model → reconcile → data planes, for one node. It
// holds the list of the node's subsystems, the order in which they are told, and the servers, and no decision about any
// packet.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/memory"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/network"
	"fairlead.dev/fairlead/agent/policy"
	"fairlead.dev/fairlead/agent/service"
	"fairlead.dev/fairlead/agent/subsystem"
	"fairlead.dev/fairlead/dataplane/flows"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/model"
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

	// is called before anything of the node is changed, once nothing can reject the start any more; nil: nothing is to be
	// prepared. What the node decided is there to be had from then on
	Prepare  func(decided func() (*inspect.Decided, error))
	Previous *PreviousMode   // what served before in this process, and may serve after; nil: nothing
	Rejected *RejectedConfig // why the newest configuration is not in force; nil: it is

	// is called with all problems that stand when they may have changed; nil: they are logged alone
	Report func([]source.Problem)
	// is called once the first batch is in the kernel and what other modes left is not; Run waits for it; nil: nothing
	// waits for that
	OnReady func(context.Context)
}

// Addresses calls notify with the addresses of the node's interfaces, and again whenever they have changed, until ctx
// ends.
type Addresses interface {
	Follow(ctx context.Context, notify func([]netip.Addr)) error
}

// Firewall is what rules that aren't ours do with packets that the node forwards.
type Firewall interface {
	// Dropping returns the chains whose policy drops them, each as the command that lists it.
	Dropping() (commands []string, err error)
}

// The options of subsystems, and what outlives an agent.
type (
	PolicyOptions  = policy.Options
	NetworkOptions = network.Options
	PreviousMode   = service.Previous
)

// Agent serves one node.
type Agent struct {
	options     Options
	subsystems  []subsystem.Subsystem // in the order in which they are told
	health      http.Handler          // of load balancers and probes
	endPrevious func()                // ends what served before in this process
	registry    *prometheus.Registry
	ended       sync.WaitGroup  // of what Run has begun
	ctx         context.Context // of run
	stop        context.CancelCauseFunc

	mu        sync.Mutex       // guards what follows, and the order of updates
	problems  []source.Problem // the source's
	logged    logged
	addresses []netip.Addr // of the node's interfaces
	batches   batches
}

// batches is how far the source's batches are.
type batches struct {
	synced bool // the first is in the kernel
	count  int
	pods   map[source.Key]awaited // for which pods wait that are attached
}

// logged is what the log has of problems.
type logged struct {
	known       map[source.Problem]struct{} // each of them
	unread      string                      // of documents of no use
	unevaluated string                      // of policies of other kinds
	lists       [][]source.Problem          // the source's and the subsystems', when they were last logged
}

// Run serves a node in the calling thread's network namespace until ctx ends, and leaves the kernel as it is then.
func Run(ctx context.Context, o Options) (err error) {
	if err := o.Resolve.Validate(); err != nil {
		return err
	}
	o.Resolve = o.Mode.Resolve(o.Resolve)
	planes, err := service.OpenPlanes(o.Mode, o.Log)
	if err != nil {
		return mode.Unsupported(ctx, err)
	}
	a := newAgent(o, planes)
	defer a.close()
	if err := a.open(); err != nil {
		return err
	}
	return a.run(ctx)
}

// newAgent returns an agent with one subsystem, Services.
func newAgent(o Options, planes *service.Planes) *Agent {
	a := &Agent{options: o, registry: prometheus.NewRegistry(), addresses: o.Resolve.Addresses,
		logged: logged{known: map[source.Problem]struct{}{}}}
	s := service.New(service.Options{Mode: o.Mode, Resolve: o.Resolve, Policies: o.Policies != nil, Previous: o.Previous,
		Late: o.Servers.Late, Log: o.Log}, planes)
	a.health, a.endPrevious = s.Handler(), s.EndPrevious
	a.registry.MustRegister(collector{a})
	a.add(s)
	return a
}

// add adds a subsystem to the end of the list.
func (a *Agent) add(s subsystem.Subsystem) {
	a.subsystems = append(a.subsystems, s)
	a.registry.MustRegister(s.Metrics()...)
}

// open opens the subsystems that come after Services.
func (a *Agent) open() error {
	o := a.options
	if o.Policies != nil {
		p, err := policy.Open(*o.Policies, o.Mode.PreDNAT, o.Log)
		if err != nil {
			return err
		}
		a.add(p)
	}
	if o.Network != nil {
		n, err := network.Open(*o.Network, o.Mode.MasqueradesAtDevices(), a.notReady, attachedPods{a}, o.Log)
		if err != nil {
			return err
		}
		a.add(n)
		a.Apply(subsystem.Update{Attached: n.Attached()}) // by an agent before this one
	}
	return nil
}

// close closes the subsystems, each before those whose connections or devices it needs.
func (a *Agent) close() {
	for _, s := range slices.Backward(a.subsystems) {
		s.Close()
	}
}

// Go implements subsystem.Host.
func (a *Agent) Go(what string, run func(context.Context) error) {
	a.ended.Go(func() {
		if err := run(a.ctx); err != nil && a.ctx.Err() == nil {
			a.stop(fmt.Errorf("agent: %s: %w", what, err))
		}
	})
}

// run holds the loops, the servers and the source together: the first that can't go on ends all.
func (a *Agent) run(ctx context.Context) error {
	memory.Start()
	a.ctx, a.stop = context.WithCancelCause(ctx)
	servers, err := a.listen()
	if err != nil {
		return err
	}
	a.prepare()
	for _, s := range a.subsystems {
		s.Start(a)
	}
	for _, s := range servers {
		a.Go(s.what, func(ctx context.Context) error {
			return a.options.Servers.serve(ctx, a.options.Log, s.listener, s.address, s.handler)
		})
	}
	if a.options.Report != nil {
		a.options.Rejected.follow(a.Report)
		defer a.options.Rejected.follow(nil)
	}
	if a.options.Addresses != nil {
		a.Go("addresses", func(ctx context.Context) error { return a.options.Addresses.Follow(ctx, a.setAddresses) })
	}
	a.Go("source", func(ctx context.Context) error {
		return a.options.Source.Run(ctx, func(b source.Batch) { a.consume(ctx, b) })
	})
	<-a.ctx.Done()
	a.ended.Wait()
	if err := context.Cause(a.ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// prepare makes the node ready for the first write, once everything that could reject the start has passed.
func (a *Agent) prepare() {
	o := &a.options
	if o.Prepare != nil {
		o.Prepare(a.decided)
	}
	if err := mode.PreserveConnections(o.Mode); err != nil {
		o.Log.Warn("connections of the previous mode may be interrupted", "error", err)
	}
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
		{"health", a.options.Servers.Health, "--healthz-bind-address", a.health, nil},
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
	if !b.Waiting {
		a.batches.count++
	}
	d, _ := a.pass(subsystem.Update{Changes: b.Changes, Batch: !b.Waiting, Unlisted: b.Unlisted, Seen: b.Seen})
	attachedPods{a}.seen(b.Changes)
	a.logProblems()
	if a.batches.count == 1 {
		left := mode.Leftovers{Mode: a.options.Mode, Log: a.options.Log}
		if p := a.options.Policies; p != nil {
			left.Engine = p.Engine.Name
		}
		if !left.Mode.Tracks() {
			left.Entries = flows.EntriesOf(d.Services.Put)
		}
		a.ended.Go(func() { a.firstSync(ctx, left) })
	}
}

// pass passes an update down the list of subsystems, and what they decide by it. It reports whether all is known that
// attached pods need. a.mu is held.
func (a *Agent) pass(u subsystem.Update) (d model.Delta, known bool) {
	to, known := &d, true
	if a.batches.count == 0 && u.Names == nil {
		to = nil // it comes with the first batch
	}
	for _, s := range a.subsystems {
		known = s.Decide(u, to) && known
	}
	for _, s := range a.subsystems {
		if to != nil {
			s.Change(u, d)
		}
	}
	return d, known
}

// Apply implements subsystem.Host.
func (a *Agent) Apply(u subsystem.Update) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.apply(u)
}

// apply passes on an update that doesn't come from the source, as pass does. a.mu is held.
func (a *Agent) apply(u subsystem.Update) (known bool) {
	_, known = a.pass(u)
	if a.batches.count > 0 && u.Names == nil { // DNS answers wait for names, which make no problem
		a.logProblems()
	}
	return known
}

// setAddresses passes the addresses of the node's interfaces down the line.
func (a *Agent) setAddresses(l []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if slices.Equal(l, a.addresses) {
		return
	}
	a.options.Log.Info("the node's addresses changed", "addresses", l)
	if a.addresses = l; l == nil {
		l = []netip.Addr{} // none any more, not as before
	}
	a.apply(subsystem.Update{Addresses: l, Node: true})
}

// logServing logs the end of a start: what serves, how many Services, and how long the start took.
func (a *Agent) logServing(start time.Time, err error) {
	line := append([]any{"node", a.options.Resolve.Node, "mode", a.options.Mode.Name, "why", a.options.Why},
		a.options.About...)
	if p := a.options.Policies; p != nil {
		line = append(line, "policies", p.Engine.Name, "policies_why", p.Why)
	} else {
		line = append(line, "policies", "off")
	}
	var state State
	for _, s := range a.subsystems {
		s.Status(&state)
	}
	line = append(append(line, state.About...), "took", time.Since(start).Round(time.Millisecond))
	if err != nil {
		line = append(line, "error", err)
	}
	a.options.Log.Info("serving", line...)
}

// firstSync waits until the first batch is in the kernel, then says so, removes what is left of others, and has the
// process be at rest.
func (a *Agent) firstSync(ctx context.Context, left mode.Leftovers) {
	start := time.Now()
	var err error
	for _, s := range a.subsystems {
		if s.Readiness().Undecided { // that may last, and those before it serve
			a.endPrevious()
			left.Clean(ctx)
		}
		err = errors.Join(err, s.FirstSync(ctx))
	}
	if ctx.Err() != nil {
		return
	}
	left.Enforced = true
	a.mu.Lock()
	a.batches.synced = true
	a.mu.Unlock()
	a.logServing(start, err)
	a.endPrevious()
	for _, p := range a.forwardProblems() {
		a.options.Log.Warn("problem of the node", "problem", p.String())
	}
	left.Clean(ctx) // what fails is tried again
	memory.Rest()   // from now on memory and peace count more than time
	if a.options.OnReady != nil {
		a.options.OnReady(ctx)
	}
	left.Release(ctx)
}

// notReady returns why the node serves nothing yet, or no more, and whether pods that run may lack what they need by
// that; "" where it serves. What the kernel rejects of single Services is no reason.
func (a *Agent) notReady() (why string, limited bool) {
	serving := true
	for _, s := range a.subsystems {
		r := s.Readiness()
		if !r.Serving && r.Why != "" {
			return r.Why, r.Limited
		}
		serving = serving && r.Serving
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !serving || !a.batches.synced {
		return "the first state of the source is not in the kernel yet", false
	}
	return "", false
}
