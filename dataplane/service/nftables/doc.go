// Package nftables is the service data plane that tells nf_tables about frontends: one table of the inet family, a
// constant number of maps, and a number of chains that follows the sizes of pools in use, never the number of Services.
//
// For each family (4 and 6) there is
//
//	service    stage · address · protocol · port → code of what is next
//	pool       stage · address · protocol · port → pool
//	source     stage · address · protocol · port → whose source is hidden
//	endpoint   0 · index · pool → address · port       of pools without affinity
//	drawn      0 · index · pool → token                of pools with affinity: a backend's token,
//	member     0 · token · pool → address · port       and where it is
//	affinity   client · pool → token                   written by packets, times out
//	hairpin    address · address                       of backends on this node
//	permitted  address · protocol · port · client      of frontends that let only some in
//	unallocated  0 · address                           that only Services have, and none has
//	entry, admitted, side   0 · code → the chain that does what is next
//	hide                    0 · whose source is hidden → the chain that hides it
//
// A node port stands as address 0, at other nodes' addresses in a stage of its own. A packet that opens a connection
// finds its frontend in service (stage entry), and a chain named for what is next: pick4-10 draws one of ten slots (a
// backend has as many as it weighs), restricted4 looks at the client first (stage admitted), split4 tells clients
// inside from those outside (stages inside and outside), refuse answers that nothing is there. What matches no frontend
// is rejected at a ClusterIP (stage unmatched, without protocol and port) and dropped at an unallocated address.
// Packets of established connections see none of it, and no packet is ever marked: on the way out leave4 finds the
// frontend again by the connection's original destination.
//
// A pool whose backends take turns has a chain of its own, since it is the rule that counts; the verdict maps then have
// one more entry for each Service that asks for that.
//
// Maps to verdicts are otherwise small and constant: the kernel checks all chains they lead to whenever one changes
// (nft_table_validate). What a Service needs is only ever an element of a map to plain values, written in about 1 µs.
//
// Kernel: Linux 5.13 or later (reject at prerouting is 5.9's, sets of ranges in several fields 5.6's, forgetting an
// element from a rule 5.4's; no part of it was tried below 6.18 yet).
package nftables
