package nftables

import (
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// frontendKey loads stage · address · protocol · port of the packet from register r on; for node ports the address is 0.
func (f *proto) frontendKey(r int, stage uint32, any bool) []nft.Expr {
	return nft.Join(nft.Exprs(nft.Load(nft.R(r), nft.Word(nil, stage))), f.placeKey(r+1, any))
}

// placeKey loads address · protocol · port.
func (f *proto) placeKey(r int, any bool) []nft.Expr {
	addr := nft.Payload(nft.NetworkHeader, f.dst, uint32(4*f.words), nft.R(r))
	if any {
		addr = nft.Load(nft.R(r), f.anyAddress.AsSlice())
	}
	return nft.Exprs(addr, nft.Meta(nft.MetaL4Proto, nft.R(r+f.words)), nft.Payload(nft.TransportHeader, 2, 2, nft.R(r+f.words+1)))
}

// client loads the source address.
func (f *proto) client(r int) nft.Expr {
	return nft.Payload(nft.NetworkHeader, f.src, uint32(4*f.words), nft.R(r))
}

// Where rules keep things. A key made of what a map gave begins at zero.
const (
	zero  = 0 // four registers of 0; what maps give goes behind the first
	place = 4 // stage · address · protocol · port
)

// follow goes on with what the frontend's element of a stage says.
func (f *proto) follow(stage uint32, any bool, set string) []nft.Expr {
	return nft.Join(nft.Exprs(nft.Clear(nft.R(zero))), f.frontendKey(place, stage, any), nft.Exprs(
		nft.Map("service"+f.name, nft.R(place), nft.R(zero+1)),
		nft.VMap(set+f.name, nft.R(zero))))
}

// drawing picks one of the pool's backends.
func (n next) drawing(f *proto) []nft.Expr {
	const number, pool, backend = zero + 1, zero + 2, place
	return nft.Join(nft.Exprs(nft.Clear(nft.R(zero))), f.frontendKey(place, n.stage(), n.any), nft.Exprs(
		nft.Map("pool"+f.name, nft.R(place), nft.R(pool))), n.number(f, number, place), nft.Exprs(
		nft.Map(f.endpoint, nft.R(zero), nft.R(backend)),
		nft.DNAT(f.number, nft.R(backend), nft.R(backend+f.words))))
}

// remembering gives the rules of a pool with affinity: a client that is known and whose backend is still a member goes
// there; another draws one and is remembered; where the set of clients is full, the client draws without.
func (n next) remembering(f *proto) [][]nft.Expr {
	// client · its pool, the key of affinity; then 0 · number · pool, the key of drawn and member, its first half also
	// affinity's value; then the frontend's place, of which the first register is soon needed again; then a backend.
	const client = 0
	clientPool, zero := f.words, f.words+2
	number, pool, place, backend := zero+1, zero+2, zero+3, zero+4
	affinity, timeout := "affinity"+f.name, time.Duration(n.seconds)*time.Second

	find := nft.Join(nft.Exprs(nft.Clear(nft.R(zero))), f.frontendKey(place, n.stage(), n.any), nft.Exprs(
		nft.Payload(nft.NetworkHeader, f.src, uint32(4*f.words+8), nft.R(client)), // longer than the address, for clear's reason
		nft.Map("pool"+f.name, nft.R(place), nft.R(clientPool))))
	known := nft.Join(find, nft.Exprs(
		nft.Map(affinity, nft.R(client), nft.R(place)),
		nft.Copy(nft.R(place+1), nft.R(number), 4),
		nft.Copy(nft.R(clientPool), nft.R(pool), 8)))
	drawn := nft.Join(find, nft.Exprs(
		nft.Copy(nft.R(clientPool), nft.R(pool), 8)), n.number(f, number, backend), nft.Exprs(
		nft.Map(f.drawn, nft.R(zero), nft.R(number))))
	choose := nft.Map(f.member, nft.R(zero), nft.R(backend))
	remember := nft.Remember(affinity, nft.R(client), nft.R(zero), timeout)
	send := nft.DNAT(f.number, nft.R(backend), nft.R(backend+f.words))
	return [][]nft.Expr{
		nft.Join(known, nft.Exprs(choose, remember, send)),
		nft.Join(drawn, nft.Exprs(choose, nft.Forget(affinity, nft.R(client), nft.R(zero)), remember, send)),
		nft.Join(drawn, nft.Exprs(choose, send)),
	}
}

// node gives everything that does not depend on Services.
func (p *Plane) node(v *model.Node) []Fact {
	facts := []Fact{{Key: Key{Kind: KindTable, Name: Table}, Value: layout}}
	for _, s := range allSets {
		facts = append(facts, Fact{Key: Key{Kind: KindSet, Name: s.Name}, Value: s.Schema()})
	}
	for name, rules := range baseChains {
		facts = append(facts, p.chain(name, rules))
	}
	facts = append(facts, p.chain("refuse", refuse()))
	for _, f := range protos {
		facts = append(facts, p.family(f, v)...)
	}
	for _, r := range v.ServiceRanges {
		facts = append(facts, unallocated(r))
	}
	if v.Localhost {
		facts = append(facts, p.chain("localhost", guard()), Fact{Key: Key{Kind: KindSysctl, Name: routeLocalnet}, Value: "1"})
	}
	return facts
}

// family gives a family's chains that every frontend may need.
func (p *Plane) family(f *proto, v *model.Node) []Fact {
	facts := []Fact{
		p.chain("enter"+f.name, f.enter()),
		p.chain("nodeports"+f.name, f.nodePorts(v)),
		p.chain("leave"+f.name, f.leave(v)),
	}
	for _, any := range []bool{false, true} {
		facts = append(facts,
			p.chain(next{does: restricts, any: any}.chain(f), f.restricted(any)),
			p.chain(next{does: splits, any: any}.chain(f), f.split(v, any)))
	}
	for m := model.Origins(0); m <= model.AllOrigins; m++ {
		name := hideChain(f, m)
		facts = append(facts, p.chain(name, f.hide(v, m)), element("hide"+f.name, nft.Word(nft.Word(nil, 0), uint32(m)), nft.Goto(name).String()))
	}
	return facts
}

// enter finds a packet's frontend: by its address, else, at an address of this host, among the node ports. A packet that
// matches none is rejected at a ClusterIP, and dropped at an address that only Services have.
func (f *proto) enter() [][]nft.Expr {
	address := nft.Payload(nft.NetworkHeader, f.dst, uint32(4*f.words), nft.R(place+1))
	anyPort := nft.Load(nft.R(place+1+f.words), make([]byte, 8))
	return [][]nft.Expr{
		f.follow(stageEntry, false, "entry"),
		append(nft.FibLocal(false, nft.R(0)), nft.Do(nft.Goto("nodeports"+f.name))),
		nft.Join(nft.Exprs(nft.Clear(nft.R(zero)), nft.Load(nft.R(place), nft.Word(nil, stageUnmatched)), address, anyPort,
			nft.Map("service"+f.name, nft.R(place), nft.R(zero+1)), nft.VMap("entry"+f.name, nft.R(zero)))),
		nft.Exprs(nft.Load(nft.R(place), nft.Word(nil, 0)), address,
			nft.Member("unallocated"+f.name, nft.R(place)), nft.Do(nft.DropIt)),
	}
}

// nodePorts lets the addresses that take node ports find one.
func (f *proto) nodePorts(v *model.Node) (rules [][]nft.Expr) {
	load := nft.Payload(nft.NetworkHeader, f.dst, uint32(4*f.words), nft.R(0))
	for _, r := range f.within(load, v.NodePorts) {
		rules = append(rules, append(r, f.follow(stageEntry, true, "entry")...))
	}
	return rules
}

// within gives, for each of the family's ranges, a rule's beginning that goes on only if what load puts into the first
// registers is in the range.
func (f *proto) within(load nft.Expr, ranges []model.Range) (begins [][]nft.Expr) {
	for _, r := range ranges {
		if protoOf(r.First) == f {
			begins = append(begins, nft.Exprs(load, nft.Cmp(nft.Gte, nft.R(0), r.First.AsSlice()), nft.Cmp(nft.Lte, nft.R(0), r.Last.AsSlice())))
		}
	}
	return begins
}

// restricted lets clients of permitted sources go on and drops the others.
func (f *proto) restricted(any bool) [][]nft.Expr {
	permitted := nft.Join(f.placeKey(0, any), nft.Exprs(f.client(f.words+2), nft.Member("permitted"+f.name, nft.R(0))))
	return [][]nft.Expr{
		append(permitted, f.follow(stageAdmitted, any, "admitted")...),
		nft.Exprs(nft.Do(nft.DropIt)),
	}
}

// split sends clients on this node and pods to the inside, others to the outside.
func (f *proto) split(v *model.Node, any bool) [][]nft.Expr {
	inside := f.follow(stageInside, any, "side")
	rules := [][]nft.Expr{append(nft.FibLocal(true, nft.R(0)), inside...)}
	for _, r := range f.fromPods(v) {
		rules = append(rules, append(r, inside...))
	}
	return append(rules, f.follow(stageOutside, any, "side"), nft.Exprs(nft.Do(nft.DropIt)))
}

// fromPods returns, for each of the pods' ranges, or for their interfaces, the beginning of a rule that matches what
// comes from there.
func (f *proto) fromPods(v *model.Node) (begins [][]nft.Expr) {
	if i := v.PodInterfaces; i.Name != "" {
		begins = append(begins, nft.Exprs(nft.Meta(nft.MetaIIFName, nft.R(0)),
			nft.Cmp(nft.Eq, nft.R(0), nft.InterfaceName(i.Name, i.Prefix))))
	}
	for _, r := range v.Pods {
		if protoOf(r.Addr()) != f {
			continue
		}
		begin := nft.Exprs(f.client(0))
		if r.Bits() < r.Addr().BitLen() {
			begin = append(begin, nft.And(nft.R(0), nft.R(0), mask(r)))
		}
		begins = append(begins, append(begin, nft.Cmp(nft.Eq, nft.R(0), r.Masked().Addr().AsSlice())))
	}
	return begins
}

// mask gives a prefix's netmask.
func mask(r netip.Prefix) []byte {
	m := make([]byte, r.Addr().BitLen()/8)
	for i := range r.Bits() {
		m[i/8] |= 0x80 >> (i % 8)
	}
	return m
}

// leave finds the frontend of a translated connection again, by its original destination, to hide its source.
func (f *proto) leave(v *model.Node) [][]nft.Expr {
	original := func(addr nft.Expr) []nft.Expr {
		return nft.Exprs(nft.Clear(nft.R(zero)), nft.Load(nft.R(place), nft.Word(nil, stageEntry)), addr, nft.Meta(nft.MetaL4Proto, nft.R(place+1+f.words)),
			nft.CtOriginal(nft.CtProtoDst, nft.R(place+2+f.words)), nft.Map("source"+f.name, nft.R(place), nft.R(zero+1)), nft.VMap("hide"+f.name, nft.R(zero)))
	}
	rules := [][]nft.Expr{original(nft.CtOriginal(f.ctDst, nft.R(place+1)))}
	for _, r := range f.within(nft.CtOriginal(f.ctDst, nft.R(0)), v.NodePorts) {
		rules = append(rules, append(r, original(nft.Load(nft.R(place+1), f.anyAddress.AsSlice()))...))
	}
	return rules
}

// hideChain names the chain that hides the sources of origins, such as hide4-node-outside or hide4-none.
func hideChain(f *proto, m model.Origins) string {
	return "hide" + f.name + "-" + strings.ReplaceAll(m.String(), ",", "-")
}

// hide masquerades packets of the origins in m, and those that a backend on this node sends to itself.
func (f *proto) hide(v *model.Node, m model.Origins) [][]nft.Expr {
	decide := func(o model.Origin) nft.Expr {
		if m.Has(o) {
			return nft.Masquerade()
		}
		return nft.Do(nft.Return)
	}
	rules := [][]nft.Expr{
		append(nft.FibLocal(true, nft.R(0)), decide(model.FromNode)),
		nft.Exprs(f.client(0), nft.Payload(nft.NetworkHeader, f.dst, uint32(4*f.words), nft.R(f.words)), nft.Member("hairpin"+f.name, nft.R(0)), nft.Masquerade()),
	}
	for _, r := range f.fromPods(v) {
		rules = append(rules, append(r, decide(model.FromPod)))
	}
	return append(rules, nft.Exprs(decide(model.FromOutside)))
}

// refuse answers that nothing is there.
func refuse() [][]nft.Expr {
	return [][]nft.Expr{
		nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{unix.IPPROTO_TCP}), nft.RejectTCP()),
		nft.Exprs(nft.RejectPort()),
	}
}

// guard drops packets to IPv4 loopback addresses that come in through any other device than lo. Without it, letting
// packets with such addresses out for node ports on localhost would let others' in (CVE-2020-8558).
func guard() [][]nft.Expr {
	const loopback = unix.ARPHRD_LOOPBACK
	return [][]nft.Expr{nft.Exprs(
		nft.Meta(nft.MetaNFProto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{unix.NFPROTO_IPV4}),
		nft.Meta(nft.MetaIIFType, nft.R(0)), nft.Cmp(nft.Neq, nft.R(0), []byte{loopback & 0xff, loopback >> 8}),
		nft.Payload(nft.NetworkHeader, protos[0].dst, 1, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{127}),
		nft.Do(nft.DropIt))}
}

// hooks tells which chains see packets by themselves.
var hooks = map[string]*nft.Hook{
	"prerouting":  {Type: "nat", Number: unix.NF_INET_PRE_ROUTING, Priority: -100},
	"output":      {Type: "nat", Number: unix.NF_INET_LOCAL_OUT, Priority: -100},
	"postrouting": {Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: 100},
	"localhost":   {Type: "filter", Number: unix.NF_INET_PRE_ROUTING, Priority: -300},
}

// baseChains are the chains that send packets to their family's.
var baseChains = func() map[string][][]nft.Expr {
	var in, out [][]nft.Expr
	for _, f := range protos {
		family := nft.Exprs(nft.Meta(nft.MetaNFProto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{f.number}))
		dnat := nft.Word(nil, nft.StatusDNAT)
		translated := nft.Exprs(nft.Ct(nft.CtStatus, nft.R(0)), nft.And(nft.R(0), nft.R(0), dnat), nft.Cmp(nft.Neq, nft.R(0), make([]byte, 4)))
		in = append(in, nft.Join(family, nft.Exprs(nft.Do(nft.Goto("enter"+f.name)))))
		out = append(out, nft.Join(translated, family, nft.Exprs(nft.Do(nft.Goto("leave"+f.name)))))
	}
	return map[string][][]nft.Expr{"prerouting": in, "output": in, "postrouting": out}
}()
