// Package masquerade has two data planes that masquerade what pods send out of the cluster, of which a node has one.
//
// DevicePlane writes prefixes for the programs at devices of Services' mode ebpf, which masquerade by them (bpf/nat.h,
// begin_masquerade): this node's pods, and destinations that see pods' own addresses.
//
// Plane does it by nf_tables: table "fairlead-masquerade", of the calling thread's network namespace.
//
//	hook   behind routing and behind what Services masquerade: out by model.ProxyDevice: as it is, for
//	       the agent behind it sees the pod's own address; source in "own4" or "own6" → leave
//	leave  destination in "own", "cluster" or "except" of its family: as it is; all else masqueraded, on a random port
//
// Only the first packet of a connection comes here, so that replies to clients of pods stay as they are. Without
// masquerading there is no hook.
package masquerade
