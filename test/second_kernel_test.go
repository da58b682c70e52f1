package test

import (
	"fmt"
	"testing"

	"fairlead.dev/fairlead/vm/vmtest"
)

// TestSecondKernel judges IPVS, which the host's kernel may not have, in the second kernel, and nftables and eBPF again, for
// another version of it and another verifier.
func TestSecondKernel(t *testing.T) {
	emulated(t, "ipvs", 200)
	emulated(t, "nftables", 50)
	emulated(t, "ebpf", 25)
}

// TestSlowSecondKernel is the same for iptables, each of whose commands takes a second there: it is no part of make test.
func TestSlowSecondKernel(t *testing.T) {
	emulated(t, "iptables-nft", 20)
	emulated(t, "iptables-legacy", 20)
}

// emulated judges a mode in the second kernel. Cases and worlds have a boot each, since worlds want a kernel that has no SCTP
// yet.
func emulated(t *testing.T, mode string, worlds int) {
	t.Run(mode, func(t *testing.T) {
		for _, test := range []string{"TestConformance", "TestRandomWorlds"} {
			vmtest.Run(t, "fairlead.dev/fairlead/agent", test+"/"+mode+"$", "-second-kernel", fmt.Sprint("-worlds=", worlds))
		}
	})
}
