/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The structs of the maps that the programs and the agent share. Go's types of the same names are generated from here.
 * Addresses are 16 bytes for both families, IPv4 as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2); addresses and ports are in
 * network byte order.
 */
#pragma once

#include <linux/types.h>

struct address {
	__be32 word[4];
};

/* An address, protocol and port of a Service. A node port has the address 0.0.0.0 (::ffff:0:0) or ::. */
struct entry {
	struct address address;
	__be16 port;
	__u8 protocol; /* IPPROTO_TCP or IPPROTO_UDP */
	__u8 zero;
};

/* Where a client is, a bit each: model.Origin. */
enum origin {
	FROM_NODE = 1 << 0,
	FROM_POD = 1 << 1,
	FROM_EXTERNAL = 1 << 2,
};

/* How clients of an entry are served. */
struct frontend {
	__u32 internal; /* index in fl_pools, for clients of the node and pods */
	__u32 external; /* the same for others */
	__u8 fallback;	/* origins that the socket hooks leave to programs at devices or another plane */
	__u8 by_origin; /* 1: pods and external clients are served differently, so the client's address must be known */
	__u8 drop;	/* origins whose packets are dropped where there is no backend; others are rejected */
	__u8 masquerade; /* origins whose source address is masqueraded */
	__u8 node_port;	 /* 1: a node port */
	__u8 restricted; /* 1: only clients in fl_allowed_src are served */
	__u8 dsr;	 /* origins whose clients the backend's node answers directly: model.Frontend.DSR */
	__u8 fast;	 /* origins of the node and of pods that connect_fast serves */
};

/*
 * A pool of backends, in the array fl_pools. What may change stands in fl_backends, in an extent of its own: a header,
 * backends, choices. A new version is written beside the old one, then extent and fast are set by one write: a client
 * sees either the old version or the new one.
 */
struct pool {
	__u64 id;     /* model.Pool.ID, 0: none */
	__u32 extent; /* where the extent begins in fl_backends, 0: none */
	__u32 fast;   /* number of backends where nothing but their weights counts, else 0; written together with extent
		       */
	__u32 next;   /* round-robin counter, from a random number; where nothing but weights counts, a random seed */
	__u32 fallback; /* origins that another plane serves at one of the pool's entries: it alone keeps their affinity
			 */
	/* TCP connections and UDP flows: */
	__u64 connections; /* assigned to a backend */
	__u64 refused;	   /* without a backend */
};

/* The two halves of extent and fast, read as one word: */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define EXTENT(word) ((__u32)(word))
#define FAST_COUNT(word) ((__u32)((word) >> 32))
#else
#define EXTENT(word) ((__u32)((word) >> 32))
#define FAST_COUNT(word) ((__u32)(word))
#endif

enum scheduler {
	RANDOM,
	ROUND_ROBIN,	  /* by pool.next */
	SOURCE_HASH,	  /* by the client's address */
	DESTINATION_HASH, /* by the entry's address */
	/* By open sockets, see least.h. */
	LEAST_CONN,	     /* the fewest */
	WEIGHTED_LEAST_CONN, /* the fewest in proportion to the backend's weight */
	SHORTEST_DELAY,	     /* the same, with the new one included */
};

struct header {
	__u32 count;	/* number of backends, which follow, sorted by address and port */
	__u32 choices;	/* number of choices, which follow those; 0: each backend has its threshold and alias */
	__u32 affinity; /* seconds */
	__u8 scheduler;
	__u8 model; /* model.Scheduler, for the agent */
	__u8 protocol;
	__u8 flags; /* enum header_flag */
	__u64 id;   /* the pool's */
};

enum header_flag {
	HASH_PORT = 1 << 0, /* SOURCE_HASH includes the client's port */
	UNSELECTED =
		1 << 1, /* behind the choices: a header with a count, and that many endpoints that get no new flow */
};

struct backend {
	struct address address;
	__be16 port;
	__u16 weight; /* model.Backend.Weight, and LOCAL or REMOTE */
	/* Walker's alias method: of 65536 values, those up to threshold select this backend, the others its alias. */
	__u16 threshold;
	__u16 alias; /* index among the backends */
};

/* In a backend's weight: where it runs. */
enum {
	LOCAL = 1 << 15,     /* on this node, so its own packets may return to it */
	REMOTE = 1 << 14,    /* on another node of the cluster, which may answer clients directly */
	WEIGHT = REMOTE - 1, /* the weight alone */
};

#define CHOICES_PER_SLOT 12

/* One slot of an extent is any of these. */
union slot {
	struct header header;
	struct backend backend;
	__u16 choice[CHOICES_PER_SLOT]; /* indices among the backends */
};

/* A key of the maps of prefixes. The longest prefix counts. */
struct prefix {
	__u32 length; /* of 128 */
	struct address address;
};

/* What the addresses of a prefix are, in fl_prefixes. */
enum prefix_flag {
	PREFIX_PODS = 1 << 0,	     /* sources that count as pods */
	PREFIX_NODE_PORTS = 1 << 1,  /* addresses of this node at which node ports are served */
	PREFIX_NODES = 1 << 2,	     /* addresses by which the cluster's nodes know each other */
	PREFIX_BEHIND_NODE = 1 << 3, /* sources reached through this node alone: model.Node.Behind */
};

/* The interfaces of pods: packets that enter by them count as pods'. */
struct pod_interfaces {
	char name[16];
	__u32 length; /* number of bytes of an interface's name that must match, the final zero included for a whole
			 name; 0: none */
};

/* A client with session affinity to a pool. */
struct affinity_key {
	struct address address; /* zero for processes of the node */
	__u64 pool;
};

struct addr_port {
	struct address address;
	__be16 port;
	__u16 zero;
};

/* The same, padded to a multiple of 8 bytes. */
struct addr_port_pad {
	struct address address;
	__be16 port;
	__u16 zero;
	__u32 zeros;
};

struct affinity_entry {
	struct addr_port_pad backend;
	__u64 seen; /* nanoseconds since boot */
};

/* A backend of a pool. */
struct endpoint {
	struct addr_port_pad backend;
	__u64 pool;
};

/* The number of sockets connected to an endpoint, where the pool's scheduler counts them. */
struct load {
	__u64 open;
	__u64 since; /* nanoseconds since boot: distinguishes this count from an earlier one of the same endpoint */
};

/* What a socket is counted for, until it is closed or connects elsewhere. */
struct counted_socket {
	struct endpoint endpoint;
	__u64 since; /* of the load */
};

/* The entry that a socket connected or sent to, and the backend that it got. */
struct flow {
	struct addr_port_pad entry, backend;
};

/*
 * What a TCP socket is connected to, in the array fl_peer_names at its cookie modulo PEER_NAMES: until it is closed,
 * or, if getpeername() was never called for it, until another socket uses the slot. A slot whose socket was queried is
 * kept; the other socket's peer name is then stored with that socket itself (fl_sk_peer). A slot is as long as a cache
 * line of most processors: each connection writes one.
 */
struct peer_name {
	__u64 cookie; /* 0: free */
	__u64 namespace;
	__u64 pool;
	struct address entry, backend;
	__be16 entry_port, backend_port;
	__u32 queried; /* 1: getpeername() was called; never for sockets of the kernel, such as MPTCP's, whose close
			  isn't seen */
};

#define PEER_NAMES (1 << 16)

/* A connected UDP socket, by its cookie, from connect() until it is closed. */
struct connected {
	struct flow flow;
	__u64 namespace; /* the network namespace's cookie */
	__u64 pool;
};

/* A network namespace other than the node's and a family of addresses. */
struct netns_key {
	__u64 namespace;
	__u32 family; /* 4 or 6 */
	__u32 zero;
};

/* The address that its sockets send from, cached. */
struct netns_addr {
	struct address address;
	__u64 expires; /* nanoseconds since boot */
	__u32 flags;   /* enum prefix_flag */
	__u32 zero;
};

/* What happens to a packet that opens a flow and matches no frontend, by its destination. */
enum unmatched_action {
	UNMATCHED_REJECT = 1, /* a ClusterIP */
	UNMATCHED_DROP = 2,   /* an address that no Service has */
};

/* An allowed source range of an entry: the prefix covers all of the entry, then the client's address. */
struct allowed_source {
	__u32 length; /* of 288 */
	struct entry entry;
	struct address client;
};

/* Source and destination of a packet. */
struct tuple {
	struct address source, destination;
	__be16 sport, dport;
	__u8 protocol;
	__u8 zero[3];
};

enum nat_state {
	SEEN_REPLY = 1 << 0,	   /* conntrack: IPS_SEEN_REPLY */
	FIN_SENDER = 1 << 1,	   /* TCP: the sender of this entry's packets has sent a FIN, */
	FIN_PEER = 1 << 2,	   /* or the other side has */
	RESET = 1 << 3,		   /* TCP: a RST was seen */
	DIR_ORIGINAL = 1 << 4,	   /* packets of a client to an entry */
	DIR_REPLY = 1 << 5,	   /* packets of a backend to a client */
	MASQ_PENDING = 1 << 6,	   /* the source is to be masqueraded, with a port that isn't chosen yet */
	NODE_CLIENT = 1 << 7,	   /* replies to a client on this node */
	PORT_ALIAS = 1 << 8,	   /* the backend sees the client at another port, since another flow has its own */
	DSR = 1 << 9,		   /* of a flow with direct server return: the backend's node answers the client */
	DSR_LEARNT = 1 << 10,	   /* replies of a backend with direct server return, on the backend's node */
	MASQUERADED = 1 << 11,	   /* of a flow whose client is masqueraded: its packets carry NAT_MARK both ways */
	MARK_SEEN = 1 << 12,	   /* and one with the mark was seen: packets without it belong to another flow, */
	MARK_STRIPPED = 1 << 13,   /* unless another program removes the mark */
	UNASSURED = 1 << 14,	   /* TCP: the handshake isn't complete (conntrack: not IPS_ASSURED) */
	FIN_ACKED = 1 << 15,	   /* TCP: a packet was seen since the last FIN */
	CLIENT_UNACKED = 1 << 16,  /* TCP: data of the client isn't acknowledged, */
	BACKEND_UNACKED = 1 << 17, /* or data of the backend */
	DIRECT = 1 << 18,	   /* a pod's replies to a client outside the cluster: they are not masqueraded */
	POD_FLOW = 1 << 19,	   /* of a pod's flow out of the cluster, which is masqueraded */
};

/* What the addresses of a prefix are to masquerading, in fl_masq_ranges. */
enum masq_range {
	RANGE_PODS = 1 << 0,   /* this node's pods: what they send out of the cluster gets the node's address */
	RANGE_INSIDE = 1 << 1, /* destinations that see pods' own addresses */
};

/* How the packets of a tuple are translated, in fl_nat_dst or fl_nat_src. */
struct nat_entry {
	struct addr_port to;   /* replaces their destination, or their source */
	struct addr_port from; /* NODE_CLIENT: replaces their source, too. PORT_ALIAS: the client's end */
	__u32 seen;	       /* seconds since boot */
	__u32 change;	       /* DIR_ORIGINAL: the value of fl_changes at which the backend was last checked */
	__u32 state;	       /* enum nat_state */
	__u32 origin;	       /* DIR_ORIGINAL: the client's */
};

/* A fragmented packet, and the ports that its first fragment has. */
struct fragment {
	struct address source, destination;
	__u32 id;
	__u32 protocol;
};

struct ports {
	__be16 sport, dport;
};

/* Why packets with a port, or to an address, may need translation, a bit each: most packets need no other lookup. */
enum port_bit {
	BIT_SERVICE = 1 << 0,	   /* there are frontends; set by the agent */
	BIT_NODE_PORT = 1 << 1,	   /* there are node ports; likewise */
	BIT_CLIENT = 1 << 2,	   /* clients' flows go there */
	BIT_BACKEND = 1 << 3,	   /* backends with flows have that port */
	BIT_MASQ_BACKEND = 1 << 4, /* flows of masqueraded clients go there */
	BIT_MASQ_PORT = 1 << 5,	   /* clients are masqueraded with that port, or clients of this node have it */
	BIT_SERVICE_NET =
		1 << 6, /* by the hash of a network: it has addresses that only Services have; set by the agent */
};

/* The bits that programs set exist twice, once for each generation: those of generation 1 are shifted by this. */
#define BIT_GENERATION_SHIFT 8

/*
 * A bitmap of 16 bits for each port, by its number in network byte order, or for each hash of an address. Bits are set
 * by atomic operations on whole words. Programs set bits of the current generation and read those of both. Periodically
 * the agent makes the other generation the current one, sets its bits for all NAT entries, and clears those of the
 * previous generation.
 */
struct port_bits {
	union {
		__u16 of[1 << 16];
		__u32 word[1 << 15];
	};
	__u32 generation; /* 0 or 1 */
};

/*
 * A cached route: to which pod of the node packets between two addresses go that enter by a device, provided that the
 * route back leads to that device.
 */
struct route {
	struct address source, destination;
	__u64 expires;	   /* in ticks */
	__u32 in_ifindex;  /* the device by which packets enter */
	__u32 out_ifindex; /* the pod's device, 0: packets use the host stack */
	__u32 generation;  /* the kernel's counter of route changes at the time */
	__u16 mtu;	   /* 65535: that or more */
	__u8 tos;	   /* of IPv4 */
	__u8 zero;
	__u8 dst_mac[6];
	__u8 src_mac[6];
	__u32 egress_program; /* ID of our program at the pod's device */
};

#define ROUTES 1024

/* Outcomes of packets, counted by processor. */
enum packet_event {
	EVENT_FLOW,	  /* a flow began */
	EVENT_REJECTED,	  /* no backend */
	EVENT_DROPPED,	  /* dropped by policy */
	EVENT_NO_PORT,	  /* dropped: no free port to masquerade with */
	EVENT_NO_ADDRESS, /* dropped: no address to masquerade with */
	EVENT_MAP_FULL,	  /* dropped: no space for the flow */
	EVENT_REDIRECTED, /* redirected to a pod, bypassing the host stack */
	EVENT_FORGED,	  /* dropped: the reverse path check failed, or a DSR option contradicts an open connection */
	PACKET_EVENTS,
};

#define TRACE_POOLS 8

/* What the programs do on demand only: count sockets, and report to the reader of fl_events. */
struct trace {
	__u64 counting;		 /* 1: there are pools whose sockets are counted, or were */
	__u64 until;		 /* nanoseconds since boot: the reader extends it again and again; 0: there is none */
	__u64 lost;		 /* events that did not fit into the ring, counted by the programs */
	__u64 namespace;	 /* only sockets of this namespace, or 0 */
	__u64 pool[TRACE_POOLS]; /* only these pools, if the first isn't 0 */
};

enum outcome {
	TRANSLATED,
	REFUSED,  /* no backend */
	FALLBACK, /* left to programs at devices or another plane */
	DROPPED,  /* left to these, which drop it for want of a backend */
};

struct event {
	__u64 time; /* nanoseconds since boot */
	__u64 namespace;
	__u64 pool;
	struct addr_port_pad entry, backend;
	__u32 process;
	__u8 protocol;
	__u8 outcome;
	__u16 zero;
	char command[16];
};
