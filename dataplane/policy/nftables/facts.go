package nftables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	table "fairlead.dev/fairlead/dataplane/nft"
	nft "fairlead.dev/fairlead/kernel/nftables"
	"fairlead.dev/fairlead/model"
)

// Table is the name of the plane's table.
const Table = "fairlead-policy"

// layout is the value of the table's fact. A table of another layout is made anew.
const layout = "layout 8"

// declared is the table.
var declared = &table.Table[Key]{
	Name: Table, Layout: layout, Sets: allSets, Hooks: hooks, Of: func(k table.Key) Key { return Key{k} },
	Private: func(name string) bool { return name == setMidstream || name == setCurrent },
	Initial: map[string][]nft.Element{setMidstream: {{Key: string(word(0))}}},
}

// Key names a fact of the table.
type Key struct{ table.Key }

// Fact is a fact of this plane.
type Fact = table.Fact[Key]

// allows reports whether it is a chain that accepts what is of the current state.
func (k Key) allows() bool {
	return k.Kind == table.KindChain && strings.HasPrefix(k.Name, chainAllow+"-")
}

// lags reports whether it is an element that comes into force, or goes, after others of its transaction.
func (k Key) lags() bool {
	s := allSets[k.Name]
	return k.Kind == table.KindElement && s.Interval && len(s.Data) > 0
}

// Rank implements dataplane.Key: decisions come before what leads to them, and the hooks last.
func (k Key) Rank() int {
	switch k.Kind {
	case table.KindTable:
		return 0
	case table.KindSet:
		return 1
	case table.KindChain:
		return chainRank(k.Name)
	}
	return setRanks[k.Name] // of an element
}

// Foundation implements dataplane.Foundation: with a table of another layout goes all that it holds.
func (k Key) Foundation() bool { return k.Kind == table.KindTable }

// proto is an IP family with the names of its sets and chains.
type proto struct {
	*table.Family
	node, untranslated, unknown, subject, device, entry, admitted, ruleset, peer, ranges string
}

func protoFor(f *table.Family) *proto {
	n := f.Name
	return &proto{f, "node" + n, "untranslated" + n, "unknown" + n, "subject" + n, "device" + n, "entry" + n,
		"admitted" + n, "ruleset" + n, "peer" + n, "range" + n}
}

var protos = []*proto{protoFor(table.IPv4), protoFor(table.IPv6)}

// protoOf returns an address's family.
func protoOf(a netip.Addr) *proto { return table.OfFamily(protos, a) }

// Names of the sets of both families.
const (
	setPod       = "pod"
	setPort      = "port"
	setPortSpan  = "portspan"
	setDefault   = "default"
	setDecision  = "decision"
	setOtherwise = "otherwise"
	setAct       = "act-"    // and the direction
	setFamily    = "family-" // and the direction
	setStages    = "stages-" // and the side
	setMidstream = "midstream"
	setCurrent   = "current"
)

// portKeyLength is the length of 0 · ruleset · protocol · port.
const portKeyLength = 4 + 8 + 4 + 4

func marks(n int) []nft.Type { return slices.Repeat([]nft.Type{nft.Mark}, n) }

// allSets returns every set of the table by name. A number of 64 bits is two marks.
var allSets = func() map[string]nft.Set {
	m := map[string]nft.Set{}
	add := func(s nft.Set) { m[s.Name] = s }
	for _, p := range protos {
		address := []nft.Type{p.Type}
		add(nft.Set{Name: p.node, Key: address})
		add(nft.Set{Name: p.untranslated, Key: address, Interval: true})
		add(nft.Set{Name: p.unknown, Key: address, Interval: true})
		add(nft.Set{Name: p.subject, Key: address, Data: marks(1)})
		add(nft.Set{Name: p.device, Key: address})
		add(nft.Set{Name: p.entry, Key: []nft.Type{p.Type, nft.Device}})
		add(nft.Set{Name: p.admitted, Key: []nft.Type{nft.Device, p.Type}, Interval: true})
		add(nft.Set{Name: p.ruleset, Key: []nft.Type{nft.Mark, p.Type}, Data: marks(2)})
		add(nft.Set{Name: p.peer, Key: address, Data: marks(2)})
		add(nft.Set{Name: p.ranges, Key: address, Data: marks(2), Interval: true})
	}
	add(nft.Set{Name: setPod, Key: []nft.Type{nft.Device}})
	add(nft.Set{Name: setPort, Key: []nft.Type{nft.Mark, nft.Mark, nft.Mark, nft.Proto, nft.Port}, Data: marks(2)})
	add(nft.Set{Name: setPortSpan, Key: []nft.Type{nft.IntegerOf(portKeyLength)}, Data: marks(2), Interval: true})
	add(nft.Set{Name: setDefault, Key: marks(4), Data: marks(2)})
	// The nft command knows at most five fields, so these 32 bytes are shown as two addresses.
	add(nft.Set{Name: setDecision, Key: []nft.Type{nft.IPv6, nft.IPv6}, Data: marks(1)})
	add(nft.Set{Name: setOtherwise, Key: marks(4), Data: marks(1)})
	add(nft.Set{Name: setMidstream, Key: marks(1), Timeout: midstream})
	add(nft.Set{Name: setCurrent, Key: marks(1)})
	verdicts := []nft.Type{nft.Verdicts}
	for _, d := range directions {
		add(nft.Set{Name: setAct + d.String(), Key: marks(4), Data: verdicts})
		add(nft.Set{Name: setFamily + d.String(), Key: []nft.Type{nft.NFProto}, Data: verdicts})
	}
	for _, s := range sides() {
		add(nft.Set{Name: setStages + s.String(), Key: marks(4), Data: verdicts})
	}
	return m
}()

// setRanks are the ranks of sets' elements.
var setRanks = func() map[string]int {
	m := map[string]int{setDecision: 6, setOtherwise: 6, setPort: 7, setPortSpan: 7, setDefault: 7, setPod: 10}
	for _, p := range protos {
		m[p.node], m[p.untranslated], m[p.peer], m[p.ranges] = 4, 4, 8, 8
		m[p.ruleset], m[p.subject], m[p.unknown] = 9, 10, 11
		m[p.entry], m[p.admitted], m[p.device] = 9, 9, 10
	}
	for _, d := range directions {
		m[setAct+d.String()], m[setFamily+d.String()] = 5, 9
	}
	for _, s := range sides() {
		m[setStages+s.String()] = 8
	}
	return m
}()

// element returns the fact of an element.
func element(set string, key []byte, value string) Fact { return declared.Element(set, key, value) }

// number puts a 64-bit ID as registers hold it.
func number(id uint64) []byte { return binary.BigEndian.AppendUint64(nil, id) }

// key returns a key of 16 bytes, as registers hold it: 0 · what · 0.
func key(what []byte) []byte {
	b := make([]byte, 16)
	copy(b[4:], what)
	return b
}

// word puts a 32-bit number as registers hold it.
func word(v uint32) []byte { return nft.Word(nil, v) }

// reported is the bit of a decision's code that stands for Decision.Report.
const reported = 1 << 2

// code stands for a decision in registers.
func code(d model.Decision) string {
	c := uint32(d.Verdict)
	if d.Report {
		c |= reported
	}
	return string(word(c))
}

// stageNumber is the number of a direction's stage in the keys of ruleset4 and ruleset6.
func stageNumber(d model.Direction, stage int) uint32 {
	return uint32(d)*model.PolicyStages + uint32(stage)
}

// Render implements dataplane.Plane.
func (p *Plane) Render(part model.PolicyPart) []Fact {
	switch v := part.(type) {
	case *model.PolicyNode:
		return node(v)
	case *model.Device:
		return device(v)
	case *model.Subject:
		return subject(v)
	case *model.Ruleset:
		return ruleset(v)
	case *model.PeerTable:
		return []Fact{otherwise(v)}
	case *model.PeerVerdict:
		k := append(key(number(v.PeerTable.ID)), key(number(v.Identity.ID))...)
		return []Fact{element(setDecision, k, code(v.Decision))}
	case *model.Peer:
		return []Fact{peer(v)}
	}
	panic(fmt.Sprintf("nftables: no facts for a %T", part))
}

// otherwise returns what a peer table decides about those it has no decision about.
func otherwise(v *model.PeerTable) Fact {
	return element(setOtherwise, key(number(v.ID)), code(v.Otherwise))
}

// node returns the table, its constant chains, and the addresses of the node.
func node(v *model.PolicyNode) []Fact {
	facts := append(declared.Frame(), chains(v.Devices)...)
	for _, d := range directions {
		facts = append(facts, acts(d)...)
	}
	if v.CutMark != 0 {
		facts = append(facts, cuts(v.CutMark)...)
	}
	for _, a := range v.Sources() {
		facts = append(facts, element(protoOf(a).node, a.AsSlice(), ""))
	}
	for _, r := range disjoint(v.PreDNAT) {
		facts = append(facts, element(protoOf(r.Addr()).untranslated, table.SourceRange(nil, r), ""))
	}
	if v.Unknown == model.VerdictDrop {
		for _, r := range disjoint(v.Pods) {
			facts = append(facts, element(protoOf(r.Addr()).unknown, table.SourceRange(nil, r), ""))
		}
	}
	return facts
}

// disjoint returns prefixes that hold the same addresses, sorted, none of which is in another.
func disjoint(l []netip.Prefix) (out []netip.Prefix) {
	sorted := slices.SortedFunc(slices.Values(l), func(a, b netip.Prefix) int {
		return cmp.Or(a.Masked().Addr().Compare(b.Masked().Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	for _, r := range sorted {
		if n := len(out); n == 0 || !out[n-1].Overlaps(r) {
			out = append(out, r.Masked())
		}
	}
	return out
}

// entryOf returns the fact that an address may come in by a device.
func (p *proto) entryOf(a netip.Addr, device string) Fact {
	return element(p.entry, append(a.AsSlice(), nft.InterfaceName(device, false)...), "")
}

// device returns what may come in by a pod's device.
func device(v *model.Device) (facts []Fact) {
	name := nft.InterfaceName(v.Name, false)
	for _, r := range v.Sources {
		p := protoOf(r.Addr())
		if r.IsSingleIP() {
			facts = append(facts, p.entryOf(r.Addr(), v.Name))
		} else {
			facts = append(facts, element(p.admitted, table.SourceRange(name, r), ""))
		}
	}
	return append(facts, element(setPod, name, ""))
}

// subject returns a pod's address and its rulesets.
func subject(v *model.Subject) (facts []Fact) {
	p, addr := protoOf(v.Addr), v.Addr.AsSlice()
	if v.Device != "" {
		facts = append(facts, element(p.device, addr, ""), p.entryOf(v.Addr, v.Device))
	}
	stages := uint32(0) // a bit for each stage that has a ruleset
	for d, rulesets := range [...][model.PolicyStages]*model.Ruleset{model.Egress: v.Out, model.Ingress: v.In} {
		for stage, r := range rulesets {
			if r == model.Closed {
				facts = append(append(facts, ruleset(r)...), otherwise(r.Default.PeerTable))
			}
			if r != nil {
				n := stageNumber(model.Direction(d), stage)
				stages |= 1 << n
				facts = append(facts, element(p.ruleset, append(word(n), addr...), string(number(r.ID))))
			}
		}
	}
	return append(facts, element(p.subject, addr, string(word(stages))))
}

// ruleset returns which peer table decides at each port.
func ruleset(v *model.Ruleset) []Fact {
	facts := make([]Fact, 0, len(v.Ports)+1)
	facts = append(facts, element(setDefault, key(number(v.ID)), string(number(v.Default.PeerTable.ID))))
	for _, e := range v.Ports {
		at := func(port uint16) []byte {
			b := key(number(v.ID))
			b[12] = byte(e.Protocol)
			return nft.PortWord(b, port)
		}
		to := string(number(e.PeerTable.ID))
		if e.First == e.Last {
			facts = append(facts, element(setPort, at(e.First), to))
		} else {
			facts = append(facts, element(setPortSpan, append(at(e.First), at(e.Last)...), to))
		}
	}
	return facts
}

// peer returns the identity of an address, or of a range of them.
func peer(v *model.Peer) Fact {
	p, first, to := protoOf(v.Range.First), v.Range.First.AsSlice(), string(number(v.Identity.ID))
	if v.Single() {
		return element(p.peer, first, to)
	}
	return element(p.ranges, append(first, v.Range.Last.AsSlice()...), to)
}

// acts returns what each decision of a direction comes to, by stage: nothing comes after the last one's.
func acts(d model.Direction) (facts []Fact) {
	allow, report := nft.Goto(toward(chainAllow, d)), nft.Goto(toward(chainReportAccept, d))
	for stage := range model.PolicyStages {
		next, reportNext := nft.Return, nft.Goto(toward(chainReportNext, d))
		if stage == model.StageLast {
			next, reportNext = allow, report
		}
		for decision, v := range map[model.Decision]nft.Verdict{
			{Verdict: model.VerdictAccept}:               allow,
			{Verdict: model.VerdictDrop}:                 nft.Goto(toward(chainDeny, d)),
			{Verdict: model.VerdictNext}:                 next,
			{Verdict: model.VerdictAccept, Report: true}: report,
			{Verdict: model.VerdictNext, Report: true}:   reportNext,
		} {
			k := slices.Concat(word(0), []byte(code(decision)), word(uint32(stage)), word(0))
			facts = append(facts, element(setAct+d.String(), k, v.String()))
		}
	}
	return facts
}
