package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/model"
)

// ruleset is a model.Ruleset, and what needs it.
type ruleset struct {
	model  *model.Ruleset
	digest digest
	tables []*table // each once
	pieces int      // prefixes of the port entries
	users  int      // classes, times the lists that have it
	gone   bool     // it was removed
}

// content is what a peer table says.
type content struct {
	rules     []*clause // their peers, verdicts and audit, in the order of precedence
	otherwise model.Verdict
}

// builder makes the ruleset of a plan.
type builder struct {
	*Resolver
	*plan
	clauses []*clause          // in the order of precedence
	tables  map[*table]sources // those that the ruleset has, and the sources of one of their entries
	keys    []entryKey         // of the entries

	content content // of the entry that is being made
	sources [][]model.RuleRef
	bytes   []byte
}

// sources are where the rules of a port entry come from.
type sources struct {
	key  refsKey
	refs [][]model.RuleRef
}

// refsKey is part of a digest of what rules are called.
type refsKey [16]byte

// entryKey is what a port entry leads to, and where its rules come from.
type entryKey struct {
	*table
	refs refsKey
}

// build makes the ruleset that p comes to, nil if it decides nothing.
func (r *Resolver) build(p *plan) *ruleset {
	b := &builder{Resolver: r, plan: p, tables: map[*table]sources{}}
	b.read()
	m := &model.Ruleset{Name: p.name(), Policies: refsOf(p.policies)}
	edges, always := b.edges()
	m.Default = b.entry(0, 0, 65535, always)
	for i, protocol := range protocols {
		b.sweep(m, protocol, edges[i], always)
	}
	if rest := m.Default.PeerTable; len(m.Ports) == 0 && len(rest.Rules) == 0 && rest.Default == model.VerdictNext {
		r.unused(b.used()...)
		return nil
	}
	return r.shared(m, b.digestOf(m), b.used(), p.figures.pieces)
}

// close makes the ruleset that drops everything in place of the one that p would come to.
func (r *Resolver) close(p *plan) *ruleset {
	named := p.policies[:min(len(p.policies), mostNamed)]
	m := &model.Ruleset{Name: p.name(), Policies: refsOf(named)}
	c := &content{otherwise: model.VerdictDrop}
	t := r.useTable(c.digestOf(new([]byte)), c)
	m.Default = model.PortEntry{Last: 65535, PeerTable: t.model}
	b := appendText([]byte("beyond a bound"), m.Name)
	for _, ref := range m.Policies {
		b = appendRef(b, ref)
	}
	return r.shared(m, sha256.Sum256(b), []*table{t}, 0)
}

// mostNamed is how many policies a ruleset that is beyond a bound names.
const mostNamed = 16

// shared returns the ruleset that has the digest: the one that there is, or one of m and the tables.
func (r *Resolver) shared(m *model.Ruleset, d digest, tables []*table, pieces int) *ruleset {
	if same := r.rulesets[d]; same != nil {
		r.unused(tables...)
		return same
	}
	m.ID = r.id("ruleset", d)
	rs := &ruleset{model: m, digest: d, tables: tables, pieces: pieces}
	r.rulesets[d] = rs
	r.portPieces += pieces
	r.put(m)
	return rs
}

// used returns the tables that the ruleset has.
func (b *builder) used() (out []*table) {
	for t := range b.tables {
		out = append(out, t)
	}
	return out
}

// read collects the clauses of the plan's policies. Of clauses that are alike but for their peers, so that their order
// means nothing, those with the same peers come together.
func (b *builder) read() {
	var audited []model.RuleRef // NetworkPolicies that would isolate
	for i, p := range b.plan.policies {
		for j := range p.compiled.clauses[b.direction] {
			cl := &p.compiled.clauses[b.direction][j]
			b.numbered(cl, b.plan, func(spans []span, on *port) bool {
				if c := cl.at(spans, on); !c.empty() {
					b.clauses = append(b.clauses, c)
				}
				return true
			})
		}
		if p.ref.Tier != model.TierNetworkPolicy || !p.ref.Audit {
			continue
		}
		audited = append(audited, model.RuleRef{PolicyRef: p.ref, Direction: b.direction, Index: -1})
		if i+1 == len(b.plan.policies) || b.plan.policies[i+1].ref.Tier != model.TierNetworkPolicy {
			for _, ref := range audited {
				cl := &clause{ref: ref, verdict: model.VerdictDrop, everyone: true, allPorts: true}
				cl.seal()
				b.clauses = append(b.clauses, cl)
			}
		}
	}
	for rest := b.clauses; len(rest) > 0; {
		n := 1
		for n < len(rest) && rest[n].alike(rest[0]) {
			n++
		}
		slices.SortStableFunc(rest[:n], func(a, b *clause) int {
			if a.everyone != b.everyone {
				if a.everyone {
					return -1
				}
				return 1
			}
			return slices.Compare(a.digest[:], b.digest[:])
		})
		rest = rest[n:]
	}
}

// alike reports whether the order of a and b means nothing.
func (c *clause) alike(o *clause) bool {
	return c.ref.Tier == model.TierNetworkPolicy && o.ref.Tier == model.TierNetworkPolicy && c.verdict == o.verdict
}

// edge is where spans of a protocol begin or end.
type edge struct {
	at     int32
	clause int32
	begins bool
}

// protocols are those that have ports.
var protocols = [...]model.Protocol{model.TCP, model.UDP, model.SCTP}

// edges returns where the clauses' spans begin and end, by protocol, sorted; and the clauses of all ports.
func (b *builder) edges() (edges [len(protocols)][]edge, always []int32) {
	for i, c := range b.clauses {
		if c.allPorts {
			always = append(always, int32(i))
			continue
		}
		for _, s := range c.spans {
			l := &edges[slices.Index(protocols[:], s.protocol)]
			*l = append(*l, edge{int32(s.first), int32(i), true}, edge{int32(s.last) + 1, int32(i), false})
		}
	}
	for _, l := range edges {
		slices.SortFunc(l, func(a, b edge) int { return cmp.Compare(a.at, b.at) })
	}
	return edges, always
}

// sweep adds the port entries of one protocol.
func (b *builder) sweep(m *model.Ruleset, p model.Protocol, edges []edge, always []int32) {
	active := slices.Clone(always) // sorted
	for i := 0; i < len(edges); {
		first := edges[i].at
		for ; i < len(edges) && edges[i].at == first; i++ {
			at, _ := slices.BinarySearch(active, edges[i].clause)
			if edges[i].begins {
				active = slices.Insert(active, at, edges[i].clause)
			} else {
				active = slices.Delete(active, at, at+1)
			}
		}
		if len(active) == len(always) {
			continue
		}
		e := b.entry(p, uint16(first), uint16(edges[i].at-1), active)
		n := len(m.Ports)
		if n > 0 && m.Ports[n-1].Protocol == p && int32(m.Ports[n-1].Last)+1 == first && b.keys[n] == b.keys[n+1] {
			m.Ports[n-1].Last = e.Last
			b.keys = b.keys[:n+1]
		} else {
			m.Ports = append(m.Ports, e)
		}
	}
}

// entry makes a port entry of clauses, given by index in order.
func (b *builder) entry(p model.Protocol, first, last uint16, clauses []int32) model.PortEntry {
	c := &b.content
	c.rules, c.otherwise, b.sources, b.bytes = c.rules[:0], b.otherwise, b.sources[:0], b.bytes[:0]
	shadowed := false // an audited rule already matches every address
	for i := 0; i < len(clauses); {
		f, from := b.clauses[clauses[i]], i
		for i++; i < len(clauses); i++ {
			if o := b.clauses[clauses[i]]; !o.alike(f) || o.everyone != f.everyone || o.digest != f.digest {
				break
			}
		}
		if f.ref.Audit && shadowed {
			continue
		}
		b.addSources(clauses[from:i])
		if f.everyone && !f.ref.Audit { // nothing that follows can match
			c.otherwise = f.verdict
			break
		}
		c.rules = append(c.rules, f)
		shadowed = shadowed || f.everyone
	}
	key := sha256.Sum256(b.bytes)
	s := sources{key: refsKey(key[:])}
	t := b.table()
	if s.refs = b.tables[t].refs; b.tables[t].key != s.key {
		s.refs = append([][]model.RuleRef(nil), b.sources...)
	}
	b.tables[t] = s
	b.keys = append(b.keys, entryKey{t, s.key})
	return model.PortEntry{Protocol: p, First: first, Last: last, PeerTable: t.model, Sources: s.refs}
}

// addSources adds where a rule comes from that several clauses make.
func (b *builder) addSources(clauses []int32) {
	refs := b.clauses[clauses[0]].refs
	if len(clauses) > 1 {
		refs = make([]model.RuleRef, len(clauses))
	}
	b.bytes = appendNumbers(b.bytes, uint64(len(clauses)))
	for i, at := range clauses {
		c := b.clauses[at]
		b.bytes = append(b.bytes, c.refKey[:]...)
		if len(clauses) > 1 {
			refs[i] = c.ref
		}
	}
	b.sources = append(b.sources, refs)
}

// table returns the peer table of the content, and has the builder's ruleset use it.
func (b *builder) table() *table {
	d := b.content.digestOf(&b.bytes)
	if t := b.Resolver.tables[d]; t != nil {
		if _, has := b.tables[t]; has {
			return t
		}
	}
	return b.useTable(d, &b.content)
}

// digestOf computes what a peer table is. It uses the buffer.
func (c *content) digestOf(buffer *[]byte) digest {
	b := appendNumbers((*buffer)[:0], uint64(c.otherwise))
	for _, r := range c.rules {
		flags := uint64(r.verdict) << 2
		if r.ref.Audit {
			flags |= 1
		}
		if r.everyone {
			flags |= 2
		}
		b = append(appendNumbers(b, flags), r.digest[:]...)
	}
	*buffer = b
	return sha256.Sum256(b)
}

// digestOf computes what a ruleset is. It doesn't depend on IDs, which depend on what else there is.
func (b *builder) digestOf(m *model.Ruleset) (out digest) {
	h := sha256.New()
	l := appendText(nil, m.Name)
	for _, p := range m.Policies {
		l = appendRef(l, p)
	}
	h.Write(l)
	entry := func(e *model.PortEntry, key *entryKey) {
		l = appendNumbers(l[:0], uint64(e.Protocol), uint64(e.First), uint64(e.Last), uint64(len(e.Sources)))
		h.Write(append(append(l, key.table.digest[:]...), key.refs[:]...))
	}
	entry(&m.Default, &b.keys[0])
	for i := range m.Ports {
		entry(&m.Ports[i], &b.keys[i+1])
	}
	h.Sum(out[:0])
	return out
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

// rulesetName returns what a ruleset is called: its first policies.
func rulesetName(d model.Direction, policies []*policy) string {
	s := d.String() + " by"
	for i, p := range policies {
		if i == 3 && len(policies) > 4 {
			return fmt.Sprintf("%s and %d more", s, len(policies)-i)
		}
		if i > 0 {
			s += ","
		}
		s += " " + p.ref.String()
	}
	return s
}

// numbered calls visit with what cl comes to for a plan's pods: its spans, with numbers in place of names. Of egress,
// it calls visit in addition for each port that pods have under a name, until it returns false: cl matches those pods
// there.
func (r *Resolver) numbered(cl *clause, p *plan, visit func(spans []span, on *port) bool) {
	if !cl.named {
		visit(cl.spans, nil)
		return
	}
	n := slices.IndexFunc(cl.spans, func(s span) bool { return s.name != "" })
	spans, names := slices.Clone(cl.spans[:n]), cl.spans[n:]
	if p.direction == model.Ingress {
		for _, s := range names {
			for _, q := range p.ports {
				if q.name == s.name && (s.protocol == 0 || s.protocol == q.protocol) {
					spans = append(spans, span{protocol: q.protocol, first: q.number, last: q.number})
				}
			}
		}
		visit(joined(spans), nil)
		return
	}
	visit(spans, nil)
	for _, s := range names {
		for _, protocol := range protocols {
			if s.protocol != 0 && s.protocol != protocol {
				continue
			}
			for _, n := range r.numbersOf(portName{s.name, protocol}) {
				if !visit(nil, &port{s.name, protocol, n}) {
					return
				}
			}
		}
	}
}

// at returns c with spans in place of its own; with a port, for its peers that have that.
func (c *clause) at(spans []span, on *port) *clause {
	if !c.named {
		return c
	}
	o := *c
	o.spans, o.named = spans, false
	if on == nil {
		return &o
	}
	peers := c.peers
	if c.everyone {
		peers = []*peerSpec{anyPod}
	}
	o.everyone, o.peers = false, nil
	o.spans = []span{{protocol: on.protocol, first: on.number, last: on.number}}
	for _, s := range peers {
		if s = s.on(*on); s != nil {
			o.peers = append(o.peers, s)
		}
	}
	o.seal()
	return &o
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
