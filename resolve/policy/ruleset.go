package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/model"
)

// ruleset is a model.Ruleset, and who needs it.
type ruleset struct {
	model    *model.Ruleset
	digest   digest
	tables   []*table // each once
	users    int      // classes, times the lists that have it
	keys     []digest // under which it is remembered
	policies []*policy
	products int    // port entries, each times its rules
	excess   string // why it drops everything
	added    bool
}

// tableRule is a rule of a peer table.
type tableRule struct {
	peers   []*peerSpec // nil: every address
	digest  digest      // of the peers
	verdict model.Verdict
	audit   bool
}

// content is what a peer table says.
type content struct {
	rules     []tableRule
	otherwise model.Verdict
}

// builder makes a ruleset of clauses.
type builder struct {
	*Resolver
	clauses   []clause // in the order of precedence
	otherwise model.Verdict
	tables    map[digest]*table
	expanded  int // peers of rules with named ports
}

// updateRulesets sets the rulesets of c: those that its policies come to, or none if it has no pods on this node.
func (r *Resolver) updateRulesets(c *class) {
	var now *selection
	if c.local > 0 {
		now = r.selectionOf(c)
		now.users++
	}
	if was := c.selection; was != nil {
		if was.users--; was.users == 0 {
			r.forget(was)
		}
	}
	c.selection, c.named = now, false
	changed := false
	for _, d := range []model.Direction{model.Egress, model.Ingress} {
		for stage := range model.PolicyStages {
			rs := r.rulesetOf(c, d, stage)
			was := c.rulesets[d][stage]
			if rs == was {
				continue
			}
			if rs != nil {
				rs.users++
			}
			if was != nil {
				if was.users--; was.users == 0 {
					r.idleRulesets = append(r.idleRulesets, was)
				}
			}
			c.rulesets[d][stage], changed = rs, true
		}
	}
	if changed {
		for _, p := range c.pods {
			if p.local {
				r.dirty(p.addresses...)
			}
		}
	}
}

// mostKeys is under how many keys a ruleset is remembered.
const mostKeys = 16

// selection is the policies that select a class with pods on this node.
type selection struct {
	digest   digest // of the policies' sequences
	policies []*policy
	users    int // classes
	parts    [2][model.PolicyStages]*part
}

// part is the policies of a selection that take part in a direction and stage.
type part struct {
	policies  []*policy
	otherwise model.Verdict // where no rule matches
	named     bool          // some rules are about named ports
	key       digest        // of the policies' sequences, the direction and the stage
}

// sequencesOf computes which objects policies are, and something more.
func sequencesOf(l []*policy, extra []byte) digest {
	b := make([]byte, 0, 8*len(l)+len(extra))
	for _, p := range l {
		b = binary.BigEndian.AppendUint64(b, p.sequence)
	}
	return sha256.Sum256(append(b, extra...))
}

// selectionOf returns the policies that select c.
func (r *Resolver) selectionOf(c *class) *selection {
	r.buffer = r.policiesOf(c, r.buffer[:0])
	if r.last != nil && slices.Equal(r.buffer, r.last.policies) {
		return r.last
	}
	d := sequencesOf(r.buffer, nil)
	if s := r.selections[d]; s != nil {
		r.last = s
		return s
	}
	policies := slices.Clone(r.buffer)
	s := &selection{digest: d, policies: policies}
	r.selections[d], r.last = s, s
	for _, p := range policies {
		if p.users++; p.users == 1 {
			r.selecting[p] = struct{}{}
		}
	}
	return s
}

// forget removes a selection that no class has.
func (r *Resolver) forget(s *selection) {
	delete(r.selections, s.digest)
	if r.last == s {
		r.last = nil
	}
	for _, p := range s.policies {
		if p.users--; p.users == 0 {
			delete(r.selecting, p)
		}
	}
}

// partOf returns the policies of s that take part in a stage. Of the last stage enforced NetworkPolicies are alone;
// audited ones come before the Baseline tier, which then decides.
func (r *Resolver) partOf(s *selection, d model.Direction, stage int) *part {
	if x := s.parts[d][stage]; x != nil {
		return x
	}
	x := &part{otherwise: model.VerdictNext}
	s.parts[d][stage] = x
	enforced := false
	for _, p := range s.policies {
		if p.ref.Tier == model.TierNetworkPolicy && !p.ref.Audit && r.rules(p).applies[d] {
			enforced = true
		}
	}
	var baseline []*policy
	for _, p := range s.policies {
		if !r.rules(p).applies[d] {
			continue
		}
		switch p.ref.Tier {
		case model.TierAdmin:
			if stage == model.StageAdmin {
				x.policies = append(x.policies, p)
			}
		case model.TierBaseline:
			if stage == model.StageLast && !enforced {
				baseline = append(baseline, p)
			}
		default:
			if stage == model.StageLast && p.ref.Audit != enforced {
				x.policies = append(x.policies, p)
			}
		}
	}
	if enforced && stage == model.StageLast {
		x.otherwise = model.VerdictDrop
	}
	x.policies = append(x.policies, baseline...)
	x.named = slices.ContainsFunc(x.policies, func(p *policy) bool { return p.compiled.named[d] })
	x.key = sequencesOf(x.policies, []byte{byte(d), byte(stage)})
	return x
}

// rulesetOf returns the ruleset of c in one direction and stage, nil where nothing decides.
func (r *Resolver) rulesetOf(c *class, d model.Direction, stage int) *ruleset {
	if c.selection == nil {
		return nil
	}
	x := r.partOf(c.selection, d, stage)
	if len(x.policies) == 0 {
		return nil
	}
	key := x.key
	switch {
	case x.named && d == model.Ingress:
		key = sha256.Sum256(fmt.Appendf(key[:], " %v", c.ports))
	case x.named:
		c.named = true
		key = sha256.Sum256(fmt.Appendf(key[:], " %d", r.numbering))
	}
	if rs, known := r.rulesets[key]; known {
		return rs
	}
	rs := r.buildRuleset(c, d, x, key)
	if rs == nil {
		r.rulesets[key] = nil
		r.noRulesets++
		return nil
	}
	if same := r.rulesetsByDigest[rs.digest]; same != nil {
		r.unused(rs.tables...)
		rs = same
	} else {
		r.rulesetsByDigest[rs.digest] = rs
		r.newRulesets = append(r.newRulesets, rs)
	}
	rs.policies = x.policies
	if len(rs.keys) == mostKeys {
		delete(r.rulesets, rs.keys[0])
		rs.keys = slices.Delete(rs.keys, 0, 1)
	}
	rs.keys = append(rs.keys, key)
	r.rulesets[key] = rs
	return rs
}

// buildRuleset makes a ruleset, nil if it decides nothing.
func (r *Resolver) buildRuleset(c *class, d model.Direction, x *part, key digest) *ruleset {
	policies := x.policies
	b := &builder{Resolver: r, otherwise: x.otherwise, tables: map[digest]*table{}}
	m := &model.Ruleset{}
	var audited []model.RuleRef // NetworkPolicies that would isolate
	for i, p := range policies {
		m.Policies = append(m.Policies, p.ref)
		for _, cl := range p.compiled.clauses[d] {
			if cl.named {
				b.resolve(cl, c, d)
			} else {
				b.clauses = append(b.clauses, cl)
			}
		}
		if p.ref.Tier == model.TierNetworkPolicy && p.ref.Audit {
			audited = append(audited, model.RuleRef{PolicyRef: p.ref, Direction: d, Index: -1})
			if i+1 == len(policies) || policies[i+1].ref.Tier != model.TierNetworkPolicy {
				for _, ref := range audited {
					cl := clause{ref: ref, verdict: model.VerdictDrop, everyone: true, allPorts: true}
					cl.seal()
					b.clauses = append(b.clauses, cl)
				}
			}
		}
	}
	m.Name = rulesetName(d, m.Policies)
	rs := &ruleset{model: m}
	edges, always := b.edges()
	if r.ids.closedRulesets[key] > 0 {
		rs.excess = fmt.Sprintf("%s: the rulesets of this node come to more than %d rules in port entries, and it is one of "+
			"the largest", m.Name, r.limits.Total)
	}
	if rs.products = measure(edges, len(always)); rs.products > r.limits.Products {
		rs.excess = fmt.Sprintf("%s: its policies come to %d rules in port entries, %d are the limit", m.Name, rs.products,
			r.limits.Products)
	}
	if b.expanded > r.limits.Entries {
		rs.excess = fmt.Sprintf("%s: its rules with named ports come to more than %d peers, each once for each number",
			m.Name,
			r.limits.Entries)
	}
	if rs.excess == "" && !b.entries(m, edges, always) {
		rs.excess = fmt.Sprintf("%s: its policies come to more than %d port entries", m.Name, r.limits.Entries)
		r.unused(mapValues(b.tables)...)
		b.tables = map[digest]*table{}
	}
	if rs.excess != "" {
		m.Ports, rs.products = nil, 0
		m.Default = model.PortEntry{Last: 65535, PeerTable: b.table(content{otherwise: model.VerdictDrop}).model}
	}
	rs.tables = mapValues(b.tables)
	if len(m.Ports) == 0 && len(m.Default.PeerTable.Rules) == 0 && m.Default.PeerTable.Default == model.VerdictNext {
		r.unused(rs.tables...)
		return nil
	}
	rs.digest = digestOf(m, rs.excess)
	m.ID = r.id("ruleset", rs.digest)
	return rs
}

func mapValues[K comparable, V any](m map[K]V) (out []V) {
	for _, v := range m {
		out = append(out, v)
	}
	return out
}

// rulesetName returns what a ruleset is called: its first policies.
func rulesetName(d model.Direction, policies []model.PolicyRef) string {
	s := d.String() + " by"
	for i, p := range policies {
		if i == 3 && len(policies) > 4 {
			return fmt.Sprintf("%s and %d more", s, len(policies)-i)
		}
		if i > 0 {
			s += ","
		}
		s += " " + p.String()
	}
	return s
}

// digestOf computes what a ruleset is. One that drops everything for being beyond a bound is another than one whose
// rules come to that.
func digestOf(m *model.Ruleset, excess string) digest {
	b := appendText(appendText(nil, m.Name), excess)
	for _, p := range m.Policies {
		b = appendRef(b, p)
	}
	b = appendEntry(b, &m.Default)
	for i := range m.Ports {
		b = appendEntry(b, &m.Ports[i])
	}
	return sha256.Sum256(b)
}

func appendEntry(b []byte, e *model.PortEntry) []byte {
	b = appendNumbers(b, uint64(e.Protocol), uint64(e.First), uint64(e.Last), e.PeerTable.ID, uint64(len(e.Sources)))
	for _, refs := range e.Sources {
		b = appendNumbers(b, uint64(len(refs)))
		for i := range refs {
			b = appendRef(b, refs[i].PolicyRef)
			b = appendText(appendNumbers(b, uint64(refs[i].Index+1)), refs[i].Name)
		}
	}
	return b
}

func appendRef(b []byte, p model.PolicyRef) []byte {
	flags := uint64(p.Tier) << 1
	if p.Audit {
		flags |= 1
	}
	return appendText(appendText(appendNumbers(b, flags), p.Namespace), p.Name)
}

func appendText(b []byte, s string) []byte { return append(appendNumbers(b, uint64(len(s))), s...) }

func appendNumbers(b []byte, l ...uint64) []byte {
	for _, n := range l {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

// resolve adds what a clause with named ports comes to: of ingress, the numbers of the subject's own; of egress, a
// clause for each number that pods have for the name, with those pods.
func (b *builder) resolve(cl clause, c *class, d model.Direction) {
	spans := cl.spans
	cl.spans, cl.named = nil, false
	var names []span
	for _, s := range spans {
		switch {
		case s.name == "":
			cl.spans = append(cl.spans, s)
		case d == model.Egress:
			names = append(names, s)
		default:
			for _, p := range c.ports {
				if p.name == s.name && (s.protocol == 0 || s.protocol == p.protocol) {
					cl.spans = append(cl.spans, span{protocol: p.protocol, first: p.number, last: p.number})
				}
			}
		}
	}
	if !cl.empty() {
		b.clauses = append(b.clauses, cl)
	}
	for _, s := range names {
		for _, protocol := range protocols {
			if s.protocol != 0 && s.protocol != protocol {
				continue
			}
			for _, n := range b.numbersOf(portName{s.name, protocol}) {
				b.onPort(cl, port{s.name, protocol, n})
			}
		}
	}
}

// numbersOf returns the numbers that pods have for a port's name, sorted: at most maxNumbers.
func (r *Resolver) numbersOf(name portName) (out []uint16) {
	all := r.numbers[name]
	for n := range all {
		out = append(out, n)
	}
	if len(out) > maxNumbers {
		slices.SortFunc(out, func(a, b uint16) int {
			return cmp.Or(-cmp.Compare(len(all[a]), len(all[b])), cmp.Compare(a, b))
		})
		out = out[:maxNumbers]
	}
	slices.Sort(out)
	return out
}

// blockWeight is how many other peers with a named port one CIDR counts for: each pod with that port is compared with
// it.
const blockWeight = 15

// onPort adds cl at the one port p, for peers that have it.
func (b *builder) onPort(cl clause, p port) {
	peers := cl.peers
	if cl.everyone {
		peers = []*peerSpec{anyPod}
	}
	cl.everyone, cl.peers = false, nil
	cl.spans = []span{{protocol: p.protocol, first: p.number, last: p.number}}
	for _, s := range peers {
		if b.expanded++; s.kind == block {
			b.expanded += blockWeight
		}
		if b.expanded > b.limits.Entries {
			return
		}
		if s = s.on(p); s != nil {
			cl.peers = append(cl.peers, s)
		}
	}
	if cl.seal(); !cl.empty() {
		b.clauses = append(b.clauses, cl)
	}
}

// edge is where spans of a protocol begin or end.
type edge struct {
	at     int
	clause int
	begins bool
}

// protocols are those that have ports.
var protocols = [...]model.Protocol{model.TCP, model.UDP, model.SCTP}

// edges returns where the clauses' spans begin and end, by protocol, sorted; and the clauses of all ports.
func (b *builder) edges() (edges [len(protocols)][]edge, always []int) {
	for i := range b.clauses {
		if b.clauses[i].allPorts {
			always = append(always, i)
			continue
		}
		for _, s := range b.clauses[i].spans {
			at := slices.Index(protocols[:], s.protocol)
			edges[at] = append(edges[at], edge{int(s.first), i, true}, edge{int(s.last) + 1, i, false})
		}
	}
	for _, l := range edges {
		slices.SortFunc(l, func(a, b edge) int { return cmp.Compare(a.at, b.at) })
	}
	return edges, always
}

// measure returns how many rules the port entries come to, or a few more.
func measure(edges [len(protocols)][]edge, always int) (n int) {
	n = 1 + always
	for _, l := range edges {
		active := 0
		for i, e := range l {
			if e.begins {
				active++
			} else {
				active--
			}
			if active > 0 && i+1 < len(l) && l[i+1].at > e.at {
				n += 1 + always + active
			}
		}
	}
	return n
}

// entries fills in m's port entries. It reports whether they are within the bound.
func (b *builder) entries(m *model.Ruleset, edges [len(protocols)][]edge, always []int) bool {
	m.Default = b.entry(0, 0, 65535, always)
	for i, p := range protocols {
		if !b.sweep(m, p, edges[i], always) {
			return false
		}
	}
	return true
}

// sweep adds the port entries of one protocol.
func (b *builder) sweep(m *model.Ruleset, p model.Protocol, edges []edge, always []int) bool {
	active := map[int]int{}
	for i := 0; i < len(edges); {
		at := edges[i].at
		for ; i < len(edges) && edges[i].at == at; i++ {
			if n := &edges[i]; n.begins {
				active[n.clause]++
			} else if active[n.clause]--; active[n.clause] == 0 {
				delete(active, n.clause)
			}
		}
		if len(active) == 0 {
			continue
		}
		clauses := slices.Clone(always)
		for c := range active {
			clauses = append(clauses, c)
		}
		slices.Sort(clauses)
		e := b.entry(p, uint16(at), uint16(edges[i].at-1), clauses)
		if n := len(m.Ports); n > 0 && follows(&m.Ports[n-1], &e) {
			m.Ports[n-1].Last = e.Last
		} else if n == b.limits.Entries {
			return false
		} else {
			m.Ports = append(m.Ports, e)
		}
	}
	return true
}

// follows reports whether b continues a.
func follows(a, b *model.PortEntry) bool {
	return a.Protocol == b.Protocol && int(a.Last)+1 == int(b.First) && a.PeerTable == b.PeerTable &&
		slices.EqualFunc(a.Sources, b.Sources, slices.Equal)
}

// entry makes a port entry of clauses, given by index in order.
func (b *builder) entry(p model.Protocol, first, last uint16, clauses []int) model.PortEntry {
	c := content{otherwise: b.otherwise}
	e := model.PortEntry{Protocol: p, First: first, Last: last}
	for i := 0; i < len(clauses); {
		run := b.run(clauses[i:])
		i += len(run)
		if done := c.add(run, &e); done {
			break
		}
	}
	e.PeerTable = b.table(c).model
	return e
}

// run returns the first of the clauses, or, where those are alike but for their peers so that their order means
// nothing, all of them sorted by peers.
func (b *builder) run(indexes []int) (out []*clause) {
	for _, i := range indexes {
		c := &b.clauses[i]
		if len(out) > 0 {
			if f := out[0]; c.ref.Tier != f.ref.Tier || c.ref.Tier != model.TierNetworkPolicy || c.verdict != f.verdict {
				break
			}
		}
		out = append(out, c)
	}
	if len(out) > 1 {
		slices.SortStableFunc(out, func(a, b *clause) int {
			if a.everyone != b.everyone {
				if a.everyone {
					return -1
				}
				return 1
			}
			return slices.Compare(a.digest[:], b.digest[:])
		})
	}
	return out
}

// add adds rules for clauses in their order, those with the same peers as one. It reports whether nothing that follows
// can match.
func (c *content) add(run []*clause, e *model.PortEntry) (done bool) {
	for i := 0; i < len(run); {
		f, refs := run[i], run[i].refs
		for i++; i < len(run) && run[i].everyone == f.everyone && run[i].digest == f.digest; i++ {
			refs = append(refs[:len(refs):len(refs)], run[i].ref)
		}
		switch audit := f.ref.Audit; {
		case f.everyone && !audit:
			c.otherwise = f.verdict
			e.Sources = append(e.Sources, refs)
			return true
		case audit && c.shadowed():
		default:
			c.rules = append(c.rules, tableRule{peers: f.peers, digest: f.digest, verdict: f.verdict, audit: audit})
			e.Sources = append(e.Sources, refs)
		}
	}
	return false
}

// shadowed reports whether an audited rule already matches every address.
func (c *content) shadowed() bool {
	return slices.ContainsFunc(c.rules, func(r tableRule) bool { return r.audit && r.peers == nil })
}

// digestOf computes what a peer table is.
func (c *content) digestOf() digest {
	b := appendNumbers(make([]byte, 0, 1+33*len(c.rules)), uint64(c.otherwise))
	for i := range c.rules {
		r := &c.rules[i]
		flags := uint64(r.verdict) << 2
		if r.audit {
			flags |= 1
		}
		if r.peers == nil {
			flags |= 2
		}
		b = append(appendNumbers(b, flags), r.digest[:]...)
	}
	return sha256.Sum256(b)
}

// table returns the peer table of that content, and has the builder's ruleset use it.
func (b *builder) table(c content) *table {
	d := c.digestOf()
	t := b.tables[d]
	if t == nil {
		t = b.useTable(d, c)
		b.tables[d] = t
	}
	return t
}
