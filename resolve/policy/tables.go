package policy

import (
	"slices"

	"fairlead.dev/fairlead/model"
)

// group is the peers of a rule. Rules with the same peers share it, in whatever peer tables they are.
type group struct {
	digest  digest
	peers   []*peer // sorted by text
	model   []*model.Peers
	tables  map[*table]struct{}
	users   int // rules of peer tables
	matches int // identities that the peers match
	stamp   uint64
}

// table is a model.PeerTable, and what needs it.
type table struct {
	charge
	model     *model.PeerTable
	digest    digest
	groups    []*group // the peers of each rule; nil: every address
	every     int      // the first rule that matches every address; they are audited
	users     int      // rulesets
	evaluated bool     // for all identities
	stamp     uint64
	verdicts  map[*signature]*model.PeerVerdict
}

// useTable returns the peer table of that content, with one more user.
func (r *Resolver) useTable(d digest, c *content) *table {
	t := r.tables[d]
	if t == nil {
		t = &table{digest: d, verdicts: map[*signature]*model.PeerVerdict{}}
		r.readTable(t, c)
		r.tables[d] = t
		r.newTables = append(r.newTables, t)
		r.put(t.model)
	}
	t.users++
	return t
}

// readTable makes t's model, and has t use the peers that its rules name.
func (r *Resolver) readTable(t *table, c *content) {
	t.model = &model.PeerTable{ID: r.id("peer table", t.digest), Default: c.otherwise}
	n := len(c.rules)
	t.model.Rules, t.groups, t.every = make([]model.Rule, n), make([]*group, n), n
	for i, rule := range c.rules {
		out := &t.model.Rules[i]
		out.Verdict, out.Audit = rule.verdict, rule.ref.Audit
		if rule.everyone {
			t.every = min(t.every, i)
			continue
		}
		g := r.groupOf(rule)
		g.tables[t] = struct{}{}
		t.groups[i], out.Peers = g, g.model
	}
	t.model.Otherwise = t.decision(t.every, n)
}

// groupOf returns the group of a clause's peers, with one more user.
func (r *Resolver) groupOf(c *clause) *group {
	g := r.groups[c.digest]
	if g == nil {
		g = &group{digest: c.digest, tables: map[*table]struct{}{}}
		for _, s := range c.peers {
			p := r.peers[s.text]
			if p == nil {
				r.peerSequence++
				p = &peer{peerSpec: s, model: &model.Peers{Text: s.text, Domain: s.domain}, sequence: r.peerSequence,
					identities: map[*signature]struct{}{}}
				r.peers[s.text] = p
				r.changedPeers = append(r.changedPeers, p)
			}
			p.groups = append(p.groups, g)
			g.matches += len(p.identities)
			g.peers, g.model = append(g.peers, p), append(g.model, p.model)
		}
		r.groups[c.digest] = g
	}
	g.users++
	r.evaluations += g.matches
	return g
}

// releaseGroups has t use no group any more.
func (r *Resolver) releaseGroups(t *table) {
	for _, g := range t.groups {
		if g == nil {
			continue
		}
		delete(g.tables, t)
		r.evaluations -= g.matches
		if g.users--; g.users > 0 {
			continue
		}
		delete(r.groups, g.digest)
		for _, p := range g.peers {
			i := slices.Index(p.groups, g)
			p.groups = slices.Delete(p.groups, i, i+1)
			if len(p.groups) == 0 {
				r.changedPeers = append(r.changedPeers, p)
			}
		}
	}
}

// unused takes one user from each table.
func (r *Resolver) unused(l ...*table) {
	for _, t := range l {
		if t.users--; t.users == 0 {
			r.idleTables = append(r.idleTables, t)
		}
	}
}

// removeTables removes peer tables that have no user any more.
func (r *Resolver) removeTables() *resource {
	for _, t := range r.idleTables {
		if t.users > 0 || r.tables[t.digest] != t {
			continue
		}
		delete(r.tables, t.digest)
		r.release("peer table", t.digest)
		r.releaseGroups(t)
		for _, v := range t.verdicts {
			r.del(v)
		}
		r.verdicts -= len(t.verdicts)
		r.del(t.model)
	}
	r.idleTables = nil
	return nil
}

// decision returns what t decides where these are the first rules that match: of all, and of those enforced.
func (t *table) decision(all, enforced int) (d model.Decision) {
	verdict := func(i int) model.Verdict {
		if i >= len(t.model.Rules) {
			return t.model.Default
		}
		return t.model.Rules[i].Verdict
	}
	d.Verdict = verdict(enforced)
	d.Report = d.Verdict != model.VerdictDrop && verdict(min(all, enforced)) == model.VerdictDrop
	return d
}

// updateVerdicts evaluates new peer tables and identities, and drops the peer verdicts of those that are gone. It
// returns a resource of which there is not enough, nil if there is of each.
func (r *Resolver) updateVerdicts() *resource {
	r.dropIdentities()
	r.done = 1
	if x := r.beyondNow(); x != nil {
		return x
	}
	for n := len(r.newIdentities) + len(r.newTables); len(r.newIdentities)+len(r.newTables) > 0; {
		if len(r.newIdentities) > 0 {
			s := r.newIdentities[0]
			if r.newIdentities = r.newIdentities[1:]; s.identity != nil {
				r.evaluateIdentity(s)
			}
		} else {
			t := r.newTables[0]
			if r.newTables = r.newTables[1:]; r.tables[t.digest] == t {
				r.evaluateTable(t)
			}
		}
		if r.entriesUsed() > r.maxEntries() && !r.lifted {
			r.done = 1 - float64(len(r.newIdentities)+len(r.newTables))/float64(n)
			return kernelEntries
		}
	}
	r.newIdentities, r.newTables = nil, nil
	return nil
}

// dropIdentities drops identities that no part says any more.
func (r *Resolver) dropIdentities() {
	for _, s := range r.idle {
		if s.users > 0 || s.identity == nil {
			continue
		}
		for _, p := range s.peers {
			delete(p.identities, s)
			for _, g := range p.groups {
				g.matches--
				r.evaluations -= g.users
				for t := range g.tables {
					if v := t.verdicts[s]; v != nil {
						delete(t.verdicts, s)
						r.verdicts--
						r.del(v)
					}
				}
			}
		}
		r.release("identity", identityDigest(s))
		s.identity = nil
	}
	r.idle = nil
}

// evaluateIdentity evaluates the peer tables that name peers of s, but for those that aren't evaluated yet at all.
func (r *Resolver) evaluateIdentity(s *signature) {
	r.stamp++
	var found []*table
	for _, p := range s.peers {
		for _, g := range p.groups {
			g.stamp = r.stamp
			for t := range g.tables {
				if t.stamp != r.stamp && t.evaluated {
					t.stamp = r.stamp
					found = append(found, t)
				}
			}
		}
	}
	for _, t := range found {
		all, enforced := t.every, len(t.groups)
		for i, g := range t.groups {
			if g != nil && g.stamp == r.stamp {
				all = min(all, i)
				if !t.model.Rules[i].Audit {
					enforced = i
					break
				}
			}
		}
		r.setVerdict(t, s, t.decision(all, enforced))
	}
}

// evaluateTable evaluates t for the identities that its rules match.
func (r *Resolver) evaluateTable(t *table) {
	t.evaluated = true
	r.stamp++
	var found []*signature
	n := len(t.groups)
	for i, g := range t.groups {
		if g == nil {
			continue
		}
		for _, p := range g.peers {
			for s := range p.identities {
				if s.stamp != r.stamp {
					s.stamp, s.all, s.enforced = r.stamp, min(i, t.every), n
					found = append(found, s)
				}
				if s.enforced == n && !t.model.Rules[i].Audit {
					s.enforced = i
				}
			}
		}
	}
	for _, s := range found {
		r.setVerdict(t, s, t.decision(s.all, s.enforced))
	}
}

// setVerdict adds t's peer verdict about s, if it is another than t's Otherwise.
func (r *Resolver) setVerdict(t *table, s *signature, d model.Decision) {
	if d == t.model.Otherwise || t.verdicts[s] != nil {
		return
	}
	v := &model.PeerVerdict{PeerTable: t.model, Identity: s.identity, Decision: d}
	t.verdicts[s] = v
	r.verdicts++
	r.put(v)
}
