package policy

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/bpf"
)

// States of a flow (enum flow_state of policy.h).
const (
	flowReversed = 1 << 0
	flowReplied  = 1 << 1
	flowFins     = 1<<2 | 1<<3
	flowReset    = 1 << 4
)

// Flows calls yield with the source and destination of the first packet of each flow that network policies have
// accepted, by the maps in a folder, but for those that have ended. Without maps there is none.
func Flows(folder string, yield func(source, destination netip.Addr)) error {
	return openFlows(folder, func(t policyTuple) { yield(bpf.Addr(t.Source.Word), bpf.Addr(t.Destination.Word)) })
}

// openFlows calls yield likewise with the tuple of each flow's first packet.
func openFlows(folder string, yield func(policyTuple)) error {
	m, err := stateMap(folder, policyMapFlFlows)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer m.Close()
	hz, err := ticksPerSecond()
	if err != nil {
		return err
	}
	now, err := ticksNow(hz)
	if err != nil {
		return err
	}
	return bpf.ReadAll(m, func(k policyTuple, f policyPolicyFlow) {
		idle := time.Duration(int32(now-f.Seen)) * 256 * time.Second / time.Duration(hz)
		if idle = max(idle, 0); idle > flowTimeout(f.State, k.Protocol) {
			return
		}
		if f.State&flowReversed != 0 {
			k.Source, k.Destination, k.Sport, k.Dport = k.Destination, k.Source, k.Dport, k.Sport
		}
		yield(k)
	})
}

// ticksNow returns policy_now() of policy.h, within a few of its ticks.
func ticksNow(hz uint32) (uint32, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0, fmt.Errorf("bpf: read the clock: %w", err)
	}
	initial := uint32(-300 * int64(hz)) // INITIAL_JIFFIES
	ticks := uint64(initial) + uint64(t.Nano())/1000*uint64(hz)/1_000_000
	return uint32(ticks >> 8), nil
}

// flowTimeout returns how long a flow without packets is open: as flow_timeout() of policy.h, but for TCP
// connections that both ends have closed or one has reset.
func flowTimeout(state uint32, protocol uint8) time.Duration {
	switch {
	case protocol == unix.IPPROTO_TCP && (state&flowFins == flowFins || state&flowReset != 0):
		return -1
	case protocol == unix.IPPROTO_TCP && state&flowFins == 0 && state&flowReplied != 0:
		return 5 * 24 * time.Hour
	case protocol == unix.IPPROTO_SCTP:
		return 210 * time.Second
	}
	return 2 * time.Minute
}
