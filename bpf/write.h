/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Turns a packet into another: headers that are written anew. A program defines before the length of the link-layer
 * header, l2_len.
 */
#pragma once

#include "redirect.h"

/* As the Linux stack's own (net.ipv4.ip_default_ttl). */
#define TTL 64

/* The sum of a pseudo header (RFC 9293, 3.1; RFC 8200, 8.1). */
static __always_inline __s64 pseudo_csum(const struct address *source, const struct address *destination, bool six,
					 __u32 protocol, __u32 length)
{
	struct {
		struct address a, b;
		__be32 length, protocol;
	} h = {.length = bpf_htonl(length), .protocol = bpf_htonl(protocol)};

	if (six) {
		h.a = *source;
		h.b = *destination;
	} else {
		h.a.word[0] = source->word[3];
		h.b.word[0] = destination->word[3];
	}
	return bpf_csum_diff(NULL, 0, (__be32 *)&h, sizeof(h), 0);
}

/* Swaps source and destination of a link-layer header. */
static __always_inline void swap_macs(struct ethhdr *e)
{
	struct ethhdr was = *e;

	__builtin_memcpy(e->h_dest, was.h_source, ETH_ALEN);
	__builtin_memcpy(e->h_source, was.h_dest, ETH_ALEN);
}

/* Writes an IP header for a payload of that length. Returns the offset behind it. */
static __always_inline __u32 write_ip_header(struct __sk_buff *skb, const struct address *source,
					     const struct address *destination, bool is6, __u8 protocol, __u16 length)
{
	struct iphdr four = {.version = 4,
			     .ihl = 5,
			     .ttl = TTL,
			     .protocol = protocol,
			     .frag_off = bpf_htons(0x4000),
			     .saddr = source->word[3],
			     .daddr = destination->word[3]};
	struct ipv6hdr six = {.version = 6, .hop_limit = TTL, .nexthdr = protocol, .payload_len = bpf_htons(length)};

	if (!is6) {
		four.tot_len = bpf_htons(sizeof(four) + length);
		four.check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&four, sizeof(four), 0));
		bpf_skb_store_bytes(skb, l2_len, &four, sizeof(four), BPF_F_RECOMPUTE_CSUM);
		return l2_len + sizeof(four);
	}
	__builtin_memcpy(&six.saddr, source, sizeof(six.saddr));
	__builtin_memcpy(&six.daddr, destination, sizeof(six.daddr));
	bpf_skb_store_bytes(skb, l2_len, &six, sizeof(six), BPF_F_RECOMPUTE_CSUM);
	return l2_len + sizeof(six);
}

/* Replaces a packet, but for its link-layer header, by a TCP segment without payload. Returns false where it can't. */
static __always_inline bool write_segment(struct __sk_buff *skb, const struct address *source,
					  const struct address *destination, bool six, struct tcphdr *t)
{
	__u32 behind = l2_len + (six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));

	t->check = 0;
	t->check = csum_fold(pseudo_csum(source, destination, six, IPPROTO_TCP, sizeof(*t)) +
			     bpf_csum_diff(NULL, 0, (__be32 *)t, sizeof(*t), 0));
	if (bpf_skb_change_tail(skb, behind + sizeof(*t), 0))
		return false;
	write_ip_header(skb, source, destination, six, IPPROTO_TCP, sizeof(*t));
	return !bpf_skb_store_bytes(skb, behind, t, sizeof(*t), BPF_F_RECOMPUTE_CSUM);
}
