package iptables

import (
	"net/netip"
	"slices"
	"sort"

	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// Bounds of what a Join comes to.
const (
	MaxElements = 1 << 20 // prefixes in the sets of peer tables
	MaxSets     = 60_000  // sets of peer tables: the kernel has 65,535 for all owners

	baseElements   = 1 << 16 // prefixes that there may be whatever the number of peers,
	elementsByPeer = 16      // and for each of these
)

// Chains is a ruleset as subjects of one family use it in one direction and stage: the part of which the plane makes
// chains.
type Chains struct {
	model.PolicyPart // the ruleset
	use
	ruleset *model.Ruleset
	closed  map[uint64]string // peer tables that drop everything, since they are beyond a bound: why
}

// Member is a peer that is an element of a peer table's sets.
type Member struct {
	model.PolicyPart // the peer
	table            *namedTable
	prefixes         []netip.Prefix // nil: the address of a single peer
	decision, except model.Decision // one of them may be the table's Otherwise: then it has no set
}

// namedTable is a peer table with the names of its sets, which all of its elements share.
type namedTable struct {
	*model.PeerTable
	sets [2]map[model.Decision]string // by family
}

func newNamedTable(t *model.PeerTable) *namedTable {
	n := &namedTable{PeerTable: t}
	for i, f := range []iptables.Family{iptables.IPv4, iptables.IPv6} {
		n.sets[i] = map[model.Decision]string{}
		for _, d := range setsOf(t) {
			n.sets[i][d] = tableSet(f, t, d)
		}
	}
	return n
}

// Origin implements model.DerivedPart.
func (c *Chains) Origin() model.PolicyPart { return c.PolicyPart }

// Origin implements model.DerivedPart.
func (m *Member) Origin() model.PolicyPart { return m.PolicyPart }

// DecidedBy returns the peer table that the member belongs to: see model.FailClosed.
func (m *Member) DecidedBy() *model.PeerTable { return m.table.PeerTable }

// use names how a ruleset is used.
type use struct {
	ruleset uint64
	side
	six bool
}

// Join is the stage in front of the plane. A set holds addresses, and knows of no identity: so what the parts say by
// PeerVerdict × Peer becomes a Member for each peer that a peer table decides about otherwise than about all others,
// and rulesets become the Chains that subjects use. All other parts pass, but for those that the plane has no use of.
// It is pure, and costs what a change comes to. How many members there would be is counted first: what is beyond a
// bound is a peer table that drops everything, of those whose policies' namespace has most.
type Join struct {
	MaxElements, MaxSets int // 0: the constants

	uses       map[use]*usedRuleset
	tables     map[uint64]*joinedTable
	identities map[uint64]*identity
	singles    map[netip.Addr]*single
	ranges     []*ranged // sorted
	members    map[cell]*Member
	closed     int // tables

	pending
}

// pending is what an Apply has found out so far.
type pending struct {
	put, del []model.PolicyPart
	touched  map[cell]bool
	counted  map[use]bool             // that may come or go
	resized  map[*identity]bool       // they have other peers
	verdicts map[[2]uint64]bool       // that were put, by table and identity
	peers    []*model.Peer            // that were put
	moved    bool                     // ranges came or went
	nested   []*single                // they are in another range than before
	spread   map[*model.Peer][]uint64 // ranges, and the tables that may say something else of their single peers
	flipped  map[uint64]bool          // tables that are closed and were open, or the other way round
	renamed  map[uint64]bool          // tables that are used and were not, or the other way round
}

// usedRuleset is a ruleset in use.
type usedRuleset struct {
	ruleset *model.Ruleset
	count   int     // subjects
	part    *Chains // nil: not yet
}

// joinedTable is a peer table.
type joinedTable struct {
	*namedTable
	users    [2]int // uses of rulesets that name it, by family
	verdicts map[uint64]model.Decision
	members  [2]int // at most, by family
	closed   string // why; "": open
	owners   int    // namespaces whose policies have it, while tables are being closed,
	others   int    // and those that still have it, but for one
}

// identity is what is known of an identity.
type identity struct {
	verdicts map[uint64]model.Decision // by table
	peers    map[*model.Peer]bool
	sizes    [2]int // elements that the peers come to at most, by family
	counted  [2]int // as the tables have counted them
}

// single is a peer of one address.
type single struct {
	*model.Peer
	within *ranged // the range that holds it, if any
}

// ranged is a peer of several addresses.
type ranged struct {
	*model.Peer
	prefixes []netip.Prefix // storable
	inside   int            // single peers
	gone     bool           // it is no peer any more
}

// cell is what a peer table says of a peer.
type cell struct {
	table uint64
	peer  *model.Peer
}

// Apply returns what a change comes to. It is given every change, in their order.
func (j *Join) Apply(c model.Change[model.PolicyPart]) model.Change[model.PolicyPart] {
	if j.uses == nil {
		j.uses, j.tables, j.identities = map[use]*usedRuleset{}, map[uint64]*joinedTable{}, map[uint64]*identity{}
		j.singles, j.members = map[netip.Addr]*single{}, map[cell]*Member{}
	}
	j.pending = pending{touched: map[cell]bool{}, spread: map[*model.Peer][]uint64{}, counted: map[use]bool{},
		resized: map[*identity]bool{}, verdicts: map[[2]uint64]bool{},
		flipped: map[uint64]bool{}, renamed: map[uint64]bool{}}
	for _, p := range c.Del {
		j.count(p, -1)
	}
	for _, p := range c.Put {
		j.count(p, 1)
	}
	j.nest()
	j.resize()
	j.settleUses()
	j.bound()
	j.emitUses()
	j.touchAll()
	j.settleMembers()
	out := model.Change[model.PolicyPart]{Put: without(j.put, j.del), Del: without(j.del, j.put)}
	j.pending = pending{}
	return out
}

// without returns the parts of a that are not in b: what was made and dropped again.
func without(a, b []model.PolicyPart) (l []model.PolicyPart) {
	in := make(map[model.PolicyPart]bool, len(b))
	for _, p := range b {
		in[p] = true
	}
	for _, p := range a {
		if !in[p] {
			l = append(l, p)
		}
	}
	return l
}

// count counts a part: one more (1), or one less (-1).
func (j *Join) count(p model.PolicyPart, n int) {
	switch v := p.(type) {
	case *model.PolicyNode, *model.Subject, *model.Device:
		if n > 0 {
			j.put = append(j.put, p)
		} else {
			j.del = append(j.del, p)
		}
		if s, ok := v.(*model.Subject); ok {
			j.subject(s, n)
		}
	case *model.PeerVerdict:
		j.verdict(v, n)
	case *model.Peer:
		j.peer(v, n)
	}
}

// subject counts the rulesets that a subject uses.
func (j *Join) subject(s *model.Subject, n int) {
	for d, rulesets := range [...][model.PolicyStages]*model.Ruleset{model.Egress: s.Out, model.Ingress: s.In} {
		for stage, r := range rulesets {
			if r == nil {
				continue
			}
			k := use{r.ID, side{model.Direction(d), stage}, s.Addr.Is6()}
			u := j.uses[k]
			if u == nil {
				u = &usedRuleset{ruleset: r}
				j.uses[k] = u
			}
			u.count += n
			j.counted[k] = true
		}
	}
}

// table returns the state of a peer table.
func (j *Join) table(t *model.PeerTable) *joinedTable {
	s := j.tables[t.ID]
	if s == nil {
		s = &joinedTable{namedTable: newNamedTable(t), verdicts: map[uint64]model.Decision{}}
		j.tables[t.ID] = s
	}
	return s
}

// drop forgets a table that nothing is known of.
func (j *Join) drop(t *joinedTable) {
	if t.users == [2]int{} && len(t.verdicts) == 0 {
		delete(j.tables, t.ID)
	}
}

// live reports whether a peer table may have members.
func (t *joinedTable) live() bool { return t != nil && t.closed == "" && t.users != [2]int{} }

// identity returns the state of an identity.
func (j *Join) identity(id uint64) *identity {
	i := j.identities[id]
	if i == nil {
		i = &identity{verdicts: map[uint64]model.Decision{}, peers: map[*model.Peer]bool{}}
		j.identities[id] = i
	}
	return i
}

// verdict takes in or out what a peer table decides about an identity.
func (j *Join) verdict(v *model.PeerVerdict, n int) {
	t, i := j.table(v.PeerTable), j.identity(v.Identity.ID)
	for f := range t.members {
		t.members[f] += n * i.counted[f]
	}
	if n > 0 {
		t.verdicts[v.Identity.ID], i.verdicts[t.ID] = v.Decision, v.Decision
		j.verdicts[[2]uint64{t.ID, v.Identity.ID}] = true
		return
	}
	delete(t.verdicts, v.Identity.ID)
	delete(i.verdicts, t.ID)
	j.touchIdentity(t, i)
	j.drop(t)
	j.forget(v.Identity.ID, i)
}

// forget forgets an identity that nothing is known of.
func (j *Join) forget(id uint64, i *identity) {
	if len(i.peers)+len(i.verdicts) == 0 {
		delete(j.identities, id)
	}
}

// touchIdentity records that what a peer table says of an identity's peers may change.
func (j *Join) touchIdentity(t *joinedTable, i *identity) {
	if !t.live() {
		return
	}
	for p := range i.peers {
		j.touched[cell{t.ID, p}] = true
		if !p.Single() {
			j.spread[p] = append(j.spread[p], t.ID)
		}
	}
}

// touchPeer records that what peer tables say of an identity's peer may change.
func (j *Join) touchPeer(p *model.Peer, i *identity) {
	for id := range i.verdicts {
		if j.tables[id].live() {
			j.touched[cell{id, p}] = true
		}
	}
}

// resizeBy counts n elements of a peer more.
func (j *Join) resizeBy(p *model.Peer, i *identity, n int) {
	i.sizes[family(p.Range.First.Is6())] += n
	j.resized[i] = true
}

// peer takes a peer in or out.
func (j *Join) peer(p *model.Peer, n int) {
	i := j.identity(p.Identity.ID)
	if n > 0 {
		i.peers[p] = true
		j.peers = append(j.peers, p)
	} else {
		j.touchPeer(p, i)
		delete(i.peers, p)
	}
	switch {
	case !p.Single() && n > 0:
		r := &ranged{Peer: p, prefixes: storable(p.Range.Prefixes()...)}
		j.ranges, j.moved = append(j.ranges, r), true
		j.resizeBy(p, i, len(r.prefixes))
	case !p.Single():
		r := j.holding(p.Range.First)
		r.gone, j.moved = true, true
		j.resizeBy(p, i, -len(r.prefixes)-r.inside)
	case n > 0:
		s := &single{Peer: p}
		j.singles[p.Range.First] = s
		j.nested = append(j.nested, s)
		j.resizeBy(p, i, 1)
	default:
		j.resizeBy(p, i, -1)
		if s := j.singles[p.Range.First]; s != nil && s.Peer == p {
			j.touchSingle(s)
			j.setWithin(s, nil)
			delete(j.singles, p.Range.First)
		}
	}
	j.forget(p.Identity.ID, i)
}

// setWithin records that s is within r, nil for no range.
func (j *Join) setWithin(s *single, r *ranged) {
	for _, x := range []struct {
		*ranged
		n int
	}{{s.within, -1}, {r, 1}} {
		if x.ranged != nil && !x.gone {
			x.inside += x.n
			j.resizeBy(x.Peer, j.identity(x.Identity.ID), x.n)
		}
	}
	s.within = r
}

// nest finds the ranges of single peers again where ranges or these came or went.
func (j *Join) nest() {
	if !j.moved {
		for _, s := range j.nested {
			j.setWithin(s, j.holding(s.Range.First))
		}
		return
	}
	j.ranges = slices.DeleteFunc(j.ranges, func(r *ranged) bool { return r.gone })
	slices.SortFunc(j.ranges, func(a, b *ranged) int { return a.Range.First.Compare(b.Range.First) })
	j.nested = nil
	for _, s := range j.singles {
		if within := j.holding(s.Range.First); within != s.within {
			j.touchSingle(s)
			j.setWithin(s, within)
			j.nested = append(j.nested, s)
		}
	}
}

// holding returns the range that holds an address, if any.
func (j *Join) holding(a netip.Addr) *ranged {
	i := sort.Search(len(j.ranges), func(i int) bool { return j.ranges[i].Range.First.Compare(a) > 0 })
	if i > 0 && j.ranges[i-1].Range.Contains(a) {
		return j.ranges[i-1]
	}
	return nil
}

// touchSingle records that what peer tables say of a single peer may change, and of the range that it is an end of.
func (j *Join) touchSingle(s *single) {
	touch := func(id uint64) {
		if i := j.identities[id]; i != nil {
			j.touchPeer(s.Peer, i)
			if s.isEnd() {
				j.touchPeer(s.within.Peer, i)
			}
		}
	}
	touch(s.Identity.ID)
	if s.within != nil {
		touch(s.within.Identity.ID)
	}
}

// isEnd reports whether a single peer is the first or last address of a range: that may be an element by itself.
func (s *single) isEnd() bool {
	return s.within != nil && (s.within.Range.First == s.Range.First || s.within.Range.Last == s.Range.First)
}

// family is the index of a family's counts.
func family(six bool) int {
	if six {
		return 1
	}
	return 0
}

// resize counts in the peer tables how many elements identities come to now.
func (j *Join) resize() {
	for i := range j.resized {
		for f, n := range i.sizes {
			if n -= i.counted[f]; n == 0 {
				continue
			}
			for id := range i.verdicts {
				j.tables[id].members[f] += n
			}
		}
		i.counted = i.sizes
	}
}

// settleUses counts the peer tables of rulesets that came into use, and of those that went out of it.
func (j *Join) settleUses() {
	for k := range j.counted {
		u := j.uses[k]
		switch {
		case u.count > 0 && u.part == nil:
			j.name(k, u.ruleset, 1)
		case u.count == 0 && u.part != nil:
			j.name(k, u.ruleset, -1)
			j.del = append(j.del, u.part)
		}
		if u.count == 0 {
			delete(j.uses, k)
		}
	}
}

// emitUses makes the parts of rulesets that came into use, and anew those of which a peer table is closed or open and
// was not.
func (j *Join) emitUses() {
	flipped := func(t *model.PeerTable) bool { return j.flipped[t.ID] }
	for k, u := range j.uses {
		if u.part == nil || len(j.flipped) > 0 && slices.ContainsFunc(tablesOf(u.ruleset), flipped) {
			j.emit(k, u)
		}
	}
}

// emit makes the part of a ruleset in use, in place of the one that there was.
func (j *Join) emit(k use, u *usedRuleset) {
	if u.part != nil {
		j.del = append(j.del, u.part)
	}
	u.part = &Chains{PolicyPart: u.ruleset, use: k, ruleset: u.ruleset}
	for _, t := range tablesOf(u.ruleset) {
		if why := j.tables[t.ID].closed; why != "" {
			if u.part.closed == nil {
				u.part.closed = map[uint64]string{}
			}
			u.part.closed[t.ID] = why
		}
	}
	j.put = append(j.put, u.part)
}

// tablesOf returns the peer tables of a ruleset, each once.
func tablesOf(r *model.Ruleset) (l []*model.PeerTable) {
	seen := map[uint64]bool{}
	add := func(t *model.PeerTable) {
		if !seen[t.ID] {
			seen[t.ID] = true
			l = append(l, t)
		}
	}
	for i := range r.Ports {
		add(r.Ports[i].PeerTable)
	}
	add(r.Default.PeerTable)
	return l
}

// name counts the peer tables that a ruleset in use names.
func (j *Join) name(k use, r *model.Ruleset, n int) {
	for _, m := range tablesOf(r) {
		t := j.table(m)
		was := t.users[family(k.six)] > 0
		t.users[family(k.six)] += n
		if is := t.users[family(k.six)] > 0; is != was {
			j.renamed[t.ID] = true
		}
		if t.users == [2]int{} && t.closed != "" {
			t.closed = ""
			j.closed--
		}
	}
}

// touchAll records what members may change by what was put, and by tables that are closed or used and were not.
func (j *Join) touchAll() {
	if len(j.flipped)+len(j.renamed) > 0 {
		for c := range j.members {
			if j.flipped[c.table] || j.renamed[c.table] {
				j.touched[c] = true
			}
		}
	}
	for _, l := range []map[uint64]bool{j.flipped, j.renamed} {
		for id := range l {
			if t := j.tables[id]; t != nil {
				for i := range t.verdicts {
					j.touchIdentity(t, j.identity(i))
				}
				j.drop(t)
			}
		}
	}
	for v := range j.verdicts {
		if t := j.tables[v[0]]; t != nil {
			j.touchIdentity(t, j.identity(v[1]))
		}
	}
	for _, p := range j.peers {
		j.touchPeer(p, j.identity(p.Identity.ID))
	}
	for _, s := range j.nested {
		j.touchSingle(s)
	}
	if len(j.spread) == 0 {
		return
	}
	for _, s := range j.singles {
		if s.within != nil {
			for _, t := range j.spread[s.within.Peer] {
				j.touched[cell{t, s.Peer}] = true
			}
		}
	}
}

// settleMembers makes the members that came to be, and drops those that are none any more.
func (j *Join) settleMembers() {
	var ends []cell
	for c := range j.touched {
		if s := j.singles[c.peer.Range.First]; s != nil && s.Peer == c.peer && s.isEnd() {
			ends = append(ends, cell{c.table, s.within.Peer})
		}
	}
	for _, c := range ends {
		j.touched[c] = true
	}
	for c := range j.touched {
		was, now := j.members[c], j.member(c)
		if was != nil && now != nil && was.decision == now.decision && was.except == now.except &&
			slices.Equal(was.prefixes, now.prefixes) {
			continue
		}
		if was != nil {
			delete(j.members, c)
			j.del = append(j.del, was)
		}
		if now != nil {
			j.members[c] = now
			j.put = append(j.put, now)
		}
	}
}

// member returns what a peer table says of a peer, nil if nothing in particular.
func (j *Join) member(c cell) *Member {
	t, p := j.tables[c.table], c.peer
	if !t.live() || t.users[family(p.Range.First.Is6())] == 0 {
		return nil
	}
	i := j.identities[p.Identity.ID]
	if i == nil || !i.peers[p] {
		return nil
	}
	decide := func(i *identity) model.Decision {
		if i != nil {
			if d, ok := i.verdicts[t.ID]; ok {
				return d
			}
		}
		return t.Otherwise
	}
	m := Member{PolicyPart: p, table: t.namedTable, decision: decide(i), except: t.Otherwise}
	if p.Single() {
		if s := j.singles[p.Range.First]; s.within != nil {
			m.except = decide(j.identities[s.within.Identity.ID])
		}
	}
	if m.decision == m.except {
		return nil
	}
	if p.Single() {
		return &m
	}
	m.prefixes = j.holding(p.Range.First).prefixes
	isMember := func(x netip.Prefix) bool {
		s := j.singles[x.Addr()]
		return x.IsSingleIP() && s != nil && j.member(cell{c.table, s.Peer}) != nil // which has an element there itself
	}
	if slices.ContainsFunc(m.prefixes, isMember) {
		m.prefixes = slices.DeleteFunc(slices.Clone(m.prefixes), isMember)
	}
	return &m
}

// storable returns prefixes that hold the same addresses. None is /0, which no set can hold.
func storable(of ...netip.Prefix) (l []netip.Prefix) {
	for _, p := range of {
		switch {
		case p.Bits() > 0:
			l = append(l, p.Masked())
		case p.Addr().Is4():
			l = append(l, netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("128.0.0.0/1"))
		default:
			l = append(l, netip.MustParsePrefix("::/1"), netip.MustParsePrefix("8000::/1"))
		}
	}
	return l
}
