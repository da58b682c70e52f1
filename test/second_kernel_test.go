package test

import (
	"fmt"
	"testing"

	"fairlead.dev/fairlead/vm/vmtest"
)

// TestSecondKernel judges IPVS, which the host's kernel may not have, in the second kernel, and there again the planes that
// stand on netfilter.
func TestSecondKernel(t *testing.T) {
	for _, c := range []struct {
		mode   string
		worlds int // emulation is slow: those that the host's kernel judges by 200 are judged by fewer here
	}{{"ipvs", 200}, {"nftables", 40}, {"iptables-nft", 40}, {"iptables-legacy", 40}} {
		t.Run(c.mode, func(t *testing.T) {
			vmtest.Run(t, "fairlead.dev/fairlead/agent", "(TestConformance|TestRandomWorlds)/"+c.mode+"$", "-second-kernel", fmt.Sprintf("-worlds=%d", c.worlds))
		})
	}
}
