/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Rejects a packet by turning it into the reply: a TCP reset, or ICMP port unreachable. */
#pragma once

#include "packet.h"

/* As the Linux stack's own (net.ipv4.ip_default_ttl). */
#define TTL 64

/*
 * How much of a packet an ICMP error quotes at most: headers, and 8 bytes of UDP (RFC 792; RFC 4443, 3.1 allows less
 * than all).
 */
#define QUOTED 72

/* The sum of a pseudo header (RFC 9293, 3.1; RFC 8200, 8.1). */
static __always_inline __s64 pseudo_csum(const struct packet *p, __u32 protocol, __u32 length)
{
	struct {
		struct address a, b;
		__be32 length, protocol;
	} h = {.length = bpf_htonl(length), .protocol = bpf_htonl(protocol)};

	if (p->six) {
		h.a = p->tuple.source;
		h.b = p->tuple.destination;
	} else {
		h.a.word[0] = p->tuple.source.word[3];
		h.b.word[0] = p->tuple.destination.word[3];
	}
	return bpf_csum_diff(NULL, 0, (__be32 *)&h, sizeof(h), 0);
}

/* Swaps source and destination of a link-layer header. */
static __always_inline void swap_macs(struct __sk_buff *skb, struct ethhdr *e)
{
	struct ethhdr was = *e;

	__builtin_memcpy(e->h_dest, was.h_source, ETH_ALEN);
	__builtin_memcpy(e->h_source, was.h_dest, ETH_ALEN);
}

/* Writes the IP header of a reply to p with a payload of that length. Returns the offset behind it. */
static __always_inline __u32 write_ip_header(struct __sk_buff *skb, const struct packet *p, __u8 protocol, __u16 length)
{
	struct iphdr four = {.version = 4,
			     .ihl = 5,
			     .ttl = TTL,
			     .protocol = protocol,
			     .frag_off = bpf_htons(0x4000),
			     .saddr = p->tuple.destination.word[3],
			     .daddr = p->tuple.source.word[3]};
	struct ipv6hdr six = {.version = 6, .hop_limit = TTL, .nexthdr = protocol, .payload_len = bpf_htons(length)};

	if (!p->six) {
		four.tot_len = bpf_htons(sizeof(four) + length);
		four.check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&four, sizeof(four), 0));
		bpf_skb_store_bytes(skb, l2_len, &four, sizeof(four), 0);
		return l2_len + sizeof(four);
	}
	__builtin_memcpy(&six.saddr, &p->tuple.destination, sizeof(six.saddr));
	__builtin_memcpy(&six.daddr, &p->tuple.source, sizeof(six.daddr));
	bpf_skb_store_bytes(skb, l2_len, &six, sizeof(six), 0);
	return l2_len + sizeof(six);
}

/* Turns a TCP segment into its reset (RFC 9293, 3.5.2). Returns false where none may be sent. */
__noinline int make_reset(struct __sk_buff *skb, const struct packet *p)
{
	struct tcphdr t, r = {.doff = 5, .rst = 1};
	struct ethhdr e;
	__u32 behind, ip;
	__be16 length;

	if (!p || !p->transport || p->flags & RST ||
	    bpf_skb_load_bytes(skb, l2_len + (p->six ? 4 : 2), &length, sizeof(length)) ||
	    (l2_len && bpf_skb_load_bytes(skb, 0, &e, sizeof(e))) ||
	    bpf_skb_load_bytes(skb, p->transport, &t, sizeof(t)))
		return false;
	ip = p->six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	behind = l2_len + (p->six ? sizeof(struct ipv6hdr) : 0) + bpf_ntohs(length) - p->transport - t.doff * 4;
	r.source = t.dest;
	r.dest = t.source;
	if (t.ack) {
		r.seq = t.ack_seq;
	} else {
		r.ack = 1;
		r.ack_seq = bpf_htonl(bpf_ntohl(t.seq) + behind + t.syn + t.fin);
	}
	r.check =
		csum_fold(pseudo_csum(p, IPPROTO_TCP, sizeof(r)) + bpf_csum_diff(NULL, 0, (__be32 *)&r, sizeof(r), 0));
	if (bpf_skb_change_tail(skb, l2_len + ip + sizeof(r), 0))
		return false;
	if (l2_len) {
		swap_macs(skb, &e);
		bpf_skb_store_bytes(skb, 0, &e, sizeof(e), 0);
	}
	ip = write_ip_header(skb, p, IPPROTO_TCP, sizeof(r));
	bpf_skb_store_bytes(skb, ip, &r, sizeof(r), 0);
	return true;
}

/* Turns a datagram into an ICMP port unreachable from its destination. Returns false where that isn't possible. */
__noinline int make_unreachable(struct __sk_buff *skb, const struct packet *p)
{
	struct icmp i = {.type = ICMP_DEST_UNREACH, .code = ICMP_PORT_UNREACH};
	__u8 quoted[QUOTED] = {};
	struct ethhdr e;
	__u32 size, ip;
	__s64 sum = 0;

	if (!p || !p->transport || (l2_len && bpf_skb_load_bytes(skb, 0, &e, sizeof(e))))
		return false;
	size = p->transport - l2_len + sizeof(struct udphdr);
	if (size < sizeof(struct udphdr) || size > QUOTED || bpf_skb_load_bytes(skb, l2_len, quoted, size))
		return false;
	if (p->six) {
		i.type = ICMPV6_DEST_UNREACH;
		i.code = ICMPV6_PORT_UNREACH;
		sum = pseudo_csum(p, IPPROTO_ICMPV6, sizeof(i) + size);
	}
	ip = (p->six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) + sizeof(i);
	i.check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)quoted, sizeof(quoted), 0) + sum +
			    bpf_csum_diff(NULL, 0, (__be32 *)&i, sizeof(i), 0));
	if (bpf_skb_change_tail(skb, l2_len + size, 0) || bpf_skb_change_head(skb, ip, 0))
		return false;
	if (l2_len) {
		swap_macs(skb, &e);
		bpf_skb_store_bytes(skb, 0, &e, sizeof(e), 0);
	}
	ip = write_ip_header(skb, p, p->six ? IPPROTO_ICMPV6 : IPPROTO_ICMP, sizeof(i) + size);
	bpf_skb_store_bytes(skb, ip, &i, sizeof(i), 0);
	return true;
}
