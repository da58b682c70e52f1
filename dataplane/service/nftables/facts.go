package nftables

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"sync"

	table "fairlead.dev/fairlead/dataplane/nft"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Table is the name of the one table that is ours.
const Table = "fairlead"

// layout is the value of the table's fact. Maps of another layout can't be mended: the table is made anew.
const layout = "layout 2"

// declared is the table.
var declared = &table.Table[Key]{
	Name: Table, Layout: layout, Sets: allSets, Hooks: hooks,
	Private: func(name string) bool { return name == setHere },
	Of:      func(k table.Key) Key { return Key{k} },
}

// The kinds of facts.
const (
	KindTable   = table.KindTable
	KindSet     = table.KindSet
	KindChain   = table.KindChain
	KindElement = table.KindElement
	KindSysctl  = table.Other // value: the sysctl's
)

// Key names a fact: one of the table, or a sysctl by its name.
type Key struct{ table.Key }

// Fact is a fact of this plane.
type Fact = table.Fact[Key]

// Foundation implements dataplane.Foundation: with a table of another layout goes all that it holds.
func (k Key) Foundation() bool { return k.Kind == KindTable }

// sysctlFact returns the fact of a sysctl.
func sysctlFact(name, value string) Fact {
	return Fact{Key: Key{table.Key{Kind: KindSysctl, Name: name}}, Value: value}
}

// String returns "chain refuse", or "service4 0a…" for elements, in hexadecimal.
func (k Key) String() string {
	if k.Kind == KindSysctl {
		return k.Group() + " " + k.Name
	}
	return k.Key.String()
}

// Group implements dataplane.Grouped.
func (k Key) Group() string {
	if k.Kind == KindSysctl {
		return "sysctl"
	}
	return k.Key.Group()
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
		return [...]int{stageEntry: 8, stageAdmitted: 7, stageInternal: 6, stageExternal: 6, stageRemote: 8,
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
	stageInternal
	stageExternal
	stageRemote    // node ports at other nodes' addresses
	stageUnmatched // what no frontend matches, at a ClusterIP or another node's address: without port and protocol
	stages
)

// proto is an IP family.
type proto struct {
	*table.Family
	endpoint, selected, member, hairpin string // names of the largest sets, made once
}

var protos = []*proto{
	{table.IPv4, "endpoint4", "drawn4", "member4", "hairpin4"},
	{table.IPv6, "endpoint6", "drawn6", "member6", "hairpin6"},
}

// protoOf returns an address's family.
func protoOf(a netip.Addr) *proto { return table.OfFamily(protos, a) }

// affinitySize is how many clients of all pools of a family are remembered, each once for each of its pools.
const affinitySize = 1 << 17

// sets returns the family's sets. A mark is any 32-bit number, two a number of 64 bits, the first of a key where it
// says so always 0: see clear.
func (p *proto) sets() []nft.Set {
	marks := func(n int) []nft.Type { return slices.Repeat([]nft.Type{nft.Mark}, n) }
	matchKey := []nft.Type{nft.Mark, p.Type, nft.Proto, nft.Port}
	backend := []nft.Type{p.Type, nft.Port}
	verdicts := []nft.Type{nft.Verdicts}
	return []nft.Set{
		{Name: "service" + p.Name, Key: matchKey, Data: marks(3)},
		{Name: "pool" + p.Name, Key: matchKey, Data: marks(2)},
		{Name: "source" + p.Name, Key: matchKey, Data: marks(1)},
		{Name: p.endpoint, Key: marks(4), Data: backend},
		{Name: p.selected, Key: marks(4), Data: marks(1)},
		{Name: p.member, Key: marks(4), Data: backend},
		{Name: "affinity" + p.Name, Key: []nft.Type{p.Type, nft.Mark, nft.Mark}, Data: []nft.Type{nft.Integer}, Dynamic: true,
			Size: affinitySize},
		{Name: p.hairpin, Key: []nft.Type{p.Type, p.Type}},
		{Name: "unallocated" + p.Name, Key: []nft.Type{nft.Mark, p.Type}, Interval: true},
		{Name: "permitted" + p.Name, Key: []nft.Type{p.Type, nft.Proto, nft.Port, p.Type}, Interval: true},
		{Name: "entry" + p.Name, Key: marks(4), Data: verdicts},
		{Name: "admitted" + p.Name, Key: marks(4), Data: verdicts},
		{Name: "side" + p.Name, Key: marks(4), Data: verdicts},
		{Name: "hide" + p.Name, Key: marks(2), Data: verdicts},
	}
}

// allSets returns every set of the table by name.
var allSets = table.ByName(slices.Concat(protos[0].sets(), protos[1].sets()))

// element returns the fact of an element.
func element(set string, key []byte, value string) Fact { return declared.Element(set, key, value) }

// Render implements dataplane.Plane.
func (p *Plane) Render(part model.ServicePart) []Fact {
	switch v := part.(type) {
	case *model.ServiceNode:
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

// poolID stands for a pool in registers.
func poolID(v *model.Pool) []byte { return binary.BigEndian.AppendUint64(nil, v.ID) }

// ofPool makes a key of endpoint, drawn or member: 0 · number · pool.
func ofPool(number uint32, pool []byte) []byte {
	return append(nft.Word(nft.Word(nil, 0), number), pool...)
}

// pool returns what holds for a pool whoever uses it.
func pool(v *model.Pool) []Fact {
	if len(v.Backends) == 0 {
		return nil
	}
	f := protoOf(v.Backends[0].Addr.Addr())
	id := poolID(v)
	facts := make([]Fact, 0, len(v.Backends))
	tokens := map[uint32]bool{}
	held := make([]string, len(v.Backends)) // what a slot holds for a backend
	set := f.endpoint
	for i, e := range v.Backends {
		addr := e.Addr.Addr().AsSlice()
		backend := nft.PortWord(addr[:len(addr):len(addr)], e.Addr.Port())
		held[i] = string(backend)
		if v.Affinity > 0 {
			t := backendIndex(backend, tokens)
			facts = append(facts, element(f.member, ofPool(t, id), held[i]))
			set, held[i] = f.selected, string(nft.Word(nil, t))
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

// backendIndex stands for a backend among those of its pool, whatever its place: a hash, or the next number that none
// has taken.
func backendIndex(backend []byte, used map[uint32]bool) uint32 {
	h := fnv.New32a()
	h.Write(backend)
	t := h.Sum32()
	for used[t] {
		t++
	}
	used[t] = true
	return t
}

// frontend returns a frontend's stages, its permitted sources, and the chains that it leads to.
func (p *Plane) frontend(v *model.Frontend) []Fact {
	f := protoOf(v.Entry.Addr)
	any := v.Entry.AnyAddr()
	at := table.EntryKey(nil, v.Entry)
	key := func(s uint32) []byte { return append(nft.Word(nil, s), at...) }
	facts := []Fact{
		element("source"+f.Name, key(stageEntry), string(nft.Word(nil, uint32(v.Masquerade)))),
		element("pool"+f.Name, key(stageEntry), string(poolID(v.Internal.Pool))),
	}
	stage := func(s uint32, set string, n next) {
		facts = append(facts, element("service"+f.Name, key(s), string(n.code())))
		facts = append(facts, p.lead(f, set, n)...)
	}
	first := pick(v.Internal, any, false)
	if v.Internal != v.External {
		external := pick(v.External, any, true)
		stage(stageInternal, "side", first)
		stage(stageExternal, "side", external)
		facts = append(facts, element("pool"+f.Name, key(stageExternal), string(poolID(v.External.Pool))))
		first = next{does: splits, any: any}
	}
	if v.Sources != nil {
		stage(stageAdmitted, "admitted", first)
		first = next{does: restricts, any: any}
	}
	stage(stageEntry, "entry", first)
	if v.Remote {
		stage(stageRemote, "side", first)
	}
	for _, r := range v.Sources {
		facts = append(facts, element("permitted"+f.Name, table.SourceRange(at, r), ""))
	}
	return facts
}

// clusterIP returns what rejects packets to an address that match no frontend.
func (p *Plane) clusterIP(v *model.ClusterIP) []Fact { return p.unmatched(v.Addr, next{does: rejects}) }

// unmatched returns what does n with packets to an address that match no frontend there.
func (p *Plane) unmatched(a netip.Addr, n next) []Fact {
	f := protoOf(a)
	key := table.EntryKey(nft.Word(nil, stageUnmatched), model.Entry{Addr: a})
	return append(p.lead(f, "entry", n), element("service"+f.Name, key, string(n.code())))
}

// unallocated returns the elements of a range of addresses to which packets are dropped.
func unallocated(r model.Range) Fact {
	first, last := append(nft.Word(nil, 0), r.First.AsSlice()...), append(nft.Word(nil, 0), r.Last.AsSlice()...)
	return element("unallocated"+protoOf(r.First).Name, append(first, last...), "")
}

// lead returns the chain that does n and the element that leads to it from a set.
func (p *Plane) lead(f *proto, set string, n next) []Fact {
	key := append(nft.Word(nil, 0), n.code()...)
	if n.does == drops {
		return []Fact{element(set+f.Name, key, nft.DropIt.String())}
	}
	lead := element(set+f.Name, key, nft.Goto(n.chain(f)).String())
	if n.does != picks {
		return []Fact{lead} // the node has the chain
	}
	return []Fact{lead, p.picks(f, n)}
}

// picks returns the chain that draws a backend. Frontends by the thousand share it: it is made once.
func (p *Plane) picks(f *proto, n next) Fact {
	made := p.selectors.of(f, n)
	if n.pool != 0 {
		made.Key.Name = n.chain(f)
	}
	return made
}

// selectors are the chains that draw a backend, by what tells their rules apart: chains that differ in their names
// alone, such as each pool's that has one of its own, are one here.
type selectors struct {
	mu   sync.Mutex
	made map[drawer]Fact
}

type drawer struct {
	*proto
	next
}

// mostDrawers is how many chains are held. There are about as many as sizes of pools in use.
const mostDrawers = 256

// of returns the fact of the chain that does n, but for its name.
func (d *selectors) of(f *proto, n next) Fact {
	n.pool = 0
	d.mu.Lock()
	defer d.mu.Unlock()
	made, ok := d.made[drawer{f, n}]
	if !ok {
		if len(d.made) >= mostDrawers || d.made == nil {
			d.made = map[drawer]Fact{}
		}
		made = declared.Chain(n.chain(f), n.rules(f))
		d.made[drawer{f, n}] = made
	}
	return made
}
