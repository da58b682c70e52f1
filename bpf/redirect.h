/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Redirecting a packet to a pod, and what the device program and the program of network policies (policy.c) share for
 * that. Where the only hook of netfilter in forwarding that would handle the packet is a program, the device program
 * finds the route, then calls the program of policies with that hook's ID, which redirects the packet if that hook is
 * of policies, and they accept it.
 */
#pragma once

#include "ip.h"

#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stddef.h>

/* include/uapi/linux/bpf.h, since Linux 6.6: continue with the next program */
#define TCX_NEXT -1

/* The fast path's result for a packet that the program of policies evaluates: none of the kernel's. */
#define TCX_EVALUATE 100

#define has_field(type, field) bpf_core_field_exists(((struct type *)0)->field)

/*
 * To which device a packet is redirected, and with which link-layer addresses. In skb->cb between the two programs, and
 * behind it, as cb[HOOK_PROGRAM], the ID of the program at netfilter's hooks.
 */
struct redirect {
	__u32 out_ifindex;
	__u8 dst_mac[ETH_ALEN], src_mac[ETH_ALEN];
};

#define HOOK_PROGRAM (sizeof(struct redirect) / sizeof(__u32))

/*
 * Beside the ID in cb[HOOK_PROGRAM]: the device leads to other nodes. A packet passes taps, programs, classifiers and
 * the queue that see what leaves by it.
 */
#define TO_OTHER_NODE 0x80000000

/* Redirects a packet whose headers are written: to a pod into its network namespace. */
static __always_inline int redirect(const struct redirect *r, __u32 to_other_node)
{
	return to_other_node ? bpf_redirect(r->out_ifindex, 0) : bpf_redirect_peer(r->out_ifindex, 0);
}

/* Writes the headers of a packet that is redirected: as the pod's device would have, with one hop less. */
static __always_inline bool rewrite_l2(struct __sk_buff *skb, void *ip, const struct redirect *r, bool is6)
{
	struct {
		struct ethhdr e;
		__u8 begin[8];
		struct ttl_proto_check before;
	} h;
	__u16 hops;

	__builtin_memcpy(h.e.h_dest, r->dst_mac, sizeof(h.e.h_dest));
	__builtin_memcpy(h.e.h_source, r->src_mac, sizeof(h.e.h_source));
	h.e.h_proto = skb->protocol;
	__builtin_memcpy(h.begin, ip, sizeof(h.begin));
	if (is6) {
		h.begin[offsetof(struct ipv6hdr, hop_limit)]--;
		return !bpf_skb_store_bytes(skb, 0, &h, sizeof(h.e), 0) &&
		       !bpf_skb_store_bytes(skb, sizeof(h.e), h.begin, sizeof(h.begin), BPF_F_RECOMPUTE_CSUM);
	}
	__builtin_memcpy(&h.before, ip + sizeof(h.begin), sizeof(h.before));
	hops = h.before.ttl << 8 | h.before.protocol;
	h.before.ttl--;
	h.before.check =
		csum_fold((__u64)(__u16)~h.before.check + (__u16)~bpf_htons(hops) + bpf_htons(hops - (1 << 8)));
	return !bpf_skb_store_bytes(skb, 0, &h, sizeof(h.e) + sizeof(h.begin) + sizeof(h.before), 0);
}
