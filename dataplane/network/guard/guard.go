package guard

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/network"
	"fairlead.dev/fairlead/dataplane/network/route"
	table "fairlead.dev/fairlead/dataplane/nft"
	"fairlead.dev/fairlead/kernel/link"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Table is the name of the plane's table.
const Table = "fairlead-guard"

// Plane writes facts into one network namespace. It implements dataplane.Plane[model.NetworkPart, network.TableKey,
// string], dataplane.Watcher and dataplane.Cleaner.
type Plane struct{ *network.Table }

var _ dataplane.Plane[model.NetworkPart, network.TableKey, string] = (*Plane)(nil)

// New opens the plane of the calling thread's network namespace.
func New() (*Plane, error) {
	t, err := network.OpenTable(declared)
	if err != nil {
		return nil, err
	}
	return &Plane{t}, nil
}

// Names of chains and of the set without a family.
const (
	chainUnderlay = "underlay"
	chainPod      = "pod"
	chainTunnel   = "tunnel"
	chainForged   = "forged"
	setDevice     = "device"
	setIPIP       = "ipip"
)

// proto is an IP family with the names of its sets.
type proto struct {
	*table.Family
	outer, peer, source, allowed, cluster string
}

func protoFor(f *table.Family) *proto {
	return &proto{f, "outer" + f.Name, "peer" + f.Name, "source" + f.Name, "allowed" + f.Name, "cluster" + f.Name}
}

var protos = []*proto{protoFor(table.IPv4), protoFor(table.IPv6)}

// protoOf returns an address's family.
func protoOf(a netip.Addr) *proto {
	if a.Is4() {
		return protos[0]
	}
	return protos[1]
}

// priority is ahead of connection tracking and whatever others put before that.
const priority = -390

var declared = func() *table.Table[network.TableKey] {
	sets := []nft.Set{{Name: setDevice, Key: []nft.Type{nft.Device}, Data: []nft.Type{nft.Verdicts}},
		{Name: setIPIP, Key: []nft.Type{table.IPv4.Type}}}
	for _, p := range protos {
		sets = append(sets, nft.Set{Name: p.outer, Key: []nft.Type{nft.Port, nft.Mark, p.Type}},
			nft.Set{Name: p.peer, Key: []nft.Type{p.Type}},
			nft.Set{Name: p.source, Key: []nft.Type{nft.Device, p.Type}},
			nft.Set{Name: p.allowed, Key: []nft.Type{nft.Device, p.Type}, Interval: true},
			nft.Set{Name: p.cluster, Key: []nft.Type{p.Type}, Interval: true})
	}
	hook := nft.Hook{Type: "filter", Number: unix.NF_INET_PRE_ROUTING, Priority: priority}
	return network.Declare(Table, "layout 2", hook, sets...)
}()

// frame is the facts that every part but routes needs.
var frame = append(declared.Frame(), declared.Chain(network.Hooked, hooked()), declared.Chain(chainPod, pod()),
	declared.Chain(chainUnderlay, only((*proto).peers)),
	declared.Chain(chainTunnel, only((*proto).ranges, (*proto).peers)), declared.Chain(chainForged, drop()))

// drop drops a packet and counts it.
func drop() [][]nft.Expr { return [][]nft.Expr{nft.Exprs(nft.Counter(), nft.Do(nft.DropIt))} }

// fields of an outer header, after UDP's.
const (
	udpDestination = 2
	vxlanVNI       = 8 + 4
	vniBytes       = 3
)

func hooked() (rules [][]nft.Expr) {
	for _, p := range protos {
		rules = append(rules, nft.Join(
			nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{unix.IPPROTO_UDP})), p.Is(),
			nft.Exprs(nft.Payload(nft.TransportHeader, udpDestination, 2, nft.R(0)),
				nft.Payload(nft.TransportHeader, vxlanVNI, vniBytes, nft.R(1)), p.Address(p.Dst, 2),
				nft.Member(p.outer, nft.R(0)), nft.Do(nft.Jump(chainUnderlay)))))
	}
	four := protos[0]
	rules = append(rules, nft.Join(
		nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{unix.IPPROTO_IPIP})), four.Is(),
		nft.Exprs(four.Address(four.Dst, 0), nft.Member(setIPIP, nft.R(0)), nft.Do(nft.Jump(chainUnderlay)))))
	group, either := nft.Word(nil, link.PodGroup), nft.Word(nil, ^uint32(link.PodGroup^link.ReleasedGroup))
	return append(rules,
		nft.Exprs(nft.Meta(nft.MetaIIFGroup, nft.R(0)), nft.And(nft.R(0), nft.R(0), either),
			nft.Cmp(nft.Eq, nft.R(0), group), nft.Do(nft.Goto(chainPod))),
		nft.Exprs(nft.Meta(nft.MetaIIFName, nft.R(0)), nft.VMap(setDevice, nft.R(0))))
}

func (p *proto) peers() string  { return p.peer }
func (p *proto) ranges() string { return p.cluster }

// only returns rules that drop packets of other sources than those in each family's sets.
func only(sets ...func(*proto) string) (rules [][]nft.Expr) {
	for _, set := range sets {
		for _, p := range protos {
			rules = append(rules, append(p.Is(), p.Address(p.Src, 0), nft.Member(set(p), nft.R(0)), nft.Do(nft.Return)))
		}
	}
	return append(rules, drop()...)
}

// deviceWords is how many registers a device's name takes.
const deviceWords = 4

// pod returns the rules for packets from pods.
func pod() (rules [][]nft.Expr) {
	for _, p := range protos {
		for _, set := range []string{p.source, p.allowed} {
			rules = append(rules, append(p.Is(), nft.Meta(nft.MetaIIFName, nft.R(0)), p.Address(p.Src, deviceWords),
				nft.Member(set, nft.R(0)), nft.Do(nft.Return)))
		}
	}
	six := table.IPv6
	linkLocal := func(offset uint32) []nft.Expr {
		return nft.Exprs(nft.Payload(nft.NetworkHeader, offset, 4, nft.R(0)),
			nft.And(nft.R(0), nft.R(0), []byte{0xff, 0xc0, 0, 0}), nft.Cmp(nft.Eq, nft.R(0), []byte{0xfe, 0x80, 0, 0}))
	}
	gateway := nft.Exprs(six.Address(six.Dst, 0), nft.Cmp(nft.Eq, nft.R(0), model.Gateways[1].AsSlice()),
		nft.Do(nft.Return))
	multicast := nft.Exprs(nft.Payload(nft.NetworkHeader, six.Dst, 1, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{0xff}),
		nft.Do(nft.DropIt))
	unspecified := nft.Exprs(six.Address(six.Src, 0), nft.Cmp(nft.Eq, nft.R(0), six.Any.AsSlice()))
	return append(rules, nft.Join(six.Is(), linkLocal(six.Src), gateway),
		nft.Join(six.Is(), linkLocal(six.Src), multicast),
		nft.Join(six.Is(), unspecified, multicast), nft.Exprs(nft.Do(nft.Goto(chainForged))))
}

// deviceKey returns a device's name as registers hold it.
func deviceKey(name string) []byte { return nft.InterfaceName(name, false) }

// Render implements dataplane.Plane.
func (*Plane) Render(part model.NetworkPart) (l []network.TableFact) {
	switch v := part.(type) {
	case *model.Network:
		l = append(l, frame...)
		if t := v.Tunnel; t != nil {
			l = append(l, outer(t))
			if !t.AnySource {
				l = append(l, declared.Element(setDevice, deviceKey(route.DeviceOf(t.Kind)), nft.Goto(chainTunnel).String()))
			}
		}
	case *model.Route:
		l = append(l, within(protoOf(v.To.Addr()).cluster, nil, v.To))
		if v.Via.IsValid() { // the node itself sends too
			l = append(l, declared.Element(protoOf(v.Via).peer, v.Via.AsSlice(), ""))
		}
		if a := v.Internal; a.IsValid() && a != v.Via {
			l = append(l, within(protoOf(a).cluster, nil, netip.PrefixFrom(a, a.BitLen())))
		}
	case *model.Attachment:
		l = append(l, frame...)
		if v.Kind.IPVLAN() { // no device is this pod's
			return l
		}
		for _, a := range v.Addresses {
			l = append(l, declared.Element(protoOf(a).source, append(deviceKey(v.Device), a.AsSlice()...), ""))
		}
		for _, r := range v.Sources {
			l = append(l, within(protoOf(r.Addr()).allowed, deviceKey(v.Device), r))
		}
	}
	return l
}

// outer returns the fact of what arrives at a tunnel's end.
func outer(t *model.Tunnel) network.TableFact {
	if t.Kind == model.IPIP {
		return declared.Element(setIPIP, t.Local.AsSlice(), "")
	}
	key := nft.PortWord(nil, t.Port)
	key = append(key, binary.BigEndian.AppendUint32(nil, t.VNI<<8)...)
	return declared.Element(protoOf(t.Local).outer, append(key, t.Local.AsSlice()...), "")
}

// within returns the fact of a range in a set, behind the same bytes.
func within(set string, before []byte, r netip.Prefix) network.TableFact {
	return declared.Element(set, table.SourceRange(before, r), "")
}

// Dropped returns how many packets were dropped by reason: "forged_source" of a pod, "tunnel_source" of what came out
// of the tunnel, "tunnel_peer" of outer packets of no node, since the plane's chains were written.
func (p *Plane) Dropped() (map[string]uint64, error) {
	n, err := p.Counters()
	return map[string]uint64{"forged_source": n[chainForged], "tunnel_source": n[chainTunnel],
		"tunnel_peer": n[chainUnderlay]}, err
}
