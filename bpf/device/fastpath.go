package device

import (
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"

	"fairlead.dev/fairlead/bpf/policy"
	"fairlead.dev/fairlead/kernel/bpf"
)

// SlowReason is why all packets of a family to pods use the host stack.
type SlowReason string

// The reasons.
const (
	SlowDisabled    SlowReason = "disabled" // the agent redirects no packets
	SlowKernel      SlowReason = "kernel"   // PREEMPT_RT, or its structs lack a field that the programs read
	SlowNetfilter   SlowReason = "netfilter"
	SlowIPsec       SlowReason = "ipsec"
	SlowRoutingRule SlowReason = "routing_rule"
	SlowForwarding  SlowReason = "forwarding" // the node doesn't forward
)

// SlowReasons are all of them.
var SlowReasons = []SlowReason{SlowDisabled, SlowKernel, SlowNetfilter, SlowIPsec, SlowRoutingRule, SlowForwarding}

// slowBits are the reasons that the program reports.
var slowBits = []struct {
	bit    deviceSlowReason
	reason SlowReason
}{
	{deviceSlowReasonSLOW_KERNEL, SlowKernel},
	{deviceSlowReasonSLOW_NETFILTER, SlowNetfilter},
	{deviceSlowReasonSLOW_IPSEC, SlowIPsec},
	{deviceSlowReasonSLOW_ROUTING_RULE, SlowRoutingRule},
	{deviceSlowReasonSLOW_FORWARDING, SlowForwarding},
}

// slowSix is by how many bits those of IPv6 are shifted: SLOW_SIX.
const slowSix = 8

// FastPath is whether packets to pods bypass the host stack.
type FastPath struct {
	IPv4, IPv6 []SlowReason // why they don't, by family; none: they are redirected
	Devices    []int        // indices of devices at which something else sees packets: those there use the host stack
}

// ReadFastPath reports whether the programs at devices, of a folder of maps, redirect packets in the calling thread's
// network namespace. network is Options.PodNetwork of the programs.
func ReadFastPath(folder string, devices []Device, network bool) (*FastPath, error) {
	m, err := bpf.Pinned[uint32, uint32](filepath.Join(folder, pinNames[deviceMapFlPods]))
	if m == nil {
		return nil, err
	}
	defer m.Close()
	leave := map[uint32]uint32{}
	if err := bpf.ReadAll(m, func(index, id uint32) { leave[index] = id }); err != nil {
		return nil, err
	}
	p, err := reporterOf(folder, fastPathName)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	policies, err := policy.Folder()
	if err != nil {
		return nil, err
	}
	hooks, err := Folders{filepath.Dir(folder), policies}.evaluated()
	if err != nil {
		return nil, err
	}
	by, err := runFastPath(p, reportContext{Ifindex: 1, CB: [5]uint32{1: hooks, 2: bpf.Flag(network)}})
	if err != nil {
		return nil, err
	}
	f := &FastPath{IPv4: slowReasons(by), IPv6: slowReasons(by >> slowSix)}
	pods := false
	for _, d := range devices {
		pods = pods || d.Pod
		if d.Own || d.Header == 0 {
			continue
		}
		by, err := runFastPath(p, reportContext{Ifindex: uint32(d.Index), CB: [5]uint32{leave[uint32(d.Index)]}})
		if err == nil && by&uint32(deviceSlowReasonSLOW_DEVICE) != 0 { // an error: it is gone
			f.Devices = append(f.Devices, d.Index)
		}
	}
	if pods && len(leave) == 0 {
		reason := SlowDisabled
		if bpf.Preempts() {
			reason = SlowKernel
		}
		f.IPv4, f.IPv6 = append(f.IPv4, reason), append(f.IPv6, reason)
	}
	return f, nil
}

// slowReasons returns the reasons that bits of one family stand for.
func slowReasons(by uint32) (l []SlowReason) {
	for _, b := range slowBits {
		if by&uint32(b.bit) != 0 {
			l = append(l, b.reason)
		}
	}
	return l
}

func runFastPath(p *ebpf.Program, in reportContext) (uint32, error) {
	by, err := p.Run(&ebpf.RunOptions{Data: make([]byte, 64), Context: in})
	if err != nil {
		return 0, fmt.Errorf("bpf: run the program that reports the fast path: %w", bpf.Explain(err))
	}
	return by, nil
}
