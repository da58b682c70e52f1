package nftables

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Table is the name of the one table that is ours.
const Table = "fairlead"

// layout is the value of the table's fact. Maps of another layout can't be mended: the table is made anew.
const layout = "layout 2"

// Kind is a kind of fact.
type Kind uint8

// The kinds.
const (
	KindTable   Kind = iota
	KindSet          // value: the set's schema
	KindChain        // value: a digest of its rules
	KindElement      // value: what a map's element leads to
	KindSysctl       // value: the sysctl's
)

// Key names a fact: a table, set, chain or sysctl by its name, an element by its set's name and its key's bytes.
type Key struct {
	Kind    Kind
	Name    string
	Element string
}

// Fact is a fact of this plane. Its value is bytes for elements of maps to plain values, else text.
type Fact = dataplane.Fact[Key, string]

// String gives "chain refuse" or "service4 0a…: for elements in hexadecimal.
func (k Key) String() string {
	switch k.Kind {
	case KindTable:
		return "table " + k.Name
	case KindSet:
		return "set " + k.Name
	case KindChain:
		return "chain " + k.Name
	case KindSysctl:
		return "sysctl " + k.Name
	}
	return fmt.Sprintf("%s %x", k.Name, k.Element)
}

// Rank implements dataplane.Key: what is referred to comes first, the entry that lets packets in last.
func (k Key) Rank() int {
	switch k.Kind {
	case KindTable:
		return 0
	case KindSet:
		return 1
	case KindChain:
		return chainRank(k.Name)
	case KindSysctl:
		return 9
	}
	switch set := k.Name[:len(k.Name)-1]; set {
	case "entry", "admitted", "side", "hide":
		return 4 // their chains are there
	case "service":
		// the stage that lets packets in comes last
		return [...]int{stageEntry: 8, stageAdmitted: 7, stageInside: 6, stageOutside: 6,
			stageUnmatched: 9}[binary.NativeEndian.Uint32([]byte(k.Element))%stages]
	case "unallocated":
		return 9 // until all frontends are there, others may serve them
	}
	return 5
}

// chainRank puts chains after those that their rules name.
func chainRank(name string) int {
	switch name {
	case "prerouting", "output", "postrouting", "localhost":
		return 4
	case "enter4", "enter6", "leave4", "leave6":
		return 3
	}
	return 2
}

// Stages at which a packet looks its frontend up.
const (
	stageEntry uint32 = iota
	stageAdmitted
	stageInside
	stageOutside
	stageUnmatched // what no frontend matches, at a ClusterIP: without port and protocol
	stages
)

// proto is an IP family as nf_tables and packet headers know it.
type proto struct {
	name       string
	number     uint8  // NFPROTO_*
	words      int    // registers that an address takes
	src, dst   uint32 // offsets in the header
	typ        nft.Type
	ctDst      nft.CtKey
	anyAddress netip.Addr

	endpoint, drawn, member, hairpin string // names of the largest sets, made once
}

var protos = []*proto{
	{"4", unix.NFPROTO_IPV4, 1, 12, 16, nft.IPv4, nft.CtDstIP, netip.IPv4Unspecified(), "endpoint4", "drawn4", "member4", "hairpin4"},
	{"6", unix.NFPROTO_IPV6, 4, 8, 24, nft.IPv6, nft.CtDstIP6, netip.IPv6Unspecified(), "endpoint6", "drawn6", "member6", "hairpin6"},
}

// protoOf gives an address's family.
func protoOf(a netip.Addr) *proto {
	if a.Is4() {
		return protos[0]
	}
	return protos[1]
}

// affinitySize is how many clients of all pools of a family are remembered, each once for each of its pools.
const affinitySize = 1 << 17

// sets gives the family's sets. A mark is any 32-bit number, two a number of 64 bits, the first of a key where it says
// so always 0: see clear.
func (p *proto) sets() []nft.Set {
	marks := func(n int) []nft.Type { return slices.Repeat([]nft.Type{nft.Mark}, n) }
	place := []nft.Type{nft.Mark, p.typ, nft.Proto, nft.Port}
	backend := []nft.Type{p.typ, nft.Port}
	verdicts := []nft.Type{nft.Verdicts}
	return []nft.Set{
		{Name: "service" + p.name, Key: place, Data: marks(3)},
		{Name: "pool" + p.name, Key: place, Data: marks(2)},
		{Name: "source" + p.name, Key: place, Data: marks(1)},
		{Name: p.endpoint, Key: marks(4), Data: backend},
		{Name: p.drawn, Key: marks(4), Data: marks(1)},
		{Name: p.member, Key: marks(4), Data: backend},
		{Name: "affinity" + p.name, Key: []nft.Type{p.typ, nft.Mark, nft.Mark}, Data: []nft.Type{nft.Integer}, Dynamic: true, Size: affinitySize},
		{Name: p.hairpin, Key: []nft.Type{p.typ, p.typ}},
		{Name: "unallocated" + p.name, Key: []nft.Type{nft.Mark, p.typ}, Interval: true},
		{Name: "permitted" + p.name, Key: []nft.Type{p.typ, nft.Proto, nft.Port, p.typ}, Interval: true},
		{Name: "entry" + p.name, Key: marks(4), Data: verdicts},
		{Name: "admitted" + p.name, Key: marks(4), Data: verdicts},
		{Name: "side" + p.name, Key: marks(4), Data: verdicts},
		{Name: "hide" + p.name, Key: marks(2), Data: verdicts},
	}
}

// allSets gives every set of the table by name.
var allSets = func() map[string]nft.Set {
	m := map[string]nft.Set{}
	for _, p := range protos {
		for _, s := range p.sets() {
			m[s.Name] = s
		}
	}
	return m
}()

// written says whether elements of a set are facts; those of affinity are the packets'.
func written(s nft.Set) bool { return !s.Dynamic }

// entryKey puts address · protocol · port as registers hold them.
func entryKey(b []byte, e model.Entry) []byte {
	b = append(b, e.Addr.AsSlice()...)
	b = append(b, byte(e.Protocol), 0, 0, 0)
	return nft.PortWord(b, e.Port)
}

// element makes the fact of an element.
func element(set string, key []byte, value string) Fact {
	return Fact{Key: Key{KindElement, set, string(key)}, Value: value}
}

// Render implements dataplane.Plane.
func (p *Plane) Render(part model.Part) []Fact {
	switch v := part.(type) {
	case *model.Node:
		return p.node(v)
	case *model.Pool:
		return pool(v)
	case *model.Frontend:
		return p.frontend(v)
	case *model.ClusterIP:
		return p.clusterIP(v)
	}
	panic(fmt.Sprintf("nftables: no facts for a %T", part))
}

// poolToken stands for a pool in registers.
func poolToken(v *model.Pool) []byte { return binary.BigEndian.AppendUint64(nil, v.ID) }

// ofPool makes a key of endpoint, drawn or member: 0 · number · pool.
func ofPool(number uint32, pool []byte) []byte {
	return append(nft.Word(nft.Word(nil, 0), number), pool...)
}

// pool gives what holds for a pool whoever uses it.
func pool(v *model.Pool) []Fact {
	if len(v.Backends) == 0 {
		return nil
	}
	f := protoOf(v.Backends[0].Addr.Addr())
	id := poolToken(v)
	facts := make([]Fact, 0, len(v.Backends))
	tokens := map[uint32]bool{}
	held := make([]string, len(v.Backends)) // what a slot holds for a backend
	set := f.endpoint
	for i, e := range v.Backends {
		addr := e.Addr.Addr().AsSlice()
		backend := nft.PortWord(addr[:len(addr):len(addr)], e.Addr.Port())
		held[i] = string(backend)
		if v.Affinity > 0 {
			t := backendToken(backend, tokens)
			facts = append(facts, element(f.member, ofPool(t, id), held[i]))
			set, held[i] = f.drawn, string(nft.Word(nil, t))
		}
		if e.Local {
			facts = append(facts, element(f.hairpin, append(addr[:len(addr):len(addr)], addr...), ""))
		}
	}
	for slot, i := range slots(v) {
		facts = append(facts, element(set, ofPool(uint32(slot), id), held[i]))
	}
	return facts
}

// backendToken stands for a backend among those of its pool, whatever its place: a hash, or the next number that none
// has taken.
func backendToken(backend []byte, taken map[uint32]bool) uint32 {
	h := fnv.New32a()
	h.Write(backend)
	t := h.Sum32()
	for taken[t] {
		t++
	}
	taken[t] = true
	return t
}

// frontend gives a frontend's stages, its permitted sources, and the chains that it leads to.
func (p *Plane) frontend(v *model.Frontend) []Fact {
	f := protoOf(v.Entry.Addr)
	any := v.Entry.AnyAddr()
	at := entryKey(nil, v.Entry)
	key := func(s uint32) []byte { return append(nft.Word(nil, s), at...) }
	facts := []Fact{
		element("source"+f.name, key(stageEntry), string(nft.Word(nil, uint32(v.Hide)))),
		element("pool"+f.name, key(stageEntry), string(poolToken(v.Inside.Pool))),
	}
	stage := func(s uint32, set string, n next) {
		facts = append(facts, element("service"+f.name, key(s), string(n.code())))
		facts = append(facts, p.lead(f, set, n)...)
	}
	first := pick(v.Inside, any, false)
	if v.Inside != v.Outside {
		outside := pick(v.Outside, any, true)
		stage(stageInside, "side", first)
		stage(stageOutside, "side", outside)
		facts = append(facts, element("pool"+f.name, key(stageOutside), string(poolToken(v.Outside.Pool))))
		first = next{does: splits, any: any}
	}
	if v.Sources != nil {
		stage(stageAdmitted, "admitted", first)
		first = next{does: restricts, any: any}
	}
	stage(stageEntry, "entry", first)
	for _, r := range v.Sources {
		facts = append(facts, element("permitted"+f.name, source(at, r), ""))
	}
	return facts
}

// clusterIP returns what rejects packets to an address that match no frontend.
func (p *Plane) clusterIP(v *model.ClusterIP) []Fact {
	f, n := protoOf(v.Addr), next{does: refuses}
	key := entryKey(nft.Word(nil, stageUnmatched), model.Entry{Addr: v.Addr})
	return append(p.lead(f, "entry", n), element("service"+f.name, key, string(n.code())))
}

// unallocated returns the elements of a range of addresses to which packets are dropped.
func unallocated(r model.Range) Fact {
	first, last := append(nft.Word(nil, 0), r.First.AsSlice()...), append(nft.Word(nil, 0), r.Last.AsSlice()...)
	return element("unallocated"+protoOf(r.First).name, append(first, last...), "")
}

// source gives the range of keys of a frontend's permitted prefix: first key, last key.
func source(at []byte, r netip.Prefix) []byte {
	first := r.Masked().Addr().AsSlice()
	last := append([]byte{}, first...)
	for i := r.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	b := append(append([]byte{}, at...), first...)
	return append(append(b, at...), last...)
}

// lead gives the chain that does n and the element that leads to it from a set.
func (p *Plane) lead(f *proto, set string, n next) []Fact {
	key := append(nft.Word(nil, 0), n.code()...)
	if n.does == drops {
		return []Fact{element(set+f.name, key, nft.DropIt.String())}
	}
	lead := element(set+f.name, key, nft.Goto(n.chain(f)).String())
	if n.does != picks {
		return []Fact{lead} // the node has the chain
	}
	return []Fact{lead, p.picks(f, n)}
}

// picks gives the chain that draws a backend. Frontends by the thousand share it: it is made once.
func (p *Plane) picks(f *proto, n next) Fact {
	type shape struct {
		*proto
		next
	}
	if made, ok := p.drawers.Load(shape{f, n}); ok {
		return made.(Fact)
	}
	made := p.chain(n.chain(f), n.rules(f))
	p.drawers.Store(shape{f, n}, made)
	return made
}
