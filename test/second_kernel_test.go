package test

import (
	"fmt"
	"testing"

	"fairlead.dev/fairlead/vm/vmtest"
)

// TestSecondKernel judges IPVS, which the host's kernel may not have, in the second kernel, and nftables again, for another
// version of it.
func TestSecondKernel(t *testing.T) {
	emulated(t, "ipvs", 200)
	emulated(t, "nftables", 50)
}

// TestSlowSecondKernel judges what takes long there, iptables, each of whose commands takes a second, and eBPF, whose
// first programs take minutes to load: it is
// no part of make test.
func TestSlowSecondKernel(t *testing.T) {
	emulated(t, "iptables-nft", 20)
	emulated(t, "iptables-legacy", 20)
	emulated(t, "ebpf", 25, fewAtOnce)
}

// fewAtOnce keeps cases from waiting for one another's programs to be loaded longer than they may.
const fewAtOnce = "-test.parallel=2"

// emulated judges a mode in the second kernel. Cases and worlds have a boot each, since worlds want a kernel that has no SCTP
// yet.
func emulated(t *testing.T, mode string, worlds int, flags ...string) {
	t.Run(mode, func(t *testing.T) {
		for _, test := range []string{"TestConformance", "TestRandomWorlds"} {
			flags := append([]string{"-second-kernel", fmt.Sprint("-worlds=", worlds)}, flags...)
			vmtest.Run(t, "fairlead.dev/fairlead/agent", test+"/"+mode+"$", flags...)
		}
	})
}
