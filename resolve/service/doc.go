// Package service turns Kubernetes objects into a decided node: Services, EndpointSlices and this Node in, the model
// out.
//
// It is the only room that understands Kubernetes Services: which endpoints may take traffic, traffic policies,
// topology, affinity, source ranges, node ports, and what to do when objects contradict each other. There is no I/O
// here, no clock, no log and no goroutine. What can't be taken as it stands becomes a source.Problem and leaves
// everything else alone.
//
// The meaning is kube-proxy's (kubernetes/kubernetes, pkg/proxy), with these differences:
//   - trafficDistribution on a Service whose ready endpoints carry no hint at all, as in hand-written manifests, is
//     decided by the endpoints' own zone and nodeName, with the fallbacks that hints have. The EndpointSlice controller
//     would have set just these hints.
//   - A source range that can't be read closes a family without other ranges; kube-proxy leaves it out.
//   - Node ports need type NodePort or LoadBalancer, ingress addresses type LoadBalancer. The API server clears them
//     elsewhere.
//   - A Service that has spec.ipFamilies gets node ports of each of them, also without a clusterIP of that family.
//   - Two that want the same address, port and protocol: kube-proxy serves one of them, by chance. Here a clusterIP
//     comes before anything else, then the older Service, then the first by name, and the other one is named.
//   - One address in several EndpointSlices: not terminating comes before terminating, as in kube-proxy since 1.36
//     (kubernetes#135593); where that leaves a choice, ready, serving and local endpoints come first, then the first
//     slice.
//   - The cost of a Service is bounded, and so are the shares of namespaces (docs/reference/limits.md).
//   - External IPs that are pods', another Service's ClusterIP or the API server's aren't served, unless configured
//     otherwise.
//   - An endpoint that is a ClusterIP or an entry of its own namespace is left out; kube-proxy sends packets there.
//   - An endpoint that is a host port of this node is the pod behind it; kube-proxy sends packets to the node's
//     address, where they are not translated again.
//   - Session affinity is of a Service port's endpoints under one traffic policy: where one of its addresses has policy
//     Local and another Cluster, a client may have another endpoint by each. kube-proxy remembers clients by endpoint.
//   - A UDP flow of a client that leaves the source ranges is cut; kube-proxy lets it go on. An SCTP association whose
//     endpoint serves no more is cut; kube-proxy leaves it.
//   - Every mode rejects other ports and protocols of a ClusterIP and drops packets to unallocated addresses of
//     ServiceCIDRs, as kube-proxy's mode nftables does. ClusterIPs of Services for another proxy pass; kube-proxy drops
//     them.
//   - Pods of the node aren't masqueraded at load balancer and external addresses and node ports: their endpoints see
//     them, and so do network policies. kube-proxy masquerades them. At node ports this needs a node that knows its own
//     pods (docs/reference/client-addresses.md).
//   - A node port at another node's address is translated by the client's own node, for its pods and processes;
//     kube-proxy sends them there, and the other node masquerades them. Not with policy Local or masqueradeAll,
//     nor in modes userspace and ipvs.
//   - A health check counts the endpoints behind the Service's own ports only, and a dual-stack pod once.
package service
