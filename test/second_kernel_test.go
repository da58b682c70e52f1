package test

import (
	"fmt"
	"testing"

	"fairlead.dev/fairlead/vm/vmtest"
)

// TestSecondKernel judges IPVS, which the host's kernel may not have, in the second kernel, and there again the planes that
// stand on netfilter, for another version of it. Emulated, each of iptables' commands takes a second: they see few worlds there,
// and more on the host. Cases and worlds have a boot each, since worlds want a kernel that has no SCTP yet.
func TestSecondKernel(t *testing.T) {
	for _, c := range []struct {
		mode   string
		worlds int
	}{{"ipvs", 200}, {"nftables", 50}, {"iptables-nft", 5}, {"iptables-legacy", 5}} {
		t.Run(c.mode, func(t *testing.T) {
			for _, test := range []string{"TestConformance", "TestRandomWorlds"} {
				vmtest.Run(t, "fairlead.dev/fairlead/agent", test+"/"+c.mode+"$", "-second-kernel", fmt.Sprint("-worlds=", c.worlds))
			}
		})
	}
}
