// Package policy turns Kubernetes objects into the policy parts of a decided node: Pods, Namespaces, Nodes,
// NetworkPolicies and ClusterNetworkPolicies in, model.Change[model.PolicyPart] out.
//
// It is the only package that understands network policies: which pods a policy selects, what its rules match, tiers,
// priorities, named ports, audit, and what to do with what can't be read. There is no I/O here, no clock, no log and
// no goroutine. What can't be read fails closed and becomes a source.Problem.
//
// The meaning is that of the comments on the types (networking.k8s.io/v1, policy.networking.k8s.io/v1beta1), with
// these decisions where they leave one:
//   - ClusterNetworkPolicies of one tier and priority are evaluated in the order of their names.
//   - A pod counts once it has an address and its Namespace is known; on this node it is closed until then. A pod that
//     has ended or is in the host's network is neither selected nor a peer. Of two pods with one address, the one that
//     is not terminating counts, then the younger, then the last by name.
//   - A container's named port is one of the pod's, also an init container's. Two numbers for one name are both meant.
//   - A named port of an egress rule matches pods alone, each at its own number; with an ipBlock, the pods in it.
//   - An address is a node's by Node.status.addresses, and a pod's or a node's own address also matches CIDRs.
//   - A Deny or Pass rule by selector of pods also matches addresses of the cluster's pod ranges that are no known
//     pod's (Config.UnknownPods).
//   - Of a ClusterNetworkPolicy, an Accept rule with anything that isn't known matches nothing, and a Deny or Pass rule
//     drops everything in its direction. One whose tier or subject isn't known applies to no pod.
//   - An audited policy (annotation fairlead.dev/audit: "true") isolates no pod and drops nothing. Decision.Report says
//     that its stage would drop the packet if it were enforced.
//   - domainNames match the addresses of the source.ResolvedNames that there are, also those of pods and nodes.
//   - What a policy comes to is bounded (Limits). A policy beyond them isolates the pods that it selects and allows
//     nothing.
//
// # How it works
//
// Pods of a namespace with the same labels and named ports are one class; selectors are matched against classes. The
// classes with pods on this node have rulesets; what those name are the peers in use. The peers in use that match a
// class, a node or a piece of the CIDRs in use are its signature. Addresses with one signature are one identity, and
// each peer table is evaluated once for an identity.
package policy
