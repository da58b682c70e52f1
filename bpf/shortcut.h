/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The shortcut: a packet that comes in by a device of the node, for a pod of the node, is handed over to the pod at once
 * (bpf_redirect_peer), past the node's stack and the queue of the pod's device. It is taken only while nothing in the kernel would
 * look at the packet on its way there: no hook of netfilter, no policy of IPsec, no rule of routing, no program but ours, no queue that shapes, no tap.
 * The kernel's own structs say so and are read for each packet: a rule holds from the next packet on. Where packets go is
 * for the kernel's routes to say, as ever; and a source that they lead elsewhere is left to the kernel, which may take it for forged.
 */
#pragma once

#include "reverse.h"

/* include/uapi/linux/netfilter.h, netfilter_ipv4.h and netfilter_ipv6.h, xfrm.h, if_packet.h */
enum { NF_INET_PRE_ROUTING = 0, NF_INET_FORWARD = 2, NF_INET_POST_ROUTING = 4, NF_IP_PRI_SELINUX_FIRST = -225 };
enum { XFRM_POLICY_OUT = 1, XFRM_POLICY_FWD = 2, XFRM_USERPOLICY_ACCEPT = 2 };
#define PACKET_HOST 0

#define NETDEV_HASHENTRIES 256 /* include/linux/netdevice.h: of net.dev_index_head */
#define IN_A_ROW 8	       /* how many devices of one hash are looked at */

/* For how many ticks a lane is as it was found: a neighbour's address, or an IPv6 route that is gone, doesn't count as a change of routes. */
#define LASTS 64

/* The devices of the node's pods, by index: veth whose other end is in another network namespace; and the ID of our program there, leave. Kept by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, __u32);
	__type(value, __u32);
} pods SEC(".maps");

/* By processor, so that nobody writes a lane while another reads it (but with PREEMPT_RT: then the agent names no pods). */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LANES);
	__type(key, __u32);
	__type(value, struct lane);
} lanes SEC(".maps");

#define has(type, field) bpf_core_field_exists(((struct type *)0)->field)

/* Whether this kernel's structs have all that is asked of them: else its packets go through its stack. */
static __always_inline bool knows(bool six)
{
	if (six && !(has(net, ipv6) && has(netns_ipv6, fib6_sernum) && has(netns_ipv6, fib6_has_custom_rules) && has(netns_ipv6, devconf_all) &&
		     has(ipv6_devconf, forwarding)))
		return false;
	return has(sk_buff, dev) && has(sk_buff, active_extensions) && has(net, dev_index_head) && has(net, ipv4) && has(net, nf) && has(net, xfrm) &&
	       has(netns_ipv4, rt_genid) && has(netns_ipv4, fib_has_custom_rules) && has(netns_nf, hooks_ipv4) && has(netns_nf, hooks_ipv6) &&
	       has(netns_xfrm, policy_count) && has(netns_xfrm, policy_default) && has(nf_hook_entries, num_hook_entries) && has(nf_hook_entries, hooks) &&
	       has(nf_hook_ops, priv) && has(nf_hook_ops, priority) && has(net_device, nd_net) && has(net_device, ifindex) && has(net_device, index_hlist) &&
	       has(net_device, mtu) && has(net_device, max_mtu) && has(net_device, rx_handler) && has(net_device, _tx) && has(net_device, ptype_all) &&
	       has(net_device, ptype_specific) && has(net_device, tcx_ingress) && has(net_device, tcx_egress) && has(net_device, nf_hooks_ingress) &&
	       has(net_device, nf_hooks_egress) && has(netdev_queue, qdisc) && has(Qdisc, enqueue) && has(tcx_entry, miniq) && has(tcx_entry, bundle) &&
	       has(bpf_mprog_entry, fp_items) && has(bpf_mprog_entry, parent) && has(bpf_mprog_fp, prog) && has(bpf_prog, aux) && has(bpf_prog_aux, id) &&
	       has(hlist_head, first) && has(hlist_node, next);
}

/*
 * Whether some hook is AppArmor's alone, which looks at packets with a security mark (security/apparmor/lsm.c: apparmor_ip_postroute). Only such modules
 * have one of that priority with nothing of its own; SELinux hooks into forwarding besides.
 */
static __always_inline bool apparmors(struct nf_hook_entries *e, struct sk_buff *skb)
{
	void *behind = (void *)e + bpf_core_field_offset(struct nf_hook_entries, hooks) + bpf_core_type_size(struct nf_hook_entry);
	struct nf_hook_ops *ops = cast(cast(behind, struct hlist_head)->first /* the pointer there */, struct nf_hook_ops);

	return e->num_hook_entries == 1 && !ops->priv && ops->priority == NF_IP_PRI_SELINUX_FIRST && bpf_core_field_exists(skb->secmark) && !skb->secmark;
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
	return behind && !apparmors(behind, skb);
}

/* Whether IPsec has a say: a policy for what a network namespace forwards, another default than to let it pass, or it brought the packet. */
static __always_inline bool transformed(struct sk_buff *skb, struct net *net)
{
	return net->xfrm.policy_count[XFRM_POLICY_OUT] | net->xfrm.policy_count[XFRM_POLICY_FWD] || skb->active_extensions ||
	       net->xfrm.policy_default[XFRM_POLICY_OUT] != XFRM_USERPOLICY_ACCEPT || net->xfrm.policy_default[XFRM_POLICY_FWD] != XFRM_USERPOLICY_ACCEPT;
}

/* Whether a network namespace routes by more than addresses, or ever did, or doesn't forward: the look-up says so of IPv4 alone. */
static __always_inline bool ruled(struct net *net, bool six)
{
	return six ? net->ipv6.fib6_has_custom_rules || !net->ipv6.devconf_all->forwarding : net->ipv4.fib_has_custom_rules;
}

/* Whether there is but one program at a device's hook, and no classifier. */
static __always_inline bool alone(struct bpf_mprog_entry *e)
{
	return e && !e->fp_items[1].prog && !cast((void *)e->parent - bpf_core_field_offset(struct tcx_entry, bundle), struct tcx_entry)->miniq;
}

static __always_inline bool none(struct list_head *l) { return (void *)l->next == (void *)l; }

/* Whether nobody but this very program sees what comes in by a device, before it is routed. */
static __always_inline bool arrives_unseen(struct net_device *d)
{
	return !d->rx_handler && !d->nf_hooks_ingress && alone(d->tcx_ingress) && none(&d->ptype_specific);
}

/*
 * Whether nobody but our own program sees what leaves by a pod's device, and nothing has it wait. A program for XDP in the pod, which sees what comes in
 * only by that device, has the kernel bound the device's packets (drivers/net/veth.c: veth_xdp_set).
 */
static __always_inline bool leaves_unseen(struct net_device *d, __u32 ours)
{
	struct bpf_mprog_entry *e = d->tcx_egress;

	return alone(e) && e->fp_items[0].prog->aux->id == ours && !d->nf_hooks_egress && !d->_tx->qdisc->enqueue && none(&d->ptype_all) && d->max_mtu == ETH_MAX_MTU;
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

/* How long a plain packet is on the wire, from its IP header on; the longest of those that one stands for (GSO). Beyond any where that isn't known. */
static __always_inline __u32 length_of(struct __sk_buff *skb, void *ip, void *end, bool is6)
{
	__u32 header = is6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	__u8 protocol = is6 ? ((struct ipv6hdr *)ip)->nexthdr : ((struct iphdr *)ip)->protocol;
	struct tcphdr *tcp = ip + header;

	if (!skb->gso_size)
		return skb->len - head;
	return protocol != IPPROTO_TCP || (void *)(tcp + 1) > end ? ~0U : header + tcp->doff * 4 + skb->gso_size;
}

/* Asks the kernel where a lane leads. */
__noinline int survey(struct __sk_buff *skb, struct lane *l, int six)
{
	struct bpf_fib_lookup f = {.family = six ? AF_INET6 : AF_INET, .tot_len = 1};
	__u32 to, *leave;

	if (!l)
		return 0;
	l->to = 0;
	if (!(l->source.word[0] | l->source.word[1] | l->source.word[3])) /* :: and 0.0.0.0 are nobody's */
		return 0;
	f.ifindex = l->from;
	f.tos = l->tos;
	if (six) {
		__builtin_memcpy(f.ipv6_src, &l->source, sizeof(f.ipv6_src));
		__builtin_memcpy(f.ipv6_dst, &l->destination, sizeof(f.ipv6_dst));
	} else {
		f.ipv4_src = l->source.word[3];
		f.ipv4_dst = l->destination.word[3];
	}
	if (bpf_fib_lookup(skb, &f, sizeof(f), 0) != BPF_FIB_LKUP_RET_SUCCESS || f.ifindex == l->from)
		return 0;
	leave = bpf_map_lookup_elem(&pods, &f.ifindex);
	if (!leave)
		return 0;
	l->leave = *leave;
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
	struct net_device *from, *to;
	struct sk_buff *kernels;
	struct net *net;
	struct lane *l;
	__u32 length;

	if (!knows(six))
		return TCX_NEXT;
	kernels = bpf_cast_to_kern_ctx(skb);
	from = kernels->dev;
	net = from->nd_net.net;
	if (filtered(kernels, net, six))
		return TCX_NEXT;
	if (ip + (six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) > end || (six ? ((struct ipv6hdr *)ip)->hop_limit : ((struct iphdr *)ip)->ttl) <= 1)
		return TCX_NEXT;
	l = lane_of(skb, ip, net, six);
	if (!l || !l->to)
		return TCX_NEXT;
	length = length_of(skb, ip, end, six);
	if (length > l->mtu || skb->pkt_type != PACKET_HOST || skb->mark || transformed(kernels, net) || ruled(net, six) || !arrives_unseen(from))
		return TCX_NEXT;
	to = device_of(net, l->to);
	if (!to || length > to->mtu || !leaves_unseen(to, l->leave) || !readdress(skb, ip, l, six))
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

/* What keeps packets for pods on the node's stack, a bit each: of the node, for each family, and of a device. */
enum slow {
	SLOW_KERNEL = 1 << 0, /* its structs lack a field that is read */
	SLOW_NETFILTER = 1 << 1,
	SLOW_IPSEC = 1 << 2,
	SLOW_ROUTING_RULE = 1 << 3,
	SLOW_FORWARDING = 1 << 4, /* of IPv6 alone */
	SLOW_DEVICE = 1 << 5,
};

#define SLOW_SIX 8 /* bits of IPv6 are shifted by this */

/* Returns what of the node keeps packets of a family on its stack. */
static __always_inline __u32 slow_by(struct sk_buff *skb, struct net *net, bool six)
{
	__u32 by = 0;

	if (!knows(six))
		return SLOW_KERNEL;
	if (filtered(skb, net, six))
		by |= SLOW_NETFILTER;
	if (transformed(skb, net))
		by |= SLOW_IPSEC;
	if (six ? net->ipv6.fib6_has_custom_rules : net->ipv4.fib_has_custom_rules)
		by |= SLOW_ROUTING_RULE;
	if (six && !net->ipv6.devconf_all->forwarding)
		by |= SLOW_FORWARDING;
	return by;
}

/*
 * Returns what keeps packets that come in by a device, or leave by it, on the stack. cb[0] is the ID of our program where
 * they leave, 0 where the device is no pod's. The agent runs this (BPF_PROG_TEST_RUN); it is attached nowhere.
 */
SEC("tc")
int fast_path(struct __sk_buff *skb)
{
	struct sk_buff *kernels = bpf_cast_to_kern_ctx(skb);
	struct net_device *d;
	struct net *net;
	__u32 by;

	if (!knows(false))
		return SLOW_KERNEL | SLOW_KERNEL << SLOW_SIX;
	d = kernels->dev;
	net = d->nd_net.net;
	by = slow_by(kernels, net, false) | slow_by(kernels, net, true) << SLOW_SIX;
	if (!arrives_unseen(d) || (skb->cb[0] && !leaves_unseen(d, skb->cb[0])))
		by |= SLOW_DEVICE;
	return by;
}
