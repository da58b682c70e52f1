package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// assessment is what verdict says of a packet, and on which node.
type assessment struct {
	node    string
	packet  verdict.Packet
	outcome verdict.Verdict // with what policies make of it on all nodes of its path
	// which of its addresses a node's kernel has a masqueraded packet come from decides about it on another node
	uncertain bool
	hostPorts string // the node whose host ports lead to some candidates, another than node; "": none do
}

// assess queries verdict what becomes of a packet: on the node where it enters and, if that lets it pass, on the node
// that it is for.
func (w *testbed) assess(c client, to netip.AddrPort, p model.Protocol, via string) assessment {
	j := assessment{packet: verdict.Packet{Src: netip.AddrPortFrom(c.Addr, 40000), Dst: to, Protocol: p}}
	owner := nodeOf(to.Addr())
	if j.node = memberNamed(c.Name).Node; j.node == "" {
		if j.node = owner; j.node == "" {
			j.node = w.entrance(to.Addr(), via)
		}
	}
	j.packet.In = w.interfaceOf(memberNamed(c.Name), j.node, to.Addr().Is6())
	j.outcome = verdict.Of(w.agents[j.node].services, j.packet)
	if j.outcome.Action == verdict.Pass && owner != "" && owner != j.node {
		j.node, j.packet.In = owner, uplink
		j.outcome = verdict.Of(w.agents[j.node].services, j.packet)
	}
	w.throughHostPorts(&j)
	if w.implementation.Engine != nil {
		w.evaluate(&j)
	}
	return j
}

// throughHostPorts puts in place of a candidate that is a host port of another node the pod that it leads to there.
func (w *testbed) throughHostPorts(j *assessment) {
	for i, c := range j.outcome.Candidates {
		node := nodeOf(c.Backend.Addr.Addr())
		if node == "" || node == j.node {
			continue
		}
		p := verdict.Packet{Src: j.packet.Src, Dst: c.Backend.Addr, Protocol: j.packet.Protocol, In: uplink}
		if v := verdict.Of(w.agents[node].services, p); v.Frontend != nil && v.Frontend.Via == model.ViaHostPort {
			j.outcome.Candidates[i].Backend.Addr, j.hostPorts = v.Candidates[0].Backend.Addr, node
		}
	}
}

// uplink is the interface of a node by which the hosts on the wire are reached.
const uplink = "eth0"

// interfaceOf returns the interface by which a node receives what a client sends by a family: that of its pod, its
// uplink, or "" for what is on the node's own network.
func (w *testbed) interfaceOf(client *member, node string, six bool) string {
	switch {
	case client.Node != node:
		return uplink
	case client.onNode():
		return ""
	}
	for _, d := range w.devices[node] {
		if slices.Contains(d.Hosts, client.addr(six)) {
			return d.Name
		}
	}
	return ""
}

// entrance is the node by which packets from outside come that are for no node's address. Through a tunnel none may
// come with a source outside: to a pod of a node on another link they come by that node.
func (w *testbed) entrance(to netip.Addr, via string) string {
	pod := memberNamed(nameOf(to))
	switch {
	case via != "":
		return via
	case w.network != nil && w.network.Apart && pod != nil && pod.Node != "":
		return pod.Node
	}
	return nodes[0]
}

// nodeOf returns the node that has the address, or "".
func nodeOf(a netip.Addr) string {
	for _, m := range topology {
		if m.isNode() && slices.Contains(m.Addrs, a) {
			return m.Node
		}
	}
	return ""
}

// expected are the places that a line lets answer, the remembered ones put in.
func (l *packetLine) expected(known map[string]netip.AddrPort) (list []candidate) {
	for _, c := range l.Candidates {
		if n, ok := strings.CutPrefix(c.Name, "$"); ok {
			c.Name, c.Addr, c.Port = nameOf(known[n].Addr()), known[n].Addr(), known[n].Port()
		}
		if !slices.ContainsFunc(l.Without, func(n string) bool { return c.is(known[n]) }) {
			list = append(list, c)
		}
	}
	return list
}

// is reports whether the candidate is the backend.
func (c candidate) is(at netip.AddrPort) bool {
	return c.Addr == at.Addr() && (c.Port == 0 || c.Port == at.Port())
}

func (c candidate) String() string {
	s := c.Name
	if c.Port != 0 {
		s = fmt.Sprintf("%s:%d", c.Name, c.Port)
	}
	if c.Masqueraded {
		s += "(source=node)"
	}
	if c.Dropped {
		s += "(dropped)"
	}
	return s
}

// differs returns how verdict's outcome differs from what the line says, or "".
func (j assessment) differs(l *packetLine, expected []candidate) string {
	o := j.outcome
	if o.Action != l.Action {
		return fmt.Sprintf("verdict says %s, because of %s", o.Action, o.Reason)
	}
	if !strings.Contains(o.Reason, l.By) {
		return fmt.Sprintf("verdict names %q", o.Reason)
	}
	if reported := j.reported(); l.Reported != (len(reported) > 0) {
		return fmt.Sprintf("verdict reports %v", reported)
	}
	if l.Action != verdict.Forward {
		return ""
	}
	for _, v := range o.Candidates {
		if !slices.ContainsFunc(expected, func(c candidate) bool { return j.same(c, v) }) {
			return fmt.Sprintf("verdict also has %s", j.show(v))
		}
	}
	for _, c := range expected {
		if !slices.ContainsFunc(o.Candidates, func(v verdict.Candidate) bool { return j.same(c, v) }) {
			return fmt.Sprintf("verdict has no %s", c)
		}
	}
	return ""
}

// same reports whether a candidate of a line is one of verdict's.
func (j assessment) same(c candidate, v verdict.Candidate) bool {
	return c.is(v.Backend.Addr) && c.Masqueraded == v.Masqueraded && c.Dropped == (j.dropped(v.Backend.Addr) != "")
}

// show returns a candidate of verdict's as in a case.
func (j assessment) show(v verdict.Candidate) string {
	return candidate{Name: nameOf(v.Backend.Addr.Addr()), Port: v.Backend.Addr.Port(), Masqueraded: v.Masqueraded,
		Dropped: j.dropped(v.Backend.Addr) != ""}.String()
}

// String reports the whole judgement, for the messages of failed cases.
func (j assessment) String() string {
	o := j.outcome
	s := fmt.Sprintf("on node %s, where %s is %s: %s, %s", j.node, j.packet.Src.Addr(), o.Origin, o.Action, o.Reason)
	for _, step := range o.Steps {
		s += fmt.Sprintf("\n  %s: %s", step.Stage, step.Reason)
	}
	for _, c := range o.Candidates {
		s += "\n    " + j.show(c)
	}
	for _, c := range o.Candidates {
		if c.Policy.Reason != "" {
			s += fmt.Sprintf("\n  policies, to %s: %s, %s", c.Backend.Addr, c.Policy.Verdict, c.Policy.Reason)
		}
	}
	if f := o.Frontend; f != nil {
		s += fmt.Sprintf("\n  frontend %s of %s (%s), hides %s, lets in %v\n    inside  %s\n    outside %s",
			f.Entry, f.Service, f.Via, f.Masquerade, f.Sources, showTarget(f.Internal), showTarget(f.External))
	}
	return s
}

func showTarget(t model.Target) string {
	s := fmt.Sprintf("pool %q, affinity %s, else %s:", t.Pool.Name, t.Pool.Affinity, t.Empty)
	for _, b := range t.Pool.Backends {
		s += " " + b.Addr.String()
	}
	return s
}
