// Package verdict says what must become of a packet on a decided node. It is the meaning of the model as a function:
// the judge of every data plane, and what `fairlead explain` prints. It never looks at a kernel.
package verdict

import (
	"fmt"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// Packet is the first packet of a connection, as it enters the node (or leaves a process on it). Addresses are never
// IPv4-mapped IPv6.
type Packet struct {
	Src, Dst netip.AddrPort
	Protocol model.Protocol
	In       string // the name of the interface that it comes in by; "" for a process of the node, or where it isn't known
	Type     uint8  // of ICMPv6
}

// Action is what becomes of a packet.
type Action uint8

// The actions.
const (
	Pass    Action = iota // no frontend takes it: it goes on as if Fairlead were not there
	Forward               // to one of the candidates, as the pool's scheduler says
	Reject                // refused with an answer
	Drop                  // refused in silence
)

// String returns "pass", "forward", "reject" or "drop".
func (a Action) String() string { return [...]string{"pass", "forward", "reject", "drop"}[a] }

// Candidate is a backend that may get the packet.
type Candidate struct {
	Backend     model.Backend
	Masqueraded bool // the backend sees an address of this node in place of the client's
	DSR         bool // it would be hidden, did the backend's node not answer the client itself
	// Policy is what this node's policies make of the packet, translated to the backend: one that they drop is lost if
	// this backend is selected. It is zero where policies are off.
	Policy PolicyOutcome
}

// Stage is what a packet passes on its course through a node.
type Stage uint8

// The stages, in their order.
const (
	StageFrontend  Stage = iota // the frontend that its destination matches
	StageSources                // that frontend's allowed source ranges
	StageEndpoints              // the backends that it may go to
	StagePolicies               // the policies of its source and of its destination, translated; none where they are off
)

// String returns "frontend", "sources", "endpoints" or "policies".
func (s Stage) String() string { return [...]string{"frontend", "sources", "endpoints", "policies"}[s] }

// Step is what a stage decides.
type Step struct {
	Stage  Stage
	Action Action // of the last step, what becomes of the packet; Pass of an earlier one: it goes on to the next
	Reason string
}

// Outcome is what must become of a packet, and why: what the last step decides.
type Outcome struct {
	Action     Action
	Reason     string
	Candidates []Candidate // for Forward, and for Drop where policies drop it for all of them; in the pool's order
	// Policy is what this node's policies make of a packet that no frontend takes. It is zero where policies are off.
	Policy PolicyOutcome
}

// Verdict is what a node does with a packet, step by step, and what must become of it.
type Verdict struct {
	Origin   model.Origin
	Frontend *model.Frontend // nil where none matches
	Steps    []Step          // in the order of their stages
	Outcome
}

// pass adds a step after which the packet goes on.
func (v *Verdict) pass(s Stage, format string, args ...any) {
	v.Steps = append(v.Steps, Step{s, Pass, fmt.Sprintf(format, args...)})
}

// end adds the last step.
func (v *Verdict) end(s Stage, a Action, reason string) Verdict {
	v.Steps = append(v.Steps, Step{s, a, reason})
	v.Action, v.Reason = a, reason
	return *v
}

// Of decides p on the node that s describes. A client that has affinity gets the same candidate again while it lasts.
func Of(s *model.Snapshot, p Packet) Verdict {
	v := Verdict{Origin: OriginOf(s.Node, p)}
	f, why := frontend(s, p, v.Origin)
	if f == nil {
		action, reason := unmatched(s, p.Dst.Addr(), why)
		if action != Pass || s.Policies == nil {
			return v.end(StageFrontend, action, reason)
		}
		v.pass(StageFrontend, "%s", reason)
		return v.untranslated(s, p)
	}
	v.Frontend = f
	v.pass(StageFrontend, "%s is an entry of %s (%s)", f.Entry, f.Service, f.Via)
	if f.Sources != nil {
		if !within(f.Sources, p.Src.Addr()) {
			return v.end(StageSources, Drop, fmt.Sprintf("%s is in none of the allowed source ranges %v", p.Src.Addr(),
				f.Sources))
		}
		v.pass(StageSources, "%s is in one of the allowed source ranges %v", p.Src.Addr(), f.Sources)
	}
	t := f.Target(v.Origin)
	if len(t.Pool.Backends) == 0 {
		action := Reject
		if t.Empty == model.Drop {
			action = Drop
		}
		return v.end(StageEndpoints, action, fmt.Sprintf("no endpoint in pool %q", t.Pool.Name))
	}
	v.Candidates = make([]Candidate, len(t.Pool.Backends))
	for i, b := range t.Pool.Backends {
		masqueraded, dsr := masquerades(s.Node, f, p.Dst.Addr(), v.Origin), dsr(s.ServiceNode, f, p, b)
		v.Candidates[i] = Candidate{Backend: b, Masqueraded: masqueraded && !dsr || hairpin(v.Origin, p, b),
			DSR: masqueraded && dsr}
	}
	reason := fmt.Sprintf("%d backends in pool %q", len(t.Pool.Backends), t.Pool.Name)
	if s.Policies == nil {
		return v.end(StageEndpoints, Forward, reason)
	}
	v.pass(StageEndpoints, "%s", reason)
	return v.translated(s, p)
}

// untranslated adds what policies decide about p, which no frontend takes.
func (v *Verdict) untranslated(s *model.Snapshot, p Packet) Verdict {
	if p.Src.Addr() == p.Dst.Addr() {
		v.Policy.Reason = "a packet to its own address never leaves the pod"
	} else {
		v.Policy = v.policy(s, p)
	}
	if v.Policy.Verdict == model.VerdictDrop {
		return v.end(StagePolicies, Drop, v.Policy.Reason)
	}
	return v.end(StagePolicies, Pass, v.Policy.Reason)
}

// translated adds what policies decide about p, translated to each of the candidates. A pod that is selected as its own
// backend is evaluated as any other.
func (v *Verdict) translated(s *model.Snapshot, p Packet) Verdict {
	var dropped []string
	for i := range v.Candidates {
		c := &v.Candidates[i]
		p.Dst = c.Backend.Addr
		if c.Policy = v.policy(s, p); c.Policy.Verdict == model.VerdictDrop {
			dropped = append(dropped, c.Policy.Reason)
		}
	}
	switch n := len(v.Candidates); len(dropped) {
	case 0:
		return v.end(StagePolicies, Forward, v.Candidates[0].Policy.Reason)
	case n:
		return v.end(StagePolicies, Drop, dropped[0])
	default:
		return v.end(StagePolicies, Forward, fmt.Sprintf("dropped for %d of %d backends: %s", len(dropped), n, dropped[0]))
	}
}

// policy returns what the policies of s decide about p. A process of the node may send from a loopback address, too.
func (v *Verdict) policy(s *model.Snapshot, p Packet) PolicyOutcome {
	if v.Origin == model.FromNode && p.In == "" {
		return PolicyOutcome{Reason: fmt.Sprintf("%s is this node, whose packets are not evaluated", p.Src.Addr())}
	}
	return Policy(s.Policies, p)
}

// unmatched returns what becomes of a packet to dst that matches no frontend, for the reason why.
func unmatched(s *model.Snapshot, dst netip.Addr, why string) (Action, string) {
	contains := func(r model.Range) bool { return r.Contains(dst) }
	switch c := s.ClusterIPs[dst]; {
	case own(s.Node, dst):
		return Pass, why
	case c != nil:
		return Reject, fmt.Sprintf("%s, and %s is the ClusterIP of %s", why, dst, c.Owner)
	case slices.ContainsFunc(s.ServiceNode.ServiceRanges, contains):
		return Drop, fmt.Sprintf("%s, and %s is in a ServiceCIDR, but no Service has it", why, dst)
	}
	return Pass, why
}

// Stays reports whether the flow of UDP or SCTP of which p is a packet stays with the endpoint at a, which it has:
// while that one serves its frontend's port, whatever new flows are given, and the client is allowed. TCP connections
// end by themselves.
func Stays(s *model.Snapshot, p Packet, a netip.AddrPort) bool {
	origin := OriginOf(s.Node, p)
	f, _ := frontend(s, p, origin)
	return f != nil && admits(f, p.Src.Addr()) && f.Target(origin).Pool.Serves(a)
}

// OriginOf returns where p comes from, seen from n. Loopback addresses are the node's own.
func OriginOf(n *model.Node, p Packet) model.Origin {
	switch {
	case own(n, p.Src.Addr()):
		return model.FromNode
	case within(n.Pods, p.Src.Addr()), n.PodInterfaces.Has(p.In):
		return model.FromPod
	}
	return model.FromExternal
}

// own reports whether a is an address of the node itself.
func own(n *model.Node, a netip.Addr) bool { return a.IsLoopback() || slices.Contains(n.Addresses, a) }

// frontend finds who takes p: an entry of exactly its address first, then, if the address takes node ports, an entry of
// any address: the node's own address, or, for its pods and itself, another node's. Without one it says why.
func frontend(s *model.Snapshot, p Packet, o model.Origin) (*model.Frontend, string) {
	dst := p.Dst.Addr()
	if f := s.Frontends[model.Entry{Addr: dst, Port: p.Dst.Port(), Protocol: p.Protocol}]; f != nil {
		return f, ""
	}
	entry := model.Entry{Addr: netip.IPv6Unspecified(), Port: p.Dst.Port(), Protocol: p.Protocol}
	if dst.Is4() {
		entry.Addr = netip.IPv4Unspecified()
	}
	f := s.Frontends[entry]
	switch {
	case f == nil:
		return nil, fmt.Sprintf("no frontend at %s/%s", p.Dst, p.Protocol)
	case !own(s.Node, dst) && remote(s.ServiceNode, dst):
		if f.Remote && o != model.FromExternal {
			return f, ""
		}
		return nil, fmt.Sprintf("%s is another node's, which serves its node port itself", dst)
	case !own(s.Node, dst):
		return nil, fmt.Sprintf("%s is no address of node %s", dst, s.Node.Name)
	case !slices.ContainsFunc(s.ServiceNode.NodePorts, func(r model.Range) bool { return r.Contains(dst) }):
		return nil, fmt.Sprintf("%s is not among the addresses that take node ports", dst)
	}
	return f, ""
}

// remote reports whether a is an address of another node that takes node ports.
func remote(n *model.ServiceNode, a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(n.RemoteNodePorts, a, netip.Addr.Compare)
	return found
}

// masquerades reports whether a client of origin o is masqueraded at f, which takes its packet to dst. A pod isn't at
// another node's address.
func masquerades(n *model.Node, f *model.Frontend, dst netip.Addr, o model.Origin) bool {
	retained := o == model.FromPod && f.Entry.AnyAddr() && !own(n, dst)
	return f.Masquerade.Has(o) && !retained
}

// admits reports whether f lets src in.
func admits(f *model.Frontend, src netip.Addr) bool {
	return f.Sources == nil || within(f.Sources, src)
}

func within(l []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(l, func(r netip.Prefix) bool { return r.Contains(a) })
}

// dsr reports that the node of b answers who sends p itself: this one, or another that knows what was asked here.
func dsr(n *model.ServiceNode, f *model.Frontend, p Packet, b model.Backend) bool {
	src, dst := p.Src.Addr(), p.Dst.Addr()
	return f.DSR.Has(OriginOf(n.Node, p)) && (b.Local || b.Remote) && src != b.Addr.Addr() &&
		!slices.Contains(n.Nodes, src) && !within(n.PodCIDRs, src) && (!f.Entry.AnyAddr() || slices.Contains(n.Nodes, dst))
}

// hairpin reports that b would get its own packet back. Its answer would then never leave it, so the source is hidden.
// A process of the node itself needs no help: its address is the node's already.
func hairpin(o model.Origin, p Packet, b model.Backend) bool {
	return o != model.FromNode && b.Local && b.Addr.Addr() == p.Src.Addr()
}
