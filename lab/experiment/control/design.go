package control

import (
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// The sources of what is tested.
const (
	byFairlead = "Fairlead's aim"
	byRestarts = "kubernetes#130119, 2025, of what it then changed"
)

// Design returns the experiment in words and numbers.
func (r *trial) Design() result.Design {
	p := r.profile
	d := result.Design{
		ID: "control", Title: "What it takes to keep a node as an API server says",
		Question: "How long does it take until a node's kernel has what an API server tells, at the start, after a restart " +
			"and after a change, and what does that cost?",
		Vary: result.Axis{Param: "services", Title: fmt.Sprintf("Services × %d endpoints, unless said otherwise",
			testbed.Endpoints), Short: "Services"},
		Rounds:   p.Rounds,
		Measures: measures(p), Aims: r.aims(), Ghosts: ghosts(), Method: r.method(), Missing: r.missing(),
		Answer: r.answer(),
		Pictures: []result.Picture{
			{ID: "moved-churn-ecdf", Kind: result.ECDF, Title: "One change among others, PATCH to first connection",
				Measures: []string{"moved-churn"}},
			{ID: "moved-ecdf", Kind: result.ECDF, Title: "One change from rest, PATCH to first connection",
				Measures: []string{"moved"}},
			{ID: "event-ecdf", Kind: result.ECDF, Title: "A change's arrival to the kernel", Measures: []string{"event"}},
		},
	}
	for _, m := range r.modes {
		d.Arms = append(d.Arms, result.Arm{ID: m, Title: m, Style: experiment.Styles[m],
			Text: "`fairlead run --mode " + m + "`, told by the API server"})
	}
	if r.programs[experiment.KubeProxyProgram.Name] != "" {
		for _, a := range experiment.KubeProxyArms {
			arm := a.Arm()
			arm.Text = fmt.Sprintf("the kube-proxy that was given, in mode %s, told by the same API server", a.Mode)
			if a.Variant != "" {
				arm.Text += fmt.Sprintf(", through iptables-%s", a.Variant)
			}
			d.Arms = append(d.Arms, arm)
		}
	}
	return d
}

// answer is which cells answer the question, at the last size.
func (r *trial) answer() *result.Answer {
	at := r.profile.Sizes[len(r.profile.Sizes)-1]
	var arms []string
	for _, m := range []string{experiment.ArmNFTables, experiment.ArmEBPF} {
		if slices.Contains(r.modes, m) {
			arms = append(arms, m)
		}
	}
	if len(arms) == 0 {
		arms = r.modes
	}
	if r.programs[experiment.KubeProxyProgram.Name] != "" {
		arms = append(arms, experiment.ArmKubeProxyNFTables)
	}
	of := func(measure, subject, verb string) result.Finding {
		return result.Finding{Subject: subject, Verb: verb, Of: result.Value,
			Cells: experiment.Cells(measure, at.params(), arms...)}
	}
	return &result.Answer{Chart: "moved-churn-ecdf", Findings: []result.Finding{
		of("moved-churn", fmt.Sprintf("among %g changes a second at %s endpoints, one change", r.profile.Rate, at),
			"reaches its first connection after"),
		of("cold", "from the program's start until all is in the kernel", "it takes"),
		of("idle", "at rest the program", "uses, of a core,"),
	}}
}

func measures(p profile) []result.Measure {
	churn := fmt.Sprintf("among %g changes a second", p.Rate)
	return []result.Measure{
		{ID: "cold", Title: "cold start to all in the kernel", Unit: "s", Stat: result.Value,
			Text: "from the program's start, with nothing of it in the kernel, until it says that all is there; the probe's " +
				"connection comes through then"},
		{ID: "sync", Title: "first sync of a cold start", Unit: "s", Stat: result.Value,
			Text: "until all was in the kernel, as each program says itself in its metrics: kube-proxy from when all was " +
				"known, ours from the first object's arrival on, so with most of the listing"},
		{ID: "cold-cpu", Title: "processor time of a cold start", Unit: "s", Stat: result.Value, Detail: true,
			Text: "of all its threads and of the programs that it ran; of kube-proxy in steps of 10 ms"},
		{ID: "restart", Title: "restart with all in the kernel", Unit: "s", Stat: result.Value, Text: "the same start once " +
			"more, after the program was ended (ours by SIGKILL, kube-proxy by SIGTERM), with what it wrote still there"},
		{ID: "moved", Title: "one change from rest, PATCH to first connection", Unit: "ms", Stat: result.P50,
			Text: "a Service's only endpoint moves: from the begin of the PATCH of its EndpointSlice until a connection comes " +
				"to the new place, one try each half millisecond"},
		{ID: "moved-p99", From: "moved", Title: "one change from rest, p99 of a round", Unit: "ms", Stat: result.P99,
			Detail: true},
		{ID: "moved-churn", Title: "one change " + churn + ", PATCH to first connection", Unit: "ms", Stat: result.P50,
			Text: "the same while endpoints of other Services change"},
		{ID: "moved-churn-p99", From: "moved-churn", Title: "one change " + churn + ", p99 of a round", Unit: "ms",
			Stat: result.P99},
		{ID: "event", Title: "a change's arrival to the kernel, " + churn, Unit: "ms", Stat: result.P50,
			Text: "as the agent says itself in its metric " + delayMetric +
				", each as the upper bound of its bucket, which are a third apart; from the watch event on"},
		{ID: "event-p99", From: "event", Title: "a change's arrival to the kernel, " + churn + ", p99 of a round", Unit: "ms",
			Stat: result.P99},
		{ID: "memory", Title: "resident memory after the start", Unit: "MiB", Stat: result.Value,
			Text: "VmRSS at rest; kube-proxy's own without the programs that it runs"},
		{ID: "memory-churn", Title: "resident memory after the changes", Unit: "MiB", Stat: result.Value,
			Text: "the same after the changes"},
		{ID: "idle", Title: "idle, of a core", Unit: "%", Stat: result.Value, Mean: true, Text: fmt.Sprintf(
			"processor time in %v of each round in which nothing changes; the mean, since it comes in bursts", p.Quiet)},
		{ID: "churn-cpu", Title: "processor time " + churn + ", of a core", Unit: "%", Stat: result.Value,
			Text: "of all its threads and of the programs that it ran"},
		{ID: "change-cpu", Title: "of that, for each of these changes", Unit: "ms", Stat: result.Value,
			Text: "who makes one sync of many changes spends less on each"},
		{ID: "churn-rate", From: "churn-cpu", Title: "changes a second that the API server took",
			Stat: result.Rate("changes"), Detail: true},
		{ID: "moved-cpu", Title: "processor time of one change from rest", Unit: "ms", Stat: result.Value,
			Text: "between all moves and the rest after them, by their number"},
		{ID: "steady", Title: "connections to a Service that does not change, meanwhile", Unit: "ms", Stat: result.P50,
			Detail: true, Text: fmt.Sprintf("open loop, %d/s: connect, request, close by FIN, from the intended start",
				steadyRate)},
	}
}

// aimed is the size that the project's aims are of.
var aimed = size{10000, testbed.Endpoints}

// aims are the project's, where the run has their size, and a claim of others.
func (r *trial) aims() (l []result.Aim) {
	if slices.Contains(r.profile.Sizes, aimed) {
		l = r.own()
	}
	return append(l, r.restarts())
}

// own are the project's aims.
func (r *trial) own() (l []result.Aim) {
	at := aimed.params()
	add := func(id, text, measure, arm string, of result.Metric, bound float64) *result.Aim {
		l = append(l, result.Aim{ID: id, Text: text, Claim: byFairlead, Measure: measure, Arm: arm, Params: at, Of: of,
			Bound: bound})
		a := &l[len(l)-1]
		switch {
		case arm == experiment.ArmKubeProxyNFTables && r.programs[experiment.KubeProxyProgram.Name] == "":
			a.Cannot = "it wants a kube-proxy: --subject kube-proxy=PATH"
		case arm != experiment.ArmKubeProxyNFTables && !slices.Contains(r.modes, arm):
			a.Cannot = "it wants the mode " + arm
		}
		return a
	}
	const ms, second = float64(time.Millisecond), float64(time.Second)
	add("G5, nftables", "cold sync in ≤ 0.4 s, here with the listing", "sync", experiment.ArmNFTables, result.Value,
		0.4*second)
	times := add("G5, kube-proxy", "kube-proxy's nftables mode takes ≥ 100 × as long for its cold sync, ours with "+
		"the listing", "sync", experiment.ArmKubeProxyNFTables, result.Value, 100)
	times.Over, times.Least = &result.CellRef{Arm: experiment.ArmNFTables, Params: at}, true
	if !slices.Contains(r.modes, experiment.ArmNFTables) {
		times.Cannot = "it wants the mode nftables"
	}
	for _, m := range []string{experiment.ArmNFTables, experiment.ArmEBPF} {
		add("cold start, "+m, "from the program's start to all in the kernel in ≤ 1 s", "cold", m, result.Value, second)
		add("G8, "+m+", p50", "half of the changes are in the kernel ≤ 1 ms after their watch event", "event", m, result.P50,
			ms)
		add("G8, "+m+", p99", "and 99 % within 5 ms", "event", m, result.P99, 5*ms)
		g9 := add("G9, "+m, "99 % of the changes can be connected to ≤ 50 ms after their PATCH, against a real API server",
			"moved-churn", m, result.P99, 50*ms)
		if r.programs[experiment.ControlPlaneProgram.Name] == "" && g9.Cannot == "" {
			g9.Cannot = "it wants a real API server: --subject control-plane=PATH"
		}
		add("G10, "+m, "≤ 150 MiB resident after the start", "memory", m, result.Value, 150<<20)
		add("G10, "+m+", later", "and after the changes", "memory-churn", m, result.Value, 150<<20)
		add("G11, "+m, "≤ 0.02 % of a core at rest", "idle", m, result.Value, 0.0002)
		add("no loss, "+m, "no connection to a Service fails while others change", "steady", m, result.Failed, 0)
	}
	return l
}

// restarts is a claim about kube-proxy alone, at the greatest number of Services of ten endpoints.
func (r *trial) restarts() result.Aim {
	most := 0
	for _, s := range r.profile.Sizes {
		if s.endpoints == testbed.Endpoints {
			most = max(most, s.services)
		}
	}
	at := testbed.ServiceParams(most)
	a := result.Aim{ID: "restarts", Text: "a restart takes kube-proxy longer in mode nftables (194 s at 10,000 " +
		"× 2) than in mode iptables (40 s)", Claim: byRestarts,
		Measure: "restart", Arm: experiment.ArmKubeProxyNFTables, Params: at, Of: result.Value,
		Over: &result.CellRef{Arm: experiment.ArmKubeProxyIPTables, Params: at}, Bound: 1, Least: true}
	if r.programs[experiment.KubeProxyProgram.Name] == "" || most == 0 {
		a.Cannot = "it wants a kube-proxy: --subject kube-proxy=PATH"
	}
	return a
}

func (r *trial) method() []string {
	p := r.profile
	server := fmt.Sprintf("The API server is a small one of the lab's own, in the lab's process, over plain HTTP: %s. It "+
		"has no etcd, admission or authentication, so changes reach watchers sooner than in a cluster.", "sandbox/apiserver")
	if program := r.programs[experiment.ControlPlaneProgram.Name]; program != "" {
		server = "The API server is kube-apiserver with etcd, the program that was given, over TLS and with client " +
			"certificates; etcd does not wait for the disk. Both, and the lab, share the processors with the subject, and are " +
			"not counted to it."
	}
	return []string{
		fmt.Sprintf("In each of %d rounds every subject lives once, one at a time, in drawn order: on a node of its own (a "+
			"network namespace with nothing in its kernel, joined by a veth to that of the API server) it is started, rests, "+
			"is told of single changes, then of %g a second for at least %v and %d changes that are waited for, and is ended "+
			"and started again. What it leaves goes with its namespace.", p.Rounds, p.Rate, p.Churn, p.Least),
		server,
		fmt.Sprintf("A change is the PATCH of an EndpointSlice. Of single changes it moves the only endpoint of a probe, "+
			"which is connected to from the node; kube-proxy, which syncs once a second at most, gets %v of rest before each, "+
			"ours 20 ms, and up to half as long again at random. Those beside which it is measured replace one endpoint of a "+
			"Service drawn at random, or put it back.", experiment.MoveAfter),
		"kube-proxy is as upstream configures it, with the limits of conntrack left alone; in mode iptables through " +
			"iptables-legacy, since the nft variant needs minutes at 5,000 Services. No process is pinned to a processor: " +
			"subjects may use all, as they would.",
		"Hollow marks are upstream's, from other machines and kernels: single runs, of the first sync as kube-proxy logs " +
			"it, without the program's start.",
	}
}

func (r *trial) missing() []string {
	l := experiment.NotMeasured(r.cannot)
	if slices.Contains(r.modes, "userspace") {
		l = append(l, fmt.Sprintf("Mode userspace above %s Services: it opens sockets for each, and is for small clusters.",
			experiment.Thousands(fewListeners)))
	}
	if !slices.Contains(r.profile.Sizes, aimed) {
		l = append(l, fmt.Sprintf("The project's aims, which are of %s: --services %d has that.", aimed, aimed.services))
	}
	if r.programs[experiment.KubeProxyProgram.Name] == "" {
		l = append(l, experiment.NoKubeProxy)
	}
	if r.programs[experiment.ControlPlaneProgram.Name] == "" {
		l = append(l, "A real API server: none was given. --subject control-plane=PATH takes one; `make -C test/cluster "+
			"build` builds one and says where.")
	}
	return append(l,
		"From the watch event to the kernel, of kube-proxy: its metric begins at the change in the cluster and knows steps "+
			"of a quarter of a second at best.",
		"Programming latency as KEP-3453 has it (27 s, then 5 s, half of all changes, 5,000 nodes): it is of a whole "+
			"cluster's changes, not of a number of Services.",
		"Namespaces, Pods, policies; more than one port, node ports, affinity: every Service is a ClusterIP with one port.")
}

// ghosts are upstream's published times of a first sync, from nothing and after a restart.
func ghosts() []result.Ghost {
	const second = float64(time.Second)
	return []result.Ghost{
		{Measure: "sync", X: 5006, Value: 795 * second, Label: "nftables × 50",
			Source: "kube-proxy, kubernetes#135639: 5,006 Services, 250,011 endpoints, Linux 6.1, 32 processors: 13 min 15 s"},
		{Measure: "sync", X: 44125, Value: 1004 * second, Label: "nftables × 1",
			Source: "kube-proxy 1.36.1, kubernetes#139513: 44,125 Services, 44,152 endpoints: 16 min 44 s"},
		{Measure: "restart", X: 10000, Value: 40.1 * second, Label: "iptables × 2",
			Source: "kube-proxy, kubernetes#130119: " +
				"10,000 Services × 2 endpoints, Linux 6.8, the first sync after a restart in mode iptables: 40 s"},
		{Measure: "restart", X: 10000, Value: 194.4 * second, Label: "nftables × 2",
			Source: "kube-proxy, kubernetes#130119: the same in mode nftables, before what it changed: 3 min 14 s"},
	}
}
