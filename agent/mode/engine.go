package mode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/dns"
	"fairlead.dev/fairlead/dataplane/policy/ebpf"
	"fairlead.dev/fairlead/dataplane/policy/iptables"
	"fairlead.dev/fairlead/dataplane/policy/nftables"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reconcile"
)

// Engine is a data plane for network policies.
type Engine struct {
	Name    string
	Summary string // how it matches packets: a clause
	Needs   string // what it needs of a kernel: a list of nouns
	open    func(*slog.Logger) (*PolicyPlane, error)
	Marked  bool // connections that policies no longer allow are cut by a bit of their mark: agent/policy/revoke sets it
	Log     PolicyLog
	// why it can't evaluate packets of pods that DeviceKind.IPVLAN connects; "": it can
	NoIPVLAN string
}

// Serves returns why the engine can't enforce policies for pods that are connected by devices of that kind; nil: it
// can.
func (e Engine) Serves(k model.DeviceKind) error {
	if !k.IPVLAN() || e.NoIPVLAN == "" {
		return nil
	}
	return fmt.Errorf("policy engine %s can't enforce policies for pods with network.device %s: %s; set network.device "+
		"to veth or netkit, or policy.mode to Ignore", e.Name, k, e.NoIPVLAN)
}

// atNetfilter is why an engine can't evaluate packets of pods that are connected by ipvlan.
const atNetfilter = "it evaluates at hooks of the node's netfilter, which packets to these pods bypass"

// PolicyLog is where an engine logs packets that policies deny, or would deny. The zero value is none.
type PolicyLog struct {
	Group               uint16 // of nflog
	Deny, Audit, Forged string // what the logs of each begin with
}

// marked returns the engine as one that cuts by marks and logs.
func (e Engine) marked(l PolicyLog) Engine {
	e.Marked, e.Log = true, l
	return e
}

// engines are all there are, in the order of Auto. A new policy plane is a line here.
var engines = []Engine{
	engine("nftables", "one nf_tables table of maps, written by netlink", "nf_tables and connection tracking "+
		"(CONFIG_NF_TABLES, CONFIG_NFT_CT, CONFIG_NFT_LOG)", nftables.New).marked(
		PolicyLog{nftables.LogGroup, nftables.PrefixDeny, nftables.PrefixAudit, nftables.PrefixForged}),
	engine("iptables", "iptables chains by the legacy or the nft tools, whichever the node uses, and IP sets",
		"iptables' programs, x_tables and IP sets (CONFIG_IP_NF_IPTABLES or CONFIG_NFT_COMPAT, CONFIG_IP_SET_HASH_NET)",
		iptables.New).marked(PolicyLog{iptables.LogGroup, iptables.PrefixDeny, iptables.PrefixAudit, iptables.PrefixForged}),
	engine("ebpf", "one program at netfilter's hooks, with flows of its own and no connection tracking", "programs at "+
		"hooks of netfilter (Linux 6.4, CONFIG_NETFILTER_BPF_LINK)", ebpf.New),
}

// Engines returns all engines, in the order of Auto.
func Engines() []Engine { return slices.Clone(engines) }

// EngineNames returns the engines' names.
func EngineNames() (names []string) {
	for _, e := range engines {
		names = append(names, e.Name)
	}
	return names
}

// PolicyPlane is an open plane of an engine: its loop, and the dataplane.Plane.
type PolicyPlane struct {
	reconcile.Runner[model.PolicyPart]
	Name string
	Impl any
}

// Outcomes returns how many packets the engine treated how, by outcome; nil where it counts nothing. It may be called
// at any time.
func (p *PolicyPlane) Outcomes() (map[string]uint64, error) {
	if c, ok := p.Impl.(interface {
		PolicyPackets() (map[string]uint64, error)
	}); ok {
		return c.PolicyPackets()
	}
	return nil, nil
}

// policyPlane is what a policy plane must be.
type policyPlane[K dataplane.Key, V comparable] interface {
	dataplane.Plane[model.PolicyPart, K, V]
	dataplane.Cleaner
	io.Closer
}

// engine makes an engine of a plane.
func engine[K dataplane.Key, V comparable, P policyPlane[K, V]](name, summary, needs string,
	open func() (P, error)) Engine {
	e := Engine{Name: name, Summary: summary, Needs: needs, NoIPVLAN: atNetfilter}
	e.open = func(log *slog.Logger) (*PolicyPlane, error) {
		p, err := open()
		if err != nil {
			return nil, err
		}
		log = log.With("plane", policyName(name))
		if w, ok := any(p).(warner); ok {
			w.OnWarning(func(text string) { log.Warn(text) })
		}
		isNode := func(p model.PolicyPart) bool { _, is := p.(*model.PolicyNode); return is }
		l := reconcile.New(p, reconcile.Options[model.PolicyPart]{Owner: model.PolicyOwnerOf,
			Label: model.PolicyLabelOf, Base: isNode, Log: log, MaxFacts: PolicyFacts, StandIns: model.FailClosed,
			// No ruleset is so large that pods come before it.
			Weight: func(model.PolicyPart) int { return 0 }})
		return &PolicyPlane{newIdle(l), policyName(name), p}, nil
	}
	return e
}

// PolicyFacts is how many facts an engine writes at once at most: more than the bounds of resolve/policy let a change
// come to. In between two writes of one change an address may have its new identity and a pod its old rulesets, and
// what both states forbid would pass.
const PolicyFacts = 1 << 22

// policyName returns what an engine's plane is called beside those of modes.
func policyName(engine string) string { return "policy-" + engine }

// EngineOf returns an engine by its name.
func EngineOf(name string) (Engine, error) {
	for _, e := range engines {
		if e.Name == name {
			return e, nil
		}
	}
	return Engine{}, fmt.Errorf("invalid policy engine %q: use one of %s", name,
		strings.Join(append(EngineNames(), Auto), ", "))
}

// ChooseEngine returns the engine of that name, or for Auto and "" the first that the calling thread's network
// namespace supports, and says why it was chosen. Beside a fast path the engine ebpf comes first, since others' hooks
// disable it.
func ChooseEngine(ctx context.Context, name string, fastPath bool) (e Engine, why string, err error) {
	if name = cmp.Or(name, Auto); name != Auto {
		e, err = EngineOf(name)
		return e, "asked for", err
	}
	var passed []error
	order, why := EngineNames(), ""
	if fastPath {
		i := slices.Index(order, "ebpf")
		order, why = slices.Insert(slices.Delete(order, i, i+1), 0, "ebpf"), ", for mode ebpf's fast path"
	}
	for _, name := range order {
		if e, err = EngineOf(name); err != nil {
			return e, "", err
		}
		if err = e.Probe(ctx); err == nil {
			return e, strings.Join(append([]string{"auto: the first of " + strings.Join(order, ", ") +
				" that this kernel supports" + why}, lines(passed)...), "; "), nil
		}
		passed = append(passed, fmt.Errorf("not %s: %w", e.Name, err))
	}
	return Engine{}, "", fmt.Errorf("no policy engine is supported here: %w; set policy.mode to Ignore to serve Services "+
		"alone", errors.Join(passed...))
}

// Open opens the engine's plane for the calling thread's network namespace.
func (e Engine) Open(log *slog.Logger) (*PolicyPlane, error) {
	p, err := e.open(log)
	if err != nil {
		return nil, fmt.Errorf("policy engine %s: %w", e.Name, err)
	}
	return p, nil
}

// Probe returns why the calling thread's network namespace can't have the engine, nil if it can. It opens and reads,
// and writes nothing.
func (e Engine) Probe(ctx context.Context) error {
	_, err := CheckPolicies(ctx, e, nil)
	return err
}

// PolicyAudit is what policies need in the kernel against what it holds. Nothing was written for it.
type PolicyAudit struct {
	reconcile.Plan[model.PolicyPart]
}

// CheckPolicies audits the calling thread's network namespace. Without policies nothing is wanted.
func CheckPolicies(ctx context.Context, e Engine, s *model.Policies) (a *PolicyAudit, err error) {
	p, err := e.Open(slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	plan, err := planPolicies(ctx, p, s, e.Marked)
	return &PolicyAudit{plan}, errors.Join(err, p.Close())
}

// planPolicies compares what policies need with what the kernel holds. An engine that cuts by marks has the bit only
// while there is a connection to cut: either is as wanted.
func planPolicies(ctx context.Context, p *PolicyPlane, s *model.Policies,
	marked bool) (reconcile.Plan[model.PolicyPart], error) {
	if s == nil {
		return p.Plan(ctx)
	}
	if !marked || s.Node.CutMark == 0 {
		p.Change(s.Parts(), nil)
		return p.Plan(ctx)
	}
	still := *s.Node
	still.CutMark = 0
	parts := s.Parts()
	for i, x := range parts {
		if x == model.PolicyPart(s.Node) {
			parts[i] = &still
		}
	}
	p.Change(parts, nil)
	plan, err := p.Plan(ctx)
	if err != nil || len(plan.Del) == 0 {
		return plan, err
	}
	p.Change([]model.PolicyPart{s.Node}, []model.PolicyPart{&still})
	cutting, err := p.Plan(ctx)
	if len(cutting.Put)+len(cutting.Del) < len(plan.Put)+len(plan.Del) {
		plan = cutting
	}
	return plan, err
}

// cleanEngines removes what engines left in the calling thread's network namespace, but for that of one name; without
// one, also what they share: the table of DNS messages. An engine that this kernel doesn't support has left nothing.
func cleanEngines(ctx context.Context, but string) error {
	var errs []error
	if but == "" {
		if p, err := dns.New(); err == nil {
			errs = append(errs, p.Clean(ctx), p.Close())
		}
	}
	for _, e := range engines {
		if e.Name == but {
			continue
		}
		if p, err := e.Open(slog.New(slog.DiscardHandler)); err == nil {
			errs = append(errs, p.Clean(ctx), p.Close())
		}
	}
	return errors.Join(errs...)
}

// idle is a loop that is given nothing while no policy could decide about any packet: a node without policies has no
// hook of theirs, and no connection tracking for their sake.
type idle struct {
	reconcile.Runner[model.PolicyPart]
	node     *model.PolicyNode
	pods     map[model.PolicyPart]struct{} // subjects and devices
	rulesets int
	active   bool // parts were passed on
	begun    bool
}

func newIdle(r reconcile.Runner[model.PolicyPart]) *idle {
	return &idle{Runner: r, pods: map[model.PolicyPart]struct{}{}}
}

// Change implements reconcile.Runner. The first begins the loop, whatever it holds: what is left of another run goes.
func (p *idle) Change(put, del []model.PolicyPart) {
	before := p.still() // of what was given, all but parts of rulesets
	for _, x := range del {
		p.follow(x, false)
	}
	for _, x := range put {
		p.follow(x, true)
	}
	needed := p.rulesets > 0 || p.node != nil && p.node.Unknown == model.VerdictDrop
	switch {
	case needed && !p.active:
		put, del = append(p.still(), others(put)...), nil
	case !needed && p.active:
		put, del = nil, append(before, others(del)...)
	case !needed:
		put, del = nil, nil
	}
	p.active = needed
	if len(put)+len(del) > 0 || !p.begun {
		p.begun = true
		p.Runner.Change(put, del)
	}
}

// still returns the parts that are there without any policy: the node, and what is known of its pods.
func (p *idle) still() (l []model.PolicyPart) {
	if p.node != nil {
		l = append(l, p.node)
	}
	return slices.AppendSeq(l, maps.Keys(p.pods))
}

// others returns the parts that still doesn't.
func others(parts []model.PolicyPart) (l []model.PolicyPart) {
	for _, x := range parts {
		switch x.(type) {
		case *model.PolicyNode, *model.Subject, *model.Device:
		default:
			l = append(l, x)
		}
	}
	return l
}

// follow records that a part came or went.
func (p *idle) follow(x model.PolicyPart, came bool) {
	switch x := x.(type) {
	case *model.PolicyNode:
		if p.node = nil; came {
			p.node = x
		}
	case *model.Subject, *model.Device:
		if delete(p.pods, x); came {
			p.pods[x] = struct{}{}
		}
	case *model.Ruleset:
		if p.rulesets--; came {
			p.rulesets += 2
		}
	}
}
