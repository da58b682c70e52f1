package nftables

import (
	"math/rand/v2"
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

// The chains of both families that end an evaluation. Exempt, deny and the reports have one of each direction besides,
// that leads there: see toward.
const (
	chainAllow        = "allow"
	chainCut          = "cut"
	chainDeny         = "deny"
	chainExempt       = "exempt"
	chainForged       = "forged"
	chainReport       = "report"
	chainReportAccept = "report-accept"
	chainReportNext   = "report-next"
)

// The chains for what comes in by a pod's device, and, with the name of a family, for what comes in by a device for
// which no entry has its source: there while there are such devices.
const (
	chainSources   = "sources"
	chainElsewhere = "elsewhere"
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
		return 10
	case strings.HasPrefix(name, chainAllow+"-"):
		return 2
	case strings.Contains(name, "-pod"):
		return 7
	case strings.HasSuffix(name, "-admin"), strings.HasSuffix(name, "-last"):
		return 6
	case strings.HasSuffix(name, "-peer"), strings.HasSuffix(name, "-range"), strings.HasPrefix(name, chainElsewhere):
		return 5
	case strings.HasSuffix(name, "gress") && !strings.HasPrefix(name, chainExempt):
		return 4
	case strings.HasPrefix(name, chainExempt+"-"), name == chainSources:
		return 3
	case name == chainExempt, name == chainDeny, name == chainForged, name == chainCut, name == chainReport:
		return 2
	}
	return 8
}

var directions = []model.Direction{model.Egress, model.Ingress}

// toward returns the name of a chain in a direction.
func toward(chain string, d model.Direction) string { return chain + "-" + d.String() }

// side is the evaluation of one direction in one family.
type side struct {
	*proto
	direction  model.Direction
	own, other uint32 // offsets of the pod's address and the other end's
}

// sides returns all four.
func sides() (l []side) {
	for _, p := range protos {
		l = append(l, side{p, model.Egress, p.Src, p.Dst}, side{p, model.Ingress, p.Dst, p.Src})
	}
	return l
}

// String returns egress4, ingress4, egress6 or ingress6.
func (s side) String() string { return s.direction.String() + s.Name }

// elsewhere names the chain for what comes in by a device for which no entry has its source.
func (s side) elsewhere() string { return chainElsewhere + s.Name }

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

// chains returns the constant chains, and the maps that lead to them. devices: what comes in by pods' own is checked.
func chains(devices bool) []Fact {
	log := func(prefix string) []nft.Expr {
		return nft.Exprs(nft.Counter(), nft.Limit(logRate, logBurst), nft.Log(LogGroup, prefix, logLength))
	}
	do := func(v nft.Verdict) []nft.Expr { return nft.Exprs(nft.Do(v)) }
	ends := map[string][][]nft.Expr{
		chainDeny:   {log(PrefixDeny), do(nft.DropIt)},
		chainReport: {log(PrefixAudit)},
	}
	facts := []Fact{
		declared.Chain(chainExempt, [][]nft.Expr{discovery(), running()}),
		declared.Chain(chainForged, [][]nft.Expr{log(PrefixForged), do(nft.DropIt)}),
		declared.Chain(toward(chainForged, model.Egress), [][]nft.Expr{do(nft.Jump(chainExempt)), do(nft.Goto(chainForged))}),
	}
	for name, rules := range ends {
		facts = append(facts, declared.Chain(name, rules))
	}
	for _, d := range directions {
		exempted, report := do(nft.Jump(toward(chainExempt, d))), nft.Jump(chainReport)
		facts = append(facts, declared.Chain(toward(chainExempt, d), exempt(d)),
			declared.Chain(toward(chainAllow, d), allow(0)),
			declared.Chain(toward(chainDeny, d), [][]nft.Expr{exempted, do(nft.Goto(chainDeny))}),
			declared.Chain(toward(chainReportNext, d), [][]nft.Expr{exempted, do(report)}),
			declared.Chain(toward(chainReportAccept, d), [][]nft.Expr{exempted, do(report),
				do(nft.Goto(toward(chainAllow, d)))}))
	}
	for name := range hooks {
		if !isCut(name) {
			facts = append(facts, declared.Chain(name, first(name, devices)))
		}
	}
	for _, s := range sides() {
		facts = append(facts, s.chains(devices)...)
	}
	if devices {
		facts = append(facts, sources())
	}
	return facts
}

// allow returns the rules of a chain that accepts what was evaluated by one state of the sets, of a number. Rules are
// those of when the packet met its first one, sets are always the current ones (net/netfilter: nft_do_chain() reads
// gencursor once, and each lookup again): a packet whose evaluation began before a transaction and ended after it holds
// the number of the former, and is dropped.
func allow(state uint32) [][]nft.Expr {
	return [][]nft.Expr{nft.Exprs(nft.Load(nft.R(0), word(state)), nft.Member(setCurrent, nft.R(0)), nft.Do(nft.Accept)),
		nft.Exprs(nft.Do(nft.DropIt))}
}

// renumber has the state that a transaction leads to be of a number of its own, for chains that accept what is of it.
func renumber(tx *nft.Tx, chains []string) {
	state := rand.Uint32()
	tx.FlushSet(Table, setCurrent)
	tx.AddElements(Table, setCurrent, []nft.Element{{Key: string(word(state))}})
	for _, chain := range chains {
		tx.Flush(Table, chain)
		tx.AddRules(Table, chain, nft.Digest(nil, allow(0)), allow(state)) // the chain's fact is of any state
	}
}

// suspend has no state be the current one, so that no evaluation accepts anything.
func suspend(tx *nft.Tx) { tx.FlushSet(Table, setCurrent) }

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

// sources returns the chain that drops what comes in by a pod's device from another address than those that may. What
// IPv6 sends by itself, to groups on the link, is not reported.
func sources() Fact {
	var rules [][]nft.Expr
	for _, p := range protos {
		rules = append(rules, nft.Join(p.Is(), nft.Exprs(p.Address(p.Src, 0), nft.Meta(nft.MetaIIFName, nft.R(p.Words)),
			nft.Member(p.entry, nft.R(0)), nft.Do(nft.Return))))
	}
	for _, p := range protos {
		rules = append(rules, nft.Join(p.Is(), nft.Exprs(nft.Meta(nft.MetaIIFName, nft.R(0)),
			p.Address(p.Src, deviceWords), nft.Member(p.admitted, nft.R(0)), nft.Do(nft.Return))))
	}
	six := table.IPv6
	toGroup := nft.Exprs(nft.Payload(nft.NetworkHeader, six.Dst, 1, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{0xff}),
		nft.Do(nft.DropIt))
	linkLocal := nft.Exprs(nft.Payload(nft.NetworkHeader, six.Src, 4, nft.R(0)),
		nft.And(nft.R(0), nft.R(0), []byte{0xff, 0xc0, 0, 0}), nft.Cmp(nft.Eq, nft.R(0), []byte{0xfe, 0x80, 0, 0}))
	none := nft.Exprs(six.Address(six.Src, 0), nft.Cmp(nft.Eq, nft.R(0), six.Any.AsSlice()))
	rules = append(rules, discovery(), nft.Join(six.Is(), linkLocal, toGroup), nft.Join(six.Is(), none, toGroup),
		nft.Exprs(nft.Do(nft.Goto(chainForged))))
	return declared.Chain(chainSources, rules)
}

// fromPod leads to the chain for sources what comes in by a pod's device.
func fromPod() []nft.Expr {
	return nft.Exprs(nft.Meta(nft.MetaIIFName, nft.R(0)), nft.Member(setPod, nft.R(0)), nft.Do(nft.Jump(chainSources)))
}

// deviceWords is how many registers a device's name takes.
const deviceWords = 4

// running accepts TCP packets of connections that began before they were tracked, for a while.
func running() []nft.Expr {
	const flags, fin, syn, rst, ack = 13, 1, 2, 4, 16 // the offset in TCP's header, and bits there
	return nft.Join(table.OverTCP(), nft.Exprs(nft.Payload(nft.TransportHeader, flags, 1, nft.R(0)),
		nft.And(nft.R(0), nft.R(0), []byte{fin | syn | rst | ack}), nft.Cmp(nft.Neq, nft.R(0), []byte{syn}),
		nft.Load(nft.R(0), word(0)), nft.Member(setMidstream, nft.R(0)), nft.Do(nft.Accept)))
}

// first returns the rules of a chain at a hook. The first one leads to the side of packets that are neither answers nor
// related errors. Of others that come in, sources are checked here, but of TCP: who sends as an end of an open
// connection has to know its sequence numbers.
func first(name string, devices bool) [][]nft.Expr {
	d := model.Egress
	if strings.HasSuffix(name, model.Ingress.String()) {
		d = model.Ingress
	}
	known := word(nft.StateEstablished | nft.StateRelated)
	rules := [][]nft.Expr{nft.Exprs(nft.Ct(nft.CtState, nft.R(0)), nft.And(nft.R(0), nft.R(0), known),
		nft.Cmp(nft.Eq, nft.R(0), make([]byte, 4)), nft.Meta(nft.MetaNFProto, nft.R(0)),
		nft.VMap(setFamily+d.String(), nft.R(0)))}
	if devices && d == model.Egress && hooks[name].Number != unix.NF_INET_LOCAL_OUT {
		notTCP := nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Cmp(nft.Neq, nft.R(0), []byte{unix.IPPROTO_TCP}))
		rules = append(rules, nft.Join(notTCP, fromPod()))
	}
	return rules
}

// discovery accepts neighbour discovery, which has the highest hop limit: it was not routed.
func discovery() []nft.Expr {
	const (
		hopLimit    = 7        // its offset
		first, last = 133, 137 // types from router solicitation to redirect
	)
	return nft.Join(table.IPv6.Is(), nft.Exprs(
		nft.Meta(nft.MetaL4Proto, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{unix.IPPROTO_ICMPV6}),
		nft.Payload(nft.NetworkHeader, hopLimit, 1, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), []byte{255}),
		nft.Payload(nft.TransportHeader, 0, 1, nft.R(0)), nft.Cmp(nft.Gte, nft.R(0), []byte{first}),
		nft.Cmp(nft.Lte, nft.R(0), []byte{last}), nft.Do(nft.Accept)))
}

// exempt returns the rules that accept what policies don't apply to in a direction. A packet meets them last, before
// it is dropped or reported: what policies allow meets none of them.
func exempt(d model.Direction) [][]nft.Expr {
	accept := nft.Exprs(nft.Do(nft.Accept))
	rules := [][]nft.Expr{nft.Exprs(nft.Do(nft.Jump(chainExempt)))}
	for _, p := range protos {
		rules = append(rules, nft.Join(p.Is(), p.ofNode(), accept))
		if d == model.Ingress {
			rules = append(rules, nft.Join(p.Is(), p.member(p.node, p.Dst), accept))
			continue
		}
		untranslated := nft.Join(p.Is(), p.member(p.untranslated, p.Dst))
		rules = append(rules, nft.Join(untranslated, toNode(), accept), nft.Join(untranslated, toProxy(), accept))
	}
	return rules
}

// toNode goes on only if the packet is delivered to the node: it leaves by no device.
func toNode() []nft.Expr {
	return nft.Exprs(nft.Meta(nft.MetaOIF, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), word(0)))
}

// toProxy goes on only if the packet is forwarded to the node's proxy.
func toProxy() []nft.Expr {
	return nft.Exprs(nft.Meta(nft.MetaIIF, nft.R(0)), nft.Cmp(nft.Neq, nft.R(0), word(0)),
		nft.Meta(nft.MetaOIFName, nft.R(0)), nft.Cmp(nft.Eq, nft.R(0), nft.InterfaceName(model.ProxyDevice, false)))
}

// forged leads to the chain for it what has the source of a pod with a known device and comes in by another.
func (p *proto) forged() []nft.Expr {
	return nft.Join(p.member(p.device, p.Src), nft.Exprs(
		nft.Meta(nft.MetaIIF, nft.R(p.Words)), nft.Cmp(nft.Neq, nft.R(p.Words), word(0)),
		nft.Meta(nft.MetaIIFName, nft.R(p.Words)), nft.NotMember(p.entry, nft.R(0)),
		nft.Do(nft.Goto(toward(chainForged, model.Egress)))))
}

// noEntry leads to a chain what comes in by a device for which no entry has its source.
func (p *proto) noEntry(chain string) []nft.Expr {
	return nft.Exprs(p.Address(p.Src, 0), nft.Meta(nft.MetaIIF, nft.R(p.Words)),
		nft.Cmp(nft.Neq, nft.R(p.Words), word(0)), nft.Meta(nft.MetaIIFName, nft.R(p.Words)),
		nft.NotMember(p.entry, nft.R(0)), nft.Do(nft.Jump(chain)))
}

// ofNode goes on only if the packet is of the node itself: from one of its addresses, by no device or by loopback,
// where what leaves by that may have been translated since it was routed.
func (p *proto) ofNode() []nft.Expr {
	const loopback = 1 // its index (LOOPBACK_IFINDEX, include/net/net_namespace.h)
	return nft.Join(nft.Exprs(nft.Meta(nft.MetaIIF, nft.R(0)), nft.And(nft.R(0), nft.R(0), word(^uint32(loopback))),
		nft.Cmp(nft.Eq, nft.R(0), word(0))), p.member(p.node, p.Src))
}

// member goes on only if an address of the packet, at an offset of its header, is in a set.
func (p *proto) member(set string, offset uint32) []nft.Expr {
	return nft.Exprs(p.Address(offset, 0), nft.Member(set, nft.R(0)))
}

// chains returns the side's chains and what leads to them. devices: what comes in by pods' own is checked.
func (s side) chains(devices bool) []Fact {
	rules := [][]nft.Expr{nft.Exprs(s.Address(s.own, 0), nft.Clear(nft.R(work)),
		nft.Map(s.subject, nft.R(0), nft.R(work+1)), nft.VMap(setStages+s.String(), nft.R(work)))}
	if devices = devices && s.direction == model.Egress; devices {
		rules = append(rules, fromPod())
	}
	denied := nft.Goto(toward(chainDeny, s.direction))
	facts := []Fact{
		element(setFamily+s.direction.String(), []byte{s.Number, 0, 0, 0}, nft.Goto(s.String()).String()),
		declared.Chain(s.String(), append(rules, nft.Join(s.member(s.unknown, s.own), nft.Exprs(nft.Do(denied))))),
	}
	if devices {
		facts = append(facts, declared.Chain(s.elsewhere(), [][]nft.Expr{s.forged(), fromPod()}))
	}
	admin, last := s.stage(model.StageAdmin), s.stage(model.StageLast)
	for _, stages := range [][]stage{nil, {admin}, {last}, {admin, last}} {
		facts = append(facts, s.pods(stages, devices)...)
	}
	return append(facts, append(admin.chains(), last.chains()...)...)
}

// pods returns what leads to the evaluation of pods with rulesets of these stages, in a chain of its own where that
// takes more than a verdict.
func (s side) pods(stages []stage, devices bool) (facts []Fact) {
	name, code, enter := s.String()+"-pod", uint32(0), nft.Accept
	var rules [][]nft.Expr
	if devices {
		rules = append(rules, s.noEntry(s.elsewhere()))
	} else if s.direction == model.Egress {
		rules = append(rules, s.forged())
	}
	for _, st := range stages {
		name, code = name+strings.TrimPrefix(st.name, s.String()), code|1<<st.number
		if enter = nft.Goto(st.name); !st.last() {
			enter = nft.Jump(st.name)
		}
		rules = append(rules, nft.Exprs(nft.Do(enter)))
	}
	if enter.Code == nft.Jump("").Code { // there is no last stage
		rules = append(rules, nft.Exprs(nft.Do(nft.Goto(toward(chainAllow, s.direction)))))
	}
	if len(rules) > 1 || s.direction == model.Egress {
		enter, facts = nft.Goto(name), append(facts, declared.Chain(name, rules))
	}
	all, own := uint32(1<<(len(directions)*model.PolicyStages)), uint32(0)
	for stage := range model.PolicyStages {
		own |= 1 << stageNumber(s.direction, stage)
	}
	for c := range all { // those of the other direction are of no account
		if c&own == code {
			facts = append(facts, element(setStages+s.String(), key(word(c)), enter.String()))
		}
	}
	return facts
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

// last reports whether it is the direction's last one.
func (s stage) last() bool { return s.number%model.PolicyStages == model.StageLast }

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

// decide returns the rules that decide about the other end by its identity, which is in a set; "": it has none. First
// are those that end the evaluation of a packet which its port allows.
func (s stage) decide(identities string) (rules [][]nft.Expr) {
	port := nft.Exprs(nft.Meta(nft.MetaL4Proto, nft.R(work+3)), nft.Payload(nft.TransportHeader, 2, 2, nft.R(work+4)))
	peerTable := func(set string, key []nft.Expr) []nft.Expr {
		return nft.Join(nft.Exprs(nft.Clear(nft.R(work))), s.rulesetOf(work+1, 0), key,
			nft.Exprs(nft.Clear(nft.R(zero)), nft.Map(set, nft.R(work), nft.R(zero+1))))
	}
	for _, tables := range [][][]nft.Expr{{peerTable(setPort, port), peerTable(setPortSpan, port)},
		{peerTable(setDefault, nil)}} {
		for _, t := range tables {
			if identities != "" {
				rules = append(rules, nft.Join(t, nft.Exprs(s.Address(s.other, work),
					nft.Clear(nft.R(identity)), nft.Map(identities, nft.R(work), nft.R(identity+1))), s.act(setDecision)))
			}
		}
		for _, t := range tables {
			rules = append(rules, nft.Join(t, s.act(setOtherwise)))
		}
	}
	// part of the ruleset is missing
	return append(rules, nft.Exprs(nft.Do(nft.Goto(toward(chainDeny, s.direction)))))
}

// act does what the decision says that a set has, or ends the rule.
func (s stage) act(set string) []nft.Expr {
	return nft.Exprs(nft.Clear(nft.R(work)), nft.Map(set, nft.R(zero), nft.R(work+1)),
		nft.Load(nft.R(work+2), word(s.number%model.PolicyStages)), nft.VMap(setAct+s.direction.String(), nft.R(work)))
}
