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
	peer      *model.Peer
	shown     *signature // by peer
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

// open is a prefix whose addresses are being cut into pieces, and what matches there.
type open struct {
	*cidr
	last  netip.Addr
	peers []*peer
}

// updatePieces cuts the CIDRs in use into pieces, and marks the addresses that are in another piece.
func (r *Resolver) updatePieces() {
	r.staleCIDRs, r.staleRanges = false, false
	was := r.pieces
	r.pieces = r.cut(r.cidrs())
	r.replacePieces(was)
	for _, x := range r.addresses {
		if x.within != r.withinAt(x.Addr) {
			r.dirty(x)
		}
	}
}

// within is what the piece that holds an address means to it.
type within struct {
	signature *signature // of the piece
	known     *signature // as if the address were no unknown pod's
	single    bool       // the piece is the address alone
}

func (r *Resolver) withinAt(a netip.Addr) within {
	if p := r.pieceAt(a); p != nil {
		return within{p.signature, p.known, p.single()}
	}
	return within{r.nothing, r.nothing, false}
}

// cut returns the pieces of sorted prefixes.
func (r *Resolver) cut(prefixes []*cidr) (out []*piece) {
	var stack []open
	var from netip.Addr // what is before is cut
	emit := func(o *open, last netip.Addr) {
		if !from.IsValid() || last.Less(from) {
			return
		}
		out = r.appendPiece(out, o, model.Range{First: from, Last: last})
	}
	closeUntil := func(a netip.Addr) {
		for len(stack) > 0 && (!a.IsValid() || stack[len(stack)-1].last.Less(a)) {
			o := &stack[len(stack)-1]
			emit(o, o.last)
			from = o.last.Next()
			stack = stack[:len(stack)-1]
		}
	}
	for _, c := range prefixes {
		first := c.Addr()
		closeUntil(first)
		o := open{cidr: c, last: lastOf(c.Prefix)}
		if len(stack) > 0 {
			top := &stack[len(stack)-1]
			if from.Less(first) {
				emit(top, first.Prev())
			}
			o.peers = top.peers
		}
		o.peers = through(o.peers, c)
		stack, from = append(stack, o), first
	}
	closeUntil(netip.Addr{})
	return out
}

// through returns what matches inside c, where peers do around it.
func through(peers []*peer, c *cidr) []*peer {
	out := append(slices.Clone(peers), c.begin...)
	out = slices.DeleteFunc(out, func(p *peer) bool { return slices.Contains(c.end, p) })
	sortPeers(out)
	return slices.Compact(out)
}

func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// appendPiece adds a piece of o, to the last one where nothing tells them apart.
func (r *Resolver) appendPiece(out []*piece, o *open, of model.Range) []*piece {
	if len(o.peers) == 0 {
		return out
	}
	p := &piece{Range: of, name: o.String(), signature: r.signatureOf(o.peers)}
	p.known = p.signature
	if i := slices.IndexFunc(o.peers, func(p *peer) bool { return p.kind == unknownPods }); i >= 0 {
		p.known = r.signatureOf(slices.Delete(slices.Clone(o.peers), i, i+1))
	}
	if n := len(out); n > 0 && out[n-1].Last.Next() == of.First && out[n-1].signature == p.signature {
		out[n-1].Last = of.Last
		return out
	}
	return append(out, p)
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
		r.updatePeer(&p.peer, &p.shown, p.signature, p.Range, p.name)
	}
	for _, p := range before {
		r.updatePeer(&p.peer, &p.shown, nil, p.Range, p.name)
	}
}
