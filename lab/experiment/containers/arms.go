package containers

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/source"
)

// arm is a server behind something.
type arm struct {
	result.Arm
	add   func(ctx context.Context, b *testbed.Testbed, id string) (*testbed.Pair, error)
	limit float64 // processors of its application; 0: no limit
	agent bool    // it has one
}

// does reports whether an arm takes part in a measure: one with a limit has its application alone.
func (a arm) does(measure string) bool { return a.limit == 0 || measure == "app" }

// The arms that others refer to.
const (
	armTracked      = "tracked"
	armVeth         = "veth"
	armBridge       = "bridge"
	armMACVLAN      = "macvlan"
	armOwn          = "own"
	armOwnVXLAN     = "own-vxlan"
	armFast         = "ebpf"
	armIPTables     = "iptables-policies"
	armEBPF         = "ebpf-policies"
	armLimit        = "direct-limit"
	armOwnLimit     = "own-limit"
	armIPVLANL2     = "ipvlan-l2"
	armIPVLANL3     = "ipvlan-l3"
	armNetkit       = "netkit"
	armIPIP         = "ipip"
	armTrackedVeth  = "veth-tracked"
	policyNamespace = "lab"
)

// allArms are in the order of tables.
var allArms = []arm{
	{Arm: result.Arm{ID: testbed.ArmDirect, Title: "host", Text: "the server is a process of the node, without any " +
		"rule and without conntrack"}, add: path(testbed.PathHost)},
	{Arm: result.Arm{ID: testbed.ArmAgain, Title: "host again", Text: "the same in other network namespaces: what it " +
		"differs from host is what this run can't tell from nothing"}, add: path(testbed.PathHost)},
	{Arm: result.Arm{ID: armTracked, Title: "host, conntrack", Style: 10, Text: "host, with connection tracking for " +
		"one rule that accepts what is established"}, add: tracked(testbed.PathHost)},
	{Arm: result.Arm{ID: armVeth, Title: "veth", Style: 1, Text: "the server is in a pod behind a veth, for which the " +
		"node routes, without any rule: the path of Calico and kindnet"}, add: path(testbed.PathVeth)},
	{Arm: result.Arm{ID: armTrackedVeth, Title: "veth, conntrack", Style: 6, Text: "veth, with connection tracking on " +
		"the node"}, add: tracked(testbed.PathVeth)},
	{Arm: result.Arm{ID: armBridge, Title: "bridge", Style: 9, Text: "the pod's veth is a port of a bridge, for which " +
		"the node routes: the path of flannel and the plugin bridge"}, add: path(testbed.PathBridge)},
	{Arm: result.Arm{ID: armMACVLAN, Title: "macvlan", Style: 8, Text: "the pod has a macvlan of the node's device: an " +
		"underlay, past the node's routes and rules"}, add: path(testbed.PathMACVLAN)},
	{Arm: result.Arm{ID: armOwn, Title: "pod network", Style: 3, Text: "the pod is connected by `fairlead run " +
		"--network-mode Own`, called by the CNI plugin: a routed veth, source validation, and masquerading, which tracks " +
		"connections"}, add: own(false), agent: true},
	{Arm: result.Arm{ID: armOwnVXLAN, Title: "pod network, VXLAN", Style: 2, Text: "the same, and the client is " +
		"another node with an agent of its own: packets between them go through VXLAN"}, add: own(true), agent: true},
	{Arm: result.Arm{ID: armFast, Title: "veth, mode ebpf", Style: 4, Text: "veth, on a node with `fairlead run --mode " +
		"ebpf`: packets to pods are redirected past the host stack"}, add: mode("ebpf"), agent: true},
	{Arm: result.Arm{ID: armIPTables, Title: "iptables, policies", Style: 5, Text: "veth, on a node with mode iptables " +
		"and policy engine iptables, and a policy that allows the client"}, add: mode("iptables", "iptables"), agent: true},
	{Arm: result.Arm{ID: armEBPF, Title: "ebpf, policies", Style: 7, Text: "the same with mode ebpf and policy engine " +
		"ebpf"}, add: mode("ebpf", "ebpf"), agent: true},
	{Arm: result.Arm{ID: armLimit, Title: "host, limit", Style: 8, Text: "host, and the application may use 0.8 " +
		"processors (cpu.max, or cpu.cfs_quota_us, of a cgroup; periods of 100 ms)"}, add: path(testbed.PathHost),
		limit: limit},
	{Arm: result.Arm{ID: armOwnLimit, Title: "pod network, limit", Style: 9, Text: "pod network, with the same limit"},
		add: own(false), limit: limit},
	{Arm: result.Arm{ID: armIPVLANL2, Title: "ipvlan L2", Style: 3, Text: "the pod has an ipvlan of the node's device, " +
		"on its link"}, add: path(testbed.PathIPVLANL2)},
	{Arm: result.Arm{ID: armIPVLANL3, Title: "ipvlan L3", Style: 4, Text: "the pod has an ipvlan of the node's device, " +
		"for which the node routes"}, add: path(testbed.PathIPVLANL3)},
	{Arm: result.Arm{ID: armNetkit, Title: "netkit", Style: 5, Text: "the pod is behind a netkit pair, for which the " +
		"node routes, without a program"}, add: path(testbed.PathNetkit)},
	{Arm: result.Arm{ID: armIPIP, Title: "veth, IPIP", Style: 7, Text: "veth, and the kernel's IPIP tunnel between the " +
		"nodes: the article's path, Calico's"}, add: path(testbed.PathIPIP)},
}

// armOf returns the arm of that id.
func armOf(id string) arm {
	if i := slices.IndexFunc(allArms, func(a arm) bool { return a.ID == id }); i >= 0 {
		return allArms[i]
	}
	return arm{}
}

type adder = func(context.Context, *testbed.Testbed, string) (*testbed.Pair, error)

// path returns what makes a pair with a path of the testbed's.
func path(p testbed.Path) adder {
	return func(ctx context.Context, b *testbed.Testbed, id string) (*testbed.Pair, error) {
		return b.AddPathPair(ctx, id, p)
	}
}

// tracked returns the same with connection tracking on the node.
func tracked(p testbed.Path) adder {
	return func(ctx context.Context, b *testbed.Testbed, id string) (*testbed.Pair, error) {
		pair, err := b.AddPathPair(ctx, id, p)
		if err != nil {
			return pair, err
		}
		return pair, experiment.Track(ctx, pair.Near)
	}
}

// own returns what makes a pair with a pod that the agent connects.
func own(overlay bool) adder {
	return func(ctx context.Context, b *testbed.Testbed, id string) (*testbed.Pair, error) {
		return b.AddOwnPair(ctx, id, overlay)
	}
}

// mode returns what makes a pair with an agent of a mode on its node, and with a policy engine and a policy if one is
// named.
func mode(name string, engine ...string) adder {
	return func(ctx context.Context, b *testbed.Testbed, id string) (*testbed.Pair, error) {
		objects := []source.Object{testbed.NewNodeObject(testbed.NodeName, testbed.NodeAddr, testbed.ServerPod)}
		var flags []string
		if len(engine) > 0 {
			objects = append(objects, policyObjects()...)
			flags = []string{"--policy-mode", "Enforce", "--policy-engine", engine[0]}
		}
		pair, err := b.AddPathPair(ctx, id, testbed.PathVeth)
		if err != nil {
			return pair, err
		}
		f, err := (&testbed.Cluster{Objects: objects}).WriteTo(b.Dir, "mode-"+id, len(objects))
		if err == nil {
			_, err = b.ServeNode(ctx, testbed.NewNode(pair, name, f, flags...))
		}
		return pair, err
	}
}

// policyObjects are the server's pod and a policy that allows its client.
func policyObjects() []source.Object {
	selected := map[string]string{"app": "server"}
	pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: policyNamespace, Name: "server", Labels: selected}}
	pod.Spec.NodeName = testbed.NodeName
	pod.Status.Phase, pod.Status.PodIP = corev1.PodRunning, testbed.ServerPod.String()
	pod.Status.PodIPs = []corev1.PodIP{{IP: pod.Status.PodIP}}
	p := &networkingv1.NetworkPolicy{TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"},
		ObjectMeta: metav1.ObjectMeta{Namespace: policyNamespace, Name: "client"}}
	p.Spec.PodSelector, p.Spec.PolicyTypes = metav1.LabelSelector{MatchLabels: selected},
		[]networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{
		{IPBlock: &networkingv1.IPBlock{CIDR: testbed.ClientPod.String() + "/32"}}}}}
	namespace := &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{Name: policyNamespace}}
	return []source.Object{namespace, pod, p}
}
