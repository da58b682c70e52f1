// Package ebpf is the service data plane for clients on this node: programs at the hooks of a cgroup translate a
// connection once, at connect(), and a datagram of a socket that isn't connected when it is sent. There is no address
// translation of packets, and no connection is tracked. A program that asks who it talks to hears the Service's address.
//
// It serves TCP and UDP of every process of the node and its pods, and takes only what it can do exactly. What a socket can't
// do is left as it is, to the plane that serves the node's packets: hide a pod's source, stay silent, let in some sources
// only, SCTP, clients outside the cgroup. So it does not stand alone: a second plane, for packets, stands behind it and knows
// the same frontends.
//
// There are, below a folder in the BPF file system named for the node's network namespace,
//
//	maps-…/frontends   address · port · protocol → pool inside, pool outside, who is left to others
//	maps-…/pools       index → pool, its extent, whose turn it is          (memory, shared with the kernel)
//	maps-…/slots       an extent: a header, backends, choices              (memory, shared with the kernel)
//	maps-…/places      prefix → counts as pods, takes node ports
//	maps-…/counts      index of a pool → connections, refusals             (memory, shared with the kernel)
//	state/…            affinity, connected sockets, flows                  (written by traffic, whatever the layout)
//	links/…            the hooks
//
// A pool that changes is written beside itself, in a new extent, and one 32-bit word makes it true: a client sees the old
// pool or the new one, never part of each. Extents are used again only when no program that runs may still look at them.
// Maps of another version's layout are left to its programs until ours have all the facts; then each hook changes over.
//
// A client, for affinity and for schedulers that hash it, is an address as in verdict: the one that its socket is bound to,
// or else the first of its network namespace, which for a pod is the pod's. The node's own processes are one client, unless
// bound: which address they send from is not known before they are routed.
//
// Kernel: Linux 5.14 or later with BTF (before 5.18, what has no endpoint is refused with EPERM, not ECONNREFUSED). Tried on 6.12
// and 6.18.
package ebpf
