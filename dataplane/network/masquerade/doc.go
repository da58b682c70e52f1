// Package masquerade has two data planes that masquerade what pods send out of the cluster, of which a node has one.
//
// DevicePlane writes prefixes for the programs at devices of Services' mode ebpf, which masquerade by them
// (bpf/device/nat.h, begin_masquerade): this node's pods, and destinations that see pods' own addresses. Of these,
// nodes behind the tunnel are told apart: what they send by the underlay is answered by it.
//
// Plane does it by nf_tables: table "fairlead-masquerade", of the calling thread's network namespace.
//
//	hook   behind routing and behind what Services masquerade: out by model.ProxyDevice: as it is, for
//	       the agent behind it sees the pod's own address; source in "own4" or "own6" → leave
//	leave  destination in "own", "cluster" or "except" of its family: as it is; all else masqueraded, on a random port
//
//	hook-nodes  before routing, behind the translation of destinations: between an address in "node" and one in "own"
//	       of a family, of a connection whose destination was translated, requests from "node" and replies to it → set
//	       network.UnderlayMark
//
//	hook-self  before what Services masquerade: by the tunnel's device, with a source in "source" of its family, this
//	       node's own → keeps it
//
// Only the first packet of a connection comes to hook, so that replies to clients of pods stay as they are. Without
// masquerading there is no hook, and without nodes behind a tunnel no hook-nodes.
package masquerade
