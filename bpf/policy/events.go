package policy

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/ringbuf"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Event is what happened to a packet.
type Event uint8

// The events.
const (
	Denied     = Event(policyPolicyEventPOLICY_DENIED)
	Audited    = Event(policyPolicyEventPOLICY_AUDITED)
	CutFlow    = Event(policyPolicyEventPOLICY_CUT_FLOW)
	UnknownPod = Event(policyPolicyEventPOLICY_UNKNOWN_POD)
	Forged     = Event(policyPolicyEventPOLICY_FORGED)
	Unparsed   = Event(policyPolicyEventPOLICY_UNPARSED)
	Incomplete = Event(policyPolicyEventPOLICY_INCOMPLETE)
	FlowBegan  = Event(policyPolicyEventPOLICY_FLOW)
	Redirected = Event(policyPolicyEventPOLICY_REDIRECTED)
	Unlogged   = Event(policyPolicyEventPOLICY_UNLOGGED)
	events     = Event(policyPolicyEventPOLICY_EVENTS)
)

// String returns the event's name in metrics.
func (e Event) String() string {
	return [...]string{"denied", "audited", "cut", "unknown_pod", "forged", "unparsed", "incomplete", "flow", "redirected",
		"unlogged", "unknown"}[min(e, events)]
}

// stateMap opens a pinned map that packets write, of the maps in a folder. Without it the error is fs.ErrNotExist.
func stateMap(folder, name string) (*ebpf.Map, error) {
	c, err := forPolicies()
	if err != nil {
		return nil, fmt.Errorf("bpf: read the object of network policies: %w", err)
	}
	m, err := ebpf.LoadPinnedMap(pin(folder, c.Maps[name]), nil)
	if err != nil {
		return nil, fmt.Errorf("bpf: open map %s: %w", name, err)
	}
	return m, nil
}

// Counts returns how many packets had each event since the maps in a folder were made; nil where there are none.
func Counts(folder string) (map[Event]uint64, error) {
	m, err := stateMap(folder, policyMapFlPolicyCount)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer m.Close()
	counts := map[Event]uint64{}
	for e := range events {
		var each []uint64
		if err := m.Lookup(uint32(e), &each); err != nil {
			return nil, fmt.Errorf("bpf: read the counts of network policies: %w", err)
		}
		for _, n := range each {
			counts[e] += n
		}
	}
	return counts, nil
}

// Denial is a packet that network policies denied, or that audited ones would deny.
type Denial struct {
	Time            time.Duration // as bpf.Now
	Event           Event
	Protocol        uint8
	Ingress         bool
	Stage           int
	Source, Dest    netip.AddrPort // of the connection's first packet
	Table, Identity uint64         // which decided; 0: none, by the event alone
	Decision        uint32
	Device          string // by which a forged one came in; "": not known
}

// Denials calls yield with each denial by the maps in a folder until ctx ends, and then with those that are pending.
// One process may read them at a time. Without maps the error is fs.ErrNotExist.
func Denials(ctx context.Context, folder string, yield func(Denial)) error {
	m, err := stateMap(folder, policyMapFlDenials)
	if err != nil {
		return err
	}
	defer m.Close()
	r, err := ringbuf.NewReader(m)
	if err != nil {
		return fmt.Errorf("bpf: read denials: %w", err)
	}
	defer r.Close()
	defer context.AfterFunc(ctx, func() { r.Flush() })()
	for {
		record, err := r.Read()
		if errors.Is(err, ringbuf.ErrFlushed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("bpf: read denials: %w", err)
		}
		if d, ok := denial(record.RawSample); ok {
			yield(d)
		}
	}
}

// denial reads a struct denial.
func denial(b []byte) (d Denial, ok bool) {
	var raw policyDenial
	if binary.Read(bytes.NewReader(b), binary.NativeEndian, &raw) != nil {
		return d, false
	}
	end := func(a policyAddress, port uint16) netip.AddrPort {
		return netip.AddrPortFrom(bpf.Addr(a.Word), bpf.Port(port))
	}
	return Denial{Time: time.Duration(raw.Time), Event: Event(raw.Event), Protocol: raw.Tuple.Protocol,
		Ingress: raw.Ingress != 0, Stage: int(raw.Stage), Source: end(raw.Tuple.Source, raw.Tuple.Sport),
		Dest: end(raw.Tuple.Destination, raw.Tuple.Dport), Table: raw.Table, Identity: raw.Identity,
		Decision: uint32(raw.Decision), Device: string(bytes.TrimRight(bytesOf(&raw.Device), "\x00"))}, true
}

// Probe returns an error where this kernel has no programs at netfilter's hooks.
func Probe() error {
	if err := bpf.Capable(); err != nil {
		return err
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter,
		License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
	if err != nil {
		return fmt.Errorf("bpf: this kernel has no programs at hooks of netfilter (Linux 6.4, CONFIG_NETFILTER_BPF_LINK): "+
			"%w; use another policy engine", bpf.Explain(err))
	}
	return p.Close()
}
