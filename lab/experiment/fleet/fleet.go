// Package fleet is the experiment that measures what all agents of a cluster cost its API server: what each receives
// while the cluster changes as usual, and what the start of all at once takes. fleet.go is the order of it, agents.go
// the agents' sources and how their connections are counted, churn.go what changes, design.go the words.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"time"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/sandbox/controlplane"
	"fairlead.dev/fairlead/sandbox/generate"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// Experiment is this package's.
var Experiment = experiment.Experiment{
	Name:  "fleet",
	Short: "What agents cost an API server: bytes and a start at 5,000 nodes",
	Long: `Measure what agents read from a real kube-apiserver: 5 to 40 sources in this process, with the requests, watches and
decoding of an agent each, start at once against a cluster of 500 nodes and 15,000 pods, and follow it while its objects
change as often as those of 5,000 nodes do. Bytes are counted at the connections. It takes about five minutes with
--quick, which has 100 nodes and one round, an hour and a half without, and root. --subject control-plane=PATH is etcd and
kube-apiserver in one program, without which there is nothing to measure.`,
	Rounds:   true,
	Subjects: []string{experiment.ControlPlaneProgram.Name},
	Prepare: func(ctx context.Context, b *testbed.Testbed, o experiment.Options) (experiment.Trial, error) {
		p := experiment.Choose(o, quick, full, nil)
		p.Rounds = o.RoundsOr(p.Rounds)
		return newTrial(b, o, p)
	},
}

// profile is how much is measured.
type profile struct {
	Name   string
	Fleet  generate.Fleet
	Agents []int         // numbers of sources, rising
	Churns []int         // numbers of nodes: the most agents follow the churn of so many, beside that of whole
	Window time.Duration // of each churn
	Rounds int
}

// whole is the number of nodes of the churn that all agents follow: the most that Kubernetes supports.
const whole = 5000

var (
	quick = profile{"quick", generate.Fleet{Nodes: 100, Pods: 30, Images: 30}, []int{5, 10, 20, 40}, []int{500},
		10 * time.Second, 1}
	full = profile{"full", generate.Fleet{Nodes: 500, Pods: 30, Images: 30}, []int{5, 10, 20, 40}, []int{500, 1000, 2500},
		time.Minute, 3}
)

// The arms: what an agent reads.
const (
	armServices = "services"
	armNodes    = "nodes"
	armPolicies = "policies"
)

var arms = []string{armServices, armNodes, armPolicies}

// options returns what a source reads in an arm.
func options(arm, kubeconfig, node string) kube.Options {
	o := kube.Options{Access: kube.Access{Kubeconfig: kubeconfig}, Node: node, Nodes: arm == armNodes}
	if arm == armPolicies {
		o.Kinds = []source.Kind{source.Namespace, source.Pod, source.NetworkPolicy, source.ClusterNetworkPolicy}
	}
	return o
}

// trial is the experiment at work.
type trial struct {
	bed        *testbed.Testbed
	out        *result.Writer
	profile    profile
	program    string // etcd and kube-apiserver; "": none was given
	host       *netns.Namespace
	plane      *controlplane.Plane
	kubeconfig string
	churn      *churn
}

func newTrial(b *testbed.Testbed, o experiment.Options, p profile) (experiment.Trial, error) {
	programs, err := o.Programs(experiment.ControlPlaneProgram)
	return &trial{bed: b, profile: p, program: programs[experiment.ControlPlaneProgram.Name]}, err
}

// ProfileName returns "quick" or "full".
func (t *trial) ProfileName() string { return t.profile.Name }

// Steps is the whole run in order.
func (t *trial) Steps(out *result.Writer) []experiment.Step {
	t.out = out
	l, p := &experiment.Plan{}, t.profile
	l.Add("starting etcd and kube-apiserver", 10*time.Second, t.serve)
	l.Add(fmt.Sprintf("making %s objects", experiment.Thousands(p.Fleet.Quantity())),
		time.Duration(p.Fleet.Quantity())*6*time.Millisecond, t.load)
	l.Add("changing objects without agents", p.Window, t.alone)
	for round := range p.Rounds {
		for _, i := range t.bed.Rand.Perm(len(arms)) {
			for _, n := range p.Agents {
				l.Add(fmt.Sprintf("%d agents, %s, %d of %d", n, arms[i], round+1, p.Rounds), 10*time.Second+p.Window*
					time.Duration(len(t.churns(n))), func(ctx context.Context) error { return t.live(ctx, arms[i], n, round) })
			}
		}
	}
	l.Add("ending kube-apiserver", time.Second, func(context.Context) error {
		t.plane.Close()
		return nil
	})
	return *l
}

// churns returns the numbers of nodes of which n agents follow the churn, each in turn.
func (t *trial) churns(n int) (l []int) {
	if n == slices.Max(t.profile.Agents) {
		l = t.profile.Churns
	}
	return append(slices.Clone(l), whole)
}

// address is the API server's (RFC 2544's range, which is for measurements).
var address = netip.MustParseAddr("198.18.0.1")

// agentName is the user that the agents are, as their ServiceAccount is: priority and fairness are as for it.
const agentName, agentGroup = "system:serviceaccount:fairlead:fairlead", "system:serviceaccounts"

// serve starts etcd and kube-apiserver and lets the agents' user read what an agent may.
func (t *trial) serve(ctx context.Context) (err error) {
	if t.program == "" {
		return fmt.Errorf("no API server was given: --subject %s=PATH takes one; `make -C test/cluster build` builds one "+
			"and says where", experiment.ControlPlaneProgram.Name)
	}
	if t.host, err = testbed.NewNamespace(t.bed.Name + "-api"); err != nil {
		return err
	}
	t.bed.Defer(func() error { return testbed.RemoveNamespace(t.host) })
	dir, err := os.MkdirTemp(t.bed.Dir, "control-plane-")
	if err != nil {
		return err
	}
	err = testbed.DialLink(t.host, func(c *link.Conn) error { // the loopback is always interface 1
		return c.AddAddress(1, netip.PrefixFrom(address, 32))
	})
	if err != nil {
		return err
	}
	t.plane, err = controlplane.Start(ctx, controlplane.Options{Program: t.program, Host: t.host, Address: address,
		Dir: dir, Fair: true})
	t.bed.Defer(func() error { t.plane.Close(); return nil })
	if err != nil {
		return fmt.Errorf("start the control plane %s: %w", t.program, err)
	}
	if t.kubeconfig, err = t.plane.Kubeconfig("agent", controlplane.First); err != nil {
		return err
	}
	text, err := t.plane.KubeconfigAt(netip.AddrPortFrom(address, controlplane.First), agentName, agentGroup)
	return errors.Join(err, os.WriteFile(t.kubeconfig, text, 0o600), t.allow(ctx))
}

// allow binds the agents' user to a ClusterRole with the chart's permissions.
func (t *trial) allow(ctx context.Context) error {
	const group, at = "rbac.authorization.k8s.io", "/apis/rbac.authorization.k8s.io/v1/"
	rule := func(group string, resources ...string) map[string]any {
		return map[string]any{"apiGroups": []string{group}, "resources": resources, "verbs": []string{"list", "watch"}}
	}
	meta := map[string]any{"name": "fairlead"}
	return errors.Join(
		t.plane.Call(ctx, controlplane.First, http.MethodPost, at+"clusterroles", map[string]any{"metadata": meta,
			"rules": []any{rule("", "services", "nodes", "namespaces", "pods"),
				rule("discovery.k8s.io", "endpointslices"), rule("networking.k8s.io", "servicecidrs", "networkpolicies"),
				rule("policy.networking.k8s.io", "clusternetworkpolicies"),
				rule("apiextensions.k8s.io", "customresourcedefinitions")}}, nil),
		t.plane.Call(ctx, controlplane.First, http.MethodPost, at+"clusterrolebindings", map[string]any{"metadata": meta,
			"roleRef":  map[string]any{"apiGroup": group, "kind": "ClusterRole", "name": "fairlead"},
			"subjects": []any{map[string]any{"apiGroup": group, "kind": "User", "name": agentName}}}, nil))
}

// load makes the cluster.
func (t *trial) load(ctx context.Context) error {
	t.churn = newChurn(t.profile.Fleet, t.plane)
	for _, l := range [][]source.Object{t.profile.Fleet.Spaces(), t.profile.Fleet.Objects()} {
		if err := t.plane.Load(ctx, l); err != nil {
			return err
		}
	}
	return nil
}

// used returns the API server's processor time so far.
func (t *trial) used() (time.Duration, error) {
	return (&testbed.Process{Child: t.plane.Process(controlplane.ServerName(controlplane.First))}).Used()
}

// spent returns the API server's processor time while something goes on, and how long that went on.
func (t *trial) spent(something func() error) (used, wall time.Duration, err error) {
	return testbed.Spent(t.used, something)
}

// params are those of a block of so many agents that follow the churn of so many nodes.
func params(agents, churn int) result.Params {
	p := result.Params{"agents": fmt.Sprint(agents)}
	if churn != whole {
		p = p.With("churn", fmt.Sprint(churn))
	}
	return p
}

// alone measures what the writes alone take.
func (t *trial) alone(ctx context.Context) error {
	used, wall, err := t.spent(func() error {
		_, err := t.churn.run(ctx, whole, t.profile.Window)
		return err
	})
	if err != nil {
		return err
	}
	t.out.Remark(fmt.Sprintf("Without an agent the API server used %.1f %% of a processor for the writes.",
		100*float64(used)/float64(wall)))
	return nil
}

// live starts agents at once, has them follow, and ends them.
func (t *trial) live(ctx context.Context, arm string, n, round int) error {
	b := result.Block{Arm: arm, Round: round, Params: params(n, whole)}
	var a *agents
	used, _, err := t.spent(func() (err error) {
		limited, stop := context.WithTimeout(ctx, 10*time.Minute)
		defer stop()
		a, err = start(ctx, n, t.host.Do, func(i int) kube.Options {
			return options(arm, t.kubeconfig, t.profile.Fleet.NodeName(i%t.profile.Fleet.Nodes))
		})
		return errors.Join(err, limited.Err())
	})
	if err != nil {
		return fmt.Errorf("start %d agents: %w", n, err)
	}
	first := sum(a.first)
	b.Counters = counters(first, n)
	err = errors.Join(t.out.AddValue(b, "start", float64(slices.Max(a.synced))),
		t.out.AddValue(b, "start-bytes", float64(first.received)/float64(n)),
		t.out.AddValue(b, "start-cpu", float64(used)/float64(n)),
		t.out.AddValue(b, "requests", float64(first.requests)/float64(n)),
		t.out.AddValue(b, "refused", float64(first.refused)),
		t.out.AddValue(b, "failed", float64(first.failed)))
	for _, nodes := range t.churns(n) {
		if err == nil {
			b.Params = params(n, nodes)
			err = t.follow(ctx, a, b, nodes)
		}
	}
	return errors.Join(err, a.stop())
}

// follow measures what agents receive while a cluster changes.
func (t *trial) follow(ctx context.Context, a *agents, b result.Block, nodes int) error {
	if err := testbed.Sleep(ctx, time.Second); err != nil {
		return err
	}
	before, writes := sum(a.now()), int64(0)
	used, wall, err := t.spent(func() (err error) {
		if writes, err = t.churn.run(ctx, nodes, t.profile.Window); err == nil {
			err = testbed.Sleep(ctx, 200*time.Millisecond) // the last events are on their way
		}
		return err
	})
	if err != nil {
		return err
	}
	got, n := sum(a.now()).less(before), len(a.counts)
	events := int64(0)
	for _, v := range got.messages {
		events += v
	}
	b.Wall, b.Counters = wall, counters(got, n)
	b.Counters["writes"] = float64(writes)
	per := 1 / float64(n) / wall.Seconds()
	return errors.Join(t.out.AddValue(b, "received", float64(got.received)*per),
		t.out.AddValue(b, "events", 60*float64(events)*per),
		t.out.AddValue(b, "server-cpu", float64(used)/float64(wall)),
		t.out.AddValue(b, "refused-later", float64(got.refused+got.failed)))
}

// counters returns a count as counters of a block, of each agent: bytes and events by kind.
func counters(c count, n int) map[string]float64 {
	l := map[string]float64{"received": float64(c.received) / float64(n), "sent": float64(c.sent) / float64(n)}
	for kind := range c.bodies {
		l["bytes of "+kind] = float64(c.bodies[kind]) / float64(n)
		l["events of "+kind] = float64(c.messages[kind]) / float64(n)
	}
	return l
}
