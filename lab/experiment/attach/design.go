package attach

import (
	"fmt"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
)

// Design returns the experiment in words and numbers.
func (t *trial) Design() result.Design {
	p := t.profile
	d := result.Design{
		ID: "attach", Title: "What a CNI plugin takes to connect a pod",
		Question: fmt.Sprintf("How long do ADD and DEL of fairlead-cni with its agent take on a node of %d pods, against "+
			"bridge and ptp of the CNI project with host-local, for pods of one and of two address families?",
			p.Running),
		Vary: result.Axis{Param: families, Title: "address families", Short: "families"},
		Arms: t.arms(), Baseline: armFairlead, Again: armAgain, Margin: 0.05, Rounds: p.Rounds,
		Measures: []result.Measure{
			{ID: "add", Title: "ADD", Unit: "ms", Stat: result.P50, Ratio: true,
				Text: "from the plugin's start to its end: the pod has addresses and routes; the median of a block",
				Counted: "what the plugin and the programs that it runs execute, from its start to its end, and the agent " +
					"meanwhile: the pod has addresses and routes; the median of a block"},
			{ID: "del", Title: "DEL", Unit: "ms", Stat: result.P50, Ratio: true,
				Text:    "likewise: the pod's addresses are free, and nothing leads to it",
				Counted: "likewise: the pod's addresses are free, and nothing leads to it"},
			{ID: "burst", Title: fmt.Sprintf("%d ADDs at once", p.Running), Unit: "ms", Stat: result.Value,
				Text:    "as a node starts: from the first plugin's start to the last one's end; once",
				Counted: "as a node starts: what all plugins execute, and the agent meanwhile; once"},
		},
		Aims: t.aims(), Answer: t.answer(),
		Method: []string{
			fmt.Sprintf("Every arm has a node of its own, a network namespace, with %d pods that stay. A block is %d "+
				"pods, each with a new network namespace and container ID, as by a container runtime: an ADD for one "+
				"after the other, then a DEL for each, then their namespaces end, which is not timed. Every round has "+
				"a block of each arm in an order that is drawn. Plugins are programs that run in the node's namespace "+
				"with the environment and input of a container runtime, without libcni's cache.", p.Running, p.Each),
			"Fairlead's agent runs in mode nftables with source validation and masquerading, which the others' " +
				"configurations don't ask for. Fairlead's ADD returns when device, neighbours, routes and source " +
				"validation are in the kernel. ptp waits for duplicate address detection of IPv6. bridge and ptp " +
				"delete the pod's device in DEL; Fairlead leaves it without routes until the pod's namespace ends, " +
				"five seconds at most.",
			"The kernel changes devices under one lock of the whole machine (RTNL): other programs that add or remove devices " +
				"lengthen all arms' slowest calls.",
		},
		Missing: []string{"Pods that come at a given rate, whatever the plugin takes: this is a closed loop.",
			"The container runtime's own work."},
	}
	for _, x := range []string{experiment.BridgeProgram.Name, experiment.PTPProgram.Name} {
		if t.programs[x] == "" {
			d.Missing = append(d.Missing, fmt.Sprintf("The plugin %s: none was given. --subject %s=PATH takes one, with "+
				"host-local beside it; `%s` builds it.", x, x, experiment.CNIBuild))
		}
	}
	if t.exact {
		exactDesign(&d)
	}
	return d
}

// arms are those that are compared.
func (t *trial) arms() (l []result.Arm) {
	l = []result.Arm{
		{ID: armFairlead, Title: "Fairlead", Style: 3, Text: "fairlead-cni and `fairlead run --network-mode Own`"},
		{ID: armAgain, Title: "Fairlead again", Style: 8, Text: "the same on another node: what it differs by is what this " +
			"run can't tell from nothing"},
		{ID: armPolicies, Title: "Fairlead, policies", Style: 5, Text: "the same with `--policy-mode Enforce`: each " +
			"pod is known from the API and selected by a NetworkPolicy, which ADD waits for"}}
	for i, x := range []string{experiment.BridgeProgram.Name, experiment.PTPProgram.Name} {
		if t.programs[x] != "" {
			l = append(l, result.Arm{ID: x, Title: x + " + host-local", Style: 1 + 6*i, Text: "the plugin " + x + " that was " +
				"given, with host-local for addresses"})
		}
	}
	return l
}

// others are the arms of other plugins.
func (t *trial) others() []result.Arm { return t.arms()[3:] }

func (t *trial) answer() *result.Answer {
	var others []string
	for _, a := range t.others() {
		others = append(others, a.ID)
	}
	a := &result.Answer{Chart: "add", Findings: []result.Finding{
		{Subject: "connecting a pod of two address families", Verb: "takes", Of: result.P50,
			Cells: experiment.Cells("add", both, armFairlead)}, {Tally: result.TallyAims}}}
	if len(others) > 0 {
		a.Findings = append(a.Findings[:1:1], result.Finding{Subject: "another plugin", Verb: "takes", Object: "time",
			Of: result.Ratio, Cells: experiment.Cells("add", both, others...)}, a.Findings[1])
	}
	return a
}

// aims are those of the pod network's design, on a node that is otherwise at rest.
func (t *trial) aims() []result.Aim {
	ms := float64(time.Millisecond)
	l := []result.Aim{
		{ID: "add", Text: "ADD of two address families: median ≤ 3.5 ms", Measure: "add", Of: result.P50, Bound: 3.5 * ms},
		{ID: "add, slowest", Text: "ADD of two address families: p99 ≤ 15 ms", Measure: "add", Of: result.P99,
			Bound: 15 * ms},
		{ID: "del", Text: "DEL: median ≤ 2.5 ms", Measure: "del", Of: result.P50, Bound: 2.5 * ms},
		{ID: "del, slowest", Text: "DEL: p99 ≤ 10 ms", Measure: "del", Of: result.P99, Bound: 10 * ms},
	}
	if t.profile.Running == full.Running {
		l = append(l, result.Aim{ID: "burst", Text: "110 ADDs at once ≤ 0.6 s", Measure: "burst", Of: result.Value,
			Bound: 600 * ms})
	}
	for i := range l {
		l[i].Arm, l[i].Params = armFairlead, both
	}
	l = append(l, result.Aim{ID: "policies, slowest", Text: "ADD that waits for policies: p99 ≤ 20 ms", Measure: "add",
		Arm: armPolicies, Params: both, Of: result.P99, Bound: 20 * ms})
	for _, a := range t.others() {
		l = append(l, result.Aim{ID: "against " + a.ID, Text: "ADD of " + a.Title + " takes at least twice as long",
			Measure: "add", Arm: a.ID, Params: both, Of: result.Ratio, Bound: 2, Least: true})
	}
	return l
}
