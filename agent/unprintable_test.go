package agent

import (
	"fmt"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/conformance"
	"fairlead.dev/fairlead/model"
)

// TestUnprintableRulesOfOthers judges mode iptables and its engine beside rules of another owner in all built-in chains
// that the commands can't print: endpoints follow, and permissions that are withdrawn.
func TestUnprintableRulesOfOthers(t *testing.T) {
	m, err := mode.Of("iptables-nft")
	if err != nil {
		t.Fatal(err)
	}
	s := implementation(m.With(mode.Options{Policies: true}))
	services := s.Start
	s.Start = func() (conformance.Runner[model.ServicePart], error) {
		if err := putUnprintable(); err != nil {
			return nil, err
		}
		return services()
	}
	s.Engine = engines[slices.IndexFunc(engines, func(e *conformance.Engine) bool { return e.Name == "iptables-nft" })]
	for subsystem, names := range map[string][]string{
		"service": {"endpoints-come-and-go", "service-changes", "nodeport", "damage", "restart-after-changes"},
		"policy":  {"withdrawn", "repaired", "restart", "services"},
	} {
		cases, err := conformance.Cases(subsystem)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range cases {
			if name := strings.TrimSuffix(path.Base(c.File), ".txt"); slices.Contains(names, name) {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					conformance.RunCase(t, s, c)
				})
			}
		}
	}
}

// putUnprintable has the thread's network namespace hold rules that iptables' commands can't print.
func putUnprintable() error {
	var text strings.Builder
	for _, family := range []string{"ip", "ip6"} {
		for _, chain := range []string{
			"filter INPUT { type filter hook input priority filter; }",
			"filter FORWARD { type filter hook forward priority filter; }",
			"filter OUTPUT { type filter hook output priority filter; }",
			"nat PREROUTING { type nat hook prerouting priority dstnat; }",
			"nat OUTPUT { type nat hook output priority -100; }",
			"nat POSTROUTING { type nat hook postrouting priority srcnat; }",
		} {
			names, _, _ := strings.Cut(chain, " {")
			table, _, _ := strings.Cut(names, " ")
			fmt.Fprintf(&text, "add table %s %s\nadd chain %s %s\n", family, table, family, chain)
			fmt.Fprintf(&text, "add rule %s %s ct state vmap { invalid : drop }\n", family, names)
		}
	}
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(text.String())
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	return nil
}
