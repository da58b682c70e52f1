package conformance

import (
	"fmt"
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

// startPolicies starts an engine on a node, without any object known.
func startPolicies(e *Engine, node string, host *sandbox.Host, c PolicyConfig) (*policyAgent, error) {
	p := &policyAgent{decided: model.NewPolicies(), resolver: policy.New(policy.Config{Node: node,
		Addresses: host.Addresses, Audit: c.Audit, UnknownPods: c.UnknownPods})}
	err := host.Do(func() (err error) {
		p.runner, err = e.Start()
		return err
	})
	return p, err
}

// change hands changes to the engine by way of the resolver.
func (p *policyAgent) change(l []source.Change) {
	d := p.resolver.Apply(l)
	p.decided.Apply(d)
	p.runner.Change(d.Put, d.Del)
}

// evaluation is what policies decide about a packet on one node.
type evaluation struct {
	node    string
	packet  verdict.Packet
	outcome verdict.PolicyOutcome
}

// String returns the decision with its reason, for the messages of failed cases.
func (e evaluation) String() string {
	return fmt.Sprintf("policies on node %s: %s -> %s: %s, %s", e.node, e.packet.Src.Addr(), e.packet.Dst,
		e.outcome.Verdict, e.outcome.Reason)
}

// evaluate adds what policies make of the packet that enters at a node: of one that passes as it is, and of one that
// goes to each candidate.
func (w *testbed) evaluate(j *assessment, entry string) {
	drop := func(why string) { j.denied, j.outcome.Action, j.outcome.Reason = true, verdict.Drop, why }
	if entry != j.node { // where it is for another node's address still
		if why := w.evaluateOn(j, entry, j.packet); why != "" {
			drop(why)
			return
		}
	}
	switch own := j.packet.Src.Addr() == j.packet.Dst.Addr(); {
	case j.outcome.Action == verdict.Pass && !own: // else it never leaves its own network
		if why := w.evaluateTo(j, j.packet.Dst, false); why != "" {
			drop(why)
		}
	case j.outcome.Action == verdict.Forward:
		j.dropped = map[netip.AddrPort]string{}
		for _, v := range j.outcome.Candidates {
			if why := w.evaluateTo(j, v.Backend.Addr, v.Masqueraded); why != "" {
				j.dropped[v.Backend.Addr] = why
				if len(j.dropped) == len(j.outcome.Candidates) {
					drop(why)
				}
			}
		}
	}
}

// evaluateTo evaluates the packet on the node that translates it, and on that of its last destination. It returns why
// it is dropped, or "".
func (w *testbed) evaluateTo(j *assessment, to netip.AddrPort, masqueraded bool) string {
	p := j.packet
	p.Dst = to
	if why := w.evaluateOn(j, j.node, p); why != "" {
		return why
	}
	m := memberNamed(nameOf(to.Addr()))
	if m == nil || m.Node == "" || m.Node == j.node {
		return ""
	}
	if masqueraded {
		p.Src = netip.AddrPortFrom(memberNamed("node-"+j.node).addr(to.Addr().Is6()), p.Src.Port())
	}
	return w.evaluateOn(j, m.Node, p)
}

// evaluateOn evaluates a packet on one node. It returns why it is dropped, or "".
func (w *testbed) evaluateOn(j *assessment, node string, p verdict.Packet) string {
	o := verdict.Policy(w.agents[node].policies.decided, p)
	j.policies = append(j.policies, evaluation{node, p, o})
	if o.Verdict == model.VerdictDrop {
		return o.Reason
	}
	return ""
}

// reported returns the audited rules that would drop the packet.
func (j assessment) reported() (l []model.RuleRef) {
	for _, e := range j.policies {
		l = append(l, e.outcome.Reported()...)
	}
	return l
}
