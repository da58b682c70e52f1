package revoke

import (
	"fmt"
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/kernel/conntrack"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/verdict"
)

// evaluator evaluates connections by policies of its own. One goroutine at a time uses it.
type evaluator struct {
	marker *conntrack.Conn
	bit    uint32 // of the connection mark; 0: nothing is cut
	denied func() // called at a pass's first denied connection
	now    *model.Policies
	pods   map[netip.Addr]bool // addresses of this node's pods, also of those that are gone
}

func newEvaluator(m *conntrack.Conn) evaluator {
	return evaluator{marker: m, now: model.NewPolicies(), pods: map[netip.Addr]bool{}}
}

// apply makes changes true.
func (e *evaluator) apply(changes ...model.Change[model.PolicyPart]) {
	for _, c := range changes {
		e.now.Apply(c)
		for _, p := range c.Put {
			if s, ok := p.(*model.Subject); ok {
				e.pods[s.Addr] = true
			}
		}
	}
}

// found is what a pass found.
type found struct {
	marked   int    // connections that are denied and have the bit
	denied   int    // of those, how many got it now
	restored int    // connections that lost it
	foreign  int    // connections that have it and are no pod's: another program uses it
	example  string // a connection of denied or foreign
	reason   string // why it is denied
}

// pass evaluates all connections, and sets and clears the bit only if it may write.
func (e *evaluator) pass(write bool) (found, error) {
	mask := uint32(0)
	if write {
		mask = e.bit
	}
	return e.evaluate(mask, e.marker.Remark)
}

// rest evaluates the connections that don't have the bit, and sets it.
func (e *evaluator) rest() (found, error) { return e.evaluate(e.bit, e.marker.RemarkUnmarked) }

// evaluate evaluates those connections that remark reads, and sets and clears the bits of mask.
func (e *evaluator) evaluate(mask uint32,
	remark func(mask uint32, f func(conntrack.Tracked) uint32) (int, error)) (f found, err error) {
	write := mask != 0
	_, err = remark(mask, func(t conntrack.Tracked) uint32 {
		if !e.concerns(t) {
			if t.Mark&e.bit != 0 && !e.pod(t.Source.Addr()) && !e.pod(t.ReplySource.Addr()) {
				if f.foreign++; f.foreign == 1 {
					f.example = fmt.Sprintf("%s > %s", t.Source, t.Destination)
				}
			}
			return t.Mark
		}
		if t.Ended {
			return t.Mark
		}
		return e.judge(t, write, &f)
	})
	return f, err
}

// judge returns the bit for a connection of a pod if policies deny it, and counts.
func (e *evaluator) judge(t conntrack.Tracked, write bool, f *found) uint32 {
	had := t.Mark&e.bit != 0
	p, denied := e.denies(t)
	switch {
	case denied && had:
		f.marked++
	case denied && write:
		f.marked++
		if f.denied++; f.denied == 1 && f.foreign == 0 {
			e.denied()
			f.example, f.reason = fmt.Sprintf("%s > %s/%s", p.Src, p.Dst, p.Protocol), verdict.Policy(e.now, p).Reason
		}
	case !denied && had && write:
		f.restored++
	}
	if denied {
		return e.bit
	}
	return 0
}

// concerns reports whether an end of a connection is a pod that policies may select.
func (e *evaluator) concerns(t conntrack.Tracked) bool {
	return e.now.Subjects[t.Source.Addr()] != nil || e.now.Subjects[t.ReplySource.Addr()] != nil
}

// pod reports whether an address is or was one of this node's pods.
func (e *evaluator) pod(a netip.Addr) bool {
	return e.pods[a] || slices.ContainsFunc(e.now.Node.Pods, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Ports of which clients and servers rarely use the other's: a kernel that opens connections takes 32768 and more
// unless told otherwise (ip_local_port_range).
const (
	serverPorts = 10000 // and below
	clientPorts = 32768 // and above
)

// denies reports whether policies deny a connection, and the first packet that it would have been. One that was picked
// up in mid-stream may have been opened by either end: where its ports don't say, it is denied only if it is both ways.
func (e *evaluator) denies(t conntrack.Tracked) (verdict.Packet, bool) {
	p := verdict.Packet{Src: t.Source, Dst: t.ReplySource, Protocol: model.Protocol(t.Protocol)}
	back := verdict.Packet{Src: p.Dst, Dst: p.Src, Protocol: p.Protocol}
	from, to := p.Src.Port(), p.Dst.Port()
	switch {
	case !t.Midstream, from >= clientPorts && to <= serverPorts:
		return p, verdict.Denied(e.now, p)
	case to >= clientPorts && from <= serverPorts:
		return back, verdict.Denied(e.now, back)
	}
	return p, verdict.Denied(e.now, p) && verdict.Denied(e.now, back)
}
