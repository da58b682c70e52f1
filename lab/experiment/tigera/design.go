package tigera

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// constant is the mode that stands for IPVS in claims, which the article compared iptables with: IPVS itself where it
// runs, else nftables, which translates by the same connection tracking after one look-up, whatever the number of
// Services; "" for neither.
func (r *trial) constant() string {
	for _, m := range []string{"ipvs", experiment.ArmNFTables} {
		if slices.Contains(r.grid.Modes, m) {
			return m
		}
	}
	return ""
}

// Design returns the experiment in words and numbers.
func (r *trial) Design() result.Design {
	p := r.profile
	return result.Design{
		ID: "tigera", Title: "kube-proxy's modes and ours, by number of Services",
		Question: "What do a new connection, a request and the processor pay for Services as their number grows, with the " +
			"rules of kube-proxy, of 2019 and of today, and in each of our modes? And do the claims of “Comparing kube-proxy " +
			"modes: iptables or IPVS?” (Tigera, 2019) hold on this kernel?",
		Vary: result.Axis{Param: "services", Title: fmt.Sprintf("Services × %d endpoints", testbed.Endpoints),
			Short: "Services"},
		Arms: slices.Concat(experiment.Baselines(), experiment.ModeArms(r.grid.Modes),
			experiment.LayoutArms(r.grid.Layouts), r.calicoArms(), r.proxyArms()),
		Baseline: testbed.ArmDirect, Again: testbed.ArmAgain, Margin: 0.02, Rounds: p.Rounds,
		Measures: r.measures(), Aims: r.aims(), Method: r.method(), Missing: r.missing(), Ghosts: r.ghosts(),
		Answer: r.answer(),
		Pictures: []result.Picture{{ID: "cpu-parts", Kind: result.Stack, Title: "Processor time at the greatest number of " +
			"Services, by who spent it", Measures: []string{"cpu-client", "cpu-server", "cpu-agent", "resync"}}},
	}
}

// answer is which cells answer the question.
func (r *trial) answer() *result.Answer {
	most, many := testbed.ServiceParams(r.grid.Most()), experiment.Thousands(r.grid.Most())
	arms := []string{experiment.LayoutIPTables19, "iptables", experiment.ArmNFTables, experiment.ArmEBPF}
	return &result.Answer{Chart: "crr", Findings: []result.Finding{
		{Subject: "a connection with one request to the Service in the middle of " + many, Verb: "takes", Object: "time",
			Of: result.Ratio, Cells: experiment.Cells("crr", most, arms...)},
		{Subject: "a new connection to the last of " + many + " Services", Verb: "is tested against", Object: "rules",
			Of: result.Value, Cells: experiment.Cells("rules-last", most, arms...)},
		{Tally: result.TallyClaims},
	}}
}

// calicoArms are those of the article's policies, of which nothing but the number of rules is counted.
func (r *trial) calicoArms() []result.Arm {
	if r.noCalico != "" {
		return nil
	}
	arms := []result.Arm{{ID: armCalico, Title: "Calico's policies",
		Text: fmt.Sprintf("Calico's iptables rules of 2019 for the network policies of a node with %d pods, %d policies for "+
			"each; without those of Services, whose number is nothing to them; written by iptables-legacy",
			calicoPods, calicoPolicies)}}
	for _, e := range r.engines {
		arms = append(arms, result.Arm{ID: policyArm(e), Title: "our policies, " + e.Name, Text: fmt.Sprintf("the same "+
			"policies by the policy engine %s, of which nothing but rules is counted either", e.Name)})
	}
	return arms
}

// proxyArms are those of the kube-proxy that was given.
func (r *trial) proxyArms() (arms []result.Arm) {
	for _, a := range r.proxies() {
		arms = append(arms, a.Arm())
	}
	return arms
}

// measures are those of connections, of requests, of processor time and of rules.
func (r *trial) measures() []result.Measure {
	return slices.Concat(r.connectionMeasures(), requestMeasures(r.profile), processorMeasures(r.profile), ruleMeasures())
}

func (r *trial) connectionMeasures() []result.Measure {
	exchange := fmt.Sprintf("connect(2), %d bytes there, %d bytes back, close(2) with a reset", testbed.Sizes.Request,
		testbed.Sizes.Response)
	if r.nginx != "" {
		exchange = fmt.Sprintf("connect(2), an HTTP request, a page of %d bytes, close(2) with a reset", testbed.NginxPage)
	}
	return []result.Measure{
		{ID: "connect", Title: "connect() alone", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: "connect(2) from call to return, to the Service in the middle; the connection is reset afterwards"},
		{ID: "crr", Title: "connect, request, close", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: exchange + "; to the Service in the middle"},
		{ID: "crr-first", Detail: true, Title: "connect, request, close: first Service", Unit: "µs", Stat: result.P50,
			Ratio: true, Text: "the same to the first Service"},
		{ID: "crr-last", Title: "connect, request, close: last Service", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: "the same to the last Service"},
		{ID: "crr-none", Title: "connect, request, close: no Service", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: "the same to a server's own address, through a node that has Services"},
	}
}

// requestMeasures are the round trips of the open loop.
func requestMeasures(p profile) []result.Measure {
	ends := "at the greatest number of Services"
	if p.Everywhere {
		ends = "at every number of Services"
	}
	rate := fmt.Sprintf("open loop, %g requests a second, from the intended start", p.Rate)
	return []result.Measure{
		{ID: "http", Title: "round trip, new connection for each", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: rate + ": connect, a request, its answer, the server's FIN; to the Service in the middle"},
		{ID: "http-last", Title: "round trip, new connection for each: last Service", Unit: "µs", Stat: result.P50,
			Ratio: true, Text: "the same to the last Service"},
		{ID: "http-kept", Title: fmt.Sprintf("round trip, %d on a connection, mean", p.Each), Unit: "µs", Stat: result.Mean,
			Ratio: true,
			Text: fmt.Sprintf("%s; a connection carries %d requests, so the mean is given, in which the first of them counts; "+
				"to the Service in the middle, %s", rate, p.Each, ends)},
		{ID: "http-work", Detail: true, Title: "round trip with a busy client", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: fmt.Sprintf("as with a new connection for each, while the client computes for %v after each answer, in 1 MiB "+
				"of memory", p.Work)},
	}
}

// processorMeasures are shares of a core beyond direct's.
func processorMeasures(p profile) []result.Measure {
	share := func(id, from, title string, stat result.Metric, text string) result.Measure {
		return result.Measure{ID: id, From: from, Title: title, Unit: "%", Stat: stat, More: true, Margin: 0.005, Text: text,
			Detail: stat != result.CPU || id == "cpu-work"}
	}
	return []result.Measure{
		share("cpu", "http", "processor time, new connection for each", result.CPU, fmt.Sprintf("client, server and agent, "+
			"each with what it is interrupted for, at %g connections a second; more than direct in the same round", p.Rate)),
		share("cpu-client", "http", "client's processor time, kernel included", result.CPUOf("client"),
			"the client's thread: its system calls, the kernel's path and the rules in it, and what softirqs do meanwhile"),
		{ID: "cpu-softirq", Detail: true, From: "http", Title: "processor time in softirqs", Unit: "%",
			Stat: result.CPUOf("softirq"), Mean: true,
			Text: "on the load's processor, sampled by the kernel in ticks: good over many blocks only, and part of the " +
				"client's and server's time"},
		share("cpu-server", "http", "server's processor time, kernel included", result.CPUOf("server"),
			"the server's thread, likewise"),
		share("cpu-agent", "http", "agent's processor time", result.CPUOf("agent"), "all threads of the agent"),
		share("cpu-last", "http-last", "processor time, last Service", result.CPU, "the same to the last Service"),
		share("cpu-kept", "http-kept", fmt.Sprintf("processor time, %d requests on a connection", p.Each), result.CPU,
			"the same with kept connections"),
		share("cpu-work", "http-work", "processor time with a busy client", result.CPU, "the same while the client computes"),
	}
}

// ruleMeasures are about writing rules, and how many a packet is tested against.
func ruleMeasures() []result.Measure {
	return []result.Measure{
		{ID: "resync", Title: "full write every 30 s, of a core", Unit: "%", Stat: result.Value,
			Text: "computed: processor time of the commands that write all rules again, with the kernel's part, over 30 s; " +
				"kube-proxy of 2019 did so, today's and ours don't"},
		experiment.LoadMeasure,
		{ID: "rules", Title: "rules tested per new connection", Stat: result.Value, Exact: true,
			Text: "counted: by a node's own connection, on average over up to 100 Services spread evenly and over random " +
				"draws; of Calico's policies: by one to a pod from another node, on average over pods and policies"},
		{ID: "rules-first", Detail: true, Title: "rules, first Service", Stat: result.Value, Exact: true, Text: "likewise"},
		{ID: "rules-last", Title: "rules, last Service", Stat: result.Value, Exact: true, Text: "likewise"},
		{ID: "rules-none", Title: "rules, no Service", Stat: result.Value, Exact: true,
			Text: "likewise: by a connection to a server's own address"},
		{ID: "rules" + leaves, Detail: true, Title: "rules, from a pod to another node", Stat: result.Value, Exact: true,
			Text: "of Calico's policies, of which none is for what pods send"},
		{ID: "rules" + stays, Detail: true, Title: "rules, between two pods of a node", Stat: result.Value, Exact: true,
			Text: "likewise: what leaves the one and comes to the other, at once"},
		{ID: "rules-established", Title: "rules per packet of an established connection", Stat: result.Value, Exact: true,
			Text: "likewise: by every packet after the connection's first"},
	}
}

// claims are an article's claims as aims, and what they are about.
type claims struct {
	l                 []result.Aim
	emulated          bool
	constant, old     string        // arms: with a constant look-up, and of kube-proxy's rules of 2019
	one, thousand, at result.Params // at the least number of Services, at 1,000, and at the greatest
	few, most         string        // the least and the greatest number of Services, in words
	stands            string        // what to add where nftables is the constant look-up
}

func (r *trial) newClaims() *claims {
	least, most := r.profile.Services[0], r.grid.Most()
	c := &claims{emulated: r.profile.Emulated, constant: cmp.Or(r.constant(), "nobody"), old: experiment.LayoutIPTables19,
		one: testbed.ServiceParams(least), thousand: testbed.ServiceParams(1000), at: testbed.ServiceParams(most),
		few: experiment.Thousands(least), most: experiment.Thousands(most)}
	if c.constant == experiment.ArmNFTables {
		c.stands = " (nftables stands for IPVS)"
	}
	return c
}

// ref returns a reference to a cell; what is "" or nil is as in the aim.
func (c *claims) ref(measure, arm string, params result.Params) *result.CellRef {
	return &result.CellRef{Measure: measure, Arm: arm, Params: params}
}

// add adds a claim, about values at the greatest number of Services unless a says otherwise.
func (c *claims) add(id, text string, a result.Aim) {
	a.ID, a.Text, a.Claim = id, text, experiment.ByTigera
	if a.Of == "" {
		a.Of = result.Value
	}
	if a.Params == nil {
		a.Params = c.at
	}
	if c.emulated && strings.HasPrefix(a.Measure, "cpu") {
		a.Cannot = "the processor is emulated: shares of it say nothing about a real one"
	}
	c.l = append(c.l, a)
}

// aims are the article's claims, as far as they can be tested here, then ours.
func (r *trial) aims() []result.Aim {
	c := r.newClaims()
	r.addRoundTrips(c)
	addRules(c)
	r.addProcessor(c)
	r.addCalico(c)
	r.addModes(c)
	return append(c.l, r.own()...)
}

// addRoundTrips adds C1 and C2: whether rules show in round trips.
func (r *trial) addRoundTrips(c *claims) {
	c.add("C1, request", "up to 1,000 Services the round trip differs trivially, by at most 2 %, from that with a "+
		"constant look-up"+c.stands, result.Aim{Measure: "http", Arm: c.old, Params: c.thousand,
		Over: c.ref("", c.constant, c.thousand), Bound: 1, Margin: 0.02})
	c.add("C1, connection", "the same of a whole connection in a closed loop, where nothing hides it",
		result.Aim{Measure: "crr", Arm: c.old, Params: c.thousand, Over: c.ref("", c.constant, c.thousand), Bound: 1,
			Margin: 0.02})
	c.add("C2, none kept", "at "+c.most+" Services the difference is there with a new connection for each request: "+
		"more than 2 %", result.Aim{Measure: "http", Arm: c.old, Over: c.ref("", c.constant, c.at), Bound: 1.02,
		Least: true})
	c.add("C2, kept", fmt.Sprintf("and not with %d requests on a connection: at most 2 %%", r.profile.Each),
		result.Aim{Measure: "http-kept", Arm: c.old, Over: c.ref("", c.constant, c.at), Bound: 1, Margin: 0.02})
}

// addRules adds C3 and C4: how many rules a packet is tested against.
func addRules(c *claims) {
	c.add("C3", "the cost is a connection's, not a packet's: an established packet is tested against as many rules at "+
		c.most+" Services as at "+c.few,
		result.Aim{Measure: "rules-established", Arm: c.old, Over: c.ref("", "", c.one), Bound: 1})
	c.add("C4, last", "about 20,000 rules per new connection at 10,000 Services, to the last Service (±2 %)",
		result.Aim{Measure: "rules-last", Arm: c.old, Params: testbed.ServiceParams(10000), Bound: 20000,
			Margin: 0.02})
	c.add("C4, average", "the same on average over all Services", result.Aim{Measure: "rules",
		Arm: c.old, Params: testbed.ServiceParams(10000), Bound: 20000, Margin: 0.02})
	c.add("C4, today", "the same with today's rules, to the last Service", result.Aim{Measure: "rules-last",
		Arm: experiment.LayoutIPTables, Params: testbed.ServiceParams(10000), Bound: 20000, Margin: 0.02})
}

// addProcessor adds C5 to C8: the processor time of rules, and IPVS beside them.
func (r *trial) addProcessor(c *claims) {
	c.add("C5, order", "iptables takes more processor time at "+c.most+" Services than a constant look-up does"+c.stands,
		result.Aim{Measure: "cpu-last", Arm: c.old, Over: c.ref("cpu", c.constant, c.at), Bound: 1, Least: true})
	c.add("C5, rules", "35 % of a core more at 10,000 Services than at "+c.few+
		", ±25 % of that: rules alone, last Service",
		result.Aim{Measure: "cpu-last", Arm: c.old, Params: testbed.ServiceParams(10000),
			Less: c.ref("cpu", c.old, c.one), Bound: 0.35, Margin: 0.25})
	c.add("C5, with resync", "the same with a full write every 30 s added",
		result.Aim{Measure: "cpu-last", Arm: c.old, Params: testbed.ServiceParams(10000),
			Less: c.ref("cpu", c.old, c.one), Plus: c.ref("resync", c.old, testbed.ServiceParams(10000)),
			Bound: 0.35, Margin: 0.25})
	c.add("C6, rules",
		fmt.Sprintf("with %d requests on a connection iptables takes at most 2 %% of a core more%s: rules alone",
			r.profile.Each, c.stands),
		result.Aim{Measure: "cpu-kept", Arm: c.old, Less: c.ref("", c.constant, c.at), Bound: 0.02})
	c.add("C6, with resync", "the same with a full write every 30 s added",
		result.Aim{Measure: "cpu-kept", Arm: c.old, Less: c.ref("", c.constant, c.at),
			Plus: c.ref("resync", c.old, c.at), Bound: 0.02})
	c.add("C5, IPVS", "8 % of a core more at 10,000 Services than at "+c.few+", ±25 % of that, in IPVS",
		result.Aim{Measure: "cpu", Arm: "ipvs", Params: testbed.ServiceParams(10000), Less: c.ref("", "", c.one), Bound: 0.08,
			Margin: 0.25, Cannot: r.noIPVS()})
	c.add("C7", "a new connection through IPVS takes longer at 10,000 Services than at "+c.few+", by more than 2 %",
		result.Aim{Measure: "http", Arm: "ipvs", Params: testbed.ServiceParams(10000), Over: c.ref("", "", c.one),
			Bound: 1.02, Least: true, Cannot: r.noIPVS()})
	c.add("C8",
		fmt.Sprintf("what iptables takes more does not depend on what the application does: with %.3g µs of work a request "+
			"it is within 25 %% of that without", float64(r.profile.Work)/float64(time.Microsecond)),
		result.Aim{Measure: "cpu-work", Arm: c.old, Of: result.More, Over: c.ref("cpu", c.old, c.at), Bound: 1, Margin: 0.25})
}

// addCalico adds C9: how many rules Calico's policies are.
func (r *trial) addCalico(c *claims) {
	for _, direction := range []struct{ id, text, measure string }{
		{"C9, comes",
			fmt.Sprintf("Calico executes at most as many rules, for a connection that comes to one of %d pods with %d policies "+
				"each, as kube-proxy to the last of %d Services", calicoPods, calicoPolicies, fewServices), "rules" + comes},
		{"C9, leaves", "the same for one that leaves such a pod", "rules" + leaves},
		{"C9, stays", "the same for one between two of a node's pods, which both do at once", "rules" + stays},
	} {
		c.add(direction.id, direction.text, result.Aim{Measure: direction.measure, Arm: armCalico, Over: c.ref("rules-last",
			c.old, testbed.ServiceParams(fewServices)), Bound: 1, Cannot: r.noCalico})
	}
}

// addModes adds C10 and C21: modes of kube-proxy against each other.
func (r *trial) addModes(c *claims) {
	c.add("C10", "iptables carries a new connection faster than userspace",
		result.Aim{Measure: "crr", Arm: "iptables", Over: c.ref("", "userspace", c.at), Bound: 1})
	if !slices.Contains(r.grid.Modes, "userspace") || !slices.Contains(r.grid.Modes, "iptables") {
		c.l[len(c.l)-1].Cannot = "it wants the modes iptables and userspace"
	}
	const byBlog = "Kubernetes blog 2025"
	first := len(c.l)
	c.add("C21, half", "kube-proxy's nftables at its median is about as fast as its iptables at its best, the first "+
		"Service (±5 %)", result.Aim{Measure: "crr", Arm: experiment.LayoutNFTables,
		Over: c.ref("crr-first", experiment.LayoutIPTables, c.at), Bound: 1, Margin: 0.05})
	c.add("C21, flat", "and as fast at "+c.most+" Services as at "+c.few+" (±2 %)", result.Aim{Measure: "crr",
		Arm: experiment.LayoutNFTables, Over: c.ref("", experiment.LayoutNFTables, c.one), Bound: 1, Margin: 0.02})
	for i := range c.l[first:] {
		c.l[first+i].Claim = byBlog
	}
}

// own are the project's aims.
func (r *trial) own() (l []result.Aim) {
	at, ten := testbed.ServiceParams(10000), testbed.ServiceParams(10)
	add := func(mode, id, text string, a result.Aim) {
		if a.ID, a.Text, a.Arm = id, text, mode; a.Params == nil {
			a.Params = at
		}
		if slices.Contains(r.grid.Modes, mode) {
			l = append(l, a)
		}
	}
	flat := &result.CellRef{Params: ten}
	l = experiment.ConnectionAims(r.grid.Modes, r.grid.Layouts, "")
	add("iptables", "rules, worst", "iptables: ≤ 32 rules per new connection to the last of 10,000 Services",
		result.Aim{Measure: "rules-last", Of: result.Value, Bound: 32})
	add("iptables", "rules, average", "iptables: ≤ 26 rules per new connection on average",
		result.Aim{Measure: "rules", Of: result.Value, Bound: 26})
	add("iptables", "rules, others", "iptables: ≤ 3 rules for traffic to no Service",
		result.Aim{Measure: "rules-none", Of: result.Value, Bound: 3})
	for _, e := range r.engines {
		if r.noCalico == "" {
			l = append(l, result.Aim{ID: "policy rules, " + e.Name, Text: fmt.Sprintf("%s: ≤ 40 rules for a connection that "+
				"comes to one of %d pods with %d policies each", e.Name, calicoPods, calicoPolicies), Measure: "rules" + comes,
				Arm: policyArm(e), Params: testbed.ServiceParams(r.grid.Most()), Of: result.Value, Bound: 40})
		}
	}
	add("iptables", "iptables flat", "iptables: a connection at 10,000 Services costs ≤ 1.01 × one at 10",
		result.Aim{Measure: "crr", Of: result.Value, Over: flat, Bound: 1.01})
	add(experiment.ArmNFTables, "nftables flat", "nftables: a connection at 10,000 Services costs ≤ 1.02 × one at 10",
		result.Aim{Measure: "crr", Of: result.Value, Over: flat, Bound: 1.02})
	return l
}

// noIPVS returns why what IPVS alone shows is not tested, "" where it is.
func (r *trial) noIPVS() string {
	switch {
	case slices.Contains(r.grid.Modes, "ipvs"):
		return ""
	case slices.ContainsFunc(r.grid.Cannot, func(u testbed.Unable) bool { return u.Name == "ipvs" }):
		return "this kernel has no IPVS; run the lab on one that has (module ip_vs)"
	}
	return "the run was told to leave IPVS out"
}

func (r *trial) method() []string {
	p := r.profile
	l := []string{
		fmt.Sprintf("Every arm has two network namespaces of its own, joined by a veth: a node, where the client runs, and "+
			"a far end, where the server answers at ten addresses. Direct means: to those addresses in turn, through a node "+
			"without any rule and without conntrack. All arms stand at the same time. The server is %s. Client and server "+
			"share one processor and have real-time priority; agents, also that of userspace, which copies every byte, are "+
			"kept on the other processors.", r.server()),
		fmt.Sprintf("Each arm connects to one Service with those ten endpoints, in the middle of all unless said otherwise. "+
			"Where rules are a list, the middle is what one of all Services meets on average; first, last and none are "+
			"measured beside it%s.", map[bool]string{false: ", at the greatest number of Services", true: ""}[p.Everywhere]),
		"kube-proxy's rules are written by the lab itself, in kube-proxy's layout and order, not by kube-proxy. Those of " +
			"iptables go through iptables-legacy, since its nft variant needs minutes for 10,000 Services; what a " +
			"packet meets is the same. Each is written once and stays; the time to write all again, which kube-proxy of 2019 " +
			"did every 30 s, is measured before any traffic and added by arithmetic, not by doing it during traffic.",
		fmt.Sprintf("Processor time is that of the client's and the server's threads and of the agent, in a core's share, "+
			"at %g requests a second; what an arm takes more is the difference to direct in the same round. Time in softirqs "+
			"is charged to the thread that is interrupted, as this kernel does it, and shown apart only as the kernel "+
			"samples it.", p.Rate),
		"Rules are counted by two ways that know nothing of each other: on paper, from what the kernel lists, and by the " +
			"kernel's own trace of one packet. A rule counts each time it is tested, in every table and hook, also that of " +
			"iptables' and nftables' NAT. ebpf translates at connect(), so its packets bear an endpoint's address when they " +
			"meet rules.",
		fmt.Sprintf("Calico's rules are written by the lab itself too, in the layout of Felix 3.6, for %d pods with %d "+
			"policies each, of which a client is let in by any alike. Their number is counted over all pods, and traced at two "+
			"that are there. What the article compares them with is kube-proxy's rules to the last of %d Services.", calicoPods,
			calicoPolicies, fewServices),
		"A claim of equality is tested by equivalence with the stated margin; all others against a bound. Confirmed or " +
			"refuted means that all of the 95 % interval says so.",
	}
	if r.kubeProxy != "" {
		l = append(l, fmt.Sprintf("kube-proxy itself is the program that was given, as upstream configures it, with an API "+
			"server within the lab's process. What it does by itself meanwhile, it does on the other processors. In mode "+
			"iptables it draws the order of its list of Services anew at each sync, so that arm connects to %d Services in "+
			"turn, spread over all, instead of the one in the middle. Its processor time is that of its threads and of the "+
			"commands that it runs.", testbed.FewTargets))
	}
	return l
}

// server returns what answers.
func (r *trial) server() string {
	if r.nginx == "" {
		return "the lab's own, since nginx is not installed here"
	}
	return fmt.Sprintf("nginx (%s), one process and thread in each far end, with a static page of %d bytes and "+
		"keepalive_requests %d", r.version, testbed.NginxPage, r.profile.Each)
}

func (r *trial) missing() []string {
	l := experiment.NotMeasured(r.grid.Cannot)
	if r.kubeProxy == "" {
		l = append(l, experiment.NoKubeProxy)
	} else {
		l = append(l, "Rules per packet, and first and last Services, of kube-proxy itself: it writes its list in an order "+
			"drawn anew at each sync. The lab's own copy of its layouts, in a fixed order, has both.")
	}
	l = append(l,
		"The article's own numbers: its charts have no values, and its machines had a network between them. Shapes and "+
			"claims are compared, not microseconds.",
		"IPVS's times, where this kernel has none. nftables stands for it where a claim wants a constant look-up behind the "+
			"same connection tracking.",
		"A client in a pod: the client is on the node itself (the output hook). Look-ups are the same.",
		"UDP, SCTP and IPv6.",
		"Cold caches, and connect() to 1 %: the experiment connect has them.")
	if slices.Contains(r.grid.Modes, "iptables") {
		l = append(l, "Both variants of iptables: the mode uses the one that this host has; --modes "+
			"iptables-legacy,iptables-nft compares them.")
	}
	if testbed.ReadMachine().Config["IRQ_TIME_ACCOUNTING"] == "y" {
		l = append(l, "Softirqs in sums of processor time: this kernel keeps their time apart (CONFIG_IRQ_TIME_ACCOUNTING) "+
			"and samples it, see their own row. What rules cost there is missing from the sums.")
	}
	if !r.profile.Everywhere {
		l = append(l, "First and last Services and kept connections at every number of Services: the full profile has them.",
			"What takes more and longer blocks to tell: claims that are inconclusive here, the full profile decides.")
	}
	return l
}

// ghosts are what articles printed.
func (r *trial) ghosts() (l []result.Ghost) {
	const blog = "first packet's p50 by number of Services in KEP-3866, on other machines and over a network"
	for _, g := range []struct {
		label    string
		x, value float64
	}{{"KEP iptables", 5000, 49}, {"KEP iptables", 10000, 61}, {"KEP nftables", 10000, 14}} {
		l = append(l, result.Ghost{Measure: "connect", X: g.x, Value: g.value * float64(time.Microsecond), Label: g.label,
			Source: blog})
	}
	return append(l, result.Ghost{Measure: "rules", X: 10000, Value: 20000, Label: "Tigera 2019",
		Source: "“~20,000 rules for every new connection” at 10,000 Services"},
		result.Ghost{Measure: "rules", X: 10000, Value: 48, Label: "Calico, by Tigera",
			Source: "“roughly the same number as kube-proxy at 20 services with 200 backend pods”, which is 48 by arithmetic"})
}
