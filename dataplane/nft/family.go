package nft

import (
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Family is an IP family as nf_tables and packet headers know it.
type Family struct {
	Name         string // 4 or 6
	Number       uint8  // NFPROTO_*
	Words        int    // registers that an address takes
	Src, Dst     uint32 // offsets in the header
	Type         nft.Type
	CtSrc, CtDst nft.CtKey
	Any          netip.Addr
}

// The families.
var (
	IPv4 = &Family{"4", unix.NFPROTO_IPV4, 1, 12, 16, nft.IPv4, nft.CtSrcIP, nft.CtDstIP, netip.IPv4Unspecified()}
	IPv6 = &Family{"6", unix.NFPROTO_IPV6, 4, 8, 24, nft.IPv6, nft.CtSrcIP6, nft.CtDstIP6, netip.IPv6Unspecified()}
)

// OfFamily returns, of what there is for each family, IPv4 first, that of an address.
func OfFamily[T any](families []T, a netip.Addr) T {
	if a.Is4() {
		return families[0]
	}
	return families[1]
}

// ByName returns sets by their names.
func ByName(sets []nft.Set) map[string]nft.Set {
	m := map[string]nft.Set{}
	for _, s := range sets {
		m[s.Name] = s
	}
	return m
}

// Has reports whether an address is of the family.
func (f *Family) Has(a netip.Addr) bool { return a.BitLen() == f.Any.BitLen() }

// Is goes on only if the packet is of the family; it uses the first register.
func (f *Family) Is() []nft.Expr {
	return nft.Exprs(nft.Meta(nft.MetaNFProto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{f.Number}))
}

// Address loads the packet's address at an offset in its header, Src or Dst, into registers from r on.
func (f *Family) Address(offset uint32, r int) nft.Expr {
	return nft.Payload(nft.NetworkHeader, offset, uint32(4*f.Words), nft.R(r))
}

// Within returns, for each of the family's ranges, a rule that does then only if what load puts into the first
// registers is in the range.
func (f *Family) Within(load nft.Expr, ranges []model.Range, then ...[]nft.Expr) (rules [][]nft.Expr) {
	for _, r := range ranges {
		if f.Has(r.First) {
			first, last := nft.Cmp(nft.Gte, nft.R(0), r.First.AsSlice()), nft.Cmp(nft.Lte, nft.R(0), r.Last.AsSlice())
			rules = append(rules, append(nft.Exprs(load, first, last), nft.Join(then...)...))
		}
	}
	return rules
}

// Pods returns, for each of the pods' ranges of the family, and for their interfaces, what matches packets that come
// from there (nftables.Eq) or don't (nftables.Neq); it uses registers from tmp on.
func (f *Family) Pods(n *model.Node) (l []func(op nft.CmpOp, tmp int) []nft.Expr) {
	if i := n.PodInterfaces; i.Name != "" {
		l = append(l, func(op nft.CmpOp, tmp int) []nft.Expr {
			name := nft.InterfaceName(i.Name, i.Prefix)
			return nft.Exprs(nft.Meta(nft.MetaIIFName, nft.R(tmp)), nft.Cmp(op, nft.R(tmp), name))
		})
	}
	for _, r := range n.Pods {
		if f.Has(r.Addr()) {
			l = append(l, func(op nft.CmpOp, tmp int) []nft.Expr { return f.source(op, r, tmp) })
		}
	}
	return l
}

// source goes on only if the packet's source is (nftables.Eq) or is not (nftables.Neq) in the prefix.
func (f *Family) source(op nft.CmpOp, r netip.Prefix, tmp int) []nft.Expr {
	e := nft.Exprs(f.Address(f.Src, tmp))
	if r.Bits() < r.Addr().BitLen() {
		mask := make([]byte, r.Addr().BitLen()/8)
		for i := range r.Bits() {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		e = append(e, nft.And(nft.R(tmp), nft.R(tmp), mask))
	}
	return append(e, nft.Cmp(op, nft.R(tmp), r.Masked().Addr().AsSlice()))
}

// Last returns the last address of a prefix.
func Last(r netip.Prefix) []byte {
	last := r.Masked().Addr().AsSlice()
	for i := r.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return last
}

// SourceRange returns the element, first key and last, of the sources in a prefix behind the same bytes.
func SourceRange(before []byte, r netip.Prefix) []byte {
	return slices.Concat(before, r.Masked().Addr().AsSlice(), before, Last(r))
}

// EntryKey appends address · protocol · port of an entry as registers hold them.
func EntryKey(b []byte, e model.Entry) []byte {
	b = append(b, e.Addr.AsSlice()...)
	b = append(b, byte(e.Protocol), 0, 0, 0)
	return nft.PortWord(b, e.Port)
}

// OverTCP goes on only if the packet is one of TCP; it uses the first register.
func OverTCP() []nft.Expr {
	return nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{unix.IPPROTO_TCP}))
}

// Reject returns a chain that answers that nothing is there.
func Reject() [][]nft.Expr {
	return [][]nft.Expr{nft.Join(OverTCP(), nft.Exprs(nft.RejectTCP())), nft.Exprs(nft.RejectPort())}
}

// MasqueradeChain names the chain that masquerades packets of origins, such as hide4-node-outside or hide4-none.
func (f *Family) MasqueradeChain(m model.Origins) string {
	return "hide" + f.Name + "-" + strings.ReplaceAll(m.String(), ",", "-")
}

// Masquerade returns a chain that masquerades packets of the origins in m, and those that a backend on this node sends
// to itself: of which source and destination are in a set.
func (f *Family) Masquerade(n *model.Node, m model.Origins, toItself string) [][]nft.Expr {
	decide := func(o model.Origin) nft.Expr {
		if m.Has(o) {
			return nft.Masquerade()
		}
		return nft.Do(nft.Return)
	}
	rules := [][]nft.Expr{
		append(nft.FibLocal(true, nft.R(0)), decide(model.FromNode)),
		nft.Exprs(f.Address(f.Src, 0), f.Address(f.Dst, f.Words), nft.Member(toItself, nft.R(0)), nft.Masquerade()),
	}
	for _, pods := range f.Pods(n) {
		rules = append(rules, append(pods(nft.Eq, 0), decide(model.FromPod)))
	}
	return append(rules, nft.Exprs(decide(model.FromExternal)))
}
