package policies

import (
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// Design returns the experiment in words and numbers.
func (r *trial) Design() result.Design {
	d := r.design()
	if r.profile.Added == 0 {
		return d
	}
	var left []string
	for _, m := range d.Measures {
		if !slices.Contains([]string{"crr", "rr", "load"}, m.ID) {
			left = append(left, m.ID)
		}
	}
	d.LeaveOut(experiment.NoTime, left...)
	d.Measures = append(d.Measures, r.additionMeasures()...)
	return d
}

// design returns that of a run that measures times.
func (r *trial) design() result.Design {
	return result.Design{
		ID: "policies", Title: "What network policies cost, by engine",
		Question: "What do a new connection and a round trip of a pod pay for network policies, few and many, with each " +
			"policy engine? And how long do changes of a large cluster take to reach the kernel?",
		Vary: experiment.PolicyAxis, Arms: r.arms(), Baseline: experiment.ArmTracked,
		Again: experiment.ArmTrackedAgain, Margin: 0.01, Rounds: r.profile.Rounds, Measures: r.measures(), Aims: r.aims(),
		Method: r.method(), Missing: r.missing(), Answer: r.answer(),
	}
}

// arms are those of the grid, and of engines with policies for both ends.
func (r *trial) arms() []result.Arm {
	l := r.grid.Arms()
	for _, e := range r.bothEnds() {
		i := slices.IndexFunc(l, func(a result.Arm) bool { return a.ID == e.Name })
		a := l[i]
		a.ID, a.Title, a.Style = a.ID+both, a.Title+", both ends", 0
		a.Text = "the same, with as many policies that select the client's pod, which is one of the same node"
		l = slices.Insert(l, i+1, a)
	}
	return l
}

// answer is which cells answer the question.
func (r *trial) answer() *result.Answer {
	at, arms := experiment.PolicyParams(r.grid.Most()), append(slices.Clone(r.grid.Lists), r.grid.EngineNames()...)
	findings := []result.Finding{
		{Subject: "a connection with one request under " + experiment.Thousands(r.grid.Most()) + " policies",
			Verb: "takes", Object: "time", Of: result.Ratio, Cells: experiment.Cells("crr", at, arms...)},
	}
	if l := r.grid.RouterCounts(); len(l) > 0 {
		n := slices.Max(l)
		findings = append(findings, result.Finding{Subject: "a connection with one request under " + experiment.Thousands(n) +
			" policies", Verb: "takes", Object: "time", Of: result.Ratio, Cells: experiment.Cells("crr",
			experiment.PolicyParams(n), append([]string{experiment.ArmKubeRouter}, r.grid.EngineNames()...)...)})
	}
	return &result.Answer{Chart: "crr", Findings: append(findings,
		result.Finding{Subject: "a changed label is in the kernel of a node within", Of: "p99",
			Cells: experiment.Cells("label", nil, r.grid.EngineNames()...)},
		result.Finding{Tally: result.TallyAims})}
}

func (r *trial) measures() []result.Measure {
	p, load := r.profile, experiment.LoadMeasure
	load.Title, load.Text = "first full write of 10 to 10,000 policies", "lists: the command's time; engines: from what "+
		"is decided until all is in the kernel; kube-router: its first sync, as it logs that"
	load.Counted = experiment.PoliciesLoaded
	size := func(pods, here, cluster int) string {
		return fmt.Sprintf("%s pods, %s NetworkPolicies and %d ClusterNetworkPolicies, with %d pods on the node",
			experiment.Thousands(pods), experiment.Thousands(pods*3/4), cluster, here)
	}
	large, wide := size(p.Large.Pods, p.Large.Here, p.Large.Cluster), size(p.Wide.Pods, p.Wide.Here, p.Wide.Cluster)
	l := []result.Measure{
		{ID: "crr", Title: "connect, request, close", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: fmt.Sprintf("connect(2), %d bytes there, %d bytes back, close(2) with a reset; closed loop",
				testbed.Sizes.Request, testbed.Sizes.Response)},
		{ID: "rr", Title: "round trip on a kept connection", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: "the same without connect and close"},
		load,
		{ID: "label", Title: "a pod's label, event to kernel", Unit: "ms", Stat: result.P50,
			Text: fmt.Sprintf("%d changes a second, half of them of pods on the node, in a cluster of %s; from when each was "+
				"to change: resolver, rendering, the kernel's acknowledgement", eventRate, large)},
		{ID: "label-p99", From: "label", Title: "its 99th percentile", Unit: "ms", Stat: result.P99, Text: "likewise"},
		{ID: "namespace", Title: "a namespace's label, to the kernel", Unit: "ms", Stat: result.P50,
			Text: fmt.Sprintf("a namespace of %d pods moves to another team, in a cluster of %s",
				p.Wide.Pods/p.Wide.Namespaces, wide)},
		{ID: "namespace-p99", From: "namespace", Title: "its 99th percentile", Unit: "ms", Stat: result.P99,
			Text: "likewise"},
		{ID: "write", Title: fmt.Sprintf("first write of %s peers", experiment.Thousands(p.Peers)), Unit: "s",
			Stat: result.Value, Text: fmt.Sprintf("and of %s peer verdicts: from what is decided to the kernel's "+
				"acknowledgement", experiment.Thousands(tables*identities))},
		{ID: "resolve", Title: "processor time of the resolver at start", Unit: "s", Stat: result.Value, Text: "of " + large +
			", without parsing"},
		{ID: "heap", Title: "memory of the resolver", Unit: "MiB", Stat: result.Value, Exact: true,
			Text: "likewise, without the objects"},
	}
	for _, n := range p.Flows {
		l = append(l, result.Measure{ID: cutMeasure(n), Title: fmt.Sprintf("%s connections cut", experiment.Thousands(n)),
			Unit: "ms", Stat: result.Value, Text: "from the change that denies them until all are marked, and the rule that " +
				"cuts what is marked is in the kernel"})
	}
	return l
}

// aims are the project's.
func (r *trial) aims() (l []result.Aim) {
	few, most := r.grid.Counts[0], r.grid.Most()
	ten, many := experiment.PolicyParams(few), experiment.PolicyParams(most)
	add := func(engine, id, text string, bound float64, a result.Aim) {
		a.ID, a.Text, a.Arm, a.Bound = id+", "+engine, engine+": "+text, engine, bound
		if a.Of == "" {
			a.Of = result.Value
		}
		l = append(l, a)
	}
	direct := &result.CellRef{Arm: testbed.ArmDirect}
	between := fmt.Sprintf("under %s policies takes at most", experiment.Thousands(most))
	for _, e := range r.grid.Engines {
		tracked, name := e.Marked, e.Name
		bound := map[string]float64{"iptables": 1.015}[name]
		bound = max(bound, 1.005)
		add(name, "P1, connection", fmt.Sprintf("a connection %s %g × one under %d", between, bound, few), bound,
			result.Aim{Measure: "crr", Params: many, Over: &result.CellRef{Params: ten}})
		add(name, "P1, round trip", fmt.Sprintf("a round trip %s 1.003 × one under %d", between, few), 1.003,
			result.Aim{Measure: "rr", Params: many, Over: &result.CellRef{Params: ten}})
		if tracked {
			add(name, "P2", "policies in one direction add at most 1.5 % to a connection that is tracked", 1.015,
				result.Aim{Measure: "crr", Params: ten, Of: result.Ratio})
		}
		if tracked && len(r.bothEnds()) > 0 {
			add(name, "P2, both ends", "in both directions at most 2.5 %", 1.025, result.Aim{Measure: "crr", Params: ten,
				Of: result.Ratio})
			l[len(l)-1].Arm += both
		}
		limits := map[bool][2]float64{true: {1.12, 1.07}, false: {1.055, 1.025}}[tracked]
		add(name, "P3, connection", fmt.Sprintf("the node's first policies add at most %.1f %% to a bare connection",
			100*(limits[0]-1)), limits[0], result.Aim{Measure: "crr", Params: ten, Over: direct})
		add(name, "P3, round trip", fmt.Sprintf("and at most %.1f %% to a bare round trip", 100*(limits[1]-1)), limits[1],
			result.Aim{Measure: "rr", Params: ten, Over: direct})
		add(name, "P4, time", "the resolver begins within 1 s of processor time", float64(time.Second),
			result.Aim{Measure: "resolve"})
		add(name, "P4, memory", "and holds at most 150 MB", 150e6, result.Aim{Measure: "heap"})
		add(name, "P5", "a label's change is in the kernel within 5 ms (p99)", 5*float64(time.Millisecond),
			result.Aim{Measure: "label", Of: "p99"})
		add(name, "P6", "a namespace's within 100 ms (p99)", 100*float64(time.Millisecond),
			result.Aim{Measure: "namespace", Of: "p99"})
		if name != "iptables" {
			add(name, "P7", "the first write takes at most "+map[bool]string{true: "1 s", false: "0.3 s"}[tracked],
				map[bool]float64{true: 1, false: 0.3}[tracked]*float64(time.Second), result.Aim{Measure: "write"})
		}
		for i, n := range r.profile.Flows {
			limit := []time.Duration{50 * time.Millisecond, 500 * time.Millisecond}[min(i, 1)]
			if tracked {
				add(name, fmt.Sprint("P8, ", experiment.Thousands(n)), fmt.Sprintf("%s connections are cut within %v",
					experiment.Thousands(n), limit), float64(limit), result.Aim{Measure: cutMeasure(n)})
			}
		}
	}
	return l
}

func (r *trial) method() []string {
	return []string{
		"Every arm has three network namespaces of its own: a node, a pod of it with the server, and a far end with the " +
			"client, which stands for a pod of another node. All arms stand at the same time; a round has a block of each in " +
			"random order, between two of the baseline. Client and server share one processor and have real-time priority.",
		"Each policy selects the server's pod and allows a client of its own at a port of its own; the last one that which " +
			"connects. The objects are decided by the resolver and written by an engine's own loop, with what cuts " +
			"connections before it, as in the agent, but in the lab's process.",
		"Changes are measured before there is any traffic, in namespaces of their own, on all processors. Objects are " +
			"passed to the resolver; what a source takes to parse them is not in these times. They are absolute: they hold " +
			"for this machine, and for how busy it is.",
	}
}

func (r *trial) missing() []string {
	l := append(r.grid.NotMeasured(), "kube-network-policies, which decides in user space: its table needs nf_tables' "+
		"expression queue (CONFIG_NFT_QUEUE); see docs/measurements/policies.md.")
	if r.grid.Router == "" {
		l = append(l, "kube-router: none was given. --subject kube-router=PATH takes one; `make -C test/kubeproxy "+
			"kube-router` builds one and says where.")
	} else {
		l = append(l, fmt.Sprintf("kube-router with more than %s policies.", experiment.Thousands(experiment.MostKubeRouter)))
	}
	if len(r.bothEnds()) == 0 {
		l = append(l, "Policies for both ends of a connection on one node, and for what pods send (P2's second number): "+
			"--exact counts them.")
	}
	return append(l,
		"Policies in the programs of mode ebpf at devices (P3's first number): the engine ebpf is at netfilter's hooks.",
		"The first write of peers by iptables, which has every peer in a set of each peer table.",
		"The wait of a pod's start for its policies (P9).",
		"How soon the engine ebpf cuts: it decides about a connection's next packet anew, and needs no pass.")
}
