package fleet

import (
	"fmt"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/sandbox/generate"
)

// byFairlead is the source of what is tested.
const byFairlead = "Fairlead's aim"

// Design returns the experiment in words and numbers.
func (t *trial) Design() result.Design {
	p := t.profile
	return result.Design{
		ID: "fleet", Title: "What agents cost an API server",
		Question: fmt.Sprintf("What does each agent receive from the API server of a cluster that changes as "+
			"one of %s "+
			"nodes does, and what does it take to start all agents at once?", experiment.Thousands(whole)),
		Vary: result.Axis{Param: "agents", Title: "agents", Short: "agents"},
		Arms: []result.Arm{
			{ID: armServices, Title: "Services", Style: 1, Text: "Services, EndpointSlices, ServiceCIDRs, and " +
				"this node's Node"},
			{ID: armNodes, Title: "Services, all Nodes", Style: 2, Text: "the same, and all Nodes, as for direct server " +
				"return or a pod network of our own"},
			{ID: armPolicies, Title: "Services and policies", Style: 3,
				Text: "Services, this node's Node, and Pods, Namespaces, NetworkPolicies and ClusterNetworkPolicies, of which " +
					"there is none"},
		},
		Rounds: p.Rounds, Measures: measures(), Aims: t.aims(), Method: t.method(), Missing: t.missing(),
		Answer: t.answer(),
	}
}

func measures() []result.Measure {
	return []result.Measure{
		{ID: "received", Title: "received by each agent, while the cluster changes", Unit: "kB/s", Stat: result.Value,
			Text: "bytes at its connections, with TLS and HTTP/2, without TCP and IP"},
		{ID: "events", Title: "events for each agent, a minute", Stat: result.Value,
			Text: "messages of watches, with bookmarks"},
		{ID: "server-cpu", Title: "API server's processor time meanwhile, of a core", Unit: "%", Stat: result.Value,
			Text: "with what the writes take, which the remarks have"},
		{ID: "start", Title: "start of all agents at once", Unit: "s", Stat: result.Value,
			Text: "from the first request until the last agent knows all there is, all sources sharing one process"},
		{ID: "start-bytes", Title: "received by each agent at the start", Unit: "MiB", Stat: result.Value,
			Text: "until it knows all there is"},
		{ID: "start-cpu", Title: "API server's processor time for each agent's start", Unit: "ms", Stat: result.Value},
		{ID: "requests", Title: "requests of each agent at the start", Stat: result.Value, Detail: true},
		{ID: "refused", Title: "requests refused at the start", Stat: result.Value, Text: "answered 429, of all agents"},
		{ID: "failed", Title: "requests failed at the start", Stat: result.Value, Detail: true,
			Text: "answered 5xx or not at all, of all agents; each is made again"},
		{ID: "refused-later", Title: "requests refused or failed while the cluster changes", Stat: result.Value,
			Detail: true},
	}
}

func (t *trial) most() int { return slices.Max(t.profile.Agents) }

func (t *trial) answer() *result.Answer {
	of := func(measure, subject, verb string) result.Finding {
		return result.Finding{Subject: subject, Verb: verb, Of: result.Value,
			Cells: experiment.Cells(measure, params(t.most(), whole), arms...)}
	}
	return &result.Answer{Chart: "received", Findings: []result.Finding{
		of("received", fmt.Sprintf("while objects change as those of %s nodes do, each agent",
			experiment.Thousands(whole)), "receives"),
		of("start", fmt.Sprintf("the start of %d agents at once", t.most()), "takes"),
		of("start-bytes", "at the start each agent", "receives"),
	}}
}

// aims are the project's.
func (t *trial) aims() (l []result.Aim) {
	for _, arm := range arms {
		at := params(t.most(), whole)
		l = append(l, result.Aim{ID: "G20, " + arm, Claim: byFairlead, Measure: "received", Arm: arm, Params: at,
			Text: fmt.Sprintf("a node receives ≤ 20 kB/s at the churn of %s nodes", experiment.Thousands(whole)),
			Of:   result.Value, Bound: 20e3},
			result.Aim{ID: "G20, start, " + arm, Claim: byFairlead, Measure: "refused", Arm: arm, Params: at,
				Text: "no request is refused when all agents start at once", Of: result.Value, Bound: 0})
	}
	return l
}

func (t *trial) method() []string {
	f := t.profile.Fleet
	perDay := float64(24*time.Hour) / float64(lifetime)
	return []string{
		fmt.Sprintf("kube-apiserver with priority and fairness, and etcd, in a network namespace, have %s Nodes, "+
			"%d pods of each, a Service, an EndpointSlice and a NetworkPolicy for every %d pods, in namespaces of "+
			"%d Services: whole objects as kubelets and controllers write them, each Node with %d images, with the "+
			"managed fields that the server adds.",
			experiment.Thousands(f.Nodes), f.Pods, generate.Replicas, generate.PerNamespace, f.Images),
		"An agent is a source of package source/kube with its own connection, in this process: the requests, " +
			"watches and decoding of an agent, as its ServiceAccount, without planes. All start in the same moment.",
		fmt.Sprintf("The churn is that of %s nodes, whatever number there is. Each kubelet reports its Node's "+
			"status every %v (nodeStatusReportFrequency of KubeletConfiguration; every 10 s by kubelets without "+
			"Leases, KEP-589). Each pod is replaced %g times a day, an assumption: the new one is created, bound, "+
			"reported waiting, running and ready, the old one is deleted, reported ended and removed: eight events "+
			"of Pods; and four of its EndpointSlice.", experiment.Thousands(whole), heartbeat, perDay),
		"Cells with another churn are of fewer nodes, to show that what is received grows with it. Leases aren't watched.",
	}
}

func (t *trial) missing() []string {
	return []string{
		fmt.Sprintf("The start of %s agents at once: an API server of this machine's size can't send that much.",
			experiment.Thousands(whole)),
		"Several API servers, among which a cluster of that size spreads its agents.",
		"Network between agents and API server: all is in one machine.",
	}
}
