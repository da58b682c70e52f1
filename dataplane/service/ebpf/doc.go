// Package ebpf is the service data plane of programs in the kernel. At the hooks of a cgroup, a client on this node is
// translated once, at connect(), and a datagram of a socket that isn't connected when it is sent: its packets need no address
// translation, and a program that asks who it talks to hears the Service's address. At the node's devices, packets are
// translated of whoever no hook sees: clients outside, network namespaces outside the cgroup, raw sockets; and what a socket
// can't do: hide a pod's source, let in some sources only, stay silent. No connection is tracked by the kernel.
//
// It serves TCP and UDP. SCTP, whose checksum covers more than a program may read, is left to a plane that stands behind (Leaves),
// and so are all packets where the kernel is too old for programs at devices.
//
// There are, below a folder in the BPF file system named for the node's network namespace,
//
//	maps-…/frontends   address · port · protocol → pool inside, pool outside, who is left to others
//	maps-…/pools       index → pool, its extent, whose turn it is, counts  (memory, shared with the kernel)
//	maps-…/slots       an extent: a header, backends, choices              (memory, shared with the kernel)
//	maps-…/places      prefix → counts as pods, takes node ports, is a node's
//	maps-…/pod_interfaces   the names of pods' interfaces, where pods are known by these
//	maps-…/unmatched   prefix → it rejects, or drops, what opens a flow and matches no frontend
//	maps-…/permitted   entry · prefix → it lets these clients in
//	maps-…/changes     counts changes of pools and frontends                (memory, shared with the kernel)
//	state/…            affinity, connected sockets, flows                  (written by traffic, whatever the layout)
//	links/…            the hooks
//	devices/…          the programs for packets, and their links to devices
//	lo-…               a setting of the loopback device that we changed
//
// A pool that changes is written beside itself, in a new extent, and one 64-bit word makes it true: a client sees the old
// pool or the new one, never part of each. Extents are used again only when no program that runs may still look at them.
// Maps of another version's layout are left to its programs until ours have all the facts; then each hook changes over.
//
// A flow of packets is up to four ways in two maps, each under the tuple of the packets that take it: where their destination
// is changed, at ingress, and where their source is, at egress (bpf/packets.c). Between the two the kernel routes, filters and
// tells of a path's MTU as ever. Ways last as long as connection tracking's by default; full maps lose those that were used
// longest ago. A UDP flow whose backend is none any more is given another at its next packet: nobody looks through flows.
// A client is hidden behind a random port that no other flow to that backend and no socket of the node has.
// Packets of the node itself are translated where they leave, and come in again by the loopback device: for that its settings
// accept_local and route_localnet are 1 while the programs stand there. Devices that come and go are followed.
//
// Where pods are known by their interfaces, a socket is a pod's if the node's end of its namespace's first interface (veth or
// netkit) is one, or the bridge or bond above that. Where it isn't, or the socket is bound to an address, what serves pods and
// others differently is left to packets: these show what they come in by.
//
// Where a frontend says so (Direct), a client outside is shown to a backend on another node, and that node's programs answer it: they learn the
// entry from the packet (bpf/direct.h), which docs/ebpf.md says more of.
//
// Our programs are the first at a device, and pass on every packet that they don't redirect or drop: others' come after them.
//
// Limits: a fragment that comes before its packet's first is not translated; a node process that no hook serves gets no answer
// from a ClusterIP where rp_filter is strict (1); a UDP port from which a client asks an entry and its backend at once is
// answered as by the one that it asked last; a node process that asks an entry at an address of its own node, where that is left to packets, may not
// send datagrams longer than a packet: to the loopback device they are none, and what the kernel tells a connected socket of the
// path behind it, it doesn't heed.
//
// A client, for affinity and for schedulers that hash it, is an address as in verdict: the one that its socket is bound to,
// or else the first of its network namespace, which for a pod is the pod's. The node's own processes are one client, unless
// bound: which address they send from is not known before they are routed.
//
// Kernel: Linux 5.14 or later with BTF (before 5.18, what has no endpoint is refused with EPERM, not ECONNREFUSED); for packets at
// devices, 6.7. Tried on 6.1, 6.12 and 6.18.
package ebpf
