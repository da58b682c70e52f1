package iptables

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sort"

	"fairlead.dev/fairlead/model"
)

// Bounds of what a Join comes to.
const (
	MaxElements = 1 << 20 // prefixes in the sets of peer tables
	MaxSets     = 60_000  // sets of peer tables: the kernel has 65,535 for all owners
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
	table            *model.PeerTable
	prefixes         []netip.Prefix
	decision, except model.Decision // one of them may be the table's Otherwise: then it has no set
}

// Origin implements model.DerivedPart.
func (c *Chains) Origin() model.PolicyPart { return c.PolicyPart }

// Origin implements model.DerivedPart.
func (m *Member) Origin() model.PolicyPart { return m.PolicyPart }

// DecidedBy returns the peer table that the member belongs to: see model.FailClosed.
func (m *Member) DecidedBy() *model.PeerTable { return m.table }

// use names how a ruleset is used.
type use struct {
	ruleset uint64
	side
	six bool
}

// Join is the stage in front of the plane. A set holds addresses, and knows of no identity: so what the parts say by
// PeerVerdict × Peer becomes a Member for each peer that a peer table decides about otherwise than about all others,
// and rulesets become the Chains that subjects use. All other parts pass, but for those that the plane has no use of.
// It is pure, and costs what a change comes to. What is beyond a bound is a peer table that drops everything.
type Join struct {
	MaxElements, MaxSets int // 0: the constants

	uses       map[use]*usedRuleset
	tables     map[uint64]*joinedTable
	identities map[uint64]*identity
	singles    map[netip.Addr]*single
	ranges     []*model.Peer // sorted
	members    map[cell]*Member
	elements   int
	sets       int
	bounded    bool // a table is closed, and may be opened

	pending
}

// pending is what an Apply has found out so far.
type pending struct {
	put, del []model.PolicyPart
	touched  map[cell]bool
	spread   map[*model.Peer][]uint64 // ranges, and the tables that may say something else of their single peers
	counted  map[use]bool             // that may come or go
	moved    bool                     // ranges came or went
}

// usedRuleset is a ruleset in use.
type usedRuleset struct {
	ruleset *model.Ruleset
	count   int     // subjects
	part    *Chains // nil: not yet
}

// joinedTable is a peer table.
type joinedTable struct {
	*model.PeerTable
	users    [2]int // uses of rulesets that name it, by family
	verdicts map[uint64]model.Decision
	elements int
	closed   string // why; "": open
}

// identity is what is known of an identity.
type identity struct {
	verdicts map[uint64]model.Decision // by table
	peers    map[*model.Peer]bool
}

// single is a peer of one address.
type single struct {
	*model.Peer
	within *model.Peer // the range that holds it, if any
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
	j.pending = pending{touched: map[cell]bool{}, spread: map[*model.Peer][]uint64{}, counted: map[use]bool{}}
	for _, p := range c.Del {
		j.count(p, -1)
	}
	for _, p := range c.Put {
		j.count(p, 1)
	}
	j.settleUses()
	j.settleMembers()
	j.bound()
	return model.Change[model.PolicyPart]{Put: without(j.put, j.del), Del: without(j.del, j.put)}
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
	case *model.PolicyNode, *model.Subject:
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
		s = &joinedTable{PeerTable: t, verdicts: map[uint64]model.Decision{}}
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

// identity returns the state of an identity.
func (j *Join) identity(id uint64) *identity {
	i := j.identities[id]
	if i == nil {
		i = &identity{map[uint64]model.Decision{}, map[*model.Peer]bool{}}
		j.identities[id] = i
	}
	return i
}

// verdict takes in or out what a peer table decides about an identity.
func (j *Join) verdict(v *model.PeerVerdict, n int) {
	t, i := j.table(v.PeerTable), j.identity(v.Identity.ID)
	if n > 0 {
		t.verdicts[v.Identity.ID], i.verdicts[t.ID] = v.Decision, v.Decision
	} else {
		delete(t.verdicts, v.Identity.ID)
		delete(i.verdicts, t.ID)
	}
	j.touchIdentity(t.ID, i)
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
func (j *Join) touchIdentity(table uint64, i *identity) {
	for p := range i.peers {
		j.touched[cell{table, p}] = true
		if !p.Single() {
			j.spread[p] = append(j.spread[p], table)
		}
	}
}

// peer takes a peer in or out.
func (j *Join) peer(p *model.Peer, n int) {
	i := j.identity(p.Identity.ID)
	if n > 0 {
		i.peers[p] = true
	} else {
		delete(i.peers, p)
	}
	switch {
	case p.Single() && n > 0:
		s := &single{p, j.holding(p.Range.First)}
		j.singles[p.Range.First] = s
		j.touchSingle(s)
	case p.Single():
		if s := j.singles[p.Range.First]; s != nil && s.Peer == p {
			j.touchSingle(s)
			delete(j.singles, p.Range.First)
		}
	case n > 0:
		j.ranges, j.moved = append(j.ranges, p), true
		j.sort()
	default:
		j.ranges, j.moved = slices.DeleteFunc(j.ranges, func(r *model.Peer) bool { return r == p }), true
	}
	for t := range i.verdicts {
		j.touched[cell{t, p}] = true
	}
	j.forget(p.Identity.ID, i)
}

// sort puts the last of ranges where it belongs.
func (j *Join) sort() {
	last := len(j.ranges) - 1
	p := j.ranges[last]
	at := sort.Search(last, func(i int) bool { return j.ranges[i].Range.First.Compare(p.Range.First) > 0 })
	copy(j.ranges[at+1:], j.ranges[at:last])
	j.ranges[at] = p
}

// holding returns the range that holds an address, if any.
func (j *Join) holding(a netip.Addr) *model.Peer {
	i := sort.Search(len(j.ranges), func(i int) bool { return j.ranges[i].Range.First.Compare(a) > 0 })
	if i > 0 && j.ranges[i-1].Range.Contains(a) {
		return j.ranges[i-1]
	}
	return nil
}

// within returns the range that holds a single peer, if any.
func (j *Join) within(s *single) *model.Peer {
	if j.moved {
		return j.holding(s.Range.First)
	}
	return s.within
}

// touchSingle records that what peer tables say of a single peer may change, and of the range that it is an end of.
func (j *Join) touchSingle(s *single) {
	touch := func(id uint64) {
		if i := j.identities[id]; i != nil {
			for t := range i.verdicts {
				j.touched[cell{t, s.Peer}] = true
				if s.isEnd() {
					j.touched[cell{t, s.within}] = true
				}
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

// nest finds the ranges of single peers again where ranges came or went, and records that what peer tables say of the
// single peers in a range may change with what they say of that.
func (j *Join) nest() {
	if !j.moved && len(j.spread) == 0 {
		return
	}
	for _, s := range j.singles {
		if within := j.within(s); within != s.within {
			j.touchSingle(s)
			s.within = within
			j.touchSingle(s)
		}
		for _, t := range j.spread[s.within] {
			j.touched[cell{t, s.Peer}] = true
		}
	}
	j.moved, j.spread = false, map[*model.Peer][]uint64{}
}

// family is the index of a family's counts.
func family(six bool) int {
	if six {
		return 1
	}
	return 0
}

// settleUses makes the parts of rulesets that came into use, and drops those of others.
func (j *Join) settleUses() {
	for k := range j.counted {
		u := j.uses[k]
		switch {
		case u.count > 0 && u.part == nil:
			j.name(k, u.ruleset, 1)
			j.emit(k, u)
		case u.count == 0:
			delete(j.uses, k)
			if u.part != nil {
				j.name(k, u.ruleset, -1)
				j.del = append(j.del, u.part)
			}
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
			for id := range t.verdicts {
				j.touchIdentity(t.ID, j.identity(id))
			}
			if t.closed == "" {
				j.sets += n * len(setsOf(m))
			}
		}
		if t.users == [2]int{} {
			t.closed = ""
		}
		j.drop(t)
	}
}

// settleMembers makes the members that came to be, and drops those that are none any more.
func (j *Join) settleMembers() {
	j.nest()
	for c := range maps.Clone(j.touched) {
		if s := j.singles[c.peer.Range.First]; s != nil && s.Peer == c.peer && s.isEnd() {
			j.touched[cell{c.table, s.within}] = true
		}
	}
	for c := range j.touched {
		was, now := j.members[c], j.member(c)
		if was != nil && now != nil && was.decision == now.decision && was.except == now.except &&
			slices.Equal(was.prefixes, now.prefixes) {
			continue
		}
		if was != nil {
			delete(j.members, c)
			j.size(was, -1)
			j.del = append(j.del, was)
		}
		if now != nil {
			j.members[c] = now
			j.size(now, 1)
			j.put = append(j.put, now)
		}
	}
}

// size counts a member's elements, n times.
func (j *Join) size(m *Member, n int) {
	n *= len(m.prefixes)
	j.elements += n
	if t := j.tables[m.table.ID]; t != nil {
		t.elements += n
	}
}

// member returns what a peer table says of a peer, nil if nothing in particular.
func (j *Join) member(c cell) *Member {
	t, p := j.tables[c.table], c.peer
	if t == nil || t.closed != "" || t.users[family(p.Range.First.Is6())] == 0 {
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
	m := &Member{PolicyPart: p, table: t.PeerTable, decision: decide(i), except: t.Otherwise}
	if p.Single() {
		if s := j.singles[p.Range.First]; s.within != nil {
			m.except = decide(j.identities[s.within.Identity.ID])
		}
	}
	if m.decision == m.except {
		return nil
	}
	m.prefixes = storable(p.Range.Prefixes()...)
	if !p.Single() {
		m.prefixes = slices.DeleteFunc(m.prefixes, func(x netip.Prefix) bool {
			s := j.singles[x.Addr()]
			return x.IsSingleIP() && s != nil && j.member(cell{c.table, s.Peer}) != nil // which has an element there itself
		})
	}
	return m
}

// bound closes the peer tables that are beyond a bound, the largest first, and opens those that are within it again.
func (j *Join) bound() {
	elements, sets := j.MaxElements, j.MaxSets
	if elements == 0 {
		elements = MaxElements
	}
	if sets == 0 {
		sets = MaxSets
	}
	if j.bounded {
		j.reopen(elements, sets)
	}
	for j.elements > elements {
		t := j.largest(func(t *joinedTable) int { return t.elements })
		j.close(t, fmt.Sprintf("its %d addresses are beyond the bound of %d prefixes in all sets", t.elements, elements))
	}
	for j.sets > sets {
		t := j.largest(func(t *joinedTable) int { return t.setCount() })
		j.close(t, fmt.Sprintf("its sets are beyond the bound of %d sets", sets))
	}
}

// setCount returns how many sets the table has.
func (t *joinedTable) setCount() (n int) {
	for _, users := range t.users {
		if users > 0 && t.closed == "" {
			n += len(setsOf(t.PeerTable))
		}
	}
	return n
}

// largest returns the table of which there is most, of two the one with the greater ID.
func (j *Join) largest(of func(*joinedTable) int) (most *joinedTable) {
	for _, t := range j.tables {
		if most == nil || of(t) > of(most) || of(t) == of(most) && t.ID > most.ID {
			most = t
		}
	}
	return most
}

// close has a table drop everything.
func (j *Join) close(t *joinedTable, why string) {
	j.sets -= t.setCount()
	t.closed, j.bounded = why, true
	j.again(t)
}

// again makes everything of a table anew that depends on whether it is closed.
func (j *Join) again(t *joinedTable) {
	j.touched = map[cell]bool{}
	for c := range j.members {
		if c.table == t.ID {
			j.touched[c] = true
		}
	}
	for id := range t.verdicts {
		j.touchIdentity(t.ID, j.identity(id))
	}
	j.settleMembers()
	for k, u := range j.uses {
		if slices.ContainsFunc(tablesOf(u.ruleset), func(m *model.PeerTable) bool { return m.ID == t.ID }) {
			j.emit(k, u)
		}
	}
}

// reopen opens closed tables that are within the bounds, the smallest first. A tenth is left free, so that tables don't
// come and go.
func (j *Join) reopen(elements, sets int) {
	var closed []*joinedTable
	size := map[*joinedTable]int{}
	for _, t := range j.tables {
		if t.closed != "" {
			closed = append(closed, t)
			for id := range t.verdicts {
				size[t] += len(j.identity(id).peers)
			}
		}
	}
	j.bounded = len(closed) > 0
	slices.SortFunc(closed, func(a, b *joinedTable) int { return size[a] - size[b] })
	for _, t := range closed {
		if j.elements+size[t] <= elements-elements/10 && j.sets+2*len(setsOf(t.PeerTable)) <= sets-sets/10 {
			t.closed = ""
			j.sets += t.setCount()
			j.again(t)
		}
	}
}

// Closed returns why peer tables drop everything, by the policies that they are of: "NetworkPolicy shop/web: its …".
func (j *Join) Closed() (problems []string) {
	all := map[string]bool{}
	for _, u := range j.uses {
		if u.part == nil {
			continue
		}
		for _, why := range u.part.closed {
			all[u.ruleset.Name+": "+why] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
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
