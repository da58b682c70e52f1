package masquerade

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/dataplane/network"
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

const chainLeave = "leave"

// Names of sets, without the family.
const (
	setOwn     = "own"
	setCluster = "cluster"
	setExcept  = "except"
)

var families = []*table.Family{table.IPv4, table.IPv6}

// priority is behind that of Services' chain, whatever engine writes it.
const priority = 110

var declared = func() *table.Table[network.TableKey] {
	var sets []nft.Set
	for _, f := range families {
		for _, name := range []string{setOwn, setCluster, setExcept} {
			sets = append(sets, nft.Set{Name: name + f.Name, Key: []nft.Type{f.Type}, Interval: true})
		}
	}
	hook := nft.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: priority}
	return network.Declare(Table, "layout 1", hook, sets...)
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

// Render implements dataplane.Plane.
func (*Plane) Render(part model.NetworkPart) (l []network.TableFact) {
	switch v := part.(type) {
	case *model.Network:
		l = append(l, declared.Frame()...)
		l = append(l, within(setOwn, v.Ranges)...)
		if m := v.Masquerade; m != nil {
			l = append(append(l, chains...), within(setExcept, m.Except)...)
		}
	case *model.Route:
		l = append(l, within(setCluster, []netip.Prefix{v.To})...)
		if v.Hop == model.Direct { // the node is on the link, and sees pods' own addresses
			l = append(l, within(setCluster, []netip.Prefix{netip.PrefixFrom(v.Via, v.Via.BitLen())})...)
		}
	}
	return l
}

// within returns the facts of ranges in a set.
func within(set string, ranges []netip.Prefix) (l []network.TableFact) {
	for _, r := range ranges {
		f := table.IPv4
		if r.Addr().Is6() {
			f = table.IPv6
		}
		l = append(l, declared.Element(set+f.Name, table.SourceRange(nil, r), ""))
	}
	return l
}
