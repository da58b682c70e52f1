//go:build ignore

/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The program at a device, one for each direction: parse (glance), serve Services (serve_in, serve_out), deliver (the
 * fast path). Network policies of both ends are evaluated in deliver(), since a redirected packet skips netfilter's
 * hook and the program at the pod's device; of all other packets by that hook (policy.c).
 */
#include "fastpath.h"
#include "nat.h"

char _license[] SEC("license") = "GPL";

const enum packet_event unused_event __attribute__((unused));
const enum nat_state unused_state __attribute__((unused));
const enum port_bit unused_use __attribute__((unused));
const enum slow_reason unused_slow __attribute__((unused));
const enum hook_role unused_role __attribute__((unused));
const enum nf_inet_hooks unused_point __attribute__((unused));
const enum unmatched_action unused_action __attribute__((unused));
const enum masq_range unused_range __attribute__((unused));

/* Which lookups a packet needs, as its ports and addresses show. */
enum glance {
	SEE_NOTHING,
	SEE_DESTINATION = 1,
	SEE_SOURCE = 2,
	SEE_OPENING = 4,
	SEE_COMPLEX = 8,
	SEE_NO_SERVICE = 16, /* nor at egress */
	SEE_DIRECT = 32,     /* whether a client outside the cluster sends to a pod */
	SEE_NODE_UDP = 64    /* whether another node sends UDP with a node port's number as source port */
};

/*
 * Returns whether frontends or clients' flows are at an address, or at one with the same hash, by the exclusive or of
 * its words.
 */
static __noinline bool at_address(__be32 words)
{
	struct port_bits *u = port_bits_of(&fl_addr_bits);

	return u && u->of[short_hash(words)] & (BIT_SERVICE | EITHER_GENERATION(BIT_CLIENT));
}

static __always_inline __be32 address_words(void *ip, bool is6)
{
	struct in6_addr *a = &((struct ipv6hdr *)ip)->daddr;

	if (!is6)
		return bpf_htonl(0xffff) ^ ((struct iphdr *)ip)->daddr;
	return a->in6_u.u6_addr32[0] ^ a->in6_u.u6_addr32[1] ^ a->in6_u.u6_addr32[2] ^ a->in6_u.u6_addr32[3];
}

/* Returns the part of an address by which networks of Services differ from most others. */
static __always_inline __be32 network_words(void *ip, bool is6)
{
	struct in6_addr *a = &((struct ipv6hdr *)ip)->daddr;

	if (!is6)
		return ((struct iphdr *)ip)->daddr & bpf_htonl(0xffff0000);
	return a->in6_u.u6_addr32[0] ^ a->in6_u.u6_addr32[1];
}

static __always_inline __u8 protocol_of(void *ip, bool is6)
{
	return is6 ? ((struct ipv6hdr *)ip)->nexthdr : ((struct iphdr *)ip)->protocol;
}

/* Returns whether a plain packet may open a flow. */
static __always_inline bool opens_flow(void *ip, void *end, struct udphdr *ports_of, bool is6)
{
	struct tcphdr *tcp = (void *)ports_of;

	return protocol_of(ip, is6) != IPPROTO_TCP || ((void *)(tcp + 1) <= end && tcp->syn && !tcp->ack);
}

/*
 * Returns whether a plain packet opens a flow to an address that only Services have, or to one with the same hash.
 */
static __always_inline bool opens_to_service(void *ip, void *end, struct udphdr *ports_of, bool is6)
{
	struct port_bits *u;

	if (!opens_flow(ip, end, ports_of, is6))
		return false;
	u = port_bits_of(&fl_addr_bits);
	return u && (u->of[short_hash(address_words(ip, is6))] & BIT_SERVICE ||
		     u->of[short_hash(network_words(ip, is6))] & BIT_SERVICE_NET);
}

/* Returns whether a packet's destination, whose port has these bits, may be an entry. */
static __always_inline bool may_be_service(__u32 use, void *ip, bool is6)
{
	return unlikely(use & (BIT_SERVICE | EITHER_GENERATION(BIT_CLIENT))) &&
	       (use & BIT_NODE_PORT || at_address(address_words(ip, is6)));
}

static __always_inline __u32 glance_at_ports(void *ip, const struct udphdr *ports_of, bool is6, bool in, bool own)
{
	struct port_bits *u = port_bits_of(&fl_port_bits);
	__u32 use, from, may = SEE_NOTHING;

	if (!u)
		return SEE_NOTHING;
	use = u->of[ports_of->dest];
	if (in) {
		if (use & EITHER_GENERATION(BIT_MASQ_PORT) || may_be_service(use, ip, is6))
			may = SEE_DESTINATION;
		if (use & EITHER_GENERATION(BIT_BACKEND))
			may |= SEE_OPENING;
		from = u->of[ports_of->source];
		if (!may && !(use & EITHER_GENERATION(BIT_MASQ_BACKEND)) && !(from & EITHER_GENERATION(BIT_BACKEND)))
			may = SEE_NO_SERVICE;
		return unlikely(from & BIT_NODE_PORT) && protocol_of(ip, is6) == IPPROTO_UDP ? may | SEE_NODE_UDP : may;
	}
	if (own && may_be_service(use, ip, is6))
		may = SEE_DESTINATION;
	from = u->of[ports_of->source];
	return use & EITHER_GENERATION(BIT_MASQ_BACKEND) || from & EITHER_GENERATION(BIT_BACKEND) ||
			       (own && from & BIT_NODE_PORT)
		       ? may | SEE_SOURCE
		       : may;
}

/*
 * Glances at a plain packet's ports and addresses; if it needs a lookup, parses it. SEE_COMPLEX where it isn't that
 * plain.
 */
static __always_inline __u32 glance_plain(struct packet *p, void *ip, void *end, struct udphdr *ports_of, bool is6,
					  bool in, bool own)
{
	__u32 may = glance_at_ports(ip, ports_of, is6, in, own);

	if (!(may & SEE_DESTINATION) && (in || own) && opens_to_service(ip, end, ports_of, is6))
		may = (may & ~SEE_NO_SERVICE) | SEE_DESTINATION;
	if (pod_network && !in && !own && opens_flow(ip, end, ports_of, is6)) /* maybe out of the cluster */
		may |= SEE_SOURCE;
	if (pod_network && in && protocol_of(ip, is6) == IPPROTO_UDP) /* maybe from there */
		may |= SEE_DIRECT;
	return likely(!(may & ~SEE_NO_SERVICE)) || parse_plain(p, ip, end, ports_of, is6) ? may : SEE_COMPLEX;
}

/* Finds cheaply which lookups a packet needs, and parses it if it needs any. Packets that aren't plain need all. */
static __always_inline __u32 glance(struct __sk_buff *skb, struct packet *p, bool in, bool own)
{
	void *ip = (void *)(long)skb->data + l2_len, *end = (void *)(long)skb->data_end;
	struct udphdr *ports_of;
	__u32 may = SEE_COMPLEX;
	enum kind kind;

	if (skb->vlan_present)
		return SEE_NOTHING; /* the VLAN's own device handles it */
	kind = classify(skb, ip, end, &ports_of);
	if (kind == KIND_OTHER)
		return SEE_NOTHING;
	if (kind == KIND_PLAIN4)
		may = glance_plain(p, ip, end, ports_of, false, in, own);
	if (kind == KIND_PLAIN6)
		may = glance_plain(p, ip, end, ports_of, true, in, own);
	if (may != SEE_COMPLEX)
		return may;
	return parse_packet(skb, p) ? SEE_DESTINATION | SEE_SOURCE | SEE_OPENING | SEE_DIRECT | SEE_NODE_UDP
				    : SEE_NOTHING;
}

/* Serves Services for a packet that enters by a device. */
static __always_inline int serve_in(struct __sk_buff *skb, struct packet *p, __u32 may)
{
	int result;

	if (dsr && !p->inner) {
		result = receive_dsr(skb, p);
		if (result != NO_DSR_OPTION)
			return result;
	}
	/* A packet that a bridge port has translated enters again by the bridge: it begins no flow. */
	if (may & SEE_OPENING && skb->tc_index != NAT_MARK && may_begin(p))
		forget_closed_flow(p);
	if (!(may & SEE_DESTINATION))
		return TCX_NEXT;
	result = translate_destination(skb, p, false);
	return result == NEW_FLOW ? serve_new(skb, p, false) : result;
}

/* Serves Services for a packet that leaves by a device. */
static __always_inline int serve_out(struct __sk_buff *skb, struct packet *p, __u32 may, bool own, bool marked)
{
	int result;

	if (own && may & SEE_DESTINATION) {
		result = translate_destination(skb, p, true);
		if (result == NEW_FLOW)
			result = serve_new(skb, p, true);
		if (result != TCX_NEXT)
			return result;
	}
	if (own && p->tuple.protocol == IPPROTO_UDP && !p->inner)
		record_node_udp(skb, p);
	return may & SEE_SOURCE ? translate_source(skb, p, own, marked) : TCX_NEXT;
}

/* Handles a packet that enters by a device. */
SEC("tcx/ingress")
int arrive(struct __sk_buff *skb)
{
	struct packet p;
	__u32 may = glance(skb, &p, true, false);
	int result = TCX_NEXT;

	if (likely(may == SEE_NO_SERVICE))
		return l2_len ? deliver(skb) : TCX_NEXT;
	if (may & SEE_NODE_UDP)
		record_remote_udp(&p);
	if (may & ~(SEE_NO_SERVICE | SEE_DIRECT | SEE_NODE_UDP))
		result = serve_in(skb, &p, may);
	if (result != TCX_NEXT)
		return result;
	if (pod_network && may & SEE_DIRECT)
		record_direct(skb, &p);
	return l2_len && may & SEE_NO_SERVICE ? deliver(skb) : TCX_NEXT;
}

/* Handles a packet that leaves by a device. */
SEC("tcx/egress")
int leave(struct __sk_buff *skb)
{
	bool own = !skb->ingress_ifindex, marked = skb->tc_index == NAT_MARK;
	struct packet p;
	__u32 may = glance(skb, &p, false, own);

	if (marked)
		skb->tc_index = 0;
	return may ? serve_out(skb, &p, may, own, marked) : TCX_NEXT;
}
