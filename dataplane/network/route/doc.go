// Package route is the data plane that connects this node's pods with those of other nodes, by the kernel's routes and
// its devices for VXLAN and IPIP; the node's end of what connects pods by ipvlan is among its devices, too. Facts by
// rank, all of the calling thread's network namespace:
//
//	0 setting    net/ipv4/ip_forward, net/ipv6/conf/all/forwarding → 1
//	1 device     fl-vxlan → VNI, port, outer source, uplink, link-layer address, MTU, up
//	             fl-ipip → outer source, uplink, MTU, up
//	             fl-node → parent, mode, MTU, up
//	2 address    fl-vxlan, fl-ipip or fl-node · this node's own address in each of its ranges
//	2 forwarding fl-vxlan, fl-ipip, and the devices that other nodes are behind: net/ipv4/conf/DEVICE/forwarding → 1
//	3 neighbour  fl-vxlan · next hop in the tunnel, one of another node → link-layer address of its end
//	3 forward    fl-vxlan · that link-layer address → outer address of the node
//	4 route      range of another node → next hop, device, source; this node's own ranges, and those
//	             that no way leads to → unreachable
//	4 route for pods  own address of another node → next hop in the tunnel, device; in a table of its own
//	4 reverse path    the uplink: net/ipv4/conf/DEVICE/src_valid_mark → 1
//	5 rule       range of this node's pods → that table, but for packets with network.UnderlayMark
//
// A range on a node that is on a link leads to that node's address there; others lead to a next hop in the tunnel: the
// node's own address in the range, or for IPv6 the link-local address of its device. The tunnel learns nothing and
// floods nothing: no packet asks who has an address. UDP checksums of outer
// packets are off (RFC 7348; for IPv6 RFC 6935). IPIP's device has no far end: the outer destination is the next hop of
// the route. A node's own range is unreachable but for its pods, whose routes are
// longer, so that a packet to an address without a pod is rejected at once and never takes the default route.
//
// Own addresses of nodes behind the tunnel are reached through it by this node's pods alone, so that these nodes see
// the pod. This node itself, and the tunnel's outer packets, reach them by the underlay: the rules go by the source.
// Replies of a pod to another node whose request came by the underlay, for a port of this node, go back by it:
// dataplane/network/masquerade and the programs of Services' mode ebpf mark them, and the requests, which the reverse
// path filter, in strict mode, looks up with the mark (src_valid_mark).
//
// Routes are those of the main table with the protocol number Protocol, which router daemons can export. Those of IPv4
// by next hops are spread over scopes 1 to 199 for the kernel's sake (kernel/route, Interior); a scope isn't read back,
// so that a route is right in any. The device is this package's by its name; of its neighbours only permanent ones
// count. Forwarding, and src_valid_mark, stay on after Clean, since others need them too; of IPv6, node.Advertisements
// remembers whether it was off.
package route
