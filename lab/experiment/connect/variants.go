package connect

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/source"
)

// variant is mode ebpf in another setting, at the greatest number of Services, for clients in pods alone.
type variant struct {
	arm     result.Arm
	engine  string                 // of policies, that it takes; "": none
	flags   []string               // of the agent
	objects func() []source.Object // beside the Services; nil: none
	metric  string                 // counts the packets that are redirected to the pod
	some    bool                   // it must have counted some; otherwise none
	kubelet bool                   // its node has what kubelet leaves
}

// The variants' arms, and how many policies select the pod in the second; in a quick exact run a few, since it takes an
// emulated processor long to write them, and a connection's instructions hardly depend on their number.
const (
	armStack      = experiment.ArmEBPF + "-stack"
	armPolicies   = experiment.ArmEBPF + "-policies"
	armKubelet    = experiment.ArmEBPF + "-kubelet"
	policies      = 10000
	exactPolicies = 100
)

// redirectedPackets counts packets that bypass the host stack to a pod without policies.
const redirectedPackets = `fairlead_packets_total{outcome="handed_over"}`

// variantsOf returns the variants, the second with so many policies.
func variantsOf(policies int) []variant {
	return []variant{
		{arm: result.Arm{ID: armStack, Title: "ebpf, by the stack", Style: 8, // another's, which is never beside it
			Text: "as ebpf, with --ebpf-fast-path Never: packets for pods go through the node's stack, as they do where " +
				"something there looks at them"},
			flags: []string{"--ebpf-fast-path", "Never"}, metric: redirectedPackets},
		{arm: result.Arm{ID: armPolicies, Title: "ebpf, policies", Style: 7,
			Text: fmt.Sprintf("as ebpf, with the policy engine ebpf and %s NetworkPolicies that select the pod, each of which "+
				"allows it a destination; the last one allows the servers", experiment.Thousands(policies))},
			engine: "ebpf", flags: []string{"--policy-mode", "Enforce", "--policy-engine", "ebpf"},
			objects: func() []source.Object { return experiment.EgressPolicies(policies) },
			metric:  `fairlead_policy_ebpf_packets_total{outcome="redirected"}`, some: true},
	}
}

// policiesAim is the project's for a pod with policies, in the fast path.
var policiesAim = result.Aim{ID: "ebpf, policies, pod", Arm: armPolicies, Measure: "crr" + experiment.SuffixPod,
	Params: testbed.ServiceParams(10000), Of: result.Ratio, Bound: 1,
	Text: fmt.Sprintf("ebpf: a pod's connection at 10,000 Services under %s policies costs ≤ 1.0 × direct",
		experiment.Thousands(policies))}

func isVariant(arm string) bool { return arm == armStack || arm == armPolicies || arm == armKubelet }

// findVariants finds those that this machine can run.
func (r *trial) findVariants(ctx context.Context) error {
	for _, v := range variantsOf(r.profile.Policies) {
		if v.engine != "" {
			_, cannot, err := r.bed.FindEngines(ctx, v.engine)
			if err != nil {
				return err
			}
			if len(cannot) > 0 {
				r.grid.Cannot = append(r.grid.Cannot, testbed.Unable{Name: v.arm.Title, Why: cannot[0].Why})
				continue
			}
		}
		r.variants = append(r.variants, v)
	}
	if r.exact {
		return r.findKubelet(ctx)
	}
	return nil
}

// startVariant starts its agent.
func (r *trial) startVariant(ctx context.Context, v variant) error {
	f := r.grid.Folders[len(r.grid.Folders)-1]
	if v.objects != nil {
		c := *f.Cluster
		c.Objects = append(slices.Clone(c.Objects), v.objects()...)
		var err error
		if f, err = c.WriteTo(r.bed.Dir, v.arm.ID, 1000); err != nil {
			return err
		}
	}
	p, err := r.addNode(ctx, v.arm.ID, f.Cluster.Services, v.kubelet)
	if err != nil {
		return err
	}
	n := testbed.NewNode(p, experiment.ArmEBPF, f, v.flags...)
	r.nodes = append(r.nodes, n)
	_, err = r.bed.ServeNode(ctx, n)
	return err
}

// checkVariants is an error where an arm was not what it is said to be.
func (r *trial) checkVariants(context.Context) (err error) {
	for i, v := range r.variants {
		n, failed := r.nodes[i].Metric(v.metric)
		if failed == nil && n > 0 != v.some {
			failed = fmt.Errorf("%s of %s is %v", v.metric, r.nodes[i].Pair.Near.Name, n)
		}
		err = errors.Join(err, failed)
	}
	return err
}
