package test

import (
	"testing"

	"fairlead.dev/fairlead/vm/vmtest"
)

// TestSecondKernel judges IPVS, which the host's kernel may not have, in the second kernel, and there again the planes that
// stand on netfilter, for another version of it.
func TestSecondKernel(t *testing.T) {
	for _, mode := range []string{"ipvs", "nftables", "iptables-nft", "iptables-legacy"} {
		t.Run(mode, func(t *testing.T) {
			vmtest.Run(t, "fairlead.dev/fairlead/agent", "(TestConformance|TestRandomWorlds)/"+mode+"$", "-second-kernel")
		})
	}
}
