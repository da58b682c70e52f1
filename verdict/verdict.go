// Package verdict says what must become of a packet on a decided node. It is the meaning of the model as a function: the
// judge of every data plane, and what `fairlead explain` prints. It never looks at a kernel.
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

// String gives "pass", "forward", "reject" or "drop".
func (a Action) String() string { return [...]string{"pass", "forward", "reject", "drop"}[a] }

// Candidate is a backend that may get the packet.
type Candidate struct {
	Backend model.Backend
	Hidden  bool // the backend sees an address of this node in place of the client's
	Direct  bool // it would be hidden, did the backend's node not answer the client itself
}

// Outcome is what must become of a packet, and why.
type Outcome struct {
	Action     Action
	Reason     string
	Origin     model.Origin
	Frontend   *model.Frontend // nil where none matches
	Candidates []Candidate     // for Forward, in the pool's order
}

// Of decides p on the node that s describes. A client that has affinity gets the same candidate again while it lasts.
func Of(s *model.Services, p Packet) Outcome {
	o := Outcome{Origin: OriginOf(s.Node, p)}
	f, why := frontend(s, p)
	if f == nil {
		o.Action, o.Reason = unmatched(s, p.Dst.Addr(), why)
		return o
	}
	o.Frontend = f
	if !admits(f, p.Src.Addr()) {
		o.Action, o.Reason = Drop, fmt.Sprintf("%s is in none of the allowed source ranges %v", p.Src.Addr(), f.Sources)
		return o
	}
	t := f.Target(o.Origin)
	if len(t.Pool.Backends) == 0 {
		o.Action, o.Reason = Reject, fmt.Sprintf("no endpoint in pool %q", t.Pool.Name)
		if t.Empty == model.Drop {
			o.Action = Drop
		}
		return o
	}
	o.Action, o.Reason = Forward, fmt.Sprintf("%d backends in pool %q", len(t.Pool.Backends), t.Pool.Name)
	o.Candidates = make([]Candidate, len(t.Pool.Backends))
	for i, b := range t.Pool.Backends {
		hidden, direct := f.Hide.Has(o.Origin), direct(s.Node, f, p, b)
		o.Candidates[i] = Candidate{b, hidden && !direct || hairpin(o.Origin, p, b), hidden && direct}
	}
	return o
}

// unmatched returns what becomes of a packet to dst that matches no frontend, for the reason why.
func unmatched(s *model.Services, dst netip.Addr, why string) (Action, string) {
	contains := func(r model.Range) bool { return r.Contains(dst) }
	switch c := s.ClusterIPs[dst]; {
	case own(s.Node, dst):
		return Pass, why
	case c != nil:
		return Reject, fmt.Sprintf("%s, and %s is the ClusterIP of %s", why, dst, c.Service)
	case slices.ContainsFunc(s.Node.ServiceRanges, contains):
		return Drop, fmt.Sprintf("%s, and %s is in a ServiceCIDR, but no Service has it", why, dst)
	}
	return Pass, why
}

// Stays reports whether the flow of UDP or SCTP of which p is a packet stays with the endpoint at a, which it has:
// while that one serves its frontend's port, whatever new flows are given, and the client is allowed. TCP connections
// end by themselves.
func Stays(s *model.Services, p Packet, a netip.AddrPort) bool {
	f, _ := frontend(s, p)
	return f != nil && admits(f, p.Src.Addr()) && f.Target(OriginOf(s.Node, p)).Pool.Serves(a)
}

// OriginOf returns where p comes from, seen from n. Loopback addresses are the node's own.
func OriginOf(n *model.Node, p Packet) model.Origin {
	switch {
	case own(n, p.Src.Addr()):
		return model.FromNode
	case within(n.Pods, p.Src.Addr()), n.PodInterfaces.Has(p.In):
		return model.FromPod
	}
	return model.FromOutside
}

// own says whether a is an address of the node itself.
func own(n *model.Node, a netip.Addr) bool { return a.IsLoopback() || slices.Contains(n.Addresses, a) }

// frontend finds who takes p: an entry of exactly its address first, then, if the address is the node's own and takes
// node ports, an entry of any address. Without one it says why.
func frontend(s *model.Services, p Packet) (*model.Frontend, string) {
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
	case !own(s.Node, dst):
		return nil, fmt.Sprintf("%s is no address of node %s", dst, s.Node.Name)
	case !slices.ContainsFunc(s.Node.NodePorts, func(r model.Range) bool { return r.Contains(dst) }):
		return nil, fmt.Sprintf("%s is not among the addresses that take node ports", dst)
	}
	return f, ""
}

// admits says whether f lets src in.
func admits(f *model.Frontend, src netip.Addr) bool {
	return f.Sources == nil || within(f.Sources, src)
}

func within(l []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(l, func(r netip.Prefix) bool { return r.Contains(a) })
}

// direct says that the node of b answers who sends p itself: this one, or another that knows what was asked here.
func direct(n *model.Node, f *model.Frontend, p Packet, b model.Backend) bool {
	src, dst := p.Src.Addr(), p.Dst.Addr()
	return f.Direct.Has(OriginOf(n, p)) && (b.Local || b.Away) && src != b.Addr.Addr() &&
		!slices.Contains(n.Nodes, src) && !within(n.Behind, src) && (!f.Entry.AnyAddr() || slices.Contains(n.Nodes, dst))
}

// hairpin says that b would get its own packet back. Its answer would then never leave it, so the source is hidden. A
// process of the node itself needs no help: its address is the node's already.
func hairpin(o model.Origin, p Packet, b model.Backend) bool {
	return o != model.FromNode && b.Local && b.Addr.Addr() == p.Src.Addr()
}
