package guard

import (
	"encoding/binary"
	"net/netip"
	"slices"

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

// Names of chains, and of sets without a family.
const (
	chainInput  = network.Hooked + "-input"
	chainPod    = "pod"
	chainForged = "forged"
	chainInside = "inside"  // sources that only pods' devices and the tunnel may have
	chainOuter  = "outer"   // what is for the tunnel's end
	chainInner  = "inner"   // what that carries
	chainBehind = "behind"  // what carries another source than is behind its sender
	chainEnds   = "overlay" // what pods send to tunnels' ends
	setDevice   = "device"
	setVXLAN    = "vxlan"
	setPort     = "port" // of the tunnel
	setIPIP     = "ipip"
	setProtocol = "protocol" // of one without
	setAny      = "any"      // transport protocols that carry other sources too
)

// proto is an IP family with the names of its sets.
type proto struct {
	*table.Family
	source, allowed, inside, own, end, sender string
	behind                                    [2]string // by the index of the inner family
}

func protoFor(f *table.Family) *proto {
	p := &proto{Family: f, source: "source" + f.Name, allowed: "allowed" + f.Name, inside: "inside" + f.Name,
		own: "own" + f.Name, end: "end" + f.Name, sender: "sender" + f.Name}
	for i, inner := range []*table.Family{table.IPv4, table.IPv6} {
		p.behind[i] = "behind" + f.Name + "-" + inner.Name
	}
	return p
}

var protos = []*proto{protoFor(table.IPv4), protoFor(table.IPv6)}

// protoOf returns an address's family.
func protoOf(a netip.Addr) *proto { return table.OfFamily(protos, a) }

// priority is ahead of connection tracking and whatever others put before that.
const priority = -390

var declared = func() *table.Table[network.TableKey] {
	sets := []nft.Set{{Name: setDevice, Key: []nft.Type{nft.Device}}, {Name: setIPIP, Key: []nft.Type{table.IPv4.Type}},
		{Name: setVXLAN, Key: []nft.Type{nft.Port, nft.Mark}}, {Name: setPort, Key: []nft.Type{nft.Proto, nft.Port}},
		{Name: setProtocol, Key: []nft.Type{nft.Proto}}, {Name: setAny, Key: []nft.Type{nft.Proto}}}
	for _, p := range protos {
		sets = append(sets, nft.Set{Name: p.own, Key: []nft.Type{p.Type}},
			nft.Set{Name: p.end, Key: []nft.Type{p.Type}},
			nft.Set{Name: p.sender, Key: slices.Repeat([]nft.Type{nft.IPv6}, p.chunks())},
			nft.Set{Name: p.source, Key: []nft.Type{nft.Device, p.Type}},
			nft.Set{Name: p.allowed, Key: []nft.Type{nft.Device, p.Type}, Interval: true},
			nft.Set{Name: p.inside, Key: []nft.Type{p.Type}, Interval: true})
		for i, name := range p.behind {
			sets = append(sets, nft.Set{Name: name, Key: []nft.Type{protos[i].Type}, Data: []nft.Type{p.Type},
				Interval: true})
		}
	}
	return network.Declare(Table, "layout 3", map[string]*nft.Hook{
		network.Hooked: {Type: "filter", Number: unix.NF_INET_PRE_ROUTING, Priority: priority},
		chainInput:     {Type: "filter", Number: unix.NF_INET_LOCAL_IN, Priority: priority}}, sets...)
}()

// frame is the facts that every part but routes needs.
var frame = append(declared.Frame(), declared.Chain(network.Hooked, hooked()),
	declared.Chain(chainInput, input()), declared.Chain(chainPod, pod()),
	declared.Chain(chainInside, inside()), declared.Chain(chainOuter, outer()), declared.Chain(chainInner, inner()),
	declared.Chain(chainForged, drop()), declared.Chain(chainBehind, drop()),
	declared.Chain(chainEnds, drop()))

// drop drops a packet and counts it.
func drop() [][]nft.Expr { return [][]nft.Expr{nft.Exprs(nft.Counter(), nft.Do(nft.DropIt))} }

// overProtocol goes on only if the packet is one of a transport protocol.
func overProtocol(n uint8) []nft.Expr {
	return nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{n}))
}

// hooked returns the rules for all packets that come in. Of sources that only pods and the tunnel may have, most come
// in by their devices.
func hooked() (rules [][]nft.Expr) {
	group, either := nft.Word(nil, link.PodGroup), nft.Word(nil, ^uint32(link.PodGroup^link.ReleasedGroup))
	rules = append(rules, nft.Exprs(nft.Meta(nft.MetaIIFGroup, nft.R(0)), nft.And(nft.R(0), nft.R(0), either),
		nft.Cmp(nft.Eq, nft.R(0), group), nft.Do(nft.Goto(chainPod))))
	for _, p := range protos {
		rules = append(rules, append(p.Is(), p.Address(p.Src, 0), nft.Member(p.inside, nft.R(0)),
			nft.Do(nft.Goto(chainInside))))
	}
	return rules
}

// inside drops what comes in by another device than the tunnel's, loopback or that of the node's proxy.
func inside() [][]nft.Expr {
	name := nft.Meta(nft.MetaIIFName, nft.R(0))
	by := func(device string) []nft.Expr {
		return nft.Exprs(name, nft.Cmp(nft.Eq, nft.R(0), deviceKey(device)), nft.Do(nft.Return))
	}
	return append([][]nft.Expr{nft.Exprs(name, nft.Member(setDevice, nft.R(0)), nft.Do(nft.Return)), by("lo"),
		by(model.ProxyDevice)}, drop()...)
}

// Offsets behind the beginning of a transport header.
const (
	udpDestination = 2
	vxlanVNI       = 8 + 4
	vniBytes       = 3
	frameType      = 8 + 8 + 12 // the inner frame's EtherType
	frameHeader    = 8 + 8 + 14 // the inner frame's IP header
)

// input returns the rules for packets that are for the node itself: whole datagrams, whatever fragments they came in.
func input() [][]nft.Expr {
	four := protos[0]
	return [][]nft.Expr{
		nft.Join(overProtocol(unix.IPPROTO_UDP), nft.Exprs(nft.Payload(nft.TransportHeader, udpDestination, 2, nft.R(0)),
			nft.Payload(nft.TransportHeader, vxlanVNI, vniBytes, nft.R(1)), nft.Member(setVXLAN, nft.R(0)),
			nft.Do(nft.Goto(chainOuter)))),
		nft.Join(overProtocol(unix.IPPROTO_IPIP), four.Is(), nft.Exprs(four.Address(four.Dst, 0),
			nft.Member(setIPIP, nft.R(0)), nft.Do(nft.Goto(chainOuter)))),
	}
}

// outer drops what is not from another node's end to this one's.
func outer() (rules [][]nft.Expr) {
	for _, p := range protos {
		rules = append(rules, nft.Join(p.Is(), nft.Exprs(p.Address(p.Dst, 0), nft.Member(p.own, nft.R(0)),
			p.Address(p.Src, 0), nft.Member(p.end, nft.R(0)), nft.Do(nft.Goto(chainInner)))))
	}
	return append(rules, drop()...)
}

// chunks is how many times 16 bytes a key of senders takes: 0 · end · outer source · 0.
func (p *proto) chunks() int { return (1 + 2*p.Words + 3) / 4 }

// senderKey returns the key of an end that is the sender.
func (p *proto) senderKey(end netip.Addr) []byte {
	b := make([]byte, 16*p.chunks())
	copy(b[4:], end.AsSlice())
	copy(b[4+4*p.Words:], end.AsSlice())
	return b
}

// innerSource is the register of an inner source.
const innerSource = 12

// sent goes on only if the end that the inner source leads to in a map is the outer source. The key is of constants but
// for what is put into it: see nftables.Clear.
func (p *proto) sent(behind string) (l []nft.Expr) {
	for i := range p.chunks() {
		l = append(l, nft.Clear(nft.R(4*i)))
	}
	return append(l, nft.Map(behind, nft.R(innerSource), nft.R(1)), p.Address(p.Src, 1+p.Words),
		nft.Member(p.sender, nft.R(0)))
}

// encapsulated is a family of packets in a tunnel between ends of another.
type encapsulated struct {
	outer, inner *proto
	behind       string
	source       []nft.Expr // loads the inner source; goes on only if the packet carries one of the family
}

// allEncapsulated returns all.
func allEncapsulated() (l []encapsulated) {
	for _, p := range protos {
		for i, in := range protos {
			kind := [][]byte{{0x08, 0x00}, {0x86, 0xdd}}[i] // ETH_P_IP, ETH_P_IPV6
			l = append(l, encapsulated{p, in, p.behind[i], nft.Join(p.Is(), overProtocol(unix.IPPROTO_UDP), nft.Exprs(
				nft.Payload(nft.TransportHeader, frameType, 2, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), kind),
				nft.Payload(nft.TransportHeader, frameHeader+in.Src, uint32(4*in.Words), nft.R(innerSource))))})
		}
	}
	// not by a comparison: the nft command (seen with 1.0.6) stops dead on what follows it, as of no transport protocol
	four, ipip := protos[0], nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Member(setProtocol, nft.R(0)))
	return append(l, encapsulated{four, four, four.behind[0], nft.Join(four.Is(), ipip, nft.Exprs(
		nft.Payload(nft.TransportHeader, four.Src, 4, nft.R(innerSource))))})
}

// inner accepts what carries a source that is behind the end that sent it: the source leads to an end, which must be
// the sender. What has clients' sources too may carry those that lead to no end and aren't inside.
func inner() (rules [][]nft.Expr) {
	for _, c := range allEncapsulated() {
		rules = append(rules, nft.Join(c.source, c.outer.sent(c.behind), nft.Exprs(nft.Do(nft.Return))))
	}
	for _, c := range allEncapsulated() {
		forged := nft.Exprs(nft.Do(nft.Goto(chainBehind)))
		rules = append(rules, nft.Join(c.source, nft.Exprs(nft.Map(c.behind, nft.R(innerSource), nft.R(0))), forged),
			nft.Join(c.source, nft.Exprs(nft.Member(c.inner.inside, nft.R(innerSource))), forged),
			nft.Join(c.source, nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Member(setAny, nft.R(0)),
				nft.Do(nft.Return))))
	}
	return append(rules, nft.Exprs(nft.Do(nft.Goto(chainBehind))))
}

// deviceWords is how many registers a device's name takes.
const deviceWords = 4

// overlay returns the rules that drop what is for the end of a tunnel. A fragment other than the first has no port, and
// none of the others comes together without the first.
func overlay() (rules [][]nft.Expr) {
	for _, p := range protos {
		end := nft.Exprs(p.Address(p.Dst, 0), nft.Member(p.end, nft.R(0)), nft.Do(nft.Goto(chainEnds)))
		rules = append(rules, nft.Join(overProtocol(unix.IPPROTO_UDP), p.Is(), nft.Exprs(
			nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Payload(nft.TransportHeader, udpDestination, 2, nft.R(1)),
			nft.Member(setPort, nft.R(0))), end))
		if p.Number == unix.NFPROTO_IPV4 {
			rules = append(rules, nft.Join(p.Is(), nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(0)),
				nft.Member(setProtocol, nft.R(0))), end))
		}
	}
	return rules
}

// pod returns the rules for packets from pods.
func pod() (rules [][]nft.Expr) {
	rules = overlay()
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
		if !v.Device.IPVLAN() { // else packets of pods come in by devices that others use too
			for _, r := range v.Ranges {
				l = append(l, within(protoOf(r.Addr()).inside, nil, r))
			}
		}
		if v.Tunnel != nil {
			l = append(l, ownEnd(v.Tunnel)...)
		}
	case *model.Route:
		if v.Hop == model.Tunneled && !v.OnLink && !v.PodsOnly { // a node itself sends by the uplink, too
			l = append(l, within(protoOf(v.To.Addr()).inside, nil, v.To))
		}
		l = append(l, farEnd(v)...)
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

// ownEnd returns the facts of this node's end of a tunnel.
func ownEnd(t *model.Tunnel) []network.TableFact {
	device := deviceKey(route.DeviceOf(t.Kind))
	l := []network.TableFact{declared.Element(setDevice, device, ""),
		declared.Element(protoOf(t.Local).own, t.Local.AsSlice(), "")}
	protocol := []byte{unix.IPPROTO_UDP, 0, 0, 0}
	if t.Kind == model.IPIP {
		protocol[0] = unix.IPPROTO_IPIP
		l = append(l, declared.Element(setIPIP, t.Local.AsSlice(), ""), declared.Element(setProtocol, protocol, ""))
	} else {
		port := nft.PortWord(nil, t.Port)
		l = append(l, declared.Element(setPort, slices.Concat(protocol, port), ""),
			declared.Element(setVXLAN, binary.BigEndian.AppendUint32(port, t.VNI<<8), ""))
	}
	if t.AnySource {
		l = append(l, declared.Element(setAny, protocol, ""))
	}
	return l
}

// farEnd returns the facts of what another node sends through the tunnel: its pods' packets, and its own.
func farEnd(v *model.Route) (l []network.TableFact) {
	if !v.End.IsValid() {
		return nil
	}
	p := protoOf(v.End)
	behind := []netip.Prefix{v.To, netip.PrefixFrom(v.End, v.End.BitLen())}
	if v.Internal.IsValid() {
		behind = append(behind, netip.PrefixFrom(v.Internal, v.Internal.BitLen()))
	}
	l = append(l, declared.Element(p.end, v.End.AsSlice(), ""), declared.Element(p.sender, p.senderKey(v.End), ""))
	for _, r := range behind {
		f := within(table.OfFamily(p.behind[:], r.Addr()), nil, r)
		f.Value = string(v.End.AsSlice())
		l = append(l, f)
	}
	return l
}

// within returns the fact of a range in a set, behind the same bytes.
func within(set string, before []byte, r netip.Prefix) network.TableFact {
	return declared.Element(set, table.SourceRange(before, r), "")
}

// Dropped returns how many packets were dropped by reason, since the plane's chains were written: "forged_source" of a
// pod, "inside_source" of pods or of what is behind the tunnel, by another device, "tunnel_peer" of what is for the
// tunnel's end and comes from no other end or to another address, "tunnel_source" of what such a packet carried, and
// "pod_overlay" from a pod to a tunnel's end.
func (p *Plane) Dropped() (map[string]uint64, error) {
	n, err := p.Counters()
	return map[string]uint64{"forged_source": n[chainForged], "inside_source": n[chainInside],
		"tunnel_peer": n[chainOuter], "tunnel_source": n[chainBehind], "pod_overlay": n[chainEnds]}, err
}
