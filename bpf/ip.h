/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Headers of IP and ICMP, and ports of fragments. A program defines before what it reads packets from: the type
 * packet_source, and load(), which copies bytes of a packet and returns whether it has them.
 */
#pragma once

#include "address.h"

#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

/* Source and destination of a packet. */
struct tuple {
	struct address source, destination;
	__be16 sport, dport;
	__u8 protocol;
	__u8 zero[3];
};

/* A fragmented packet, and the ports that its first fragment has. */
struct fragment {
	struct address source, destination;
	__u32 id;
	__u32 protocol;
};

struct ports {
	__be16 sport, dport;
};

/* include/uapi/linux/icmp.h and icmpv6.h, which include too much */
struct icmp {
	__u8 type, code;
	__be16 check;
	__be32 rest;
};

/* An echo request or reply: RFC 792; RFC 4443, 4. */
struct icmp_echo {
	__u8 type, code;
	__be16 check;
	__be16 id, sequence;
};

enum {
	ICMP_ECHOREPLY = 0,
	ICMP_ECHO = 8,
	ICMPV6_ECHO_REQUEST = 128,
	ICMPV6_ECHO_REPLY = 129,
	ICMP_DEST_UNREACH = 3,
	ICMP_PORT_UNREACH = 3, /* a code of that */
	ICMP_FRAG_NEEDED = 4,  /* likewise */
	ICMP_TIME_EXCEEDED = 11,
	ICMP_PARAMETERPROB = 12,
	ICMPV6_DEST_UNREACH = 1,
	ICMPV6_PORT_UNREACH = 4, /* a code of that */
	ICMPV6_PKT_TOOBIG = 2,
	ICMPV6_PARAMPROB = 4, /* the last of the errors */
};

#define MAX_EXTENSIONS 4 /* IPv6 extension headers that are skipped */
#define OFFSET 0x1fff	 /* of struct iphdr.frag_off */
#define MORE_FRAGMENTS 0x2000

#define FLAGS 13 /* offset in a TCP header of: */
enum {
	FIN = 1,
	SYN = 2,
	RST = 4,
	ACK = 16,
	/* Ours: */
	DATA = 256,	    /* there is payload; known of plain packets */
	ECHO_REQUEST = 512, /* an ICMP echo request */
};

/* The part of an IPv4 header before its addresses that changes with them; of IPv6, the hop limit alone. */
struct ttl_proto_check {
	__u8 ttl, protocol;
	__be16 check;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, struct fragment);
	__type(value, struct ports);
} fl_fragments SEC(".maps");

/* The fields of an IP header that are used. */
struct ip_header {
	struct address source, destination;
	__u32 protocol;
	__u32 next; /* offset of the next header */
	__u32 id;
	__u32 fragment; /* bits: */
	struct ttl_proto_check before;
};

enum {
	IS_FRAGMENT = 1,
	IS_LATER_FRAGMENT = 2, /* not the first */
};

static __always_inline bool parse_ipv4(packet_source *from, __u32 at, struct ip_header *h)
{
	struct iphdr ip;

	if (!load(from, at, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return false;
	map_ipv4(&h->source, ip.saddr);
	map_ipv4(&h->destination, ip.daddr);
	h->protocol = ip.protocol;
	h->next = at + ip.ihl * 4;
	h->id = ip.id;
	h->before.ttl = ip.ttl;
	h->before.protocol = ip.protocol;
	h->before.check = ip.check;
	if (ip.frag_off & bpf_htons(OFFSET | MORE_FRAGMENTS))
		h->fragment = ip.frag_off & bpf_htons(OFFSET) ? IS_FRAGMENT | IS_LATER_FRAGMENT : IS_FRAGMENT;
	return true;
}

static __always_inline bool parse_ipv6(packet_source *from, __u32 at, struct ip_header *h)
{
	struct ipv6hdr ip;
	int i;

	if (!load(from, at, &ip, sizeof(ip)) || ip.version != 6)
		return false;
	__builtin_memcpy(&h->source, &ip.saddr, sizeof(h->source));
	__builtin_memcpy(&h->destination, &ip.daddr, sizeof(h->destination));
	h->before.ttl = ip.hop_limit;
	h->protocol = ip.nexthdr;
	h->next = at + sizeof(ip);
	for (i = 0; i < MAX_EXTENSIONS; i++) {
		struct {
			__u8 next, length;
			__be16 offset;
			__be32 id;
		} extension;

		if (h->protocol != IPPROTO_HOPOPTS && h->protocol != IPPROTO_ROUTING &&
		    h->protocol != IPPROTO_DSTOPTS && h->protocol != IPPROTO_FRAGMENT)
			return true;
		if (!load(from, h->next, &extension, sizeof(extension)))
			return false;
		if (h->protocol == IPPROTO_FRAGMENT) {
			h->fragment =
				extension.offset & bpf_htons(0xfff8) ? IS_FRAGMENT | IS_LATER_FRAGMENT : IS_FRAGMENT;
			h->id = extension.id;
			h->next += sizeof(extension);
		} else {
			h->next += (extension.length + 1) * 8;
		}
		h->protocol = extension.next;
		if (h->fragment & IS_LATER_FRAGMENT)
			return true;
	}
	return false;
}

/*
 * Sets the ports of a later fragment to those of the first one, and has them known by the first. Returns false for a
 * later fragment whose first wasn't seen before.
 */
static __always_inline bool fragment_ports(struct ports *ports, const struct ip_header *h)
{
	struct fragment piece = {
		.source = h->source, .destination = h->destination, .id = h->id, .protocol = h->protocol};
	struct ports *known;

	if (!(h->fragment & IS_LATER_FRAGMENT)) {
		bpf_map_update_elem(&fl_fragments, &piece, ports, BPF_ANY);
		return true;
	}
	known = bpf_map_lookup_elem(&fl_fragments, &piece);
	if (known)
		*ports = *known;
	return known;
}

/* Folds a sum of sums into an Internet checksum. */
static __always_inline __u16 csum_fold(__u64 s)
{
	s = (s & 0xffffffff) + (s >> 32);
	s = (s & 0xffff) + ((s >> 16) & 0xffff) + (s >> 32);
	s = (s & 0xffff) + (s >> 16);
	s = (s & 0xffff) + (s >> 16);
	return ~s;
}

static __always_inline bool is_echo_request(__u32 type, bool six)
{
	return type == (six ? ICMPV6_ECHO_REQUEST : ICMP_ECHO);
}

static __always_inline bool is_echo_reply(__u32 type, bool six)
{
	return type == (six ? ICMPV6_ECHO_REPLY : ICMP_ECHOREPLY);
}

static __always_inline bool is_icmp_error(__u32 type, bool six)
{
	if (six)
		return type >= ICMPV6_DEST_UNREACH && type <= ICMPV6_PARAMPROB;
	return type == ICMP_DEST_UNREACH || type == ICMP_TIME_EXCEEDED || type == ICMP_PARAMETERPROB;
}
