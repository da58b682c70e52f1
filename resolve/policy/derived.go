package policy

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/model"
)

// derived is what the objects come to on this node. It can be made anew from them.
type derived struct {
	rulesetSets
	peerTables
	identities
	node *model.PolicyNode
	ids  ids
}

// rulesetSets are the rulesets of the classes with pods on this node.
type rulesetSets struct {
	rulesets     map[digest]*ruleset
	portPieces   int // prefixes of their port entries
	idleRulesets []*ruleset
}

// peerTables are those of the rulesets, and the peers that they name.
type peerTables struct {
	tables                map[digest]*table
	newTables, idleTables []*table
	groups                map[digest]*group
	peers                 map[string]*peer // in use, by text
	changedPeers          []*peer          // that came into use or went out of it
	peerSequence          uint32
	index                 peerIndex
	domainPeers           map[string][]*peer // of kind domains, by their names
	verdicts              int                // peer verdicts of all tables
	evaluations           int                // rules of all tables, each times the identities that its peers match
	stamp                 uint64             // of the last evaluation
}

// identities are the signatures of classes, nodes and CIDRs.
type identities struct {
	signatures          map[string]*signature
	matches             int        // peers of all signatures
	nothing             *signature // of what no peer in use matches
	unions              map[[2]*signature]*signature
	newIdentities, idle []*signature
	signatureLimit      int // how many signatures there may be before those without use are forgotten
	matchLimit          int // likewise matches
	pieces              []*piece
	prefixes            int              // of those
	blockPods           map[port][]*peer // peers in use of that kind
}

func newDerived() derived {
	nothing := &signature{}
	return derived{
		rulesetSets: rulesetSets{rulesets: map[digest]*ruleset{}},
		peerTables: peerTables{tables: map[digest]*table{}, groups: map[digest]*group{}, peers: map[string]*peer{},
			index: peerIndex{}, domainPeers: map[string][]*peer{}},
		identities: identities{signatures: map[string]*signature{"": nothing}, nothing: nothing, signatureLimit: 1024,
			matchLimit: 1 << 14, unions: map[[2]*signature]*signature{}, blockPods: map[port][]*peer{}},
		ids: newIDs(),
	}
}

// peer is a peerSpec that a peer table of this node names.
type peer struct {
	*peerSpec
	model    *model.Peers
	sequence uint32
	groups   []*group // that it is one of
	indexed  bool
	charge
	weight     int                     // how often it matches, or is compared, while shares are computed,
	span       int                     // how often peers match in the pieces of CIDRs that it cuts,
	pieces     int                     // and what it has of these pieces' prefixes
	identities map[*signature]struct{} // shown ones that it is part of
}

// signature is a set of peers in use. Where parts say it, it is an identity.
type signature struct {
	peers    []*peer // by sequence
	key      string
	users    int // parts
	identity *model.Identity

	stamp         uint64 // of the evaluation that the others are of
	all, enforced int    // the first rules that match: of all, and of those enforced
}

// signatureOf returns the signature of peers, which must be sorted by sequence, each once. It may retain the slice.
func (r *Resolver) signatureOf(peers []*peer) *signature {
	b := make([]byte, 0, 4*len(peers))
	for _, p := range peers {
		b = binary.BigEndian.AppendUint32(b, p.sequence)
	}
	if s := r.signatures[string(b)]; s != nil {
		return s
	}
	s := &signature{peers: slices.Clone(peers), key: string(b)}
	r.signatures[s.key] = s
	r.matches += len(peers) + identityWeight
	return s
}

// union returns the signature of what either matches.
func (r *Resolver) union(a, b *signature) *signature {
	switch {
	case a == r.nothing || a == b:
		return b
	case b == r.nothing:
		return a
	}
	pair := [2]*signature{a, b}
	if s := r.unions[pair]; s != nil {
		return s
	}
	all := append(slices.Clone(a.peers), b.peers...)
	sortPeers(all)
	s := r.signatureOf(slices.Compact(all))
	r.unions[pair] = s
	return s
}

func sortPeers(l []*peer) {
	slices.SortFunc(l, func(a, b *peer) int { return cmp.Compare(a.sequence, b.sequence) })
}

// identityWeight is how many matches a signature itself counts for.
const identityWeight = 8

// show counts one part more that says s, and returns its identity.
func (r *Resolver) show(s *signature) *model.Identity {
	if s.users++; s.identity != nil {
		return s.identity
	}
	m := &model.Identity{ID: r.id("identity", identityDigest(s))}
	for _, p := range s.byText() {
		m.Match = append(m.Match, p.model)
	}
	s.identity = m
	r.newIdentities = append(r.newIdentities, s)
	for _, p := range s.peers {
		p.identities[s] = struct{}{}
		for _, g := range p.groups {
			g.matches++
			r.evaluations += g.users
		}
	}
	return m
}

// byText returns s's peers, sorted by text.
func (s *signature) byText() []*peer {
	return slices.SortedFunc(slices.Values(s.peers), func(a, b *peer) int { return strings.Compare(a.text, b.text) })
}

// identityDigest computes what an identity is.
func identityDigest(s *signature) (out digest) {
	h := sha256.New()
	for _, p := range s.byText() {
		h.Write(p.digest[:])
	}
	h.Sum(out[:0])
	return out
}

// withdraw counts one part less that says s.
func (r *Resolver) withdraw(s *signature) {
	if s.users--; s.users == 0 {
		r.idle = append(r.idle, s)
	}
}

// bucket is a part of the index: a class can only match a peer of which it has the bucket.
type bucket struct {
	scope   byte
	a, k, v string
}

// The scopes of buckets.
const (
	inNamespace byte = iota // a namespace, a label of the pod or none
	ofPod                   // a label of the pod
	ofNamespace             // a label of the namespace
	anywhere
	ofNodes
)

// peerIndex finds the peers in use that may match a class.
type peerIndex map[bucket][]*peer

// buckets calls visit for the buckets of a peer.
func (s *peerSpec) buckets(visit func(bucket)) {
	if s.kind == nodes {
		visit(bucket{scope: ofNodes})
		return
	}
	each := func(scope byte, key string, values []string) {
		for _, v := range values {
			visit(bucket{scope, s.namespace, key, v})
		}
	}
	key, values := s.labels.pairs()
	nsKey, nsValues := s.namespaces.pairs()
	switch {
	case s.namespace != "" && values == nil:
		visit(bucket{scope: inNamespace, a: s.namespace})
	case s.namespace != "":
		each(inNamespace, key, values)
	case values != nil:
		each(ofPod, key, values)
	case nsValues != nil:
		each(ofNamespace, nsKey, nsValues)
	default:
		visit(bucket{scope: anywhere})
	}
}

// setIndexed adds p to the peers of a key, or takes it out.
func setIndexed[K comparable](index map[K][]*peer, key K, p *peer) {
	l := index[key]
	if p.indexed {
		index[key] = append(l, p)
		return
	}
	i, last := slices.Index(l, p), len(l)-1
	l[i], l[last] = l[last], nil
	if index[key] = l[:last]; last == 0 {
		delete(index, key)
	}
}

// of returns the peers that match c, by sequence, and how many were compared with it.
func (x peerIndex) of(c *class, out []*peer) (_ []*peer, compared int) {
	x.each(c, func(l []*peer) {
		compared += len(l)
		for _, p := range l {
			if p.matches(c) {
				out = append(out, p)
			}
		}
	})
	sortPeers(out)
	return out, compared
}

// each calls visit for the peers of each bucket that may match c.
func (x peerIndex) each(c *class, visit func([]*peer)) {
	match := func(b bucket) {
		if l := x[b]; len(l) > 0 {
			visit(l)
		}
	}
	if c.namespace == nil {
		match(bucket{scope: ofNodes})
	} else {
		match(bucket{scope: anywhere})
		match(bucket{scope: inNamespace, a: c.namespace.name})
		for k, v := range c.labels.all() {
			match(bucket{inNamespace, c.namespace.name, k, v})
			match(bucket{ofPod, "", k, v})
		}
		for k, v := range c.namespace.labels.all() {
			match(bucket{ofNamespace, "", k, v})
		}
	}
}

// ids are the IDs of what is, by its digest: the first 64 bits of it. Where two have one ID, the one with the greater
// digest has another.
type ids struct {
	holders  map[idKey]digest
	own      map[holder]uint64
	reserved map[idKey]digest // while everything is made anew: the IDs that those who had one will have
	clash    bool             // a holder has to have another ID
}

type idKey struct {
	what string
	id   uint64
}

type holder struct {
	what string
	of   digest
}

func newIDs() ids {
	return ids{holders: map[idKey]digest{}, own: map[holder]uint64{}}
}

// id returns the ID of what has that digest.
func (r *Resolver) id(what string, d digest) uint64 {
	h := holder{what, d}
	x := &r.ids
	if id, there := x.own[h]; there {
		return id
	}
	for n := 0; ; n++ {
		key := r.candidate(h, n)
		other, held := x.holders[key]
		if !held {
			other, held = x.reserved[key]
		}
		if held && other != d {
			x.clash = x.clash || bytes.Compare(d[:], other[:]) < 0
			continue
		}
		x.holders[key], x.own[h] = d, key.id
		return key.id
	}
}

// candidate returns the ID that h has if the n before it are others'.
func (r *Resolver) candidate(h holder, n int) idKey {
	text := h.what + " " + string(h.of[:])
	if n > 0 {
		text += strconv.Itoa(n)
	}
	return idKey{h.what, r.hash(text)}
}

// reservations returns the IDs of all that have one, as if they had come in the order of their digests.
func (r *Resolver) reservations() map[idKey]digest {
	out := map[idKey]digest{}
	for _, h := range slices.SortedFunc(maps.Keys(r.ids.own), func(a, b holder) int {
		return cmp.Or(strings.Compare(a.what, b.what), bytes.Compare(a.of[:], b.of[:]))
	}) {
		for n := 0; ; n++ {
			if key := r.candidate(h, n); out[key] == (digest{}) {
				out[key] = h.of
				break
			}
		}
	}
	return out
}

// release has what has that digest give its ID back.
func (r *Resolver) release(what string, d digest) {
	h := holder{what, d}
	if id, there := r.ids.own[h]; there {
		delete(r.ids.holders, idKey{what, id})
		delete(r.ids.own, h)
	}
}

// hashText returns the first 8 bytes of the text's SHA-256, big endian, with a key.
func hashText(key string) func(string) uint64 {
	return func(text string) uint64 {
		sum := sha256.Sum256([]byte(key + " " + text))
		return binary.BigEndian.Uint64(sum[:8])
	}
}
