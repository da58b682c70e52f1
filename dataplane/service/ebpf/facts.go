package ebpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/maglev"
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/model"
)

// Kind is a kind of fact.
type Kind uint8

// The kinds, in the order in which they become true.
const (
	KindMaps       Kind = iota // a set of maps, by its layout
	KindPlace                  // what a prefix is; value: its bits
	KindInterfaces             // the interfaces of pods; value: as model.Interfaces prints them
	KindPool                   // a pool, by ID; value: all there is to it
	KindLeft                   // origins of which others serve clients at one of a pool's entries
	KindPermit                 // a prefix of clients that an entry lets in
	KindFrontend               // by its entry; value: pools and how clients fare
	KindUnmatched              // a prefix; value: what becomes of packets there that match no frontend
	KindDevices                // the programs for packets, at all devices; value: their digest
	KindHooks                  // the programs for sockets, attached; value: their digest
)

// Key names a fact: by text, or bytes in network order.
type Key struct {
	Kind Kind
	Name string
}

// hooksKey is the key of the one fact of its kind.
var hooksKey = Key{KindHooks, "hooks"}

// interfacesKey is the key of the one fact of its kind.
var interfacesKey = Key{KindInterfaces, "interfaces of pods"}

// devicesKey is the key of the one fact of its kind.
var devicesKey = Key{KindDevices, "devices"}

// Rank implements dataplane.Key: the hooks come last and go first.
func (k Key) Rank() int { return int(k.Kind) }

// String gives such as "pool 00000000deadbeef" or "frontend 10.96.0.1:80/tcp".
func (k Key) String() string {
	b := []byte(k.Name)
	switch {
	case k.Kind == KindPlace && len(b) == 17:
		return "prefix " + place(k).String()
	case k.Kind == KindUnmatched && len(b) == 17:
		return "unmatched " + place(k).String()
	case k.Kind == KindPool && len(b) == 8:
		return fmt.Sprintf("pool %x", b)
	case k.Kind == KindLeft && len(b) == 9:
		return fmt.Sprintf("left to others %x of %s", b[:8], model.Origins(b[8]))
	case k.Kind == KindPermit && len(b) == 36:
		e, r := permit(k)
		return fmt.Sprintf("%s from %s", e, r)
	case k.Kind == KindFrontend && len(b) == 19:
		return "frontend " + entry(k).String()
	}
	return k.Name
}

// Fact is a fact of this plane.
type Fact = dataplane.Fact[Key, string]

func fact(k Key, value string) Fact { return Fact{Key: k, Value: value} }

// Render implements dataplane.Plane.
func (p *Plane) Render(part model.Part) []Fact {
	switch v := part.(type) {
	case *model.Node:
		facts := append(places(v), unallocated(v)...)
		facts = append(facts, fact(Key{KindMaps, p.layout}, p.sizes), fact(hooksKey, p.digest))
		if v.PodInterfaces.Name != "" {
			facts = append(facts, fact(interfacesKey, v.PodInterfaces.String()))
		}
		if Packets() {
			facts = append(facts, fact(devicesKey, p.devices.digests[p.deviceOptions(v.Direct)]))
		}
		return facts
	case *model.Pool:
		return []Fact{fact(poolKey(v.ID), poolValue(v))}
	case *model.Frontend:
		return frontend(v)
	case *model.ClusterIP:
		return []Fact{unmatched(netip.PrefixFrom(v.Addr, v.Addr.BitLen()), bpf.UnmatchedReject)}
	}
	panic(fmt.Sprintf("ebpf: no facts for a %T", part))
}

// places gives what prefixes are: sources that count as pods, or are behind this node, addresses of the node that take node ports, and
// addresses of nodes.
func places(n *model.Node) (facts []Fact) {
	is := map[netip.Prefix]uint32{}
	for _, r := range n.Pods {
		is[r.Masked()] |= bpf.Pods
	}
	for _, a := range n.Addresses {
		if !a.IsLoopback() && slices.ContainsFunc(n.NodePorts, func(r model.Range) bool { return r.Contains(a) }) {
			is[netip.PrefixFrom(a, a.BitLen())] |= bpf.NodePorts
		}
	}
	for _, home := range []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")} {
		for _, r := range n.NodePorts {
			for _, part := range service.PrefixesIn(home, r) {
				is[part] |= bpf.NodePorts
			}
		}
	}
	for _, r := range n.Behind {
		r = r.Masked()
		is[r] |= bpf.Behind
		if slices.ContainsFunc(n.Pods, func(p netip.Prefix) bool { return p.Bits() <= r.Bits() && p.Contains(r.Addr()) }) {
			is[r] |= bpf.Pods // the longest prefix counts
		}
	}
	for _, a := range n.Nodes {
		is[netip.PrefixFrom(a, a.BitLen())] |= bpf.Nodes
		if !slices.Contains(n.Addresses, a) && slices.ContainsFunc(n.Pods, func(r netip.Prefix) bool { return r.Contains(a) }) {
			is[netip.PrefixFrom(a, a.BitLen())] |= bpf.Pods // the longest prefix counts
		}
	}
	for r, bits := range is {
		facts = append(facts, fact(placeKey(r), string(binary.BigEndian.AppendUint32(nil, bits))))
	}
	slices.SortFunc(facts, func(a, b Fact) int { return strings.Compare(a.Key.Name, b.Key.Name) })
	return facts
}

// unallocated returns what drops packets to addresses that only Services have, and none has.
func unallocated(n *model.Node) (facts []Fact) {
	for _, r := range n.ServiceRanges {
		for _, p := range service.Prefixes(r) {
			facts = append(facts, unmatched(p, bpf.UnmatchedDrop))
		}
	}
	return facts
}

// unmatched returns the fact of what becomes of packets to a prefix that match no frontend.
func unmatched(r netip.Prefix, action uint32) Fact {
	k := Key{KindUnmatched, string(appendPrefix(nil, r))}
	return fact(k, string(binary.BigEndian.AppendUint32(nil, action)))
}

func placeKey(r netip.Prefix) Key { return Key{KindPlace, string(appendPrefix(nil, r))} }

// place is the inverse of placeKey.
func place(k Key) netip.Prefix { return prefix([]byte(k.Name)) }

// appendPrefix adds a prefix as 16 bytes and its length among 128 bits.
func appendPrefix(b []byte, r netip.Prefix) []byte {
	a := r.Addr().As16()
	return append(append(b, a[:]...), byte(r.Bits()+128-r.Addr().BitLen()))
}

// prefix is the inverse of appendPrefix.
func prefix(b []byte) netip.Prefix {
	a := netip.AddrFrom16([16]byte(b)).Unmap()
	return netip.PrefixFrom(a, int(b[16])-128+a.BitLen())
}

func permitKey(e model.Entry, r netip.Prefix) Key {
	return Key{KindPermit, string(appendPrefix([]byte(frontendKey(e).Name), r))}
}

// permit is the inverse of permitKey.
func permit(k Key) (model.Entry, netip.Prefix) {
	return entry(Key{KindFrontend, k.Name[:19]}), prefix([]byte(k.Name[19:]))
}

func poolKey(id uint64) Key { return Key{KindPool, string(binary.BigEndian.AppendUint64(nil, id))} }

// poolID is the inverse of poolKey; of a KindLeft key it gives the pool's too.
func poolID(k Key) uint64 { return binary.BigEndian.Uint64([]byte(k.Name)) }

// A pool's value is protocol · scheduler · 1 if it hashes ports · 0 · seconds of affinity · entries of Maglev's table, 0 where
// there is none; then 20 bytes for each backend: address · port · weight and where it runs, and for each endpoint
// that gets no new flow, with the bit unselected.
const (
	poolHead    = 10
	poolBackend = 20
	unselected  = 1 << 13
)

func poolValue(v *model.Pool) string {
	b := make([]byte, 0, poolHead+poolBackend*(len(v.Backends)+len(v.Unselected)))
	b = append(b, byte(v.Protocol), byte(v.Scheduler), byte(b2i(v.Ports)), 0)
	b = binary.BigEndian.AppendUint32(b, uint32(v.Affinity/time.Second))
	b = binary.BigEndian.AppendUint16(b, uint16(entries(v)))
	for _, e := range v.Backends {
		b = appendBackend(b, e, 0)
	}
	for _, e := range v.Unselected {
		b = appendBackend(b, e, unselected)
	}
	return string(b)
}

// appendBackend adds a backend and what else is said of it.
func appendBackend(b []byte, e model.Backend, is uint16) []byte {
	a := e.Addr.Addr().As16()
	b = append(b, a[:]...)
	b = binary.BigEndian.AppendUint16(b, e.Addr.Port())
	return binary.BigEndian.AppendUint16(b, heldWeight(e)|is)
}

// entries gives the size of a pool's table, with Maglev's scheduler and backends.
func entries(v *model.Pool) int {
	if v.Scheduler != model.Maglev || len(v.Backends) == 0 {
		return 0
	}
	return maglev.Entries(v, Abilities.Table)
}

// heldWeight gives a backend's weight as the programs know it: with where it runs.
func heldWeight(b model.Backend) uint16 {
	switch {
	case b.Local:
		return b.Weight | bpf.Local
	case b.Away:
		return b.Weight | bpf.Away
	}
	return b.Weight
}

// backend is the inverse of heldWeight, with an address.
func backend(at netip.AddrPort, held uint16) model.Backend {
	return model.Backend{Addr: at, Weight: held &^ (bpf.Local | bpf.Away), Local: held&bpf.Local != 0, Away: held&bpf.Away != 0}
}

// readPool is the inverse of poolValue, but for what it doesn't hold: name and ID.
func readPool(value string) *model.Pool {
	b := []byte(value)
	p := &model.Pool{Protocol: model.Protocol(b[0]), Scheduler: model.Scheduler(b[1]), Ports: b[2] == 1,
		Affinity: time.Duration(binary.BigEndian.Uint32(b[4:])) * time.Second, Entries: int(binary.BigEndian.Uint16(b[8:])),
		Backends: make([]model.Backend, 0, (len(b)-poolHead)/poolBackend)}
	for b = b[poolHead:]; len(b) >= poolBackend; b = b[poolBackend:] {
		a := netip.AddrFrom16([16]byte(b)).Unmap()
		at, weight := netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[16:])), binary.BigEndian.Uint16(b[18:])
		if weight&unselected != 0 {
			p.Unselected = append(p.Unselected, backend(at, weight&^unselected))
		} else {
			p.Backends = append(p.Backends, backend(at, weight))
		}
	}
	return p
}

func leftKey(id uint64, o model.Origin) Key {
	return Key{KindLeft, string(append(binary.BigEndian.AppendUint64(nil, id), 1<<o))}
}

// frontend gives a frontend's facts: none for SCTP, whose sockets have no hooks.
func frontend(v *model.Frontend) []Fact {
	if v.Entry.Protocol != model.TCP && v.Entry.Protocol != model.UDP {
		return nil
	}
	leave := left(v)
	facts := []Fact{fact(frontendKey(v.Entry), frontendValue(v, leave))}
	for _, o := range []model.Origin{model.FromNode, model.FromPod, model.FromOutside} {
		if p := v.Target(o).Pool; leave.Has(o) && remembers(p) {
			facts = append(facts, fact(leftKey(p.ID, o), ""))
		}
	}
	for _, r := range v.Sources {
		facts = append(facts, fact(permitKey(v.Entry, r), ""))
	}
	return facts
}

// remembers says whether a pool gives a client the same backend again, which takes that the client is always served by the
// same plane.
func remembers(p *model.Pool) bool {
	return p.Affinity > 0 || p.Scheduler == model.SourceHash || p.Scheduler == model.Maglev
}

// left gives the origins whose clients a socket can't serve at a frontend: those whose source is hidden (the node's own is
// the node's anyway), all where sources are looked at or a port that isn't chosen yet, or where a backend is an entry,
// too.
func left(v *model.Frontend) model.Origins {
	if v.Onward || v.Sources != nil || v.Inside.Pool.Ports || v.Outside.Pool.Ports {
		return model.AllOrigins
	}
	return v.Hide &^ model.OriginsOf(model.FromNode)
}

func frontendKey(e model.Entry) Key {
	a := e.Addr.As16()
	return Key{KindFrontend, string(append(binary.BigEndian.AppendUint16(a[:], e.Port), byte(e.Protocol)))}
}

// entry is the inverse of frontendKey.
func entry(k Key) model.Entry {
	b := []byte(k.Name)
	return model.Entry{Addr: netip.AddrFrom16([16]byte(b)).Unmap(), Port: binary.BigEndian.Uint16(b[16:]), Protocol: model.Protocol(b[18])}
}

// A frontend's value is inside pool's ID · outside pool's · origins that sockets leave to packets · 1 if pods must be told from
// others · origins that hear nothing where there is no backend · origins that are hidden · 1 if only some clients are let in ·
// origins that backends' nodes answer.
func frontendValue(v *model.Frontend, leave model.Origins) string {
	ask, drop := byte(0), model.Origins(0)
	if v.Inside != v.Outside || leave.Has(model.FromPod) != leave.Has(model.FromOutside) {
		ask = 1
	}
	if v.Inside.Empty == model.Drop {
		drop |= model.OriginsOf(model.FromNode, model.FromPod)
	}
	if v.Outside.Empty == model.Drop {
		drop |= model.OriginsOf(model.FromOutside)
	}
	b := binary.BigEndian.AppendUint64(nil, v.Inside.Pool.ID)
	return string(append(binary.BigEndian.AppendUint64(b, v.Outside.Pool.ID), byte(leave), ask, byte(drop), byte(v.Hide), byte(b2i(v.Sources != nil)), byte(v.Direct)))
}
