/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The fast path: a packet from a device of the node to a pod of the node is redirected to the pod (bpf_redirect_peer),
 * bypassing the host stack and the queue of the pod's device; one from a pod to another node is redirected to the
 * device that leads there (bpf_redirect), bypassing the host stack alone. That is done only while nothing in the kernel
 * would handle the packet on its way: no netfilter hook (hooks.h) but that of network policies, IPsec policy, routing
 * rule, other program, queueing discipline, or tap. The kernel's own structs say so and are read for each packet: a
 * rule takes effect from the next packet on. The kernel's routes decide where packets go; a source that they don't lead
 * back to is left to the host stack.
 */
#pragma once

#include "hooks.h"
#include "reverse.h"

#define NODE_ROUTES 0xfa /* protocol of the rules of dataplane/network/route */
/* include/uapi/linux/rtnetlink.h: the protocol of the kernel's own rules, and their tables */
enum { RTPROT_KERNEL = 2, RT_TABLE_DEFAULT = 253, RT_TABLE_LOCAL = 255 };
/* include/uapi/linux/xfrm.h, if_packet.h */
enum { XFRM_POLICY_OUT = 1, XFRM_POLICY_FWD = 2, XFRM_USERPOLICY_ACCEPT = 2 };
#define PACKET_HOST 0
#define ARPHRD_ETHER 1 /* include/uapi/linux/if_arp.h */

#define NETDEV_HASHENTRIES 256 /* include/linux/netdevice.h: of net.dev_index_head */
#define MAX_CHAIN 8	       /* devices of one hash that are compared */
#define MAX_RULES 16	       /* rules of routing that are read */

/*
 * For how many ticks a route is cached: neither a changed neighbour nor a deleted IPv6 route changes the kernel's
 * counter.
 */
#define ROUTE_TTL 64

/* After how many ticks a packet to another node uses the host stack again. */
#define STACK_EVERY 512

/*
 * The devices of the node's pods, by index: veth whose other end is in another network namespace; and the ID of our
 * program at their egress. Written by the agent.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, __u32);
	__type(value, __u32);
} fl_pods SEC(".maps");

/* By processor, so that no route is written while it is read (but with PREEMPT_RT: then fl_pods is empty). */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ROUTES);
	__type(key, __u32);
	__type(value, struct route);
} fl_routes SEC(".maps");

/* The program that evaluates network policies and redirects, while there is one. Written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} fl_policy_calls SEC(".maps");

/* Returns whether this kernel's structs have all fields that are read: else packets use the host stack. */
static __always_inline bool kernel_supports(bool six)
{
	if (six && !(has_field(net, ipv6) && has_field(netns_ipv6, fib6_sernum) &&
		     has_field(netns_ipv6, fib6_has_custom_rules) && has_field(netns_ipv6, devconf_all) &&
		     has_field(ipv6_devconf, forwarding)))
		return false;
	return has_field(sk_buff, dev) && has_field(sk_buff, active_extensions) && has_field(net, dev_index_head) &&
	       has_field(net, ipv4) && has_field(net, nf) && has_field(net, xfrm) && has_field(netns_ipv4, rt_genid) &&
	       has_field(netns_ipv4, fib_has_custom_rules) && has_field(netns_nf, hooks_ipv4) &&
	       has_field(netns_nf, hooks_ipv6) && has_field(netns_xfrm, policy_count) &&
	       has_field(netns_xfrm, policy_default) && has_field(nf_hook_entries, num_hook_entries) &&
	       has_field(nf_hook_entries, hooks) && has_field(nf_hook_entry, hook) && has_field(nf_hook_entry, priv) &&
	       has_field(nf_hook_ops, priv) && has_field(nf_hook_ops, priority) && has_field(net_device, nd_net) &&
	       has_field(net_device, ifindex) && has_field(net_device, index_hlist) && has_field(net_device, mtu) &&
	       has_field(net_device, type) && has_field(net_device, max_mtu) && has_field(net_device, rx_handler) &&
	       has_field(net_device, _tx) && has_field(net_device, ptype_all) &&
	       has_field(net_device, ptype_specific) && has_field(net_device, tcx_ingress) &&
	       has_field(net_device, tcx_egress) && has_field(net_device, nf_hooks_ingress) &&
	       has_field(net_device, nf_hooks_egress) && has_field(netdev_queue, qdisc) && has_field(Qdisc, enqueue) &&
	       has_field(tcx_entry, miniq) && has_field(tcx_entry, bundle) && has_field(bpf_mprog_entry, fp_items) &&
	       has_field(bpf_mprog_entry, parent) && has_field(bpf_mprog_fp, prog) && has_field(bpf_prog, aux) &&
	       has_field(bpf_prog_aux, id) && has_field(hlist_head, first) && has_field(hlist_node, next);
}

/*
 * Returns what acting_hook does for forwarding, and -1 also where hooks before or behind it would handle a plain
 * packet. Where each has what nodes have without others' hooks, nothing is called.
 */
static __always_inline int forward_hook(struct __sk_buff *skb, struct net *net, bool six, bool own_network)
{
	struct sk_buff *kernels = bpf_cast_to_kern_ctx(skb);
	struct nf_hook_entries *before = hooks_of(net, NF_INET_PRE_ROUTING, six);
	struct nf_hook_entries *at = hooks_of(net, NF_INET_FORWARD, six);
	struct nf_hook_entries *behind = hooks_of(net, NF_INET_POST_ROUTING, six);
	__u32 program;

	if (before && !only_own_hook(before, kernels, NF_INET_PRE_ROUTING, own_network) &&
	    acting_hook(skb, address_of_hooks(net, NF_INET_PRE_ROUTING, six),
			hook_position(NF_INET_PRE_ROUTING, six, own_network)))
		return -1;
	if (behind && !only_own_hook(behind, kernels, NF_INET_POST_ROUTING, own_network) &&
	    acting_hook(skb, address_of_hooks(net, NF_INET_POST_ROUTING, six),
			hook_position(NF_INET_POST_ROUTING, six, own_network)))
		return -1;
	if (!at)
		return 0;
	program = only_program(at);
	return program ? program
		       : acting_hook(skb, address_of_hooks(net, NF_INET_FORWARD, six),
				     hook_position(NF_INET_FORWARD, six, own_network));
}

/*
 * Returns whether IPsec has a policy for what a network namespace forwards, another default than to accept, or
 * decrypted the packet.
 */
static __always_inline bool has_ipsec(struct sk_buff *skb, struct net *net)
{
	return net->xfrm.policy_count[XFRM_POLICY_OUT] | net->xfrm.policy_count[XFRM_POLICY_FWD] ||
	       skb->active_extensions || net->xfrm.policy_default[XFRM_POLICY_OUT] != XFRM_USERPOLICY_ACCEPT ||
	       net->xfrm.policy_default[XFRM_POLICY_FWD] != XFRM_USERPOLICY_ACCEPT;
}

/*
 * Returns whether a network namespace, which has or had routing rules, has others than the kernel's own and those of
 * the pod network. By these, a lookup for the pod's device finds what the kernel would.
 */
static __always_inline bool has_other_rule(struct net *net, bool six)
{
	struct fib_rules_ops *all;
	struct list_head *n;
	void *end;
	int i;

	if (!has_field(netns_ipv4, rules_ops) || !has_field(netns_ipv6, fib6_rules_ops) ||
	    !has_field(fib_rules_ops, rules_list) || !has_field(fib_rule, list) || !has_field(fib_rule, table) ||
	    !has_field(fib_rule, proto))
		return true;
	all = six ? net->ipv6.fib6_rules_ops : net->ipv4.rules_ops;
	if (!all)
		return true;
	end = (void *)all + bpf_core_field_offset(struct fib_rules_ops, rules_list);
	n = all->rules_list.next;
	for (i = 0; i < MAX_RULES && n != end; i++) {
		struct fib_rule *r = cast((void *)n - bpf_core_field_offset(struct fib_rule, list), struct fib_rule);

		if (r->proto != NODE_ROUTES &&
		    (r->proto != RTPROT_KERNEL || r->table < RT_TABLE_DEFAULT || r->table > RT_TABLE_LOCAL))
			return true;
		n = r->list.next;
	}
	return n != end;
}

/* Returns whether routing rules of a family apply that others than the kernel and the pod network have. */
static __always_inline bool has_routing_rule(struct net *net, bool six, bool own_network)
{
	return (six ? net->ipv6.fib6_has_custom_rules : net->ipv4.fib_has_custom_rules) &&
	       (!own_network || has_other_rule(net, six));
}

/* Returns whether our program is the only one at a device's hook, and there is no classifier. */
static __always_inline bool is_only_program(struct bpf_mprog_entry *e)
{
	return e && !e->fp_items[1].prog &&
	       !cast((void *)e->parent - bpf_core_field_offset(struct tcx_entry, bundle), struct tcx_entry)->miniq;
}

static __always_inline bool list_is_empty(struct list_head *l)
{
	return (void *)l->next == (void *)l;
}

/* Returns whether nothing but this program sees packets from a device before they are routed. */
static __always_inline bool ingress_unobserved(struct net_device *d)
{
	return !d->rx_handler && !d->nf_hooks_ingress && is_only_program(d->tcx_ingress) &&
	       list_is_empty(&d->ptype_specific);
}

/*
 * Returns whether nothing but our program sees packets to a pod's device, and none delays them. An XDP program in the
 * pod, which sees packets from that device alone, makes the kernel bound the device's MTU (drivers/net/veth.c:
 * veth_xdp_set).
 */
static __always_inline bool egress_unobserved(struct net_device *d, __u32 ours)
{
	struct bpf_mprog_entry *e = d->tcx_egress;

	return is_only_program(e) && e->fp_items[0].prog->aux->id == ours && !d->nf_hooks_egress &&
	       !d->_tx->qdisc->enqueue && list_is_empty(&d->ptype_all) && d->max_mtu == ETH_MAX_MTU;
}

/* Returns a device of a network namespace by its index. */
static __always_inline struct net_device *device_by_index(struct net *net, __u32 index)
{
	struct hlist_node *n =
		cast((void *)net->dev_index_head + index % NETDEV_HASHENTRIES * sizeof(struct hlist_head),
		     struct hlist_head)
			->first;
	int i;

	for (i = 0; i < MAX_CHAIN && n; i++) {
		struct net_device *d =
			cast((void *)n - bpf_core_field_offset(struct net_device, index_hlist), struct net_device);

		if (d->ifindex == index)
			return d;
		n = n->next;
	}
	return NULL;
}

/*
 * Returns the length of a plain packet on the wire, from its IP header on; of a GSO packet, that of its longest
 * segment. The maximum where that isn't known.
 */
static __always_inline __u32 wire_length(struct __sk_buff *skb, void *ip, void *end, bool is6)
{
	__u32 header = is6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	__u8 protocol = is6 ? ((struct ipv6hdr *)ip)->nexthdr : ((struct iphdr *)ip)->protocol;
	struct tcphdr *tcp = ip + header;

	if (!skb->gso_size)
		return skb->len - l2_len;
	return protocol != IPPROTO_TCP || (void *)(tcp + 1) > end ? ~0U : header + tcp->doff * 4 + skb->gso_size;
}

/*
 * Returns whether a route may lead from a pod of the node to another node. Where the pod network is ours, to its pods
 * alone: what is for nodes themselves, the guard judges (dataplane/network/guard).
 */
static __always_inline bool leads_to_other_node(const struct route *r)
{
	struct prefix key = {.length = 128, .address = r->destination};
	__u32 *is;

	if (!bpf_map_lookup_elem(&fl_pods, &r->in_ifindex))
		return false;
	if (!pod_network)
		return true;
	is = bpf_map_lookup_elem(&fl_masq_ranges, &key);
	return is && *is & RANGE_REMOTE;
}

/*
 * Returns whether the kernel forwards nothing to an IPv4 address though a route may match: this network's, multicast,
 * and the limited broadcast (RFC 1122, 3.2.1.3; RFC 1112).
 */
static __always_inline bool is_never_forwarded(__be32 address)
{
	return !(address & bpf_htonl(0xff000000)) || (address & bpf_htonl(0xf0000000)) == bpf_htonl(0xe0000000) ||
	       address == bpf_htonl(0xffffffff);
}

/* Looks up a route in the kernel. Returns for how many ticks the result is cached: while a neighbour is found, for one.
 */
__noinline int resolve_route(struct __sk_buff *skb, struct route *r, int six)
{
	struct bpf_fib_lookup f = {.family = six ? AF_INET6 : AF_INET, .tot_len = 1};
	__u32 to, *program;
	long result;

	if (!r)
		return ROUTE_TTL;
	r->out_ifindex = 0;
	if (!(r->source.word[0] | r->source.word[1] | r->source.word[3])) /* :: and 0.0.0.0 are no host's */
		return ROUTE_TTL;
	if (six &&
	    (r->source.word[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000)) /* not forwarded: RFC 4291, 2.5.6 */
		return ROUTE_TTL;
	if (!six && is_never_forwarded(r->destination.word[3]))
		return ROUTE_TTL;
	f.ifindex = r->in_ifindex;
	f.tos = r->tos;
	if (six) {
		__builtin_memcpy(f.ipv6_src, &r->source, sizeof(f.ipv6_src));
		__builtin_memcpy(f.ipv6_dst, &r->destination, sizeof(f.ipv6_dst));
	} else {
		f.ipv4_src = r->source.word[3];
		f.ipv4_dst = r->destination.word[3];
	}
	result = bpf_fib_lookup(skb, &f, sizeof(f), 0);
	if (result != BPF_FIB_LKUP_RET_SUCCESS || f.ifindex == r->in_ifindex)
		return result == BPF_FIB_LKUP_RET_NO_NEIGH ? 1 : ROUTE_TTL;
	if (pod_network &&
	    leaves_cluster(&r->source, &r->destination)) /* the node's own device may look like a pod's */
		return ROUTE_TTL;
	program = bpf_map_lookup_elem(&fl_pods, &f.ifindex);
	if (!program && !leads_to_other_node(r))
		return ROUTE_TTL;
	r->egress_program = program ? *program : 0;
	to = f.ifindex;
	r->mtu = f.mtu_result;
	__builtin_memcpy(r->dst_mac, f.dmac, sizeof(r->dst_mac));
	__builtin_memcpy(r->src_mac, f.smac, sizeof(r->src_mac));
	f.ifindex = r->in_ifindex;
	f.tot_len = 0;
	f.flowinfo = 0;
	if (six) {
		__builtin_memcpy(f.ipv6_src, &r->destination, sizeof(f.ipv6_src));
		__builtin_memcpy(f.ipv6_dst, &r->source, sizeof(f.ipv6_dst));
	} else {
		f.ipv4_src = r->destination.word[3];
		f.ipv4_dst = r->source.word[3];
	}
	if (bpf_fib_lookup(skb, &f, sizeof(f), BPF_FIB_LOOKUP_SKIP_NEIGH) == BPF_FIB_LKUP_RET_SUCCESS &&
	    f.ifindex == r->in_ifindex)
		r->out_ifindex = to;
	return ROUTE_TTL;
}

/*
 * Returns whether a packet to another node uses the host stack, which sees to it that the next hop's link-layer address
 * is still right (RFC 4861, 7.3; ARP likewise): the first of a route, and one of many.
 */
static __always_inline bool is_due_by_stack(struct route *r)
{
	__u32 now = (__u32)bpf_jiffies64() | 1; /* 0: none yet */

	if (r->by_stack && now - r->by_stack < STACK_EVERY)
		return false;
	r->by_stack = now;
	return true;
}

/* Returns the cached route of a plain packet, looked up anew if it has expired. */
static __always_inline struct route *route_of(struct __sk_buff *skb, void *ip, struct net *net, bool is6)
{
	__u32 from = skb->ifindex, routes = is6 ? net->ipv6.fib6_sernum.counter : net->ipv4.rt_genid.counter, hash;
	__u8 tos = is6 ? 0 : ((struct iphdr *)ip)->tos & ~3;
	__u64 now = bpf_jiffies64();
	struct address source, destination;
	struct route *r;

	if (is6) {
		__builtin_memcpy(&source, &((struct ipv6hdr *)ip)->saddr, sizeof(source));
		__builtin_memcpy(&destination, &((struct ipv6hdr *)ip)->daddr, sizeof(destination));
	} else {
		map_ipv4(&source, ((struct iphdr *)ip)->saddr);
		map_ipv4(&destination, ((struct iphdr *)ip)->daddr);
	}
	hash = (source.word[0] ^ source.word[1] ^ source.word[2] ^ source.word[3]) * 0x9e3779b1U +
	       (destination.word[0] ^ destination.word[1] ^ destination.word[2] ^ destination.word[3]);
	hash = hash * 0x9e3779b1U >> 22; /* below ROUTES */
	r = bpf_map_lookup_elem(&fl_routes, &hash);
	if (!r)
		return NULL;
	if (likely(r->expires > now && r->expires <= now + ROUTE_TTL && r->in_ifindex == from &&
		   r->generation == routes && r->tos == tos && addr_equal(&r->source, &source) &&
		   addr_equal(&r->destination, &destination)))
		return r;
	if (!addr_equal(&r->source, &source) || !addr_equal(&r->destination, &destination))
		r->by_stack = 0;
	r->source = source;
	r->destination = destination;
	r->in_ifindex = from;
	r->generation = routes;
	r->tos = tos;
	r->expires = now + (resolve_route(skb, r, is6) == ROUTE_TTL ? ROUTE_TTL : 1);
	return r;
}

/* Has the program of policies find how a packet is redirected. */
static __always_inline int hand_to_policies(struct __sk_buff *skb, const struct redirect *target, __u32 hook)
{
	__u32 words[sizeof(*target) / sizeof(__u32)];

	__builtin_memcpy(words, target, sizeof(words));
	skb->cb[0] = words[0];
	skb->cb[1] = words[1];
	skb->cb[2] = words[2];
	skb->cb[3] = words[3];
	skb->cb[HOOK_PROGRAM] = hook;
	return TCX_EVALUATE;
}

/*
 * Redirects a plain packet, which is for no Service, if it may bypass the host stack. Returns TCX_EVALUATE if it may
 * once network policies are evaluated.
 */
static __always_inline int redirect_to_pod(struct __sk_buff *skb, bool six)
{
	void *ip = (void *)(long)skb->data + sizeof(struct ethhdr), *end = (void *)(long)skb->data_end;
	struct net_device *from, *to;
	struct sk_buff *kernels;
	struct redirect target;
	struct net *net;
	struct route *r;
	__u32 length;
	__u32 to_other_node = 0;
	int hook;

	if (!kernel_supports(six))
		return TCX_NEXT;
	kernels = bpf_cast_to_kern_ctx(skb);
	from = kernels->dev;
	net = from->nd_net.net;
	hook = forward_hook(skb, net, six, pod_network);
	if (hook < 0)
		return TCX_NEXT;
	if (ip + (six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) > end ||
	    (six ? ((struct ipv6hdr *)ip)->hop_limit : ((struct iphdr *)ip)->ttl) <= 1)
		return TCX_NEXT;
	r = route_of(skb, ip, net, six);
	if (!r || !r->out_ifindex)
		return TCX_NEXT;
	length = wire_length(skb, ip, end, six);
	if (length > r->mtu || skb->pkt_type != PACKET_HOST || skb->mark || has_ipsec(kernels, net) ||
	    has_routing_rule(net, six, pod_network) || !ingress_unobserved(from))
		return TCX_NEXT;
	if (six && !net->ipv6.devconf_all->forwarding) /* the route lookup reports that of IPv4 alone */
		return TCX_NEXT;
	target.out_ifindex = r->out_ifindex;
	to = device_by_index(net, r->out_ifindex);
	if (!to || length > to->mtu)
		return TCX_NEXT;
	if (r->egress_program) {
		if (!egress_unobserved(to, r->egress_program))
			return TCX_NEXT;
	} else {
		/*
		 * What programs redirect skips netfilter's hook there, and has no route, by which tunnels of many ends
		 * know the one that a packet is for (net/ipv4/ip_tunnel.c: ip_tunnel_xmit).
		 */
		if (to->type != ARPHRD_ETHER || to->nf_hooks_egress || is_due_by_stack(r))
			return TCX_NEXT;
		to_other_node = TO_OTHER_NODE;
	}
	__builtin_memcpy(target.dst_mac, r->dst_mac, sizeof(target.dst_mac));
	__builtin_memcpy(target.src_mac, r->src_mac, sizeof(target.src_mac));
	if (hook)
		return hand_to_policies(skb, &target, hook | to_other_node);
	if (!rewrite_l2(skb, ip, &target, six))
		return TCX_NEXT;
	count_packet(EVENT_REDIRECTED);
	return redirect(&target, to_other_node);
}

__noinline int fast_path4(struct __sk_buff *skb)
{
	return redirect_to_pod(skb, false);
}

__noinline int fast_path6(struct __sk_buff *skb)
{
	return redirect_to_pod(skb, true);
}

/* Delivers a plain packet that is for no Service. Where policies can't be evaluated here, the host stack's hook does.
 */
static __always_inline int deliver(struct __sk_buff *skb)
{
	int result = skb->protocol == bpf_htons(ETH_P_IP) ? fast_path4(skb) : fast_path6(skb);

	if (result == TCX_EVALUATE) {
		bpf_tail_call(skb, &fl_policy_calls, 0);
		return TCX_NEXT;
	}
	return result;
}

/* Why packets to pods use the host stack, a bit each: of the node, for each family, and of a device. */
enum slow_reason {
	SLOW_KERNEL = 1 << 0, /* its structs lack a field that is read */
	SLOW_NETFILTER = 1 << 1,
	SLOW_IPSEC = 1 << 2,
	SLOW_ROUTING_RULE = 1 << 3,
	SLOW_FORWARDING = 1 << 4, /* of IPv6 alone */
	SLOW_DEVICE = 1 << 5,
};

#define SLOW_SIX 8 /* bits of IPv6 are shifted by this */

/*
 * Returns why packets of a family use the host stack, as far as the node decides. policy is the ID of the program at
 * netfilter's hooks whose policies the fast path evaluates, 0: none. own_network is pod_network of the programs.
 */
static __always_inline __u32 slow_reasons(struct __sk_buff *skb, struct net *net, bool six, int policy,
					  bool own_network)
{
	__u32 by = 0;
	int hook;

	if (!kernel_supports(six))
		return SLOW_KERNEL;
	hook = forward_hook(skb, net, six, own_network);
	if (hook && (!policy || hook != policy))
		by |= SLOW_NETFILTER;
	if (has_ipsec(bpf_cast_to_kern_ctx(skb), net))
		by |= SLOW_IPSEC;
	if (has_routing_rule(net, six, own_network))
		by |= SLOW_ROUTING_RULE;
	if (six && !net->ipv6.devconf_all->forwarding)
		by |= SLOW_FORWARDING;
	return by;
}

/*
 * Returns why packets from or to a device use the host stack. cb[0] is the ID of our program at its egress, 0 where the
 * device is no pod's; cb[1] that of the program at netfilter's hooks whose policies the fast path evaluates; cb[2] is
 * pod_network of the programs at devices. The agent runs it (BPF_PROG_TEST_RUN); it is attached nowhere.
 */
SEC("tc")
int fast_path(struct __sk_buff *skb)
{
	struct sk_buff *kernels = bpf_cast_to_kern_ctx(skb);
	struct net_device *d;
	struct net *net;
	__u32 by, policy, own_network;

	if (!kernel_supports(false))
		return SLOW_KERNEL | SLOW_KERNEL << SLOW_SIX;
	d = kernels->dev;
	net = d->nd_net.net;
	policy = skb->cb[1];
	own_network = skb->cb[2];
	by = slow_reasons(skb, net, false, policy, own_network) | slow_reasons(skb, net, true, policy, own_network)
									  << SLOW_SIX;
	if (!ingress_unobserved(d) || (skb->cb[0] && !egress_unobserved(d, skb->cb[0])))
		by |= SLOW_DEVICE;
	return by;
}

/* One of netfilter's hooks, as the program `hook` reports it. */
struct hook_report {
	__u64 function;
	__s32 priority;
	__u32 acting;		   /* whether it would handle a plain packet */
	__u8 symbol[64];	   /* the function's name, and that of its module in brackets */
	__u8 table[64], chain[64]; /* where it is of nf_tables; the table also where it is of iptables' legacy form */
};

const struct hook_report unused_report __attribute__((unused));

/* Fills in the names of a hook's table and chain, which is its private data. */
static __always_inline void name_chain(struct hook_report *r, void *of, enum hook_role role)
{
	void *table;

	if (role == HOOK_TABLE && has_field(xt_table, name))
		bpf_probe_read_kernel_str(r->table, sizeof(r->table),
					  of + bpf_core_field_offset(struct xt_table, name));
	if (role != HOOK_CHAIN || !has_field(nft_chain, name) || !has_field(nft_chain, table) ||
	    !has_field(nft_table, name))
		return;
	table = (void *)word_at(of + bpf_core_field_offset(struct nft_chain, table));
	bpf_probe_read_kernel_str(r->table, sizeof(r->table),
				  (void *)word_at(table + bpf_core_field_offset(struct nft_table, name)));
	bpf_probe_read_kernel_str(r->chain, sizeof(r->chain),
				  (void *)word_at(of + bpf_core_field_offset(struct nft_chain, name)));
}

/*
 * Reports one of netfilter's hooks behind the link-layer header of the packet that it is run with: cb[0] is whether of
 * IPv6, cb[1] the point of the stack, cb[2] the hook's number there, from 0; cb[3] is pod_network of the programs at
 * devices, cb[4] the role of its function where that is known. Returns how many hooks there are. The agent runs it
 * (BPF_PROG_TEST_RUN); it is attached nowhere.
 */
SEC("tc")
int hook(struct __sk_buff *skb)
{
	struct hook_functions *known = known_functions();
	struct hook_report r = {};
	struct sk_buff *kernels;
	__u32 i = skb->cb[2], n;
	void *entry, *ops_at;
	int effect = HOOK_LEAVES;
	enum hook_role role;
	__u64 all;

	if (!known || !kernel_supports(false))
		return 0;
	kernels = bpf_cast_to_kern_ctx(skb);
	all = address_of_hooks(kernels->dev->nd_net.net, skb->cb[1], skb->cb[0]);
	if (!all)
		return 0;
	n = hook_count(all);
	if (i >= n)
		return n;
	entry = first_hook(all) + i * bpf_core_type_size(struct nf_hook_entry);
	ops_at = first_hook(all) + n * bpf_core_type_size(struct nf_hook_entry) + i * sizeof(void *);
	r.function = function_of(entry);
	r.priority = cast(word_at(ops_at), struct nf_hook_ops)->priority;
	role = hook_role_of(known, r.function);
	if (!is_idle_hook(role, entry, ops_at))
		effect = effect_of_hook(skb, role, private_of(entry), word_at(ops_at),
					hook_position(skb->cb[1], skb->cb[0], skb->cb[3]));
	r.acting = n > MAX_HOOKS || (effect != HOOK_LEAVES && effect != HOOK_GUARDS);
	BPF_SNPRINTF((char *)r.symbol, sizeof(r.symbol), "%ps", r.function);
	name_chain(&r, (void *)private_of(entry), skb->cb[4]);
	bpf_skb_store_bytes(skb, sizeof(struct ethhdr), &r, sizeof(r), 0);
	return n;
}
