/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * A packet at a device: parsed once, and rewritten. Checksums are updated incrementally, never computed anew: a damaged
 * packet stays damaged (RFC 1624).
 */
#pragma once

#include "device.h"
#include "service/lookup.h"

#include <linux/if_ether.h>

const volatile __u32 l2_len =
	ETH_HLEN; /* set at load time: length of the link-layer header, 0 at devices without one */

const volatile __u32 pod_network = 0; /* set at load time: 1 where the pod network is Fairlead's own */

typedef struct __sk_buff packet_source;

static __always_inline bool load(packet_source *skb, __u32 at, void *to, __u32 size)
{
	return !bpf_skb_load_bytes(skb, at, to, size);
}

#include "redirect.h"

/*
 * A parsed packet. Of an ICMP error, tuple is that of replies to the packet that it quotes. Of an ICMP echo request,
 * the identifier is the source port, of a reply the destination port; the other port is 0.
 */
struct packet {
	struct tuple tuple;
	__u32 transport;       /* offset of the header behind IP's, 0 in a later fragment */
	__u32 inner;	       /* offset of the IP header that an ICMP error quotes, else 0 */
	__u32 inner_transport; /* of the header behind that */
	__u32 flags;	       /* of TCP, or ECHO_REQUEST */
	__u32 six;
	__u32 now;		       /* seconds since boot */
	struct ttl_proto_check before; /* of IPv4, until its options change */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PACKET_EVENTS);
	__type(key, __u32);
	__type(value, __u64);
} fl_packets SEC(".maps");

static __always_inline void count_packet(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&fl_packets, &what);

	if (n)
		*n += 1;
}

static __always_inline __u32 now_seconds(void)
{
	return bpf_ktime_get_coarse_ns() / SECOND;
}

enum kind {
	KIND_OTHER, /* of a protocol that isn't served */
	/* Complete, TCP or UDP, without options or extension headers, in the linear part: */
	KIND_PLAIN4,
	KIND_PLAIN6,
	KIND_COMPLEX, /* any other */
};

/* Classifies a packet, and finds the ports of a plain one. */
static __always_inline enum kind classify(struct __sk_buff *skb, void *ip, void *end, struct udphdr **ports)
{
	struct ipv6hdr *six = ip;
	struct iphdr *four = ip;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		*ports = (void *)(four + 1);
		if ((void *)(*ports + 1) > end || four->protocol == IPPROTO_ICMP)
			return KIND_COMPLEX;
		if (four->protocol != IPPROTO_TCP && four->protocol != IPPROTO_UDP)
			return KIND_OTHER;
		return four->version != 4 || four->ihl != 5 || four->frag_off & bpf_htons(OFFSET | MORE_FRAGMENTS)
			       ? KIND_COMPLEX
			       : KIND_PLAIN4;
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		*ports = (void *)(six + 1);
		return (void *)(*ports + 1) > end || six->version != 6 ||
				       (six->nexthdr != IPPROTO_TCP && six->nexthdr != IPPROTO_UDP)
			       ? KIND_COMPLEX
			       : KIND_PLAIN6;
	}
	return KIND_OTHER;
}

/* Parses a plain packet in place. Returns false if the TCP header is incomplete. */
static __always_inline bool parse_plain(struct packet *p, void *ip, void *end, struct udphdr *ports, bool is6)
{
	struct tcphdr *tcp = (void *)ports;
	struct ipv6hdr *six = ip;
	struct iphdr *four = ip;
	int length; /* behind the IP header */

	__builtin_memset(p, 0, sizeof(*p));
	if (!is6) {
		length = (int)bpf_ntohs(four->tot_len) - (int)sizeof(*four);
		p->tuple.protocol = four->protocol;
		map_ipv4(&p->tuple.source, four->saddr);
		map_ipv4(&p->tuple.destination, four->daddr);
		p->before.ttl = four->ttl;
		p->before.protocol = four->protocol;
		p->before.check = four->check;
		p->transport = l2_len + sizeof(*four);
	} else {
		length = bpf_ntohs(six->payload_len);
		p->tuple.protocol = six->nexthdr;
		__builtin_memcpy(&p->tuple.source, &six->saddr, sizeof(six->saddr));
		__builtin_memcpy(&p->tuple.destination, &six->daddr, sizeof(six->daddr));
		p->transport = l2_len + sizeof(*six);
		p->six = true;
	}
	p->tuple.sport = ports->source;
	p->tuple.dport = ports->dest;
	p->now = now_seconds();
	if (p->tuple.protocol != IPPROTO_TCP)
		return true;
	if ((void *)(tcp + 1) > end)
		return false;
	p->flags = ((__u8 *)tcp)[FLAGS];
	if (length > tcp->doff * 4)
		p->flags |= DATA;
	return true;
}

static __always_inline bool is_icmp(__u8 protocol)
{
	return protocol == IPPROTO_ICMP || protocol == IPPROTO_ICMPV6;
}

/* Reads the ports of a TCP or UDP header, or, where the pod network is ours, the identifier of an ICMP echo. */
static __always_inline bool load_ports(struct __sk_buff *skb, __u32 at, __u8 protocol, struct ports *ports,
				       bool *request)
{
	struct icmp_echo echo;

	*request = false;
	if (protocol == IPPROTO_TCP || protocol == IPPROTO_UDP)
		return load(skb, at, ports, sizeof(*ports));
	if (!pod_network || !is_icmp(protocol) || !load(skb, at, &echo, sizeof(echo)))
		return false;
	*request = is_echo_request(echo.type, protocol == IPPROTO_ICMPV6);
	ports->sport = *request ? echo.id : 0;
	ports->dport = *request ? 0 : echo.id;
	return *request || is_echo_reply(echo.type, protocol == IPPROTO_ICMPV6);
}

/*
 * Parses a packet of TCP or UDP, an ICMP echo where the pod network is ours, or an ICMP error about one that goes to
 * that one's source: elsewhere it would be sent as the flow's own. Returns false for any other. Verified once, since it
 * isn't static.
 */
__noinline int parse_packet(struct __sk_buff *skb, struct packet *p)
{
	struct ip_header outer = {}, inner = {};
	struct ports ports = {};
	bool request;
	__u8 type;

	if (!p)
		return false;
	__builtin_memset(p, 0, sizeof(*p));
	p->six = skb->protocol == bpf_htons(ETH_P_IPV6);
	if (!(p->six ? parse_ipv6(skb, l2_len, &outer) : parse_ipv4(skb, l2_len, &outer)))
		return false;
	p->transport = outer.next;
	p->before = outer.before;
	p->now = now_seconds();
	if (outer.protocol == IPPROTO_TCP || outer.protocol == IPPROTO_UDP) {
		p->tuple.source = outer.source;
		p->tuple.destination = outer.destination;
		p->tuple.protocol = outer.protocol;
		if (!(outer.fragment & IS_LATER_FRAGMENT)) {
			if (!load(skb, outer.next, &ports, sizeof(ports)))
				return false;
			type = 0;
			if (outer.protocol == IPPROTO_TCP && bpf_skb_load_bytes(skb, outer.next + FLAGS, &type, 1))
				return false;
			p->flags = type;
		} else {
			p->transport = 0;
		}
		if (outer.fragment && !fragment_ports(&ports, &outer))
			return false;
		p->tuple.sport = ports.sport;
		p->tuple.dport = ports.dport;
		return true;
	}
	if (outer.protocol != (p->six ? IPPROTO_ICMPV6 : IPPROTO_ICMP) || outer.fragment ||
	    bpf_skb_load_bytes(skb, outer.next, &type, 1))
		return false;
	if (!is_icmp_error(type, p->six)) {
		if (!load_ports(skb, outer.next, outer.protocol, &ports, &request))
			return false;
		p->tuple.source = outer.source;
		p->tuple.destination = outer.destination;
		p->tuple.protocol = outer.protocol;
		p->tuple.sport = ports.sport;
		p->tuple.dport = ports.dport;
		p->flags = request ? ECHO_REQUEST : 0;
		return true;
	}
	p->inner = outer.next + sizeof(struct icmp);
	if (!(p->six ? parse_ipv6(skb, p->inner, &inner) : parse_ipv4(skb, p->inner, &inner)))
		return false;
	if (!addr_equal(&outer.destination, &inner.source) || inner.fragment & IS_LATER_FRAGMENT ||
	    !load_ports(skb, inner.next, inner.protocol, &ports, &request))
		return false;
	p->inner_transport = inner.next;
	p->tuple.source = inner.destination;
	p->tuple.destination = inner.source;
	p->tuple.protocol = inner.protocol;
	p->tuple.sport = ports.dport;
	p->tuple.dport = ports.sport;
	return true;
}

/* Returns the offset of the checksum in a TCP or UDP header. */
static __always_inline __u32 checksum_at(__u8 protocol)
{
	return protocol == IPPROTO_TCP ? offsetof(struct tcphdr, check) : offsetof(struct udphdr, check);
}

static __always_inline __u32 address_at(bool six, bool destination)
{
	if (six)
		return destination ? offsetof(struct ipv6hdr, daddr) : offsetof(struct ipv6hdr, saddr);
	return destination ? offsetof(struct iphdr, daddr) : offsetof(struct iphdr, saddr);
}

/*
 * Replaces an address in the IP header at an offset. check is the offset of a checksum that covers it: as part of the
 * pseudo header, or, without that flag, of the whole header; 0: none. The checksum of the IPv4 header compensates the
 * address: a checksum over the whole header needs no update, and one with a pseudo header is updated by the caller of
 * write_ipv4.
 */
static __always_inline void set_address(struct __sk_buff *skb, const struct packet *p, __u32 ip, bool destination,
					const struct address *old, const struct address *new, __u32 check, __u64 flags)
{
	__u32 at = ip + address_at(p->six, destination);
	__s64 difference;

	if (!p->six) {
		bpf_l3_csum_replace(skb, ip + offsetof(struct iphdr, check), old->word[3], new->word[3], 4);
		bpf_skb_store_bytes(skb, at, &new->word[3], 4, 0);
		return;
	}
	difference = bpf_csum_diff((__be32 *)old, sizeof(*old), (__be32 *)new, sizeof(*new), 0);
	if (check)
		bpf_l4_csum_replace(skb, check, 0, difference, flags);
	bpf_skb_store_bytes(skb, at, new, sizeof(*new), flags & BPF_F_PSEUDO_HDR ? BPF_F_RECOMPUTE_CSUM : 0);
}

/*
 * Writes the addresses of an IPv4 packet, one of which has changed, and the ports, if these follow directly: one write
 * costs as much as another. Updates the header's checksum (RFC 1624, 3). Returns true if nothing is left to write.
 */
static __always_inline bool write_ipv4(struct __sk_buff *skb, struct packet *p, __be32 old, __be32 new)
{
	const __u32 at = l2_len + offsetof(struct iphdr, ttl);
	struct {
		struct ttl_proto_check before;
		__be32 source, destination;
		struct ports ports;
	} h;

	p->before.check = csum_fold((__u64)(__u16)~p->before.check + (__u32)~old + new);
	h.before = p->before;
	h.source = p->tuple.source.word[3];
	h.destination = p->tuple.destination.word[3];
	h.ports.sport = p->tuple.sport;
	h.ports.dport = p->tuple.dport;
	if (p->transport == l2_len + sizeof(struct iphdr))
		return !bpf_skb_store_bytes(skb, at, &h, sizeof(h), 0);
	bpf_skb_store_bytes(skb, at, &h, offsetof(typeof(h), ports), 0);
	return false;
}

/* Replaces a packet's destination, or its source. */
__noinline int rewrite_end(struct __sk_buff *skb, struct packet *p, const struct addr_port *new, int destination)
{
	struct address *address, old;
	__u32 check, at;
	__u64 flags = 0;
	__be16 *port;

	if (!p || !new)
		return false;
	address = destination ? &p->tuple.destination : &p->tuple.source;
	port = destination ? &p->tuple.dport : &p->tuple.sport;
	check = p->transport ? p->transport + checksum_at(p->tuple.protocol) : 0;
	if (p->tuple.protocol == IPPROTO_UDP)
		flags = BPF_F_MARK_MANGLED_0;
	at = p->transport && *port != new->port ? p->transport + (destination ? 2 : 0) : 0;
	if (at)
		bpf_l4_csum_replace(skb, check, *port, new->port, flags | 2);
	old = *address;
	*address = new->address;
	*port = new->port;
	flags |= BPF_F_PSEUDO_HDR;
	if (p->six) {
		set_address(skb, p, l2_len, destination, &old, &new->address, check, flags);
	} else {
		if (check)
			bpf_l4_csum_replace(skb, check, old.word[3], new->address.word[3], flags | 4);
		if (write_ipv4(skb, p, old.word[3], new->address.word[3]))
			return true;
	}
	if (at)
		bpf_skb_store_bytes(skb, at, &new->port, 2, 0);
	return true;
}

/*
 * Rewrites an ICMP error: the packet that it quotes goes the other way, so the destination of p's tuple is the source
 * there, and vice versa. The error's own address is replaced, too, if it is the same one.
 */
__noinline int rewrite_error(struct __sk_buff *skb, struct packet *p, const struct addr_port *new, int destination)
{
	struct ip_header outer = {};
	struct address *address, *own;
	__u32 check, at;
	__be16 *port;

	if (!p || !new)
		return false;
	if (!(p->six ? parse_ipv6(skb, l2_len, &outer) : parse_ipv4(skb, l2_len, &outer)))
		return false;
	address = destination ? &p->tuple.destination : &p->tuple.source;
	port = destination ? &p->tuple.dport : &p->tuple.sport;
	own = destination ? &outer.destination : &outer.source;
	check = p->transport + offsetof(struct icmp, check);
	set_address(skb, p, p->inner, !destination, address, &new->address, check, 0);
	if (*port != new->port) {
		at = p->inner_transport + (is_icmp(p->tuple.protocol) ? offsetof(struct icmp_echo, id)
					   : destination	      ? 0
								      : 2);
		bpf_l4_csum_replace(skb, check, *port, new->port, 2);
		bpf_skb_store_bytes(skb, at, &new->port, 2, 0);
	}
	if (addr_equal(own, address))
		set_address(skb, p, l2_len, destination, own, &new->address, p->six ? check : 0, BPF_F_PSEUDO_HDR);
	*address = new->address;
	*port = new->port;
	return true;
}

/* Replaces the destination of an ICMP echo, or its source, with the identifier. */
__noinline int rewrite_echo(struct __sk_buff *skb, struct packet *p, const struct addr_port *new, int destination)
{
	struct address *address, old;
	__be16 *port;
	__u32 check;

	if (!p || !new)
		return false;
	address = destination ? &p->tuple.destination : &p->tuple.source;
	port = destination ? &p->tuple.dport : &p->tuple.sport;
	check = p->transport + offsetof(struct icmp_echo, check);
	if (*port != new->port) {
		bpf_l4_csum_replace(skb, check, *port, new->port, 2);
		bpf_skb_store_bytes(skb, p->transport + offsetof(struct icmp_echo, id), &new->port, 2, 0);
	}
	old = *address;
	*address = new->address;
	*port = new->port;
	set_address(skb, p, l2_len, destination, &old, &new->address, p->six ? check : 0, BPF_F_PSEUDO_HDR);
	return true;
}

static __always_inline int rewrite(struct __sk_buff *skb, struct packet *p, const struct addr_port *new,
				   bool destination)
{
	if (pod_network && !p->inner && is_icmp(p->tuple.protocol))
		return rewrite_echo(skb, p, new, destination);
	return p->inner ? rewrite_error(skb, p, new, destination) : rewrite_end(skb, p, new, destination);
}
