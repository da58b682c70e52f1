package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"
)

// PolicyTable names a map of facts about network policies.
type PolicyTable uint8

// The maps of facts.
const (
	PolicyVerdicts = PolicyTable(iota)
	PolicyPorts
	PolicyRanges
	PolicyPeers
	PolicyNets
	PolicyExempt
	PolicySubjects
	PolicyUnknown
	policyTables
)

// String returns the map's name.
func (t PolicyTable) String() string {
	return [...]string{policyMapFlVerdicts, policyMapFlPolicyPorts, policyMapFlPortRanges, policyMapFlPeers,
		policyMapFlPeerNets, policyMapFlExempt, policyMapFlSubjects, policyMapFlUnknownPods}[t]
}

// open returns the table among maps by name.
func (t PolicyTable) open(named map[string]*ebpf.Map) rawTable {
	m := named[t.String()]
	switch t {
	case PolicyVerdicts:
		return rawMap[policyPeerVerdict, uint32]{m}
	case PolicyPorts:
		return rawMap[policyPolicyPort, policyPeerTable]{m}
	case PolicyRanges:
		return rawMap[policyPortRange, policyPeerTable]{m}
	case PolicyPeers:
		return rawMap[policyAddress, uint64]{m}
	case PolicyNets:
		return rawMap[policyPeerNet, uint64]{m}
	case PolicySubjects:
		return rawMap[policyAddress, policySubject]{m}
	}
	return rawMap[policyPeerNet, uint32]{m}
}

// PolicyEntry is an entry of a map of facts: its key and its value are the bytes that the kernel has.
type PolicyEntry struct {
	Table      PolicyTable
	Key, Value string
}

// bytesOf returns a struct's bytes.
func bytesOf[T any](v *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)) }

func entryOf[K, V any](t PolicyTable, k K, v V) PolicyEntry {
	return PolicyEntry{t, string(bytesOf(&k)), string(bytesOf(&v))}
}

// Decisions of peer tables, with which DecisionReport may be combined.
const (
	DecisionAccept = uint32(policyDecisionDECISION_ACCEPT)
	DecisionDrop   = uint32(policyDecisionDECISION_DROP)
	DecisionNext   = uint32(policyDecisionDECISION_NEXT)
	DecisionReport = uint32(policyDecisionDECISION_REPORT)
)

// PolicyPeerTable is a peer table, and what it decides about peers without a verdict of their own.
type PolicyPeerTable struct {
	ID        uint64
	Otherwise uint32
}

func (t PolicyPeerTable) held() policyPeerTable {
	return policyPeerTable{Id: t.ID, Otherwise: t.Otherwise}
}

// PolicySide is a ruleset of a subject.
type PolicySide struct {
	Ruleset       uint64
	Default       PolicyPeerTable
	Ports, Ranges bool // it has entries of them
}

// PolicyVerdictEntry is what a peer table decides about an identity.
func PolicyVerdictEntry(table, identity uint64, decision uint32) PolicyEntry {
	return entryOf(PolicyVerdicts, policyPeerVerdict{Table: table, Identity: identity}, decision)
}

// PolicyPortEntries are the peer table of a ruleset for ports from first to last of a protocol.
func PolicyPortEntries(ruleset uint64, protocol uint8, first, last uint16, to PolicyPeerTable) (l []PolicyEntry) {
	if first == last {
		k := policyPolicyPort{Ruleset: ruleset, Port: Port(first), Protocol: protocol}
		return []PolicyEntry{entryOf(PolicyPorts, k, to.held())}
	}
	k := policyPortRange{Protocol: protocol}
	copy(bytesOf(&k.Ruleset), bytesOf(&ruleset))
	const head = 80 // bits of ruleset and protocol
	for at, end := uint32(first), uint32(last)+1; at < end; {
		free := uint32(0) // bits of the port that may be anything
		for free < 16 && at&(1<<free) == 0 && at+(2<<free) <= end {
			free++
		}
		k.Length, k.Port = head+16-free, Port(uint16(at))
		l = append(l, entryOf(PolicyRanges, k, to.held()))
		at += 1 << free
	}
	return l
}

// PolicySubjectEntry is a pod's address on this node; device may be "". A side without a ruleset decides nothing.
func PolicySubjectEntry(a netip.Addr, device string, out, in [2]*PolicySide) PolicyEntry {
	var s policySubject
	for i := range out {
		s.Out[i], s.In[i] = out[i].held(), in[i].held()
	}
	copy(bytesOf(&s.Device), device)
	return entryOf(PolicySubjects, policyAddress{Word: Words(a)}, s)
}

func (s *PolicySide) held() (h policySide) {
	if s == nil {
		return h
	}
	h.Ruleset, h.DefaultTable = s.Ruleset, s.Default.held()
	flags := policySideFlagSIDE_DECIDES
	if s.Ports {
		flags |= policySideFlagSIDE_PORTS
	}
	if s.Ranges {
		flags |= policySideFlagSIDE_RANGES
	}
	h.DefaultTable.Flags = uint32(flags)
	return h
}

// PolicyPeerEntry is the identity of an address.
func PolicyPeerEntry(a netip.Addr, identity uint64) PolicyEntry {
	return entryOf(PolicyPeers, policyAddress{Word: Words(a)}, identity)
}

func netOf(p netip.Prefix) policyPeerNet {
	k := policyPeerNet{Length: uint32(32 + 128 - p.Addr().BitLen() + p.Bits()), Family: 6}
	if p.Addr().Is4() {
		k.Family = 4
	}
	k.Address.Word = Words(p.Masked().Addr())
	return k
}

// PolicyNetEntry is the identity of a prefix.
func PolicyNetEntry(p netip.Prefix, identity uint64) PolicyEntry {
	return entryOf(PolicyNets, netOf(p), identity)
}

// PolicyExemptEntry is a prefix of addresses of the node, or that are evaluated after their translation, or both.
func PolicyExemptEntry(p netip.Prefix, node, untranslated bool) PolicyEntry {
	var flags policyExemptFlag
	if node {
		flags |= policyExemptFlagEXEMPT_NODE
	}
	if untranslated {
		flags |= policyExemptFlagEXEMPT_UNTRANSLATED
	}
	return entryOf(PolicyExempt, netOf(p), uint32(flags))
}

// PolicyUnknownEntry is a prefix of this node's pods, of which those that aren't known are dropped.
func PolicyUnknownEntry(p netip.Prefix) PolicyEntry {
	return entryOf(PolicyUnknown, netOf(p), uint32(1))
}

// rawTable reads and writes entries as bytes.
type rawTable interface {
	put(l []PolicyEntry) (int, error)
	remove(l []PolicyEntry) error
	read(t PolicyTable, yield func(PolicyEntry)) error
}

type rawMap[K, V any] struct{ m *ebpf.Map }

func (r rawMap[K, V]) put(l []PolicyEntry) (int, error) {
	keys, values := make([]K, len(l)), make([]V, len(l))
	for i, e := range l {
		copy(bytesOf(&keys[i]), e.Key)
		copy(bytesOf(&values[i]), e.Value)
	}
	return r.m.BatchUpdate(keys, values, nil)
}

func (r rawMap[K, V]) remove(l []PolicyEntry) error {
	keys := make([]K, len(l))
	for i, e := range l {
		copy(bytesOf(&keys[i]), e.Key)
	}
	if _, err := r.m.BatchDelete(keys, nil); err == nil {
		return nil
	}
	for i := range keys { // a batch ends at the first that isn't there
		if err := r.m.Delete(&keys[i]); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	return nil
}

func (r rawMap[K, V]) read(t PolicyTable, yield func(PolicyEntry)) error {
	return all(r.m, func(k K, v V) { yield(entryOf(t, k, v)) })
}

// Put sets entries of one table. It returns how many were written before an error.
func (m *PolicyMaps) Put(l []PolicyEntry) (int, error) {
	if len(l) == 0 {
		return 0, nil
	}
	t := l[0].Table
	n, err := m.tables[t].put(l)
	if Full(err) {
		err = fmt.Errorf("map %s is full, with space for %d: %w", t, m.named[t.String()].MaxEntries(), err)
	}
	if err != nil {
		return n, fmt.Errorf("bpf: write network policies: %w", err)
	}
	return len(l), nil
}

// Remove removes entries of one table. What isn't there is no error.
func (m *PolicyMaps) Remove(l []PolicyEntry) error {
	if len(l) == 0 {
		return nil
	}
	if err := m.tables[l[0].Table].remove(l); err != nil {
		return fmt.Errorf("bpf: remove from map %s: %w", l[0].Table, err)
	}
	return nil
}

// Entries reads every entry of every table.
func (m *PolicyMaps) Entries(yield func(PolicyEntry)) error {
	for i, t := range m.tables {
		if err := t.read(PolicyTable(i), yield); err != nil {
			return err
		}
	}
	return nil
}

// String returns the table and the key, for people: an address or a prefix, else the key's bytes in hexadecimal.
func (e PolicyEntry) String() string {
	b := []byte(e.Key)
	switch e.Table {
	case PolicySubjects, PolicyPeers:
		return fmt.Sprint(e.Table, " ", netip.AddrFrom16([16]byte(b)).Unmap())
	case PolicyNets, PolicyExempt, PolicyUnknown:
		length, family := binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint32(b[4:])
		a, bits := netip.AddrFrom16([16]byte(b[8:])), int(length)-32
		if family == 4 {
			a, bits = a.Unmap(), bits-96
		}
		return fmt.Sprint(e.Table, " ", netip.PrefixFrom(a, bits))
	}
	return fmt.Sprintf("%s %x", e.Table, b)
}
