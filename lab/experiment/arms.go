package experiment

import (
	"fmt"
	"strings"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// The arms that are modes and that experiments name.
const (
	ArmNFTables = "nftables"
	ArmEBPF     = "ebpf"
)

// NotMeasured returns a sentence for each mode and layout that can't run here.
func NotMeasured(l []testbed.Unable) (words []string) {
	for _, u := range l {
		words = append(words, fmt.Sprintf("Mode %s: it can't run here: %s.", u.Name, strings.TrimSuffix(u.Why, ".")))
	}
	return words
}

// Styles are the same for a mode in every experiment: iptables blue and userspace red, as the article of CenturyLink
// has them.
var Styles = map[string]int{"iptables": 1, "userspace": 7, "nftables": 3, ArmEBPF: 4, "ipvs": 6, LayoutIPTables19: 5,
	LayoutIPTables: 2, LayoutNFTables: 8}

// ModeArms returns the arms of modes.
func ModeArms(modes []string) (arms []result.Arm) {
	for _, m := range modes {
		arms = append(arms, result.Arm{ID: m, Title: m, Style: Styles[m], Text: "Services' addresses, in a pair whose node " +
			"is served by `fairlead run --mode " + m + "` from a folder of manifests"})
	}
	return arms
}

// Baselines returns the arms without a Service.
func Baselines() []result.Arm {
	return []result.Arm{
		{ID: testbed.ArmDirect, Title: "direct",
			Text: "the servers' own addresses, in a pair of network namespaces without any rule and without conntrack"},
		{ID: testbed.ArmAgain, Title: "direct again", Text: "the same in another pair of namespaces: what it differs from " +
			"direct is what this run can't tell from nothing"},
	}
}

// The arms of kube-proxy's rules.
var (
	LayoutIPTables19 = classic.IPTables19.String()
	LayoutIPTables   = classic.IPTables.String()
	LayoutNFTables   = classic.NFTables.String()
)

// LayoutArms returns the arms of kube-proxy's rules, as the lab writes them.
func LayoutArms(layouts []classic.Layout) (arms []result.Arm) {
	says := map[classic.Layout]string{
		classic.IPTables19: "kube-proxy's iptables rules of 2019: two rules for a Service in one list; written by " +
			"iptables-legacy",
		classic.IPTables: "kube-proxy's iptables rules of today: one rule for a Service in one list; written by " +
			"iptables-legacy",
		classic.NFTables: "kube-proxy's nftables rules of today: a map of Services, a chain for each and for each " +
			"endpoint; written by nft",
	}
	for _, l := range layouts {
		arms = append(arms, result.Arm{ID: l.String(), Title: l.String(), Style: Styles[l.String()], Text: says[l]})
	}
	return arms
}
