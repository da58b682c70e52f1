// Package userspace is the service data plane that proxies traffic itself, by plain sockets: a listener where a Service
// is, a connection of its own to a backend, and splice(2) between the two. It needs no netfilter and no eBPF.
//
// # The network namespace
//
// A listener on a Service's address and port in the node's own network namespace would keep every process of the node
// from taking that port on all addresses (bind(2) refuses it either way round): on most nodes a process does so on some
// Service's port, be it 443 or 9100. So the plane listens in a network namespace without a name, the netns, in which
// every address is local, and a veth pair leads there. It goes with the process. The price is one more hop for packets
// between client and plane. Connections to backends are made in the node's namespace, from the node's address.
//
//	node:  rule protocol · port → table of that protocol and port: Service address → netns
//	netns: a socket at address · port; the client's address is seen as it is
//
// Rules are one for each protocol and port in use, whatever the number of Services, and routes are exact. Packets to a
// ClusterIP that none of them matches are led to the netns by a rule behind those for local addresses: nothing listens
// there, so it rejects them (and ignores ICMP echo requests). In the same table, routes drop packets to unallocated
// addresses of ServiceCIDRs. Rules for ports come before the kernel's own for local addresses (which keeps its priority
// 0, and is put behind ours), so that node ports and Service addresses that the node itself has lead to the netns as
// well. The kernel asks rule after rule for every packet that it routes.
//
// A rule sees no connection: a packet to a node port or host port that replies to a connection of the node's own is led
// to the netns, too. What the node masquerades comes back by netfilter's translation, before routing.
//
// ICMP shows no port. Errors for connections of the netns don't get there; where a path takes smaller packets than it
// says, the netns's TCP finds out by itself (RFC 4821, tcp_mtu_probing). Fragments of datagrams are led by the address
// alone, and only those to clusterIPs: any other address may be a host's. Answers of UDP leave in packets that every
// path takes, in IPv6 of 1280 bytes. A client of IPv6 is told by ICMP that its datagram was too long for the path to
// the backend.
//
// # Sockets
//
// Each entry with somewhere to go has a socket of its own (per address for node ports), since that alone makes
// rejections the kernel's own: no socket, and it answers a SYN with a reset and a datagram with ICMP port unreachable.
// One wildcard socket for each port would save most of the memory, but accept connections that it must then reset.
// Measured with 9,000 entries of ten backends: 5 KiB of kernel memory and 80 µs of processor time for each. Where
// some clients must meet silence (permitted sources, sides that drop), the listener has a filter of classic BPF,
// which keeps their SYNs out. One case shows: where permitted sources are named and no backend is there, those let in
// are accepted, then reset. UDP rejections of that kind, and those of backends, are ICMP messages that the plane itself
// sends.
//
// One loop per processor waits by epoll and owns what it proxies; there is no goroutine per Service or connection. TCP:
// a stream of which 1 MiB was read of late, 64 KiB or more at a time, gathers for 200 µs, or until there are 2 MiB,
// before it is read again; half-closed connections stay so; a reset is proxied as a reset, at once where nothing can
// move; at most 1 MiB waits in each direction; where the node has BBR, ways to backends have Cubic; a backend that
// refuses or does not answer in 7 seconds is passed over for another. UDP: a socket for each client and entry, ended
// after 30 seconds of silence, 120 once answered, batches of 32.
//
// The node's own TCP sends into the netns in pieces of up to 192 KiB (BIG TCP, Linux 6.3; IPv4 alone), three times as
// long as usual: what each takes beyond its bytes is time of the processor where client and netns meet, which is the
// busy one. On an AMD EPYC with BBR that made a stream from 0.86 (0.84 to 0.88) to 1.32 × direct (1.25 to 1.38), at
// 1.12 in place of 1.57 times its processor time; with Cubic, where direct stays in one processor's cache and has 40
// Gbit/s, from 0.49 to 0.59 (`fairlead lab run centurylink --quick --modes userspace,iptables --rounds 60`; without,
// userspace alone; with Cubic, userspace alone and 21 rounds). Clients in pods send pieces as long as their own devices
// take.
//
// What else a stream costs beyond its way twice through the kernel is its memory: the kernel frees a packet's pages on
// the processor that made its header (net/core/skbuff.c, skb_attempt_defer_free), which for what is spliced is ours,
// not the one where the client takes pages; so these come from further away each time. To read and write in place of
// splicing mends that for two copies of ours, and came out alike. What was tried without gain, with pieces of 64 KiB: a
// kernel thread for the netns's device (threaded NAPI), another processor for what comes in there (RPS), less room for
// what is sent or comes in, to wait by looking again (100 to 1000 µs), to keep system calls from Go's scheduler, BBR to
// backends. With Cubic, packets freed where they are read (net.core.skb_defer_max 0) help, but that is the whole
// kernel's setting, so not ours to change.
//
// # Changes
//
// A TCP connection goes on when its backend leaves the pool, and when its frontend goes: then a rule of its own keeps
// its packets coming, until it ends; what a killed process leaves of those goes when the next makes its netns. A UDP
// flow ends when its endpoint serves no more, or its client is no longer allowed. Affinity and counts of connections
// survive changes of other backends. All of it ends with the process (Capabilities.Ends): rules stay and lead nowhere,
// until a new process has its netns.
//
// File descriptors: the limit is raised as far as it may be, and 512 are left to everything else. A TCP connection has
// two, and up to four more while bytes wait in it; a UDP flow has one. Of the first a frontend may have a quarter of
// the limit, a client address an eighth, the node's own addresses together a half. Beyond that a connection is reset at
// once and a datagram dropped; both are counted, and the bound is logged once a minute. When all run out, clients wait
// in the kernel's queues, and their frontends are errors until there are some again.
package userspace

import (
	"fairlead.dev/fairlead/dataplane/service"
	"fairlead.dev/fairlead/model"
)

// tableEntries is how many entries of Maglev's table the plane wants for each backend.
const tableEntries = 1000

// Capabilities is what the plane supports. It refuses SCTP, since bytes alone can be proxied between two sockets and
// associations have messages and streams, and the one port that the kernel's routing rules can't name
// (fib_rule_port_range_valid).
var Capabilities = model.Capabilities{
	Name:       "userspace",
	Schedulers: model.AllSchedulers,
	Unserved: []model.Remark{
		{ID: "port-65535", Text: "the kernel's routing rules, by which the userspace plane is reached, can't name port " +
			"65535: choose another port",
			About: &model.Packets{Port: 65535, Addresses: true}},
		{ID: "sctp", Text: "the userspace plane proxies bytes from socket to socket, and SCTP's messages and streams " +
			"would be lost on the way: choose another mode for SCTP",
			About: service.Over(model.SCTP)},
	},
	Long: []model.Remark{
		{ID: "fragments-unmatched", Text: "fragments of datagrams to a clusterIP are led to the plane by that alone, " +
			"whatever their port",
			About: &model.Packets{Unmatched: true}},
		{ID: "fragments", Text: "fragments show no port by which they could be led to its socket",
			About: &model.Packets{Protocols: []model.Protocol{model.UDP}, NotVia: model.ViaClusterIP}},
		{ID: "path-mtu", Text: "its connections hear of no ICMP error: TCP finds out by itself what a path takes, in seconds",
			About: &model.Packets{Protocols: []model.Protocol{model.TCP, model.SCTP}}},
	},
	Unsupported: model.Unsupported{NoIPVLAN: service.PodsBypass, NoDirect: service.RepliesReturn,
		NoRemote: "its sockets are bound to this node's addresses"},
	MasqueradesAll: true,
	PreDNAT:        true,
	Capacity:       model.Capacity{TableEntriesPerBackend: tableEntries},
	Ends:           true,
	Remarks: []model.Remark{service.RemarkRemote,
		{ID: "pod-interfaces", Text: "If pods are known by interface (detectLocalMode BridgeInterface, " +
			"InterfaceNamePrefix), a client counts as a pod if the main routing table leads to it by such an interface."},
		{ID: "echo", Text: "ICMP echo requests to a ClusterIP are dropped; other modes reject them."},
		{ID: "masquerade", Text: "Endpoints see the node's address instead of the client's.", About: service.All()},
		{ID: "policies", Text: "Network policies are evaluated by the agent before it connects: denied TCP connections are " +
			"reset. An endpoint's policies on another node see the address of the client's node, not the client's.",
			About: service.All()},
		{ID: "ends", Text: "Connections run through the agent: they end with it, and session affinity is forgotten.",
			About: service.All()},
		{ID: "sctp", Text: "SCTP is not served.", About: service.Over(model.SCTP)},
		{ID: "twice", Text: "With externalIPs Any, a Service at a pod's address receives what is sent to that pod's " +
			"Service: the agent's own connections are translated again."},
		{ID: "bounds", Text: "A frontend may use a quarter of the process's file descriptors, a client address an eighth: " +
			"further connections are reset, further datagrams dropped."},
		{ID: "bbr", Text: "If the node's TCP uses BBR, connections to endpoints use CUBIC: pacing costs a stream a " +
			"third of its throughput, and paths within a cluster are short.", About: service.Over(model.TCP)},
		{ID: "fragments", Text: "Fragmented UDP datagrams reach ClusterIPs only: a fragment shows no port, and other " +
			"addresses may be a host's.",
			About: &model.Packets{Protocols: []model.Protocol{model.UDP}, NotVia: model.ViaClusterIP}},
		{ID: "forwarding", Text: "The node must forward packets (net.ipv4.ip_forward, net.ipv6.conf.all.forwarding), also " +
			"to and from interface " +
			Veth + ", which a firewall with a drop policy must allow."},
		{ID: "rules", Text: "Routing rules are evaluated one by one: hundreds of different Service ports and node ports " +
			"cost time for each packet, and so does the removal of frontends with thousands of open connections."},
		{ID: "node-ports", Text: "A node port takes the replies to the node's own connections from that port: keep " +
			"net.ipv4.ip_local_port_range and programs that choose their source ports, such as DNS resolvers, away from node " +
			"ports, or list these in net.ipv4.ip_local_reserved_ports.", About: &model.Packets{NodePorts: true}},
		{ID: "rp-filter", Text: "If net.ipv4.conf.all.rp_filter is 1, rejections of UDP datagrams don't leave the node: " +
			"clients see a timeout.",
			About: service.Over(model.UDP)},
	},
}
