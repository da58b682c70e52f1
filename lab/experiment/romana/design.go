package romana

import (
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
)

const byRomana = "Romana 2016"

// published is the article's first table: milliseconds by policies and by size.
var published = []struct {
	policies int
	ms       []float64
}{
	{0, []float64{0.732, 0.738, 1.077, 2.532, 10.487}},
	{10, []float64{0.744, 0.742, 1.084, 2.570, 10.556}},
	{50, []float64{0.745, 0.755, 1.086, 2.580, 10.566}},
	{100, []float64{0.762, 0.770, 1.104, 2.640, 10.597}},
	{200, []float64{0.783, 0.783, 1.147, 2.652, 10.677}},
}

// publishedShares is its second table, which prints a slow-down as a negative number: here it is positive.
var publishedShares = []struct {
	policies int
	percent  []float64
}{
	{10, []float64{1.6, 0.5, 0.6, 1.5, 0.7}},
	{50, []float64{1.8, 2.3, 0.8, 1.9, 0.8}},
	{100, []float64{4.1, 4.3, 2.5, 4.3, 1.0}},
	{200, []float64{7.0, 6.1, 6.5, 4.7, 1.8}},
}

// many is the article's greatest number of policies.
const many = 200

// Design returns the experiment in words and numbers.
func (r *trial) Design() result.Design {
	d := r.design()
	if !r.profile.Exact {
		return d
	}
	var left []string
	for i, m := range d.Measures {
		if m.ID == experiment.LoadMeasure.ID {
			continue
		}
		if !slices.ContainsFunc(r.profile.sizes(), func(s size) bool { return m.ID == s.measure() }) {
			left = append(left, m.ID)
			continue
		}
		d.Measures[i].Text = fmt.Sprintf("closed loop: connect, %d bytes there, the answer back, close with a reset", request)
	}
	d.LeaveOut("one thread can't send itself a long answer, a few interrupts move a mean, and rules are counted without "+
		"--exact", left...)
	return d
}

// design returns that of a run that measures times.
func (r *trial) design() result.Design {
	return result.Design{
		ID: "romana", Title: "Requests under network policies, by number of policies and size of the answer",
		Question: "What do network policies delay an HTTP request by that opens a connection of its own, as their number " +
			"and the answer's size grow, with each policy engine and with a list of rules? And do the claims of “High " +
			"performance network policies in Kubernetes clusters” (Romana, 2016) hold on this kernel?",
		Vary: experiment.PolicyAxis, Arms: r.grid.Arms(), Baseline: experiment.ArmTracked,
		Again: experiment.ArmTrackedAgain, Margin: 0.02, Rounds: r.profile.Rounds, Measures: r.measures(),
		Aims: append(r.claims(), r.own()...), Method: r.method(), Missing: r.missing(), Answer: r.answer(),
		Pictures: r.pictures(),
	}
}

// answer is which cells answer the question.
func (r *trial) answer() *result.Answer {
	at, arms := experiment.PolicyParams(r.grid.Most()), append(slices.Clone(r.grid.Lists), r.grid.EngineNames()...)
	of := experiment.Thousands(r.grid.Most()) + " policies"
	return &result.Answer{Chart: "http-1k", Findings: []result.Finding{
		{Subject: "a request for 1 kB under " + of, Verb: "takes", Object: "time", Of: result.Ratio,
			Cells: experiment.Cells("http-1k", at, arms...)},
		{Subject: "a new connection under " + of, Verb: "takes", Object: "rules or map lookups", Of: result.Value,
			Cells: experiment.Cells("rules", at, arms...)},
		{Tally: result.TallyClaims},
	}}
}

// measures are those of requests, of writing policies, and of rules.
func (r *trial) measures() (l []result.Measure) {
	for _, s := range sizes {
		l = append(l, result.Measure{ID: s.measure(), Title: "request for " + s.Name + "B", Unit: "µs", Stat: result.P50,
			Ratio: true, Text: fmt.Sprintf("open loop, %g requests a second, from the intended start: connect, %d bytes "+
				"there, %s bytes back, the server's FIN; the median of a block", s.Rate, request,
				experiment.Thousands(s.Bytes))})
	}
	for _, s := range sizes {
		l = append(l, result.Measure{ID: s.measure() + "-mean", From: s.measure(), Detail: true, Title: "request for " +
			s.Name + "B, mean", Unit: "µs", Stat: result.Mean, Ratio: true,
			Text: "the mean of a block, as the article has it, which a few slow requests move"})
	}
	load := experiment.LoadMeasure
	load.Text = "lists: the command's time; engines: from what is decided until all is in the kernel"
	load.Counted = experiment.PoliciesLoaded
	return append(l, load,
		result.Measure{ID: "rules", Title: "rules or map lookups per new connection", Stat: result.Value, Exact: true,
			Text: "counted: rules that a connection's first packet to the server's pod is tested against, which the last " +
				"policy allows; of ebpf, its lookups in maps"},
		result.Measure{ID: "rules-established", Title: "rules or map lookups per packet of an established connection",
			Stat: result.Value, Exact: true, Text: "likewise: of every packet after the connection's first"})
}

// pictures are the article's two charts, which are its two tables too, for each arm with policies.
func (r *trial) pictures() (l []result.Picture) {
	var times, shares []result.Ghost
	for _, row := range published {
		for i, ms := range row.ms {
			times = append(times, result.Ghost{Measure: sizes[i].measure(), X: float64(row.policies),
				Value: ms * float64(time.Millisecond), Label: "Romana 2016", Source: "the article's first table, by two " +
					"machines of 1.6 GHz with a network of 1 Gbit/s between them"})
		}
	}
	for _, row := range publishedShares {
		for i, p := range row.percent {
			shares = append(shares, result.Ghost{Measure: sizes[i].measure(), X: float64(row.policies), Value: 1 + p/100,
				Label: "Romana 2016", Source: "the article's second table, with the sign of a slow-down corrected"})
		}
	}
	var ids []string
	for _, s := range sizes {
		ids = append(ids, s.measure())
	}
	for _, a := range r.grid.Arms()[len(r.grid.Arms())-len(r.grid.Lists)-len(r.grid.Engines):] {
		l = append(l, result.Picture{ID: "times-" + a.ID, Kind: result.Family, Title: "Request duration, " + a.Title,
			Measures: ids, Arms: []string{a.ID}, Of: result.Value, Most: many, Ghosts: times},
			result.Picture{ID: "shares-" + a.ID, Kind: result.Family, Title: "Change of the request's duration, " + a.Title,
				Measures: ids, Arms: []string{a.ID}, Of: result.Ratio, Most: many, Ghosts: shares})
	}
	return l
}

// claims are the article's, tested on the list of iptables' rules that it measured.
func (r *trial) claims() (l []result.Aim) {
	at, arm, cannot := experiment.PolicyParams(many), experiment.ArmListIPTables, ""
	if !slices.Contains(r.grid.Lists, arm) {
		cannot = "policies can't be written as iptables' rules here"
	}
	add := func(id, text string, a result.Aim) {
		a.ID, a.Text, a.Claim, a.Cannot = id, text, byRomana, cannot
		if a.Arm == "" {
			a.Arm, a.Params = arm, at
		}
		l = append(l, a)
	}
	for _, s := range sizes {
		add("C12, "+s.Name, "200 policies as a list delay a request for "+s.Text+" by at most 0.2 ms", result.Aim{
			Measure: s.measure(), Of: result.Value, Less: &result.CellRef{Arm: experiment.ArmTracked},
			Bound: 0.2 * float64(time.Millisecond)})
	}
	for _, s := range sizes[:3] {
		add("C13, "+s.Name, "and by at most 7 % for small answers: "+s.Text, result.Aim{Measure: s.measure(),
			Of: result.Ratio, Bound: 1.07})
	}
	add("C14", "by at most 2 % for answers of 1 MB", result.Aim{Measure: "http-1M", Of: result.Ratio, Bound: 1.02})
	add("C15, rules", "only the first packet walks the list: a packet of an established connection is tested against as "+
		"many rules under 200 policies as under 10", result.Aim{Measure: "rules-established", Of: result.Value,
		Over: &result.CellRef{Params: experiment.PolicyParams(10)}, Bound: 1})
	add("C15, delay", "so that the delay does not grow with the answer: under 200 policies a request for 1 MB is delayed "+
		"by at most 5 µs more than one for 0.5 kB (the article's own table: 139 µs more)", result.Aim{Measure: "http-1M",
		Of: result.More, Less: &result.CellRef{Measure: "http-.5k", Arm: arm, Params: at},
		Bound: 5 * float64(time.Microsecond)})
	add("C16", "a request for 1 kB takes as long as one for 0.5 kB (±1 %), without policies", result.Aim{
		Measure: "http-1k", Arm: experiment.ArmTracked, Of: result.Value, Over: &result.CellRef{Measure: "http-.5k"},
		Bound: 1, Margin: 0.01})
	return l
}

// own are the project's aims.
func (r *trial) own() (l []result.Aim) {
	most := r.grid.Most()
	at, ten := experiment.PolicyParams(most), experiment.PolicyParams(r.grid.Counts[0])
	bounds := map[string]float64{"nftables": 8, "iptables": 60, engineMaps: 8}
	for _, e := range r.grid.EngineNames() {
		l = append(l, result.Aim{ID: e + ", few", Text: fmt.Sprintf("%s: 200 policies delay a request for 1 kB by at most "+
			"1 %%, against connection tracking", e), Measure: "http-1k", Arm: e, Params: experiment.PolicyParams(many),
			Of: result.Ratio, Bound: 1.01},
			result.Aim{ID: e + ", flat", Text: fmt.Sprintf("%s: a request for 1 kB under %s policies takes at most 1.01 × one "+
				"under %d", e, experiment.Thousands(most), r.grid.Counts[0]), Measure: "http-1k", Arm: e, Params: at,
				Of: result.Value, Over: &result.CellRef{Params: ten}, Bound: 1.01},
			result.Aim{ID: e + ", rules", Text: fmt.Sprintf("%s: a new connection under %s policies takes at most "+
				"%g rules or map lookups", e, experiment.Thousands(most), bounds[e]), Measure: "rules", Arm: e, Params: at,
				Of: result.Value, Bound: bounds[e]},
			result.Aim{ID: e + ", established", Text: e + ": a packet of an open connection takes at most 1 rule or map lookup",
				Measure: "rules-established", Arm: e, Params: at, Of: result.Value, Bound: 1})
	}
	return l
}

func (r *trial) method() []string {
	pace := fmt.Sprintf(" Requests come at a rate far below saturation, each on a connection of its own; a cell has %d "+
		"requests.", r.profile.Rounds*r.profile.Each)
	if r.profile.Exact {
		pace = ""
	}
	return []string{
		"Every arm has three network namespaces of its own: a node, a pod of it with the servers, one for each " +
			"size of an answer, and a far end with the client, which stands for a pod of another node. All arms stand at the " +
			"same time; a round has a block of each in random order, between two of the baseline. The servers are the lab's " +
			"own, in nginx's place. Clients and servers share one processor and have real-time priority." + pace,
		"The article's policies allow a client at a protocol and port; all but the last allow another port than the " +
			"server's. So do these, for the same client, by NetworkPolicy objects, which the resolver decides and an engine's " +
			"own loop writes, as in the agent, but in the lab's process. The lists are written by the lab itself: a rule for " +
			"each policy, behind one that accepts what is established. Half of the ports that don't match are below the " +
			"server's, half above: in a tree over ports, such as the engine iptables has, it is in the middle.",
		"The baseline is connection tracking alone, which the article's nodes had without policies too. Nothing at all, " +
			"without connection tracking, is an arm beside it.",
		"Romana's second table prints a slow-down as a negative number; its points stand here with the sign corrected. Its " +
			"first table is of two machines and a network of 1 Gbit/s; what can be compared is the delay, in microseconds, " +
			"rather than its share of a request: a request here takes a tenth of the article's.",
		"Rules are counted by two ways that know nothing of each other: on paper, from what the kernel lists, and by the " +
			"kernel's own trace of one packet. A lookup in a map or set is one rule. ebpf evaluates without a rule: what " +
			"counts are its lookups in hashes and tries, on paper from what the policies come to, and by its program, which " +
			"is loaded to count them. It also writes one entry, of the connection's flow.",
	}
}

func (r *trial) missing() []string {
	return append(r.grid.NotMeasured(), "The article's wire of 1 Gbit/s, and Romana itself, which is no longer built.",
		"A connection and a round trip in a closed loop, to a tenth of a per cent: the experiment policies has them.",
		"Policies for what pods send, IPv6, UDP and SCTP.")
}
