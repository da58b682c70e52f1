package services

import (
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// design is the experiment in words and numbers, as it is where time is measured but for its paragraphs.
func design(p profile, exact bool) result.Design {
	d := result.Design{
		ID: "services", Title: "What a Service costs",
		Question: "What does a connection through a Service's address cost, against the same connection to a server's own " +
			"address, and what does it cost to keep the kernel as a cluster of so many Services says it should be?",
		Vary: result.Axis{Param: "services", Title: fmt.Sprintf("Services × %d endpoints", testbed.Endpoints),
			Short: "Services"},
		Arms: []result.Arm{
			{ID: testbed.ArmDirect, Title: "direct",
				Text: "the servers' own addresses, in a pair of network namespaces without any rule and without conntrack"},
			{ID: testbed.ArmAgain, Title: "direct again", Text: "the same in another pair of namespaces: what it differs from " +
				"direct is what this run can't tell from nothing"},
			{ID: armRule, Title: "one DNAT rule",
				Text: "one address, translated by the only rule of its node's kernel: what conntrack and NAT cost by themselves"},
			{ID: experiment.ArmNFTables, Title: "nftables", Style: experiment.Styles[experiment.ArmNFTables],
				Text: "Services' addresses, in a pair whose node's kernel was programmed by `fairlead run` from a folder of " +
					"manifests"},
		},
		Baseline: testbed.ArmDirect, Again: testbed.ArmAgain, Margin: 0.02, Rounds: p.Rounds,
		Measures: measures(p), Aims: aims(), Method: method(p), Missing: missing(p, exact), Ghosts: ghosts(),
		Answer: answer(p),
	}
	if exact {
		d.Method = exactMethod()
	}
	return d
}

// answer is which cells answer the question.
func answer(p profile) *result.Answer {
	most, few := testbed.ServiceParams(p.most()), testbed.ServiceParams(p.few())
	many, little := experiment.Thousands(p.most()), experiment.Thousands(p.few())
	a := &result.Answer{Chart: "crr", Findings: []result.Finding{
		{Subject: "a connection with one request to one of " + many + " Services", Verb: "takes", Object: "time",
			Of: result.Ratio, Cells: append(experiment.Cells("crr", nil, armRule),
				experiment.Cells("crr", most, experiment.ArmNFTables, experiment.ArmEBPF)...)}}}
	if p.most() != p.few() {
		a.Findings = append(a.Findings, result.Finding{Subject: "one to one of " + many + " Services with nftables",
			Verb: "takes", Object: "time", Of: result.Value, Cells: experiment.Cells("crr", most, experiment.ArmNFTables),
			Over: &result.CellRef{Params: few}, Against: "a connection to one of " + little})
	}
	a.Findings = append(a.Findings, result.Finding{Verb: "takes", Of: result.Value,
		Subject: "writing one endpoint's change of " + many + " Services to the kernel",
		Cells:   experiment.Cells("change", most, experiment.ArmNFTables)})
	return a
}

func measures(p profile) []result.Measure {
	l := slices.Concat(connections(), upkeep(p))
	for _, of := range []struct{ id, title string }{{"cold", "cold sync"}, {"restart", "restart"},
		{"change", "one endpoint change"}} {
		l = append(l,
			result.Measure{ID: of.id + suffixObjects, Title: of.title + ": allocations", Stat: result.Value, Detail: true,
				Text: "in process: objects on Go's heap"},
			result.Measure{ID: of.id + suffixBytes, Title: of.title + ": allocated", Unit: "KiB", Stat: result.Value,
				Detail: true, Text: "likewise: their memory, also what is free again"})
	}
	return l
}

// What ends the names of measures of what is allocated.
const (
	suffixObjects = "-allocations"
	suffixBytes   = "-allocated"
)

// connections are the measures of connections.
func connections() []result.Measure {
	return []result.Measure{
		{ID: "connect", Title: "connect() alone", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: "connect(2) from call to return; the connection is reset afterwards"},
		{ID: "crr", Title: "connect, request, close", Unit: "µs", Stat: result.P50, Ratio: true, Text: fmt.Sprintf(
			"connect(2), %d bytes there, %d bytes back, close(2) with a reset", testbed.Sizes.Request, testbed.Sizes.Response)},
		{ID: "rr", Title: "request on a kept connection", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: fmt.Sprintf("%d bytes there, %d bytes back on one of %d open connections", testbed.Sizes.Request,
				testbed.Sizes.Response, testbed.Endpoints)},
		{ID: "connect-many", Title: "connect(), many Services in turn", Unit: "µs", Stat: result.P50, Ratio: true,
			Text: fmt.Sprintf("connect() alone, to up to %d Services in turn instead of %d: what is looked up has left "+
				"the caches", testbed.ManyTargets, testbed.FewTargets)},
	}
}

// upkeep are the measures of what keeps the kernel up to date.
func upkeep(p profile) []result.Measure {
	return []result.Measure{
		{ID: "cold", Title: "cold sync, whole", Unit: "ms", Stat: result.Value,
			Text: "in process, with the decided model at hand and an empty kernel: from Change to the answer of Sync",
			Counted: "in process, with the decided model at hand and an empty kernel: what this process executes from Change " +
				"to the answer of Sync"},
		{ID: "cold-kernel", Title: "cold sync, in the kernel", Unit: "ms", Stat: result.Value,
			Text:    "of that, the time in the plane's Write: making the netlink messages, and the kernel's work on them",
			Counted: "of that, what the plane's Write takes: making the netlink messages, and the kernel's work on them"},
		{ID: "restart", Title: "restart, nothing to write", Unit: "ms", Stat: result.Value,
			Text: "in process: the same with everything in the kernel already, which is read and compared; nothing is written",
			Counted: "in process: the same with everything in the kernel already, which is read and compared; nothing is " +
				"written"},
		{ID: "change", Title: "one endpoint change, in the kernel", Unit: "µs", Stat: result.P50,
			Text:    "in process: one endpoint of one Service replaced; the time in the plane's Write",
			Counted: "in process: one endpoint of one Service replaced; what the plane's Write takes"},
		{ID: "change-whole", Title: "one endpoint change, told to done", Unit: "µs", Stat: result.P50,
			Text:    "the same from Change to the answer of Sync",
			Counted: "the same from Change to the answer of Sync: what this process executes"},
		{ID: "file", Title: "one endpoint change, saved file to kernel", Unit: "ms", Stat: result.P50,
			Text: "an EndpointSlice's file moved into the agent's folder, until another netlink socket hears of the change, " +
				"from a moment of rest"},
		{ID: "ready", Title: "agent's start to ready", Unit: "ms", Stat: result.Value,
			Text:    "from starting `fairlead run` until its /readyz says that all is in the kernel",
			Counted: "what the agent's process executes, from `fairlead run` until its /readyz says that all is in the kernel"},
		{ID: "memory", Title: "agent's resident memory", Unit: "MiB", Stat: result.Value,
			Text: fmt.Sprintf("VmRSS at rest, %d looks", samples)},
		{ID: "idle", Title: "idle agent, of a core", Unit: "%", Stat: result.Value, Mean: true,
			Text: fmt.Sprintf("processor time of all its threads without a change in its source: in %d windows of %v in which "+
				"nothing else runs here, and in each round of traffic; the mean, since it comes in bursts", samples,
				p.Quiet/samples)},
		{ID: "loss", Title: "steady connections", Unit: "ms", Stat: result.P50,
			Text: fmt.Sprintf("open loop, %g/s: connect, request, close by FIN, from the intended start", p.Rate)},
	}
}

// aims are the project's, all at 10,000 Services.
func aims() []result.Aim {
	at, ten := testbed.ServiceParams(10000), &result.CellRef{Params: testbed.ServiceParams(10)}
	l := []result.Aim{
		{ID: "connect flat", Text: "connect() at 10,000 Services costs ≤ 1.02 × that at 10", Measure: "connect",
			Of: result.Value, Over: ten, Bound: 1.02},
		{ID: "connection flat", Text: "a connection with one request at 10,000 Services costs ≤ 1.02 × one at 10",
			Measure: "crr", Of: result.Value, Over: ten, Bound: 1.02},
		{ID: "cold sync", Text: "cold sync of 10,000 Services × 10 endpoints ≤ 0.4 s in the kernel", Measure: "cold-kernel",
			Of: result.Value, Bound: 4e8},
		{ID: "change", Text: "one endpoint change at 10,000 Services: p99 ≤ 0.3 ms in the kernel", Measure: "change",
			Of: result.P99, Bound: 3e5},
		{ID: "change flat", Text: "one endpoint change at 10,000 Services costs ≤ 1.1 × one at 10", Measure: "change",
			Of: result.Value, Over: ten, Bound: 1.1},
		{ID: "file", Text: "from a saved file to the kernel at 10,000 Services: p99 ≤ 20 ms", Measure: "file", Of: result.P99,
			Bound: 2e7},
		{ID: "memory", Text: "the agent of 10,000 Services ≤ 150 MiB resident after its first sync", Measure: "memory",
			Of: result.Value, Params: testbed.ServiceParams(10000).With("after", "the first sync"), Bound: 150 << 20},
		{ID: "memory later", Text: "the same after the changes", Measure: "memory", Of: result.Value,
			Params: testbed.ServiceParams(10000).With("after", "the changes"), Bound: 150 << 20},
		{ID: "idle", Text: "the idle agent of 10,000 Services ≤ 0.02 % of a core", Measure: "idle", Of: result.Value,
			Params: testbed.ServiceParams(10000).With("during", duringQuiet), Bound: 0.0002},
		{ID: "idle, longer", Text: "the same over all rounds of traffic, which it has no part in", Measure: "idle",
			Of: result.Value, Params: testbed.ServiceParams(10000).With("during", duringTraffic), Bound: 0.0002},
	}
	for _, while := range []struct{ id, text string }{{"loss, others", whileOthers}, {"loss, own", whileOwn},
		{"loss, killed", whileKilled}} {
		l = append(l, result.Aim{ID: while.id, Text: "no connection fails while " + while.text, Measure: "loss",
			Of: result.Failed, Params: testbed.ServiceParams(10000).With("while", while.text)})
	}
	for i := range l {
		l[i].Arm = experiment.ArmNFTables
		if l[i].Params == nil {
			l[i].Params = at
		}
	}
	return l
}

func method(p profile) []string {
	return []string{
		fmt.Sprintf("Every arm has two network namespaces of its own, joined by a veth: a node, where the client runs, and "+
			"a far end, where one server answers at %d addresses. Direct means: to those addresses, through a node without any "+
			"rule and without conntrack. One DNAT rule means: to an address that the only rule of the node translates to one "+
			"of them. All arms stand at the same time. Client and server share one processor, so that no wake-up of another "+
			"one is measured, and have real-time priority, so that neither interrupts the other and no other process does; "+
			"everything else, the agents too, is kept on the other processors.", testbed.Servers),
		fmt.Sprintf("A round takes the three operations in random order; for each, direct comes first and last, and the "+
			"other arms in random order between. A block is %v after %v that don't count. %d addresses are connected to in "+
			"turn, or kept connections to: direct, those of the server; else, those of as many Services, spread over all, so "+
			"that arms differ in the number of Services alone. One measure connects to up to %d Services in turn instead. "+
			"Their endpoints are the server's first %d addresses, all other Services' endpoints are addresses only. "+
			"Connections end with a reset, which leaves no socket waiting; conntrack goes on knowing of each for ten seconds.",
			p.Block, p.Warm, testbed.FewTargets, testbed.ManyTargets, testbed.Endpoints),
		"The agents are this program's own `fairlead run` in mode nftables, one per number of Services, each from a folder " +
			"with one object to a file; beside them, for traffic alone, one of mode ebpf at the most Services. They were " +
			"started with nothing in their kernels. What is said to be in process was measured with the same loop and data " +
			"plane within the lab's process, in fresh network namespaces, so that only their own time counts.",
		fmt.Sprintf("Losses are counted at the greatest number of Services, at %g connections a second to one Service, "+
			"while endpoints of other Services are replaced (%d files, 200 a second), while its own are (%d files, one of ten "+
			"endpoints each, by another that answers), and while the agent is killed with SIGKILL and started again (%s). A "+
			"connection that failed, for whatever reason, is a loss.", p.Rate, p.Others, p.Own, times(p.Kills)),
		"Times hold for this machine and this kernel: compare ratios between machines, not microseconds.",
	}
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

func missing(p profile, exact bool) []string {
	l := []string{
		"Other ways than nftables, but for a connection in mode ebpf, or in those of --modes: the experiments tigera and " +
			"control have them all.",
		"Clients in pods, and traffic from outside the node: the client is on the node itself (the output hook). The " +
			"look-ups are the same, but the source of a node's own connections is hidden, as with kube-proxy, which pods' " +
			"connections are spared.",
		"UDP, SCTP and IPv6.",
		"An API server: the source is a folder of manifests.",
		"Rules tested per packet: this layout has a constant number, whatever the number of Services.",
	}
	if !exact && p.Quiet < 2*forcedGC {
		l = append(l, fmt.Sprintf("Idle time over several minutes: Go's runtime collects garbage every %v even at rest, "+
			"which falls into a quiet window of %v or does not. The full profile looks for longer.", forcedGC, p.Quiet))
	}
	for _, n := range []int{1, 10, 100, 1000, 10000} {
		if !slices.Contains(p.Services, n) {
			l = append(l, fmt.Sprintf("%d Services: left out by choice.", n))
		}
	}
	return l
}

// forcedGC is how long Go's runtime lets garbage lie at most (runtime/proc.go, forcegcperiod).
const forcedGC = 2 * time.Minute

// ghosts are kube-proxy's, in nftables mode.
func ghosts() (l []result.Ghost) {
	const source = "kube-proxy 1.36.3 in nftables mode, cold sync from an API server, × 10 endpoints, on " +
		"another machine of the same kind; noisy, good for orders of magnitude"
	for _, g := range []struct{ x, seconds float64 }{{1000, 0.82}, {5000, 7.0}, {10000, 14.3}} {
		l = append(l, result.Ghost{Measure: "cold", X: g.x, Value: g.seconds * 1e9, Label: "kube-proxy", Source: source})
	}
	return l
}

// armRule is the arm with one rule.
const armRule = "rule"
