/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Which hooks of netfilter would handle a plain packet on its way to a pod. The kernel's own structs say so and are
 * read for each packet, so that no rule is missed. These leave such a packet as it is, and don't count:
 *
 * - base chains of nf_tables and built-in chains of iptables' legacy form that are empty and accept;
 * - connection tracking, which alone changes nothing: whoever reads what it says of a forwarded packet, or translates
 *   by it, has a hook of its own on the packet's way;
 * - the kernel's br_netfilter, but for packets that it marks (has_ipsec: active_extensions);
 * - AppArmor, and the pod network's source validation.
 *
 * Others' functions are known by their addresses, which the agent finds by their names.
 */
#pragma once

#include "border.h"

/* include/uapi/linux/netfilter.h */
enum nf_inet_hooks { NF_INET_PRE_ROUTING = 0, NF_INET_FORWARD = 2, NF_INET_POST_ROUTING = 4 };
enum { NF_ACCEPT = 1 };

#define NF_IP_PRI_SELINUX_FIRST -225 /* include/uapi/linux/netfilter_ipv4.h and netfilter_ipv6.h */
#define GUARD_PRIORITY -390	     /* of dataplane/network/guard */

#define MAX_HOOKS 16 /* of one family at one point of the stack that are read */

/*
 * sizeof(struct ipt_entry), sizeof(struct ip6t_entry), and where the verdict of a rule without matches is behind them:
 * sizeof(struct xt_entry_target), include/uapi/linux/netfilter/x_tables.h and its fellows. As a verdict, to accept is
 * -2.
 */
enum { IPT_ENTRY = 112, IP6T_ENTRY = 168, XT_VERDICT = 32 };
#define XT_ACCEPT (-NF_ACCEPT - 1)

/* What the functions of hooks are for. */
enum hook_role {
	HOOK_UNKNOWN,
	HOOK_CHAIN, /* a base chain of nf_tables: struct nft_base_chain has its struct nf_hook_ops */
	HOOK_TABLE, /* a table of iptables' legacy form, which is its private data: struct xt_table */
	HOOK_IDLE,  /* it leaves plain packets as they are */
};

#define FUNCTION_SLOTS 64 /* a power of two */
#define FUNCTION_SHIFT 58 /* of 64 bits, those that number a slot are left */

/*
 * Functions of hooks that have a known role, each in the slot that its address leads to: address * multiplier >>
 * FUNCTION_SHIFT. A slot is the address without its first byte, then the role. Written by the agent, which finds a
 * multiplier that leads each to a slot of its own.
 */
struct hook_functions {
	__u64 multiplier;
	__u64 slots[FUNCTION_SLOTS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct hook_functions);
} fl_hooks SEC(".maps");

/* Returns the eight bytes at an address, by a struct that begins with a number of them. */
static __always_inline __u64 word_at(const void *address)
{
	return cast(address, struct timespec64)->tv_sec;
}

/* Returns whether the kernel has no rule in a base chain of nf_tables, neither now nor next, and accepts by default. */
static __always_inline bool is_empty_chain(struct nf_hook_ops *ops)
{
	void *base = (void *)ops - bpf_core_field_offset(struct nft_base_chain, ops), *chain;
	__u64 now, next;

	if (!has_field(nft_base_chain, chain) || !has_field(nft_base_chain, policy) ||
	    !has_field(nft_chain, blob_gen_0) || !has_field(nft_chain, blob_gen_1) || !has_field(nft_rule_blob, size))
		return false;
	chain = base + bpf_core_field_offset(struct nft_base_chain, chain);
	if ((word_at(base + bpf_core_field_offset(struct nft_base_chain, policy)) & 0xff) != NF_ACCEPT)
		return false;
	now = word_at(chain + bpf_core_field_offset(struct nft_chain, blob_gen_0));
	next = word_at(chain + bpf_core_field_offset(struct nft_chain, blob_gen_1));
	return !(word_at((void *)now + bpf_core_field_offset(struct nft_rule_blob, size)) |
		 word_at((void *)next + bpf_core_field_offset(struct nft_rule_blob, size)));
}

/*
 * Returns whether a built-in chain of a table of iptables' legacy form has no rule and accepts: the first of its
 * entries is its policy, an entry without a condition (net/netfilter/x_tables.c: xt_check_table_hooks; ip_tables.c:
 * check_underflow).
 */
static __always_inline bool is_empty_table(void *table, int hook, bool six)
{
	__u32 first, policy;
	__s32 verdict;
	void *info;

	if (!has_field(xt_table, private) || !has_field(xt_table_info, hook_entry) ||
	    !has_field(xt_table_info, underflow) || !has_field(xt_table_info, entries))
		return false;
	info = (void *)word_at(table + bpf_core_field_offset(struct xt_table, private));
	first = word_at(info + bpf_core_field_offset(struct xt_table_info, hook_entry) + hook * sizeof(__u32));
	policy = word_at(info + bpf_core_field_offset(struct xt_table_info, underflow) + hook * sizeof(__u32));
	verdict = word_at(info + bpf_core_field_offset(struct xt_table_info, entries) + first +
			  (six ? IP6T_ENTRY : IPT_ENTRY) + XT_VERDICT);
	/* A table that was replaced meanwhile may be another's memory. */
	return first == policy && verdict == XT_ACCEPT &&
	       word_at(table + bpf_core_field_offset(struct xt_table, private)) == (__u64)info;
}

/*
 * Returns the ID of the program of a hook, 0 where it is none (net/netfilter/nf_bpf_link.c). What other hooks have as
 * their private data doesn't point to itself in the same way.
 */
static __always_inline __u32 hook_program_id(void *data)
{
	struct bpf_prog *program;

	if (!has_field(bpf_prog_aux, prog) || !data)
		return 0;
	program = cast(data, struct bpf_prog);
	return program->aux->prog == program ? program->aux->id : 0;
}

/*
 * Returns whether a hook is AppArmor's, which handles packets with a security mark alone (security/apparmor/lsm.c:
 * apparmor_ip_postroute). Only such modules have one of that priority without private data; SELinux hooks into
 * forwarding, too.
 */
static __always_inline bool is_apparmor_hook(struct nf_hook_ops *ops, struct sk_buff *skb)
{
	return !ops->priv && ops->priority == NF_IP_PRI_SELINUX_FIRST && bpf_core_field_exists(skb->secmark) &&
	       !skb->secmark;
}

/* Bits of a hook's position: the point of the stack, whether of IPv6, and pod_network of the programs at devices. */
enum { HOOK_POINT = 7, HOOK_SIX = 8, HOOK_OWN_NETWORK = 16 };

static __always_inline int hook_position(int hook, bool six, bool own_network)
{
	return hook | (six ? HOOK_SIX : 0) | (own_network ? HOOK_OWN_NETWORK : 0);
}

static __always_inline struct nf_hook_entries *hooks_of(struct net *net, int hook, bool six)
{
	switch (hook) {
	case NF_INET_PRE_ROUTING:
		return six ? net->nf.hooks_ipv6[NF_INET_PRE_ROUTING] : net->nf.hooks_ipv4[NF_INET_PRE_ROUTING];
	case NF_INET_FORWARD:
		return six ? net->nf.hooks_ipv6[NF_INET_FORWARD] : net->nf.hooks_ipv4[NF_INET_FORWARD];
	}
	return six ? net->nf.hooks_ipv6[NF_INET_POST_ROUTING] : net->nf.hooks_ipv4[NF_INET_POST_ROUTING];
}

/* Returns the address of these hooks as a number: global functions take no such pointers. */
static __always_inline __u64 address_of_hooks(struct net *net, int hook, bool six)
{
	void *of = (void *)net + (six ? bpf_core_field_offset(struct net, nf.hooks_ipv6)
				      : bpf_core_field_offset(struct net, nf.hooks_ipv4));

	return word_at(of + (hook & HOOK_POINT) * sizeof(void *));
}

static __always_inline __u32 hook_count(__u64 all)
{
	return cast(all, struct nf_hook_entries)->num_hook_entries;
}

/* Returns the address of the first hook's struct nf_hook_entry. */
static __always_inline void *first_hook(__u64 all)
{
	return (void *)all + bpf_core_field_offset(struct nf_hook_entries, hooks);
}

static __always_inline __u64 function_of(void *entry)
{
	return word_at(entry + bpf_core_field_offset(struct nf_hook_entry, hook));
}

static __always_inline __u64 private_of(void *entry)
{
	return word_at(entry + bpf_core_field_offset(struct nf_hook_entry, priv));
}

/* Returns what the functions of hooks are for that the agent knows. */
static __always_inline struct hook_functions *known_functions(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&fl_hooks, &zero);
}

static __always_inline enum hook_role hook_role_of(struct hook_functions *known, __u64 function)
{
	__u64 slot = known->slots[function * known->multiplier >> FUNCTION_SHIFT];

	return slot >> 8 == function << 8 >> 8 ? slot & 0xff : HOOK_UNKNOWN;
}

/*
 * Returns whether a hook is that of the pod network's source validation, by its priority, which no other owner has
 * (dataplane/network/guard). It drops what a pod sends from other addresses than its own, and what leaves a tunnel from
 * other sources than are behind it: the fast path leaves such packets to the host stack, since no route leads back to
 * these sources by the device (resolve_route).
 */
static __always_inline bool is_guard_hook(struct nf_hook_ops *ops, int hook)
{
	return hook == NF_INET_PRE_ROUTING && ops->priv && ops->priority == GUARD_PRIORITY;
}

/*
 * Returns whether a hook in a role leaves a plain packet as it is, as most do that leave it. ops_at is where the
 * address of its struct nf_hook_ops is.
 */
static __always_inline bool is_idle_hook(enum hook_role role, void *entry, void *ops_at)
{
	void *ops;

	if (role == HOOK_IDLE)
		return !private_of(entry);
	if (role != HOOK_CHAIN)
		return false;
	ops = (void *)word_at(ops_at);
	return cast(ops, struct nf_hook_ops)->priority != GUARD_PRIORITY && is_empty_chain(ops);
}

/* What a hook does with a plain packet, where it isn't the ID of the program that handles it. */
enum { HOOK_LEAVES = 0, HOOK_HANDLES = -1, HOOK_GUARDS = -2 };

/*
 * Returns what a hook does with a plain packet that isn't idle (is_idle_hook). ops is the address of its struct
 * nf_hook_ops. A global function, which the verifier walks once, not for each hook.
 */
__noinline int effect_of_hook(struct __sk_buff *skb, int role, __u64 private, __u64 ops, int position)
{
	struct nf_hook_ops *o = cast(ops, struct nf_hook_ops);
	int point = position & HOOK_POINT, program;

	switch (role) {
	case HOOK_CHAIN:
		if (position & HOOK_OWN_NETWORK && is_guard_hook(o, point))
			return HOOK_GUARDS;
		if (is_empty_chain(o))
			return HOOK_LEAVES;
		break;
	case HOOK_TABLE:
		if (is_empty_table((void *)private, point, position & HOOK_SIX))
			return HOOK_LEAVES;
		break;
	default:
		if (point == NF_INET_POST_ROUTING && is_apparmor_hook(o, bpf_cast_to_kern_ctx(skb)))
			return HOOK_LEAVES;
	}
	program = hook_program_id((void *)private);
	return program ? program : HOOK_HANDLES;
}

/*
 * Returns whether there is one hook alone, AppArmor's or the pod network's, as on nodes without others: what
 * acting_hook says in a few instructions.
 */
static __always_inline bool only_own_hook(struct nf_hook_entries *all, struct sk_buff *skb, int hook, bool own_network)
{
	void *at = (void *)all + bpf_core_field_offset(struct nf_hook_entries, hooks);
	struct nf_hook_entry *entry = cast(at, struct nf_hook_entry);
	struct hook_functions *known;
	struct nf_hook_ops *ops;

	if (all->num_hook_entries != 1 || (hook == NF_INET_PRE_ROUTING && !own_network))
		return false;
	ops = cast(word_at(at + bpf_core_type_size(struct nf_hook_entry)), struct nf_hook_ops);
	if (hook == NF_INET_POST_ROUTING)
		return is_apparmor_hook(ops, skb);
	if (!is_guard_hook(ops, hook))
		return false;
	known = known_functions();
	return known && hook_role_of(known, (__u64)entry->hook) == HOOK_CHAIN;
}

/* Returns the ID of the program that is the only hook, 0 where there are others. */
static __always_inline __u32 only_program(struct nf_hook_entries *all)
{
	void *at = (void *)all + bpf_core_field_offset(struct nf_hook_entries, hooks);

	return all->num_hook_entries == 1 ? hook_program_id(cast(at, struct nf_hook_entry)->priv) : 0;
}

/*
 * Returns 0 where none of all hooks at a position would handle a plain packet, the ID of a program where that is the
 * only hook that would, else -1.
 */
__noinline int acting_hook(struct __sk_buff *skb, __u64 all, int position)
{
	struct hook_functions *known = known_functions();
	void *entry = first_hook(all), *ops_at;
	int i, n = hook_count(all), acting = 0;
	bool guarded = false;

	if (!known || n > MAX_HOOKS)
		return -1;
	ops_at = entry + n * bpf_core_type_size(struct nf_hook_entry);
	for (i = 0; i < MAX_HOOKS && i < n; i++) {
		enum hook_role role = hook_role_of(known, function_of(entry));
		int effect = HOOK_LEAVES;

		if (!is_idle_hook(role, entry, ops_at))
			effect = effect_of_hook(skb, role, private_of(entry), word_at(ops_at), position);
		entry += bpf_core_type_size(struct nf_hook_entry);
		ops_at += sizeof(void *);
		if (effect == HOOK_LEAVES)
			continue;
		if (effect == HOOK_GUARDS && !guarded) { /* a second one is another's */
			guarded = true;
			continue;
		}
		if (effect < 0 || acting)
			return -1;
		acting = effect;
	}
	return acting;
}
