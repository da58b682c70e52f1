package iptables

import (
	"slices"
	"strings"

	"fairlead.dev/fairlead/kernel/nftables"
)

// Chains reports whether nf_tables has a chain whose name begins so, also in tables that the iptables commands can't
// read.
func (c *Conn) Chains(prefix string) (there bool, err error) {
	err = c.Do(func() error {
		n, err := nftables.Open()
		if err != nil {
			return err
		}
		defer n.Close()
		chains, err := n.FullChains()
		there = slices.ContainsFunc(chains, func(f *nftables.FullChain) bool { return strings.HasPrefix(f.Name, prefix) })
		return err
	})
	return there, err
}
