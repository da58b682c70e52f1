package verdict

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
)

// PolicyStep is what one stage of policies decides about a packet, for the pod at one of its ends.
type PolicyStep struct {
	Direction model.Direction
	Subject   *model.Subject
	Ruleset   *model.Ruleset
	Entry     *model.PortEntry
	Peer      *model.Peer // the other end; nil: no peer of this node
	Decision  model.Decision
	By        []model.RuleRef // the rules that decide; none: nothing matches in the tier
	Audited   []model.RuleRef // the audited rules that would decide, with Decision.Report
}

// PolicyOutcome is what policies make of a packet, and why.
type PolicyOutcome struct {
	Verdict model.Verdict // VerdictAccept or VerdictDrop
	Reason  string
	By      []model.RuleRef // the rules that decide; none: no policy does
	Steps   []PolicyStep    // in the order of evaluation
}

// Reported returns the audited rules that would drop an accepted packet.
func (o PolicyOutcome) Reported() (out []model.RuleRef) {
	if o.Verdict == model.VerdictDrop {
		return nil
	}
	for _, s := range o.Steps {
		if s.Decision.Report {
			out = append(out, s.Audited...)
		}
	}
	return out
}

// icmpv6 is the protocol of neighbour discovery: types 133 to 137 (RFC 4861).
const icmpv6 model.Protocol = 58

// isDiscovery reports whether p is a message of neighbour discovery.
func isDiscovery(p Packet) bool { return p.Protocol == icmpv6 && p.Type >= 133 && p.Type <= 137 }

// Deciders returns the rules that accept or drop the packet, of both ends; those that pass it on are left out.
func (o PolicyOutcome) Deciders() (out []model.RuleRef) {
	for _, s := range o.Steps {
		if s.Decision.Verdict != model.VerdictNext {
			out = append(out, s.By...)
		}
	}
	return out
}

// Policy decides whether policies accept the first packet of a connection at this node: first the egress of its source,
// then the ingress of its destination, as far as each is a pod of this node. Source and destination are as between
// destination translation and masquerade: the client's own address, and the backend's. A packet of a pod to its own
// address never leaves the pod unless it was sent to a Service: Of decides that.
func Policy(s *model.Policies, p Packet) PolicyOutcome { return Ingress(s, p, Egress(s, p)) }

// Egress is the first half of Policy: what the policies of p's source decide, where that is a pod of this node.
func Egress(s *model.Policies, p Packet) PolicyOutcome {
	if why := forged(s, p); why != "" {
		return PolicyOutcome{Verdict: model.VerdictDrop, Reason: "forged source: " + why}
	}
	if why := exempt(s, p); why != "" {
		return PolicyOutcome{Reason: why}
	}
	o := PolicyOutcome{Reason: "no policy applies"}
	o.direction(s, p, model.Egress)
	return o
}

// Forged reports whether p is dropped for its source.
func Forged(s *model.Policies, p Packet) bool { return forged(s, p) != "" }

// forged returns why p's source isn't that of the device by which it comes in, "" if it may be.
func forged(s *model.Policies, p Packet) string {
	src := p.Src.Addr()
	if p.In == "" || isDiscovery(p) {
		return ""
	}
	if d := s.Devices[p.In]; d != nil && !d.Admits(src) {
		return fmt.Sprintf("%s came in by device %s of %s, which may not send from it", src, d.Name,
			cmp.Or(d.Pod, "a pod that isn't known"))
	}
	if pod := s.Subjects[src]; pod != nil && pod.Device != "" && p.In != pod.Device {
		return fmt.Sprintf("%s is pod %s, which sends by %s, and not by %s", pod.Addr, pod.Pod, pod.Device, p.In)
	}
	return ""
}

// Bypassed returns why policies are not enforced for a packet that is not routed between its ends, "" where they are:
// both are pods on a bridge that netfilter doesn't see.
func Bypassed(s *model.Policies, p Packet) string {
	from, to := s.Subjects[p.Src.Addr()], s.Subjects[p.Dst.Addr()]
	if from == nil || to == nil || from.Bridge == "" || from.Bridge != to.Bridge {
		return ""
	}
	return fmt.Sprintf("bridge %s forwards between %s and %s without netfilter: see the problem BridgeNotFiltered of the "+
		"Node", from.Bridge, from.Pod, to.Pod)
}

// Ingress is the second half of Policy: it adds what the policies of p's destination decide to o, which Egress returned
// for the same connection, perhaps on another node and with the address that the source had there.
func Ingress(s *model.Policies, p Packet, o PolicyOutcome) PolicyOutcome {
	if o.Verdict == model.VerdictAccept && exempt(s, p) == "" && !slices.Contains(s.Node.Addresses, p.Dst.Addr()) {
		o.direction(s, p, model.Ingress)
	}
	return o
}

// exempt returns why p is not evaluated at all, "" if it is. What comes in by a device isn't this node's, whatever its
// source.
func exempt(s *model.Policies, p Packet) string {
	src := p.Src.Addr()
	switch {
	case isDiscovery(p):
		return "neighbour discovery is not evaluated"
	case src.IsLoopback(), p.In == "" && slices.Contains(s.Node.Addresses, src):
		return fmt.Sprintf("%s is this node, whose packets are not evaluated", src)
	}
	return ""
}

// Denied reports whether policies of a pod that is known drop the first packet of a connection: what Policy decides,
// without the reasons, for many packets. What only a pod's being unknown drops is not denied, nor what goes to a
// Service and is evaluated only after its translation.
func Denied(s *model.Policies, p Packet) bool {
	if exempt(s, p) != "" || within(s.Node.PreDNAT, p.Dst.Addr()) {
		return false
	}
	return denied(s, p, model.Egress) ||
		!slices.Contains(s.Node.Addresses, p.Dst.Addr()) && denied(s, p, model.Ingress)
}

// denied is Denied for one end of p.
func denied(s *model.Policies, p Packet, d model.Direction) bool {
	own, other := ends(p, d)
	subject := s.Subjects[own]
	if subject == nil {
		return false
	}
	for _, rs := range rulesets(subject, d) {
		if rs == nil {
			continue
		}
		if v := decide(s, rs.Entry(p.Protocol, p.Dst.Port()).PeerTable, s.Peer(other)).Verdict; v != model.VerdictNext {
			return v == model.VerdictDrop
		}
	}
	return false
}

// ends returns the address of the pod that a direction is seen from, and the other one.
func ends(p Packet, d model.Direction) (own, other netip.Addr) {
	if d == model.Egress {
		return p.Src.Addr(), p.Dst.Addr()
	}
	return p.Dst.Addr(), p.Src.Addr()
}

// rulesets returns what decides for a pod in a direction, by stage.
func rulesets(s *model.Subject, d model.Direction) *[model.PolicyStages]*model.Ruleset {
	if d == model.Egress {
		return &s.Out
	}
	return &s.In
}

// decide returns what a peer table decides about a peer, nil for none.
func decide(s *model.Policies, t *model.PeerTable, p *model.Peer) model.Decision {
	if p != nil {
		if v := s.Verdicts[model.PeerVerdictKey{PeerTable: t.ID, Identity: p.Identity.ID}]; v != nil {
			return v.Decision
		}
	}
	return t.Otherwise
}

// direction evaluates one end of p.
func (o *PolicyOutcome) direction(s *model.Policies, p Packet, d model.Direction) {
	own, other := ends(p, d)
	subject := s.Subjects[own]
	if subject == nil {
		if s.Node.Unknown == model.VerdictDrop && within(s.Node.Pods, own) {
			o.Verdict, o.By = model.VerdictDrop, nil
			o.Reason = fmt.Sprintf("%s is an address of this node's pods, and no pod that is known has it yet", own)
		}
		return
	}
	for _, rs := range rulesets(subject, d) {
		if rs == nil {
			continue
		}
		step := PolicyStep{Direction: d, Subject: subject, Ruleset: rs, Peer: s.Peer(other)}
		step.evaluate(s, p)
		o.Steps = append(o.Steps, step)
		if step.Decision.Verdict == model.VerdictNext {
			continue
		}
		o.Verdict, o.By, o.Reason = step.Decision.Verdict, step.By, step.reason()
		return
	}
}

// evaluate decides about the packet p.
func (t *PolicyStep) evaluate(s *model.Policies, p Packet) {
	t.Entry = t.Ruleset.Entry(p.Protocol, p.Dst.Port())
	table := t.Entry.PeerTable
	t.Decision = decide(s, table, t.Peer)
	var match []*model.Peers
	if t.Peer != nil {
		match = t.Peer.Identity.Match
	}
	_, enforced, audited := table.Decide(func(p *model.Peers) bool { return slices.Contains(match, p) })
	t.By = t.sources(enforced)
	if t.Decision.Report {
		t.Audited = t.sources(audited)
	}
}

// sources returns where the rule at an index comes from. Where no rule of enforced NetworkPolicies matches, they drop
// by isolating the pod.
func (t *PolicyStep) sources(i int) (out []model.RuleRef) {
	if i < len(t.Entry.Sources) {
		return t.Entry.Sources[i]
	}
	for _, p := range t.Ruleset.Policies {
		if p.Tier == model.TierNetworkPolicy && !p.Audit {
			out = append(out, model.RuleRef{PolicyRef: p, Direction: t.Direction, Index: -1})
		}
	}
	return out
}

// reason returns what decided, in words.
func (t *PolicyStep) reason() string {
	var names []string
	for i, r := range t.By {
		if i == 3 && len(t.By) > 4 {
			names = append(names, fmt.Sprintf("%d more", len(t.By)-i))
			break
		}
		names = append(names, r.String())
	}
	by := strings.Join(names, ", ")
	switch {
	case len(t.By) > 0 && t.By[0].Index < 0:
		return fmt.Sprintf("%s of %s: isolated by %s, and none of their rules allows it", t.Direction, t.Subject.Pod, by)
	case by == "":
		return fmt.Sprintf("%s of %s: the policies are beyond a bound", t.Direction, t.Subject.Pod)
	case t.Decision.Verdict == model.VerdictDrop:
		return fmt.Sprintf("%s of %s: denied by %s", t.Direction, t.Subject.Pod, by)
	}
	return fmt.Sprintf("%s of %s: allowed by %s", t.Direction, t.Subject.Pod, by)
}
