package ebpf

import (
	"fmt"
	"net/netip"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/bpf"
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
	KindCut                     // connections that are no longer allowed are cut
	KindHooks                   // value: digest of the program
)

// tables are the maps of the kinds that are entries.
var tables = map[Kind]bpf.PolicyTable{
	KindVerdict: bpf.PolicyVerdicts, KindPort: bpf.PolicyPorts, KindRange: bpf.PolicyRanges, KindExempt: bpf.PolicyExempt,
	KindPeer: bpf.PolicyPeers, KindNet: bpf.PolicyNets, KindSubject: bpf.PolicySubjects, KindUnknown: bpf.PolicyUnknown,
}

// kinds is the inverse of tables.
var kinds = func() map[bpf.PolicyTable]Kind {
	m := map[bpf.PolicyTable]Kind{}
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
	return map[Kind]string{KindIncomplete: "incomplete", KindMaps: "maps", KindCut: "cut", KindHooks: "hooks"}[k.Kind]
}

// String returns the map and what the key says.
func (k Key) String() string {
	if t, is := tables[k.Kind]; is {
		return bpf.PolicyEntry{Table: t, Key: k.Name}.String()
	}
	return k.Group() + " " + k.Name
}

// entry is a fact as the kernel holds it.
func entry(f Fact) bpf.PolicyEntry {
	return bpf.PolicyEntry{Table: tables[f.Key.Kind], Key: f.Key.Name, Value: f.Value}
}

func factOf(e bpf.PolicyEntry) Fact { return Fact{Key: Key{kinds[e.Table], e.Key}, Value: e.Value} }

// Render implements dataplane.Plane.
func (p *Plane) Render(part model.PolicyPart) []Fact {
	switch v := part.(type) {
	case *model.PolicyNode:
		return p.node(v)
	case *model.Subject:
		return []Fact{factOf(bpf.PolicySubjectEntry(v.Addr, v.Device, sides(v.Out), sides(v.In)))}
	case *model.Ruleset:
		return ruleset(v)
	case *model.PeerTable:
		return nil // rulesets say what it decides otherwise
	case *model.PeerVerdict:
		return []Fact{factOf(bpf.PolicyVerdictEntry(v.PeerTable.ID, v.Identity.ID, decision(v.Decision)))}
	case *model.Peer:
		return peer(v)
	}
	panic(fmt.Sprintf("ebpf: no facts for a %T", part))
}

// dropped is the value of a verdict that drops.
var dropped = bpf.PolicyVerdictEntry(0, 0, bpf.DecisionDrop).Value

// decision returns a decision as the programs read it.
func decision(d model.Decision) uint32 {
	v := map[model.Verdict]uint32{model.VerdictAccept: bpf.DecisionAccept, model.VerdictDrop: bpf.DecisionDrop,
		model.VerdictNext: bpf.DecisionNext}[d.Verdict]
	if d.Report {
		v |= bpf.DecisionReport
	}
	return v
}

func peerTable(t *model.PeerTable) bpf.PolicyPeerTable {
	return bpf.PolicyPeerTable{ID: t.ID, Otherwise: decision(t.Otherwise)}
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
		facts = append(facts, factOf(bpf.PolicyExemptEntry(r, node, untranslated)))
	}
	if v.Unknown != model.VerdictDrop {
		return facts
	}
	known := map[netip.Prefix]bool{}
	for _, r := range v.Pods {
		if r = r.Masked(); !known[r] {
			known[r] = true
			facts = append(facts, factOf(bpf.PolicyUnknownEntry(r)))
		}
	}
	return facts
}

// sides returns a subject's rulesets of one direction.
func sides(rulesets [model.PolicyStages]*model.Ruleset) (s [2]*bpf.PolicySide) {
	for i, r := range rulesets {
		if r == nil {
			continue
		}
		s[i] = &bpf.PolicySide{Ruleset: r.ID, Default: peerTable(r.Default.PeerTable)}
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
		for _, x := range bpf.PolicyPortEntries(v.ID, uint8(e.Protocol), e.First, e.Last, peerTable(e.PeerTable)) {
			facts = append(facts, factOf(x))
		}
	}
	return facts
}

// peer returns the identity of an address, or of the prefixes of a range.
func peer(v *model.Peer) (facts []Fact) {
	if v.Single() {
		return []Fact{factOf(bpf.PolicyPeerEntry(v.Range.First, v.Identity.ID))}
	}
	for _, r := range v.Range.Prefixes() {
		facts = append(facts, factOf(bpf.PolicyNetEntry(r, v.Identity.ID)))
	}
	return facts
}
