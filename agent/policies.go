package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/revoke"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/source"
)

// PolicyOptions is how network policies are enforced on a node.
type PolicyOptions struct {
	Engine  mode.Engine
	Why     string // that engine, for people
	Resolve policy.Config
	Devices Devices // by which pods are reached; nil: pods may send by any
	// AnySource has packets of pods' addresses pass whatever device they come in by, and a problem say so. With Devices
	// nil they pass too, since the pod network's guard drops forged ones.
	AnySource bool
	// Resolvers teach the addresses of domain names.
	Resolvers Resolvers
	NameFloor time.Duration // how long an address of a domain name lives at least; 0: a minute
	NameHold  time.Duration // how long a DNS answer waits for its addresses to be in force; 0: 50 ms
}

// Devices calls notify with the name of the device by which each of the node's pods is reached, by the pod's address,
// as far as the node's routes say so, and again whenever that has changed, until ctx ends.
type Devices interface {
	Follow(ctx context.Context, notify func(map[netip.Addr]string)) error
}

// Policies is the policy side of a node in one network namespace: what its policies come to, and the engine's data
// plane. A nil one stands for a node without policies: its methods do nothing.
type Policies struct {
	PolicyOptions
	plane *mode.PolicyPlane
	existing
	stop  context.CancelFunc
	ended sync.WaitGroup

	notified chan struct{} // holds one when changes were handed on
	mu       sync.Mutex
	waiting  []time.Time    // when changes came that the kernel may not have yet
	parts    map[string]int // by kind

	carried *carried // nil: the kernel translates all connections
	names   *domainNames

	// under the mutex of who holds it:
	resolver *policy.Resolver
	preDNAT  bool // policies' hooks see packets to Services before their translation
}

// OpenPolicies opens the policy side of the calling thread's network namespace beside Services in a mode. It begins
// with the first Change. Without options there is none. Addresses of domain names are passed to learn.
func OpenPolicies(o *PolicyOptions, m mode.Mode, s *Services, learn func(context.Context, []source.Change),
	log *slog.Logger) (*Policies, error) {
	if o == nil {
		return nil, nil
	}
	plane, err := o.Engine.Open(log)
	if err != nil {
		return nil, err
	}
	existing, err := openExisting(o.Engine, plane, log)
	if err != nil {
		return nil, errors.Join(err, plane.Close())
	}
	ctx, stop := context.WithCancel(context.Background())
	p := &Policies{PolicyOptions: *o, plane: plane, existing: existing, stop: stop, notified: make(chan struct{}, 1),
		parts: map[string]int{}, resolver: policy.New(o.Resolve), preDNAT: m.PreDNAT}
	p.carried = s.restrict()
	p.names = openNames(o, plane.Impl, learn, log)
	if p.revoker != nil {
		p.revoker.Stay(p.names.holds)
	}
	p.ended.Go(func() { p.plane.Run(ctx) })
	p.ended.Go(func() { p.readDenials(ctx, log) })
	p.ended.Go(func() { p.names.run(ctx, log) })
	p.ended.Go(func() { p.carried.run(ctx) })
	return p, nil
}

// Apply takes changes of objects, and of Services as they were decided, and returns what changes by them.
func (p *Policies) Apply(changes []source.Change, services model.Change[model.ServicePart],
) (c model.Change[model.PolicyPart]) {
	if p == nil {
		return c
	}
	if p.preDNAT {
		p.resolver.ApplyServices(services)
	}
	p.names.followServices(services)
	c = p.resolver.Apply(p.names.changes(changes))
	p.carried.change(services, c)
	return c
}

// AttachPod passes on which addresses a pod of this node has been given.
func (p *Policies) AttachPod(key source.Key, addresses []netip.Addr) {
	if p != nil {
		p.resolver.AttachPod(key, addresses)
	}
}

// DetachPod passes on that a pod of this node has addresses no more.
func (p *Policies) DetachPod(key source.Key, addresses []netip.Addr) {
	if p != nil {
		p.resolver.DetachPod(key, addresses)
	}
}

// HasPod reports whether all is known that policies need of a pod of this node.
func (p *Policies) HasPod(key source.Key) bool { return p == nil || p.resolver.HasPod(key) }

// SyncOwner waits until the parts of an owner that are wanted now are in the kernel. The error says what of them is
// refused.
func (p *Policies) SyncOwner(ctx context.Context, o model.Owner) error {
	if p == nil {
		return nil
	}
	return p.plane.SyncOwner(ctx, o)
}

// SetAddresses passes on the addresses of the node's interfaces.
func (p *Policies) SetAddresses(l []netip.Addr) {
	if p != nil {
		p.resolver.SetAddresses(l)
	}
}

// followDevices passes the devices by which pods are reached to set until ctx ends.
func (p *Policies) followDevices(ctx context.Context, set func(map[netip.Addr]string)) error {
	if p == nil || p.Devices == nil {
		return nil
	}
	return p.Devices.Follow(ctx, set)
}

// Change reports what is wanted, as a change of objects seen at a time. It returns at once.
func (p *Policies) Change(c model.Change[model.PolicyPart], seen time.Time) {
	if p == nil {
		return
	}
	p.names.follow(c) // also where nothing changes: what an agent before has left goes
	if c.Empty() {
		return
	}
	p.plane.Change(c.Put, c.Del)
	p.mu.Lock()
	defer p.mu.Unlock()
	if seen.IsZero() {
		seen = time.Now()
	}
	for _, x := range c.Put {
		p.parts[kindOf(x)]++
	}
	for _, x := range c.Del {
		p.parts[kindOf(x)]--
	}
	p.waiting = append(p.waiting, seen)
	select {
	case p.notified <- struct{}{}:
	default: // it will be seen with what waits already
	}
}

// follow waits for the kernel to have each change, observes how many seconds that took, and calls report, until ctx
// ends.
func (p *Policies) follow(ctx context.Context, latency prometheus.Observer, report func()) {
	for p != nil {
		select {
		case <-ctx.Done():
			return
		case <-p.notified:
		}
		p.mu.Lock()
		waiting := p.waiting
		p.waiting = nil
		p.mu.Unlock()
		p.plane.Sync(ctx) // what could not be written is in the loop's status
		if ctx.Err() != nil {
			return
		}
		for _, seen := range waiting {
			latency.Observe(time.Since(seen).Seconds())
		}
		report()
	}
}

// Problems returns what is wrong with policies.
func (p *Policies) Problems() []source.Problem {
	if p == nil {
		return nil
	}
	l := p.carried.problems(p.Resolve.Node)
	if p.AnySource {
		l = append(l, source.Problem{Object: source.Key{Kind: source.Node, Name: p.Resolve.Node}, Reason: "SourcesNotChecked",
			Message: "policy.sourceCheck is Never: policies take packets for a pod's by their address alone, whatever device " +
				"they come in by; have the network drop forged sources, or set it to Always"})
	}
	return append(l, p.resolver.Problems()...)
}

// Sync waits until the kernel has what was changed before the call. The error says what it has not.
func (p *Policies) Sync(ctx context.Context) error {
	if p == nil {
		return nil
	}
	return p.plane.Sync(ctx)
}

// Serving reports whether what all policies need is in the kernel. If not, why is the reason, "" while nothing has been
// tried yet.
func (p *Policies) Serving() (serving bool, why string) {
	if p == nil {
		return true, ""
	}
	return p.plane.Serving()
}

// WaitReady waits until policies have been in force for the first time.
func (p *Policies) WaitReady(ctx context.Context) {
	if p == nil {
		return
	}
	select {
	case <-p.plane.Ready():
	case <-ctx.Done():
	}
}

// status adds the loop's state to those of other planes.
func (p *Policies) status(m map[string]reconcile.Status) {
	if p != nil {
		m[p.plane.Name] = p.plane.Status()
	}
}

// engine returns the engine's name, "" where policies are off.
func (p *Policies) engine() string {
	if p == nil {
		return ""
	}
	return p.Engine.Name
}

// Close ends the loop and leaves the kernel as it is: policies stay in force.
func (p *Policies) Close() error {
	if p == nil {
		return nil
	}
	p.stop()
	p.ended.Wait()
	return errors.Join(p.plane.Close(), p.closeDenials(), p.names.close())
}

// about returns attributes of the log line of a start.
func (p *Policies) about() []any {
	if p == nil {
		return []any{"policies", "off"}
	}
	return []any{"policies", p.Engine.Name, "policies_why", p.Why}
}

// notServing returns what a data plane does not do while it lacks what all its parts need.
func (a *Agent) notServing(plane string) string {
	switch p := a.policies; {
	case p != nil && plane == p.plane.Name:
		return "enforces no policy"
	case a.network.has(plane):
		return "connects no pod"
	}
	return "serves no Service"
}

// kindOf returns what a part is counted as.
func kindOf(x model.PolicyPart) string {
	switch x.(type) {
	case *model.Subject:
		return "subjects"
	case *model.Ruleset:
		return "rulesets"
	case *model.PeerTable:
		return "peer_tables"
	case *model.PeerVerdict:
		return "peer_verdicts"
	case *model.Peer:
		return "peers"
	}
	return "node"
}

// PolicyState is what the status page tells of policies.
type PolicyState struct {
	Engine   string         `json:"engine"`
	Why      string         `json:"why"` // that engine
	Audit    bool           `json:"audit"`
	Sources  bool           `json:"sourceCheck"` // packets with a pod's address are dropped where another device has them
	Enforced bool           `json:"enforced"`    // what all policies need is in the kernel
	Parts    map[string]int `json:"parts"`       // by kind
	Cuts     *revoke.Status `json:"cuts,omitempty"`
}

// state returns what the status page tells, nil where policies are off.
func (p *Policies) state() *PolicyState {
	if p == nil {
		return nil
	}
	enforced, _ := p.plane.Serving()
	return &PolicyState{p.Engine.Name, p.Why, p.Resolve.Audit, !p.AnySource, enforced, p.counts(), p.cuts()}
}

// counts returns how many parts of each kind there are.
func (p *Policies) counts() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := map[string]int{}
	for _, kind := range []string{"subjects", "rulesets", "peer_tables", "peer_verdicts", "peers"} {
		m[kind] = p.parts[kind]
	}
	return m
}

var (
	engineDesc = prometheus.NewDesc("fairlead_policy_engine", "1 for the policy engine in use; none where policies are "+
		"off. With audit, policies drop nothing.", []string{"engine", "audit"}, nil)
	sourceCheckDesc = prometheus.NewDesc("fairlead_policy_source_check", "1 with policy.sourceCheck Always: packets "+
		"with a pod's address are dropped where they come in by another device than the pod's, as far as it has one. 0 with "+
		"Never; none where policies are off.", nil, nil)
	policyPartsDesc = prometheus.NewDesc("fairlead_policy_parts", "What policies come to on this node: addresses of pods "+
		"on it (subjects), what decides for them (rulesets, peer_tables, peer_verdicts), and the addresses that policies "+
		"name (peers).", []string{"kind"}, nil)
	outcomesDesc = prometheus.NewDesc("fairlead_policy_ebpf_packets_total", "Packets by outcome: denied by a policy; "+
		"audited: passed, and audited policies would drop them; cut, of a connection that is no longer allowed; dropped "+
		"for an unknown_pod at their source or destination, or a forged source; unparsed, dropped because their ports are "+
		"not known; incomplete, dropped while policies are being written or don't fit. flow counts connections that began, "+
		"redirected packets that were evaluated where they entered and bypassed the host stack (Services' mode ebpf), "+
		"unlogged events that were not reported.", []string{"outcome"}, nil)
)

// collectPolicies makes metrics of policies.
func (c collector) collectPolicies(ch chan<- prometheus.Metric) {
	p := c.policies
	if p == nil {
		return
	}
	ch <- prometheus.MustNewConstMetric(engineDesc, prometheus.GaugeValue, 1, p.Engine.Name,
		fmt.Sprint(p.Resolve.Audit))
	checks := 1.0
	if p.AnySource {
		checks = 0
	}
	ch <- prometheus.MustNewConstMetric(sourceCheckDesc, prometheus.GaugeValue, checks)
	for kind, n := range p.counts() {
		ch <- prometheus.MustNewConstMetric(policyPartsDesc, prometheus.GaugeValue, float64(n), kind)
	}
	p.existing.collect(ch)
	p.names.collect(ch)
	packets, err := p.plane.Outcomes()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(outcomesDesc, err)
		return
	}
	for outcome, n := range packets {
		ch <- prometheus.MustNewConstMetric(outcomesDesc, prometheus.CounterValue, float64(n), outcome)
	}
}

// arrivePolicies waits until policies are in force, and says so where they can't be.
func (a *Agent) arrivePolicies(ctx context.Context) error {
	err := a.policies.Sync(ctx)
	if enforced, why := a.policies.Serving(); !enforced && ctx.Err() == nil {
		a.options.Log.Error("policies are not enforced: the kernel rejects what all need; retrying", "engine",
			a.policies.engine(), "reason", why, "error", err)
		a.policies.WaitReady(ctx)
		err = a.policies.Sync(ctx)
	}
	return err
}
