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
//
// A range on a node that is on a link leads to that node's address there; others lead to a next hop in the tunnel: the
// node's own address in the range, or for IPv6 the link-local address of its device. The tunnel learns nothing and
// floods nothing: no packet asks who has an address. UDP checksums of outer
// packets are off (RFC 7348; for IPv6 RFC 6935). IPIP's device has no far end: the outer destination is the next hop of
// the route. A node's own range is unreachable but for its pods, whose routes are
// longer, so that a packet to an address without a pod is rejected at once and never takes the default route.
//
// Routes are those of the main table with the protocol number Protocol, which router daemons can export. Those of IPv4
// by next hops are spread over scopes 1 to 199 for the kernel's sake (kernel/route, Interior); a scope isn't read back,
// so that a route is right in any. The device is this package's by its name; of its neighbours only permanent ones
// count. Forwarding stays on after Clean, since others need it too.
package route
