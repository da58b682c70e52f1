package model

import (
	"net/netip"
	"slices"
)

// Closed is the ruleset that drops everything. It is no part of its own: a data plane that finds it in a Subject knows
// what it decides.
var Closed = &Ruleset{ID: 1, Name: "closed", Default: PortEntry{Last: 65535, PeerTable: &PeerTable{ID: 1,
	Default: VerdictDrop, Otherwise: Decision{Verdict: VerdictDrop}}}}

// FailClosed returns what is wanted in place of parts while a kernel refuses facts of others, by part: subjects with
// Closed in place of the rulesets that depend on those, and wholly closed where facts of the subject itself are
// refused. As the kernel may not have that one at all, its address is then one of a pod that isn't known: the node
// says so. What decides about a refused peer isn't known, so each ruleset does that decides about peers, unless a data
// plane's own part has a method DecidedBy. Parts of before are returned again where they are equal.
func FailClosed(refused, wanted []PolicyPart, before map[PolicyPart]PolicyPart) map[PolicyPart]PolicyPart {
	gone := missingOf(refused)
	standIns := map[PolicyPart]PolicyPart{}
	for _, p := range wanted {
		if n, is := p.(*PolicyNode); is && len(gone.subjects) > 0 && n.Unknown == VerdictDrop {
			b, _ := before[p].(*PolicyNode)
			standIns[p] = n.without(gone.subjects, b)
		}
		s, is := p.(*Subject)
		if !is {
			continue
		}
		closed := *s
		for i := range PolicyStages {
			if gone.subjects[s] || gone.needs(s.Out[i]) {
				closed.Out[i] = Closed
			}
			if gone.subjects[s] || gone.needs(s.In[i]) {
				closed.In[i] = Closed
			}
		}
		switch b, _ := before[p].(*Subject); {
		case closed == *s:
		case b != nil && *b == closed:
			standIns[p] = b
		default:
			standIns[p] = &closed
		}
	}
	return standIns
}

// missing is what a kernel may lack of policies.
type missing struct {
	rulesets, tables map[uint64]bool
	subjects         map[*Subject]bool
	peers            bool // some
}

// missingOf returns what lacks where facts of parts are refused.
func missingOf(refused []PolicyPart) missing {
	m := missing{map[uint64]bool{}, map[uint64]bool{}, map[*Subject]bool{}, false}
	for _, p := range refused {
		if d, is := p.(interface{ DecidedBy() *PeerTable }); is {
			p = d.DecidedBy()
		} else if d, is := p.(DerivedPart); is {
			p = d.Origin()
		}
		switch v := p.(type) {
		case *Ruleset:
			m.rulesets[v.ID] = true
		case *PeerTable:
			m.tables[v.ID] = true
		case *PeerVerdict:
			m.tables[v.PeerTable.ID] = true
		case *Peer:
			m.peers = true
		case *Subject:
			m.subjects[v] = true
		}
	}
	return m
}

// needs reports whether a ruleset, which may be nil, needs what is missing.
func (m missing) needs(r *Ruleset) bool {
	return r != nil && (m.rulesets[r.ID] || r.needs(m.tables, m.peers))
}

// without returns n as a node that doesn't know subjects: before, if that is equal.
func (n *PolicyNode) without(subjects map[*Subject]bool, before *PolicyNode) *PolicyNode {
	closed := *n
	closed.Pods = slices.Clone(n.Pods)
	for s := range subjects {
		closed.Pods = append(closed.Pods, netip.PrefixFrom(s.Addr, s.Addr.BitLen()))
	}
	slices.SortFunc(closed.Pods, netip.Prefix.Compare)
	if closed.Pods = slices.Compact(closed.Pods); before != nil && slices.Equal(before.Pods, closed.Pods) {
		return before
	}
	return &closed
}

// needs reports whether one of the ruleset's peer tables is among tables, or, if peers, decides about peers.
func (r *Ruleset) needs(tables map[uint64]bool, peers bool) bool {
	needs := func(t *PeerTable) bool {
		if tables[t.ID] {
			return true
		}
		for i := range t.Rules {
			if peers && t.Rules[i].Peers != nil {
				return true
			}
		}
		return false
	}
	for i := range r.Ports {
		if needs(r.Ports[i].PeerTable) {
			return true
		}
	}
	return needs(r.Default.PeerTable)
}
