package connect

import (
	"slices"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// exactAims are the project's in instructions.
func (r *trial) exactAims() (l []result.Aim) {
	modes, layouts := r.grid.Modes, r.grid.Layouts
	pod, ten, most := "crr"+experiment.SuffixPod, testbed.ServiceParams(10), testbed.ServiceParams(10000)
	direct := func(id, text, arm, measure string, at result.Params, bound float64) {
		l = append(l, result.Aim{ID: id, Text: text, Arm: arm, Measure: measure, Params: at, Of: result.Ratio, Bound: bound})
	}
	over := func(id, text, arm string, at result.Params, bound float64) {
		l = append(l, result.Aim{ID: id, Text: text, Arm: experiment.ArmEBPF, Measure: pod, Params: at, Of: result.Value,
			Over: &result.CellRef{Arm: arm, Params: at}, Bound: bound})
	}
	if slices.Contains(modes, experiment.ArmEBPF) {
		direct("G1, pod", "ebpf: a pod's connection at 10,000 Services takes ≤ 0.92 × direct's instructions",
			experiment.ArmEBPF, pod, most, 0.92)
		if r.profile.Policies == policies {
			direct("G1, policies", "ebpf: under 10,000 policies ≤ 0.98 × direct's", armPolicies, pod, most, 0.98)
		}
		if r.kubelet {
			l = append(l, result.Aim{ID: "G1, kubelet", Arm: armKubelet, Measure: pod, Params: most, Of: result.Value,
				Over: &result.CellRef{Arm: armDirectKubelet}, Bound: 0.95,
				Text: "ebpf: beside kubelet's rules, a pod's connection ≤ 0.95 × direct's beside them"})
		}
		direct("G1, node", "ebpf: a connection of the node's own processes ≤ 1.02 × direct's", experiment.ArmEBPF, "crr",
			most, 1.02)
		if slices.Contains(modes, "iptables") {
			over("G2, few", "ebpf: a pod's connection at 10 Services takes ≤ 0.80 × iptables'", "iptables", ten, 0.8)
		}
		if slices.Contains(layouts, classic.IPTables19) {
			over("G2, many", "ebpf: a pod's connection at 10,000 Services takes ≤ 0.43 × that with kube-proxy's iptables "+
				"rules of 2019", experiment.LayoutIPTables19, most, 0.43)
		}
	}
	if slices.Contains(modes, experiment.ArmNFTables) {
		direct("G2, nftables", "nftables: a pod's connection at 10,000 Services takes ≤ 1.15 × direct's",
			experiment.ArmNFTables, pod, most, 1.15)
		direct("G2, nftables, few", "nftables: at 10 Services ≤ 1.15 × direct's", experiment.ArmNFTables, pod, ten, 1.15)
	}
	return l
}
