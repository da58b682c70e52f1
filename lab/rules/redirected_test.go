package rules

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// What IPVS redirects passes OUTPUT until there, then all of it but NAT once more, under its new destination.
func TestRedirected(t *testing.T) {
	ns := netnstest.New(t)
	nft := exec.Command("nft", "-f", "-")
	nft.Stdin = strings.NewReader(`table ip t {
	chain early { type filter hook output priority -300; ip daddr 10.96.0.1 accept; ip daddr 10.1.0.1 accept; }
	chain nat { type nat hook output priority -100; ip daddr 10.9.9.9 accept; }
	chain late { type filter hook output priority 0; ip daddr 10.96.0.1 drop; ip daddr 10.1.0.1 accept; }
	chain post { type filter hook postrouting priority 0; ip daddr 10.1.0.1 accept; }
}`)
	must(t, ns.Do(nft.Run))
	must(t, ns.Do(func() error {
		set, err := readNFTables(t)
		if err != nil {
			return err
		}
		p := first("10.96.0.1:80")
		p.Path, p.To = Redirected, netip.MustParseAddrPort("10.1.0.1:8080")
		for established, want := range map[bool]int{false: 1 + 1 + 2 + 2 + 1, true: 1 + 2 + 2 + 1} {
			p.Established = established
			c, err := Static(set, p)
			if err != nil {
				return err
			}
			if o := c.Outcomes[0]; o.Rules != want || o.Verdict != "accept" || o.Dst != p.To {
				t.Errorf("established %t: %d rules, not %d; %s to %s", established, o.Rules, want, o.Verdict, o.Dst)
			}
		}
		return nil
	}))
}
