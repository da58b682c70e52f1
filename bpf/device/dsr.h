/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Direct server return (DSR): the node that receives a client's packet passes the original destination to the backend's
 * node, which answers the client directly. It is an IPv4 option or an IPv6 destination option, the first behind the
 * fixed part of the IP header. Its number is experimental (RFC 4727), of a kind that routers copy into fragments and
 * hosts that don't know it skip.
 */
#pragma once

#include "packet.h"

const volatile __u32 dsr = 0; /* set at load time: 1 where dsr server return is enabled */

struct dsr_option4 {
	__u8 type, length;
	__be16 port;
	__be32 address;
};

struct dsr_option6 {
	__u8 next, more; /* of the extension header; more: units of 8 bytes beside the first */
	__u8 pad, none;	 /* an option that aligns the next: PadN of no further bytes */
	__u8 type, length;
	__be16 port;
	struct address address;
};

enum {
	DSR_OPTION4 = 0x9e, /* copied, number 30 */
	DSR_OPTION6 = 0x1e,
	PAD_N = 1,
};

static __always_inline __u32 dsr_option_size(const struct packet *p)
{
	return p->six ? sizeof(struct dsr_option6) : sizeof(struct dsr_option4);
}

/* Reads the entry in a packet's DSR option. Returns false where it has none. */
static __always_inline bool read_dsr_option(struct __sk_buff *skb, const struct packet *p, struct addr_port *entry)
{
	struct dsr_option6 six;
	struct dsr_option4 four;

	__builtin_memset(entry, 0, sizeof(*entry));
	if (p->transport < l2_len + (p->six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) + dsr_option_size(p))
		return false;
	if (!p->six) {
		if (bpf_skb_load_bytes(skb, l2_len + sizeof(struct iphdr), &four, sizeof(four)) ||
		    four.type != DSR_OPTION4 || four.length != sizeof(four))
			return false;
		map_ipv4(&entry->address, four.address);
		entry->port = four.port;
		return true;
	}
	if (bpf_skb_load_bytes(skb, l2_len + offsetof(struct ipv6hdr, nexthdr), &six.next, 1) ||
	    six.next != IPPROTO_DSTOPTS ||
	    bpf_skb_load_bytes(skb, l2_len + sizeof(struct ipv6hdr), &six, sizeof(six)) ||
	    six.more != sizeof(six) / 8 - 1 || six.pad != PAD_N || six.none || six.type != DSR_OPTION6 ||
	    six.length != sizeof(six.port) + sizeof(six.address))
		return false;
	entry->address = six.address;
	entry->port = six.port;
	return true;
}

/*
 * Inserts or removes space behind the fixed part of an IP header. Of a GSO packet of TCP, segments shrink accordingly.
 */
static __always_inline bool adjust_room(struct __sk_buff *skb, const struct packet *p, __s32 by)
{
	__u64 flags = p->tuple.protocol == IPPROTO_UDP ? BPF_F_ADJ_ROOM_FIXED_GSO : 0;

	return !bpf_skb_adjust_room(skb, by, BPF_ADJ_ROOM_NET, flags | BPF_F_ADJ_ROOM_NO_CSUM_RESET);
}

/* Adds to the length in an IPv4 header. difference is that of its options' sum. */
static __always_inline bool grow_ipv4(struct __sk_buff *skb, __s32 by, __s64 difference)
{
	struct iphdr was, is;
	__u32 length;

	if (bpf_skb_load_bytes(skb, l2_len, &was, sizeof(was)))
		return false;
	length = bpf_ntohs(was.tot_len) + by;
	if (!was.tot_len || length > 0xffff || was.ihl + by / 4 > 15)
		return false;
	is = was;
	is.ihl += by / 4;
	is.tot_len = bpf_htons(length);
	difference = bpf_csum_diff((__be32 *)&was, sizeof(was), (__be32 *)&is, sizeof(is), difference);
	bpf_skb_store_bytes(skb, l2_len, &is, sizeof(is), 0);
	bpf_l3_csum_replace(skb, l2_len + offsetof(struct iphdr, check), 0, difference, 0);
	return true;
}

/* Adds to the length in an IPv6 header, and sets the next header. */
static __always_inline bool grow_ipv6(struct __sk_buff *skb, __s32 by, __u8 next, __u8 *was)
{
	struct {
		__be16 length;
		__u8 next, hops;
	} ip;
	const __u32 at = l2_len + offsetof(struct ipv6hdr, payload_len);
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
 * Adds a DSR option with an entry. Returns false where it doesn't fit. The sum of an IPv4 header is the same with its
 * options as without: no sum of the whole packet changes.
 */
__noinline int write_dsr_option(struct __sk_buff *skb, struct packet *p, const struct addr_port *entry)
{
	struct dsr_option4 four = {.type = DSR_OPTION4, .length = sizeof(four)};
	struct dsr_option6 six = {.more = sizeof(six) / 8 - 1,
				  .pad = PAD_N,
				  .type = DSR_OPTION6,
				  .length = sizeof(six.port) + sizeof(six.address)};
	__u32 size;

	if (!p || !entry)
		return false;
	size = dsr_option_size(p);
	if (!p->six) {
		four.port = entry->port;
		four.address = entry->address.word[3];
		if (!grow_ipv4(skb, size, bpf_csum_diff(NULL, 0, (__be32 *)&four, sizeof(four), 0)) ||
		    !adjust_room(skb, p, size))
			return false;
		bpf_skb_store_bytes(skb, l2_len + sizeof(struct iphdr), &four, sizeof(four), 0);
	} else {
		six.port = entry->port;
		six.address = entry->address;
		if (!grow_ipv6(skb, size, IPPROTO_DSTOPTS, &six.next) || !adjust_room(skb, p, size))
			return false;
		bpf_skb_store_bytes(skb, l2_len + sizeof(struct ipv6hdr), &six, sizeof(six), BPF_F_RECOMPUTE_CSUM);
	}
	p->transport += size;
	return true;
}

/* Removes the DSR option, so that the backend sees the packet as the client sent it. */
__noinline int remove_dsr_option(struct __sk_buff *skb, struct packet *p)
{
	struct dsr_option4 four, none = {};
	__u32 size;
	__u8 next;

	if (!p)
		return false;
	size = dsr_option_size(p);
	if (!p->six) {
		if (bpf_skb_load_bytes(skb, l2_len + sizeof(struct iphdr), &four, sizeof(four)))
			return false;
		bpf_skb_store_bytes(skb, l2_len + sizeof(struct iphdr), &none, sizeof(none), 0);
		if (!grow_ipv4(skb, -(__s32)size, bpf_csum_diff((__be32 *)&four, sizeof(four), NULL, 0, 0)))
			return false;
	} else if (bpf_skb_load_bytes(skb, l2_len + sizeof(struct ipv6hdr), &next, 1) ||
		   !grow_ipv6(skb, -(__s32)size, next, &next)) {
		return false;
	}
	p->transport -= size;
	return adjust_room(skb, p, -(__s32)size);
}
