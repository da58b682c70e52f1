package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Table is the name of the nf_tables table that is ours.
const Table = "fairlead-ipvs"

// layout is the value of the table's fact. Maps of another layout can't be mended: the table is made anew.
const layout = "layout 1"

// Kind is a kind of fact.
type Kind uint8

// The kinds.
const (
	KindTable       Kind = iota
	KindSet              // value: the set's schema
	KindChain            // value: a digest of its rules
	KindSysctl           // value: the sysctl's
	KindTimeout          // value: how long IPVS remembers a silent connection
	KindDelivery         // value: how packets that a frontend takes are led to this host
	KindService          // a pool. Value: its scheduler
	KindDestination      // a backend of a pool. Value: its weight
	KindElement          // value: what a map's element leads to
)

// Key names a fact: a table, set, chain or sysctl by its name, the others by family or set and the bytes of what they are
// about. In these bytes a pool is called by its ID.
type Key struct {
	Kind    Kind
	Name    string
	Element string
}

// Fact is a fact of this plane. Its value is bytes for elements of maps to plain values, else text.
type Fact = dataplane.Fact[Key, string]

func fact(k Key, value string) Fact { return Fact{Key: k, Value: value} }

// String gives "chain refuse", "IPv4 destination 10.0.0.1:80 of pool 0x2a", or "service4 0a…" for elements in hexadecimal.
func (k Key) String() string {
	switch k.Kind {
	case KindTable, KindSet, KindChain, KindSysctl, KindTimeout:
		return [...]string{"table ", "set ", "chain ", "sysctl ", "setting "}[k.Kind] + k.Name
	case KindDelivery:
		return "delivery of IPv" + k.Name
	case KindService:
		return fmt.Sprintf("IPv%s service of pool %#x", k.Name, k.pool())
	case KindDestination:
		return fmt.Sprintf("IPv%s destination %s of pool %#x", k.Name, k.backend(), k.pool())
	}
	return fmt.Sprintf("%s %x", k.Name, k.Element)
}

// pool gives the pool that the key of a service or destination names.
func (k Key) pool() uint64 { return binary.BigEndian.Uint64([]byte(k.Element)) }

// backend gives the backend that the key of a destination names.
func (k Key) backend() netip.AddrPort {
	b := []byte(k.Element[8:])
	n := len(b) - 2
	a, _ := netip.AddrFromSlice(b[:n])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[n:]))
}

// Rank implements dataplane.Key: what is referred to comes first, a service before its destinations, the frontends that let
// packets in last.
func (k Key) Rank() int {
	switch k.Kind {
	case KindElement:
		return k.elementRank()
	case KindChain:
		return chainRank(k.Name)
	}
	return [...]int{KindTable: 0, KindSysctl: 1, KindTimeout: 1, KindSet: 2, KindDelivery: 7, KindService: 5, KindDestination: 6}[k.Kind]
}

func (k Key) elementRank() int {
	switch set := k.Name[:len(k.Name)-1]; set {
	case "entry", "admitted", "side", "hide", "keep":
		return 4 // their chains are there
	case "service":
		// the stage that lets packets in comes last
		return [...]int{stageEntry: 10, stageAdmitted: 9, stageInside: 8, stageOutside: 8,
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
	stageInside
	stageOutside
	stageUnmatched // what no frontend matches, at a ClusterIP: without port and protocol
	stages
)

// acts names the map that leads from what is done at a stage to the chain that does it. A chain of one stage goes on to the
// next: the kernel wants to see that no chain leads to itself.
var acts = [...]string{stageEntry: "entry", stageAdmitted: "admitted", stageInside: "side", stageOutside: "side",
	stageUnmatched: "entry"}

// proto is an IP family as nf_tables and packet headers know it.
type proto struct {
	name         string
	number       uint8  // NFPROTO_*
	words        int    // registers that an address takes
	src, dst     uint32 // offsets in the header
	typ          nft.Type
	ctSrc, ctDst nft.CtKey
	anyAddress   netip.Addr
}

var protos = []*proto{
	{"4", unix.NFPROTO_IPV4, 1, 12, 16, nft.IPv4, nft.CtSrcIP, nft.CtDstIP, netip.IPv4Unspecified()},
	{"6", unix.NFPROTO_IPV6, 4, 8, 24, nft.IPv6, nft.CtSrcIP6, nft.CtDstIP6, netip.IPv6Unspecified()},
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

// sets gives the family's sets. A mark is any 32-bit number, the first of a key where it says so always 0: see clear.
func (p *proto) sets() []nft.Set {
	marks := func(n int) []nft.Type { return slices.Repeat([]nft.Type{nft.Mark}, n) }
	verdicts := []nft.Type{nft.Verdicts}
	return []nft.Set{
		{Name: "service" + p.name, Key: []nft.Type{nft.Mark, p.typ, nft.Proto, nft.Port}, Data: marks(3)},
		{Name: "unallocated" + p.name, Key: []nft.Type{nft.Mark, p.typ}, Interval: true},
		{Name: "permitted" + p.name, Key: []nft.Type{p.typ, nft.Proto, nft.Port, p.typ}, Interval: true},
		{Name: "hairpin" + p.name, Key: []nft.Type{p.typ, p.typ}},
		{Name: "member" + p.name, Key: []nft.Type{nft.Mark, nft.Mark, p.typ, nft.Port}},
		{Name: "sticky" + p.name, Key: marks(1), Data: marks(1)},
		{Name: "affinity" + p.name, Key: []nft.Type{p.typ, nft.Mark}, Data: []nft.Type{p.typ, nft.Port}, Dynamic: true, Size: affinitySize},
		{Name: "entry" + p.name, Key: marks(2), Data: verdicts},
		{Name: "admitted" + p.name, Key: marks(2), Data: verdicts},
		{Name: "side" + p.name, Key: marks(2), Data: verdicts},
		{Name: "hide" + p.name, Key: marks(2), Data: verdicts},
		{Name: "keep" + p.name, Key: marks(2), Data: verdicts},
	}
}

// numbers is the set that says by which mark a pool goes. It is for us alone, to find pools again.
var numbers = nft.Set{Name: "pool", Key: []nft.Type{nft.Integer}, Data: []nft.Type{nft.Mark}}

// allSets gives every set of the table by name.
var allSets = func() map[string]nft.Set {
	m := map[string]nft.Set{numbers.Name: numbers}
	for _, p := range protos {
		for _, s := range p.sets() {
			m[s.Name] = s
		}
	}
	return m
}()

// written says whether elements of a set are facts; those of affinity are the packets', and numbers come and go with pools.
func written(s nft.Set) bool { return !s.Dynamic && s.Name != numbers.Name }

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
		return p.pool(v)
	case *model.Frontend:
		return p.frontend(v)
	case *model.ClusterIP:
		return p.clusterIP(v)
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
func (p *Plane) pool(v *model.Pool) []Fact {
	all := slices.Concat(v.Backends, v.Unselected)
	if len(all) == 0 {
		return nil
	}
	f := protoOf(all[0].Addr.Addr())
	id := ofPool(v.ID)
	facts := make([]Fact, 0, 1+len(all))
	facts = append(facts, fact(Key{KindService, f.name, string(id)}, schedulerOf(v).String()))
	if v.Affinity > 0 {
		facts = append(facts, p.sticks(f, id, seconds(v))...)
	}
	for _, b := range v.Backends {
		addr := b.Addr.Addr().AsSlice()
		facts = append(facts, fact(Key{KindDestination, f.name, string(destinationKey(v.ID, b.Addr))}, strconv.Itoa(b.Share())))
		if v.Affinity > 0 {
			facts = append(facts, element("member"+f.name, nft.PortWord(append(id[:8:8], addr...), b.Addr.Port()), ""))
		}
		if b.Local {
			facts = append(facts, element("hairpin"+f.name, append(addr[:len(addr):len(addr)], addr...), ""))
		}
	}
	for _, b := range v.Unselected {
		facts = append(facts, fact(Key{KindDestination, f.name, string(destinationKey(v.ID, b.Addr))}, "0"))
	}
	return facts
}

// seconds gives how long a pool remembers clients, at least a second.
func seconds(v *model.Pool) uint32 { return max(1, uint32(v.Affinity.Seconds())) }

// sticks gives what remembers the clients of a pool.
func (p *Plane) sticks(f *proto, id []byte, seconds uint32) []Fact {
	return []Fact{
		element("sticky"+f.name, id, string(nft.Word(nil, seconds))),
		element("keep"+f.name, nft.Word(nft.Word(nil, 0), seconds), nft.Jump(keepChain(f, seconds)).String()),
		p.chain(keepChain(f, seconds), f.keep(seconds)),
	}
}

// frontend gives a frontend's stages, its permitted sources, and the chains that it leads to.
func (p *Plane) frontend(v *model.Frontend) []Fact {
	f := protoOf(v.Entry.Addr)
	any := v.Entry.AnyAddr()
	at := entryKey(nil, v.Entry)
	var facts []Fact
	stage := func(s uint32, d deed, t model.Target) {
		value := append(ofPool(served(t)), d.code()...)
		facts = append(facts, element("service"+f.name, append(nft.Word(nil, s), at...), string(nft.Word(value, uint32(v.Hide)))))
		facts = append(facts, p.lead(f, acts[s]+f.name, d)...)
	}
	first := serve(v.Inside, any, stageEntry)
	if v.Inside != v.Outside {
		first = deed{does: splits, any: any}
		stage(stageInside, serve(v.Inside, any, stageInside), v.Inside)
		stage(stageOutside, serve(v.Outside, any, stageOutside), v.Outside)
	}
	if v.Sources != nil {
		stage(stageAdmitted, first, v.Inside)
		first = deed{does: restricts, any: any}
	}
	stage(stageEntry, first, v.Inside)
	for _, r := range v.Sources {
		facts = append(facts, element("permitted"+f.name, source(at, r), ""))
	}
	return facts
}

// clusterIP returns what rejects packets to an address that match no frontend.
func (p *Plane) clusterIP(v *model.ClusterIP) []Fact {
	f, d := protoOf(v.Addr), deed{does: refuses}
	key := entryKey(nft.Word(nil, stageUnmatched), model.Entry{Addr: v.Addr})
	value := nft.Word(append(ofPool(0), d.code()...), 0)
	return append(p.lead(f, acts[stageUnmatched]+f.name, d), element("service"+f.name, key, string(value)))
}

// unallocated returns the element of a range of addresses to which packets are dropped.
func unallocated(r model.Range) Fact {
	first, last := append(nft.Word(nil, 0), r.First.AsSlice()...), append(nft.Word(nil, 0), r.Last.AsSlice()...)
	return element("unallocated"+protoOf(r.First).name, append(first, last...), "")
}

// served gives the pool whose virtual service is to have a target's packets, 0 for none.
func served(t model.Target) uint64 {
	if len(t.Pool.Backends)+len(t.Pool.Unselected) == 0 {
		return 0
	}
	return t.Pool.ID
}

// source gives the range of keys of a frontend's permitted prefix: first key, last key.
func source(at []byte, r netip.Prefix) []byte {
	first := r.Masked().Addr().AsSlice()
	last := slices.Clone(first)
	for i := r.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return slices.Concat(at, first, at, last)
}

// lead gives the element of a map that leads to the chain that does d, and the chain where the node hasn't it.
func (p *Plane) lead(f *proto, set string, d deed) []Fact {
	key := append(nft.Word(nil, 0), d.code()...)
	switch d.does {
	case drops:
		return []Fact{element(set, key, nft.DropIt.String())}
	case knows:
		return []Fact{element(set, key, nft.Goto(d.chain(f)).String()), p.chain(d.chain(f), f.known(d))}
	}
	return []Fact{element(set, key, nft.Goto(d.chain(f)).String())}
}
