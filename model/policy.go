package model

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Verdict is what a stage of policies decides about the first packet of a connection.
type Verdict uint8

// The verdicts.
const (
	VerdictAccept Verdict = iota // no later stage of this direction is evaluated
	VerdictDrop
	VerdictNext // the next stage decides; after the last stage it is VerdictAccept
)

// String returns "accept", "drop" or "next".
func (v Verdict) String() string { return [...]string{"accept", "drop", "next"}[v] }

// The stages, in the order in which they are evaluated: indexes of Subject.Out and Subject.In.
const (
	StageAdmin = iota // the Admin tier
	StageLast         // the NetworkPolicies where one isolates the pod, else the Baseline tier
	PolicyStages
)

// Tier is a group of policies that is evaluated as one.
type Tier uint8

// The tiers, in the order of precedence.
const (
	TierAdmin Tier = iota
	TierNetworkPolicy
	TierBaseline
)

// String returns "Admin", "NetworkPolicy" or "Baseline".
func (t Tier) String() string { return [...]string{"Admin", "NetworkPolicy", "Baseline"}[t] }

// Direction is a direction of traffic, seen from the pod that a policy selects.
type Direction uint8

// The directions.
const (
	Egress Direction = iota
	Ingress
)

// String returns "egress" or "ingress".
func (d Direction) String() string { return [...]string{"egress", "ingress"}[d] }

// PolicyPart is one piece of a decided node that a policy data plane serves: *PolicyNode, *Device, *Subject, *Ruleset,
// *PeerTable, *PeerVerdict or *Peer.
type PolicyPart interface{ policyPart() }

func (*PolicyNode) policyPart()  {}
func (*Device) policyPart()      {}
func (*Subject) policyPart()     {}
func (*Ruleset) policyPart()     {}
func (*PeerTable) policyPart()   {}
func (*PeerVerdict) policyPart() {}
func (*Peer) policyPart()        {}

// ProxyDevice is the device of a node behind which the agent, in a mode that proxies packets itself, has sockets of its
// own: what is forwarded there is delivered to the node.
const ProxyDevice = "fairlead-room"

// PolicyNode is what holds for this node whatever the policy.
type PolicyNode struct {
	Addresses []netip.Addr   // the node's own, sorted: what it sends to its pods is never evaluated
	Pods      []netip.Prefix // addresses of this node's pods, sorted; one that is no Subject's is a pod not known yet
	Unknown   Verdict        // what becomes of new connections of pods not known yet: VerdictDrop once there is a policy
	// destinations that are evaluated only after translation, where packets are delivered to the node or to ProxyDevice
	PreDNAT []netip.Prefix
	CutMark uint32 // a bit: connections whose mark has it are cut; 0: no connection is
	Devices bool   // there are Devices
}

// Sources returns the addresses that the node's own processes send from: also 127.0.0.1, from which a node port may be
// reached. Of IPv6, the kernel lets no packet leave with a loopback address.
func (n *PolicyNode) Sources() []netip.Addr {
	return append(slices.Clip(n.Addresses), netip.AddrFrom4([4]byte{127, 0, 0, 1}))
}

// Subject is an address of a pod on this node.
type Subject struct {
	Pod     string // "namespace/name"
	Addr    netip.Addr
	Device  string                 // "" if unknown; else packets of this source that come in elsewhere are forged
	Bridge  string                 // what other pods on it send to this address is never evaluated; "": there is none
	Out, In [PolicyStages]*Ruleset // nil: nothing decides there
}

// Device is a network device of this node that is one pod's alone. What comes in by it from another address than
// Sources is forged, whatever its family; of IPv6, but for neighbour discovery.
type Device struct {
	Name    string
	Pod     string         // "namespace/name"; "": none that is known
	Sources []netip.Prefix // sorted and disjoint
}

// Admits reports whether a is one of the device's Sources.
func (d *Device) Admits(a netip.Addr) bool {
	return slices.ContainsFunc(d.Sources, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Equal reports whether d and o say the same.
func (d *Device) Equal(o *Device) bool {
	if d == nil || o == nil {
		return d == o
	}
	return d.Name == o.Name && d.Pod == o.Pod && slices.Equal(d.Sources, o.Sources)
}

// Ruleset is what decides for a subject in one direction and stage.
type Ruleset struct {
	ID       uint64
	Name     string      // for people, such as "NetworkPolicy ingress shop/default-deny, shop/web"
	Policies []PolicyRef // all that take part, enforced or audited
	Ports    []PortEntry // sorted by protocol and port, disjoint
	Default  PortEntry   // for what no entry of Ports covers
}

// PortEntry is a span of destination ports, and who may pass at it.
type PortEntry struct {
	Protocol    Protocol // 0 in Ruleset.Default: all
	First, Last uint16   // 0 and 65535: the whole protocol
	PeerTable   *PeerTable
	// Sources are where each of the peer table's rules comes from. One more, if there, is where its Otherwise comes
	// from; without it no rule says so: it is the default of the tier.
	Sources [][]RuleRef
}

// PolicyRef names a policy.
type PolicyRef struct {
	Tier            Tier
	Namespace, Name string // without a namespace: a ClusterNetworkPolicy
	Audit           bool
}

// String returns "Admin deny-telnet" or "NetworkPolicy shop/web".
func (p PolicyRef) String() string {
	if p.Namespace == "" {
		return p.Tier.String() + " " + p.Name
	}
	return fmt.Sprintf("%s %s/%s", p.Tier, p.Namespace, p.Name)
}

// Owner returns the policy as an owner of parts.
func (p PolicyRef) Owner() Owner {
	if p.Namespace == "" {
		return Owner{Kind: KindClusterNetworkPolicy, Name: p.Name}
	}
	return Owner{KindNetworkPolicy, p.Namespace, p.Name}
}

// Compare orders policies by tier, namespace and name.
func (p PolicyRef) Compare(o PolicyRef) int {
	return cmp.Or(cmp.Compare(p.Tier, o.Tier), strings.Compare(p.Namespace, o.Namespace), strings.Compare(p.Name, o.Name))
}

// RuleRef names a rule of a policy.
type RuleRef struct {
	PolicyRef
	Direction Direction
	Index     int    // in the policy's list; -1: what the policy says by isolating the pod
	RuleName  string // the rule's own, if any
}

// String returns "Admin deny-telnet egress[2] no-db", or "NetworkPolicy shop/web ingress" for an isolation.
func (r RuleRef) String() string {
	s := r.PolicyRef.String() + " " + r.Direction.String()
	if r.Index >= 0 {
		s += fmt.Sprintf("[%d]", r.Index)
	}
	return strings.TrimSpace(s + " " + r.RuleName)
}

// PeerTable is who may pass at a port entry: the first of its rules that matches, else Otherwise. Port entries,
// rulesets and pods that want the same share it.
type PeerTable struct {
	ID        uint64
	Rules     []Rule   // for verdict and people: data planes have the PeerVerdicts
	Default   Verdict  // what decides where no rule matches
	Otherwise Decision // for addresses without a PeerVerdict
}

// Rule decides about the peers that it matches.
type Rule struct {
	Peers   []*Peers // any of these, sorted by text; nil: every address
	Verdict Verdict
	Audit   bool // it only reports what it would do
}

// Peers is one selector, CIDR or domain name.
type Peers struct {
	Text   string
	Domain string // the domain name, in lower case: with "*." in front any below it; "": no domain name
}

// Identity is the addresses that no peer table of this node tells apart.
type Identity struct {
	ID    uint64
	Match []*Peers // what matches them, sorted by text
}

// PeerVerdict is what a peer table decides about an identity, where that is not its Otherwise.
type PeerVerdict struct {
	PeerTable *PeerTable
	Identity  *Identity
	Decision  Decision
}

// Decision is what a stage decides.
type Decision struct {
	Verdict Verdict
	Report  bool // audited policies of the stage would drop it
}

// String returns "accept", or "accept, reported".
func (d Decision) String() string {
	if d.Report {
		return d.Verdict.String() + ", reported"
	}
	return d.Verdict.String()
}

// Peer is the addresses from Range.First to Range.Last. Ranges of several addresses are disjoint. One of a single
// address comes before the range that holds it.
type Peer struct {
	Range    Range
	Identity *Identity
	Name     string // "pod shop/web-1", "node a", or the CIDR that it is a piece of
}

// Single reports whether the peer is one address.
func (p *Peer) Single() bool { return p.Range.First == p.Range.Last }

// Decide returns what the rules of t decide about addresses that are matched by the peers for which matched reports
// true, and which rules do: of those enforced, and of all. An index of len(t.Rules) is t.Default.
func (t *PeerTable) Decide(matched func(*Peers) bool) (d Decision, enforced, audited int) {
	enforced, audited = len(t.Rules), len(t.Rules)
	for i := len(t.Rules) - 1; i >= 0; i-- {
		if r := &t.Rules[i]; r.Peers == nil || slices.ContainsFunc(r.Peers, matched) {
			if audited = i; !r.Audit {
				enforced = i
			}
		}
	}
	verdict := func(i int) Verdict {
		if i == len(t.Rules) {
			return t.Default
		}
		return t.Rules[i].Verdict
	}
	d.Verdict = verdict(enforced)
	d.Report = d.Verdict != VerdictDrop && verdict(audited) == VerdictDrop
	return d, enforced, audited
}

// Decisions returns every decision that t can come to, by its rules: in no order, each once.
func (t *PeerTable) Decisions() (out []Decision) {
	add := func(d Decision) {
		if !slices.Contains(out, d) {
			out = append(out, d)
		}
	}
	reports := slices.ContainsFunc(t.Rules, func(r Rule) bool { return r.Audit && r.Verdict == VerdictDrop })
	enforced := func(v Verdict) {
		add(Decision{Verdict: v})
		if reports && v != VerdictDrop {
			add(Decision{Verdict: v, Report: true})
		}
	}
	enforced(t.Default)
	for i := range t.Rules {
		if !t.Rules[i].Audit {
			enforced(t.Rules[i].Verdict)
		}
	}
	return out
}

// Policies is the policy parts of a whole decided node, as a data plane finds them.
type Policies struct {
	Node     *PolicyNode
	Devices  map[string]*Device // by name
	Subjects map[netip.Addr]*Subject
	Singles  map[netip.Addr]*Peer
	Ranges   []*Peer // sorted
	Rulesets map[uint64]*Ruleset
	Tables   map[uint64]*PeerTable
	Verdicts map[PeerVerdictKey]*PeerVerdict
}

// PeerVerdictKey names a PeerVerdict by the IDs of its peer table and identity.
type PeerVerdictKey struct{ PeerTable, Identity uint64 }

// Key returns v's key.
func (v *PeerVerdict) Key() PeerVerdictKey { return PeerVerdictKey{v.PeerTable.ID, v.Identity.ID} }

// NewPolicies returns a snapshot without parts.
func NewPolicies() *Policies {
	return &Policies{Node: &PolicyNode{}, Devices: map[string]*Device{}, Subjects: map[netip.Addr]*Subject{},
		Singles: map[netip.Addr]*Peer{}, Rulesets: map[uint64]*Ruleset{}, Tables: map[uint64]*PeerTable{},
		Verdicts: map[PeerVerdictKey]*PeerVerdict{}}
}

// Apply makes a change true.
func (s *Policies) Apply(c Change[PolicyPart]) {
	for _, part := range c.Del {
		s.del(part)
	}
	before := len(s.Ranges)
	for _, part := range c.Put {
		s.put(part)
	}
	if len(s.Ranges) == 0 {
		s.Ranges = nil
	}
	if len(s.Ranges) > before {
		slices.SortFunc(s.Ranges, func(a, b *Peer) int { return a.Range.First.Compare(b.Range.First) })
	}
}

// del removes a part.
func (s *Policies) del(part PolicyPart) {
	switch p := part.(type) {
	case *Device:
		delete(s.Devices, p.Name)
	case *Subject:
		delete(s.Subjects, p.Addr)
	case *Ruleset:
		delete(s.Rulesets, p.ID)
	case *PeerTable:
		delete(s.Tables, p.ID)
	case *PeerVerdict:
		delete(s.Verdicts, p.Key())
	case *Peer:
		if p.Single() {
			delete(s.Singles, p.Range.First)
		} else if i, ok := s.search(p.Range.First); ok && s.Ranges[i] == p {
			s.Ranges = slices.Delete(s.Ranges, i, i+1)
		}
	}
}

// put adds a part: one of a range at the end, whatever its place.
func (s *Policies) put(part PolicyPart) {
	switch p := part.(type) {
	case *PolicyNode:
		s.Node = p
	case *Device:
		s.Devices[p.Name] = p
	case *Subject:
		s.Subjects[p.Addr] = p
	case *Ruleset:
		s.Rulesets[p.ID] = p
	case *PeerTable:
		s.Tables[p.ID] = p
	case *PeerVerdict:
		s.Verdicts[p.Key()] = p
	case *Peer:
		if p.Single() {
			s.Singles[p.Range.First] = p
		} else {
			s.Ranges = append(s.Ranges, p)
		}
	}
}

func (s *Policies) search(a netip.Addr) (int, bool) {
	return slices.BinarySearchFunc(s.Ranges, a, func(p *Peer, a netip.Addr) int { return p.Range.First.Compare(a) })
}

// Peer returns the peer of an address: the single one, else the range that holds it, else nil.
func (s *Policies) Peer(a netip.Addr) *Peer {
	if p := s.Singles[a]; p != nil {
		return p
	}
	i, found := s.search(a)
	if !found {
		i--
	}
	if i >= 0 && s.Ranges[i].Range.Contains(a) {
		return s.Ranges[i]
	}
	return nil
}

// Entry returns the port entry that covers a destination port.
func (r *Ruleset) Entry(p Protocol, port uint16) *PortEntry {
	i, found := slices.BinarySearchFunc(r.Ports, port, func(e PortEntry, port uint16) int {
		return cmp.Or(cmp.Compare(e.Protocol, p), cmp.Compare(e.First, port))
	})
	if !found {
		i--
	}
	if i >= 0 && r.Ports[i].Protocol == p && port <= r.Ports[i].Last {
		return &r.Ports[i]
	}
	return &r.Default
}

// Parts returns everything a policy data plane serves: the node, then what others name before what names them.
func (s *Policies) Parts() []PolicyPart {
	l := make([]PolicyPart, 0, 1+len(s.Devices)+len(s.Tables)+len(s.Rulesets)+len(s.Singles)+len(s.Ranges)+
		len(s.Verdicts)+len(s.Subjects))
	l = append(l, s.Node)
	for _, name := range slices.Sorted(maps.Keys(s.Devices)) {
		l = append(l, s.Devices[name])
	}
	for _, id := range slices.Sorted(maps.Keys(s.Tables)) {
		l = append(l, s.Tables[id])
	}
	for _, id := range slices.Sorted(maps.Keys(s.Rulesets)) {
		l = append(l, s.Rulesets[id])
	}
	for _, a := range slices.SortedFunc(maps.Keys(s.Singles), netip.Addr.Compare) {
		l = append(l, s.Singles[a])
	}
	for _, r := range s.Ranges {
		l = append(l, r)
	}
	for _, v := range s.Verdicts {
		l = append(l, v)
	}
	for _, a := range slices.SortedFunc(maps.Keys(s.Subjects), netip.Addr.Compare) {
		l = append(l, s.Subjects[a])
	}
	return l
}
