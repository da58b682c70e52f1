/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * How a node that a client asks tells a backend's node what the client asked, so that this one answers the client itself: in
 * the packet, by an option of IPv4 or a destination option of IPv6, the first behind the fixed part of the IP header. Its number is
 * one for experiments (RFC 4727), of a kind that routers copy into fragments, and that whoever doesn't know it passes over.
 */
#pragma once

#include "packet.h"

const volatile __u32 direct = 0; /* set at load time: 1 where backends' nodes answer clients themselves */

struct told4 {
	__u8 type, length;
	__be16 port;
	__be32 address;
};

struct told6 {
	__u8 next, more; /* the header's own; more: units of 8 bytes beside the first */
	__u8 pad, none;	 /* an option that aligns the next: PadN of no further bytes */
	__u8 type, length;
	__be16 port;
	struct address address;
};

enum {
	TOLD4 = 0x9e, /* copied, number 30 */
	TOLD6 = 0x1e,
	PAD_N = 1,
};

static __always_inline __u32 size_of_told(const struct packet *p)
{
	return p->six ? sizeof(struct told6) : sizeof(struct told4);
}

/* Reads the entry that a packet tells of. False where it tells of none. */
static __always_inline bool read_told(struct __sk_buff *skb, const struct packet *p, struct end *entry)
{
	struct told6 six;
	struct told4 four;

	__builtin_memset(entry, 0, sizeof(*entry));
	if (p->transport < head + (p->six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) + size_of_told(p))
		return false;
	if (!p->six) {
		if (bpf_skb_load_bytes(skb, head + sizeof(struct iphdr), &four, sizeof(four)) || four.type != TOLD4 || four.length != sizeof(four))
			return false;
		map4(&entry->address, four.address);
		entry->port = four.port;
		return true;
	}
	if (bpf_skb_load_bytes(skb, head + offsetof(struct ipv6hdr, nexthdr), &six.next, 1) || six.next != IPPROTO_DSTOPTS ||
	    bpf_skb_load_bytes(skb, head + sizeof(struct ipv6hdr), &six, sizeof(six)) || six.more != sizeof(six) / 8 - 1 || six.pad != PAD_N ||
	    six.none || six.type != TOLD6 || six.length != sizeof(six.port) + sizeof(six.address))
		return false;
	entry->address = six.address;
	entry->port = six.port;
	return true;
}

/* Makes room behind the fixed part of an IP header, or takes it away. Of a GSO packet of TCP, segments are so much shorter then. */
static __always_inline bool resize(struct __sk_buff *skb, const struct packet *p, __s32 by)
{
	__u64 flags = p->tuple.protocol == IPPROTO_UDP ? BPF_F_ADJ_ROOM_FIXED_GSO : 0;

	return !bpf_skb_adjust_room(skb, by, BPF_ADJ_ROOM_NET, flags | BPF_F_ADJ_ROOM_NO_CSUM_RESET);
}

/* Says in an IPv4 header that it is so many bytes longer. difference is that of its options' sum. */
static __always_inline bool lengthen4(struct __sk_buff *skb, __s32 by, __s64 difference)
{
	struct iphdr was, is;
	__u32 length;

	if (bpf_skb_load_bytes(skb, head, &was, sizeof(was)))
		return false;
	length = bpf_ntohs(was.tot_len) + by;
	if (!was.tot_len || length > 0xffff || was.ihl + by / 4 > 15)
		return false;
	is = was;
	is.ihl += by / 4;
	is.tot_len = bpf_htons(length);
	difference = bpf_csum_diff((__be32 *)&was, sizeof(was), (__be32 *)&is, sizeof(is), difference);
	bpf_skb_store_bytes(skb, head, &is, sizeof(is), 0);
	bpf_l3_csum_replace(skb, head + offsetof(struct iphdr, check), 0, difference, 0);
	return true;
}

/* Says in an IPv6 header that so many bytes more follow, and what is next. */
static __always_inline bool lengthen6(struct __sk_buff *skb, __s32 by, __u8 next, __u8 *was)
{
	struct {
		__be16 length;
		__u8 next, hops;
	} ip;
	const __u32 at = head + offsetof(struct ipv6hdr, payload_len);
	__u32 length;

	if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)))
		return false;
	length = bpf_ntohs(ip.length) + by;
	if (!ip.length || length > 0xffff)
		return false;
	*was = ip.next;
	ip.length = bpf_htons(length);
	ip.next = next;
	return !bpf_skb_store_bytes(skb, at, &ip, sizeof(ip), BPF_F_RECOMPUTE_CSUM);
}

/*
 * Has a packet tell of an entry. False where there is no room. An IPv4 header has the same sum with its options as without: no sum
 * of the whole packet changes.
 */
__noinline int write_told(struct __sk_buff *skb, struct packet *p, const struct end *entry)
{
	struct told4 four = {.type = TOLD4, .length = sizeof(four)};
	struct told6 six = {.more = sizeof(six) / 8 - 1, .pad = PAD_N, .type = TOLD6, .length = sizeof(six.port) + sizeof(six.address)};
	__u32 size;

	if (!p || !entry)
		return false;
	size = size_of_told(p);
	if (!p->six) {
		four.port = entry->port;
		four.address = entry->address.word[3];
		if (!lengthen4(skb, size, bpf_csum_diff(NULL, 0, (__be32 *)&four, sizeof(four), 0)) || !resize(skb, p, size))
			return false;
		bpf_skb_store_bytes(skb, head + sizeof(struct iphdr), &four, sizeof(four), 0);
	} else {
		six.port = entry->port;
		six.address = entry->address;
		if (!lengthen6(skb, size, IPPROTO_DSTOPTS, &six.next) || !resize(skb, p, size))
			return false;
		bpf_skb_store_bytes(skb, head + sizeof(struct ipv6hdr), &six, sizeof(six), BPF_F_RECOMPUTE_CSUM);
	}
	p->transport += size;
	return true;
}

/* Takes out of a packet what it tells of: who gets it then sees it as the client sent it. */
__noinline int drop_told(struct __sk_buff *skb, struct packet *p)
{
	struct told4 four, none = {};
	__u32 size;
	__u8 next;

	if (!p)
		return false;
	size = size_of_told(p);
	if (!p->six) {
		if (bpf_skb_load_bytes(skb, head + sizeof(struct iphdr), &four, sizeof(four)))
			return false;
		bpf_skb_store_bytes(skb, head + sizeof(struct iphdr), &none, sizeof(none), 0);
		if (!lengthen4(skb, -(__s32)size, bpf_csum_diff((__be32 *)&four, sizeof(four), NULL, 0, 0)))
			return false;
	} else if (bpf_skb_load_bytes(skb, head + sizeof(struct ipv6hdr), &next, 1) || !lengthen6(skb, -(__s32)size, next, &next)) {
		return false;
	}
	p->transport -= size;
	return resize(skb, p, -(__s32)size);
}
