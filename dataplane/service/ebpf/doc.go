// Package ebpf is the service data plane of programs in the kernel. At the hooks of a cgroup, a client on this node
// is translated once, at connect(), and a datagram of a socket that isn't connected when it is sent: its packets need
// no translation, and getpeername() returns the Service's address. At the node's devices, packets are translated of
// clients that no hook sees: external ones, those in network namespaces outside the cgroup, raw sockets; and where a
// socket can't do it: masquerade a pod, restrict sources, drop. The kernel tracks no connection.
//
// It serves TCP and UDP. SCTP, whose checksum covers more than a program may read, is left to a fallback plane
// (Leaves), and so are all packets where the kernel is too old for programs at devices.
//
// Below a folder in the BPF file system named for the node's network namespace are, by the names of pins and of maps,
//
//	maps-…/frontends       fl_services     address · port · protocol → internal, external pool, fallback origins
//	maps-…/pools           fl_pools        index → pool, its extent, round-robin counter, counts   (mapped memory)
//	maps-…/slots           fl_backends     an extent: a header, backends, choices                  (mapped memory)
//	maps-…/places          fl_prefixes     prefix → counts as pods, serves node ports, is a node's
//	maps-…/pod_interfaces  fl_pod_ifaces   names of pods' interfaces, where pods are known by these
//	maps-…/unmatched       fl_unmatched    prefix → rejects, or drops, what opens a flow and matches no frontend
//	maps-…/permitted       fl_allowed_src  entry · prefix → an allowed source range
//	maps-…/changes         fl_changes      counts changes of pools and frontends                   (mapped memory)
//	maps-…/pods            fl_pods         pods' devices: the fast path
//	maps-…/fl_hooks        fl_hooks        functions of netfilter's hooks by their roles: the fast path
//	maps-…/uplinks         fl_uplinks      devices by which other Nodes are reached
//	state/…                fl_affinity, fl_nat_dst, fl_nat_src, …: written by traffic, whatever the layout
//	links/…                the hooks
//	devices/…              the programs for packets, and their links to devices
//	lo-…                   a setting of the loopback device that we changed
//
// Pins have the names that maps once had: so an upgrade and a downgrade find each other's (pinNames in bpf/service and
// bpf/device).
//
// A pool that changes is written beside itself, in a new extent, and one 64-bit word makes it true: a client sees the
// old pool or the new one, never part of each. Extents are used again only when no running program may still read
// them. Maps of another version's layout are left to its programs until ours have all the facts; then each hook
// changes over.
//
// A flow of packets has up to four entries in two maps, each under the tuple of the packets that it translates: their
// destination at ingress (fl_nat_dst), their source at egress (fl_nat_src; bpf/device/nat.h). In between the kernel
// routes, filters and reports path MTUs as ever. Entries expire as connection tracking's do by default; full maps
// evict the least recently used. A UDP flow whose backend is gone is assigned another at its next packet: flows are
// never scanned for that. A client is masqueraded with a random port that no other flow to that backend and no socket
// of the node has. Packets of the node itself are translated where they leave, and enter again by the loopback
// device: for that its settings accept_local and route_localnet are 1 while the programs are attached there. Devices
// that come and go are followed.
//
// Where pods are known by their interfaces, a socket is a pod's if the node's end of its namespace's first interface
// (veth or netkit) is one, or the bridge or bond above that. Where it isn't, or the socket is bound to an address,
// entries that serve pods and others differently are left to packets: these show their interface.
//
// With direct server return (model.Frontend.DSR), an external client is not masqueraded to a backend on another
// node, and that node's programs answer it: the packet carries the entry (bpf/device/dsr.h;
// docs/how-to/direct-server-return.md).
//
// Our programs are the first at a device, and pass on every packet that they don't redirect or drop: others' follow.
//
// Limits: a fragment that arrives before its packet's first is not translated; a node process that no hook serves
// gets no reply from a ClusterIP where rp_filter is strict (1); replies at a UDP port from which a client sends to an
// entry and to its backend at once are translated as those of the later; a node process that sends to an entry at an
// address of its own node, where that is left to packets, may not send datagrams longer than a packet: the loopback
// device doesn't fragment them, and a connected socket ignores path MTU errors from behind it.
//
// A client, for affinity and for schedulers that hash it, is an address as in verdict: the one that its socket is
// bound to, or else the first of its network namespace, which for a pod is the pod's. The node's own processes are
// one client, unless bound: their source address is not known before routing.
//
// Kernel: Linux 5.14 or later with BTF (before 5.18, connect() without a backend returns EPERM, not ECONNREFUSED); for
// packets at devices, 6.7. Tried on 6.1, 6.12 and 6.18.
package ebpf
