package paths

import (
	"context"
	"slices"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// arm is a path between two pods.
type arm struct {
	result.Arm
	near    *testbed.OwnNode // the server's node; nil: no agent
	far     *testbed.OwnNode // the client's; nil: no agent, or the server's node is the client's, too
	routed  testbed.Path     // without an agent: what connects the pods with their nodes; "": there are none
	alone   bool             // without an agent: both pods are on one node
	tracked bool             // connections are tracked
	tunnel  bool             // packets between the nodes go through a tunnel
	ipip    bool             // by IPIP
}

// The arms that others refer to.
const (
	armSame        = "same"
	armPlain       = "plain"
	armNative      = "native"
	armVXLAN       = "vxlan"
	armIPIP        = "ipip"
	armMixed       = "vxlan-mixed"
	suffixPlain    = "-plain"
	suffixStack    = "-stack"
	suffixNFTables = "-nftables"
)

// fast and stack are nodes with the programs of mode ebpf, with the fast path and without. rules is one without
// programs.
func fast(flags ...string) *testbed.OwnNode { return &testbed.OwnNode{Mode: "ebpf", Flags: flags} }

func stack(flags ...string) *testbed.OwnNode {
	return fast(append([]string{"--ebpf-fast-path", "Never"}, flags...)...)
}

func rules(flags ...string) *testbed.OwnNode { return &testbed.OwnNode{Mode: "nftables", Flags: flags} }

// The flags of nodes that reach each other's pods directly, or through a tunnel.
var (
	native = []string{"--network-overlay", "Never"}
	vxlan  = []string{"--network-overlay", "Always"}
	ipip   = []string{"--network-overlay", "Always", "--network-encapsulation", "IPIP"}
)

// What texts of several arms say.
const (
	byStack = ", with --ebpf-fast-path Never: through the host stack"
	byRules = "agents in mode nftables, which tracks connections"
)

// allArms are in the order of tables.
var allArms = []arm{
	{Arm: result.Arm{ID: testbed.ArmDirect, Title: "host to host", Text: "client and server are processes of two " +
		"nodes, without any agent, rule or conntrack: one hop over the wire"}},
	{Arm: result.Arm{ID: testbed.ArmAgain, Title: "host to host again", Text: "the same in other network namespaces: " +
		"what it differs from host to host is what this run can't tell from nothing"}},
	{Arm: result.Arm{ID: armSame + suffixPlain, Title: "same node, plain veth", Style: 2, Text: "two pods of a node " +
		"behind routed veths, without any agent, rule or conntrack"}, routed: testbed.PathVeth, alone: true},
	{Arm: result.Arm{ID: armSame + suffixStack, Title: "same node, stack", Style: 5, Text: "two pods of a node whose " +
		"agent runs in mode ebpf" + byStack}, near: stack(native...)},
	{Arm: result.Arm{ID: armSame, Title: "same node, fast path", Style: 3, Text: "the same with the fast path"},
		near: fast(native...)},
	{Arm: result.Arm{ID: armPlain, Title: "across, plain veth", Style: 1, Text: "two pods of two nodes behind routed " +
		"veths, without any agent, rule or conntrack"}, routed: testbed.PathVeth},
	{Arm: result.Arm{ID: "veth-tracked", Title: "across, veth, conntrack", Style: 6, Text: "the same, and both nodes " +
		"track connections: kindnet's path, without its program"}, routed: testbed.PathVeth, tracked: true},
	{Arm: result.Arm{ID: "bridge-tracked", Title: "across, bridge, conntrack", Style: 9, Text: "the same, and each " +
		"pod's veth is a port of a bridge: kube-router's path, without its program"}, routed: testbed.PathBridge,
		tracked: true},
	{Arm: result.Arm{ID: armNative + suffixNFTables, Title: "across, nftables", Style: 10, Text: "two pods of two nodes " +
		"with routes to each other, " + byRules}, near: rules(native...), far: rules(native...), tracked: true},
	{Arm: result.Arm{ID: armNative + suffixStack, Title: "across, stack", Style: 8, Text: "the same with agents in mode " +
		"ebpf" + byStack}, near: stack(native...), far: stack(native...)},
	{Arm: result.Arm{ID: armNative, Title: "across, fast path", Style: 4, Text: "the same with the fast path"},
		near: fast(native...), far: fast(native...)},
	{Arm: result.Arm{ID: armVXLAN + suffixNFTables, Title: "VXLAN, nftables", Style: 9, Text: "two pods of two nodes " +
		"that reach each other through the kernel's VXLAN device, " + byRules}, near: rules(vxlan...),
		far: rules(vxlan...), tracked: true, tunnel: true},
	{Arm: result.Arm{ID: armVXLAN + suffixStack, Title: "VXLAN, stack", Style: 2, Text: "the same with agents in mode " +
		"ebpf" + byStack}, near: stack(vxlan...), far: stack(vxlan...), tunnel: true},
	{Arm: result.Arm{ID: armVXLAN, Title: "VXLAN, fast path", Style: 7, Text: "the same with the fast path, which " +
		"redirects what leaves the tunnel"}, near: fast(vxlan...), far: fast(vxlan...), tunnel: true},
	{Arm: result.Arm{ID: armMixed, Title: "VXLAN, mixed", Style: 8, Text: "the server's node as in VXLAN, fast path; " +
		"the client's as in VXLAN, nftables"}, near: fast(vxlan...), far: rules(vxlan...), tunnel: true},
	{Arm: result.Arm{ID: armIPIP, Title: "IPIP", Style: 10, Text: "as VXLAN, fast path, by the kernel's IPIP device, " +
		"whose packets have no Ethernet header: the fast path leaves them to the host stack"}, near: fast(ipip...),
		far: fast(ipip...), tunnel: true, ipip: true},
}

// add makes the arm's pair. It returns the nodes with agents.
func (a arm) add(ctx context.Context, b *testbed.Testbed) (nodes []*testbed.Node, err error) {
	switch {
	case a.near != nil:
		return b.AddOwnPods(ctx, a.ID, *a.near, a.far)
	case a.routed != "":
		p, err := b.AddRoutedPods(ctx, a.ID, a.routed, !a.alone)
		if err == nil && a.tracked {
			err = experiment.Track(ctx, p.Near, p.Far)
		}
		return nil, err
	default:
		_, err = b.AddPathPair(ctx, a.ID, testbed.PathHost)
		return nil, err
	}
}

// owners returns how the arm's agents run, in the order of its nodes.
func (a arm) owners() []*testbed.OwnNode {
	return slices.DeleteFunc([]*testbed.OwnNode{a.near, a.far}, func(n *testbed.OwnNode) bool { return n == nil })
}

// redirects reports whether a node of the arm has the fast path, and that takes what comes to its pod.
func (a arm) redirects(n *testbed.OwnNode) bool {
	return n.Mode == "ebpf" && !slices.Contains(n.Flags, "--ebpf-fast-path") && !a.ipip
}
