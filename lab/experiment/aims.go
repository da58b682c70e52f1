package experiment

import (
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// What ends the names of measures: of a client in a pod; with cold caches.
const (
	SuffixPod  = "-pod"
	SuffixCold = "-cold"
)

// Cells returns those of a measure with the same parameters, an arm each, for a finding.
func Cells(measure string, params result.Params, arms ...string) (l []result.CellRef) {
	for _, a := range arms {
		l = append(l, result.CellRef{Measure: measure, Arm: a, Params: params})
	}
	return l
}

// ByTigera is the source of claims: "Comparing kube-proxy modes: iptables or IPVS?".
const ByTigera = "Tigera 2019"

// ConnectionAims returns the project's for new connections in mode ebpf, of measures whose names end in a suffix.
func ConnectionAims(modes []string, layouts []classic.Layout, suffix string) (l []result.Aim) {
	if !slices.Contains(modes, ArmEBPF) {
		return nil
	}
	at, ten, how := testbed.ServiceParams(10000), testbed.ServiceParams(10), ""
	if strings.HasPrefix(suffix, SuffixPod) {
		how = ", pod"
	}
	if strings.HasSuffix(suffix, SuffixCold) {
		how += ", cold"
	}
	add := func(id, text string, a result.Aim) {
		a.ID, a.Text, a.Arm, a.Measure = id+how, text+how, ArmEBPF, a.Measure+suffix
		l = append(l, a)
	}
	over := func(arm string, at result.Params) *result.CellRef { return &result.CellRef{Arm: arm, Params: at} }
	add("ebpf, connection", "ebpf: a connection with one request at 10,000 Services costs ≤ 1.01 × direct",
		result.Aim{Measure: "crr", Params: at, Of: result.Ratio, Bound: 1.01})
	add("ebpf, connect", "ebpf: connect() at 10,000 Services costs ≤ 1.02 × direct",
		result.Aim{Measure: "connect", Params: at, Of: result.Ratio, Bound: 1.02})
	if slices.Contains(modes, "iptables") {
		add("ebpf, few", "ebpf: a connection costs ≤ 0.90 × iptables at 10 Services",
			result.Aim{Measure: "crr", Params: ten, Of: result.Value, Over: over("iptables", ten), Bound: 0.9})
	}
	if slices.Contains(layouts, classic.IPTables19) {
		add("ebpf, many", "ebpf: a connection costs ≤ 0.65 × kube-proxy's iptables rules of 2019 at 10,000 Services",
			result.Aim{Measure: "crr", Params: at, Of: result.Value, Over: over(LayoutIPTables19, at), Bound: 0.65})
	}
	return l
}
