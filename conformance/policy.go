package conformance

import (
	"net/netip"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// policyAgent is the policy side of a node's agent: a resolver and the engine, and what they have come to.
type policyAgent struct {
	resolver *policy.Resolver
	runner   Runner[model.PolicyPart]
	decided  *model.Policies
}

// cutMark is the bit of the connection mark that says that a connection is cut.
const cutMark = 1 << 31

// policyResolver returns a resolver of a node that knows no object yet.
func (w *testbed) policyResolver(node string) *policy.Resolver {
	c := policy.Config{Node: node, Addresses: w.addresses[node], Audit: w.config.Policies.Audit,
		UnknownPods: w.config.Policies.UnknownPods}
	if w.network == nil { // which guards its pods' devices itself
		c.Devices = w.devices[node]
	}
	if w.config.Policies.Cut {
		c.CutMark = cutMark
	}
	return policy.New(c)
}

// startPolicies starts the engine on a node, without any object known.
func (w *testbed) startPolicies(node string, host *sandbox.Host) (*policyAgent, error) {
	e := w.implementation.Engine
	p := &policyAgent{decided: model.NewPolicies(), resolver: w.policyResolver(node)}
	err := host.Do(func() (err error) {
		p.runner, err = e.Start()
		return err
	})
	return p, err
}

// change passes changes to the engine by way of the resolver.
func (p *policyAgent) change(l []source.Change) {
	d := p.resolver.Apply(l)
	p.decided.Apply(d)
	p.runner.Change(d.Put, d.Del)
}

// evaluate adds what policies make of the packet beyond the node that translates it: on that of its last destination.
func (w *testbed) evaluate(j *assessment) {
	o := &j.outcome
	switch {
	case o.Action == verdict.Pass:
		if o.Policy = w.beyond(j, j.packet.Dst, false, o.Policy); o.Policy.Verdict == model.VerdictDrop {
			o.Action, o.Reason = verdict.Drop, o.Policy.Reason
		}
	case o.Action == verdict.Forward:
		dropped := 0
		for i, c := range o.Candidates {
			o.Candidates[i].Policy = w.beyond(j, c.Backend.Addr, c.Masqueraded, c.Policy)
			if p := o.Candidates[i].Policy; p.Verdict == model.VerdictDrop {
				if dropped++; dropped == len(o.Candidates) {
					o.Action, o.Reason = verdict.Drop, p.Reason
				}
			}
		}
	}
}

// beyond returns what policies decide about a packet to its last destination, where the node that translates it has
// come to o.
func (w *testbed) beyond(
	j *assessment, to netip.AddrPort, masqueraded bool, o verdict.PolicyOutcome) verdict.PolicyOutcome {
	m := memberNamed(nameOf(to.Addr()))
	if o.Verdict == model.VerdictDrop || m == nil || m.Node == "" || m.Node == j.node {
		return o
	}
	p, policies := j.packet, w.agents[m.Node].services.Policies
	p.Dst = to
	if !masqueraded {
		return verdict.Ingress(policies, p, o)
	}
	var outcomes []verdict.PolicyOutcome
	for _, a := range w.addresses[j.node] {
		if a.Is6() == to.Addr().Is6() {
			p.Src = netip.AddrPortFrom(a, p.Src.Port())
			outcomes = append(outcomes, verdict.Ingress(policies, p, o))
		}
	}
	for _, other := range outcomes[1:] {
		j.uncertain = j.uncertain || other.Verdict != outcomes[0].Verdict
	}
	return outcomes[0]
}

// denied reports whether policies drop the packet, wherever it goes.
func (j assessment) denied() bool {
	if j.outcome.Action != verdict.Drop {
		return false
	}
	if len(j.outcome.Candidates) > 0 {
		return true
	}
	return j.outcome.Policy.Verdict == model.VerdictDrop
}

// dropped returns why policies drop the packet where it goes to a backend, or "".
func (j assessment) dropped(backend netip.AddrPort) string {
	for _, c := range j.outcome.Candidates {
		if c.Backend.Addr == backend && c.Policy.Verdict == model.VerdictDrop {
			return c.Policy.Reason
		}
	}
	return ""
}

// drops returns to how many candidates policies drop the packet.
func (j assessment) drops() (n int) {
	for _, c := range j.outcome.Candidates {
		if c.Policy.Verdict == model.VerdictDrop {
			n++
		}
	}
	return n
}

// reported returns the audited rules that would drop the packet.
func (j assessment) reported() (l []model.RuleRef) {
	l = j.outcome.Policy.Reported()
	for _, c := range j.outcome.Candidates {
		l = append(l, c.Policy.Reported()...)
	}
	return l
}
