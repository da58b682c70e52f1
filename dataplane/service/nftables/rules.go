package nftables

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"

	table "fairlead.dev/fairlead/dataplane/nft"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// frontendKey loads stage · address · protocol · port of the packet from register r on; for node ports the address is
// 0.
func (f *proto) frontendKey(r int, stage uint32, any bool) []nft.Expr {
	return nft.Join(nft.Exprs(nft.Load(nft.R(r), nft.Word(nil, stage))), f.loadMatchKey(r+1, any))
}

// loadMatchKey loads address · protocol · port.
func (f *proto) loadMatchKey(r int, any bool) []nft.Expr {
	addr := f.Address(f.Dst, r)
	if any {
		addr = nft.Load(nft.R(r), f.Any.AsSlice())
	}
	return nft.Exprs(addr, nft.Meta(nft.MetaL4Proto, nft.R(r+f.Words)),
		nft.Payload(nft.TransportHeader, 2, 2, nft.R(r+f.Words+1)))
}

// Where rules keep things. A key made of what a map gave begins at zero.
const (
	zero     = 0 // four registers of 0; what maps give goes behind the first
	matchKey = 4 // stage · address · protocol · port
)

// follow goes on with what the frontend's element of a stage says.
func (f *proto) follow(stage uint32, any bool, set string) []nft.Expr {
	return nft.Join(nft.Exprs(nft.Clear(nft.R(zero))), f.frontendKey(matchKey, stage, any), nft.Exprs(
		nft.Map("service"+f.Name, nft.R(matchKey), nft.R(zero+1)),
		nft.VMap(set+f.Name, nft.R(zero))))
}

// selecting picks one of the pool's backends.
func (n next) selecting(f *proto) []nft.Expr {
	const number, pool, backend = zero + 1, zero + 2, matchKey
	return nft.Join(nft.Exprs(nft.Clear(nft.R(zero))), f.frontendKey(matchKey, n.stage(), n.any), nft.Exprs(
		nft.Map("pool"+f.Name, nft.R(matchKey), nft.R(pool))), n.number(f, number, matchKey), nft.Exprs(
		nft.Map(f.endpoint, nft.R(zero), nft.R(backend)),
		nft.DNAT(f.Number, nft.R(backend), nft.R(backend+f.Words))))
}

// remembering returns the rules of a pool with affinity: a client that is known and whose backend is still a member
// goes there; another draws one and is remembered; where the set of clients is full, the client draws without.
func (n next) remembering(f *proto) [][]nft.Expr {
	// client · its pool, the key of affinity; then 0 · number · pool, the key of drawn and member, its first half also
	// affinity's value; then the frontend's place, of which the first register is soon needed again; then a backend.
	const client = 0
	clientPool, zero := f.Words, f.Words+2
	number, pool, matchKey, backend := zero+1, zero+2, zero+3, zero+4
	affinity, timeout := "affinity"+f.Name, time.Duration(n.seconds)*time.Second

	find := nft.Join(nft.Exprs(nft.Clear(nft.R(zero))), f.frontendKey(matchKey, n.stage(), n.any), nft.Exprs(
		// longer than the address, for clear's reason
		nft.Payload(nft.NetworkHeader, f.Src, uint32(4*f.Words+8), nft.R(client)),
		nft.Map("pool"+f.Name, nft.R(matchKey), nft.R(clientPool))))
	known := nft.Join(find, nft.Exprs(
		nft.Map(affinity, nft.R(client), nft.R(matchKey)),
		nft.Copy(nft.R(matchKey+1), nft.R(number), 4),
		nft.Copy(nft.R(clientPool), nft.R(pool), 8)))
	selected := nft.Join(find, nft.Exprs(
		nft.Copy(nft.R(clientPool), nft.R(pool), 8)), n.number(f, number, backend), nft.Exprs(
		nft.Map(f.selected, nft.R(zero), nft.R(number))))
	choose := nft.Map(f.member, nft.R(zero), nft.R(backend))
	remember := nft.Remember(affinity, nft.R(client), nft.R(zero), timeout)
	send := nft.DNAT(f.Number, nft.R(backend), nft.R(backend+f.Words))
	return [][]nft.Expr{
		nft.Join(known, nft.Exprs(choose, remember, send)),
		nft.Join(selected, nft.Exprs(choose, nft.Forget(affinity, nft.R(client), nft.R(zero)), remember, send)),
		nft.Join(selected, nft.Exprs(choose, send)),
	}
}

// node returns everything that does not depend on Services.
func (p *Plane) node(v *model.ServiceNode) []Fact {
	facts := declared.Frame()
	for name, rules := range baseChains {
		facts = append(facts, declared.Chain(name, rules))
	}
	facts = append(facts, declared.Chain("refuse", table.Reject()))
	for _, f := range protos {
		facts = append(facts, f.chains(v)...)
	}
	for _, r := range v.ServiceRanges {
		facts = append(facts, unallocated(r))
	}
	for _, a := range v.RemoteNodePorts {
		facts = append(facts, p.unmatched(a, next{does: remotes})...)
	}
	if v.Localhost {
		facts = append(facts, declared.Chain("localhost", guard()), sysctlFact(routeLocalnet, "1"))
	}
	return facts
}

// chains returns a family's chains that every frontend may need.
func (f *proto) chains(v *model.ServiceNode) []Fact {
	facts := []Fact{
		declared.Chain("enter"+f.Name, f.enter()),
		declared.Chain("nodeports"+f.Name, f.nodePorts(v)),
		declared.Chain("leave"+f.Name, f.leave(v)),
		declared.Chain(next{does: remotes}.chain(f), f.internal(v, f.follow(stageRemote, true, "side"))),
	}
	for _, any := range []bool{false, true} {
		facts = append(facts,
			declared.Chain(next{does: restricts, any: any}.chain(f), f.restricted(any)),
			declared.Chain(next{does: splits, any: any}.chain(f), f.split(v, any)))
	}
	for m := model.Origins(0); m <= model.AllOrigins; m++ {
		name := f.MasqueradeChain(m)
		facts = append(facts, declared.Chain(name, f.Masquerade(v.Node, m, f.hairpin)),
			element("hide"+f.Name, nft.Word(nft.Word(nil, 0), uint32(m)), nft.Goto(name).String()))
	}
	return facts
}

// enter finds a packet's frontend: by its address, else, at an address of this host, among the node ports. A packet
// that matches none is rejected at a ClusterIP, and dropped at an address that only Services have.
func (f *proto) enter() [][]nft.Expr {
	address := f.Address(f.Dst, matchKey+1)
	anyPort := nft.Load(nft.R(matchKey+1+f.Words), make([]byte, 8))
	return [][]nft.Expr{
		f.follow(stageEntry, false, "entry"),
		append(nft.FibLocal(false, nft.R(0)), nft.Do(nft.Goto("nodeports"+f.Name))),
		nft.Join(nft.Exprs(nft.Clear(nft.R(zero)), nft.Load(nft.R(matchKey), nft.Word(nil, stageUnmatched)), address, anyPort,
			nft.Map("service"+f.Name, nft.R(matchKey), nft.R(zero+1)), nft.VMap("entry"+f.Name, nft.R(zero)))),
		nft.Exprs(nft.Load(nft.R(matchKey), nft.Word(nil, 0)), address,
			nft.Member("unallocated"+f.Name, nft.R(matchKey)), nft.Do(nft.DropIt)),
	}
}

// nodePorts lets the addresses that take node ports find one.
func (f *proto) nodePorts(v *model.ServiceNode) [][]nft.Expr {
	return f.Within(f.Address(f.Dst, 0), v.NodePorts, f.follow(stageEntry, true, "entry"))
}

// restricted lets clients of permitted sources go on and drops the others.
func (f *proto) restricted(any bool) [][]nft.Expr {
	allowedSources := nft.Join(f.loadMatchKey(0, any),
		nft.Exprs(f.Address(f.Src, f.Words+2), nft.Member("permitted"+f.Name, nft.R(0))))
	return [][]nft.Expr{
		append(allowedSources, f.follow(stageAdmitted, any, "admitted")...),
		nft.Exprs(nft.Do(nft.DropIt)),
	}
}

// split sends clients on this node and pods to the inside, others to the outside.
func (f *proto) split(v *model.ServiceNode, any bool) [][]nft.Expr {
	rules := f.internal(v, f.follow(stageInternal, any, "side"))
	return append(rules, f.follow(stageExternal, any, "side"), nft.Exprs(nft.Do(nft.DropIt)))
}

// internal returns the rules that do then for clients on this node and pods.
func (f *proto) internal(v *model.ServiceNode, then []nft.Expr) [][]nft.Expr {
	rules := [][]nft.Expr{append(nft.FibLocal(true, nft.R(0)), then...)}
	for _, pods := range f.Pods(v.Node) {
		rules = append(rules, append(pods(nft.Eq, 0), then...))
	}
	return rules
}

// leave finds the frontend of a translated connection again, by its original destination, to hide its source. A pod's
// is not hidden where that is another node's address.
func (f *proto) leave(v *model.ServiceNode) [][]nft.Expr {
	original := func(addr nft.Expr, but ...nft.Expr) []nft.Expr {
		find := nft.Exprs(nft.Clear(nft.R(zero)), nft.Load(nft.R(matchKey), nft.Word(nil, stageEntry)), addr,
			nft.Meta(nft.MetaL4Proto, nft.R(matchKey+1+f.Words)),
			nft.CtOriginal(nft.CtProtoDst, nft.R(matchKey+2+f.Words)), nft.Map("source"+f.Name, nft.R(matchKey), nft.R(zero+1)))
		return nft.Join(find, but, nft.Exprs(nft.VMap("hide"+f.Name, nft.R(zero))))
	}
	rules := [][]nft.Expr{original(nft.CtOriginal(f.CtDst, nft.R(matchKey+1)))}
	any := nft.Load(nft.R(matchKey+1), f.Any.AsSlice())
	if slices.ContainsFunc(v.RemoteNodePorts, f.Has) {
		notPods := nft.Word(nil, uint32(model.AllOrigins&^model.OriginsOf(model.FromPod)))
		remote := nft.Exprs(nft.Load(nft.R(matchKey), nft.Word(nil, stageUnmatched)),
			nft.CtOriginal(f.CtDst, nft.R(matchKey+1)), nft.Load(nft.R(matchKey+1+f.Words), make([]byte, 8)),
			nft.Map("service"+f.Name, nft.R(matchKey), nft.R(zero+1)))
		rules = append(rules, nft.Join(remote, original(any, nft.And(nft.R(zero+1), nft.R(zero+1), notPods))))
	}
	return append(rules, f.Within(nft.CtOriginal(f.CtDst, nft.R(0)), v.NodePorts, original(any))...)
}

// guard drops packets to IPv4 loopback addresses that come in through any other device than lo. Without it, letting
// packets with such addresses out for node ports on localhost would let others' in (CVE-2020-8558).
func guard() [][]nft.Expr {
	const loopback = unix.ARPHRD_LOOPBACK
	return [][]nft.Expr{nft.Exprs(
		nft.Meta(nft.MetaNFProto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{unix.NFPROTO_IPV4}),
		nft.Meta(nft.MetaIIFType, nft.R(0)), nft.Cmp(nft.Neq, nft.R(0), []byte{loopback & 0xff, loopback >> 8}),
		nft.Payload(nft.NetworkHeader, protos[0].Dst, 1, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{127}),
		nft.Do(nft.DropIt))}
}

// hooks reports which chains see packets by themselves.
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
		family := f.Is()
		dnat := nft.Word(nil, nft.StatusDNAT)
		translated := nft.Exprs(nft.Ct(nft.CtStatus, nft.R(0)), nft.And(nft.R(0), nft.R(0), dnat),
			nft.Cmp(nft.Neq, nft.R(0), make([]byte, 4)))
		in = append(in, nft.Join(family, nft.Exprs(nft.Do(nft.Goto("enter"+f.Name)))))
		out = append(out, nft.Join(translated, family, nft.Exprs(nft.Do(nft.Goto("leave"+f.Name)))))
	}
	return map[string][][]nft.Expr{"prerouting": in, "output": in, "postrouting": out}
}()
