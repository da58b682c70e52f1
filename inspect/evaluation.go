package inspect

import (
	"fmt"
	"slices"
	"strings"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reachability"
	"fairlead.dev/fairlead/verdict"
)

// Evaluation is what policies make of a packet at some of its backends.
type Evaluation struct {
	Backends []string `json:"backends"` // or the destination of a packet that matches no frontend
	Verdict  string   `json:"verdict"`
	Reason   string   `json:"reason"`
	Reported []string `json:"auditedWouldDrop,omitempty"`
	Bypassed string   `json:"notEnforced,omitempty"` // why, for packets that are not routed between their ends
	Steps    []Step   `json:"steps,omitempty"`
}

// Step is what a tier of policies decides for the pod at one end.
type Step struct {
	Direction string   `json:"direction"`
	Pod       string   `json:"pod"`
	Node      string   `json:"node,omitempty"` // where it is evaluated
	Tier      string   `json:"tier"`
	Ruleset   string   `json:"ruleset"`
	Entry     string   `json:"portEntry"`
	Peer      string   `json:"peer"`
	Decision  string   `json:"decision"`
	By        []string `json:"by,omitempty"`
	Audited   []string `json:"Audit,omitempty"` // rules that would decide otherwise if they were enforced
	Kernel    string   `json:"kernel"`
}

// evaluator explains what policies make of a packet.
type evaluator struct {
	*Node
	audit   *mode.PolicyAudit
	cluster *reachability.Cluster // made when the backend of another node is met
	each    bool                  // backends for which policies decide alike are Overview apart
	lacking int                   // facts of those looked for that the kernel lacks
	of      int
}

// explain adds what policies decide to e: for each candidate, also where its own node does. Where they drop the packet
// for all of them, that is its outcome.
func (x *evaluator) explain(e *Explanation, v verdict.Verdict, p verdict.Packet) error {
	if last := v.Steps[len(v.Steps)-1]; last.Stage != verdict.StagePolicies {
		return nil
	}
	candidates := v.Candidates
	if v.Frontend == nil {
		candidates = []verdict.Candidate{{Backend: model.Backend{Addr: p.Dst}, Policy: v.Policy}}
	}
	dropped, reason, bypassed := 0, "", ""
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
		to := p
		to.Dst = k.Backend.Addr
		bypassed = verdict.Bypassed(x.Services.Policies, to)
		x.add(e, k.Backend.Addr.String(), node, o, bypassed)
	}
	if dropped == len(candidates) {
		e.Outcome, e.Reason = verdict.Drop.String(), reason
	}
	if v.Frontend == nil && bypassed != "" { // what is for a Service is routed
		e.Outcome, e.Reason = verdict.Pass.String(), bypassed
		e.PolicyKernel = "not enforced here"
		return nil
	}
	e.PolicyKernel = InSync
	if missing, of := x.audit.Lacks(x.Services.Policies.Node); missing > 0 {
		e.PolicyKernel = fmt.Sprintf("not enforced: the node lacks %d of %d facts", missing, of)
	} else if x.lacking > 0 {
		e.PolicyKernel = lacks(x.lacking, x.of)
	}
	return nil
}

// decide returns what policies decide about p at a candidate, and the candidate's node if it is another one, which
// evaluates ingress.
func (x *evaluator) decide(p verdict.Packet, k verdict.Candidate) (verdict.PolicyOutcome, string, error) {
	dst := k.Backend.Addr.Addr()
	if x.Services.Policies.Subjects[dst] != nil || slices.Contains(x.Services.Policies.Node.Addresses, dst) ||
		dst == p.Src.Addr() {
		return k.Policy, "", nil
	}
	if x.cluster == nil {
		o, err := x.Elsewhere()
		if err != nil {
			return k.Policy, "", err
		}
		objects, err := x.All()
		if err != nil {
			return k.Policy, "", fmt.Errorf("evaluate the policies of another node: %w", err)
		}
		x.cluster = reachability.New(objects, o)
	}
	p.Dst = k.Backend.Addr
	path := x.cluster.Path(x.Services.Node.Name, p, k.Masqueraded, k.Policy)
	if path.Source != p.Src.Addr() {
		path.Policy.Reason += fmt.Sprintf(" (it sees source %s)", path.Source)
	}
	return path.Policy, path.Node, nil
}

// add adds an outcome to e, with those that are alike.
func (x *evaluator) add(e *Explanation, backend, node string, o verdict.PolicyOutcome, bypassed string) {
	n := Evaluation{Backends: []string{backend}, Verdict: o.Verdict.String(), Reason: o.Reason,
		Reported: texts(o.Reported()), Bypassed: bypassed}
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
func (p Evaluation) alike(o Evaluation) bool {
	same := p.Verdict == o.Verdict && p.Bypassed == o.Bypassed
	return same && slices.EqualFunc(p.Steps, o.Steps, func(a, b Step) bool {
		same := a.Direction == b.Direction && a.Ruleset == b.Ruleset && a.Entry == b.Entry && a.Decision == b.Decision &&
			slices.Equal(a.By, b.By) && slices.Equal(a.Audited, b.Audited)
		return same && !strings.HasPrefix(a.Kernel, "lacks") && !strings.HasPrefix(b.Kernel, "lacks")
	})
}

// step explains a step. node is that of the destination, where it is another one.
func (x *evaluator) step(s verdict.PolicyStep, node string) Step {
	n := Step{Direction: s.Direction.String(), Pod: s.Subject.Pod, Node: x.Services.Node.Name,
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
		if v := x.Services.Policies.Verdicts[key]; v != nil {
			parts = append(parts, v)
		}
	}
	missing, of := 0, 0
	for _, part := range parts {
		m, k := x.audit.Lacks(part)
		missing, of = missing+m, of+k
	}
	x.lacking, x.of = x.lacking+missing, x.of+of
	if n.Kernel = InSync; missing > 0 {
		n.Kernel = lacks(missing, of)
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
