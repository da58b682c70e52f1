// Package attachment is the data plane that connects pods to their node: by a routed veth or netkit pair for each,
// without a bridge, or by ipvlan. Facts by rank, of the calling thread's network namespace:
//
//	0 device     node's end → alias "fairlead:" and the ID, link-layer address, MTU, device group, no ARP, up
//	1 setting    net/ipv6/conf/DEVICE/accept_ra → 0, net/ipv4/conf/DEVICE/forwarding → 1
//	2 limit      device → bytes a second (token bucket filter), of a pod that has one
//	3 neighbour  device · pod's address → link-layer address of the pod's end
//	4 route      pod's address → device
//
// Of a pod that is connected by ipvlan there are routes alone, by the node's own child of the uplink, which
// dataplane/network/route makes: the pod's child is in the pod's network namespace, and is written with the first
// route.
//
// The node's end has no address, and neither end asks or answers who has one: each knows the other's link-layer
// address. The pod has its addresses (/32, /128, no duplicate address detection) and a default route by a link-local
// next hop (model.Gateways). Both ends are made where they belong, since moving a device between namespaces waits for
// all processors. Whoever writes the device writes the pod's inside too, once: what a pod changes there is its own
// doing, and stays.
//
// What a pod may send is limited at its own end, where TCP holds the sender back, and what it receives at the node's.
//
// A device that goes while its pod lives is made again by the path of its network namespace, and the pod's end with it.
//
// Devices are this package's by alias, routes by the protocol number Protocol.
package attachment
