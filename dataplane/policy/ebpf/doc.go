// Package ebpf is the policy data plane of a program in the kernel, at netfilter's hooks forward, input and output
// (BPF_PROG_TYPE_NETFILTER, Linux 6.4): behind the translation of destinations and before that of sources, with every
// mode of Services. No program is made for a policy: pods, policies and peers are entries of maps
// (bpf/policy/policy.h). No connection is tracked by the kernel; the program has flows of its own.
//
// Below a folder in the BPF file system named for the node's network namespace are
//
//	maps-…/fl_verdicts      peer table · identity → decision
//	maps-…/fl_policy_ports  ruleset · protocol · port → peer table, and what it decides otherwise
//	maps-…/fl_port_ranges   ruleset · protocol · prefix of ports → the same
//	maps-…/fl_exempt        prefix → of the node itself, or evaluated after its translation
//	maps-…/fl_peers         address → identity
//	maps-…/fl_peer_nets     prefix → identity
//	maps-…/fl_subjects      address of a pod on this node → rulesets and their default peer tables
//	maps-…/fl_unknown_pods  prefix of this node's pods, where pods that aren't known are dropped
//	maps-…/fl_devices       a pod's own device → an address of each family that may come in by it
//	maps-…/fl_sources       a pod's own device · prefix of other addresses that may
//	state/fl_flows-…        connections that were accepted, the least recently used go first
//	state/fl_policy_state-… generation and flags
//	state/fl_recorded-…     new connections by client, server and port, while `fairlead flows record` reads them
//	state/fl_denials-…      the events: at most 100 in a second and 200 at once
//	hooks/                  the links, and the programs
//
// Where Services' mode ebpf has programs at devices, these call a second program on the same maps, which evaluates a
// packet where it enters the node and redirects it to its pod, bypassing the hooks (the fast path, docs/adr/0028): as
// long as the only hook in forwarding is ours. Whichever of both planes comes second joins them (bpf.Folders.Join).
//
// A flow remembers the direction of its first packet and the generation at which it was evaluated. Every Write that
// changes an entry raises the generation afterwards, and each flow is evaluated again at its next packet, from either
// end, in its own direction. One that is refused is cut: its packets are dropped as long as the flow is known, so that
// neither end picks it up in the other direction; in the fast path TCP is reset at both ends, unless entries were being
// written meanwhile. Without a model.PolicyNode.CutMark flows are never evaluated again;
// which bit it is doesn't matter. A TCP packet with SYN alone is always evaluated as a new connection, also by the
// tuple of a known flow.
//
// A flow remembers by which device packets of each end came in last. What comes in by another one, what is of no flow,
// and the next packet after a change is checked for its source, before anything else: so that is no lookup more for the
// other packets of a flow, and no pod sends as an end of another's. Where an upgrade has another form of flows, those
// that run are picked up as at the first start.
//
// TCP packets in mid-stream of an unknown connection: for a minute after the program was attached where none was, they
// are accepted if either direction is allowed; afterwards, and for flows that a full map has forgotten, their own
// direction must be allowed, and that of the likely client, which is the end with the higher port.
//
// An ICMP error about a packet of a known flow is accepted if it goes to that packet's source: where a hook sees them,
// both are translated. Echo replies alone are the other direction of an echo request's flow. All other ICMP is
// evaluated message by message.
//
// Netfilter sees whole datagrams where connection tracking is on. Elsewhere a later fragment has the ports of the first
// one; one that arrives before it is dropped if an end of it has policies.
//
// No packet is accepted by a mixture of what the maps held before a Write and hold after it. Entries are written one
// after another, and the kernel uses the memory of a replaced one again at once, while a program may still read it. So
// a program compares the state's generation and flags before and after an evaluation, and evaluates again until they
// are the same, and while entries are being written, until two evaluations have found the same entries; after four it
// drops the packet.
//
// A map that is full refuses the fact by name: see model.FailClosed for what becomes of the pods that it decides about.
package ebpf
