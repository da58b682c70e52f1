package policy

import (
	"net/netip"
	"slices"
	"sort"

	"fairlead.dev/fairlead/model"
)

// piece is addresses that the same CIDRs in use hold. Pieces are sorted and disjoint.
type piece struct {
	model.Range
	name      string     // the smallest CIDR that holds it
	signature *signature // of its addresses
	known     *signature // of those that are no unknown pod's
	peer      *shownPeer
}

func (p *piece) single() bool { return p.First == p.Last }

// pieceAt returns the piece that holds a, nil if none does.
func (r *Resolver) pieceAt(a netip.Addr) *piece {
	i := sort.Search(len(r.pieces), func(i int) bool { return r.pieces[i].First.Compare(a) > 0 })
	if i > 0 && r.pieces[i-1].Contains(a) {
		return r.pieces[i-1]
	}
	return nil
}

// cidr is a prefix in use, and what begins and ends to match there.
type cidr struct {
	netip.Prefix
	begin, end []*peer
	within     *cidr   // the smallest that holds it; nil: none
	peers      []*peer // what matches inside, unless smaller ones say otherwise
	depth      int     // how many that are
}

// cidrs returns the prefixes in use, the wider of two that overlap first.
func (r *Resolver) cidrs() (out []*cidr) {
	all := map[netip.Prefix]*cidr{}
	at := func(p netip.Prefix) *cidr {
		c := all[p]
		if c == nil {
			c = &cidr{Prefix: p}
			all[p] = c
			out = append(out, c)
		}
		return c
	}
	for _, p := range r.peers {
		switch p.kind {
		case block:
			at(p.cidr).begin = append(at(p.cidr).begin, p)
			for _, e := range p.except {
				at(e).end = append(at(e).end, p)
			}
		case unknownPods:
			for _, x := range r.podRanges() {
				at(x).begin = append(at(x).begin, p)
			}
		}
	}
	slices.SortFunc(out, func(a, b *cidr) int { return a.Prefix.Compare(b.Prefix) })
	return out
}

// podRanges returns the pod ranges of the cluster.
func (r *Resolver) podRanges() (out []netip.Prefix) {
	for _, p := range r.config.PodRanges {
		out = append(out, p.Masked())
	}
	for _, n := range r.nodes {
		out = append(out, n.podRanges...)
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out)
}

// updatePieces cuts the CIDRs in use into pieces, and marks the addresses that are in another piece. It returns a
// resource of which there is not enough, nil if there is of each.
func (r *Resolver) updatePieces() *resource {
	if !r.stalePieces {
		return nil
	}
	prefixes, was := r.cidrs(), r.pieces
	if over := r.countPieces(prefixes); over != nil {
		return over
	}
	r.stalePieces = false
	r.pieces, r.prefixes = nil, 0
	sweep(prefixes, func(c *cidr) { c.peers = through(c) }, func(c *cidr, of model.Range, _ *cidr) {
		r.appendPiece(c, of)
	})
	r.replacePieces(was)
	for x := range r.addresses.all() {
		if p := r.pieceAt(x.Addr); r.within(p) == r.within(x.piece) {
			x.piece = p
		} else {
			r.dirty(x)
		}
	}
	return nil
}

// within is what the piece that holds an address, nil for none, means to it.
type within struct {
	signature *signature // of the piece
	known     *signature // as if the address were no unknown pod's
	single    bool       // the piece is the address alone
}

func (r *Resolver) within(p *piece) within {
	if p != nil {
		return within{p.signature, p.known, p.single()}
	}
	return within{r.nothing, r.nothing, false}
}

// sweep calls open for each of sorted prefixes, and visit for each range of addresses that one of them holds and no
// smaller one. by is the prefix that cuts the range there: another one where it ends or begins inside.
func sweep(prefixes []*cidr, open func(*cidr), visit func(c *cidr, of model.Range, by *cidr)) {
	var top, by *cidr
	var from netip.Addr // what is before is visited
	until := func(last netip.Addr) {
		if from.IsValid() && !last.Less(from) {
			visit(top, model.Range{First: from, Last: last}, by)
		}
	}
	closeUntil := func(a netip.Addr) {
		for top != nil {
			last := model.LastOf(top.Prefix)
			if a.IsValid() && !last.Less(a) {
				return
			}
			until(last)
			top, by, from = top.within, top, last.Next()
		}
	}
	for _, c := range prefixes {
		first := c.Addr()
		closeUntil(first)
		if c.within = top; top != nil && from.Less(first) {
			by = c
			until(first.Prev())
		}
		top, by, from = c, c, first
		open(c)
	}
	closeUntil(netip.Addr{})
}

// countPieces counts what the pieces of sorted prefixes come to at most, before any is made: how often peers match, and
// prefixes of pieces. The peers that cut a piece have both. It returns a resource of which there is not enough, nil if
// there is of each.
func (r *Resolver) countPieces(prefixes []*cidr) *resource {
	count, prefixCount := 0, 0
	for _, p := range r.peers {
		p.span, p.pieces = 0, 0
	}
	sweep(prefixes, func(c *cidr) {
		if c.depth = len(c.begin) - len(c.end); c.within != nil {
			c.depth += c.within.depth
		}
	}, func(c *cidr, of model.Range, by *cidr) {
		matches, n, peers := max(c.depth, 0)+identityWeight, of.PrefixCount(), by.begin
		if len(peers) == 0 {
			peers = by.end
		}
		count += matches
		prefixCount += n
		for _, p := range peers {
			p.span += (matches + len(peers) - 1) / len(peers)
			p.pieces += (n + 2*len(peers) - 1) / (2 * len(peers))
		}
	})
	r.done = 1
	switch {
	case r.lifted:
	case count > 2*r.limits.Matches: // pieces may be alike
		return matches
	case prefixCount/2 > r.maxEntries():
		return kernelEntries
	}
	return nil
}

// through returns what matches inside c, where others do around it.
func through(c *cidr) (out []*peer) {
	if c.within != nil {
		out = slices.Clone(c.within.peers)
	}
	out = append(out, c.begin...)
	sortPeers(out)
	sortPeers(c.end)
	end := c.end
	return slices.Compact(slices.DeleteFunc(out, func(p *peer) bool {
		for len(end) > 0 && end[0].sequence < p.sequence {
			end = end[1:]
		}
		return len(end) > 0 && end[0] == p
	}))
}

// appendPiece adds a piece of c, to the last one where nothing distinguishes them.
func (r *Resolver) appendPiece(c *cidr, of model.Range) {
	if len(c.peers) == 0 {
		return
	}
	p := &piece{Range: of, name: c.String(), signature: r.signatureOf(c.peers)}
	p.known = p.signature
	if i := slices.IndexFunc(c.peers, func(p *peer) bool { return p.kind == unknownPods }); i >= 0 {
		p.known = r.signatureOf(slices.Delete(slices.Clone(c.peers), i, i+1))
	}
	if n := len(r.pieces); n > 0 && r.pieces[n-1].Last.Next() == of.First && r.pieces[n-1].signature == p.signature {
		p = r.pieces[n-1]
		r.prefixes -= p.PrefixCount()
		p.Last = of.Last
	} else {
		r.pieces = append(r.pieces, p)
	}
	r.prefixes += p.PrefixCount()
}

// replacePieces has pieces that were there before stay the same parts. Those of one address are that address's.
func (r *Resolver) replacePieces(was []*piece) {
	before := make(map[model.Range]*piece, len(was))
	for _, p := range was {
		before[p.Range] = p
		if p.single() {
			r.dirty(r.address(p.First))
		}
	}
	for i, p := range r.pieces {
		if p.single() {
			r.dirty(r.address(p.First))
			continue
		}
		if old := before[p.Range]; old != nil && old.signature == p.signature && old.known == p.known &&
			old.name == p.name {
			r.pieces[i] = old
			delete(before, p.Range)
			continue
		}
		r.updatePeer(&p.peer, p.signature, p.Range, p.name)
	}
	for _, p := range before {
		r.updatePeer(&p.peer, nil, p.Range, p.name)
	}
}
