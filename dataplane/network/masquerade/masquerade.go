package masquerade

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/network"
	"fairlead.dev/fairlead/dataplane/network/route"
	table "fairlead.dev/fairlead/dataplane/nft"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Table is the name of the plane's table.
const Table = "fairlead-masquerade"

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

const (
	chainLeave = "leave"
	chainNodes = network.Hooked + "-nodes"
	chainSelf  = network.Hooked + "-self"
)

// Names of sets, without the family.
const (
	setOwn     = "own"
	setCluster = "cluster"
	setExcept  = "except"
	setNode    = "node"
	setSource  = "source" // of what this node sends through the tunnel
)

var families = []*table.Family{table.IPv4, table.IPv6}

// priority is behind that of Services' chain, whatever engine writes it; nodesPriority is behind the translation of
// destinations, and selfPriority before the masquerading of Services.
const (
	priority      = 110
	nodesPriority = -95
	selfPriority  = 95
)

var declared = func() *table.Table[network.TableKey] {
	var sets []nft.Set
	for _, f := range families {
		for _, name := range []string{setOwn, setCluster, setExcept} {
			sets = append(sets, nft.Set{Name: name + f.Name, Key: []nft.Type{f.Type}, Interval: true})
		}
		for _, name := range []string{setNode, setSource} {
			sets = append(sets, nft.Set{Name: name + f.Name, Key: []nft.Type{f.Type}})
		}
	}
	return network.Declare(Table, "layout 3", map[string]*nft.Hook{
		chainSelf:      {Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: selfPriority},
		network.Hooked: {Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: priority},
		chainNodes:     {Type: "filter", Number: unix.NF_INET_PRE_ROUTING, Priority: nodesPriority}}, sets...)
}()

// chains is the facts of the chains.
var chains = func() []network.TableFact {
	proxy := nft.InterfaceName(model.ProxyDevice, false)
	hooked := [][]nft.Expr{nft.Exprs(nft.Meta(nft.MetaOIFName, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), proxy),
		nft.Do(nft.Return))}
	var leave [][]nft.Expr
	for _, f := range families {
		hooked = append(hooked, append(f.Is(), f.Address(f.Src, 0), nft.Member(setOwn+f.Name, nft.R(0)),
			nft.Do(nft.Goto(chainLeave))))
		for _, name := range []string{setOwn, setCluster, setExcept} {
			leave = append(leave, append(f.Is(), f.Address(f.Dst, 0), nft.Member(name+f.Name, nft.R(0)), nft.Do(nft.Return)))
		}
	}
	leave = append(leave, nft.Exprs(nft.Masquerade()))
	return []network.TableFact{declared.Chain(network.Hooked, hooked), declared.Chain(chainLeave, leave)}
}()

// nodes is the fact of the chain that has what other nodes behind the tunnel send to pods by the underlay, translated
// here, checked as such, and replies go back by it (network.UnderlayMark).
var nodes = func() network.TableFact {
	var rules [][]nft.Expr
	for _, f := range families {
		for _, c := range []struct {
			node, pod uint32
			direction byte
		}{{f.Src, f.Dst, 0}, {f.Dst, f.Src, nft.DirectionReply}} {
			rules = append(rules, nft.Join(f.Is(), nft.Exprs(
				f.Address(c.node, 0), nft.Member(setNode+f.Name, nft.R(0)),
				f.Address(c.pod, 0), nft.Member(setOwn+f.Name, nft.R(0)),
				nft.Ct(nft.CtDirection, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{c.direction}),
				nft.Ct(nft.CtStatus, nft.R(0)), nft.And(nft.R(0), nft.R(0), nft.Word(nil, nft.StatusDNAT)),
				nft.Cmp(nft.Neq, nft.R(0), make([]byte, 4)),
				nft.Meta(nft.MetaMark, nft.R(0)), nft.Or(nft.R(0), nft.R(0), nft.Word(nil, network.UnderlayMark)),
				nft.SetMark(nft.R(0)))))
		}
	}
	return declared.Chain(chainNodes, rules)
}()

// self is the fact of the chain that has what this node itself sends through the tunnel keep its source: Services'
// modes masquerade what they translate, with the address of the device that it leaves by.
var self = func() network.TableFact {
	var rules [][]nft.Expr
	for _, kind := range []model.TunnelKind{model.VXLAN, model.IPIP} {
		for _, f := range families {
			rules = append(rules, nft.Join(
				nft.Exprs(nft.Meta(nft.MetaOIFName, nft.R(0)),
					nft.Cmp(nft.Eq, nft.R(0), nft.InterfaceName(route.DeviceOf(kind), false))),
				f.Is(), nft.Exprs(f.Address(f.Src, 0), nft.Member(setSource+f.Name, nft.R(0)), nft.SNAT(f.Number, nft.R(0)))))
		}
	}
	return declared.Chain(chainSelf, rules)
}()

// Render implements dataplane.Plane.
func (*Plane) Render(part model.NetworkPart) (l []network.TableFact) {
	switch v := part.(type) {
	case *model.Network:
		l = append(l, declared.Frame()...)
		l = append(l, within(setOwn, v.Ranges)...)
		if m := v.Masquerade; m != nil {
			l = append(append(l, chains...), within(setExcept, m.Except)...)
		}
		if t := v.Tunnel; t != nil {
			if l = append(l, self); t.Pods != nil {
				l = append(l, nodes)
			}
		}
	case *model.Route:
		l = append(l, within(setCluster, []netip.Prefix{v.To})...)
		if v.Hop == model.Direct { // the node is on the link, and sees pods' own addresses
			l = append(l, within(setCluster, []netip.Prefix{netip.PrefixFrom(v.Via, v.Via.BitLen())})...)
		}
		if a := v.To.Addr(); v.PodsOnly {
			l = append(l, declared.Element(setNode+familyOf(a).Name, a.AsSlice(), ""))
		}
		if a := v.Source; v.Hop == model.Tunneled && a.IsValid() {
			l = append(l, declared.Element(setSource+familyOf(a).Name, a.AsSlice(), ""))
		}
	}
	return l
}

// within returns the facts of ranges in a set.
func within(set string, ranges []netip.Prefix) (l []network.TableFact) {
	for _, r := range ranges {
		l = append(l, declared.Element(set+familyOf(r.Addr()).Name, table.SourceRange(nil, r), ""))
	}
	return l
}

func familyOf(a netip.Addr) *table.Family {
	if a.Is6() {
		return table.IPv6
	}
	return table.IPv4
}
