package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	table "fairlead.dev/fairlead/dataplane/nft"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Table is the name of the nf_tables table that is ours.
const Table = "fairlead-ipvs"

// layout is the value of the table's fact. Maps of another layout can't be mended: the table is made anew.
const layout = "layout 1"

// declared is the table.
var declared = &table.Table[Key]{
	Name: Table, Layout: layout, Sets: allSets, Hooks: hooks,
	Private: func(name string) bool { return name == numbers.Name || strings.HasPrefix(name, was) },
	Of:      func(k table.Key) Key { return Key{k} },
}

// The kinds of facts.
const (
	KindTable       = table.KindTable
	KindSet         = table.KindSet
	KindChain       = table.KindChain
	KindElement     = table.KindElement
	KindSysctl      = table.Other     // value: the sysctl's
	KindTimeout     = table.Other + 1 // value: how long IPVS remembers a silent connection
	KindDelivery    = table.Other + 2 // value: how packets that a frontend takes are led to this host
	KindService     = table.Other + 3 // a pool. Value: its scheduler
	KindDestination = table.Other + 4 // a backend of a pool. Value: its weight
)

// Key names a fact: one of the table, a sysctl by its name, the others by family and the bytes of what they are about.
// In these bytes, and those of elements, a pool is called by its ID.
type Key struct{ table.Key }

func key(kind table.Kind, name, element string) Key {
	return Key{table.Key{Kind: kind, Name: name, Element: element}}
}

// Fact is a fact of this plane.
type Fact = table.Fact[Key]

func fact(kind table.Kind, name, element, value string) Fact {
	return Fact{Key: key(kind, name, element), Value: value}
}

// String returns "chain refuse", "IPv4 destination 10.0.0.1:80 of pool 0x2a", or "service4 0a…" for elements, in
// hexadecimal.
func (k Key) String() string {
	switch k.Kind {
	case KindSysctl, KindTimeout:
		return k.Group() + " " + k.Name
	case KindDelivery:
		return "delivery of IPv" + k.Name
	case KindService:
		return fmt.Sprintf("IPv%s service of pool %#x", k.Name, k.pool())
	case KindDestination:
		return fmt.Sprintf("IPv%s destination %s of pool %#x", k.Name, k.backend(), k.pool())
	}
	return k.Key.String()
}

// Group implements dataplane.Grouped.
func (k Key) Group() string {
	if k.Kind < table.Other {
		return k.Key.Group()
	}
	return [...]string{"sysctl", "setting", "delivery", "service", "destination"}[k.Kind-table.Other]
}

// pool returns the pool that the key of a service or destination names.
func (k Key) pool() uint64 { return binary.BigEndian.Uint64([]byte(k.Element)) }

// backend returns the backend that the key of a destination names.
func (k Key) backend() netip.AddrPort {
	b := []byte(k.Element[8:])
	n := len(b) - 2
	a, _ := netip.AddrFromSlice(b[:n])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[n:]))
}

// Rank implements dataplane.Key: what is referred to comes first, a service before its destinations, the frontends that
// let packets in last.
func (k Key) Rank() int {
	switch k.Kind {
	case KindElement:
		return k.elementRank()
	case KindChain:
		return chainRank(k.Name)
	}
	return [...]int{KindTable: 0, KindSysctl: 1, KindTimeout: 1, KindSet: 2, KindDelivery: 7, KindService: 5,
		KindDestination: 6}[k.Kind]
}

func (k Key) elementRank() int {
	switch set := k.Name[:len(k.Name)-1]; set {
	case "entry", "admitted", "side", "hide", "keep":
		return 4 // their chains are there
	case "service":
		// the stage that lets packets in comes last
		return [...]int{stageEntry: 10, stageAdmitted: 9, stageInternal: 8, stageExternal: 8,
			stageUnmatched: 11}[binary.NativeEndian.Uint32([]byte(k.Element))%stages]
	case "unallocated":
		return 11 // until all frontends are there, others may serve them
	}
	return 6
}

// chainRank puts chains after those that their rules name.
func chainRank(name string) int {
	if hooks[name] != nil {
		return 5
	}
	return 3
}

// Stages at which a packet looks its frontend up.
const (
	stageEntry uint32 = iota
	stageAdmitted
	stageInternal
	stageExternal
	stageUnmatched // what no frontend matches, at a ClusterIP: without port and protocol
	stages
)

// acts names the map that leads from what is done at a stage to the chain that does it. A chain of one stage goes on to
// the next: the kernel wants to see that no chain leads to itself.
var acts = [...]string{stageEntry: "entry", stageAdmitted: "admitted", stageInternal: "side", stageExternal: "side",
	stageUnmatched: "entry"}

// proto is an IP family.
type proto struct{ *table.Family }

var protos = []*proto{{table.IPv4}, {table.IPv6}}

// protoOf returns an address's family.
func protoOf(a netip.Addr) *proto { return table.OfFamily(protos, a) }

// protoNamed returns the family of a fact's name, 4 or 6.
func protoNamed(name string) *proto {
	if name == protos[0].Name {
		return protos[0]
	}
	return protos[1]
}

// affinitySize is how many clients of all pools of a family are remembered, each once for each of its pools.
const affinitySize = 1 << 17

// sets returns the family's sets. A mark is any 32-bit number, the first of a key where it says so always 0: see clear.
func (p *proto) sets() []nft.Set {
	marks := func(n int) []nft.Type { return slices.Repeat([]nft.Type{nft.Mark}, n) }
	verdicts := []nft.Type{nft.Verdicts}
	return []nft.Set{
		{Name: "service" + p.Name, Key: []nft.Type{nft.Mark, p.Type, nft.Proto, nft.Port}, Data: marks(3)},
		{Name: "unallocated" + p.Name, Key: []nft.Type{nft.Mark, p.Type}, Interval: true},
		{Name: "permitted" + p.Name, Key: []nft.Type{p.Type, nft.Proto, nft.Port, p.Type}, Interval: true},
		{Name: "hairpin" + p.Name, Key: []nft.Type{p.Type, p.Type}},
		{Name: "member" + p.Name, Key: []nft.Type{nft.Mark, nft.Mark, p.Type, nft.Port}},
		{Name: "sticky" + p.Name, Key: marks(1), Data: marks(1)},
		{Name: "affinity" + p.Name, Key: []nft.Type{p.Type, nft.Mark}, Data: []nft.Type{p.Type, nft.Port}, Dynamic: true,
			Size: affinitySize},
		{Name: "entry" + p.Name, Key: marks(2), Data: verdicts},
		{Name: "admitted" + p.Name, Key: marks(2), Data: verdicts},
		{Name: "side" + p.Name, Key: marks(2), Data: verdicts},
		{Name: "hide" + p.Name, Key: marks(2), Data: verdicts},
		{Name: "keep" + p.Name, Key: marks(2), Data: verdicts},
	}
}

// numbers is the set that says by which mark a pool goes. It is for us alone, to find pools again.
var numbers = nft.Set{Name: "pool", Key: []nft.Type{nft.Integer}, Data: []nft.Type{nft.Mark}}

// allSets returns every set of the table by name.
var allSets = table.ByName(slices.Concat(protos[0].sets(), protos[1].sets(), []nft.Set{numbers}))

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
		return frontend(v)
	case *model.ClusterIP:
		return clusterIP(v)
	}
	panic(fmt.Sprintf("ipvs: no facts for a %T", part))
}

// ofPool begins a key that names a pool.
func ofPool(id uint64) []byte { return binary.BigEndian.AppendUint64(nil, id) }

// destinationKey names a backend of a pool.
func destinationKey(id uint64, at netip.AddrPort) []byte {
	return binary.BigEndian.AppendUint16(append(ofPool(id), at.Addr().AsSlice()...), at.Port())
}

// pool returns a virtual service with its destinations, and what else holds for a pool whoever uses it. Endpoints
// that get no new flow are destinations of weight 0.
func pool(v *model.Pool) []Fact {
	all := slices.Concat(v.Backends, v.Unselected)
	if len(all) == 0 {
		return nil
	}
	f := protoOf(all[0].Addr.Addr())
	id := ofPool(v.ID)
	facts := make([]Fact, 0, 1+len(all))
	s := schedulerOf(v)
	facts = append(facts, Fact{Key: key(KindService, f.Name, string(id)), Value: s.String(), Body: s})
	if v.Affinity > 0 {
		facts = append(facts, sticks(f, id, seconds(v))...)
	}
	for _, b := range v.Backends {
		addr := b.Addr.Addr().AsSlice()
		facts = append(facts, fact(KindDestination, f.Name, string(destinationKey(v.ID, b.Addr)), strconv.Itoa(b.Share())))
		if v.Affinity > 0 {
			facts = append(facts, element("member"+f.Name, nft.PortWord(append(id[:8:8], addr...), b.Addr.Port()), ""))
		}
		if b.Local {
			facts = append(facts, element("hairpin"+f.Name, append(addr[:len(addr):len(addr)], addr...), ""))
		}
	}
	for _, b := range v.Unselected {
		facts = append(facts, fact(KindDestination, f.Name, string(destinationKey(v.ID, b.Addr)), "0"))
	}
	return facts
}

// seconds returns how long a pool remembers clients, at least a second.
func seconds(v *model.Pool) uint32 { return max(1, uint32(v.Affinity.Seconds())) }

// sticks returns what remembers the clients of a pool.
func sticks(f *proto, id []byte, seconds uint32) []Fact {
	return []Fact{
		element("sticky"+f.Name, id, string(nft.Word(nil, seconds))),
		element("keep"+f.Name, nft.Word(nft.Word(nil, 0), seconds), nft.Jump(affinityChain(f, seconds)).String()),
		declared.Chain(affinityChain(f, seconds), f.rememberBackend(seconds)),
	}
}

// frontend returns a frontend's stages, its permitted sources, and the chains that it leads to.
func frontend(v *model.Frontend) []Fact {
	f := protoOf(v.Entry.Addr)
	any := v.Entry.AnyAddr()
	at := table.EntryKey(nil, v.Entry)
	var facts []Fact
	stage := func(s uint32, d deed, t model.Target) {
		value := append(ofPool(served(t)), d.code()...)
		facts = append(facts, element("service"+f.Name, append(nft.Word(nil, s), at...),
			string(nft.Word(value, uint32(v.Masquerade)))))
		facts = append(facts, lead(f, acts[s]+f.Name, d)...)
	}
	first := serve(v.Internal, any, stageEntry)
	if v.Internal != v.External {
		first = deed{does: splits, any: any}
		stage(stageInternal, serve(v.Internal, any, stageInternal), v.Internal)
		stage(stageExternal, serve(v.External, any, stageExternal), v.External)
	}
	if v.Sources != nil {
		stage(stageAdmitted, first, v.Internal)
		first = deed{does: restricts, any: any}
	}
	stage(stageEntry, first, v.Internal)
	for _, r := range v.Sources {
		facts = append(facts, element("permitted"+f.Name, table.SourceRange(at, r), ""))
	}
	return facts
}

// clusterIP returns what rejects packets to an address that match no frontend.
func clusterIP(v *model.ClusterIP) []Fact {
	f, d := protoOf(v.Addr), deed{does: rejects}
	key := table.EntryKey(nft.Word(nil, stageUnmatched), model.Entry{Addr: v.Addr})
	value := nft.Word(append(ofPool(0), d.code()...), 0)
	return append(lead(f, acts[stageUnmatched]+f.Name, d), element("service"+f.Name, key, string(value)))
}

// unallocated returns the element of a range of addresses to which packets are dropped.
func unallocated(r model.Range) Fact {
	first, last := append(nft.Word(nil, 0), r.First.AsSlice()...), append(nft.Word(nil, 0), r.Last.AsSlice()...)
	return element("unallocated"+protoOf(r.First).Name, append(first, last...), "")
}

// served returns the pool whose virtual service is to have a target's packets, 0 for none.
func served(t model.Target) uint64 {
	if len(t.Pool.Backends)+len(t.Pool.Unselected) == 0 {
		return 0
	}
	return t.Pool.ID
}

// lead returns the element of a map that leads to the chain that does d, and the chain where the node hasn't it.
func lead(f *proto, set string, d deed) []Fact {
	key := append(nft.Word(nil, 0), d.code()...)
	switch d.does {
	case drops:
		return []Fact{element(set, key, nft.DropIt.String())}
	case knows:
		return []Fact{element(set, key, nft.Goto(d.chain(f)).String()), declared.Chain(d.chain(f), f.known(d))}
	}
	return []Fact{element(set, key, nft.Goto(d.chain(f)).String())}
}
