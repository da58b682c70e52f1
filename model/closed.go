package model

// Closed is the ruleset that drops everything. It is no part of its own: a data plane that finds it in a Subject knows
// what it decides.
var Closed = &Ruleset{ID: 1, Name: "closed", Default: PortEntry{Last: 65535, PeerTable: &PeerTable{ID: 1,
	Default: VerdictDrop, Otherwise: Decision{Verdict: VerdictDrop}}}}

// FailClosed returns what is wanted in place of subjects while a kernel refuses facts of parts, by subject: the same
// ones with Closed in place of the rulesets that depend on those parts. What decides about a refused peer isn't known,
// so each ruleset does that decides about peers, unless a data plane's own part has a method DecidedBy. Subjects of
// before are returned again where they are equal.
func FailClosed(refused, wanted []PolicyPart, before map[PolicyPart]PolicyPart) map[PolicyPart]PolicyPart {
	rulesets, tables, peers := map[uint64]bool{}, map[uint64]bool{}, false
	for _, p := range refused {
		if d, is := p.(interface{ DecidedBy() *PeerTable }); is {
			p = d.DecidedBy()
		} else if d, is := p.(DerivedPart); is {
			p = d.Origin()
		}
		switch v := p.(type) {
		case *Ruleset:
			rulesets[v.ID] = true
		case *PeerTable:
			tables[v.ID] = true
		case *PeerVerdict:
			tables[v.PeerTable.ID] = true
		case *Peer:
			peers = true
		}
	}
	depends := func(r *Ruleset) bool {
		return r != nil && (rulesets[r.ID] || r.needs(tables, peers))
	}
	standIns := map[PolicyPart]PolicyPart{}
	for _, p := range wanted {
		s, is := p.(*Subject)
		if !is {
			continue
		}
		closed := *s
		for i := range PolicyStages {
			if depends(s.Out[i]) {
				closed.Out[i] = Closed
			}
			if depends(s.In[i]) {
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
