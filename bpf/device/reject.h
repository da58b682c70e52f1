/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Rejects a packet by turning it into the reply: a TCP reset, or ICMP port unreachable. */
#pragma once

#include "packet.h"
#include "write.h"

/*
 * How much of a packet an ICMP error quotes at most: headers, and 8 bytes of UDP (RFC 792; RFC 4443, 3.1 allows less
 * than all).
 */
#define QUOTED 72

/* Turns a TCP segment into its reset (RFC 9293, 3.5.2). Returns false where none may be sent. */
__noinline int make_reset(struct __sk_buff *skb, const struct packet *p)
{
	struct tcphdr t, r = {.doff = 5, .rst = 1};
	struct ethhdr e;
	__u32 behind;
	__be16 length;

	if (!p || !p->transport || p->flags & RST ||
	    bpf_skb_load_bytes(skb, l2_len + (p->six ? 4 : 2), &length, sizeof(length)) ||
	    (l2_len && bpf_skb_load_bytes(skb, 0, &e, sizeof(e))) ||
	    bpf_skb_load_bytes(skb, p->transport, &t, sizeof(t)))
		return false;
	behind = l2_len + (p->six ? sizeof(struct ipv6hdr) : 0) + bpf_ntohs(length) - p->transport - t.doff * 4;
	r.source = t.dest;
	r.dest = t.source;
	if (t.ack) {
		r.seq = t.ack_seq;
	} else {
		r.ack = 1;
		r.ack_seq = bpf_htonl(bpf_ntohl(t.seq) + behind + t.syn + t.fin);
	}
	if (!write_segment(skb, &p->tuple.destination, &p->tuple.source, p->six, &r))
		return false;
	if (l2_len) {
		swap_macs(&e);
		bpf_skb_store_bytes(skb, 0, &e, sizeof(e), 0);
	}
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
		sum = pseudo_csum(&p->tuple.destination, &p->tuple.source, true, IPPROTO_ICMPV6, sizeof(i) + size);
	}
	ip = (p->six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) + sizeof(i);
	i.check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)quoted, sizeof(quoted), 0) + sum +
			    bpf_csum_diff(NULL, 0, (__be32 *)&i, sizeof(i), 0));
	if (bpf_skb_change_tail(skb, l2_len + size, 0) || bpf_skb_change_head(skb, ip, 0))
		return false;
	if (l2_len) {
		swap_macs(&e);
		bpf_skb_store_bytes(skb, 0, &e, sizeof(e), 0);
	}
	ip = write_ip_header(skb, &p->tuple.destination, &p->tuple.source, p->six,
			     p->six ? IPPROTO_ICMPV6 : IPPROTO_ICMP, sizeof(i) + size);
	bpf_skb_store_bytes(skb, ip, &i, sizeof(i), 0);
	return true;
}
