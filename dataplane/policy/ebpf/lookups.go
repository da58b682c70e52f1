package ebpf

import (
	"net/netip"
	"slices"

	"fairlead.dev/fairlead/model"
)

// Lookups returns how many lookups in maps the program makes for the first packet of a forwarded connection of TCP, UDP
// or SCTP: on paper, from the policies alone, for measurements (see CountLookups). Any later packet of a connection has
// one, of its flow; the first one back has those of its source, too: of its device, and of the pod with that address.
func Lookups(s *model.Policies, src netip.Addr, dst netip.AddrPort, protocol model.Protocol) int {
	from, to := s.Subjects[src], s.Subjects[dst.Addr()]
	n, closed := 2, false // both ends, which may be pods of the node
	if protocol == model.UDP {
		n++ // its flow: no datagram says that it is the first
	}
	n += deviceLookups(s, src)
	for _, end := range []netip.Addr{src, dst.Addr()} {
		if s.Subjects[end] == nil { // is it one of a pod that isn't known?
			n++
			closed = closed || s.Node.Unknown == model.VerdictDrop && slices.ContainsFunc(s.Node.Pods,
				func(p netip.Prefix) bool { return p.Contains(end) })
		}
	}
	if from == nil && to == nil && !closed {
		return n
	}
	if to == nil { // is it one of the node?
		n++
	}
	if from == nil && closed {
		return n
	}
	if from != nil {
		more, drops := directionLookups(s, &from.Out, dst.Addr(), dst.Port(), protocol)
		if n += more; drops {
			return n
		}
	}
	if to != nil {
		more, drops := directionLookups(s, &to.In, src, dst.Port(), protocol)
		if n += more; drops { // is it also one of the node?
			n++
		}
	}
	return n
}

// deviceLookups returns the lookups of what the device admits that a source comes in by: one, and one more where it is
// neither the first address of its family there nor by another device.
func deviceLookups(s *model.Policies, src netip.Addr) int {
	if len(s.Devices) == 0 {
		return 0
	}
	for _, d := range s.Devices {
		if !d.Admits(src) {
			continue
		}
		first := slices.IndexFunc(d.Sources, func(p netip.Prefix) bool {
			return p.IsSingleIP() && p.Addr().Is4() == src.Is4()
		})
		if first < 0 || d.Sources[first].Addr() != src {
			return 2
		}
	}
	return 1
}

// directionLookups returns the lookups of one direction, and whether it drops the packet.
func directionLookups(s *model.Policies, rulesets *[model.PolicyStages]*model.Ruleset, other netip.Addr, port uint16,
	protocol model.Protocol) (n int, drops bool) {
	if !slices.ContainsFunc(rulesets[:], func(r *model.Ruleset) bool { return r != nil }) {
		return 0, false
	}
	peer := s.Peer(other)
	if n++; peer == nil || !peer.Single() { // not by its address: by its prefix
		n++
	}
	for _, r := range rulesets {
		if r == nil {
			continue
		}
		entry, decision := r.Entry(protocol, port), model.Decision{}
		single := func(e model.PortEntry) bool { return e.First == e.Last }
		if slices.ContainsFunc(r.Ports, single) {
			n++
		}
		if found := entry != &r.Default && single(*entry); !found &&
			slices.ContainsFunc(r.Ports, func(e model.PortEntry) bool { return !single(e) }) {
			n++
		}
		decision = entry.PeerTable.Otherwise
		if peer != nil {
			n++
			if v := s.Verdicts[model.PeerVerdictKey{PeerTable: entry.PeerTable.ID, Identity: peer.Identity.ID}]; v != nil {
				decision = v.Decision
			}
		}
		if decision.Verdict != model.VerdictNext {
			return n, decision.Verdict == model.VerdictDrop
		}
	}
	return n, false
}
