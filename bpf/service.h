/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * What the service plane and the agent share: maps and what is in them. Go's types of the same names are generated from
 * here. Addresses are 16 bytes for both families, IPv4 as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2); addresses and ports are in
 * network byte order.
 */
#pragma once

#include <linux/types.h>

struct address {
	__be32 word[4];
};

/* Where traffic enters. A node port stands as 0.0.0.0 (::ffff:0:0) or ::. */
struct entry {
	struct address address;
	__be16 port;
	__u8 protocol; /* IPPROTO_TCP or IPPROTO_UDP */
	__u8 zero;
};

/* Whose clients are meant, a bit each: model.Origin. */
enum origin {
	FROM_NODE = 1 << 0,
	FROM_POD = 1 << 1,
	FROM_OUTSIDE = 1 << 2,
};

/* What becomes of the clients of an entry. */
struct frontend {
	__u32 inside;  /* index in pools, for clients of the node and pods */
	__u32 outside; /* the same for others */
	__u8 leave;    /* origins whose packets go on as they are: somebody else serves them */
	__u8 ask;      /* 1: pods and others fare differently, so the client's address must be known */
	__u8 drop;     /* origins that hear nothing where there is no backend; others are refused */
	__u8 hide;     /* origins whose address the backend doesn't see */
	__u8 any;      /* 1: a node port */
	__u8 some;     /* 1: only clients in permitted are let in */
	__u8 direct;   /* origins whose clients are answered by their backend's node itself: model.Frontend.Direct */
	__u8 quick;    /* origins of the node itself and pods for which nothing but ask needs a look */
};

/*
 * A pool, in the array pools. What may change stands in slots, in an extent of its own: a header, backends, choices.
 * A new version is written beside the old one, then extent and quick are set at once: a client sees the one or the other.
 */
struct pool {
	__u64 id;     /* model.Pool.ID, 0 where nothing is */
	__u32 extent; /* where the extent begins in slots, 0 where nothing is */
	__u32 quick;  /* how many backends there are in it where their weights alone count, else 0: written at once with extent */
	__u32 next;   /* the turn of the next connection, counted by packets, from a number that the agent draws; where weights alone count, a seed */
	__u32 leave;  /* origins that others serve at one of the pool's entries: affinity must then be theirs alone */
	/* TCP connections and UDP flows */
	__u64 connections; /* given a backend */
	__u64 refused;	   /* for which there was none */
};

/* Of a pool's extent and quick, read at once: */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define EXTENT(served) ((__u32)(served))
#define QUICK(served) ((__u32)((served) >> 32))
#else
#define EXTENT(served) ((__u32)((served) >> 32))
#define QUICK(served) ((__u32)(served))
#endif

enum scheduler {
	RANDOM,
	TURNS,	     /* by pool.next */
	SOURCE,	     /* by a hash of the client's address */
	DESTINATION, /* by a hash of the entry's address */
	/* By sockets that are open, see least.h. */
	LEAST,		/* the fewest */
	WEIGHTED_LEAST, /* the fewest for the backend's weight */
	DELAY,		/* the same with this one counted in */
};

struct header {
	__u32 count;	/* of backends, which follow, sorted by address and port */
	__u32 choices;	/* of choices, which follow those; 0: each backend is as likely as its draw says */
	__u32 affinity; /* seconds */
	__u8 scheduler;
	__u8 model;	 /* model.Scheduler, for the agent */
	__u8 protocol;
	__u8 flags; /* enum header_flag */
	__u64 id; /* the pool's */
};

enum header_flag {
	BY_PORT = 1 << 0,    /* SOURCE hashes the client's port too */
	UNSELECTED = 1 << 1, /* behind the choices: a header with a count, and so many endpoints that get no new flow */
};

struct backend {
	struct address address;
	__be16 port;
	__u16 weight; /* model.Backend.Weight, and LOCAL or AWAY */
	/* A draw that comes upon this backend is its own up to this of 65536, else another's (Walker's alias method). */
	__u16 own;
	__u16 other; /* index among backends */
};

/* In a backend's weight: where it runs. */
enum {
	LOCAL = 1 << 15,   /* on this node, so its own packets may come back to it */
	AWAY = 1 << 14,	   /* on another node of the cluster, which may answer its clients itself */
	WEIGHT = AWAY - 1, /* the weight alone */
};

#define CHOICES 12

/* One slot of an extent is any of these. */
union slot {
	struct header header;
	struct backend backend;
	__u16 choice[CHOICES]; /* indices among backends */
};

/* Prefixes that the agent knows of, the longest counts. */
struct prefix {
	__u32 length; /* of 128 */
	struct address address;
};

enum place {
	PODS = 1 << 0,	     /* sources that count as pods */
	NODE_PORTS = 1 << 1, /* addresses of this node that take node ports */
	NODES = 1 << 2,	     /* addresses by which the cluster's nodes know each other */
	BEHIND = 1 << 3,     /* sources behind this node: model.Node.Behind */
};

/* The interfaces of pods: what comes in by them counts as pods'. */
struct interfaces {
	char name[16];
	__u32 length; /* how many bytes of an interface's name must be as in name: its end, a zero, among them where all must be; 0: there are none */
};

/* A client that returns to the same backend of a pool. */
struct client {
	struct address address; /* zero for the node's own processes */
	__u64 pool;
};

struct end {
	struct address address;
	__be16 port;
	__u16 zero;
};

struct place_of {
	struct address address;
	__be16 port;
	__u16 zero;
	__u32 zeros;
};

struct memory {
	struct place_of backend;
	__u64 seen; /* nanoseconds since boot */
};

/* A backend of a pool. */
struct endpoint {
	struct place_of backend;
	__u64 pool;
};

/* How many sockets are connected to an endpoint, of a pool that is scheduled by that. */
struct load {
	__u64 open;
	__u64 since; /* nanoseconds since boot: tells this count from an earlier one of the same endpoint */
};

/* What a socket counts for, until it is closed or connected elsewhere. */
struct counted {
	struct endpoint endpoint;
	__u64 since; /* of the load */
};

/* What a socket asked for and what it got. */
struct flow {
	struct place_of entry, backend;
};

/*
 * What a TCP socket is connected to, in the array names at its cookie modulo NAMES: until it is closed, or, if it was never asked for its peer,
 * until another socket takes the place. Where one that was asked has it, another's stands with that socket itself, in named. It is as long as a
 * line of most processors' caches: each connection writes one that nobody had for long.
 */
struct name {
	__u64 cookie; /* 0: free */
	__u64 namespace;
	__u64 pool;
	struct address entry, backend;
	__be16 entry_port, backend_port;
	__u32 asked; /* 1: its socket was asked for its peer. Kernel's own, such as MPTCP's inner ones, are not, and don't tell when they are closed */
};

#define NAMES (1 << 16)

/* A connected UDP socket, by its cookie, from connect() until it is closed. */
struct connected {
	struct flow flow;
	__u64 namespace; /* the network namespace's cookie */
	__u64 pool;
};

/* The address of a namespace other than the node's, by its cookie and family. */
struct home {
	__u64 namespace;
	__u32 family; /* 4 or 6 */
	__u32 zero;
};

struct address_of {
	struct address address;
	__u64 until; /* nanoseconds since boot: then it is looked up again, */
	__u32 place; /* as is what it is */
	__u32 zero;
};

/* What becomes of a packet that opens a flow and matches no frontend, by its destination. */
enum unmatched_action {
	UNMATCHED_REJECT = 1, /* a ClusterIP */
	UNMATCHED_DROP = 2,   /* an address that no Service has */
};

/* A client that an entry lets in, as a prefix behind all of the entry. */
struct permit {
	__u32 length; /* of 288 */
	struct entry entry;
	struct address client;
};

/* Who sends a packet to whom, as it is at hand. */
struct tuple {
	struct address source, destination;
	__be16 from, to; /* ports */
	__u8 protocol;
	__u8 zero[3];
};

enum way_state {
	ANSWERED = 1 << 0,
	ENDS = 1 << 1,	   /* this way's sender sends no more (FIN), */
	ENDED = 1 << 2,	   /* nor does who answers */
	RESET = 1 << 3,
	ASKS = 1 << 4,	   /* a client's way to an entry */
	REPLIES = 1 << 5,  /* a backend's way back */
	UNHIDDEN = 1 << 6, /* the client's address is to be hidden, by a port that isn't chosen yet */
	OURS = 1 << 7,	   /* a way back to this node itself */
	ALIAS = 1 << 8,	   /* a client that its backend sees at another port, since another entry's flow has the client's own */
	DIRECT = 1 << 9,   /* of a flow whose backend's node answers the client itself */
	LEARNT = 1 << 10,  /* a backend's way back of which the node told that the client asked */
	HIDDEN = 1 << 11,  /* of a flow whose client is hidden: its packets leave with a MARK, both ways */
	MARKED = 1 << 12,  /* and this way has seen it: packets without are of no flow */
	BARED = 1 << 13,   /* but somebody takes it from them */
	UNASSURED = 1 << 14, /* TCP: the handshake isn't complete (conntrack: not IPS_ASSURED) */
	ACKED = 1 << 15,	   /* TCP: a packet has come since the last FIN */
	CLIENT_UNACKED = 1 << 16,  /* TCP: data of the client awaits a packet of the backend, */
	BACKEND_UNACKED = 1 << 17, /* or the other way round */
};

/* What becomes of the packets of a tuple, in destinations or in sources. */
struct way {
	struct end to;	 /* what takes the place of their destination, or of their source */
	struct end from; /* OURS: what takes the place of their source besides. ALIAS: of the other end, the client's */
	__u32 seen;	 /* seconds since boot */
	__u32 change;	 /* ASKS: changes when its backend was last seen to be one */
	__u32 state;
	__u32 origin; /* ASKS: the client's */
};

/* A fragment's packet, and the ports that its first fragment told. */
struct piece {
	struct address source, destination;
	__u32 id;
	__u32 protocol;
};

struct ports {
	__be16 from, to;
};

/* Why a packet with a port, or to an address, may be ours, a bit each: most packets need no other look. */
enum use {
	USE_ENTRY = 1 << 0,	/* frontends are there: set by the agent */
	USE_ANY = 1 << 1,	/* node ports are there, whatever the address: likewise */
	USE_ASKED = 1 << 2,	/* clients' ways lead there */
	USE_BACKEND = 1 << 3,	/* backends with ways back are at the port */
	USE_HIDDEN = 1 << 4,	/* hidden clients' ways lead to it */
	USE_TAKEN = 1 << 5,	/* clients are hidden behind it, or clients of this node are at it */
	USE_SERVICES = 1 << 6,	/* by the hash of a network: addresses are there that only Services have; set by the agent */
};

/* The bits that programs set exist twice, once for each generation: those of generation 1 are shifted by this. */
#define USE_SHIFT 8

/*
 * 16 bits for each port, by its number in network byte order, or for each hash of an address. Bits are set in whole words, since others
 * set theirs meanwhile. Programs set bits of the current generation and read those of both. The agent now and then makes the other
 * generation the current one, sets its bits for all entries of the two maps of flows, and clears those of the generation before.
 */
struct uses {
	union {
		__u16 of[1 << 16];
		__u32 word[1 << 15];
	};
	__u32 generation; /* 0 or 1 */
};

/*
 * Where packets from one address to another are led that come in by a device: to a pod of the node, from where its own packets come, or
 * not so.
 */
struct lane {
	struct address source, destination;
	__u64 until;	    /* in ticks: then it is asked again */
	__u32 from;	    /* index of the device */
	__u32 to;	    /* of the pod's device, 0 where packets are left to the node's stack */
	__u32 routes;	    /* the kernel's count of their changes, as it was */
	__u16 mtu;	    /* 65535: or more */
	__u8 tos;	    /* of IPv4 */
	__u8 zero;
	__u8 receiver[6]; /* link-layer addresses */
	__u8 sender[6];
	__u32 leave; /* ID of our program where packets leave by the pod's device */
};

#define LANES 1024

/* What became of packets, counted by processor. */
enum event_of_packet {
	BEGAN,	    /* flows */
	REJECTED,   /* packets answered that nobody is there */
	SILENCED,   /* packets dropped as the model says */
	NO_PORT,    /* packets dropped: no port was free to hide their client */
	NO_ADDRESS, /* packets dropped: no address was found to hide their client */
	NO_ROOM,    /* packets dropped: their flow found no room */
	HANDED,	    /* packets handed over to a pod, past the node's stack */
	FORGED,	    /* packets dropped: the reverse path of a new flow, or what a packet tells of an answered one, is another */
	EVENTS_OF_PACKET,
};

#define TRACED 8

/* What the programs do only if asked to: count sockets, and report to whoever reads the ring events. */
struct trace {
	__u64 counting;	     /* 1: there are pools whose sockets are counted, or were */
	__u64 until;	     /* nanoseconds since boot: who listens sets it ever further off; 0: nobody does */
	__u64 lost;	     /* events for which the ring had no room, counted by packets */
	__u64 namespace;     /* only of this namespace's sockets, or 0 */
	__u64 pool[TRACED];  /* only these pools', where the first isn't 0 */
};

enum outcome {
	TRANSLATED,
	REFUSED, /* for want of a backend */
	LEFT,	 /* to whoever serves it behind us */
	SILENT,	 /* left for want of a backend: nobody is to answer */
};

struct event {
	__u64 time; /* nanoseconds since boot */
	__u64 namespace;
	__u64 pool;
	struct place_of entry, backend;
	__u32 process;
	__u8 protocol;
	__u8 outcome;
	__u16 zero;
	char command[16];
};
