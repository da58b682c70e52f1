package ebpf

import (
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/model"
)

// Kind is what a fact is about.
type Kind uint8

// The kinds; those between KindMaps and KindCut are entries of maps.
const (
	KindIncomplete = Kind(iota) // the maps were left halfway: never wanted
	KindMaps                    // of a layout; value: of how many entries
	KindVerdict                 // peer table · identity → decision
	KindPort                    // ruleset · protocol · port → peer table
	KindRange                   // ruleset · protocol · prefix of ports → peer table
	KindExempt                  // prefix → of the node, or evaluated after its translation
	KindPeer                    // address → identity
	KindNet                     // prefix → identity
	KindSubject                 // address → rulesets
	KindUnknown                 // prefix of this node's pods
	KindSource                  // device · prefix of addresses that may come in by it, beside those of KindDevice
	KindDevice                  // a pod's device → an address of each family
	KindCut                     // connections that are no longer allowed are cut
	KindCheck                   // what comes in by pods' devices is checked
	KindHooks                   // value: digest of the program
)

// tables are the maps of the kinds that are entries.
var tables = map[Kind]policy.Table{
	KindVerdict: policy.Verdicts, KindPort: policy.Ports, KindRange: policy.Ranges, KindExempt: policy.Exempt,
	KindPeer: policy.Peers, KindNet: policy.Nets, KindSubject: policy.Subjects, KindUnknown: policy.Unknown,
	KindSource: policy.Sources, KindDevice: policy.Devices,
}

// kinds is the inverse of tables.
var kinds = func() map[policy.Table]Kind {
	m := map[policy.Table]Kind{}
	for k, t := range tables {
		m[t] = k
	}
	return m
}()

// Key names a fact.
type Key struct {
	Kind Kind
	Name string // of entries: the key's bytes
}

// Fact is a fact of this plane.
type Fact = dataplane.Fact[Key, string]

// Rank implements dataplane.Key: decisions come before what leads to them, pods after their rulesets and all peers, and
// the hooks last.
func (k Key) Rank() int { return int(k.Kind) }

// Group implements dataplane.Grouped.
func (k Key) Group() string {
	if t, is := tables[k.Kind]; is {
		return t.String()
	}
	return map[Kind]string{KindIncomplete: "incomplete", KindMaps: "maps", KindCut: "cut", KindCheck: "check",
		KindHooks: "hooks"}[k.Kind]
}

// String returns the map and what the key says.
func (k Key) String() string {
	if t, is := tables[k.Kind]; is {
		return policy.Entry{Table: t, Key: k.Name}.String()
	}
	return k.Group() + " " + k.Name
}

// entry is a fact as the kernel holds it.
func entry(f Fact) policy.Entry {
	return policy.Entry{Table: tables[f.Key.Kind], Key: f.Key.Name, Value: f.Value}
}

func factOf(e policy.Entry) Fact { return Fact{Key: Key{kinds[e.Table], e.Key}, Value: e.Value} }

// Render implements dataplane.Plane.
func (p *Plane) Render(part model.PolicyPart) []Fact {
	switch v := part.(type) {
	case *model.PolicyNode:
		return p.node(v)
	case *model.Device:
		return podDevice(v)
	case *model.Subject:
		return []Fact{factOf(policy.SubjectEntry(v.Addr, v.Device, sides(v.Out), sides(v.In)))}
	case *model.Ruleset:
		return ruleset(v)
	case *model.PeerTable:
		return nil // rulesets say what it decides otherwise
	case *model.PeerVerdict:
		return []Fact{factOf(policy.VerdictEntry(v.PeerTable.ID, v.Identity.ID, decision(v.Decision)))}
	case *model.Peer:
		return peer(v)
	}
	panic(fmt.Sprintf("ebpf: no facts for a %T", part))
}

// dropped is the value of a verdict that drops.
var dropped = policy.VerdictEntry(0, 0, policy.DecisionDrop).Value

// decision returns a decision as the programs read it.
func decision(d model.Decision) uint32 {
	v := map[model.Verdict]uint32{model.VerdictAccept: policy.DecisionAccept, model.VerdictDrop: policy.DecisionDrop,
		model.VerdictNext: policy.DecisionNext}[d.Verdict]
	if d.Report {
		v |= policy.DecisionReport
	}
	return v
}

func peerTable(t *model.PeerTable) policy.PeerTable {
	return policy.PeerTable{ID: t.ID, Otherwise: decision(t.Otherwise)}
}

// node returns the maps, the program, and what isn't evaluated.
func (p *Plane) node(v *model.PolicyNode) []Fact {
	facts := []Fact{p.mapsFact(), p.hooksFact()}
	if v.CutMark != 0 {
		facts = append(facts, Fact{Key: Key{Kind: KindCut}})
	}
	exempt := map[netip.Prefix]struct{}{}
	for _, a := range v.Sources() {
		exempt[netip.PrefixFrom(a, a.BitLen())] = struct{}{}
	}
	for _, r := range v.PreDNAT {
		exempt[r.Masked()] = struct{}{}
	}
	for r := range exempt { // the longest prefix counts, so it says what all that hold it say
		node, untranslated := false, false
		for _, a := range v.Sources() {
			node = node || r == netip.PrefixFrom(a, a.BitLen())
		}
		for _, o := range v.PreDNAT {
			untranslated = untranslated || o.Bits() <= r.Bits() && o.Contains(r.Addr())
		}
		facts = append(facts, factOf(policy.ExemptEntry(r, node, untranslated)))
	}
	if v.Unknown != model.VerdictDrop {
		return facts
	}
	known := map[netip.Prefix]bool{}
	for _, r := range v.Pods {
		if r = r.Masked(); !known[r] {
			known[r] = true
			facts = append(facts, factOf(policy.UnknownEntry(r)))
		}
	}
	return facts
}

// podDevice returns what may come in by a pod's device, and that it is checked.
func podDevice(v *model.Device) (facts []Fact) {
	for _, x := range policy.DeviceEntries(v.Name, v.Sources) {
		facts = append(facts, factOf(x))
	}
	return append(facts, Fact{Key: Key{Kind: KindCheck}})
}

// sides returns a subject's rulesets of one direction.
func sides(rulesets [model.PolicyStages]*model.Ruleset) (s [2]*policy.Side) {
	for i, r := range rulesets {
		if r == nil {
			continue
		}
		s[i] = &policy.Side{Ruleset: r.ID, Default: peerTable(r.Default.PeerTable)}
		for _, e := range r.Ports {
			s[i].Ports = s[i].Ports || e.First == e.Last
			s[i].Ranges = s[i].Ranges || e.First != e.Last
		}
	}
	return s
}

// ruleset returns which peer table decides at each port.
func ruleset(v *model.Ruleset) []Fact {
	facts := make([]Fact, 0, len(v.Ports))
	for _, e := range v.Ports {
		for _, x := range policy.PortEntries(v.ID, uint8(e.Protocol), e.First, e.Last, peerTable(e.PeerTable)) {
			facts = append(facts, factOf(x))
		}
	}
	return facts
}

// peer returns the identity of an address, or of the prefixes of a range.
func peer(v *model.Peer) (facts []Fact) {
	if v.Single() {
		return []Fact{factOf(policy.PeerEntry(v.Range.First, v.Identity.ID))}
	}
	for _, r := range v.Range.Prefixes() {
		facts = append(facts, factOf(policy.NetEntry(r, v.Identity.ID)))
	}
	return facts
}
