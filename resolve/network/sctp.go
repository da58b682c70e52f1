package network

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

// mostSCTPProblems are reported; others are counted.
const mostSCTPProblems = 20

// sctp is which of this node's Pods have containers with ports of SCTP.
type sctp struct {
	pods    map[source.Key]bool
	changed bool // pods has
}

// applySCTP records whether a Pod of this node has ports of SCTP.
func (r *Resolver) applySCTP(key source.Key, o *corev1.Pod) {
	speaks := o != nil && o.Spec.NodeName == r.config.Node && !o.Spec.HostNetwork &&
		slices.ContainsFunc(slices.Concat(o.Spec.InitContainers, o.Spec.Containers), func(c corev1.Container) bool {
			return slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Protocol == corev1.ProtocolSCTP })
		})
	if r.sctp.pods[key] == speaks {
		return
	}
	r.sctp.changed = true
	if r.sctp.pods[key] = speaks; !speaks {
		delete(r.sctp.pods, key)
	}
}

// sctpProblems returns a problem for each Pod that may send SCTP out of the cluster, where that isn't masqueraded
// though other protocols are.
func (r *Resolver) sctpProblems() (problems []source.Problem) {
	r.sctp.changed = false
	if !r.config.SCTPUnmasqueraded || r.network == nil || r.network.Masquerade == nil {
		return nil
	}
	for key := range r.sctp.pods {
		problems = append(problems, source.Problem{Object: key, Reason: "SCTPNotMasqueraded",
			Field: "spec.containers[].ports[].protocol", Message: "what the pod sends by SCTP out of the cluster keeps the " +
				"pod's own address, which hosts outside can't reply to unless routers know it: set mode to nftables or " +
				"iptables, which masquerade SCTP, too"})
	}
	slices.SortFunc(problems, func(a, b source.Problem) int {
		return cmp.Or(strings.Compare(a.Object.Namespace, b.Object.Namespace), strings.Compare(a.Object.Name, b.Object.Name))
	})
	if more := len(problems) - mostSCTPProblems; more > 0 {
		problems = append(problems[:mostSCTPProblems:mostSCTPProblems], source.Problem{Reason: "MoreProblems",
			Message: fmt.Sprintf("SCTP of %d more Pods isn't masqueraded", more)})
	}
	return problems
}
