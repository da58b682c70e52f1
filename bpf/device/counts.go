package device

import "fmt"

// PacketCounts counts packets at devices since the maps were created, by outcome.
type PacketCounts struct {
	Began      uint64 // flows
	Rejected   uint64 // packets rejected: no backend
	Dropped    uint64 // packets dropped by policy
	NoPort     uint64 // packets dropped: no free port to masquerade with
	NoAddress  uint64 // packets dropped: the node has no address to masquerade with
	MapFull    uint64 // packets dropped: no space for the flow
	Redirected uint64 // packets redirected to a pod of the node, bypassing the host stack
	Forged     uint64 // packets dropped: the reverse path check failed
}

// Each calls f with each count and a name for it, in snake_case.
func (c PacketCounts) Each(f func(outcome string, packets uint64)) {
	f("began", c.Began)
	f("rejected", c.Rejected)
	f("silenced", c.Dropped)
	f("no_port", c.NoPort)
	f("no_address", c.NoAddress)
	f("no_room", c.MapFull)
	f("handed_over", c.Redirected)
	f("forged", c.Forged)
}

// PacketCounts reads them.
func (m *Maps) PacketCounts() (c PacketCounts, err error) {
	for what, to := range map[devicePacketEvent]*uint64{
		devicePacketEventEVENT_FLOW:       &c.Began,
		devicePacketEventEVENT_REJECTED:   &c.Rejected,
		devicePacketEventEVENT_DROPPED:    &c.Dropped,
		devicePacketEventEVENT_NO_PORT:    &c.NoPort,
		devicePacketEventEVENT_NO_ADDRESS: &c.NoAddress,
		devicePacketEventEVENT_MAP_FULL:   &c.MapFull,
		devicePacketEventEVENT_REDIRECTED: &c.Redirected,
		devicePacketEventEVENT_FORGED:     &c.Forged,
	} {
		var each []uint64 // by processor
		if err := m.named[deviceMapFlPackets].Lookup(uint32(what), &each); err != nil {
			return c, fmt.Errorf("bpf: read counts of packets: %w", err)
		}
		for _, n := range each {
			*to += n
		}
	}
	return c, nil
}
