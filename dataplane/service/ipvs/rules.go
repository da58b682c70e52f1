package ipvs

import (
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	table "fairlead.dev/fairlead/dataplane/nft"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Where rules keep things. A key made of what a map gave begins at zero; what service gives goes behind its first
// register.
const (
	zero          = 0 // four registers of 0
	pool_         = 1 // what service gives: by which mark the pool goes,
	does_         = 2 // what is done,
	masqueradeReg = 3 // whose source is hidden
	matchKey      = 4 // stage · address · protocol · port
)

// find loads what the packet's frontend says at a stage; for node ports the address is 0. Without one the rule ends.
func (f *proto) find(stage uint32, any bool) []nft.Expr {
	addr := f.Address(f.Dst, matchKey+1)
	if any {
		addr = nft.Load(nft.R(matchKey+1), f.Any.AsSlice())
	}
	return f.findAt(stage, addr, nft.Meta(nft.MetaL4Proto, nft.R(matchKey+1+f.Words)),
		nft.Payload(nft.TransportHeader, 2, 2, nft.R(matchKey+2+f.Words)))
}

// findOriginal is find for where the connection's first packet was sent.
func (f *proto) findOriginal(any bool) []nft.Expr {
	addr := nft.CtOriginal(f.CtDst, nft.R(matchKey+1))
	if any {
		addr = nft.Load(nft.R(matchKey+1), f.Any.AsSlice())
	}
	return f.findAt(stageEntry, addr, nft.CtOriginal(nft.CtProtocol, nft.R(matchKey+1+f.Words)),
		nft.CtOriginal(nft.CtProtoDst, nft.R(matchKey+2+f.Words)))
}

func (f *proto) findAt(stage uint32, addr, protocol, port nft.Expr) []nft.Expr {
	return nft.Exprs(nft.Clear(nft.R(zero)), nft.Load(nft.R(matchKey), nft.Word(nil, stage)), addr, protocol, port,
		nft.Map("service"+f.Name, nft.R(matchKey), nft.R(pool_)))
}

// follow goes on with what the frontend's element of a stage says is to be done.
func (f *proto) follow(stage uint32, any bool) []nft.Expr {
	return f.lookup(f.find(stage, any), does_, acts[stage])
}

// lookup goes on where a map of verdicts says for a register of what the frontend says.
func (f *proto) lookup(find []nft.Expr, r int, set string) []nft.Expr {
	// Loaded so that the nft command, which knows r from nothing else, can list it.
	listed := nft.Exprs(nft.Load(nft.R(r), nft.Word(nil, 0)))
	return nft.Join(listed, find, nft.Exprs(nft.Copy(nft.R(r), nft.R(zero+1), 4), nft.VMap(set+f.Name, nft.R(zero))))
}

// end ends the base chain.
func end() nft.Expr { return nft.Do(nft.Accept) }

// node returns everything that does not depend on Services.
func (p *Plane) node(v *model.ServiceNode) []Fact {
	facts := declared.Frame()
	for name, of := range timeouts {
		if d := *of(&p.Timeouts); d > 0 {
			facts = append(facts, fact(KindTimeout, name, "", d.String()))
		}
	}
	for name, s := range sysctls {
		facts = append(facts, fact(KindSysctl, name, "", s.want))
	}
	for name, rules := range baseChains {
		facts = append(facts, declared.Chain(name, rules))
	}
	facts = append(facts, declared.Chain("refuse", table.Reject()), declared.Chain("pass", [][]nft.Expr{nft.Exprs(end())}))
	for _, r := range v.ServiceRanges {
		facts = append(facts, unallocated(r))
	}
	for _, f := range protos {
		facts = append(facts, f.chains(v)...)
		if d := deliveryOf(f); !d.rule.Six || !p.withoutIPv6 {
			facts = append(facts, fact(KindDelivery, f.Name, "", d.String()))
		}
	}
	if i := slices.IndexFunc(v.Addresses, netip.Addr.Is4); v.Localhost && i >= 0 {
		out, in := loopback(v, v.Addresses[i])
		facts = append(facts, declared.Chain("loop-out", out), declared.Chain("loop-in", in))
	}
	return facts
}

// chains returns a family's chains that every frontend may need.
func (f *proto) chains(v *model.ServiceNode) []Fact {
	facts := []Fact{
		declared.Chain("enter"+f.Name, f.enter()),
		declared.Chain("enterports"+f.Name, f.Within(f.Address(f.Dst, 0), v.NodePorts, f.follow(stageEntry, true))),
		declared.Chain("claim"+f.Name, f.claim()),
		declared.Chain("take"+f.Name, f.acquired(mark(claimed, nft.R(0)))),
		declared.Chain("linger"+f.Name, f.acquired()),
		declared.Chain("claimports"+f.Name, f.Within(f.Address(f.Dst, 0), v.NodePorts, f.acquire(true))),
		declared.Chain("assign"+f.Name, f.assign(v)),
		declared.Chain("assignports"+f.Name, f.assignPorts(v)),
		declared.Chain("leave"+f.Name, f.leave(v)),
	}
	for _, any := range []bool{false, true} {
		facts = append(facts,
			declared.Chain(deed{does: restricts, any: any}.chain(f), f.restricted(any)),
			declared.Chain(deed{does: splits, any: any}.chain(f), f.split(v, any)))
	}
	for m := model.Origins(0); m <= model.AllOrigins; m++ {
		name := f.MasqueradeChain(m)
		facts = append(facts, declared.Chain(name, f.Masquerade(v.Node, m, "hairpin"+f.Name)),
			element("hide"+f.Name, nft.Word(nft.Word(nil, 0), uint32(m)), nft.Goto(name).String()))
	}
	return facts
}

// enter finds the frontend of a packet that opens a connection: by its address, else, at an address of this host, among
// the node ports. A packet that matches none is rejected at a ClusterIP, and dropped at an address that only Services
// have.
func (f *proto) enter() [][]nft.Expr {
	zeros := func(r int) nft.Expr { return nft.Load(nft.R(r), make([]byte, 4)) }
	unmatched := f.findAt(stageUnmatched, f.Address(f.Dst, matchKey+1), zeros(matchKey+1+f.Words),
		zeros(matchKey+2+f.Words))
	return [][]nft.Expr{
		f.follow(stageEntry, false),
		append(nft.FibLocal(false, nft.R(0)), nft.Do(nft.Goto("enterports"+f.Name))),
		f.lookup(unmatched, does_, acts[stageUnmatched]),
		nft.Exprs(nft.Load(nft.R(matchKey), nft.Word(nil, 0)), f.Address(f.Dst, matchKey+1),
			nft.Member("unallocated"+f.Name, nft.R(matchKey)), nft.Do(nft.DropIt)),
	}
}

// restricted lets clients of permitted sources go on and drops the others.
func (f *proto) restricted(any bool) [][]nft.Expr {
	addr := f.Address(f.Dst, 0)
	if any {
		addr = nft.Load(nft.R(0), f.Any.AsSlice())
	}
	return [][]nft.Expr{
		nft.Join(f.allowedSources(addr), f.follow(stageAdmitted, any)),
		nft.Join(marked(looped, ^uint32(0)), f.follow(stageAdmitted, any)),
		nft.Exprs(nft.Do(nft.DropIt)),
	}
}

// allowedSources goes on only if the packet comes from one of its frontend's permitted sources; addr loads the
// frontend's address.
func (f *proto) allowedSources(addr nft.Expr) []nft.Expr {
	return nft.Exprs(addr, nft.Meta(nft.MetaL4Proto, nft.R(f.Words)),
		nft.Payload(nft.TransportHeader, 2, 2, nft.R(f.Words+1)),
		f.Address(f.Src, f.Words+2), nft.Member("permitted"+f.Name, nft.R(0)))
}

// loopback has IPVS serve processes of this node that ask for a node port at an IPv4 loopback address, from 127.0.0.1.
// IPVS won't send what comes from there to other hosts, and nothing translates sources before it does. So such packets
// have own for their source before connection tracking sees them, and what comes back, 127.0.0.1 for its destination
// after IPVS is done with it; no state is needed for that, since the kernel keeps the ports of all its addresses apart
// by connection.
func loopback(v *model.ServiceNode, own netip.Addr) (out, in [][]nft.Expr) {
	f, home := protos[0], []byte{127, 0, 0, 1}
	from := nft.Join(f.Is(), nft.Exprs(f.Address(f.Src, 0), nft.Cmp(nft.Eq, nft.R(0), home),
		nft.Payload(nft.NetworkHeader, f.Dst, 1, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), home[:1])))
	find := append(f.find(stageEntry, true), nft.Cmp(nft.Neq, nft.R(pool_), nft.Word(nil, claimed)),
		nft.Cmp(nft.Neq, nft.R(pool_), nft.Word(nil, lingers)))
	open := nft.Exprs(nft.Cmp(nft.Neq, nft.R(does_), deed{does: restricts, any: true}.code()))
	allowedSources := f.allowedSources(nft.Load(nft.R(0), f.Any.AsSlice()))
	send := nft.Join(nft.Exprs(nft.Load(nft.R(0), own.AsSlice()), nft.SetAddress(f.Src, nft.R(0))), mark(looped, nft.R(0)),
		nft.Exprs(end()))
	for _, let := range [][]nft.Expr{open, allowedSources} {
		out = append(out, f.Within(f.Address(f.Dst, 0), v.NodePorts, from, find, let, send)...)
	}
	back := nft.Join(f.Is(), nft.Exprs(
		nft.Ct(nft.CtDirection, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{nft.DirectionReply}),
		nft.CtOriginal(nft.CtSrcIP, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), own.AsSlice()),
		nft.Payload(nft.NetworkHeader, f.Src, 1, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), home[:1]),
		nft.CtOriginal(nft.CtDstIP, nft.R(0)), nft.And(nft.R(0), nft.R(0), []byte{255, 0, 0, 0}),
		nft.Cmp(nft.Eq, nft.R(0), []byte{127, 0, 0, 0}),
		nft.Load(nft.R(0), home), nft.SetAddress(f.Dst, nft.R(0))))
	return out, [][]nft.Expr{back}
}

// split sends clients on this node and pods to the inside, others to the outside.
func (f *proto) split(v *model.ServiceNode, any bool) [][]nft.Expr {
	internal := f.follow(stageInternal, any)
	rules := [][]nft.Expr{append(nft.FibLocal(true, nft.R(0)), internal...)}
	for _, pods := range f.Pods(v.Node) {
		rules = append(rules, nft.Join(pods(nft.Eq, 0), internal))
	}
	return append(rules, f.follow(stageExternal, any), nft.Exprs(nft.Do(nft.DropIt)))
}

// known sends a client that is remembered to its backend again, if that is still of its pool, by connection tracking
// alone. Others go on to IPVS.
func (f *proto) known(d deed) [][]nft.Expr {
	// client · pool is affinity's key, 0 · pool · address · port member's. That begins with constants which say its
	// length, for clear's reason, as the payload is as long as affinity's key.
	client, member, w := matchKey, matchKey+f.Words+1, f.Words
	affinity := "affinity" + f.Name
	zeros := nft.Exprs(nft.Clear(nft.R(member)))
	if rest := 3 + w - 4; rest > 0 {
		zeros = append(zeros, nft.Load(nft.R(member+4), make([]byte, 4*rest)))
	}
	return [][]nft.Expr{nft.Join(f.find(d.stage, d.any), nft.Exprs(
		nft.Payload(nft.NetworkHeader, f.Src, uint32(4*w+4), nft.R(client)),
		nft.Copy(nft.R(pool_), nft.R(client+w), 4)), zeros, nft.Exprs(
		nft.Copy(nft.R(pool_), nft.R(member+1), 4),
		nft.Map(affinity, nft.R(client), nft.R(member+2)),
		nft.Member("member"+f.Name, nft.R(member)),
		// The element is there, so that its data stays: what is named as data here is only as long.
		nft.Remember(affinity, nft.R(client), nft.R(client), time.Duration(d.seconds)*time.Second),
		nft.DNAT(f.Number, nft.R(member+2), nft.R(member+2+w)),
	)), nft.Exprs(end())}
}

// claim marks packets that a frontend takes, so that they are delivered to this host: all packets of a connection, from
// the client's side, and ICMP errors about what it was sent. A connection that was translated before it came here (of a
// client that is known) goes its own way.
func (f *proto) claim() [][]nft.Expr {
	return [][]nft.Expr{
		nft.Exprs(nft.Ct(nft.CtDirection, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{nft.DirectionReply}), end()),
		nft.Join(translated(), f.findOriginal(false), nft.Exprs(end())),
		f.acquire(false),
		nft.Join(inState(nft.StateRelated), f.findOriginal(false), mark(claimed, nft.R(0)), nft.Exprs(end())),
		nft.Join(f.find(stageEntry, true), nft.FibLocal(false, nft.R(0)), nft.Exprs(nft.Do(nft.Goto("claimports"+f.Name)))),
	}
}

// acquire marks a packet of a frontend's.
func (f *proto) acquire(any bool) []nft.Expr {
	return append(f.find(stageEntry, any), nft.SetMark(nft.R(pool_)), nft.Do(nft.Goto("take"+f.Name)))
}

// acquired returns what follows once a packet has the mark that its frontend says: it becomes then's. Of a frontend
// that lingers only connections that IPVS has count: those that passed have their answers from where they were sent,
// not from a backend.
func (f *proto) acquired(then ...[]nft.Expr) [][]nft.Expr {
	passed := f.findAt(stageEntry, nft.CtReply(f.CtSrc, nft.R(matchKey+1)),
		nft.CtOriginal(nft.CtProtocol, nft.R(matchKey+1+f.Words)), nft.CtReply(nft.CtProtoSrc, nft.R(matchKey+2+f.Words)))
	return [][]nft.Expr{
		nft.Join(marked(claimed, ourBits), nft.Join(then...), nft.Exprs(end())),
		nft.Join(passed, mark(0, nft.R(0)), nft.Exprs(end())),
		nft.Join(inState(nft.StateEstablished), mark(claimed, nft.R(0)), nft.Exprs(end())),
		mark(0, nft.R(0)),
	}
}

// translated goes on only if connection tracking translates the connection's destination.
func translated() []nft.Expr {
	dnat := nft.Word(nil, nft.StatusDNAT)
	return nft.Exprs(nft.Ct(nft.CtStatus, nft.R(0)), nft.And(nft.R(0), nft.R(0), dnat),
		nft.Cmp(nft.Neq, nft.R(0), make([]byte, 4)))
}

// assign marks a packet with its frontend's virtual service.
func (f *proto) assign(v *model.ServiceNode) [][]nft.Expr {
	rules := f.assigned(v, false)
	return append(rules, nft.Join(f.find(stageEntry, true), nft.FibLocal(false, nft.R(0)),
		nft.Exprs(nft.Do(nft.Goto("assignports"+f.Name)))))
}

// assignPorts does the same for node ports.
func (f *proto) assignPorts(v *model.ServiceNode) (rules [][]nft.Expr) {
	for _, then := range f.assigned(v, true) {
		rules = append(rules, f.Within(f.Address(f.Dst, 0), v.NodePorts, then)...)
	}
	return rules
}

// assigned returns the rules that mark: of clients outside if they have their own, and of all others.
func (f *proto) assigned(v *model.ServiceNode, any bool) [][]nft.Expr {
	external := append(f.find(stageExternal, any), notLocal(true, nft.R(matchKey))...)
	for _, pods := range f.Pods(v.Node) {
		external = append(external, pods(nft.Neq, matchKey)...)
	}
	return [][]nft.Expr{
		append(external, nft.SetMark(nft.R(pool_)), end()),
		append(f.find(stageEntry, any), nft.SetMark(nft.R(pool_)), nft.Do(nft.Goto("linger"+f.Name))),
	}
}

// rememberBackend remembers which backend IPVS has given a client.
func (f *proto) rememberBackend(seconds uint32) [][]nft.Expr {
	client, pool, backend := 0, f.Words, f.Words+1
	affinity := "affinity" + f.Name
	remember := nft.Exprs(
		nft.CtOriginal(f.CtSrc, nft.R(client)), nft.Meta(nft.MetaMark, nft.R(pool)),
		nft.CtReply(f.CtSrc, nft.R(backend)), nft.CtReply(nft.CtProtoSrc, nft.R(backend+f.Words)),
		nft.Forget(affinity, nft.R(client), nft.R(backend)),
		nft.Remember(affinity, nft.R(client), nft.R(backend), time.Duration(seconds)*time.Second))
	return [][]nft.Expr{remember}
}

// leave finds the frontend of a connection again, by where its first packet was sent, to hide its source.
func (f *proto) leave(v *model.ServiceNode) [][]nft.Expr {
	return append([][]nft.Expr{f.lookup(f.findOriginal(false), masqueradeReg, "hide")},
		f.Within(nft.CtOriginal(f.CtDst, nft.R(0)), v.NodePorts, f.lookup(f.findOriginal(true), masqueradeReg, "hide"))...)
}

// inState goes on only if the connection is in that state, and the packet not one of its replies.
func inState(state uint32) []nft.Expr {
	return nft.Exprs(nft.Ct(nft.CtState, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), nft.Word(nil, state)))
}

// marked goes on only if the packet's mark is v, in the bits of mask.
func marked(v, mask uint32) []nft.Expr {
	e := nft.Exprs(nft.Meta(nft.MetaMark, nft.R(0)))
	if mask != ^uint32(0) {
		e = append(e, nft.And(nft.R(0), nft.R(0), nft.Word(nil, mask)))
	}
	return append(e, nft.Cmp(nft.Eq, nft.R(0), nft.Word(nil, v)))
}

// Where the chains see packets, in numbers of the kernel's: IPVS looks at priorities 98 and 99 of input (ip_vs_reply4,
// ip_vs_remote_request4) and at -99 and -98 of output (ip_vs_local_reply4, ip_vs_local_request4), see
// net/netfilter/ipvs/ip_vs_core.c.
const (
	beforeInput, afterInput = 97, 101
	beforeOutput            = -99
)

// hooks reports which chains see packets by themselves.
var hooks = map[string]*nft.Hook{
	"open-in":   {Type: "nat", Number: unix.NF_INET_PRE_ROUTING, Priority: -100},
	"open-out":  {Type: "nat", Number: unix.NF_INET_LOCAL_OUT, Priority: -100},
	"claim-in":  {Type: "filter", Number: unix.NF_INET_PRE_ROUTING, Priority: -90},
	"claim-out": {Type: "route", Number: unix.NF_INET_LOCAL_OUT, Priority: beforeOutput},
	"assign-in": {Type: "filter", Number: unix.NF_INET_LOCAL_IN, Priority: beforeInput},
	"arrived":   {Type: "filter", Number: unix.NF_INET_LOCAL_IN, Priority: afterInput},
	"loop-out":  {Type: "filter", Number: unix.NF_INET_LOCAL_OUT, Priority: -300},
	"loop-in":   {Type: "filter", Number: unix.NF_INET_LOCAL_IN, Priority: 110},
	"sent":      {Type: "filter", Number: unix.NF_INET_LOCAL_OUT, Priority: -500},
	"hide":      {Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: 100},
	"gone":      {Type: "filter", Number: unix.NF_INET_POST_ROUTING, Priority: 110},
}

// baseChains are the chains with hooks, and what they lead to first.
var baseChains = func() map[string][][]nft.Expr {
	chains := map[string][][]nft.Expr{}
	add := func(chain string, pieces ...[]nft.Expr) { chains[chain] = append(chains[chain], nft.Join(pieces...)) }
	jump := func(to string) []nft.Expr { return nft.Exprs(nft.Do(nft.Goto(to))) }
	ours := marked(claimed, ourBits)

	add("claim-out", marked(sent, ^uint32(0)), nft.Exprs(end()))
	add("claim-out", nft.Exprs(nft.Ct(nft.CtDirection, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{nft.DirectionReply}),
		end()))
	add("assign-in", marked(claimed, ^uint32(0)), table.OverTCP(), inState(nft.StateEstablished), nft.Exprs(end()))
	add("arrived", ours, notLocal(false, nft.R(0)), jump("refuse"))
	for _, f := range protos {
		for _, c := range []string{"open-in", "open-out"} {
			add(c, f.Is(), jump("enter"+f.Name))
		}
		add("claim-in", f.Is(), jump("claim"+f.Name))
		add("claim-out", translated(), f.Is(), f.findOriginal(false), nft.Exprs(end()))
		add("claim-out", f.Is(), jump("assign"+f.Name))
		add("assign-in", marked(claimed, ^uint32(0)), f.Is(), jump("assign"+f.Name))
		for _, c := range []string{"arrived", "sent", "gone"} {
			add(c, ours, f.Is(), nft.Exprs(nft.Clear(nft.R(zero)), nft.Meta(nft.MetaMark, nft.R(matchKey)),
				nft.Map("sticky"+f.Name, nft.R(matchKey), nft.R(zero+1)), nft.VMap("keep"+f.Name, nft.R(zero))))
		}
		for _, piece := range [][]nft.Expr{marked(sent, ^uint32(0)), ours, translated()} {
			add("hide", f.Is(), piece, jump("leave"+f.Name))
		}
	}
	add("arrived", ours, mark(0, nft.R(0)))
	add("sent", ours, mark(sent, nft.R(0)))
	add("gone", ours, mark(0, nft.R(0)))
	add("gone", marked(sent, ^uint32(0)), mark(0, nft.R(0)))
	return chains
}()

// mark sets the packet's mark to a constant, by way of tmp.
func mark(v uint32, tmp nft.Reg) []nft.Expr {
	return nft.Exprs(nft.Load(tmp, nft.Word(nil, v)), nft.SetMark(tmp))
}

// notLocal goes on with the rule only if the packet's source (or destination) is no address of this host.
func notLocal(source bool, tmp nft.Reg) []nft.Expr {
	return nft.Exprs(nft.FibLocal(source, tmp)[0], nft.Cmp(nft.Neq, tmp, nft.Word(nil, unix.RTN_LOCAL)))
}
