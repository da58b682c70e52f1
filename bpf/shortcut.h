/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The shortcut: a packet that comes in by a device of the node, for a pod of the node, is handed over to the pod at once
 * (bpf_redirect_peer), past the node's stack and the queue of the pod's device. It is taken only while nothing in the kernel would
 * look at the packet on its way there: no hook of netfilter, no policy of IPsec, no rule of routing, no program but ours, no queue that shapes, no tap.
 * The kernel's own structs say so and are read for each packet: a rule holds from the next packet on. Where packets go is
 * for the kernel's routes to say, as ever; and a source that they lead elsewhere is left to the kernel, which may take it for forged.
 */
#pragma once

#include "packet.h"

const volatile __u32 blind = 0; /* set at load time: netfilter and IPsec don't matter */

#define AF_INET 2
#define AF_INET6 10

/* include/uapi/linux/netfilter.h, netfilter_ipv4.h and netfilter_ipv6.h, xfrm.h, if_packet.h */
enum { NF_INET_PRE_ROUTING = 0, NF_INET_FORWARD = 2, NF_INET_POST_ROUTING = 4, NF_IP_PRI_SELINUX_FIRST = -225 };
enum { XFRM_POLICY_OUT = 1, XFRM_POLICY_FWD = 2 };
#define PACKET_HOST 0

#define NETDEV_HASHENTRIES 256 /* include/linux/netdevice.h: of net.dev_index_head */
#define IN_A_ROW 8	       /* how many devices of one hash are looked at */

/* For how many ticks a lane is as it was found: a neighbour's address, or an IPv6 route that is gone, doesn't count as a change of routes. */
#define LASTS 64

/* The devices of the node's pods, by index: veth or netkit, whose other end is in another network namespace. Kept by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, __u32);
	__type(value, __u32);
} pods SEC(".maps");

/* By processor: nobody writes a lane while another reads it. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LANES);
	__type(key, __u32);
	__type(value, struct lane);
} lanes SEC(".maps");

/* Whether this kernel's structs are those that we know: another one's packets go through its stack. */
static __always_inline bool knows(struct net *net, struct net_device *d, bool six)
{
	if (six && !(bpf_core_field_exists(net->ipv6.fib6_sernum)))
		return false;
	return bpf_core_field_exists(net->nf.hooks_ipv4) && bpf_core_field_exists(net->nf.hooks_ipv6) && bpf_core_field_exists(net->ipv4.rt_genid) &&
	       bpf_core_field_exists(net->dev_index_head) && bpf_core_field_exists(d->index_hlist) && bpf_core_field_exists(d->rx_handler) && bpf_core_field_exists(d->_tx) &&
	       bpf_core_field_exists(d->tcx_ingress) && bpf_core_field_exists(d->tcx_egress) && bpf_core_field_exists(d->ptype_all) &&
	       bpf_core_field_exists(((struct tcx_entry *)0)->miniq) && bpf_core_field_exists(((struct tcx_entry *)0)->bundle);
}

/*
 * Whether some hook is AppArmor's alone, which looks at packets with a security mark (security/apparmor/lsm.c: apparmor_ip_postroute). Only such modules
 * have one of that priority with nothing of its own; SELinux hooks into forwarding besides.
 */
static __always_inline bool apparmors(struct nf_hook_entries *e)
{
	void *behind = (void *)e + bpf_core_field_offset(struct nf_hook_entries, hooks) + bpf_core_type_size(struct nf_hook_entry);
	struct nf_hook_ops *ops = cast(cast(behind, struct hlist_head)->first /* the pointer there */, struct nf_hook_ops);

	return e->num_hook_entries == 1 && !ops->priv && ops->priority == NF_IP_PRI_SELINUX_FIRST;
}

/* Whether netfilter has a hook that sees what a network namespace forwards. */
static __always_inline bool filtered(struct sk_buff *skb, struct net *net, bool six)
{
	struct nf_hook_entries *before = six ? net->nf.hooks_ipv6[NF_INET_PRE_ROUTING] : net->nf.hooks_ipv4[NF_INET_PRE_ROUTING];
	struct nf_hook_entries *forward = six ? net->nf.hooks_ipv6[NF_INET_FORWARD] : net->nf.hooks_ipv4[NF_INET_FORWARD];
	struct nf_hook_entries *behind = six ? net->nf.hooks_ipv6[NF_INET_POST_ROUTING] : net->nf.hooks_ipv4[NF_INET_POST_ROUTING];

	if (before)
		return true;
	barrier(); /* one by one: the verifier takes no sum of pointers */
	if (forward)
		return true;
	return behind && ((bpf_core_field_exists(skb->secmark) && skb->secmark) || !apparmors(behind));
}

/* Whether IPsec has a policy for what a network namespace forwards. */
static __always_inline bool transformed(struct net *net)
{
	return bpf_core_field_exists(net->xfrm) && net->xfrm.policy_count[XFRM_POLICY_OUT] | net->xfrm.policy_count[XFRM_POLICY_FWD];
}

/* Whether there are, or ever were, rules of routing by more than addresses. */
static __always_inline bool ruled(struct net *net, bool six)
{
	if (six)
		return bpf_core_field_exists(net->ipv6.fib6_has_custom_rules) && net->ipv6.fib6_has_custom_rules;
	return bpf_core_field_exists(net->ipv4.fib_has_custom_rules) && net->ipv4.fib_has_custom_rules;
}

/* Whether our program is the only one at a device's hook, and no classifier is there. */
static __always_inline bool alone(struct bpf_mprog_entry *e)
{
	return e && !e->fp_items[1].prog && !cast((void *)e->parent - bpf_core_field_offset(struct tcx_entry, bundle), struct tcx_entry)->miniq;
}

/* Whether nobody but us sees what comes in by a device, before it is routed. */
static __always_inline bool arrives_unseen(struct net_device *d)
{
	return !d->rx_handler && alone(d->tcx_ingress) && (!bpf_core_field_exists(d->nf_hooks_ingress) || !d->nf_hooks_ingress);
}

/* Whether nobody but us sees what leaves by a device, and nothing has it wait. */
static __always_inline bool leaves_unseen(struct net_device *d)
{
	return alone(d->tcx_egress) && (!bpf_core_field_exists(d->nf_hooks_egress) || !d->nf_hooks_egress) && !d->_tx->qdisc->enqueue &&
	       (void *)d->ptype_all.next == (void *)&d->ptype_all;
}

/* A device of a network namespace, by its index. */
static __always_inline struct net_device *device_of(struct net *net, __u32 index)
{
	struct hlist_node *n = cast((void *)net->dev_index_head + index % NETDEV_HASHENTRIES * sizeof(struct hlist_head), struct hlist_head)->first;
	int i;

	for (i = 0; i < IN_A_ROW && n; i++) {
		struct net_device *d = cast((void *)n - bpf_core_field_offset(struct net_device, index_hlist), struct net_device);

		if (d->ifindex == index)
			return d;
		n = n->next;
	}
	return NULL;
}

/* How long a plain packet is on the wire, from its IP header on; the longest of those that one stands for (GSO). */
static __always_inline __u32 length_of(struct __sk_buff *skb, void *ip, void *end, bool is6)
{
	__u32 header = is6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	__u8 protocol = is6 ? ((struct ipv6hdr *)ip)->nexthdr : ((struct iphdr *)ip)->protocol;
	struct tcphdr *tcp = ip + header;

	if (!skb->gso_size)
		return skb->len - head;
	if (protocol != IPPROTO_TCP)
		return header + sizeof(struct udphdr) + skb->gso_size;
	return (void *)(tcp + 1) > end ? ~0U : header + tcp->doff * 4 + skb->gso_size;
}

/* Asks the kernel where a lane leads. */
__noinline int survey(struct __sk_buff *skb, struct lane *l, int six)
{
	__u32 to;
	struct bpf_fib_lookup f = {.family = six ? AF_INET6 : AF_INET, .tot_len = 1};

	if (!l)
		return 0;
	l->to = 0;
	f.ifindex = l->from;
	f.tos = l->tos;
	if (six) {
		__builtin_memcpy(f.ipv6_src, &l->source, sizeof(f.ipv6_src));
		__builtin_memcpy(f.ipv6_dst, &l->destination, sizeof(f.ipv6_dst));
	} else {
		f.ipv4_src = l->source.word[3];
		f.ipv4_dst = l->destination.word[3];
	}
	if (bpf_fib_lookup(skb, &f, sizeof(f), 0) != BPF_FIB_LKUP_RET_SUCCESS || f.ifindex == l->from || !bpf_map_lookup_elem(&pods, &f.ifindex))
		return 0;
	to = f.ifindex;
	l->mtu = f.mtu_result;
	__builtin_memcpy(l->receiver, f.dmac, sizeof(l->receiver));
	__builtin_memcpy(l->sender, f.smac, sizeof(l->sender));
	f.ifindex = l->from;
	f.tot_len = 0;
	f.flowinfo = 0;
	if (six) {
		__builtin_memcpy(f.ipv6_src, &l->destination, sizeof(f.ipv6_src));
		__builtin_memcpy(f.ipv6_dst, &l->source, sizeof(f.ipv6_dst));
	} else {
		f.ipv4_src = l->destination.word[3];
		f.ipv4_dst = l->source.word[3];
	}
	if (bpf_fib_lookup(skb, &f, sizeof(f), BPF_FIB_LOOKUP_SKIP_NEIGH) == BPF_FIB_LKUP_RET_SUCCESS && f.ifindex == l->from)
		l->to = to;
	return 0;
}

/* The lane of a plain packet, as it is now. */
static __always_inline struct lane *lane_of(struct __sk_buff *skb, void *ip, struct net *net, bool is6)
{
	__u32 from = skb->ifindex, routes = is6 ? net->ipv6.fib6_sernum.counter : net->ipv4.rt_genid.counter, hash;
	__u8 tos = is6 ? 0 : ((struct iphdr *)ip)->tos & ~3;
	__u64 now = bpf_jiffies64();
	struct address source, destination;
	struct lane *l;

	if (is6) {
		__builtin_memcpy(&source, &((struct ipv6hdr *)ip)->saddr, sizeof(source));
		__builtin_memcpy(&destination, &((struct ipv6hdr *)ip)->daddr, sizeof(destination));
	} else {
		map4(&source, ((struct iphdr *)ip)->saddr);
		map4(&destination, ((struct iphdr *)ip)->daddr);
	}
	hash = (source.word[0] ^ source.word[1] ^ source.word[2] ^ source.word[3]) * 0x9e3779b1U + (destination.word[0] ^ destination.word[1] ^ destination.word[2] ^ destination.word[3]);
	hash = hash * 0x9e3779b1U >> 22; /* below LANES */
	l = bpf_map_lookup_elem(&lanes, &hash);
	if (!l)
		return NULL;
	if (likely(l->until > now && l->until <= now + LASTS && l->from == from && l->routes == routes && l->tos == tos && equal(&l->source, &source) && equal(&l->destination, &destination)))
		return l;
	l->source = source;
	l->destination = destination;
	l->from = from;
	l->routes = routes;
	l->tos = tos;
	survey(skb, l, is6);
	l->until = now + LASTS;
	return l;
}

/* Writes the headers of a packet that is handed over: as the pod's device would have, and a hop further. */
static __always_inline bool readdress(struct __sk_buff *skb, void *ip, const struct lane *l, bool is6)
{
	struct {
		struct ethhdr e;
		__u8 begin[8];
		struct before_addresses before;
	} h;
	__u16 hops;

	__builtin_memcpy(h.e.h_dest, l->receiver, sizeof(h.e.h_dest));
	__builtin_memcpy(h.e.h_source, l->sender, sizeof(h.e.h_source));
	h.e.h_proto = skb->protocol;
	__builtin_memcpy(h.begin, ip, sizeof(h.begin));
	if (is6) {
		h.begin[offsetof(struct ipv6hdr, hop_limit)]--;
		return !bpf_skb_store_bytes(skb, 0, &h, sizeof(h.e), 0) && !bpf_skb_store_bytes(skb, sizeof(h.e), h.begin, sizeof(h.begin), BPF_F_RECOMPUTE_CSUM);
	}
	__builtin_memcpy(&h.before, ip + sizeof(h.begin), sizeof(h.before));
	hops = h.before.ttl << 8 | h.before.protocol;
	h.before.ttl--;
	h.before.check = folded((__u64)(__u16)~h.before.check + (__u16)~bpf_htons(hops) + bpf_htons(hops - (1 << 8)));
	return !bpf_skb_store_bytes(skb, 0, &h, sizeof(h.e) + sizeof(h.begin) + sizeof(h.before), 0);
}

/* Hands a plain packet over, that is for no Service, where it may take the shortcut. */
static __always_inline int hand_over(struct __sk_buff *skb, bool six)
{
	void *ip = (void *)(long)skb->data + sizeof(struct ethhdr), *end = (void *)(long)skb->data_end;
	struct sk_buff *kernels = bpf_cast_to_kern_ctx(skb);
	struct net_device *from = kernels->dev, *to;
	struct net *net = from->nd_net.net;
	struct lane *l;
	__u32 length;

	if (!knows(net, from, six) || (!blind && filtered(kernels, net, six)))
		return TCX_NEXT;
	if (ip + (six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) > end || (six ? ((struct ipv6hdr *)ip)->hop_limit : ((struct iphdr *)ip)->ttl) <= 1)
		return TCX_NEXT;
	l = lane_of(skb, ip, net, six);
	if (!l || !l->to)
		return TCX_NEXT;
	length = length_of(skb, ip, end, six);
	if (length > l->mtu || skb->pkt_type != PACKET_HOST || skb->mark || (!blind && transformed(net)) || ruled(net, six) || !arrives_unseen(from))
		return TCX_NEXT;
	to = device_of(net, l->to);
	if (!to || length > to->mtu || !leaves_unseen(to) || !readdress(skb, ip, l, six))
		return TCX_NEXT;
	count(HANDED);
	return bpf_redirect_peer(l->to, 0);
}

__noinline int shortcut4(struct __sk_buff *skb) { return hand_over(skb, false); }

__noinline int shortcut6(struct __sk_buff *skb) { return hand_over(skb, true); }

static __always_inline int shortcut(struct __sk_buff *skb)
{
	return skb->protocol == bpf_htons(ETH_P_IP) ? shortcut4(skb) : shortcut6(skb);
}
