package experiment

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/lab/classic"
	"fairlead.dev/fairlead/lab/kuberouter"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
)

// The arms of experiments with network policies beside those of engines, which are called as engines are.
const (
	ArmTracked      = "conntrack" // the baseline
	ArmTrackedAgain = "conntrack-again"
	ArmListIPTables = "list-iptables"
	ArmListNFT      = "list-nft"
	ArmKubeRouter   = "kube-router" // another's engine
)

// serviceRange holds the ClusterIPs of clusters that sandbox/generate makes.
const serviceRange = "10.96.0.0/12"

// MostKubeRouter is the greatest number of policies that kube-router is given.
const MostKubeRouter = 1000

// PolicyLists are the arms with policies as a list of rules, and what writes these.
var PolicyLists = map[string]classic.Variant{ArmListIPTables: classic.Legacy, ArmListNFT: classic.NFT}

// PolicyParams returns the parameters of a block under so many policies.
func PolicyParams(policies int) result.Params { return result.Params{"policies": fmt.Sprint(policies)} }

// PolicyAxis is the number of policies as it is varied.
var PolicyAxis = result.Axis{Param: "policies", Title: "policies that select the server's pod", Short: "policies"}

// PoliciesLoaded is what an exact run counts of a first full write of policies.
const PoliciesLoaded = "lists: what the commands execute, and this process to run them; engines: this process and " +
	"the commands that an engine runs, from what is decided until all is in the kernel"

// PolicyGrid is the arms that experiments by number of network policies share.
type PolicyGrid struct {
	bed     *testbed.Testbed
	out     *result.Writer
	Counts  []int // numbers of policies, rising
	Ports   int   // on which the server answers, from PolicyPort on: the last policy allows them
	Peers   bool  // each policy allows clients of its own, not all the same one
	Engines []mode.Engine
	Cannot  []testbed.Unable
	Lists   []string // arms
	Router  string   // the program kube-router; "": none
}

// NewPolicyGrid returns the grid of those engines and lists that this machine can run.
func NewPolicyGrid(ctx context.Context, b *testbed.Testbed, counts []int, ports int, peers bool) (*PolicyGrid, error) {
	g := &PolicyGrid{bed: b, Counts: counts, Ports: ports, Peers: peers}
	var err error
	if g.Engines, g.Cannot, err = b.FindEngines(ctx); err != nil {
		return nil, err
	}
	for _, arm := range []string{ArmListIPTables, ArmListNFT} {
		if err := g.try(ctx, PolicyLists[arm]); err != nil {
			g.Cannot = append(g.Cannot, testbed.Unable{Name: arm, Why: testbed.Brief(err.Error())})
			continue
		}
		g.Lists = append(g.Lists, arm)
	}
	return g, ctx.Err()
}

// try writes a list in a namespace of its own.
func (g *PolicyGrid) try(ctx context.Context, v classic.Variant) (err error) {
	ns, err := testbed.NewNamespace(g.bed.Name + "-try")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, testbed.RemoveNamespace(ns)) }()
	return ns.Do(func() error { return g.list(1).Install(ctx, v) })
}

// SetKubeRouter adds the arm of a kube-router, if it can run here.
func (g *PolicyGrid) SetKubeRouter(ctx context.Context, binary string) (err error) {
	p, err := testbed.NewPodPair(ctx, g.bed.Name+"-try-router")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	limited, stop := context.WithTimeout(ctx, g.bed.Within(30*time.Second))
	defer stop()
	r, _, err := g.startKubeRouter(limited, binary, p, 1)
	if err != nil {
		g.Cannot = append(g.Cannot, testbed.Unable{Name: ArmKubeRouter, Why: testbed.Brief(err.Error())})
		return ctx.Err()
	}
	g.Router = binary
	return r.Close()
}

// startKubeRouter starts a kube-router in a pair's node and waits until so many policies are in force. It returns how
// long its first sync took. The caller closes it.
func (g *PolicyGrid) startKubeRouter(ctx context.Context, binary string, p *testbed.Pair,
	policies int) (*kuberouter.Router, time.Duration, error) {
	r, sync, err := kuberouter.Start(ctx, kuberouter.Options{Binary: binary, Namespace: p.Near, Node: testbed.NodeName,
		Dir: filepath.Join(g.bed.Dir, p.Near.Name), Services: serviceRange}, g.Objects(policies)...)
	if err != nil {
		return nil, 0, err
	}
	if err := testbed.Settle(ctx, r.CPU); err != nil {
		return nil, 0, errors.Join(err, r.Close())
	}
	return r, sync, nil
}

// RouterCounts returns the numbers of policies that kube-router is given, none without one.
func (g *PolicyGrid) RouterCounts() (l []int) {
	for _, n := range g.Counts {
		if g.Router != "" && n <= MostKubeRouter {
			l = append(l, n)
		}
	}
	return l
}

// Most returns the greatest number of policies.
func (g *PolicyGrid) Most() int { return slices.Max(g.Counts) }

// PolicyPort is the first port on which the server answers. Those of policies that don't match are below and above it,
// so that it is in the middle of whatever an engine makes of all ports.
const PolicyPort = 30000

// otherPort returns the port of the i-th policy that doesn't match. No two are next to each other, as in a range.
func (g *PolicyGrid) otherPort(i int) uint16 {
	distance := 2 * uint16(i/2+1)
	if i%2 == 0 {
		return PolicyPort - distance
	}
	return PolicyPort + uint16(g.Ports-1) + distance
}

// list returns so many policies as a list.
func (g *PolicyGrid) list(policies int) classic.PolicyList {
	l := classic.PolicyList{Pod: testbed.ServerPod, Client: testbed.ClientPod}
	for i := range policies - 1 {
		port := g.otherPort(i)
		l.Ports = append(l.Ports, classic.PortRange{First: port, Last: port})
	}
	l.Ports = append(l.Ports, classic.PortRange{First: PolicyPort, Last: PolicyPort + uint16(g.Ports-1)})
	return l
}

const policyNamespace = "article"

// Objects returns the cluster with so many policies that select the server's pod. Each allows a client at a port of its
// own, the last one that which connects.
func (g *PolicyGrid) Objects(policies int) []source.Object {
	core := metav1.TypeMeta{APIVersion: "v1"}
	core.Kind = "Node"
	node := &corev1.Node{TypeMeta: core, ObjectMeta: metav1.ObjectMeta{Name: testbed.NodeName}}
	core.Kind = "Namespace"
	node.Spec.PodCIDRs = []string{netip.PrefixFrom(testbed.ServerPod, 24).Masked().String()}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: testbed.NodeAddr.String()}}
	l := []source.Object{node, &corev1.Namespace{TypeMeta: core, ObjectMeta: metav1.ObjectMeta{Name: policyNamespace}},
		podObject("backend", testbed.NodeName, testbed.ServerPod), podObject("frontend", "elsewhere", testbed.ClientPod)}
	for i, p := range g.list(policies).Ports {
		role := "frontend"
		if g.Peers && i < policies-1 {
			role = fmt.Sprint("client-", i)
			l = append(l, podObject(role, "elsewhere", generate.EndpointAddress(1<<16+i)))
		}
		l = append(l, policyObject(i, role, p))
	}
	return l
}

// podObject returns a pod named as its role is.
func podObject(role, node string, addr netip.Addr) *corev1.Pod {
	p := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: policyNamespace, Name: role, Labels: map[string]string{"role": role}}}
	p.Spec.NodeName = node
	p.Status.Phase, p.Status.PodIPs = corev1.PodRunning, []corev1.PodIP{{IP: addr.String()}}
	p.Status.PodIP = addr.String()
	if node == testbed.NodeName {
		p.Status.HostIP = testbed.NodeAddr.String()
	}
	return p
}

// policyObject returns a policy as the article of Romana has it: one that allows a role at ports of role=backend.
func policyObject(i int, role string, ports classic.PortRange) *networkingv1.NetworkPolicy {
	tcp, port, last := corev1.ProtocolTCP, intstr.FromInt32(int32(ports.First)), int32(ports.Last)
	selector := func(role string) metav1.LabelSelector {
		return metav1.LabelSelector{MatchLabels: map[string]string{"role": role}}
	}
	from := selector(role)
	p := &networkingv1.NetworkPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: networkingv1.SchemeGroupVersion.String(), Kind: "NetworkPolicy"},
		ObjectMeta: metav1.ObjectMeta{Namespace: policyNamespace, Name: fmt.Sprintf("pol%05d", i)}}
	p.Spec.PodSelector, p.Spec.PolicyTypes = selector("backend"),
		[]networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{
		From:  []networkingv1.NetworkPolicyPeer{{PodSelector: &from}},
		Ports: []networkingv1.NetworkPolicyPort{{Protocol: &tcp, Port: &port}}}}
	if ports.Last > ports.First {
		p.Spec.Ingress[0].Ports[0].EndPort = &last
	}
	return p
}

// EgressPolicies returns a node's pod ServerPod and so many policies that select it. Each allows connections to an
// address and port of its own, the last one to all of the server's.
func EgressPolicies(policies int) []source.Object {
	ns := &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{Name: policyNamespace}}
	l := []source.Object{ns, podObject("backend", testbed.NodeName, testbed.ServerPod)}
	return append(l, egress("backend", policies, netip.PrefixFrom(testbed.ServerAddr(0), 24).Masked(),
		testbed.ServerPort)...)
}

// egress returns so many policies that select a role, of which the last one allows connections to there at a port.
func egress(role string, policies int, there netip.Prefix, at uint16) (l []source.Object) {
	for i := range policies {
		to, port := netip.PrefixFrom(generate.EndpointAddress(1<<16+i), 32), uint16(20000+2*i)
		if i == policies-1 {
			to, port = there, at
		}
		p := policyObject(i, "", classic.PortRange{First: port, Last: port})
		p.Spec.PodSelector.MatchLabels["role"] = role
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
		p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{Ports: p.Spec.Ingress[0].Ports,
			To: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: to.String()}}}}}
		p.Spec.Ingress = nil
		l = append(l, p)
	}
	return l
}

// BothEnds returns Objects with the client as a pod of the same node, and so many policies that select it: each allows
// connections to an address and port of its own, the last one to the server.
func (g *PolicyGrid) BothEnds(policies int) (l []source.Object) {
	for _, o := range g.Objects(policies) {
		if pod, ok := o.(*corev1.Pod); ok && pod.Name == "frontend" {
			o = podObject(pod.Name, testbed.NodeName, testbed.ClientPod)
		}
		l = append(l, o)
	}
	for _, o := range egress("frontend", policies, netip.PrefixFrom(testbed.ServerPod, 32), PolicyPort) {
		o.SetName("egress-" + o.GetName())
		l = append(l, o)
	}
	return l
}

// AllowEverything returns a policy of Objects that allows every client at every port.
func AllowEverything(o source.Object) source.Object {
	p := o.(*networkingv1.NetworkPolicy).DeepCopy()
	p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{}}
	return p
}

// AddSteps adds the steps that make the grid: the baselines first, then lists and engines at every number of policies.
func (g *PolicyGrid) AddSteps(l *Plan, out *result.Writer) {
	g.out = out
	l.Add("making baselines", time.Second, g.baselines)
	for _, n := range g.Counts {
		for _, arm := range g.Lists {
			l.Add(fmt.Sprintf("writing %s policies as a list, %s", Thousands(n), arm), writesPolicies(n),
				func(ctx context.Context) error { return g.installList(ctx, arm, n) })
		}
		for _, e := range g.Engines {
			l.Add(fmt.Sprintf("writing %s policies, %s", Thousands(n), e.Name), writesPolicies(n),
				func(ctx context.Context) error { return g.Enforce(ctx, e, e.Name, n, g.Objects(n)) })
		}
	}
	for _, n := range g.RouterCounts() {
		l.Add(fmt.Sprintf("writing %s policies, %s", Thousands(n), ArmKubeRouter),
			2*time.Second+time.Duration(n)*10*time.Millisecond,
			func(ctx context.Context) error { return g.addKubeRouter(ctx, n) })
	}
}

// writesPolicies is about how long an arm takes to be made.
func writesPolicies(n int) time.Duration {
	return 150*time.Millisecond + time.Duration(n)*100*time.Microsecond
}

// baselines makes the arms without policies: connection tracking alone, the same again, and nothing at all.
func (g *PolicyGrid) baselines(ctx context.Context) error {
	for _, arm := range []string{ArmTracked, ArmTrackedAgain, testbed.ArmDirect} {
		p, err := g.bed.AddPodPair(ctx, arm, nil)
		if err == nil && arm != testbed.ArmDirect {
			err = p.Near.Do(func() error { return classic.PolicyList{}.Install(ctx, classic.NFT) })
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// installList makes the arm of a list.
func (g *PolicyGrid) installList(ctx context.Context, arm string, policies int) error {
	p, err := g.bed.AddPodPair(ctx, arm, PolicyParams(policies))
	if err != nil {
		return err
	}
	list, begun := g.list(policies), g.bed.Clock()
	if err := p.Near.Do(func() error { return list.Install(ctx, PolicyLists[arm]) }); err != nil {
		return fmt.Errorf("write %d policies as %s: %w", policies, arm, err)
	}
	return g.out.AddValue(result.Block{Arm: arm, Params: p.Params}, LoadMeasure.ID,
		float64(g.bed.Clock()-begun))
}

// Enforce makes an arm of an engine, under so many policies, which are among the objects.
func (g *PolicyGrid) Enforce(ctx context.Context, e mode.Engine, arm string, policies int,
	objects []source.Object) error {
	p, err := g.bed.AddPodPair(ctx, arm, PolicyParams(policies))
	if err != nil {
		return err
	}
	_, change, err := testbed.DecidePolicies(testbed.NodeName, objects)
	if err != nil {
		return err
	}
	r, err := g.bed.Enforce(p.Near, e)
	if err != nil {
		return err
	}
	begun := g.bed.Clock()
	if _, err := r.Apply(ctx, change); err != nil {
		return fmt.Errorf("write %d policies by %s: %w", policies, arm, err)
	}
	return g.out.AddValue(result.Block{Arm: arm, Params: p.Params}, LoadMeasure.ID,
		float64(g.bed.Clock()-begun))
}

// addKubeRouter makes the arm of a kube-router.
func (g *PolicyGrid) addKubeRouter(ctx context.Context, policies int) error {
	p, err := g.bed.AddPodPair(ctx, ArmKubeRouter, PolicyParams(policies))
	if err != nil {
		return err
	}
	limited, stop := context.WithTimeout(ctx, g.bed.Within(testbed.Patience))
	defer stop()
	r, sync, err := g.startKubeRouter(limited, g.Router, p, policies)
	if err != nil {
		return fmt.Errorf("write %d policies by %s: %w", policies, ArmKubeRouter, err)
	}
	p.KubeRouter = r
	g.bed.Defer(r.Close)
	if g.bed.Config.Exact {
		return nil // it logs a time
	}
	return g.out.AddValue(result.Block{Arm: ArmKubeRouter, Params: p.Params}, LoadMeasure.ID, float64(sync))
}

// Planned is how long a round of these operations is to take, in all arms.
func (g *PolicyGrid) Planned(operations []testbed.Operation) (d time.Duration) {
	const baselines = 4 // one of them at both ends
	arms := time.Duration(baselines + len(g.Counts)*(len(g.Lists)+len(g.Engines)) + len(g.RouterCounts()))
	for _, o := range operations {
		blocks := arms
		if o.Warmup {
			blocks++
		}
		d += blocks * (o.Planned + between)
	}
	return d
}

// PolicyTargets returns where the server answers at the i-th port, for an operation of all arms.
func PolicyTargets(i int) func(*testbed.Pair) []netip.AddrPort {
	return func(*testbed.Pair) []netip.AddrPort {
		return []netip.AddrPort{netip.AddrPortFrom(testbed.ServerPod, PolicyPort+uint16(i))}
	}
}

// Arms returns all arms, the baselines first.
func (g *PolicyGrid) Arms() []result.Arm {
	l := []result.Arm{
		{ID: ArmTracked, Title: "conntrack", Text: "no policy: the node forwards, and tracks connections for one rule that " +
			"accepts what is established"},
		{ID: ArmTrackedAgain, Title: "conntrack again", Text: "the same in other network namespaces: what it differs from " +
			"conntrack is what this run can't tell from nothing"},
		{ID: testbed.ArmDirect, Title: "nothing", Style: 8, Text: "no policy and no connection tracking: the node forwards"},
	}
	texts := map[string]string{
		"nftables": "the policy engine nftables: maps and ranges of nf_tables",
		"iptables": "the policy engine iptables: chains as a tree over ports, and IP sets of peers",
		"ebpf":     "the policy engine ebpf: a program at netfilter's hooks, with flows of its own and without conntrack"}
	titles := map[string]string{"iptables": "iptables + ipset"}
	for _, arm := range g.Lists {
		text := map[string]string{ArmListIPTables: "written by iptables-legacy", ArmListNFT: "written by nft"}[arm]
		title := map[string]string{ArmListIPTables: "list, iptables", ArmListNFT: "list, nft"}[arm]
		l = append(l, result.Arm{ID: arm, Title: title, Style: map[string]int{ArmListIPTables: 5, ArmListNFT: 7}[arm],
			Text: "policies as a list, a rule for each, as the article's Romana had them: established connections first, the " +
				"rule that matches last; " + text})
	}
	for _, e := range g.Engines {
		title := e.Name
		if titles[title] != "" {
			title = titles[title]
		}
		l = append(l, result.Arm{ID: e.Name, Title: title, Style: Styles[e.Name], Text: texts[e.Name]})
	}
	if g.Router != "" {
		l = append(l, result.Arm{ID: ArmKubeRouter, Title: ArmKubeRouter, Style: 10,
			Text: "the kube-router that was given, with its network policies alone: a chain for each pod and policy, IP sets " +
				"of peers, by iptables-legacy; told by an API server of the lab's"})
	}
	return l
}

// EngineNames returns the names of the engines that run here.
func (g *PolicyGrid) EngineNames() (names []string) {
	for _, e := range g.Engines {
		names = append(names, e.Name)
	}
	return names
}

// NotMeasured returns a sentence for each engine and list that can't run here.
func (g *PolicyGrid) NotMeasured() (words []string) {
	for _, u := range g.Cannot {
		words = append(words, fmt.Sprintf("Policies by %s: they can't be written here: %s.", u.Name,
			strings.TrimSuffix(u.Why, ".")))
	}
	return words
}
