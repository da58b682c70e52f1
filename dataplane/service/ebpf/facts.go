package ebpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/bpf/service"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/maglev"
	"fairlead.dev/fairlead/model"
)

// Kind is a kind of fact.
type Kind uint8

// The kinds, in the order in which they become true.
const (
	KindMaps          Kind = iota // a set of maps, by its layout
	KindPrefix                    // a prefix; value: enum prefix_flag
	KindInterfaces                // the interfaces of pods; value: as model.Interfaces prints them
	KindPool                      // a pool, by ID; value: all there is to it
	KindFallback                  // origins whose clients another plane serves at one of a pool's entries
	KindAllowedSource             // an allowed source range of an entry
	KindFrontend                  // by its entry; value: pools and how clients are served
	KindUnmatched                 // a prefix; value: what happens to packets there that match no frontend
	KindDevices                   // the programs for packets, at all devices; value: their digest
	KindAttachment                // a device and direction; value: attached, see dataplane/device
	KindHooks                     // the programs for sockets, attached; value: their digest
)

// Key names a fact: by text, or bytes in network order.
type Key struct {
	Kind Kind
	Name string
}

// hooksKey is the key of the only fact of its kind.
var hooksKey = Key{KindHooks, "hooks"}

// interfacesKey is the key of the only fact of its kind.
var interfacesKey = Key{KindInterfaces, "interfaces of pods"}

// devicesKey is the key of the only fact of its kind.
var devicesKey = Key{KindDevices, "devices"}

// Rank implements dataplane.Key: the hooks come last and go first.
func (k Key) Rank() int { return int(k.Kind) }

// Group implements dataplane.Grouped.
func (k Key) Group() string {
	return [...]string{KindMaps: "maps", KindPrefix: "prefix", KindInterfaces: "interfaces", KindPool: "pool",
		KindFallback: "fallback", KindAllowedSource: "source", KindFrontend: "frontend", KindUnmatched: "unmatched",
		KindDevices: "devices", KindAttachment: "attachments", KindHooks: "hooks"}[k.Kind]
}

// String returns text such as "pool 00000000deadbeef" or "frontend 10.96.0.1:80/tcp".
func (k Key) String() string {
	b := []byte(k.Name)
	switch {
	case k.Kind == KindPrefix && len(b) == 17:
		return "prefix " + prefixOf(k).String()
	case k.Kind == KindUnmatched && len(b) == 17:
		return "unmatched " + prefixOf(k).String()
	case k.Kind == KindPool && len(b) == 8:
		return fmt.Sprintf("pool %x", b)
	case k.Kind == KindFallback && len(b) == 9:
		return fmt.Sprintf("left to others %x of %s", b[:8], model.Origins(b[8]))
	case k.Kind == KindAllowedSource && len(b) == 36:
		e, r := allowedSource(k)
		return fmt.Sprintf("%s from %s", e, r)
	case k.Kind == KindAttachment && len(b) == 5:
		return attachmentKey(k).String()
	case k.Kind == KindFrontend && len(b) == 19:
		return "frontend " + entry(k).String()
	}
	return k.Name
}

// Fact is a fact of this plane.
type Fact = dataplane.Fact[Key, string]

func fact(k Key, value string) Fact { return Fact{Key: k, Value: value} }

// Render implements dataplane.Plane.
func (p *Plane) Render(part model.ServicePart) []Fact {
	switch v := part.(type) {
	case *model.ServiceNode:
		facts := append(nodePrefixes(v), unallocated(v)...)
		facts = append(facts, fact(Key{KindMaps, p.layout}, p.sizes), fact(hooksKey, p.digest))
		if v.PodInterfaces.Name != "" {
			facts = append(facts, Fact{Key: interfacesKey, Value: v.PodInterfaces.String(), Body: v.PodInterfaces})
		}
		if Packets() {
			facts = append(facts, fact(devicesKey, p.devices.digests[p.deviceOptions(v.DSR)]))
		}
		return facts
	case *model.Pool:
		return []Fact{fact(poolKey(v.ID), poolValue(v))}
	case *model.Frontend:
		return frontend(v)
	case *model.Link:
		return p.devices.render(v)
	case *model.ClusterIP:
		return []Fact{unmatched(netip.PrefixFrom(v.Addr, v.Addr.BitLen()), device.UnmatchedReject)}
	}
	panic(fmt.Sprintf("ebpf: no facts for a %T", part))
}

// nodePrefixes returns the facts of prefixes: sources that count as pods or are behind this node, addresses of the
// node and of others that serve node ports, and addresses of nodes.
func nodePrefixes(n *model.ServiceNode) (facts []Fact) {
	is := map[netip.Prefix]uint32{}
	for _, r := range n.Pods {
		is[r.Masked()] |= service.Pods
	}
	for _, a := range n.Addresses {
		if !a.IsLoopback() && slices.ContainsFunc(n.NodePorts, func(r model.Range) bool { return r.Contains(a) }) {
			is[netip.PrefixFrom(a, a.BitLen())] |= service.NodePorts
		}
	}
	for _, home := range []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")} {
		for _, r := range n.NodePorts {
			for _, part := range r.PrefixesIn(home) {
				is[part] |= service.NodePorts
			}
		}
	}
	for _, r := range n.PodCIDRs {
		r = r.Masked()
		is[r] |= service.BehindNode
		if slices.ContainsFunc(n.Pods, func(p netip.Prefix) bool { return p.Bits() <= r.Bits() && p.Contains(r.Addr()) }) {
			is[r] |= service.Pods // the longest prefix counts
		}
	}
	nodes := map[netip.Addr]uint32{}
	for _, a := range n.Nodes {
		nodes[a] |= service.Nodes
	}
	for _, a := range n.RemoteNodePorts {
		nodes[a] |= service.RemoteNodePorts
	}
	for a, bits := range nodes {
		is[netip.PrefixFrom(a, a.BitLen())] |= bits
		if !slices.Contains(n.Addresses, a) &&
			slices.ContainsFunc(n.Pods, func(r netip.Prefix) bool { return r.Contains(a) }) {
			is[netip.PrefixFrom(a, a.BitLen())] |= service.Pods // the longest prefix counts
		}
	}
	for r, bits := range is {
		facts = append(facts, fact(prefixKey(r), string(binary.BigEndian.AppendUint32(nil, bits))))
	}
	slices.SortFunc(facts, func(a, b Fact) int { return strings.Compare(a.Key.Name, b.Key.Name) })
	return facts
}

// unallocated returns the facts that drop packets to addresses that only Services have, and none has.
func unallocated(n *model.ServiceNode) (facts []Fact) {
	for _, r := range n.ServiceRanges {
		for _, p := range r.Prefixes() {
			facts = append(facts, unmatched(p, device.UnmatchedDrop))
		}
	}
	return facts
}

// unmatched returns the fact of what happens to packets to a prefix that match no frontend.
func unmatched(r netip.Prefix, action uint32) Fact {
	k := Key{KindUnmatched, string(appendPrefix(nil, r))}
	return fact(k, string(binary.BigEndian.AppendUint32(nil, action)))
}

func prefixKey(r netip.Prefix) Key { return Key{KindPrefix, string(appendPrefix(nil, r))} }

// prefixOf is the inverse of prefixKey.
func prefixOf(k Key) netip.Prefix { return prefix([]byte(k.Name)) }

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

func allowedSourceKey(e model.Entry, r netip.Prefix) Key {
	return Key{KindAllowedSource, string(appendPrefix([]byte(frontendKey(e).Name), r))}
}

// allowedSource is the inverse of allowedSourceKey.
func allowedSource(k Key) (model.Entry, netip.Prefix) {
	return entry(Key{KindFrontend, k.Name[:19]}), prefix([]byte(k.Name[19:]))
}

func poolKey(id uint64) Key { return Key{KindPool, string(binary.BigEndian.AppendUint64(nil, id))} }

// poolID is the inverse of poolKey; of a KindFallback key it returns the pool's, too.
func poolID(k Key) uint64 { return binary.BigEndian.Uint64([]byte(k.Name)) }

// A pool's value is protocol · scheduler · 1 if it hashes ports · 0 · seconds of affinity · entries of Maglev's
// table, 0 where there is none; then 20 bytes for each backend: address · port · weight and where it runs, and for
// each endpoint that gets no new flow, with the bit unselected.
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

// appendBackend adds a backend, with flags in its weight.
func appendBackend(b []byte, e model.Backend, is uint16) []byte {
	a := e.Addr.Addr().As16()
	b = append(b, a[:]...)
	b = binary.BigEndian.AppendUint16(b, e.Addr.Port())
	return binary.BigEndian.AppendUint16(b, heldWeight(e)|is)
}

// entries returns the size of a pool's table, with Maglev's scheduler and backends.
func entries(v *model.Pool) int {
	if v.Scheduler != model.Maglev || len(v.Backends) == 0 {
		return 0
	}
	return maglev.Entries(v, tableEntries)
}

// heldWeight returns a backend's weight as the programs read it: with where it runs.
func heldWeight(b model.Backend) uint16 {
	switch {
	case b.Local:
		return b.Weight | service.Local
	case b.Remote:
		return b.Weight | service.Remote
	}
	return b.Weight
}

// backend is the inverse of heldWeight, with an address.
func backend(at netip.AddrPort, held uint16) model.Backend {
	return model.Backend{
		Addr:   at,
		Weight: held &^ (service.Local | service.Remote),
		Local:  held&service.Local != 0,
		Remote: held&service.Remote != 0,
	}
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

func fallbackKey(id uint64, o model.Origin) Key {
	return Key{KindFallback, string(append(binary.BigEndian.AppendUint64(nil, id), 1<<o))}
}

// frontend returns a frontend's facts: none for SCTP, whose sockets have no hooks.
func frontend(v *model.Frontend) []Fact {
	if v.Entry.Protocol != model.TCP && v.Entry.Protocol != model.UDP {
		return nil
	}
	fallback := fallbackOrigins(v)
	facts := []Fact{fact(frontendKey(v.Entry), frontendValue(v, fallback))}
	for _, o := range []model.Origin{model.FromNode, model.FromPod, model.FromExternal} {
		if p := v.Target(o).Pool; fallback.Has(o) && hasAffinity(p) {
			facts = append(facts, fact(fallbackKey(p.ID, o), ""))
		}
	}
	for _, r := range v.Sources {
		facts = append(facts, fact(allowedSourceKey(v.Entry, r), ""))
	}
	return facts
}

// hasAffinity reports whether a pool assigns a client to the same backend each time, so that one plane must serve all
// of its connections.
func hasAffinity(p *model.Pool) bool {
	return p.Affinity > 0 || p.Scheduler == model.SourceHash || p.Scheduler == model.Maglev
}

// fallbackOrigins returns the origins whose clients a socket can't serve at a frontend: those that are masqueraded
// (the node's own source is the node's anyway), all where source ranges or the client's port matter, where a backend is
// an entry, too, and of UDP to node ports, which may be a reply to a client's port of that number: packets show it.
func fallbackOrigins(v *model.Frontend) model.Origins {
	maybeReply := v.Entry.AnyAddr() && v.Entry.Protocol == model.UDP
	if maybeReply || v.Onward || v.Sources != nil || v.Internal.Pool.Ports || v.External.Pool.Ports {
		return model.AllOrigins
	}
	if v.Shared { // a pod's socket can't see who is bound to it
		return model.OriginsOf(model.FromPod, model.FromExternal)
	}
	return v.Masquerade &^ model.OriginsOf(model.FromNode)
}

func frontendKey(e model.Entry) Key {
	a := e.Addr.As16()
	return Key{KindFrontend, string(append(binary.BigEndian.AppendUint16(a[:], e.Port), byte(e.Protocol)))}
}

// entry is the inverse of frontendKey.
func entry(k Key) model.Entry {
	b := []byte(k.Name)
	return model.Entry{
		Addr:     netip.AddrFrom16([16]byte(b)).Unmap(),
		Port:     binary.BigEndian.Uint16(b[16:]),
		Protocol: model.Protocol(b[18]),
	}
}

// A frontend's value is internal pool's ID · external pool's · origins that the socket hooks leave to packets · 1 if
// pods and others are served differently · origins that are dropped where there is no backend · origins that are
// masqueraded · 1 if there are allowed source ranges · origins with direct server return · 1 if it is at other nodes'
// addresses, too · 1 if a process of the node goes before it.
func frontendValue(v *model.Frontend, fallback model.Origins) string {
	byOrigin, drop := byte(0), model.Origins(0)
	if v.Internal != v.External || fallback.Has(model.FromPod) != fallback.Has(model.FromExternal) {
		byOrigin = 1
	}
	if v.Internal.Empty == model.Drop {
		drop |= model.OriginsOf(model.FromNode, model.FromPod)
	}
	if v.External.Empty == model.Drop {
		drop |= model.OriginsOf(model.FromExternal)
	}
	b := binary.BigEndian.AppendUint64(nil, v.Internal.Pool.ID)
	return string(
		append(
			binary.BigEndian.AppendUint64(b, v.External.Pool.ID),
			byte(fallback),
			byOrigin,
			byte(drop),
			byte(v.Masquerade),
			byte(b2i(v.Sources != nil)),
			byte(v.DSR),
			byte(b2i(v.Remote)),
			byte(b2i(v.Shared)),
		),
	)
}
