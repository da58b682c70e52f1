package test

import (
	"fmt"
	"testing"

	"fairlead.dev/fairlead/sandbox/vm/vmtest"
)

// TestSecondKernel judges IPVS, which the host's kernel may not have, in the second kernel, and nftables again, for
// another version of it.
func TestSecondKernel(t *testing.T) {
	emulated(t, 25, "ipvs", "nftables")
}

// TestSlowSecondKernel judges the other modes there: it is no part of make test.
func TestSlowSecondKernel(t *testing.T) {
	emulated(t, 500, "iptables-nft", "iptables-legacy", "ebpf")
	t.Run("ebpf in 6.1", func(t *testing.T) {
		tests := vmtest.Build(t, "fairlead.dev/fairlead/agent")
		tests.Kernel = "6.1"
		tests.Run(t, "TestConformance/ebpf$", "-second-kernel")
	})
	t.Run("ebpf in 5.10", func(t *testing.T) {
		tests := vmtest.Build(t, "fairlead.dev/fairlead/bpf/service")
		tests.Kernel = "5.10"
		tests.Run(t, "^TestProbe$", "-lacks=the coarse clock (5.11)")
	})
}

// emulated judges modes in the second kernel, by the cases and by random worlds. Each of these has a machine of its
// own, since worlds want a kernel that has no SCTP yet, and as many machines run at once as there are processors: one
// keeps one busy.
func emulated(t *testing.T, clusters int, modes ...string) {
	tests := vmtest.Build(t, "fairlead.dev/fairlead/agent")
	for _, mode := range modes {
		for _, test := range []string{"TestConformance", "TestRandomClusters"} {
			t.Run(test+"/"+mode, func(t *testing.T) {
				t.Parallel()
				tests.Run(t, test+"/"+mode+"$", "-second-kernel", fmt.Sprint("-worlds=", clusters))
			})
		}
	}
}
