package containers

import (
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

const byArticle = "Why containers slow applications"

// published is what the article measured with wrk: a virtual machine, then a container of Calico with IPIP.
var published = struct{ hostMs, podMs, hostRate, podRate float64 }{1.68, 2.11, 716, 554}

// slower is the article's ratio of round trips.
const slower = 1.256

// Design returns the experiment in words and numbers.
func (r *trial) Design() result.Design {
	d := r.design()
	if !r.profile.Exact {
		return d
	}
	var left []string
	for _, m := range d.Measures {
		if counts := m.Stat == result.Counter("softnet_pinned"); !counts && m.ID != "rr" && m.ID != "crr" {
			left = append(left, m.ID)
		}
	}
	d.LeaveOut(experiment.NoTime, left...)
	d.Missing = append(d.Missing, "With --exact, arms with a limit of processor time.")
	return d
}

// design returns that of a run that measures times.
func (r *trial) design() result.Design {
	var arms []result.Arm
	for _, a := range allArms {
		if r.has(a.ID) || r.second.has(a.ID) {
			arms = append(arms, a.Arm)
		}
	}
	return result.Design{
		ID: "containers", Title: "A server in a pod against one on the host, factor by factor",
		Question: "What does a pod's network cost a server against a process of the node, by the path of its packets, " +
			"and how much of the 25 % of “Why containers slow applications down” is the path, the tunnel, connection " +
			"tracking, or a limit of processor time?",
		Vary: result.Axis{Param: "none", Title: "nothing", Short: "nothing"}, Arms: arms, Baseline: testbed.ArmDirect,
		Again: testbed.ArmAgain, Margin: 0.02, Rounds: r.profile.Rounds, Measures: r.measures(),
		Aims: append(r.claims(), r.own()...), Method: r.method(), Missing: r.missing(), Answer: r.answer(),
		Pictures: r.pictures(),
	}
}

// measures are those of the load's operations that the profile has, and those of the panel.
func (r *trial) measures() (l []result.Measure) {
	l = append(l,
		result.Measure{ID: "packets", From: "rr", Title: "packets for each round trip",
			Stat: result.Counter("softnet_pinned"),
			Text: "that the load's processor takes through the kernel's receive path (/proc/net/softnet_stat, column 1: " +
				"rounds of __netif_receive_skb_core)"},
		result.Measure{ID: "rr", Title: "round trip", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: "closed loop: 100 bytes there and 1,000 back on a kept connection"},
		result.Measure{ID: "crr", Title: "connection with one request", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: "closed loop: connect, 100 bytes there and 1,000 back, reset"},
		result.Measure{ID: "rr-spent", From: "rr", Detail: true, Title: "processor time of a round trip", Unit: "µs",
			Stat: result.Spent("requests"), Ratio: true, Text: "of client, server and agents"},
		result.Measure{ID: "rr-rate", From: "rr", Detail: true, Title: "round trips a second",
			Stat: result.Rate("requests"), Ratio: true, Text: "of one connection, in the closed loop"},
		result.Measure{ID: "rr-softirq", From: "rr", Detail: true, Title: "softirq share of round trips", Unit: "%",
			Stat: result.CPUOf("softirq"), Mean: true, Text: "of the load's processor, by /proc/stat, in ticks of 10 ms"},
		result.Measure{ID: "packets-connection", From: "crr", Detail: true, Title: "packets for each connection with one " +
			"request", Stat: result.Counter("softnet_pinned"), Text: "counted likewise"})
	if r.profile.Open > 0 || r.profile.Exact {
		l = append(l, result.Measure{ID: "open", Title: fmt.Sprintf("request at %d a second", rate), Unit: "µs",
			Stat: result.P50, Ratio: true, Text: "open loop: from the intended start, on a kept connection"},
			result.Measure{ID: "open-softirq", From: "open", Detail: true, Title: "softirq share at that rate", Unit: "%",
				Stat: result.CPUOf("softirq"), Mean: true, Text: "likewise"})
	}
	if r.profile.App > 0 || r.profile.Exact {
		l = append(l, result.Measure{ID: "app", Title: "request of an application", Unit: "ms", Stat: result.Mean,
			Ratio: true, Text: "closed loop: the server computes what takes 1.4 ms of a processor on a host at rest, the " +
				"same in every arm; the mean, as wrk has it"},
			result.Measure{ID: "app-rate", From: "app", Title: "requests a second of an application",
				Stat: result.Rate("requests"), Ratio: true, Text: "of one connection, which keeps the application busy"},
			result.Measure{ID: "app-softirq", From: "app", Detail: true, Title: "softirq share with an application",
				Unit: "%", Stat: result.CPUOf("softirq"), Mean: true, Text: "likewise"})
	}
	l = append(l, result.Measure{ID: "stream", Title: "throughput of a stream", Unit: "Gbit/s",
		Stat: result.Rate("bytes"), Ratio: true, Text: "one connection; every 4 MiB are answered by a byte"},
		result.Measure{ID: "stream-spent", From: "stream", Title: "processor time of a stream", Unit: "ms/Gbit",
			Stat: result.Spent("bytes"), Ratio: true, Margin: 0.05, Text: "of client, server and agents"})
	return append(l, r.second.measures()...)
}

// pictures are the article's chart: before and after, with the article's own numbers.
func (r *trial) pictures() []result.Picture {
	if r.profile.App == 0 {
		return nil
	}
	const source = "the article's wrk, of which round trip × requests a second is 1.2: one connection"
	ghost := func(measure string, x, v float64, label string) result.Ghost {
		return result.Ghost{Measure: measure, X: x, Value: v, Label: label, Source: source}
	}
	ms, vm, pod := float64(time.Millisecond), "article: virtual machine", "article: container"
	return []result.Picture{
		{ID: "before-after", Kind: result.Change, Title: "An application's request, before and after",
			Measures: []string{"app"}, Ghosts: []result.Ghost{ghost("app", 0, published.hostMs*ms, vm),
				ghost("app", 1, published.podMs*ms, pod)}},
		{ID: "before-after-rate", Kind: result.Change, Title: "Its requests a second, before and after",
			Measures: []string{"app-rate"}, Ghosts: []result.Ghost{ghost("app-rate", 0, published.hostRate, vm),
				ghost("app-rate", 1, published.podRate, pod)}},
	}
}

// answer is which cells answer the question.
func (r *trial) answer() *result.Answer {
	present := func(ids ...string) []string {
		return slices.DeleteFunc(ids, func(id string) bool { return !r.has(id) })
	}
	paths := present(armVeth, armOwn, armOwnVXLAN)
	l := []result.Finding{{Subject: "a bare round trip", Verb: "takes", Object: "time", Of: result.Ratio,
		Cells: experiment.Cells("rr", nil, paths...)}}
	chart := "rr"
	if r.profile.App > 0 {
		chart = "before-after"
		l = append(l, result.Finding{Subject: "a request of an application that computes 1.4 ms", Verb: "takes",
			Object: "time", Of: result.Ratio,
			Cells: experiment.Cells("app", nil, present(armOwn, armOwnVXLAN, armLimit, armOwnLimit)...)})
	}
	return &result.Answer{Chart: chart, Findings: append(l, result.Finding{Tally: result.TallyClaims})}
}

// claims are the article's.
func (r *trial) claims() (l []result.Aim) {
	add := func(id, text string, a result.Aim) {
		a.ID, a.Text, a.Claim = id, text, byArticle
		switch {
		case a.Cannot != "":
		case (a.Measure == "app" || a.Measure == "app-rate") && r.profile.App == 0:
			a.Cannot = "an emulated processor's times mean nothing"
		case armOf(a.Arm).agent && r.profile.leavesOut(armOf(a.Arm)):
			a.Cannot = armOf(a.Arm).Title + " is left out on an emulated processor"
		case !r.has(a.Arm) && a.Measure[:min(len(a.Measure), len(panelPrefix))] != panelPrefix:
			a.Cannot = "this machine can't make " + armOf(a.Arm).Title
		}
		l = append(l, a)
	}
	for _, x := range []struct{ id, arm, what string }{
		{"C17, path", armOwn, "behind Fairlead's pod network alone"},
		{"C17, tunnel", armOwnVXLAN, "with a tunnel too (VXLAN, for the article's IPIP)"},
		{"C17, limit", armLimit, "on the host, with a limit of 0.8 processors alone"},
		{"C17, both", armOwnLimit, "behind the pod network, with that limit"},
	} {
		add(x.id, "a request of an application takes the article's 1.256 × the host's (±5 %) "+x.what,
			result.Aim{Measure: "app", Arm: x.arm, Of: result.Ratio, Bound: slower, Margin: 0.05})
	}
	host := &result.CellRef{Arm: testbed.ArmDirect}
	add("C18, packets", "a veth pair adds packets to the receive path: at least 1.9 for each round trip", result.Aim{
		Measure: "packets", Arm: armVeth, Of: result.Value, Less: host, Bound: 1.9, Least: true})
	add("C18, tunnel", "and a tunnel more: at least 1.9 for each round trip, against the same without one", result.Aim{
		Measure: "packets", Arm: armOwnVXLAN, Of: result.Value, Less: &result.CellRef{Arm: armOwn}, Bound: 1.9, Least: true})
	l = append(l, r.ipvlan()...)
	policies := &result.CellRef{Arm: armIPTables}
	add("C20, requests", "eBPF has more requests a second than iptables, with policies in both: round trips", result.Aim{
		Measure: "rr-rate", Arm: armEBPF, Of: result.Value, Over: policies, Bound: 1, Least: true})
	add("C20, processor", "for less processor time each", result.Aim{Measure: "rr-spent", Arm: armEBPF, Of: result.Value,
		Over: policies, Bound: 1})
	add("C20, stream", "and for a stream", result.Aim{Measure: "stream-spent", Arm: armEBPF, Of: result.Value,
		Over: policies, Bound: 1})
	return l
}

// ipvlan is the claim about it: on this kernel if that has one, else in the panel.
func (r *trial) ipvlan() (l []result.Aim) {
	measure, cannot := "packets", ""
	switch {
	case r.has(armIPVLANL2):
	case r.second.has(armIPVLANL2):
		measure = panelPrefix + measure
	default:
		cannot = "this kernel has no ipvlan, and --second-kernel names no run under one that has"
	}
	for _, x := range []struct{ id, arm string }{{"C19, L2", armIPVLANL2}, {"C19, L3", armIPVLANL3}} {
		l = append(l, result.Aim{ID: x.id, Claim: byArticle, Cannot: cannot, Text: "with " + armOf(x.arm).Title + " a " +
			"round trip takes no more packets through the receive path than on the host (within 0.1)", Measure: measure,
			Arm: x.arm, Of: result.Value, Less: &result.CellRef{Arm: testbed.ArmDirect}, Bound: 0.1})
	}
	l = append(l, result.Aim{ID: "C19, fewer", Claim: byArticle, Cannot: cannot, Text: "but fewer than with a veth",
		Measure: measure, Arm: armIPVLANL2, Of: result.Value, Over: &result.CellRef{Arm: armVeth}, Bound: 0.8})
	return l
}

// own are the project's aims.
func (r *trial) own() (l []result.Aim) {
	add := func(a result.Aim) {
		if r.has(a.Arm) {
			l = append(l, a)
		}
	}
	if r.profile.App > 0 {
		add(result.Aim{ID: "application", Text: "pod network: a request of an application takes ≤ 1.01 × the host's",
			Measure: "app", Arm: armOwn, Of: result.Ratio, Bound: 1.01})
	}
	add(result.Aim{ID: "ebpf, round trip", Text: "mode ebpf: a round trip takes ≤ 0.95 × a veth's without it",
		Measure: "rr", Arm: armFast, Of: result.Value, Over: &result.CellRef{Arm: armVeth}, Bound: 0.95})
	add(result.Aim{ID: "packets", Text: "pod network: as many packets through the receive path as a veth has",
		Measure: "packets", Arm: armOwn, Of: result.Value, Over: &result.CellRef{Arm: armVeth}, Bound: 1, Margin: 0.01})
	return l
}

func (r *trial) method() []string {
	l := []string{
		"Every arm has two network namespaces of its own, joined by a veth as by a wire: a node, with the server or its " +
			"pod, and a far end with the client. All arms stand at the same time; a round has a block of each in random " +
			"order, between two of the baseline. Client and server share one processor; all but the applications have " +
			"real-time priority. The pod network's arms have agents of their own, which are called by the CNI plugin.",
		"Packets are counted on the load's processor: each round of the receive path counts, so that a device that hands " +
			"a packet to another (macvlan, ipvlan, a bridge, a redirect) adds one without another softirq. The number of " +
			"softirqs itself says nothing: one takes many packets.",
		fmt.Sprintf("The article's numbers: %.2f ms and %g requests a second on a virtual machine, %.2f ms and %g in a "+
			"container. That is %+.1f %% of time and %+.1f %% of requests; the article has +25 %% and −29 %%, of which the "+
			"second is divided by the wrong number (%g/%g). Time × requests is 1.2 in both rows: wrk had one connection, and "+
			"both percentages are one fact.", published.hostMs, published.hostRate, published.podMs, published.podRate,
			100*(slower-1), 100*(published.podRate/published.hostRate-1), published.hostRate, published.podRate),
	}
	if r.profile.App > 0 {
		l = append(l, fmt.Sprintf("The application's loop is closed, as wrk's is, and blind to what a delay does to "+
			"requests behind it; %d requests a second of 1.4 ms would be 98 %% of a processor, so the open loop has requests "+
			"without work. Its server has a cgroup of its own, with the greatest weight against others, in every arm; those "+
			"with a limit differ in that alone. Limits don't reach real-time threads, so applications have none of that "+
			"priority: whatever else runs on the machine takes part.", rate))
	}
	if r.second != nil {
		m := r.second.run.Manifest
		l = append(l, fmt.Sprintf("The second kernel's panel is a run of %s there (%s, %s, seed %d): an emulated "+
			"processor's times are no times, so that it has counts and ratios within that run, and no other number is compared "+
			"with them.",
			m.Started.Format(time.DateOnly), m.Machine.Kernel, m.Profile, m.Seed))
	}
	return l
}

func (r *trial) missing() (l []string) {
	for _, u := range r.cannot {
		where := ""
		if a := slices.IndexFunc(allArms, func(a arm) bool { return a.Title == u.Name }); r.second.has(allArms[a].ID) {
			where = "; the second kernel's panel has it"
		}
		l = append(l, fmt.Sprintf("%s: this machine can't make it: %s%s.", u.Name, u.Why, where))
	}
	if r.profile.App == 0 && !r.profile.Exact {
		l = append(l, "Arms with an agent or a limit, requests at a fixed rate, and applications: on an emulated processor "+
			"they take long, and their times mean nothing.")
	}
	return append(l, "A virtual machine against a container on it, the article's pair: here both are on one kernel.",
		"Calico and Cilium themselves: their paths are, as veth, IPIP, netkit and eBPF.",
		"A network between two machines, whose interrupts and time come to every packet of every arm.")
}
