package source

import (
	"fmt"
	"slices"
	"strings"
)

// PolicyKind is a kind of network policies that Fairlead doesn't evaluate.
type PolicyKind struct{ Group, Kind, Resource string }

// adminGroup is of the kinds that became ClusterNetworkPolicies.
const adminGroup = "policy.networking.k8s.io"

// OtherPolicyKinds lists the kinds of network policies that clusters have and that Fairlead doesn't evaluate.
func OtherPolicyKinds() []PolicyKind {
	return []PolicyKind{
		{adminGroup, "AdminNetworkPolicy", "adminnetworkpolicies"},
		{adminGroup, "BaselineAdminNetworkPolicy", "baselineadminnetworkpolicies"},
		{"crd.projectcalico.org", "NetworkPolicy", "networkpolicies"},
		{"crd.projectcalico.org", "GlobalNetworkPolicy", "globalnetworkpolicies"},
		{"projectcalico.org", "NetworkPolicy", "networkpolicies"},
		{"projectcalico.org", "GlobalNetworkPolicy", "globalnetworkpolicies"},
		{"cilium.io", "CiliumNetworkPolicy", "ciliumnetworkpolicies"},
		{"cilium.io", "CiliumClusterwideNetworkPolicy", "ciliumclusterwidenetworkpolicies"},
		{"crd.antrea.io", "NetworkPolicy", "networkpolicies"},
		{"crd.antrea.io", "ClusterNetworkPolicy", "clusternetworkpolicies"},
	}
}

// OtherPolicyKind returns the kind of policies that an apiVersion and a kind name, if it is one of OtherPolicyKinds.
func OtherPolicyKind(version, kind string) (k PolicyKind, ok bool) {
	group, _, _ := strings.Cut(version, "/")
	for _, k := range OtherPolicyKinds() {
		if k.Group == group && k.Kind == kind {
			return k, true
		}
	}
	return k, false
}

// Name returns the kind with its group, but for kinds of Kubernetes.
func (k PolicyKind) Name() Kind {
	if k.Converts() {
		return Kind(k.Kind)
	}
	return Kind(k.Kind + "." + k.Group)
}

// Converts reports whether policies of this kind can be written as ClusterNetworkPolicies by a program.
func (k PolicyKind) Converts() bool { return k.Group == adminGroup }

// Problem returns the problem that a policy of this kind is not evaluated. Without a name in key it is about what there
// may be of the kind.
func (k PolicyKind) Problem(key Key) Problem {
	key.Kind = k.Name()
	message := "policies of this kind are not evaluated: write a NetworkPolicy or a ClusterNetworkPolicy"
	if k.Converts() {
		message = "policies of this kind are not evaluated: write a ClusterNetworkPolicy, as fairlead policy convert does"
	}
	return Problem{Object: key, Reason: PolicyNotEvaluated, Message: message}
}

// NotListed returns the problem that there may be policies of this kind, which may not be listed.
func (k PolicyKind) NotListed() Problem {
	return Problem{Object: Key{Kind: k.Name()}, Reason: PoliciesNotListed, Message: fmt.Sprintf("policies of this kind "+
		"are not evaluated, and whether there are any is not known: let a ClusterRole allow the verb list on %s.%s",
		k.Resource, k.Group)}
}

// IsAdminPolicy reports whether a kind is one that became ClusterNetworkPolicies.
func IsAdminPolicy(name Kind) bool {
	return slices.ContainsFunc(OtherPolicyKinds(), func(k PolicyKind) bool { return k.Converts() && k.Name() == name })
}

// PoliciesNotListed is the reason of the problem that there may be policies of a kind that Fairlead doesn't evaluate.
const PoliciesNotListed = "PoliciesNotListed"

// PolicyNotEvaluated is the reason of the problem that a policy is of a kind that Fairlead doesn't evaluate.
const PolicyNotEvaluated = "PolicyNotEvaluated"

// Unevaluated splits problems into those of policies of kinds that Fairlead doesn't evaluate, and all others. The first
// come as one sentence, "" where there are none.
func Unevaluated(problems []Problem) (sentence string, remaining []Problem) {
	counts, n, others := count(problems, PolicyNotEvaluated)
	var unknown []string
	for _, p := range others {
		if p.Reason == PoliciesNotListed {
			unknown = append(unknown, string(p.Object.Kind))
		} else {
			remaining = append(remaining, p)
		}
	}
	var parts []string
	switch n {
	case 0:
	case 1:
		parts = append(parts, "1 policy of a kind that Fairlead doesn't evaluate: "+counts)
	default:
		parts = append(parts, fmt.Sprintf("%d policies of kinds that Fairlead doesn't evaluate: %s", n, counts))
	}
	if unknown != nil {
		parts = append(parts, "policies that Fairlead may not list, and doesn't evaluate if there are any: "+
			strings.Join(unknown, ", "))
	}
	if sentence = strings.Join(parts, "; "); strings.Contains(sentence, "AdminNetworkPolicy") {
		sentence += "; fairlead policy convert writes ClusterNetworkPolicies in place of AdminNetworkPolicies"
	}
	return sentence, remaining
}
