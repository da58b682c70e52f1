package main

import (
	"fmt"
	"slices"
	"strings"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reachability"
	"fairlead.dev/fairlead/verdict"
)

// explainedPolicy is what policies make of a packet at some of its backends.
type explainedPolicy struct {
	Backends []string        `json:"backends"` // or the destination of a packet that matches no frontend
	Verdict  string          `json:"verdict"`
	Reason   string          `json:"reason"`
	Reported []string        `json:"auditedWouldDrop,omitempty"`
	Steps    []explainedStep `json:"steps,omitempty"`
}

// explainedStep is what a tier of policies decides for the pod at one end.
type explainedStep struct {
	Direction string   `json:"direction"`
	Pod       string   `json:"pod"`
	Node      string   `json:"node,omitempty"` // where it is evaluated
	Tier      string   `json:"tier"`
	Ruleset   string   `json:"ruleset"`
	Entry     string   `json:"portEntry"`
	Peer      string   `json:"peer"`
	Decision  string   `json:"decision"`
	By        []string `json:"by,omitempty"`
	Audited   []string `json:"audited,omitempty"` // rules that would decide otherwise if they were enforced
	Kernel    string   `json:"kernel"`
}

// policyExplainer explains what policies make of a packet.
type policyExplainer struct {
	*snapshot
	audit   *mode.PolicyAudit
	cluster *reachability.Cluster // made when the backend of another node is met
	each    bool                  // backends for which policies decide alike are shown apart
	lacking int                   // facts of those looked for that the kernel lacks
	of      int
}

// explain adds what policies decide to e: for each candidate, also where its own node does. Where they drop the packet
// for all of them, that is its outcome.
func (x *policyExplainer) explain(e *explained, v verdict.Verdict, p verdict.Packet) error {
	if last := v.Steps[len(v.Steps)-1]; last.Stage != verdict.StagePolicies {
		return nil
	}
	candidates := v.Candidates
	if v.Frontend == nil {
		candidates = []verdict.Candidate{{Backend: model.Backend{Addr: p.Dst}, Policy: v.Policy}}
	}
	dropped, reason := 0, ""
	for i, k := range candidates {
		o, node, err := x.decide(p, k)
		if err != nil {
			return err
		}
		if o.Verdict == model.VerdictDrop {
			if dropped, reason = dropped+1, o.Reason; v.Frontend != nil {
				e.Candidates[i].Dropped = true
			}
		}
		x.add(e, k.Backend.Addr.String(), node, o)
	}
	if dropped == len(candidates) {
		e.Outcome, e.Reason = verdict.Drop.String(), reason
	}
	e.PolicyKernel = "in sync"
	if missing, of := x.audit.Lacks(x.services.Policies.Node); missing > 0 {
		e.PolicyKernel = fmt.Sprintf("not enforced: the node lacks %d of %d facts", missing, of)
	} else if x.lacking > 0 {
		e.PolicyKernel = fmt.Sprintf("lacks %d of %d facts", x.lacking, x.of)
	}
	return nil
}

// decide returns what policies decide about p at a candidate, and the candidate's node if it is another one, which
// evaluates ingress.
func (x *policyExplainer) decide(p verdict.Packet, k verdict.Candidate) (verdict.PolicyOutcome, string, error) {
	dst := k.Backend.Addr.Addr()
	if x.services.Policies.Subjects[dst] != nil || slices.Contains(x.services.Policies.Node.Addresses, dst) ||
		dst == p.Src.Addr() {
		return k.Policy, "", nil
	}
	if x.cluster == nil {
		o, err := options(x.config)
		if err != nil {
			return k.Policy, "", err
		}
		x.cluster = reachability.New(x.objects, o)
	}
	p.Dst = k.Backend.Addr
	path := x.cluster.Path(x.services.Node.Name, p, k.Masqueraded, k.Policy)
	if path.Source != p.Src.Addr() {
		path.Policy.Reason += fmt.Sprintf(" (it sees source %s)", path.Source)
	}
	return path.Policy, path.Node, nil
}

// add adds an outcome to e, with those that are alike.
func (x *policyExplainer) add(e *explained, backend, node string, o verdict.PolicyOutcome) {
	n := explainedPolicy{Backends: []string{backend}, Verdict: o.Verdict.String(), Reason: o.Reason,
		Reported: texts(o.Reported())}
	for _, s := range o.Steps {
		n.Steps = append(n.Steps, x.step(s, node))
	}
	for i := range e.Policies {
		if !x.each && e.Policies[i].alike(n) {
			e.Policies[i].Backends = append(e.Policies[i].Backends, backend)
			return
		}
	}
	e.Policies = append(e.Policies, n)
}

// alike reports whether the same rules decide in p and o, and the kernel is as it should be in both.
func (p explainedPolicy) alike(o explainedPolicy) bool {
	return p.Verdict == o.Verdict && slices.EqualFunc(p.Steps, o.Steps, func(a, b explainedStep) bool {
		same := a.Direction == b.Direction && a.Ruleset == b.Ruleset && a.Entry == b.Entry && a.Decision == b.Decision &&
			slices.Equal(a.By, b.By) && slices.Equal(a.Audited, b.Audited)
		return same && !strings.HasPrefix(a.Kernel, "lacks") && !strings.HasPrefix(b.Kernel, "lacks")
	})
}

// step explains a step. node is that of the destination, where it is another one.
func (x *policyExplainer) step(s verdict.PolicyStep, node string) explainedStep {
	n := explainedStep{Direction: s.Direction.String(), Pod: s.Subject.Pod, Node: x.services.Node.Name,
		Ruleset: s.Ruleset.Name, Entry: entryText(s), Peer: "none that policies name", Decision: s.Decision.String(),
		By: texts(s.By), Audited: texts(s.Audited)}
	if s.Peer != nil {
		n.Peer = s.Peer.Name
	}
	if len(s.Ruleset.Policies) > 0 {
		n.Tier = s.Ruleset.Policies[0].Tier.String()
	}
	if s.Direction == model.Ingress && node != "" {
		n.Node, n.Kernel = node, "not compared: node "+node+" evaluates it"
		return n
	}
	parts := []model.PolicyPart{s.Subject, s.Ruleset, s.Entry.PeerTable}
	if s.Peer != nil {
		parts = append(parts, s.Peer)
		key := model.PeerVerdictKey{PeerTable: s.Entry.PeerTable.ID, Identity: s.Peer.Identity.ID}
		if v := x.services.Policies.Verdicts[key]; v != nil {
			parts = append(parts, v)
		}
	}
	missing, of := 0, 0
	for _, part := range parts {
		m, k := x.audit.Lacks(part)
		missing, of = missing+m, of+k
	}
	x.lacking, x.of = x.lacking+missing, x.of+of
	if n.Kernel = "in sync"; missing > 0 {
		n.Kernel = fmt.Sprintf("lacks %d of %d facts", missing, of)
	}
	return n
}

// entryText returns which ports the port entry of a step is about.
func entryText(s verdict.PolicyStep) string {
	e := s.Entry
	switch {
	case e != &s.Ruleset.Default:
		return reachability.Span{Protocol: e.Protocol, First: e.First, Last: e.Last}.String()
	case len(s.Ruleset.Ports) > 0:
		return "other ports"
	}
	return "every port"
}

func texts(l []model.RuleRef) (out []string) {
	for _, r := range l {
		out = append(out, r.String())
	}
	return out
}

// branches adds the lines of the tree for people.
func (p explainedPolicy) branches(all bool, add func(depth int, format string, args ...any)) {
	title := "policies"
	if !all {
		title += " for " + few(p.Backends)
	}
	add(0, "%s: %s: %s", title, map[string]string{"accept": "accepted", "drop": "dropped"}[p.Verdict], p.Reason)
	for _, s := range p.Steps {
		text := fmt.Sprintf("%s of %s, tier %s, port entry %s, peer %s: %s", s.Direction, s.Pod, s.Tier, s.Entry, s.Peer,
			s.Decision)
		if len(s.By) > 0 {
			text += ", by " + few(s.By)
		}
		if s.Kernel != "in sync" {
			text += "; kernel: " + s.Kernel
		}
		add(1, "%s", text)
		if len(s.Audited) > 0 {
			add(2, "audited: %s would drop it", few(s.Audited))
		}
	}
}
