package lab

import (
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/result"
)

// Who says what is tested.
const (
	byFairlead = "Fairlead's aim"
	byRestarts = "kubernetes#130119, 2025, of what it then changed"
)

func (r *controlSide) design() result.Design {
	p := r.Profile
	d := result.Design{
		ID: "control", Title: "What it takes to keep a node as an API server says",
		Question: "How long does it take until a node's kernel has what an API server tells, at the start, after a restart and after a change, and what does that cost?",
		Vary:     result.Axis{Param: "services", Title: fmt.Sprintf("Services × %d endpoints, unless said otherwise", endpoints), Short: "Services"},
		Rounds:   p.Rounds,
		Measures: controlMeasures(p), Aims: r.aims(), Ghosts: controlGhosts(), Method: r.method(), Missing: r.missing(),
		Pictures: []result.Picture{
			{ID: "moved-churn-ecdf", Kind: result.ECDF, Title: "One change among others, PATCH to first connection", Measures: []string{"moved-churn"}},
			{ID: "moved-ecdf", Kind: result.ECDF, Title: "One change from rest, PATCH to first connection", Measures: []string{"moved"}},
			{ID: "event-ecdf", Kind: result.ECDF, Title: "A change's arrival to the kernel", Measures: []string{"event"}},
		},
	}
	for _, m := range r.modes {
		d.Arms = append(d.Arms, result.Arm{ID: m, Title: m, Style: styles[m], Text: "`fairlead run --mode " + m + "`, told by the API server"})
	}
	if r.given[kubeProxyProgram.name] != "" {
		for _, a := range proxyArms {
			arm := a.arm()
			arm.Text = fmt.Sprintf("the kube-proxy that was given, in mode %s, told by the same API server", a.mode)
			if a.variant != "" {
				arm.Text += fmt.Sprintf(", through iptables-%s", a.variant)
			}
			d.Arms = append(d.Arms, arm)
		}
	}
	return d
}

func controlMeasures(p controlProfile) []result.Measure {
	churn := fmt.Sprintf("among %g changes a second", p.Rate)
	return []result.Measure{
		{ID: "cold", Title: "cold start to all in the kernel", Unit: "s", Stat: "value", Text: "from the program's start, with nothing of it in the kernel, until it says that all is there; the probe's connection comes through then"},
		{ID: "sync", Title: "first sync of a cold start", Unit: "s", Stat: "value", Text: "until all was in the kernel, as each program says itself in its metrics: kube-proxy from when all was known, ours from the first object's arrival on, so with most of the listing"},
		{ID: "cold-cpu", Title: "processor time of a cold start", Unit: "s", Stat: "value", Detail: true, Text: "of all its threads and of the programs that it ran; of kube-proxy in steps of 10 ms"},
		{ID: "restart", Title: "restart with all in the kernel", Unit: "s", Stat: "value", Text: "the same start once more, after the program was ended (ours by SIGKILL, kube-proxy by SIGTERM), with what it wrote still there"},
		{ID: "moved", Title: "one change from rest, PATCH to first connection", Unit: "ms", Stat: "p50", Text: "a Service's only endpoint moves: from the begin of the PATCH of its EndpointSlice until a connection comes to the new place, one try each half millisecond"},
		{ID: "moved-p99", From: "moved", Title: "one change from rest, p99 of a round", Unit: "ms", Stat: "p99", Detail: true},
		{ID: "moved-churn", Title: "one change " + churn + ", PATCH to first connection", Unit: "ms", Stat: "p50", Text: "the same while endpoints of other Services change"},
		{ID: "moved-churn-p99", From: "moved-churn", Title: "one change " + churn + ", p99 of a round", Unit: "ms", Stat: "p99"},
		{ID: "event", Title: "a change's arrival to the kernel, " + churn, Unit: "ms", Stat: "p50", Text: "as the agent says itself in its metric " + delayMetric + ", each as the upper bound of its bucket, which are a third apart; from the watch event on"},
		{ID: "event-p99", From: "event", Title: "a change's arrival to the kernel, " + churn + ", p99 of a round", Unit: "ms", Stat: "p99"},
		{ID: "memory", Title: "resident memory after the start", Unit: "MiB", Stat: "value", Text: "VmRSS at rest; kube-proxy's own without the programs that it runs"},
		{ID: "memory-churn", Title: "resident memory after the changes", Unit: "MiB", Stat: "value", Text: "the same after the changes"},
		{ID: "idle", Title: "idle, of a core", Unit: "%", Stat: "value", Mean: true, Text: fmt.Sprintf("processor time in %v of each round in which nothing changes; the mean, since it comes in bursts", p.Quiet)},
		{ID: "churn-cpu", Title: "processor time " + churn + ", of a core", Unit: "%", Stat: "value", Text: "of all its threads and of the programs that it ran"},
		{ID: "change-cpu", Title: "of that, for each of these changes", Unit: "ms", Stat: "value", Text: "who makes one sync of many changes spends less on each"},
		{ID: "churn-rate", From: "churn-cpu", Title: "changes a second that the API server took", Stat: "rate:changes", Detail: true},
		{ID: "moved-cpu", Title: "processor time of one change from rest", Unit: "ms", Stat: "value", Text: "between all moves and the rest after them, by their number"},
		{ID: "steady", Title: "connections to a Service that does not change, meanwhile", Unit: "ms", Stat: "p50", Detail: true, Text: fmt.Sprintf("open loop, %d/s: connect, request, close by FIN, from the intended start", steadyRate)},
	}
}

// aimed is the size that the project's aims are of.
var aimed = size{10000, endpoints}

// aims are the project's, where the run has their size, and a claim of others.
func (r *controlSide) aims() (l []result.Aim) {
	if slices.Contains(r.Profile.Sizes, aimed) {
		l = r.own()
	}
	return append(l, r.restarts())
}

// own are the project's aims.
func (r *controlSide) own() (l []result.Aim) {
	at := aimed.params()
	add := func(id, text, measure, arm, of string, bound float64) *result.Aim {
		l = append(l, result.Aim{ID: id, Text: text, Claim: byFairlead, Measure: measure, Arm: arm, Params: at, Of: of, Bound: bound})
		a := &l[len(l)-1]
		switch {
		case arm == armProxyNFT && r.given[kubeProxyProgram.name] == "":
			a.Cannot = "it wants a kube-proxy: --subject kube-proxy=PATH"
		case arm != armProxyNFT && !slices.Contains(r.modes, arm):
			a.Cannot = "it wants the mode " + arm
		}
		return a
	}
	const ms, second = float64(time.Millisecond), float64(time.Second)
	add("G5, nftables", "cold sync in ≤ 0.4 s, here with the listing", "sync", armNFT, "value", 0.4*second)
	times := add("G5, kube-proxy", "kube-proxy's nftables mode takes ≥ 100 × as long for its cold sync, ours with the listing", "sync", armProxyNFT, "value", 100)
	times.Over, times.Least = &result.CellRef{Arm: armNFT, Params: at}, true
	if !slices.Contains(r.modes, armNFT) {
		times.Cannot = "it wants the mode nftables"
	}
	for _, m := range []string{armNFT, armEBPF} {
		add("cold start, "+m, "from the program's start to all in the kernel in ≤ 1 s", "cold", m, "value", second)
		add("G8, "+m+", p50", "half of the changes are in the kernel ≤ 1 ms after their watch event", "event", m, "p50", ms)
		add("G8, "+m+", p99", "and 99 % within 5 ms", "event", m, "p99", 5*ms)
		g9 := add("G9, "+m, "99 % of the changes can be connected to ≤ 50 ms after their PATCH, against a real API server", "moved-churn", m, "p99", 50*ms)
		if r.given[controlPlaneProgram.name] == "" && g9.Cannot == "" {
			g9.Cannot = "it wants a real API server: --subject control-plane=PATH"
		}
		add("G10, "+m, "≤ 150 MiB resident after the start", "memory", m, "value", 150<<20)
		add("G10, "+m+", later", "and after the changes", "memory-churn", m, "value", 150<<20)
		add("G11, "+m, "≤ 0.02 % of a core at rest", "idle", m, "value", 0.0002)
		add("no loss, "+m, "no connection to a Service fails while others change", "steady", m, "failed", 0)
	}
	return l
}

// restarts is a claim about kube-proxy alone, at the greatest number of Services of ten endpoints.
func (r *controlSide) restarts() result.Aim {
	most := 0
	for _, s := range r.Profile.Sizes {
		if s.endpoints == endpoints {
			most = max(most, s.services)
		}
	}
	at := params(most)
	a := result.Aim{ID: "restarts", Text: "a restart takes kube-proxy longer in mode nftables (194 s at 10,000 × 2) than in mode iptables (40 s)", Claim: byRestarts,
		Measure: "restart", Arm: armProxyNFT, Params: at, Of: "value", Over: &result.CellRef{Arm: armProxyIPT, Params: at}, Bound: 1, Least: true}
	if r.given[kubeProxyProgram.name] == "" || most == 0 {
		a.Cannot = "it wants a kube-proxy: --subject kube-proxy=PATH"
	}
	return a
}

func (r *controlSide) method() []string {
	p := r.Profile
	server := fmt.Sprintf("The API server is a small one of the lab's own, in the lab's process, over plain HTTP: %s. It has no etcd, admission or authentication, so changes reach watchers sooner than in a cluster.", "sandbox/apiserver")
	if program := r.given[controlPlaneProgram.name]; program != "" {
		server = "The API server is kube-apiserver with etcd, the program that was given, over TLS and with client certificates; etcd does not wait for the disk. Both, and the lab, share the processors with the subject, and are not counted to it."
	}
	return []string{
		fmt.Sprintf("In each of %d rounds every subject lives once, one at a time, in drawn order: on a node of its own (a network namespace with nothing in its kernel, joined by a veth to that of the API server) it is started, rests, "+
			"is told of single changes, then of %g a second for at least %v and %d changes that are waited for, and is ended and started again. What it leaves goes with its namespace.", p.Rounds, p.Rate, p.Churn, p.Least),
		server,
		fmt.Sprintf("A change is the PATCH of an EndpointSlice. Of single changes it moves the only endpoint of a probe, which is connected to from the node; kube-proxy, which syncs once a second at most, gets %v of rest before each, "+
			"ours 20 ms, and up to half as long again at random. Those beside which it is measured replace one endpoint of a Service drawn at random, or put it back.", moveAfter),
		"kube-proxy is as upstream configures it, with the limits of conntrack left alone; in mode iptables through iptables-legacy, since the nft variant needs minutes at 5,000 Services. Nobody is pinned to a processor: subjects may use all, as they would.",
		"Hollow marks are upstream's, from other machines and kernels: single runs, of the first sync as kube-proxy logs it, without the program's start.",
	}
}

func (r *controlSide) missing() []string {
	l := unableWords(r.cannot)
	if slices.Contains(r.modes, "userspace") {
		l = append(l, fmt.Sprintf("Mode userspace above %s Services: it opens sockets for each, and is for small clusters.", thousands(fewListeners)))
	}
	if !slices.Contains(r.Profile.Sizes, aimed) {
		l = append(l, fmt.Sprintf("The project's aims, which are of %s: --services %d has that.", aimed, aimed.services))
	}
	if r.given[kubeProxyProgram.name] == "" {
		l = append(l, noSubject)
	}
	if r.given[controlPlaneProgram.name] == "" {
		l = append(l, "A real API server: none was given. --subject control-plane=PATH takes one; `make -C test/cluster build` builds one and says where.")
	}
	return append(l,
		"From the watch event to the kernel, of kube-proxy: its metric begins at the change in the cluster and knows steps of a quarter of a second at best.",
		"Programming latency as KEP-3453 has it (27 s, then 5 s, half of all changes, 5,000 nodes): it is of a whole cluster's changes, not of a number of Services.",
		"Namespaces, Pods, policies; more than one port, node ports, affinity: every Service is a ClusterIP with one port.")
}

// controlGhosts are upstream's published times of a first sync, from nothing and after a restart.
func controlGhosts() []result.Ghost {
	const second = float64(time.Second)
	return []result.Ghost{
		{Measure: "sync", X: 5006, Value: 795 * second, Label: "nftables × 50", Source: "kube-proxy, kubernetes#135639: 5,006 Services, 250,011 endpoints, Linux 6.1, 32 processors: 13 min 15 s"},
		{Measure: "sync", X: 44125, Value: 1004 * second, Label: "nftables × 1", Source: "kube-proxy 1.36.1, kubernetes#139513: 44,125 Services, 44,152 endpoints: 16 min 44 s"},
		{Measure: "restart", X: 10000, Value: 40.1 * second, Label: "iptables × 2", Source: "kube-proxy, kubernetes#130119: 10,000 Services × 2 endpoints, Linux 6.8, the first sync after a restart in mode iptables: 40 s"},
		{Measure: "restart", X: 10000, Value: 194.4 * second, Label: "nftables × 2", Source: "kube-proxy, kubernetes#130119: the same in mode nftables, before what it changed: 3 min 14 s"},
	}
}
