// Package network turns Kubernetes objects into the network parts of a decided node: Nodes and ServiceCIDRs in,
// model.Change[model.NetworkPart] out.
//
// It is the only package that understands the pod network: which addresses a node's pods have, how packets get to those
// of other nodes, and what of that can't be. There is no I/O here, no clock, no log and no goroutine. What the node's
// devices are is an input (SetDevices), as its objects are.
//
// The meaning:
//   - A Node's pods have the addresses of spec.podCIDRs. In each range, the second address is the node's own.
//   - Another node is reached directly if its InternalIP is inside a prefix of the device that has our InternalIP of
//     that family, else through the tunnel (Overlay).
//   - The tunnel's outer packets are of the family of our first InternalIP, and may carry both.
//   - The link-layer address of a tunnel's end is a function of its outer address (MAC): it is never announced.
//   - What pods send to InternalIPs of a node behind the tunnel goes through it, in the families in which its pods are;
//     nodes themselves, and the tunnel, send to these by the underlay.
//   - The source of what a node itself sends through the tunnel is its InternalIP of the family, as policies know it.
//   - What has no way that may be taken (the overlay can't carry it, or its node has no address) is unreachable, and
//     not for the default route.
//   - Of overlapping ranges, the older Node's counts, then the first by name; likewise of a range and the address of
//     another Node in it. A range around an address of this node, of its own Node, or that meets a Service range, never
//     counts. What doesn't count is a source.Problem that names both.
//
// Everything is decided from what is known, never from what came before: in whatever order objects come, the result is
// the same. Parts that are equal to the ones before are the same pointers.
package network
