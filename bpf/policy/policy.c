//go:build ignore

/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Network policies at netfilter's hooks (BPF_PROG_TYPE_NETFILTER, Linux 6.4): forward, input and output, all behind
 * the translation of destinations and before that of sources, with every mode of Services. And in the fast path of mode
 * ebpf: what the device program calls for a packet that would bypass these hooks.
 */
#include "kernel.h"

/* kernel/bpf/helpers.c and net/core/filter.c, since Linux 6.4 */
int bpf_dynptr_from_skb(struct __sk_buff *, __u64, struct bpf_dynptr *) __ksym;
void *bpf_dynptr_slice(const struct bpf_dynptr *, __u32, void *, __u32) __ksym;

typedef const struct bpf_dynptr packet_source;

static __always_inline _Bool load(packet_source *p, __u32 at, void *to, __u32 size)
{
	return !bpf_dynptr_read(to, size, p, at, 0);
}

enum { l2_len = 14 /* ETH_HLEN: the fast path is for devices with such a header */ };

#include "policy.h"
#include "write.h"

char _license[] SEC("license") = "GPL";

const enum policy_event unused_event __attribute__((unused));
const enum side_flag unused_side __attribute__((unused));
const enum exempt_flag unused_exempt __attribute__((unused));
const enum policy_flag unused_flag __attribute__((unused));
const enum device_flag unused_device __attribute__((unused));
const enum decision unused_decision __attribute__((unused));
const enum recording unused_recording __attribute__((unused));
const enum lookup_count unused_lookups __attribute__((unused));
const struct denial *unused_denial __attribute__((unused));

/* include/uapi/linux/netfilter.h */
enum { NF_DROP, NF_ACCEPT };
enum { NF_INET_LOCAL_IN = 1 };
#define NFPROTO_IPV6 10
#define LOOPBACK_IFINDEX 1 /* include/net/net_namespace.h */

/* include/uapi/linux/icmp.h and icmpv6.h */
enum {
	NDISC_FIRST = 133,
	NDISC_LAST = 137,
};

#define SCTP_COMMON_HEADER 12
#define SCTP_INIT 1 /* RFC 9260, 3.2: the type of a chunk */

/*
 * Sets the ports that stand for the ID of an ICMP echo, so that a request and its replies have one flow, and a request
 * in the other direction another: ID and ID + 1 of a request, the reverse of a reply. Returns false for any other
 * message.
 */
static __always_inline bool echo_ports(struct ports *ports, const struct icmp *m, bool six)
{
	__be16 id = m->rest;
	__be16 next = bpf_htons(bpf_ntohs(id) + 1);
	bool request = is_echo_request(m->type, six);

	if (!request && !is_echo_reply(m->type, six))
		return false;
	ports->sport = request ? id : next;
	ports->dport = request ? next : id;
	return true;
}

/* Parses an ICMP message about or of a flow. */
static __always_inline bool parse_icmp(packet_source *from, struct policy_packet *p, struct ip_header *outer, bool six)
{
	struct ip_header inner = {};
	struct ports ports = {};
	struct icmp m;

	p->kind = PACKET_SINGLE;
	if (!load(from, outer->next, &m, sizeof(m)))
		return false;
	if (echo_ports(&ports, &m, six)) {
		p->kind = is_echo_request(m.type, six) ? PACKET_FLOW : PACKET_ECHO_REPLY;
		p->tuple.sport = ports.sport;
		p->tuple.dport = ports.dport;
		return true;
	}
	if (six && m.type >= NDISC_FIRST && m.type <= NDISC_LAST && outer->before.ttl == 255)
		p->kind = PACKET_EXEMPT;
	if (!is_icmp_error(m.type, six))
		return true;
	if (!(six ? parse_ipv6(from, outer->next + sizeof(m), &inner)
		  : parse_ipv4(from, outer->next + sizeof(m), &inner)) ||
	    inner.fragment & IS_LATER_FRAGMENT)
		return true;
	if (has_ports(inner.protocol)) {
		if (!load(from, inner.next, &ports, sizeof(ports)))
			return true;
	} else if (inner.protocol == (six ? IPPROTO_ICMPV6 : IPPROTO_ICMP)) {
		if (!load(from, inner.next, &m, sizeof(m)) || !echo_ports(&ports, &m, six))
			return true;
	}
	p->kind = PACKET_ERROR;
	p->quoted.source = inner.source;
	p->quoted.destination = inner.destination;
	p->quoted.protocol = inner.protocol;
	p->quoted.sport = ports.sport;
	p->quoted.dport = ports.dport;
	return true;
}

/* Parses what follows the IP header. Returns false where that isn't possible. */
static __always_inline bool parse_transport(packet_source *from, struct policy_packet *p, struct ip_header *h, bool six)
{
	struct ports ports = {};
	__u8 byte = 0;

	if (h->protocol == (six ? IPPROTO_ICMPV6 : IPPROTO_ICMP))
		return !h->fragment && parse_icmp(from, p, h, six);
	if (!has_ports(h->protocol))
		return true;
	if (!(h->fragment & IS_LATER_FRAGMENT)) {
		if (!load(from, h->next, &ports, sizeof(ports)))
			return false;
		if (h->protocol == IPPROTO_TCP && !load(from, h->next + FLAGS, &byte, 1))
			return false;
		p->flags = byte;
		if (h->protocol == IPPROTO_SCTP && load(from, h->next + SCTP_COMMON_HEADER, &byte, 1) &&
		    byte == SCTP_INIT)
			p->flags = SYN;
	}
	if (h->fragment && !fragment_ports(&ports, h))
		return false;
	if (h->fragment & IS_LATER_FRAGMENT)
		p->flags = ACK;
	p->tuple.sport = ports.sport;
	p->tuple.dport = ports.dport;
	return true;
}

static __noinline int parse(packet_source *from, struct policy_packet *p, int six)
{
	struct ip_header h = {};
	bool ip = six ? parse_ipv6(from, 0, &h) : parse_ipv4(from, 0, &h);

	p->tuple.source = h.source;
	p->tuple.destination = h.destination;
	p->tuple.protocol = h.protocol;
	/* IPv4 addresses within IPv6 are never on the wire (RFC 4291, 2.5.5.2). */
	if (!ip || !parse_transport(from, p, &h, six) || (six && (is_ipv4(&h.source) || is_ipv4(&h.destination))))
		p->kind = PACKET_UNPARSED;
	return 0;
}

/* Reports whether a device leads to the proxy of a mode that proxies packets itself (model.ProxyDevice). */
static __always_inline bool is_proxy(const struct net_device *device)
{
	const union {
		char name[16]; /* IFNAMSIZ */
		__u64 words[2];
	} proxy = {"fairlead-room"};
	const __u64 *name = (const __u64 *)device->name;

	return name[0] == proxy.words[0] && name[1] == proxy.words[1];
}

SEC("netfilter")
int policy(struct bpf_nf_ctx *ctx)
{
	const struct nf_hook_state *state = ctx->state;
	struct net_device *in = state->in, *out = state->out;
	struct policy_packet p = {};
	struct bpf_dynptr from;

	/* Of the node to itself. What leaves by loopback may have been translated since it was routed, to a pod's
	 * address. */
	if (in && in->ifindex == LOOPBACK_IFINDEX)
		return NF_ACCEPT;
	if (bpf_dynptr_from_skb((struct __sk_buff *)ctx->skb, 0, &from))
		return NF_DROP;
	parse(&from, &p, state->pf == NFPROTO_IPV6);
	p.to_node = state->hook == NF_INET_LOCAL_IN || (in && out && is_proxy(out)); /* forwarded to it */
	if (in) {
		p.ifindex = in->ifindex;
		p.device[0] = ((__u64 *)in->name)[0];
		p.device[1] = ((__u64 *)in->name)[1];
	}
	return decide_packet(&p) >= POLICY_DROP ? NF_DROP : NF_ACCEPT;
}

const volatile __u32 hook_program = 0; /* set at load time: the ID of the program at netfilter's hooks */

/* Parses a plain packet, which the device program has checked. Returns false if the TCP header is incomplete. */
static __always_inline bool parse_plain(struct policy_packet *p, void *ip, void *end, bool is6)
{
	struct ipv6hdr *six = ip;
	struct iphdr *four = ip;
	struct udphdr *ports = is6 ? (void *)(six + 1) : (void *)(four + 1);
	struct tcphdr *tcp = (void *)ports;

	if ((void *)(ports + 1) > end)
		return false;
	if (is6) {
		__builtin_memcpy(&p->tuple.source, &six->saddr, sizeof(six->saddr));
		__builtin_memcpy(&p->tuple.destination, &six->daddr, sizeof(six->daddr));
		p->tuple.protocol = six->nexthdr;
		if (is_ipv4(&p->tuple.source) || is_ipv4(&p->tuple.destination))
			return false;
	} else {
		map_ipv4(&p->tuple.source, four->saddr);
		map_ipv4(&p->tuple.destination, four->daddr);
		p->tuple.protocol = four->protocol;
	}
	p->tuple.sport = ports->source;
	p->tuple.dport = ports->dest;
	if (p->tuple.protocol != IPPROTO_TCP)
		return true;
	if ((void *)(tcp + 1) > end)
		return false;
	p->flags = ((__u8 *)tcp)[FLAGS];
	return true;
}

/* Redirects an accepted packet as cb says. */
__noinline int redirect_accepted(struct __sk_buff *skb, int six)
{
	__u32 words[] = {skb->cb[0], skb->cb[1], skb->cb[2], skb->cb[3]};
	void *ip = (void *)(long)skb->data + sizeof(struct ethhdr), *end = (void *)(long)skb->data_end;
	struct redirect target;

	__builtin_memcpy(&target, words, sizeof(target));
	if (ip + sizeof(struct iphdr) > end ||
	    !(six ? rewrite_l2(skb, ip, &target, true) : rewrite_l2(skb, ip, &target, false)))
		return TCX_NEXT;
	count_event(POLICY_REDIRECTED);
	return redirect(&target, skb->cb[HOOK_PROGRAM] & TO_OTHER_NODE);
}

/*
 * Resets both ends of a TCP connection by one of its segments (RFC 9293, 3.5.2): its receiver by a reset in its place,
 * which is redirected as cb says, its sender by the reply. A reset is dropped.
 */
__noinline int reset_ends(struct __sk_buff *skb, const struct tuple *of, int six)
{
	__u32 words[] = {skb->cb[0], skb->cb[1], skb->cb[2], skb->cb[3]};
	struct tcphdr t, r = {.doff = 5, .rst = 1, .ack = 1};
	struct redirect target;
	struct ethhdr was, e;
	bool is6 = six;

	if (!of || bpf_skb_load_bytes(skb, 0, &was, sizeof(was)) ||
	    bpf_skb_load_bytes(skb, l2_len + (is6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)), &t, sizeof(t)) ||
	    t.rst || !t.ack)
		return TC_ACT_SHOT;
	__builtin_memcpy(&target, words, sizeof(target));
	r.source = t.source;
	r.dest = t.dest;
	r.seq = t.seq;
	r.ack_seq = t.ack_seq;
	if (!write_segment(skb, &of->source, &of->destination, is6, &r))
		return TC_ACT_SHOT;
	e = was;
	__builtin_memcpy(e.h_dest, target.dst_mac, sizeof(e.h_dest));
	__builtin_memcpy(e.h_source, target.src_mac, sizeof(e.h_source));
	bpf_skb_store_bytes(skb, 0, &e, sizeof(e), 0);
	bpf_clone_redirect(skb, target.out_ifindex, 0);
	r.source = t.dest;
	r.dest = t.source;
	r.seq = t.ack_seq;
	r.ack = 0;
	r.ack_seq = 0;
	if (!write_segment(skb, &of->destination, &of->source, is6, &r))
		return TC_ACT_SHOT;
	swap_macs(&was);
	bpf_skb_store_bytes(skb, 0, &was, sizeof(was), 0);
	return bpf_redirect(skb->ifindex, 0);
}

/*
 * Evaluates policies for a plain packet that the device program passes, and redirects it as cb says. The host stack
 * has it while the only hook in forwarding that would handle it isn't the program that this one belongs to, or where it
 * can't be read here.
 */
SEC("tcx/ingress")
int policy_fast_path(struct __sk_buff *skb)
{
	void *ip = (void *)(long)skb->data + sizeof(struct ethhdr), *end = (void *)(long)skb->data_end;
	struct sk_buff *kernels = bpf_cast_to_kern_ctx(skb);
	bool six = skb->protocol != bpf_htons(ETH_P_IP);
	struct net_device *in = kernels->dev;
	struct policy_packet p = {};
	int result;

	if ((skb->cb[HOOK_PROGRAM] & ~TO_OTHER_NODE) != hook_program ||
	    !(six ? parse_plain(&p, ip, end, true) : parse_plain(&p, ip, end, false)))
		return TCX_NEXT;
	p.ifindex = skb->ifindex;
	p.device[0] = ((__u64 *)in->name)[0];
	p.device[1] = ((__u64 *)in->name)[1];
	result = decide_packet(&p);
	if (result == POLICY_REVOKED && p.tuple.protocol == IPPROTO_TCP)
		return reset_ends(skb, &p.tuple, six);
	return result >= POLICY_DROP ? TC_ACT_SHOT : redirect_accepted(skb, six);
}
