package policy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Table names a map of facts about network policies.
type Table uint8

// The maps of facts.
const (
	Verdicts = Table(iota)
	Ports
	Ranges
	Peers
	Nets
	Exempt
	Subjects
	Unknown
	Sources
	Devices
	tables
)

// String returns the map's name.
func (t Table) String() string {
	return [...]string{policyMapFlVerdicts, policyMapFlPolicyPorts, policyMapFlPortRanges, policyMapFlPeers,
		policyMapFlPeerNets, policyMapFlExempt, policyMapFlSubjects, policyMapFlUnknownPods, policyMapFlSources,
		policyMapFlDevices}[t]
}

// open returns the table among maps by name.
func (t Table) open(named map[string]*ebpf.Map) rawTable {
	m := named[t.String()]
	switch t {
	case Verdicts:
		return rawMap[policyPeerVerdict, uint32]{m}
	case Ports:
		return rawMap[policyPolicyPort, policyPeerTable]{m}
	case Ranges:
		return rawMap[policyPortRange, policyPeerTable]{m}
	case Peers:
		return rawMap[policyAddress, uint64]{m}
	case Nets:
		return rawMap[policyPeerNet, uint64]{m}
	case Subjects:
		return rawMap[policyAddress, policySubject]{m}
	case Sources:
		return rawMap[policyDeviceNet, uint32]{m}
	case Devices:
		return rawMap[policyDeviceName, policyDeviceSources]{m}
	}
	return rawMap[policyPeerNet, uint32]{m}
}

// Entry is an entry of a map of facts: its key and its value are the bytes that the kernel has.
type Entry struct {
	Table      Table
	Key, Value string
}

// bytesOf returns a struct's bytes.
func bytesOf[T any](v *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)) }

func entryOf[K, V any](t Table, k K, v V) Entry {
	return Entry{t, string(bytesOf(&k)), string(bytesOf(&v))}
}

// Decisions of peer tables, with which DecisionReport may be combined.
const (
	DecisionAccept = uint32(policyDecisionDECISION_ACCEPT)
	DecisionDrop   = uint32(policyDecisionDECISION_DROP)
	DecisionNext   = uint32(policyDecisionDECISION_NEXT)
	DecisionReport = uint32(policyDecisionDECISION_REPORT)
)

// PeerTable is a peer table, and what it decides about peers without a verdict of their own.
type PeerTable struct {
	ID        uint64
	Otherwise uint32
}

func (t PeerTable) held() policyPeerTable {
	return policyPeerTable{Id: t.ID, Otherwise: t.Otherwise}
}

// Side is a ruleset of a subject.
type Side struct {
	Ruleset       uint64
	Default       PeerTable
	Ports, Ranges bool // it has entries of them
}

// VerdictEntry is what a peer table decides about an identity.
func VerdictEntry(table, identity uint64, decision uint32) Entry {
	return entryOf(Verdicts, policyPeerVerdict{Table: table, Identity: identity}, decision)
}

// PortEntries are the peer table of a ruleset for ports from first to last of a protocol.
func PortEntries(ruleset uint64, protocol uint8, first, last uint16, to PeerTable) (l []Entry) {
	if first == last {
		k := policyPolicyPort{Ruleset: ruleset, Port: bpf.Port(first), Protocol: protocol}
		return []Entry{entryOf(Ports, k, to.held())}
	}
	k := policyPortRange{Protocol: protocol}
	copy(bytesOf(&k.Ruleset), bytesOf(&ruleset))
	const head = 80 // bits of ruleset and protocol
	for at, end := uint32(first), uint32(last)+1; at < end; {
		free := uint32(0) // bits of the port that may be anything
		for free < 16 && at&(1<<free) == 0 && at+(2<<free) <= end {
			free++
		}
		k.Length, k.Port = head+16-free, bpf.Port(uint16(at))
		l = append(l, entryOf(Ranges, k, to.held()))
		at += 1 << free
	}
	return l
}

// SubjectEntry is a pod's address on this node; device may be "". A side without a ruleset decides nothing.
func SubjectEntry(a netip.Addr, device string, out, in [2]*Side) Entry {
	var s policySubject
	for i := range out {
		s.Out[i], s.In[i] = out[i].held(), in[i].held()
	}
	copy(bytesOf(&s.Device), device)
	return entryOf(Subjects, policyAddress{Word: bpf.Words(a)}, s)
}

func (s *Side) held() (h policySide) {
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

// PeerEntry is the identity of an address.
func PeerEntry(a netip.Addr, identity uint64) Entry {
	return entryOf(Peers, policyAddress{Word: bpf.Words(a)}, identity)
}

func netOf(p netip.Prefix) policyPeerNet {
	k := policyPeerNet{Length: uint32(32 + 128 - p.Addr().BitLen() + p.Bits()), Family: 6}
	if p.Addr().Is4() {
		k.Family = 4
	}
	k.Address.Word = bpf.Words(p.Masked().Addr())
	return k
}

// NetEntry is the identity of a prefix.
func NetEntry(p netip.Prefix, identity uint64) Entry {
	return entryOf(Nets, netOf(p), identity)
}

// ExemptEntry is a prefix of addresses of the node, or that are evaluated after their translation, or both.
func ExemptEntry(p netip.Prefix, node, untranslated bool) Entry {
	var flags policyExemptFlag
	if node {
		flags |= policyExemptFlagEXEMPT_NODE
	}
	if untranslated {
		flags |= policyExemptFlagEXEMPT_UNTRANSLATED
	}
	return entryOf(Exempt, netOf(p), uint32(flags))
}

// UnknownEntry is a prefix of this node's pods, of which those that aren't known are dropped.
func UnknownEntry(p netip.Prefix) Entry {
	return entryOf(Unknown, netOf(p), uint32(1))
}

// DeviceEntries are what may come in by a pod's device. The first address of each family is found by one lookup.
func DeviceEntries(name string, sources []netip.Prefix) (l []Entry) {
	var k policyDeviceName
	var d policyDeviceSources
	copy(bytesOf(&k), name)
	for _, p := range sources {
		family, flag, n := 0, policyDeviceFlagDEVICE_IPV4, netOf(p)
		if p.Addr().Is6() {
			family, flag = 1, policyDeviceFlagDEVICE_IPV6
		}
		if p.IsSingleIP() && d.Flags&uint32(flag) == 0 {
			d.First[family].Word = bpf.Words(p.Addr())
			d.Flags |= uint32(flag)
			continue
		}
		d.Flags |= uint32(policyDeviceFlagDEVICE_MORE)
		of := policyDeviceNet{Length: uint32(unsafe.Sizeof(k))*8 + n.Length, Family: n.Family, Address: n.Address}
		copy(bytesOf(&of.Device), name)
		l = append(l, entryOf(Sources, of, uint32(1)))
	}
	return append(l, entryOf(Devices, k, d))
}

// rawTable reads and writes entries as bytes.
type rawTable interface {
	put(l []Entry) (int, error)
	remove(l []Entry) error
	read(t Table, yield func(Entry)) error
}

type rawMap[K, V any] struct{ m *ebpf.Map }

func (r rawMap[K, V]) put(l []Entry) (int, error) {
	keys, values := make([]K, len(l)), make([]V, len(l))
	for i, e := range l {
		copy(bytesOf(&keys[i]), e.Key)
		copy(bytesOf(&values[i]), e.Value)
	}
	return r.m.BatchUpdate(keys, values, nil)
}

func (r rawMap[K, V]) remove(l []Entry) error {
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

func (r rawMap[K, V]) read(t Table, yield func(Entry)) error {
	return bpf.ReadAll(r.m, func(k K, v V) { yield(entryOf(t, k, v)) })
}

// Put sets entries of one table. It returns how many were written before an error.
func (m *Maps) Put(l []Entry) (int, error) {
	if len(l) == 0 {
		return 0, nil
	}
	t := l[0].Table
	n, err := m.tables[t].put(l)
	if bpf.Full(err) {
		err = fmt.Errorf("map %s is full, with space for %d: %w", t, m.named[t.String()].MaxEntries(), err)
	}
	if err != nil {
		return n, fmt.Errorf("bpf: write network policies: %w", err)
	}
	return len(l), nil
}

// Remove removes entries of one table. What isn't there is no error.
func (m *Maps) Remove(l []Entry) error {
	if len(l) == 0 {
		return nil
	}
	if err := m.tables[l[0].Table].remove(l); err != nil {
		return fmt.Errorf("bpf: remove from map %s: %w", l[0].Table, err)
	}
	return nil
}

// Entries reads every entry of every table.
func (m *Maps) Entries(yield func(Entry)) error {
	for i, t := range m.tables {
		if err := t.read(Table(i), yield); err != nil {
			return err
		}
	}
	return nil
}

// String returns the table and the key, for people: an address or a prefix, else the key's bytes in hexadecimal.
func (e Entry) String() string {
	b := []byte(e.Key)
	switch e.Table {
	case Subjects, Peers:
		return fmt.Sprint(e.Table, " ", netip.AddrFrom16([16]byte(b)).Unmap())
	case Devices:
		return fmt.Sprintf("%s %s", e.Table, bytes.TrimRight(b, "\x00"))
	case Nets, Exempt, Unknown:
		length, family := binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint32(b[4:])
		a, bits := netip.AddrFrom16([16]byte(b[8:])), int(length)-32
		if family == 4 {
			a, bits = a.Unmap(), bits-96
		}
		return fmt.Sprint(e.Table, " ", netip.PrefixFrom(a, bits))
	}
	return fmt.Sprintf("%s %x", e.Table, b)
}
