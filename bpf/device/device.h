/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The structs of the maps of packets at devices, which the programs and the agent share: Go's types of the same names
 * are generated from here (device_bpfel.go). Addresses and ports are in network byte order.
 */
#pragma once

#include "service/service.h"

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
	UNDERLAY = 1 << 20,	   /* of a client that is another node, behind the tunnel: its packets come by the
				    * underlay, and replies are to go by it */
};

/* What the addresses of a prefix are to masquerading, in fl_masq_ranges. */
enum masq_range {
	RANGE_PODS = 1 << 0,   /* this node's pods: what they send out of the cluster gets the node's address */
	RANGE_INSIDE = 1 << 1, /* destinations that see pods' own addresses */
	RANGE_NODES = 1 << 2,  /* own addresses of nodes that pods reach through the tunnel */
	RANGE_REMOTE = 1 << 3, /* pods of other nodes */
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

/*
 * A cached route: to which pod of the node, or from one by which device to another node, packets between two addresses
 * go that enter by a device, provided that the route back leads to that device.
 */
struct route {
	struct address source, destination;
	__u64 expires;	   /* in ticks */
	__u32 in_ifindex;  /* the device by which packets enter */
	__u32 out_ifindex; /* the device that they leave by, 0: packets use the host stack */
	__u32 generation;  /* the kernel's counter of route changes at the time */
	__u16 mtu;	   /* 65535: that or more */
	__u8 tos;	   /* of IPv4 */
	__u8 zero;
	__u8 dst_mac[6];
	__u8 src_mac[6];
	__u32 egress_program; /* ID of our program at the pod's device, 0: it leads to other nodes */
	__u32 by_stack;	      /* egress_program 0: the tick of the last packet that used the host stack */
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
