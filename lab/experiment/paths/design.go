package paths

import (
	"fmt"
	"slices"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// Design returns the experiment in words and numbers.
func (r *trial) Design() result.Design {
	var arms []result.Arm
	for _, a := range r.arms {
		arms = append(arms, a.Arm)
	}
	d := result.Design{
		ID: "paths", Title: "What each path between two pods costs",
		Question: "What do a round trip and a connection between two pods cost against one hop between two hosts: on one " +
			"node and across nodes, by routes and through a tunnel, through the host stack and by the fast path?",
		Vary: result.Axis{Param: "none", Title: "nothing", Short: "nothing"}, Arms: arms, Baseline: testbed.ArmDirect,
		Again: testbed.ArmAgain, Margin: 0.01, Rounds: r.profile.Rounds, Measures: measures, Aims: r.aims(),
		Method: r.method(), Answer: r.answer(),
		Missing: []string{"An overlay by programs: the product has none. The kernel's device encapsulates in every arm; " +
			"with the fast path, what leaves the VXLAN device is redirected to the pod.",
			"netkit, IPv6, streams, and packets of the greatest size.",
			"kindnet and kube-router themselves: their paths are there, without their programs and rules."},
	}
	if r.noIPIP != "" {
		d.Missing = append(d.Missing, "Arms by IPIP: this machine can't make them: "+r.noIPIP+".")
	}
	return d
}

// measures are those of both operations, and of how packets go.
var measures = []result.Measure{
	{ID: "rr", Title: "round trip", Unit: "µs", Stat: result.P50, Ratio: true,
		Text: "100 bytes there and 1,000 back on a kept connection"},
	{ID: "crr", Title: "connection with one request", Unit: "µs", Stat: result.P50, Ratio: true,
		Text: "connect, 100 bytes there and 1,000 back, reset"},
	{ID: "packets", From: "rr", Title: "packets for each round trip", Stat: result.Counter("softnet_pinned"),
		Text: "that the load's processor takes through the kernel's receive path (/proc/net/softnet_stat, column 1); one " +
			"that is redirected counts again"},
	{ID: "redirected", Title: "packets redirected for each connection", Stat: result.Value, Exact: true,
		Text: fmt.Sprintf("with one request, by the fast path of both nodes: the agents' metric %s over %d connections, "+
			"before all rounds and after", redirected, checked)},
	{ID: "tunnel", Title: "packets through a tunnel for each connection", Stat: result.Value, Exact: true,
		Text: "with one request: what the tunnel's device on the server's node has received and sent"},
}

// method returns paragraphs on how it is measured.
func (r *trial) method() []string {
	return []string{
		"Every arm has two network namespaces of its own, joined by a veth as by a wire: two nodes, or a node and nothing. " +
			"Pods are network namespaces that the node's agent connects, called by the CNI plugin; agents are the program " +
			"that users run, with --network-mode Own. The server's pod is on one node, the client's on the other, or beside " +
			"it. The nodes have addresses on one link: --network-overlay decides between routes and the tunnel.",
		fmt.Sprintf("All arms stand at the same time. Each round has a block of each operation in every arm, in an order "+
			"drawn for each, host to host first and last. Client and server share one processor, and clients are in a "+
			"cgroup of their own, as pods' processes are. Where times are measured, a block lasts %v after %v.",
			r.profile.Block, r.profile.Warm),
		"To an agent the wire looks like a pod's device: a veth whose other end is in another network namespace. The " +
			"lab takes it out of the fast path's map of these: what leaves a node by a network card is sent by the card.",
		"An arm that is not what it is said to be ends the run, before all rounds and after: each node with the fast path " +
			"must redirect at least one packet of each connection, and others none in the whole run; the tunnel's device must " +
			"carry at least one where there is a tunnel, and connections must be tracked where the arm says so, and nowhere " +
			"else. The fast path takes nothing that leaves an IPIP device.",
	}
}

// answer returns which cells answer the question.
func (r *trial) answer() *result.Answer {
	arms := []string{armSame, armNative, armVXLAN}
	if r.noIPIP == "" {
		arms = append(arms, armIPIP)
	}
	finding := func(subject, measure string) result.Finding {
		return result.Finding{Subject: subject, Verb: "takes", Object: "time", Of: result.Ratio,
			Cells: experiment.Cells(measure, nil, arms...)}
	}
	return &result.Answer{Chart: "rr", Findings: []result.Finding{finding("a round trip between pods", "rr"),
		finding("a connection with one request", "crr"), {Tally: result.TallyAims}}}
}

// aims are the project's, of round trips and of connections.
func (r *trial) aims() (l []result.Aim) {
	for _, m := range []struct {
		id, title string
		same      float64 // bound of pods of a node
	}{{"rr", "round trip", 1.045}, {"crr", "connection", 1.05}} {
		add := func(id, text, arm, over string, bound float64) {
			a := result.Aim{ID: id + ", " + m.title, Measure: m.id, Arm: arm, Of: result.Ratio, Bound: bound,
				Text: fmt.Sprintf("%s: a %s takes ≤ %.4g × %s", text, m.title, bound, titleOf(over))}
			if over != testbed.ArmDirect {
				a.Of, a.Over = result.Value, &result.CellRef{Arm: over}
			}
			if armOf(arm).ipip && r.noIPIP != "" {
				a.Cannot = "this machine can't make IPIP"
			}
			l = append(l, a)
		}
		add("N1", "pods of one node", armSame, testbed.ArmDirect, m.same)
		add("N2", "across nodes, by routes", armNative, testbed.ArmDirect, 1.1)
		for _, tunnel := range []struct{ arm, title string }{{armVXLAN, "VXLAN"}, {armIPIP, "IPIP"}} {
			add("N4, "+tunnel.title, tunnel.title, tunnel.arm, armNative, 1.05)
			add("N5, "+tunnel.title, tunnel.title, tunnel.arm, armPlain, 0.95)
		}
		add("N6", "VXLAN, a node with programs and one without", armMixed, armVXLAN+suffixNFTables, 0.9)
	}
	return append(l, r.packets()...)
}

// packets are the aims of packets through the receive path.
func (r *trial) packets() (l []result.Aim) {
	for _, c := range []struct {
		arm   string
		bound float64
	}{{armSame, 4}, {armNative, 6}, {armVXLAN, 8}} {
		l = append(l, result.Aim{ID: "N3, " + titleOf(c.arm), Measure: "packets", Arm: c.arm, Of: result.Value,
			Bound: c.bound, Margin: 0.02, Text: fmt.Sprintf("%s: a round trip takes %v packets through the receive path "+
				"(±2 %%: other packets of the machine are in it)", titleOf(c.arm), c.bound)})
	}
	return l
}

// armOf returns the arm of that id.
func armOf(id string) arm {
	return allArms[slices.IndexFunc(allArms, func(a arm) bool { return a.ID == id })]
}

func titleOf(id string) string { return armOf(id).Title }
