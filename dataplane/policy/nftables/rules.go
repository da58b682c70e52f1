package nftables

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"

	table "fairlead.dev/fairlead/dataplane/nft"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// LogGroup is the nflog group that denials and what audited policies would deny go to.
const LogGroup = 4271

// The prefixes of what is logged.
const (
	PrefixDeny   = "deny"
	PrefixAudit  = "audit"
	PrefixForged = "forged"
)

// Bounds of what is logged: packets in a second and at once, and bytes of each.
const (
	logRate   = 100
	logBurst  = 200
	logLength = 128
)

// midstream is how long packets of connections that began before connection tracking are accepted, from when the table
// is made on.
const midstream = time.Minute

// The chains of both families that end an evaluation.
const (
	chainCut          = "cut"
	chainDeny         = "deny"
	chainForged       = "forged"
	chainReportAccept = "report-accept"
	chainReportNext   = "report-next"
)

// hooks reports which chains see packets by themselves, all between the translation of destinations and that of
// sources. An accept ends the chain of one direction only.
var hooks = map[string]*nft.Hook{
	"forward-egress":  {Type: "filter", Number: unix.NF_INET_FORWARD, Priority: 0},
	"forward-ingress": {Type: "filter", Number: unix.NF_INET_FORWARD, Priority: 1},
	"input":           {Type: "filter", Number: unix.NF_INET_LOCAL_IN, Priority: 0},
	"output-egress":   {Type: "filter", Number: unix.NF_INET_LOCAL_OUT, Priority: 0},
	"output-ingress":  {Type: "filter", Number: unix.NF_INET_LOCAL_OUT, Priority: 1},
	"cut-forward":     {Type: "filter", Number: unix.NF_INET_FORWARD, Priority: -1},
	"cut-input":       {Type: "filter", Number: unix.NF_INET_LOCAL_IN, Priority: -1},
	"cut-output":      {Type: "filter", Number: unix.NF_INET_LOCAL_OUT, Priority: -1},
}

// isCut reports whether a chain at a hook is there only while connections are cut.
func isCut(name string) bool { return strings.HasPrefix(name, chainCut+"-") }

// chainRank puts chains after those that their rules name.
func chainRank(name string) int {
	switch {
	case hooks[name] != nil:
		return 9
	case strings.HasSuffix(name, "-pod"), strings.HasSuffix(name, "-unknown"):
		return 4
	case strings.HasSuffix(name, "-admin"), strings.HasSuffix(name, "-last"):
		return 3
	case strings.Contains(name, "-"), name == chainDeny, name == chainForged, name == chainCut:
		return 2
	}
	return 5
}

// side is the evaluation of one direction in one family.
type side struct {
	*proto
	direction  model.Direction
	own, other uint32 // offsets of the pod's address and the other end's
}

func (s side) String() string { return s.direction.String() + s.Name }

// stage is one stage of a side.
type stage struct {
	side
	number uint32
	name   string // of its chain
}

func (s side) stage(i int) stage {
	name := [...]string{model.StageAdmin: "-admin", model.StageLast: "-last"}[i]
	return stage{s, stageNumber(s.direction, i), s.String() + name}
}

// chains returns the constant chains.
func chains() []Fact {
	log := func(prefix string) []nft.Expr {
		return nft.Exprs(nft.Counter(), nft.Limit(logRate, logBurst), nft.Log(LogGroup, prefix, logLength))
	}
	report := func(name, prefix string, v nft.Verdict) Fact {
		return declared.Chain(name, [][]nft.Expr{log(prefix), nft.Exprs(nft.Do(v))})
	}
	facts := []Fact{
		report(chainDeny, PrefixDeny, nft.DropIt),
		report(chainForged, PrefixForged, nft.DropIt),
		report(chainReportAccept, PrefixAudit, nft.Accept),
		report(chainReportNext, PrefixAudit, nft.Return),
	}
	for name := range hooks {
		if isCut(name) {
			continue
		}
		facts = append(facts, declared.Chain(name, base(name)))
	}
	for _, p := range protos {
		for _, s := range []side{{p, model.Egress, p.Src, p.Dst}, {p, model.Ingress, p.Dst, p.Src}} {
			facts = append(facts, s.chains()...)
		}
	}
	return facts
}

// cuts returns the chains that end the connections whose mark has a bit. What is related passes: errors, and the resets
// that the kernel answers with.
func cuts(bit uint32) []Fact {
	state, none := word(nft.StateRelated), make([]byte, 4)
	marked := nft.Exprs(nft.Ct(nft.CtMark, nft.R(0)), nft.And(nft.R(0), nft.R(0), word(bit)),
		nft.Cmp(nft.Neq, nft.R(0), none), nft.Ct(nft.CtState, nft.R(0)), nft.And(nft.R(0), nft.R(0), state),
		nft.Cmp(nft.Eq, nft.R(0), none), nft.Do(nft.Goto(chainCut)))
	facts := []Fact{declared.Chain(chainCut, [][]nft.Expr{
		append(table.OverTCP(), nft.RejectTCP()), nft.Exprs(nft.Do(nft.DropIt))})}
	for name := range hooks {
		if isCut(name) {
			facts = append(facts, declared.Chain(name, [][]nft.Expr{marked}))
		}
	}
	return facts
}

// running accepts TCP packets of connections that began before they were tracked, for a while.
func running() []nft.Expr {
	const flags, fin, syn, rst, ack = 13, 1, 2, 4, 16 // the offset in TCP's header, and bits there
	return nft.Join(table.OverTCP(), nft.Exprs(nft.Payload(nft.TransportHeader, flags, 1, nft.R(0)),
		nft.And(nft.R(0), nft.R(0), []byte{fin | syn | rst | ack}), nft.Cmp(nft.Neq, nft.R(0), []byte{syn}),
		nft.Load(nft.R(0), word(0)), nft.Member(setMidstream, nft.R(0)), nft.Do(nft.Accept)))
}

// base returns the rules of a chain at a hook: answers, related errors, neighbour discovery and running connections
// pass, and what is delivered to this node, or to its proxy, before its translation. What has a pod's source and comes
// in by another device than the pod's doesn't.
func base(name string) [][]nft.Expr {
	d := model.Egress
	if strings.HasSuffix(name, "-ingress") {
		d = model.Ingress
	}
	const (
		hopLimit    = 7        // its offset; neighbour discovery has the highest, so it was not routed
		first, last = 133, 137 // types from router solicitation to redirect
	)
	known := word(nft.StateEstablished | nft.StateRelated)
	rules := [][]nft.Expr{
		nft.Exprs(nft.Ct(nft.CtState, nft.R(0)), nft.And(nft.R(0), nft.R(0), known),
			nft.Cmp(nft.Neq, nft.R(0), make([]byte, 4)), nft.Do(nft.Accept)),
		nft.Join(table.IPv6.Is(), nft.Exprs(
			nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{unix.IPPROTO_ICMPV6}),
			nft.Payload(nft.NetworkHeader, hopLimit, 1, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{255}),
			nft.Payload(nft.TransportHeader, 0, 1, nft.R(0)), nft.Cmp(nft.Gte, nft.R(0), []byte{first}),
			nft.Cmp(nft.Lte, nft.R(0), []byte{last}), nft.Do(nft.Accept))),
	}
	rules = append(rules, running())
	for _, p := range protos {
		if name == "input" || name == "forward-egress" {
			rules = append(rules, p.forged())
		}
		delivered := nft.Join(p.Is(), nft.Exprs(p.Address(p.Dst, 0), nft.Member(p.untranslated, nft.R(0)),
			nft.Do(nft.Accept)))
		switch name {
		case "input":
			rules = append(rules, delivered)
		case "forward-egress":
			to := nft.InterfaceName(model.ProxyDevice, false)
			rules = append(rules, nft.Join(nft.Exprs(nft.Meta(nft.MetaOIFName, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), to)),
				delivered))
		}
		rules = append(rules, nft.Join(p.Is(), nft.Exprs(nft.Do(nft.Goto(side{proto: p, direction: d}.String())))))
	}
	return rules
}

// forged leads to the chain of that name what has the source of a pod with a known device and comes in by another.
func (p *proto) forged() []nft.Expr {
	return nft.Join(p.Is(), nft.Exprs(p.Address(p.Src, 0), nft.Member(p.device, nft.R(0)),
		nft.Meta(nft.MetaIIFName, nft.R(p.Words)), nft.NotMember(p.entry, nft.R(0)), nft.Do(nft.Goto(chainForged))))
}

// ofNode goes on only if the packet is of the node itself: from one of its addresses, by no device or by loopback,
// where what leaves by that may have been translated since it was routed.
func (s side) ofNode() []nft.Expr {
	const loopback = 1 // its index (LOOPBACK_IFINDEX, include/net/net_namespace.h)
	return nft.Join(nft.Exprs(nft.Meta(nft.MetaIIF, nft.R(0)), nft.And(nft.R(0), nft.R(0), word(^uint32(loopback))),
		nft.Cmp(nft.Eq, nft.R(0), word(0))), s.member(s.node, s.Src))
}

// member goes on only if an address of the packet is in a set.
func (s side) member(set string, offset uint32) []nft.Expr {
	return nft.Exprs(s.Address(offset, 0), nft.Member(set, nft.R(0)))
}

// chains returns the side's chains.
func (s side) chains() []Fact {
	do := func(e []nft.Expr, v nft.Verdict) []nft.Expr { return append(e, nft.Do(v)) }
	pod, unknown := s.String()+"-pod", s.String()+"-unknown"
	unevaluated := [][]nft.Expr{do(s.ofNode(), nft.Accept)}
	if s.direction == model.Ingress {
		unevaluated = append(unevaluated, do(s.member(s.node, s.Dst), nft.Accept))
	}
	n := len(unevaluated)
	admin, last := s.stage(model.StageAdmin), s.stage(model.StageLast)
	facts := []Fact{
		declared.Chain(s.String(), [][]nft.Expr{
			do(s.member(s.subject, s.own), nft.Goto(pod)),
			do(s.member(s.unknown, s.own), nft.Goto(unknown)),
		}),
		declared.Chain(pod, append(unevaluated[:n:n],
			do(admin.rulesetOf(zero+1, 4), nft.Jump(admin.name)),
			do(last.rulesetOf(zero+1, 4), nft.Goto(last.name)))),
		declared.Chain(unknown, append(unevaluated[:n:n], nft.Exprs(nft.Do(nft.Goto(chainDeny))))),
	}
	return append(facts, append(admin.chains(), last.chains()...)...)
}

// Where rules hold what maps returned. A key made of it begins with 0, and each 16 bytes of it with a constant: see
// nftables.Clear.
const (
	zero     = 0 // eight registers: 0 · peer table · 0 · 0 · identity · 0
	identity = 4
	work     = 8 // five registers: 0 · ruleset · protocol · port, or 0 · decision · 0
)

// rulesetOf puts the pod's ruleset of the stage at register dst, or ends the rule; it uses registers from tmp on.
func (s stage) rulesetOf(dst, tmp int) []nft.Expr {
	return nft.Exprs(nft.Load(nft.R(tmp), word(s.number)), s.Address(s.own, tmp+1),
		nft.Map(s.ruleset, nft.R(tmp), nft.R(dst)))
}

// chains returns the stage's chains.
func (s stage) chains() []Fact {
	peer, ranges := s.name+"-peer", s.name+"-range"
	has := func(identities, to string) []nft.Expr {
		return nft.Exprs(s.Address(s.other, work), nft.Map(identities, nft.R(work), nft.R(zero+1)), nft.Do(nft.Goto(to)))
	}
	return []Fact{
		declared.Chain(s.name, append([][]nft.Expr{has(s.peer, peer), has(s.ranges, ranges)}, s.decide("")...)),
		declared.Chain(peer, s.decide(s.peer)),
		declared.Chain(ranges, s.decide(s.ranges)),
	}
}

// decide returns the rules that decide about the other end, whose identity a set has; "": it has none.
func (s stage) decide(identities string) (rules [][]nft.Expr) {
	port := nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(work+3)), nft.Payload(nft.TransportHeader, 2, 2, nft.R(work+4)))
	for _, t := range []struct {
		set string
		key []nft.Expr
	}{{setPort, port}, {setPortSpan, port}, {setDefault, nil}} {
		peerTable := nft.Join(nft.Exprs(nft.Clear(nft.R(work))), s.rulesetOf(work+1, 0), t.key,
			nft.Exprs(nft.Clear(nft.R(zero)), nft.Map(t.set, nft.R(work), nft.R(zero+1))))
		if identities != "" {
			rules = append(rules, nft.Join(peerTable, nft.Exprs(s.Address(s.other, work),
				nft.Clear(nft.R(identity)), nft.Map(identities, nft.R(work), nft.R(identity+1))), act(setDecision)))
		}
		rules = append(rules, nft.Join(peerTable, act(setOtherwise)))
	}
	return append(rules, nft.Exprs(nft.Do(nft.Goto(chainDeny)))) // part of the ruleset is missing
}

// act does what the decision says that a set has, or ends the rule.
func act(set string) []nft.Expr {
	return nft.Exprs(nft.Clear(nft.R(work)), nft.Map(set, nft.R(zero), nft.R(work+1)), nft.VMap(setAct, nft.R(work)))
}
