package iptables

import (
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/dataplane"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

// Kind is a kind of fact.
type Kind uint8

// The kinds.
const (
	KindSet     Kind = iota // an IP set; value: its type
	KindElement             // a prefix in a set; value: "", or nomatch
	KindChain               // value: a digest of its rules, which are its body
	KindTrees               // the trees that lead to subjects; value: what becomes of addresses that are no subject's
	KindSubject             // an address in the trees; value: where they lead
	KindDevice              // a pod's device in the trees, which admits what the set of entries has of it alone
	KindHook                // the rule that leads from a built-in chain to ours; value: first
	KindClosed              // a peer table that is beyond a bound, which Write refuses
)

// Key names a fact: of a family, by the name of its set, chain, peer table or device, or by its prefix.
type Key struct {
	Kind   Kind
	Family iptables.Family
	Name   string
	Prefix netip.Prefix
	Device string // of an element of the set of entries
}

// Fact is a fact of this plane.
type Fact = dataplane.Fact[Key, string]

// Rank implements dataplane.Key: sets come before the rules that name them, chains before what leads to them, and hooks
// last. Trees come before the chains that leave a packet to the second stage, and subjects after all.
func (k Key) Rank() int {
	switch k.Kind {
	case KindSet:
		return 0
	case KindElement:
		return 1
	case KindChain:
		return chainRank(k.Name)
	case KindTrees:
		return 3
	case KindSubject, KindDevice:
		return rulesetRank + 1
	case KindHook:
		return rulesetRank + 3
	}
	return rulesetRank + 4 // nothing waits for it
}

// rulesetRank is the rank of rulesets' chains.
const rulesetRank = 6

// chainRank puts chains after those that their rules name.
func chainRank(name string) int {
	rest := strings.TrimPrefix(name, Prefix)
	switch {
	case strings.HasPrefix(rest, "T"): // peer tables
		return 5
	case strings.HasPrefix(rest, "R"), strings.HasPrefix(rest, "S"): // rulesets
		return rulesetRank
	case slices.Contains(hooks, rest):
		return rulesetRank + 2
	case strings.HasPrefix(name, chainAudit+"-"): // to a tree
		return 4
	}
	return 2
}

// Advisory implements dataplane.Advisory: the peer table's chain drops everything.
func (k Key) Advisory() bool { return k.Kind == KindClosed }

// Group implements dataplane.Grouped.
func (k Key) Group() string {
	return [...]string{"set", "element", "chain", "tree", "subject", "device", "hook", "closed"}[k.Kind]
}

// String returns "chain FLPOLICY-DENY of IPv4", or "10.0.1.2/32 in set fl_policy4_node" for an element.
func (k Key) String() string {
	switch k.Kind {
	case KindElement:
		return strings.TrimSuffix(fmt.Sprintf("%s in set %s by %s", k.Prefix, k.Name, k.Device), " by ")
	case KindSubject:
		return fmt.Sprintf("subject %s", k.Prefix.Addr())
	case KindTrees:
		return fmt.Sprintf("trees of IPv%d", k.Family)
	}
	return fmt.Sprintf("%s %s of IPv%d", k.Group(), k.Name, k.Family)
}

// Values of facts: a set's by its type, that of an element whose addresses match nothing in its set, a hook's where it
// comes before
// all other rules, and that of the trees by what becomes of pods that are not known.
const (
	setValue = "hash:net"
	devValue = "hash:net,iface"
	noMatch  = "nomatch"
	first    = "first"
	passes   = "pass"
	drops    = "drop"
)

// setPrefix returns what a family's sets' names begin with.
func setPrefix(f iptables.Family) string { return fmt.Sprintf("fl_policy%d_", f) }

// Sets that there is one of in each family, by what follows the prefix.
const (
	setNode         = "node"         // the node's own addresses
	setPods         = "pods"         // of this node's pods
	setUntranslated = "untranslated" // destinations that are evaluated after translation
	setMidstream    = "midstream"    // every address, for a minute
	setEntry        = "entry"        // what may come in by pods' devices
)

// midstream is how long packets of connections that began before connection tracking pass, from when the set is made
// on.
const midstream = time.Minute

// code is a letter for a decision, in capitals where it is reported.
func code(d model.Decision) string {
	letters := "adn"
	if d.Report {
		letters = "ADN"
	}
	return letters[d.Verdict : d.Verdict+1]
}

// tableSet names a peer table's set of those about which it decides d. The name says what it decides about others, too.
func tableSet(f iptables.Family, t *model.PeerTable, d model.Decision) string {
	return fmt.Sprintf("%s%016x_%s%s", setPrefix(f), t.ID, code(t.Otherwise), code(d))
}

// grants reports whether to be in a set can let more packets pass, not fewer.
func grants(set string) bool {
	const strict = "dna" // the verdicts, the strictest first
	_, rest, _ := strings.Cut(strings.TrimPrefix(set, "fl_"), "_")
	if _, codes, ok := strings.Cut(rest, "_"); ok && len(codes) == 2 {
		l := strings.ToLower(codes)
		return strings.IndexByte(strict, l[0]) <= strings.IndexByte(strict, l[1])
	}
	return rest != setPods && rest != setEntry // which is there before the rules of its devices are
}

// setsOf returns the decisions for which a peer table has a set, the strictest first: all but its Otherwise.
func setsOf(t *model.PeerTable) (l []model.Decision) {
	all := map[model.Decision]bool{}
	for _, d := range t.Decisions() {
		all[d] = d != t.Otherwise
	}
	for _, v := range []model.Verdict{model.VerdictDrop, model.VerdictNext, model.VerdictAccept} {
		for _, report := range []bool{true, false} {
			if d := (model.Decision{Verdict: v, Report: report}); all[d] {
				l = append(l, d)
			}
		}
	}
	return l
}

// hashed returns 16 hexadecimal digits for a text.
func hashed(parts ...any) string {
	h := fnv.New64a()
	fmt.Fprintln(h, parts...)
	return hex.EncodeToString(h.Sum(nil))
}

func setFact(f iptables.Family, name string) Fact {
	value := setValue
	if name == setPrefix(f)+setEntry {
		value = devValue
	}
	return Fact{Key: Key{Kind: KindSet, Family: f, Name: name}, Value: value}
}

// element returns the facts of a prefix in a set. A set can't hold /0, but its halves.
func element(f iptables.Family, set string, p netip.Prefix, value string) []Fact {
	var facts []Fact
	for _, p := range storable(p) {
		facts = append(facts, Fact{Key: Key{Kind: KindElement, Family: f, Name: set, Prefix: p}, Value: value})
	}
	return facts
}

// chain returns the fact of a chain.
func chain(f iptables.Family, name string, rules []string) Fact {
	return Fact{Key: Key{Kind: KindChain, Family: f, Name: name}, Value: digest(rules), Body: rules}
}

// digest returns what stands for a chain's rules.
func digest(rules []string) string { return hashed(strings.Join(rules, "\n")) }

// Render implements dataplane.Plane, of what a Join returns. What that takes apart has no facts of its own.
func (p *Plane) Render(part model.PolicyPart) []Fact {
	switch v := part.(type) {
	case *model.PolicyNode:
		return append(node(v, iptables.IPv4), node(v, iptables.IPv6)...)
	case *model.Device:
		return devicesOf(v)
	case *model.Subject:
		s := subjectOf(v)
		return []Fact{{Key: s.key(), Value: s.String(), Body: s}}
	case *Chains:
		if p.conn != nil && p.Variant() == Legacy {
			return v.facts(legacyLevels)
		}
		return v.facts(portLevels)
	case *Member:
		return v.facts()
	case *model.Ruleset, *model.PeerTable, *model.PeerVerdict, *model.Peer:
		return nil
	}
	panic(fmt.Sprintf("iptables: no facts for a %T", part))
}

// node returns what there is in a family whatever the policy.
func node(v *model.PolicyNode, f iptables.Family) (facts []Fact) {
	set := func(name string, of []netip.Prefix) {
		name = setPrefix(f) + name
		facts = append(facts, setFact(f, name))
		for _, p := range of {
			if iptables.FamilyOf(p.Addr()) == f {
				facts = append(facts, element(f, name, p, "")...)
			}
		}
	}
	var own []netip.Prefix
	for _, a := range v.Sources() {
		own = append(own, netip.PrefixFrom(a, a.BitLen()))
	}
	set(setNode, own)
	set(setPods, v.Pods)
	set(setUntranslated, v.PreDNAT)
	set(setMidstream, nil)
	for name, rules := range constant(f, v.CutMark, v.Devices) {
		facts = append(facts, chain(f, name, rules))
	}
	for _, h := range hooks {
		facts = append(facts, Fact{Key: Key{Kind: KindHook, Family: f, Name: h}, Value: first})
	}
	unknown := passes
	if v.Unknown == model.VerdictDrop {
		unknown = drops
	}
	return append(facts, Fact{Key: Key{Kind: KindTrees, Family: f}, Value: unknown})
}

// facts returns a member's elements.
func (m *Member) facts() (facts []Fact) {
	r := m.PolicyPart.(*model.Peer).Range
	f, prefixes := iptables.FamilyOf(r.First), m.prefixes
	if prefixes == nil {
		prefixes = []netip.Prefix{netip.PrefixFrom(r.First, r.First.BitLen())}
	}
	facts = make([]Fact, 0, 2*len(prefixes))
	add := func(d model.Decision, p netip.Prefix, value string) {
		if d != m.table.Otherwise {
			set := m.table.sets[family(f == iptables.IPv6)][d]
			facts = append(facts, Fact{Key: Key{Kind: KindElement, Family: f, Name: set, Prefix: p}, Value: value})
		}
	}
	for _, p := range prefixes {
		add(m.decision, p, "")
		add(m.except, p, noMatch)
	}
	return facts
}
