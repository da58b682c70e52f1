/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The structs of Services' maps, which programs and agent share: Go's types of the same names are generated from here
 * (service_bpfel.go). Addresses and ports are in network byte order.
 */
#pragma once

#include "address.h"

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
	__u8 node_port;	 /* enum node_port: which addresses of nodes it stands for */
	__u8 restricted; /* 1: only clients in fl_allowed_src are served */
	__u8 dsr;	 /* origins whose clients the backend's node answers directly: model.Frontend.DSR */
	__u8 fast;	 /* origins of the node and of pods that connect_fast serves */
};

enum node_port {
	NODE_PORT = 1 << 0,	   /* a node port, */
	NODE_PORT_REMOTE = 1 << 1, /* also at other nodes' addresses: model.Frontend.Remote */
	NODE_ADDRESS = 1 << 2,	   /* a ClusterIP that this node has at a device: model.Frontend.Shared */
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
#define EXTENT(word) ((__u32)(word))
#define FAST_COUNT(word) ((__u32)((word) >> 32))

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
	PREFIX_PODS = 1 << 0,		   /* sources that count as pods */
	PREFIX_NODE_PORTS = 1 << 1,	   /* addresses of this node at which node ports are served */
	PREFIX_NODES = 1 << 2,		   /* addresses by which the cluster's nodes know each other */
	PREFIX_BEHIND_NODE = 1 << 3,	   /* sources reached through this node alone: model.Node.Behind */
	PREFIX_REMOTE_NODE_PORTS = 1 << 4, /* addresses of other nodes at which node ports are served */
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
