// Package attach is the experiment that measures how long a CNI plugin takes to connect a pod and to disconnect it:
// Fairlead's with its agent, beside bridge and ptp of the CNI project with host-local addresses.
package attach

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/source"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:  "attach",
	Short: "How long a CNI plugin takes to connect a pod, and to disconnect it",
	Long: `Measure ADD and DEL of fairlead-cni with a running agent, as a container runtime calls it, on a node that has pods
already; beside it, where they are given, the plugins bridge and ptp of the CNI project, each with host-local in its folder.
Also how long a node's pods take that are all connected at once. It takes two minutes with --quick, half an hour without,
and root.`,
	Subjects: []string{experiment.FairleadCNIProgram.Name, experiment.BridgeProgram.Name, experiment.PTPProgram.Name},
	Rounds:   true,
	Exact:    true,
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, profile.exactly)
		p.Rounds = o.RoundsOr(p.Rounds)
		return newTrial(b, o, p)
	},
}

// profile is how much is measured.
type profile struct {
	Name    string
	Rounds  int
	Running int // pods that a node has already
	Each    int // pods of a block
}

var (
	quick = profile{"quick", 11, 20, 5}
	full  = profile{"full", 51, 110, 10}
)

// The arms.
const (
	armFairlead = "fairlead"
	armAgain    = "fairlead-again"
	armPolicies = "fairlead-policies"
)

// families is the parameter that is varied.
const families = "families"

var (
	ranges = map[string][]string{"one": {"10.128.0.0/24"}, "two": {"10.128.0.0/24", "fd00:10::/64"}}
	both   = result.Params{families: "two"}
)

// trial is the experiment of that name at work.
type trial struct {
	bed      *testbed.Testbed
	out      *result.Writer
	profile  profile
	programs map[string]string
	nodes    []*node
	exact    bool // instructions are counted
}

// node is what pods are connected to.
type node struct {
	arm, families string
	program       string // path of the plugin
	config        []byte // that the plugin is called with
	ns            *netns.Namespace
	running       []*netns.Namespace
	pods          []*netns.Namespace // of the block that is under way
	agent         *testbed.Process   // that the plugin calls; nil: none
	exact         bool               // instructions are counted
}

func newTrial(b *testbed.Testbed, o experiment.Options, p profile) (experiment.Trial, error) {
	t := &trial{bed: b, profile: p, exact: o.Exact}
	b.WithIPv6 = true
	var err error
	t.programs, err = o.Programs(experiment.FairleadCNIProgram, experiment.BridgeProgram, experiment.PTPProgram)
	if err != nil {
		return nil, err
	}
	for _, f := range []string{"two", "one"} {
		add := func(arm string) { t.nodes = append(t.nodes, &node{arm: arm, families: f, exact: o.Exact}) }
		add(armFairlead)
		if f == "two" {
			add(armAgain)
			add(armPolicies)
		}
		for _, other := range []string{experiment.BridgeProgram.Name, experiment.PTPProgram.Name} {
			if t.programs[other] != "" {
				add(other)
			}
		}
	}
	return t, nil
}

// ProfileName returns "quick" or "full".
func (t *trial) ProfileName() string { return t.profile.Name }

// Steps is the whole run in order.
func (t *trial) Steps(out *result.Writer) []experiment.Step {
	t.out = out
	p, l := t.profile, &experiment.Plan{}
	l.Add("finding fairlead-cni", time.Millisecond, t.findPlugin)
	round := time.Duration(0)
	for _, n := range t.nodes {
		pods := time.Duration(p.Running+p.Each) * 5 * time.Millisecond
		l.Add("starting "+n.name(), 500*time.Millisecond+pods, func(ctx context.Context) error { return t.start(ctx, n) })
		l.Add("connecting all pods of "+n.name(), n.planned(p.Running)/2,
			func(ctx context.Context) error { return t.burst(ctx, n) })
		round += n.planned(p.Each)
	}
	l.Times(p.Rounds, "ADD and DEL, round", round, t.round)
	return *l
}

func (n *node) name() string { return n.arm + ", " + n.families }

func (n *node) params() result.Params { return result.Params{families: n.families} }

// planned returns how long so many pods take to be connected and disconnected.
func (n *node) planned(pods int) time.Duration {
	each := 40 * time.Millisecond
	if n.arm == experiment.PTPProgram.Name && n.families == "two" {
		each = 1800 * time.Millisecond // duplicate address detection
	}
	return time.Duration(pods) * each
}

// start makes a node, and the network namespaces of its pods.
func (t *trial) start(ctx context.Context, n *node) (err error) {
	folder := filepath.Join(t.bed.Dir, n.arm+"-"+n.families)
	if strings.HasPrefix(n.arm, armFairlead) {
		err = t.startAgent(ctx, n, folder)
	} else {
		err = t.startOther(ctx, n, folder)
	}
	if err != nil {
		return err
	}
	t.bed.Defer(func() error { return errors.Join(remove(n.running), remove(n.pods)) })
	n.running, err = t.makePods(n, 0, t.profile.Running)
	return err
}

// makePods makes the network namespaces of so many pods of a node, from a number on. Those that it made it returns also
// with an error.
func (t *trial) makePods(n *node, from, count int) (pods []*netns.Namespace, err error) {
	for i := range count {
		ns, err := netns.New(t.podName(n, from+i))
		if err != nil {
			return pods, err
		}
		pods = append(pods, ns)
	}
	return pods, nil
}

// remove removes pods' network namespaces.
func remove(pods []*netns.Namespace) (err error) {
	for _, ns := range pods {
		err = errors.Join(err, testbed.RemoveNamespace(ns))
	}
	return err
}

// podName returns the name of a node's pod, and of its network namespace.
func (t *trial) podName(n *node, i int) string {
	return fmt.Sprintf("%s-%s-%s-pod%d", t.bed.Name, n.arm, n.families, i)
}

// policed returns the Pods of a node, and a NetworkPolicy that selects them and lets them in from each other.
func (t *trial) policed(n *node) []source.Object {
	label := map[string]string{"app": "lab"}
	l := []source.Object{&networkingv1.NetworkPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "lab", Name: "lab"},
		Spec: networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{MatchLabels: label},
			Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{
				{PodSelector: &metav1.LabelSelector{MatchLabels: label}}}}}}}}
	for i := range t.profile.Running + t.profile.Each {
		l = append(l, &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "lab", Name: t.podName(n, i), Labels: label},
			Spec:       corev1.PodSpec{NodeName: testbed.NodeName}})
	}
	return l
}

// startAgent makes a node with an agent that connects its pods.
func (t *trial) startAgent(ctx context.Context, n *node, folder string) error {
	c := testbed.NewCluster(1)
	c.Objects[0].(*corev1.Node).Spec.PodCIDRs = ranges[n.families]
	flags := []string{"--network-mode", "Own", "--network-cni-folder", folder, "--network-run-folder", folder}
	if n.arm == armPolicies {
		c.Objects = append(c.Objects, t.policed(n)...)
		flags = append(flags, "--policy-mode", "Enforce", "--policy-engine", "nftables")
	}
	f, err := c.WriteTo(t.bed.Dir, "objects-"+n.arm+"-"+n.families, 1)
	if err != nil {
		return err
	}
	if err := makeFolder(folder); err != nil {
		return err
	}
	x, _, err := t.bed.StartNode(ctx, n.arm+"-"+n.families, experiment.ArmNFTables, f, flags...)
	if err != nil {
		return err
	}
	n.ns, n.program, n.agent = x.Pair.Near, t.programs[experiment.FairleadCNIProgram.Name], x.Agent
	n.config, err = awaitConfig(ctx, folder, t.bed.Within(10*time.Second))
	return err
}

// startOther makes a node without an agent.
func (t *trial) startOther(ctx context.Context, n *node, folder string) error {
	p, err := t.bed.AddPair(ctx, n.arm+"-"+n.families, 0)
	if err != nil {
		return err
	}
	n.ns, n.program = p.Near, t.programs[n.arm]
	n.config, err = configOf(n.arm, ranges[n.families], folder)
	return err
}

// burst connects all running pods at once.
func (t *trial) burst(ctx context.Context, n *node) error {
	type ended struct {
		used time.Duration
		err  error
	}
	end := make(chan ended)
	before, err := n.usedByAgent()
	if err != nil {
		return err
	}
	began := time.Now()
	for _, pod := range n.running {
		go func() {
			used, err := n.call(ctx, "ADD", pod, pod.Name)
			end <- ended{used, err}
		}()
	}
	var failed []string
	plugins := time.Duration(0)
	for range n.running {
		e := <-end
		plugins += e.used
		if e.err != nil {
			failed = append(failed, e.err.Error())
		}
	}
	elapsed := time.Since(began)
	if n.exact {
		after, err := n.usedByAgent()
		if err != nil {
			return err
		}
		elapsed = plugins + after - before
	}
	if len(failed) > 0 {
		return fmt.Errorf("%d of %d pods of %s can't be connected: %s", len(failed), len(n.running), n.name(),
			testbed.Brief(strings.Join(failed, "; ")))
	}
	return t.out.AddValue(result.Block{Arm: n.arm, Params: n.params()}, "burst", float64(elapsed))
}

// round has a block of every node, in an order that is drawn.
func (t *trial) round(ctx context.Context, round int) error {
	for _, i := range t.bed.Rand.Perm(len(t.nodes)) {
		n := t.nodes[i]
		if err := t.block(ctx, n, round); err != nil {
			return err
		}
	}
	return nil
}

// block connects and disconnects some pods of a node. As by a container runtime, each has a network namespace and an ID
// that no pod had before, and both end with it. A block begins once the node has no device of the one before.
func (t *trial) block(ctx context.Context, n *node, round int) (err error) {
	if n.pods, err = t.makePods(n, t.profile.Running, t.profile.Each); err != nil {
		return err
	}
	before, err := devices(n.ns)
	if err != nil {
		return err
	}
	for _, command := range []string{"ADD", "DEL"} {
		if err := t.calls(ctx, n, round, command); err != nil {
			return err
		}
	}
	pods := n.pods
	n.pods = nil
	if err := remove(pods); err != nil {
		return err
	}
	return n.awaitDevices(ctx, before, t.bed.Within(10*time.Second))
}

// calls has the plugin connect the pods of a block, or disconnect them, one after the other.
func (t *trial) calls(ctx context.Context, n *node, round int, command string) error {
	var times, agents, later []int64
	began := time.Now()
	for _, pod := range n.pods {
		call := func() (time.Duration, error) {
			return n.call(ctx, command, pod, fmt.Sprintf("%s-%d", pod.Name, round))
		}
		if !n.exact {
			elapsed, err := call()
			if err != nil {
				return err
			}
			times = append(times, int64(elapsed))
			continue
		}
		c, err := n.count(ctx, call)
		if err != nil {
			return err
		}
		times, agents, later = append(times, int64(c.plugin+c.agent)), append(agents, int64(c.agent)),
			append(later, int64(c.later))
	}
	b, measure := result.Block{Arm: n.arm, Round: round, Params: n.params(), Start: began, Wall: time.Since(began)},
		strings.ToLower(command)
	err := t.out.AddTimes(b, measure, times)
	if n.exact && n.agent != nil {
		err = errors.Join(err, t.out.AddTimes(b, measure+suffixAgent, agents), t.out.AddTimes(b, measure+suffixLater, later))
	}
	return err
}

// devices returns how many devices a network namespace has.
func devices(ns *netns.Namespace) (int, error) {
	s, err := netlink.OpenIn(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return 0, err
	}
	defer s.Close()
	names, err := link.Names(s)
	return len(names), err
}

// awaitDevices waits until a node has no more than so many devices: the kernel ends network namespaces in the
// background.
func (n *node) awaitDevices(ctx context.Context, count int, within time.Duration) error {
	for end := time.Now().Add(within); ; {
		left, err := devices(n.ns)
		if err != nil || left <= count {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("%d devices of pods of %s are still there after %v", left-count, n.name(), within)
		}
		if err := testbed.Sleep(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
}
