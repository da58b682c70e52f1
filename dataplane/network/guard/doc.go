// Package guard is the data plane that drops forged sources of the pod network, and what is for the overlay's end and
// came from no other end, by nf_tables: table "fairlead-guard", of the calling thread's network namespace, ahead of
// connection tracking, translation and routing. A source is a device first, an address second.
//
//	hook     device group of pods' devices → pod
//	         source in "inside4" or "inside6": of this node's pods, or behind the tunnel → inside
//	pod      UDP · port in "port", or protocol in "protocol", to another node's end ("end4", "end6") → overlay: drop,
//	         counted;
//	         device · source in "source4" or "source6", or in "allowed4" or "allowed6"; fe80::/10 to fe80::1;
//	         drop multicast of IPv6 link-local sources; drop all else, counted (forged)
//	inside   device in "device" (the tunnel's), loopback, the proxy's; drop all else, counted
//	hook-input
//	         UDP · port · VNI in "vxlan", whatever the destination → outer
//	         IPIP · destination in "ipip" → outer
//	outer    destination in "own4" or "own6", source in "end4" or "end6" → inner; drop all else, counted
//	inner    inner source → end in "behind4-4" and alike, which is the outer source: accept; drop all else,
//	         counted (behind)
//
// Of nodes on a link of this one nothing is inside: such a node sends directly until the overlay has been changed
// there.
//
// Pods' devices are known by their group, not by name: one that has no sources yet, or no longer, sends nothing. ARP
// never comes here: pods' devices answer none, and learn nothing from it (attachment).
//
// The socket of VXLAN takes the overlay's port at every address of the node, so the check doesn't ask which that is. It
// is made at input, since there a datagram is whole, whoever else joins fragments. nf_tables compares no two fields of
// a packet: a set of pairs of an address and itself does, "sender4" and "sender6". Where clients' packets come through
// the tunnel too (direct server return, "any"), their sources are those that lead to no end and aren't inside.
//
// What is translated on its way to an end isn't seen here: resolve/service refuses endpoints there.
package guard
