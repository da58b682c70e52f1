package lab

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/result"
)

// Arms of kube-proxy's rules.
var (
	old     = classic.IPTables19.String()
	present = classic.IPTables.String()
	proxy   = classic.NFTables.String()
)

// constant is the mode that stands for IPVS in claims, which the article compared iptables with: IPVS itself where it runs,
// else nftables, which translates by the same connection tracking after one look-up, whatever the number of Services; "" for
// neither.
func (r *tigera) constant() string {
	for _, m := range []string{"ipvs", armNFT} {
		if slices.Contains(r.modes, m) {
			return m
		}
	}
	return ""
}

func (r *tigera) design() result.Design {
	p := r.Profile
	return result.Design{
		ID: "tigera", Title: "kube-proxy's modes and ours, by number of Services",
		Question: "What do a new connection, a request and the processor pay for Services as their number grows, with the rules of kube-proxy, of 2019 and of today, and in each of our modes? " +
			"And do the claims of “Comparing kube-proxy modes: iptables or IPVS?” (Tigera, 2019) hold on this kernel?",
		Vary:     result.Axis{Param: "services", Title: fmt.Sprintf("Services × %d endpoints", endpoints), Short: "Services"},
		Arms:     slices.Concat(baselines(), modeArms(r.modes), layoutArms(r.layouts), r.calicoArms(), r.proxyArms()),
		Baseline: armDirect, Again: armAgain, Margin: 0.02, Rounds: p.Rounds,
		Measures: r.measures(), Aims: r.aims(), Method: r.method(), Missing: r.missing(), Ghosts: r.ghosts(),
		Pictures: []result.Picture{{ID: "cpu-parts", Kind: result.Stack, Title: "Processor time at the greatest number of Services, by who spent it", Measures: []string{"cpu-client", "cpu-server", "cpu-agent", "resync"}}},
	}
}

// layoutArms are those of kube-proxy's rules.
func layoutArms(layouts []classic.Layout) (arms []result.Arm) {
	says := map[classic.Layout]string{
		classic.IPTables19: "kube-proxy's iptables rules of 2019: two rules for a Service in one list; written by iptables-legacy",
		classic.IPTables:   "kube-proxy's iptables rules of today: one rule for a Service in one list; written by iptables-legacy",
		classic.NFTables:   "kube-proxy's nftables rules of today: a map of Services, a chain for each and for each endpoint; written by nft",
	}
	for _, l := range layouts {
		arms = append(arms, result.Arm{ID: l.String(), Title: l.String(), Style: styles[l.String()], Text: says[l]})
	}
	return arms
}

// calicoArms is the one of Calico's rules, of which nothing but their number is measured.
func (r *tigera) calicoArms() []result.Arm {
	if r.noCalico != "" {
		return nil
	}
	return []result.Arm{{ID: armCalico, Title: "Calico's policies", Text: fmt.Sprintf("Calico's iptables rules of 2019 for the network policies of a node with %d pods, %d policies for each; without those of Services, whose number is nothing to them; written by iptables-legacy",
		calicoPods, calicoPolicies)}}
}

// proxyArms are those of the kube-proxy that was given.
func (r *tigera) proxyArms() (arms []result.Arm) {
	for _, a := range r.proxies() {
		arms = append(arms, a.arm())
	}
	return arms
}

func (r *tigera) measures() []result.Measure {
	p := r.Profile
	ends := "at the greatest number of Services"
	if p.Everywhere {
		ends = "at every number of Services"
	}
	exchange := fmt.Sprintf("connect(2), %d bytes there, %d bytes back, close(2) with a reset", sizes.Request, sizes.Response)
	if r.nginx != "" {
		exchange = fmt.Sprintf("connect(2), an HTTP request, a page of %d bytes, close(2) with a reset", page)
	}
	rate := fmt.Sprintf("open loop, %g requests a second, from the intended start", p.Rate)
	share := func(id, from, title, stat, text string) result.Measure {
		return result.Measure{ID: id, From: from, Title: title, Unit: "%", Stat: stat, More: true, Margin: 0.005, Text: text, Detail: stat != "cpu" || id == "cpu-work"}
	}
	return []result.Measure{
		{ID: "connect", Title: "connect() alone", Unit: "µs", Stat: "p50", Ratio: true, Text: "connect(2) from call to return, to the Service in the middle; the connection is reset afterwards"},
		{ID: "crr", Title: "connect, request, close", Unit: "µs", Stat: "p50", Ratio: true, Text: exchange + "; to the Service in the middle"},
		{ID: "crr-first", Detail: true, Title: "connect, request, close: first Service", Unit: "µs", Stat: "p50", Ratio: true, Text: "the same to the first Service"},
		{ID: "crr-last", Title: "connect, request, close: last Service", Unit: "µs", Stat: "p50", Ratio: true, Text: "the same to the last Service"},
		{ID: "crr-none", Title: "connect, request, close: no Service", Unit: "µs", Stat: "p50", Ratio: true, Text: "the same to a server's own address, through a node that has Services"},
		{ID: "http", Title: "round trip, new connection for each", Unit: "µs", Stat: "p50", Ratio: true, Text: rate + ": connect, a request, its answer, the server's FIN; to the Service in the middle"},
		{ID: "http-last", Title: "round trip, new connection for each: last Service", Unit: "µs", Stat: "p50", Ratio: true, Text: "the same to the last Service"},
		{ID: "http-kept", Title: fmt.Sprintf("round trip, %d on a connection, mean", p.Each), Unit: "µs", Stat: "mean", Ratio: true,
			Text: fmt.Sprintf("%s; a connection carries %d requests, so the mean is given, in which the first of them counts; to the Service in the middle, %s", rate, p.Each, ends)},
		{ID: "http-work", Detail: true, Title: "round trip with a busy client", Unit: "µs", Stat: "p50", Ratio: true, Text: fmt.Sprintf("as with a new connection for each, while the client computes for %v after each answer, in 1 MiB of memory", p.Work)},
		share("cpu", "http", "processor time, new connection for each", "cpu", fmt.Sprintf("client, server and agent, each with what it is interrupted for, at %g connections a second; more than direct in the same round", p.Rate)),
		share("cpu-client", "http", "client's processor time, kernel included", "cpu:client", "the client's thread: its system calls, the kernel's path and the rules in it, and what softirqs do meanwhile"),
		{ID: "cpu-softirq", Detail: true, From: "http", Title: "processor time in softirqs", Unit: "%", Stat: "cpu:softirq", Mean: true,
			Text: "on the load's processor, sampled by the kernel in ticks: good over many blocks only, and part of the client's and server's time"},
		share("cpu-server", "http", "server's processor time, kernel included", "cpu:server", "the server's thread, likewise"),
		share("cpu-agent", "http", "agent's processor time", "cpu:agent", "all threads of the agent"),
		share("cpu-last", "http-last", "processor time, last Service", "cpu", "the same to the last Service"),
		share("cpu-kept", "http-kept", fmt.Sprintf("processor time, %d requests on a connection", p.Each), "cpu", "the same with kept connections"),
		share("cpu-work", "http-work", "processor time with a busy client", "cpu", "the same while the client computes"),
		{ID: "resync", Title: "full write every 30 s, of a core", Unit: "%", Stat: "value", Text: "computed: processor time of the commands that write all rules again, with the kernel's part, over 30 s; kube-proxy of 2019 did so, today's and ours don't"},
		loaded,
		{ID: "rules", Title: "rules tested per new connection", Stat: "value", Exact: true, Text: "counted: by a node's own connection, on average over up to 100 Services spread evenly and over random draws; of Calico's policies: by one to a pod from another node, on average over pods and policies"},
		{ID: "rules-first", Detail: true, Title: "rules, first Service", Stat: "value", Exact: true, Text: "likewise"},
		{ID: "rules-last", Title: "rules, last Service", Stat: "value", Exact: true, Text: "likewise"},
		{ID: "rules-none", Title: "rules, no Service", Stat: "value", Exact: true, Text: "likewise: by a connection to a server's own address"},
		{ID: "rules" + leaves, Detail: true, Title: "rules, from a pod to another node", Stat: "value", Exact: true, Text: "of Calico's policies, of which none is for what pods send"},
		{ID: "rules" + stays, Detail: true, Title: "rules, between two pods of a node", Stat: "value", Exact: true, Text: "likewise: what leaves the one and comes to the other, at once"},
		{ID: "rules-established", Title: "rules per packet of an established connection", Stat: "value", Exact: true, Text: "likewise: by every packet after the connection's first"},
	}
}

// loaded is how long it took to have all arms' kernels programmed.
var loaded = result.Measure{ID: "load", Title: "first full write", Unit: "s", Stat: "value", Text: "kube-proxy's rules: the commands' time, which for nft-classic are given them in pieces; modes: from the start of `fairlead run` until all is in the kernel"}

const (
	byTigera = "Tigera 2019"
	byBlog   = "Kubernetes blog 2025"
)

// aims are the article's claims, as far as they can be tested here, then ours.
func (r *tigera) aims() (l []result.Aim) {
	p, most, c := r.Profile, r.most(), cmp.Or(r.constant(), "nobody")
	at, thousand, one := params(most), params(1000), params(p.Services[0])
	ref := func(measure, arm string, params map[string]string) *result.CellRef {
		return &result.CellRef{Measure: measure, Arm: arm, Params: params}
	}
	claim := func(id, text string, a result.Aim) {
		a.ID, a.Text, a.Claim = id, text, byTigera
		if a.Of == "" {
			a.Of = "value"
		}
		if a.Params == nil {
			a.Params = at
		}
		if p.Emulated && strings.HasPrefix(a.Measure, "cpu") {
			a.Cannot = "the processor is emulated: shares of it say nothing about a real one"
		}
		l = append(l, a)
	}
	n, few := thousands(most), thousands(p.Services[0])
	stands := ""
	if c == armNFT {
		stands = " (nftables stands for IPVS)"
	}
	claim("C1, request", "up to 1,000 Services the round trip differs trivially, by at most 2 %, from that with a constant look-up"+stands, result.Aim{Measure: "http", Arm: old, Params: thousand, Over: ref("", c, thousand), Bound: 1, Margin: 0.02})
	claim("C1, connection", "the same of a whole connection in a closed loop, where nothing hides it", result.Aim{Measure: "crr", Arm: old, Params: thousand, Over: ref("", c, thousand), Bound: 1, Margin: 0.02})
	claim("C2, none kept", "at "+n+" Services the difference is there with a new connection for each request: more than 2 %", result.Aim{Measure: "http", Arm: old, Over: ref("", c, at), Bound: 1.02, Least: true})
	claim("C2, kept", fmt.Sprintf("and not with %d requests on a connection: at most 2 %%", p.Each), result.Aim{Measure: "http-kept", Arm: old, Over: ref("", c, at), Bound: 1, Margin: 0.02})
	claim("C3", "the cost is a connection's, not a packet's: an established packet is tested against as many rules at "+n+" Services as at "+few, result.Aim{Measure: "rules-established", Arm: old, Over: ref("", "", one), Bound: 1})
	claim("C4, last", "about 20,000 rules per new connection at 10,000 Services, to the last Service (±2 %)", result.Aim{Measure: "rules-last", Arm: old, Params: params(10000), Bound: 20000, Margin: 0.02})
	claim("C4, average", "the same on average over all Services", result.Aim{Measure: "rules", Arm: old, Params: params(10000), Bound: 20000, Margin: 0.02})
	claim("C4, today", "the same with today's rules, to the last Service", result.Aim{Measure: "rules-last", Arm: present, Params: params(10000), Bound: 20000, Margin: 0.02})
	claim("C5, order", "iptables takes more processor time at "+n+" Services than a constant look-up does"+stands, result.Aim{Measure: "cpu-last", Arm: old, Over: ref("cpu", c, at), Bound: 1, Least: true})
	claim("C5, rules", "35 % of a core more at 10,000 Services than at "+few+", ±25 % of that: rules alone, last Service", result.Aim{Measure: "cpu-last", Arm: old, Params: params(10000), Less: ref("cpu", old, one), Bound: 0.35, Margin: 0.25})
	claim("C5, with resync", "the same with a full write every 30 s added", result.Aim{Measure: "cpu-last", Arm: old, Params: params(10000), Less: ref("cpu", old, one), Plus: ref("resync", old, params(10000)), Bound: 0.35, Margin: 0.25})
	claim("C6, rules", fmt.Sprintf("with %d requests on a connection iptables takes at most 2 %% of a core more%s: rules alone", p.Each, stands), result.Aim{Measure: "cpu-kept", Arm: old, Less: ref("", c, at), Bound: 0.02})
	claim("C6, with resync", "the same with a full write every 30 s added", result.Aim{Measure: "cpu-kept", Arm: old, Less: ref("", c, at), Plus: ref("resync", old, at), Bound: 0.02})
	claim("C5, IPVS", "8 % of a core more at 10,000 Services than at "+few+", ±25 % of that, in IPVS", result.Aim{Measure: "cpu", Arm: "ipvs", Params: params(10000), Less: ref("", "", one), Bound: 0.08, Margin: 0.25, Cannot: r.noIPVS()})
	claim("C7", "a new connection through IPVS takes longer at 10,000 Services than at "+few+", by more than 2 %", result.Aim{Measure: "http", Arm: "ipvs", Params: params(10000), Over: ref("", "", one), Bound: 1.02, Least: true, Cannot: r.noIPVS()})
	claim("C8", fmt.Sprintf("what iptables takes more does not depend on what the application does: with %v of work a request it is within 25 %% of that without", p.Work), result.Aim{Measure: "cpu-work", Arm: old, Of: "more", Over: ref("cpu", old, at), Bound: 1, Margin: 0.25})
	for _, way := range []struct{ id, text, measure string }{
		{"C9, comes", fmt.Sprintf("Calico executes at most as many rules, for a connection that comes to one of %d pods with %d policies each, as kube-proxy to the last of %d Services", calicoPods, calicoPolicies, fewServices), "rules" + comes},
		{"C9, leaves", "the same for one that leaves such a pod", "rules" + leaves},
		{"C9, stays", "the same for one between two of a node's pods, which both do at once", "rules" + stays},
	} {
		claim(way.id, way.text, result.Aim{Measure: way.measure, Arm: armCalico, Over: ref("rules-last", old, params(fewServices)), Bound: 1, Cannot: r.noCalico})
	}
	claim("C10", "iptables carries a new connection faster than userspace", result.Aim{Measure: "crr", Arm: "iptables", Over: ref("", "userspace", at), Bound: 1})
	if !slices.Contains(r.modes, "userspace") || !slices.Contains(r.modes, "iptables") {
		l[len(l)-1].Cannot = "it wants the modes iptables and userspace"
	}
	claim("C21, half", "kube-proxy's nftables at its median is about as fast as its iptables at its best, the first Service (±5 %)", result.Aim{Measure: "crr", Arm: proxy, Over: ref("crr-first", present, at), Bound: 1, Margin: 0.05})
	claim("C21, flat", "and as fast at "+n+" Services as at "+few+" (±2 %)", result.Aim{Measure: "crr", Arm: proxy, Over: ref("", proxy, one), Bound: 1, Margin: 0.02})
	for i := range l {
		if strings.HasPrefix(l[i].ID, "C21") {
			l[i].Claim = byBlog
		}
	}
	return append(l, r.own()...)
}

// own are the project's aims.
func (r *tigera) own() (l []result.Aim) {
	at, ten := params(10000), params(10)
	add := func(mode, id, text string, a result.Aim) {
		if a.ID, a.Text, a.Arm = id, text, mode; a.Params == nil {
			a.Params = at
		}
		if slices.Contains(r.modes, mode) {
			l = append(l, a)
		}
	}
	flat := &result.CellRef{Params: ten}
	l = newConnectionAims(r.modes, r.layouts, "")
	add("iptables", "rules, worst", "iptables: ≤ 32 rules per new connection to the last of 10,000 Services", result.Aim{Measure: "rules-last", Of: "value", Bound: 32})
	add("iptables", "rules, average", "iptables: ≤ 26 rules per new connection on average", result.Aim{Measure: "rules", Of: "value", Bound: 26})
	add("iptables", "rules, others", "iptables: ≤ 3 rules for traffic to no Service", result.Aim{Measure: "rules-none", Of: "value", Bound: 3})
	add("iptables", "iptables flat", "iptables: a connection at 10,000 Services costs ≤ 1.01 × one at 10", result.Aim{Measure: "crr", Of: "value", Over: flat, Bound: 1.01})
	add(armNFT, "nftables flat", "nftables: a connection at 10,000 Services costs ≤ 1.02 × one at 10", result.Aim{Measure: "crr", Of: "value", Over: flat, Bound: 1.02})
	return l
}

// noIPVS says why what IPVS alone shows is not tested, "" where it is.
func (r *tigera) noIPVS() string {
	switch {
	case slices.Contains(r.modes, "ipvs"):
		return ""
	case slices.ContainsFunc(r.cannot, func(u unable) bool { return u.mode == "ipvs" }):
		return "this kernel has no IPVS; run the lab on one that has (module ip_vs)"
	}
	return "the run was told to leave IPVS out"
}

func (r *tigera) method() []string {
	p := r.Profile
	l := []string{
		fmt.Sprintf("Every arm has two network namespaces of its own, joined by a veth: a node, where the client runs, and a far end, where the server answers at ten addresses. "+
			"Direct means: to those addresses in turn, through a node without any rule and without conntrack. All arms stand at the same time. The server is %s. "+
			"Client and server share one processor and have real-time priority; agents, also that of userspace, which carries every byte, are kept on the other processors.", r.server()),
		fmt.Sprintf("Each arm connects to one Service with those ten endpoints, in the middle of all unless said otherwise. Where rules are a list, the middle is what one of all Services meets on average; "+
			"first, last and none are measured beside it%s.", map[bool]string{false: ", at the greatest number of Services", true: ""}[p.Everywhere]),
		"kube-proxy's rules are written by the lab itself, in kube-proxy's layout and order, not by kube-proxy. Those of iptables go through iptables-legacy, since its nft variant needs minutes for 10,000 Services; " +
			"what a packet meets is the same. Each is written once and stays; the time to write all again, which kube-proxy of 2019 did every 30 s, is measured before any traffic and added by arithmetic, not by doing it during traffic.",
		fmt.Sprintf("Processor time is that of the client's and the server's threads and of the agent, in a core's share, at %g requests a second; what an arm takes more is the difference to direct in the same round. "+
			"Time in softirqs is charged to the thread that is interrupted, as this kernel does it, and shown apart only as the kernel samples it.", p.Rate),
		"Rules are counted by two ways that know nothing of each other: on paper, from what the kernel lists, and by the kernel's own trace of one packet. A rule counts each time it is tested, in every table and hook, also that of iptables' and nftables' NAT. " +
			"ebpf translates at connect(), so its packets bear an endpoint's address when they meet rules.",
		fmt.Sprintf("Calico's rules are written by the lab itself too, in the layout of Felix 3.6, for %d pods with %d policies each, of which a client is let in by any alike. Their number is counted over all pods, and traced at two that are there. "+
			"What the article compares them with is kube-proxy's rules to the last of %d Services.", calicoPods, calicoPolicies, fewServices),
		"A claim of equality is tested by equivalence with the stated margin; all others against a bound. Confirmed or refuted means that all of the 95 % interval says so.",
	}
	if r.kubeProxy != "" {
		l = append(l, fmt.Sprintf("kube-proxy itself is the program that was given, as upstream configures it, with an API server within the lab's process. What it does by itself meanwhile, it does on the other processors. "+
			"In mode iptables it draws the order of its list of Services anew at each sync, so that arm connects to %d Services in turn, spread over all, instead of the one in the middle. Its processor time is that of its threads and of the commands that it runs.", fewTargets))
	}
	return l
}

// server says who answers.
func (r *tigera) server() string {
	if r.nginx == "" {
		return "the lab's own, since nginx is not installed here"
	}
	return fmt.Sprintf("nginx (%s), one process and thread in each far end, with a static page of %d bytes and keepalive_requests %d", r.version, page, r.Profile.Each)
}

func (r *tigera) missing() []string {
	l := unableWords(r.cannot)
	if r.kubeProxy == "" {
		l = append(l, noSubject)
	} else {
		l = append(l, "Rules per packet, and first and last Services, of kube-proxy itself: it writes its list in an order drawn anew at each sync. The lab's own copy of its layouts, in a fixed order, has both.")
	}
	l = append(l,
		"The article's own numbers: its charts have no values, and its machines had a network between them. Shapes and claims are compared, not microseconds.",
		"IPVS's times, where this kernel has none. nftables stands for it where a claim wants a constant look-up behind the same connection tracking.",
		"A client in a pod: the client is on the node itself (the output hook). Look-ups are the same.",
		"UDP, SCTP and IPv6.",
		"Cold caches, and connect() to 1 %: the experiment connect has them.")
	if slices.Contains(r.modes, "iptables") {
		l = append(l, "Both variants of iptables: the mode uses the one that this host has; --modes iptables-legacy,iptables-nft compares them.")
	}
	if result.ReadMachine().Config["IRQ_TIME_ACCOUNTING"] == "y" {
		l = append(l, "Softirqs in sums of processor time: this kernel keeps their time apart (CONFIG_IRQ_TIME_ACCOUNTING) and samples it, see their own row. What rules cost there is missing from the sums.")
	}
	if !r.Profile.Everywhere {
		l = append(l, "First and last Services and kept connections at every number of Services: the full profile has them.",
			"What takes more and longer blocks to tell: claims that are inconclusive here, the full profile decides.")
	}
	return l
}

// ghosts are what articles printed.
func (r *tigera) ghosts() (l []result.Ghost) {
	const blog = "first packet's p50 by number of Services in KEP-3866, on other machines and over a network"
	for _, g := range []struct {
		label    string
		x, value float64
	}{{"KEP iptables", 5000, 49}, {"KEP iptables", 10000, 61}, {"KEP nftables", 10000, 14}} {
		l = append(l, result.Ghost{Measure: "connect", X: g.x, Value: g.value * float64(time.Microsecond), Label: g.label, Source: blog})
	}
	return append(l, result.Ghost{Measure: "rules", X: 10000, Value: 20000, Label: "Tigera 2019", Source: "“~20,000 rules for every new connection” at 10,000 Services"},
		result.Ghost{Measure: "rules", X: 10000, Value: 48, Label: "Calico, by Tigera", Source: "“roughly the same number as kube-proxy at 20 services with 200 backend pods”, which is 48 by arithmetic"})
}
