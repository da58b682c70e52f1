// Package nftables is the service data plane that tells nf_tables about frontends: one table of the inet family, a
// constant number of maps, and a number of chains that follows the sizes of pools, never the number of Services.
//
// For each family (4 and 6) there is
//
//	service   stage · address · protocol · port → what is next, pool, whose source is hidden
//	endpoint  pool · index → address · port
//	member    pool · address · port              of pools with affinity
//	affinity  client · pool → address · port     written by packets, times out
//	hairpin   address · address                  of backends on this node
//	sources   address · protocol · port · client of frontends that let only some in
//	entry, admitted, side   what is next → the chain that does it
//	hide                    whose source is hidden → the chain that hides it
//
// A node port stands as address 0. A packet that opens a connection finds its frontend in service (stage entry), and a
// chain named for what is next: pick4-10 draws one of ten backends, restricted4 looks at the client first (stage
// admitted), split4 tells clients inside from those outside (stages inside and outside), refuse answers that nothing is
// there. Packets of established connections see none of it, and neither does a mark on any packet change: on the way
// out leave4 finds the frontend again by the connection's original destination.
//
// Maps to verdicts are small and constant: the kernel checks all chains they lead to whenever one changes
// (nft_table_validate). What a Service needs is only ever an element of a map to plain values, written in about 1 µs.
package nftables
