/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The reverse path check: a packet from a device begins a flow only if the route back to its source leads to that
 * device, as with rp_filter in strict mode (RFC 3704). Programs at devices run before routing: without the check, a
 * packet that rp_filter drops later would have begun a flow.
 */
#pragma once

#include "packet.h"

#define AF_INET 2
#define AF_INET6 10
#define LOOPBACK 1 /* the index of the loopback device, in every network namespace */

const volatile __u32 reverse_path = 0; /* set at load time: 1 where the check is enabled */

/* The devices by which other Nodes are reached, by index. Written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 10);
	__type(key, __u32);
	__type(value, __u32);
} fl_uplinks SEC(".maps");

/* How many times a route is looked up: of one with several next hops, each lookup selects one by a hash. */
#define ROUTE_LOOKUPS 16

/* Returns whether the route back to a packet's source leads to the device that it came from. */
__noinline int reverse_path_ok(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_fib_lookup f;
	__u32 i, draw = 0, from = skb->ifindex;
	long result;

	if (!p)
		return false;
	for (i = 0; i < ROUTE_LOOKUPS; i++) {
		__builtin_memset(&f, 0, sizeof(f));
		f.family = p->six ? AF_INET6 : AF_INET;
		f.l4_protocol = p->tuple.protocol;
		f.sport = p->tuple.dport ^ draw >> 16;
		f.dport = p->tuple.sport;
		f.tot_len = 1;
		f.ifindex = from;
		if (p->six) {
			__builtin_memcpy(f.ipv6_src, &p->tuple.destination, sizeof(f.ipv6_src));
			__builtin_memcpy(f.ipv6_dst, &p->tuple.source, sizeof(f.ipv6_dst));
			f.ipv6_src[3] ^= bpf_htonl(draw & 0xffff);
		} else {
			f.ipv4_src = p->tuple.destination.word[3] ^ bpf_htonl(draw & 0xffff);
			f.ipv4_dst = p->tuple.source.word[3];
		}
		result = bpf_fib_lookup(skb, &f, sizeof(f), BPF_FIB_LOOKUP_SKIP_NEIGH);
		if (result == BPF_FIB_LKUP_RET_FWD_DISABLED) { /* of packets from that device: as rp_filter does, look
								  up for the loopback device */
			if (from == LOOPBACK)
				return true; /* the node forwards nothing */
			from = LOOPBACK;
			continue;
		}
		if (result != BPF_FIB_LKUP_RET_SUCCESS)
			return false;
		if (f.ifindex == skb->ifindex)
			return true;
		draw = bpf_get_prandom_u32();
	}
	return false;
}

/*
 * Returns whether a packet is at a port of a bridge, a bond or the like, which no route leads to: the device above has
 * programs, too.
 */
static __always_inline bool is_bridge_port(struct __sk_buff *skb)
{
	struct sk_buff *kernels = bpf_cast_to_kern_ctx(skb);

	return bpf_core_field_exists(kernels->dev->rx_handler) && kernels->dev->rx_handler;
}

/*
 * Drops a packet with a forged source. At a port of a bridge, a bond or the like it can't be checked: it passes, and
 * the program at the device above checks it.
 */
static __always_inline int drop_forged(struct __sk_buff *skb)
{
	if (is_bridge_port(skb))
		return TCX_NEXT;
	count_packet(EVENT_FORGED);
	return TC_ACT_SHOT;
}

/* Returns whether a packet came from a device by which other Nodes are reached, or that isn't known. */
static __always_inline bool from_uplink(struct __sk_buff *skb)
{
	__u32 index = skb->ifindex;

	return !reverse_path || bpf_map_lookup_elem(&fl_uplinks, &index);
}
