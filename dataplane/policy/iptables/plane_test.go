package iptables

import (
	"fmt"
	"os/exec"
	"testing"

	"fairlead.dev/fairlead/dataplane/policy/policytest"
	"fairlead.dev/fairlead/kernel/iptables"
	"fairlead.dev/fairlead/model"
)

var variants = []Variant{NFT, Legacy}

// open opens the plane of a network's node.
func open(n *policytest.Network, v Variant) (p *Plane) {
	n.Must(n.Node.Do(func() (err error) {
		p, err = NewVariant(v)
		return err
	}))
	n.Cleanup(func() { p.Close() })
	return p
}

// joined returns what parts come to.
func joined(parts []model.PolicyPart) []model.PolicyPart {
	return new(Join).Apply(model.Change[model.PolicyPart]{Put: parts}).Put
}

func TestSuite(t *testing.T) {
	for _, v := range variants {
		t.Run(string(v), policytest.Suite[Key]{
			Open: func(n *policytest.Network) policytest.Engine[Key] { return open(n, v) },
			EndMidstream: func() error {
				out, err := exec.Command("ipset", "flush", setPrefix(iptables.IPv4)+setMidstream).CombinedOutput()
				if err == nil {
					out, err = exec.Command("ipset", "flush", setPrefix(iptables.IPv6)+setMidstream).CombinedOutput()
				}
				if err != nil {
					err = fmt.Errorf("%w: %s", err, out)
				}
				return err
			},
			LogGroup: LogGroup, PrefixDeny: PrefixDeny, PrefixAudit: PrefixAudit, PrefixForged: PrefixForged,
		}.Run)
	}
}
