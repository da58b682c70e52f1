package migrate

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"fairlead.dev/fairlead/kernel/iptables"
)

// kube-proxy's chains, of all its modes that use iptables (pkg/proxy/iptables/proxier.go, pkg/proxy/ipvs/proxier.go). A
// kubelet's (KUBE-FIREWALL, KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT, KUBE-MARK-DROP) are none of them.
var (
	names = []string{"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ",
		"KUBE-FORWARD", "KUBE-PROXY-FIREWALL",
		"KUBE-PROXY-CANARY", "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER",
		"KUBE-IPVS-OUT-FILTER"}
	prefixes = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-FW-", "KUBE-EXT-", "KUBE-XLB-"}
	tables   = []string{"nat", "filter", "mangle"}
	jump     = regexp.MustCompile(`(?:^| )-[jg] (KUBE-\S+)`)
)

// theirs reports whether a chain is a kube-proxy's.
func theirs(chain string) bool {
	return slices.Contains(names, chain) || slices.ContainsFunc(prefixes,
		func(p string) bool { return strings.HasPrefix(chain, p) })
}

// removal returns the input of a restore that removes kube-proxy's chains from a table, "" for none. A chain that
// others than the kernel's own lead to (a CNI plugin may use KUBE-MARK-MASQ) stays, and with it what it and
// KUBE-POSTROUTING do.
func removal(name string, t *iptables.Table) string {
	used := map[string]bool{}
	var jumps []string
	for _, chain := range t.Chains {
		for _, rule := range t.Rules[chain] {
			m := jump.FindStringSubmatch(rule)
			switch {
			case m == nil || !theirs(m[1]) || theirs(chain):
			case builtin[chain]:
				jumps = append(jumps, "-D "+chain+" "+rule)
			default:
				used[m[1]], used["KUBE-POSTROUTING"] = true, true
			}
		}
	}
	var flushed, deleted []string
	for _, chain := range t.Chains {
		if theirs(chain) && !used[chain] {
			flushed = append(flushed, ":"+chain+" - [0:0]")
			deleted = append(deleted, "-X "+chain)
		}
	}
	if len(flushed) == 0 {
		return ""
	}
	jumps = slices.DeleteFunc(jumps, func(j string) bool { return used[jump.FindStringSubmatch(j)[1]] })
	return "*" + name + "\n" + strings.Join(slices.Concat(flushed, jumps, deleted), "\n") + "\nCOMMIT\n"
}

// builtin are the kernel's own chains.
var builtin = map[string]bool{"PREROUTING": true, "INPUT": true, "FORWARD": true, "OUTPUT": true, "POSTROUTING": true}

// eachVariant opens every variant of iptables that is installed.
func eachVariant(do func(*iptables.Conn) error) error {
	for _, v := range []iptables.Variant{iptables.Legacy, iptables.NFT} {
		c, err := iptables.Open(v, "KUBE-")
		if err != nil {
			continue // not installed, or not in this kernel: no rules can be there
		}
		err = do(c)
		c.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// eachTable returns every table that holds chains of a kube-proxy, with the restore that removes them.
func eachTable(ctx context.Context, do func(c *iptables.Conn, f iptables.Family, t *iptables.Table,
	remove string) error) error {
	return eachVariant(func(c *iptables.Conn) error {
		if c.Variant == iptables.NFT {
			if there, err := c.Chains("KUBE-"); err != nil || !there {
				return err // nothing to run commands for
			}
		}
		for _, f := range c.Families {
			is, err := c.Save(ctx, f, tables...)
			if err != nil {
				return fmt.Errorf("find kube-proxy's rules: %w", err)
			}
			for _, name := range tables {
				if text := removal(name, is[name]); text != "" {
					if err := do(c, f, is[name], text); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}
