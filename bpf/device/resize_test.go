package device

import (
	"net/netip"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
)

// Flows go on where an agent is given another size of their maps: also those that begin until its programs are
// attached.
func TestFlowsAreCopied(t *testing.T) {
	w := newWorld(t)
	request := func(port uint16) Tuple {
		client, entry := netip.AddrPortFrom(clients[0], port), netip.AddrPortFrom(entries[0], 80)
		w.see("arrive-14", packet{src: client, dst: entry, protocol: unix.IPPROTO_TCP, flags: syn}.frame())
		k := Tuple{Sport: bpf.Port(port), Dport: bpf.Port(80), Protocol: unix.IPPROTO_TCP}
		k.Source.Word, k.Destination.Word = bpf.Words(clients[0]), bpf.Words(entries[0])
		return k
	}
	first := request(1)
	for _, flows := range []uint32{1 << 12, 1 << 18} {
		larger := small
		larger.Flows = flows
		layout, err := Layout(larger)
		if err != nil {
			t.Fatal(err)
		}
		m, err := CreateMaps(filepath.Join(w.folder, layout), larger)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if n := m.named[deviceMapFlNatSrc].MaxEntries(); n != flows {
			t.Errorf("the map has %d entries, not %d", n, flows)
		}
		var held, was NatEntry
		if err := m.named[deviceMapFlNatDst].Lookup(first, &held); err != nil ||
			w.maps.named[deviceMapFlNatDst].Lookup(first, &was) != nil || held != was {
			t.Errorf("%d entries: the flow is %+v, not %+v: %v", flows, held, was, err)
		}
		later := request(uint16(flows >> 8))
		held.State |= uint32(deviceNatStateMASQ_PENDING)
		if err := m.named[deviceMapFlNatDst].Put(first, held); err != nil {
			t.Fatal(err)
		}
		if err := m.Recall(); err != nil {
			t.Fatal(err)
		}
		if err := m.named[deviceMapFlNatDst].Lookup(later, &held); err != nil {
			t.Errorf("%d entries: a later flow: %v", flows, err)
		}
		if err := m.named[deviceMapFlNatDst].Lookup(first, &held); err != nil || held != was {
			t.Errorf("%d entries: a client that was masqueraded since: %+v, %v", flows, held, err)
		}
	}
}
