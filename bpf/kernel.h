/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The fields of the kernel's own structs that are read. The loader finds each in the running kernel by name (CO-RE), so
 * that order, size and other fields don't matter.
 */
#pragma once

#include <linux/bpf.h>
#include <linux/in6.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct list_head {
	struct list_head *next;
};

struct hlist_node {
	struct hlist_node *next;
};

struct hlist_head {
	struct hlist_node *first;
};

typedef struct {
	int counter;
} atomic_t;

struct timespec64 {
	__s64 tv_sec;
};

struct nf_hook_entry {
	void *hook, *priv;
};

/* Behind the last hook follow pointers to their struct nf_hook_ops. */
struct nf_hook_entries {
	unsigned short num_hook_entries;
	struct nf_hook_entry hooks[];
};

struct nf_hook_ops {
	void *priv;
	int priority;
};

/* The rules of a chain, in two generations, of which the kernel evaluates one (net/netfilter/nf_tables_core.c). */
struct nft_rule_blob {
	unsigned long size; /* 0: no rules */
};

struct nft_table {
	char *name;
};

struct nft_chain {
	struct nft_rule_blob *blob_gen_0, *blob_gen_1;
	struct nft_table *table;
	char *name;
};

struct nft_base_chain {
	struct nf_hook_ops ops;
	__u8 policy;
	struct nft_chain chain;
};

/* A table of iptables' legacy form: entries of all its chains, and where those of each hook begin and end. */
struct xt_table_info {
	unsigned int hook_entry[5], underflow[5];
	unsigned char entries[];
};

struct xt_table {
	struct xt_table_info *private;
	char name[32];
};

struct netns_nf {
	struct nf_hook_entries *hooks_ipv4[5], *hooks_ipv6[5];
};

struct netns_xfrm {
	unsigned int policy_count[6];
	__u8 policy_default[3];
};

/* A rule of routing, and all of a family, in the order in which they apply. */
struct fib_rule {
	struct list_head list;
	__u32 table;
	__u8 proto;
};

struct fib_rules_ops {
	struct list_head rules_list;
};

struct netns_ipv4 {
	struct fib_rules_ops *rules_ops;
	_Bool fib_has_custom_rules;
	atomic_t rt_genid;
};

struct ipv6_devconf {
	__s32 forwarding;
};

struct netns_ipv6 {
	struct ipv6_devconf *devconf_all;
	struct fib_rules_ops *fib6_rules_ops;
	_Bool fib6_has_custom_rules;
	atomic_t fib6_sernum;
};

struct net {
	__u64 net_cookie;
	struct list_head dev_base_head;
	struct hlist_head *dev_index_head;
	struct netns_ipv4 ipv4;
	struct netns_ipv6 ipv6;
	struct netns_nf nf;
	struct netns_xfrm xfrm;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct sock_common {
	possible_net_t skc_net;
};

struct sock {
	struct sock_common __sk_common;
};

struct inet_sock {
	struct sock sk;
};

struct inet_connection_sock {
	struct inet_sock icsk_inet;
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
};

/* The kernel's own form of a struct bpf_sock_addr. */
struct bpf_sock_addr_kern {
	struct sock *sk;
};

struct in_ifaddr {
	__be32 ifa_local;
};

struct in_device {
	struct in_ifaddr *ifa_list;
};

struct inet6_ifaddr {
	struct in6_addr addr;
	struct list_head if_list;
};

struct inet6_dev {
	struct list_head addr_list;
};

struct bpf_prog;

struct bpf_prog_aux {
	struct bpf_prog *prog;
	__u32 id;
};

struct bpf_prog {
	struct bpf_prog_aux *aux;
};

struct bpf_mprog_fp {
	struct bpf_prog *prog;
};

struct bpf_mprog_bundle;

struct bpf_mprog_entry {
	struct bpf_mprog_fp fp_items[64];
	struct bpf_mprog_bundle *parent;
};

struct bpf_mprog_bundle {
	struct bpf_mprog_entry a, b;
};

struct mini_Qdisc;

struct tcx_entry {
	struct mini_Qdisc *miniq;
	struct bpf_mprog_bundle bundle;
};

struct Qdisc {
	void *enqueue;
};

struct netdev_queue {
	struct Qdisc *qdisc;
};

struct net_device {
	struct list_head dev_list;
	unsigned int flags, mtu, max_mtu;
	unsigned short type;
	struct in_device *ip_ptr;
	struct inet6_dev *ip6_ptr;
	/* for packets: */
	possible_net_t nd_net;
	int ifindex;
	struct hlist_node index_hlist;
	void *rx_handler;
	struct netdev_queue *_tx;
	struct bpf_mprog_entry *tcx_ingress, *tcx_egress;
	struct nf_hook_entries *nf_hooks_ingress, *nf_hooks_egress;
	struct list_head ptype_all, ptype_specific;
	char name[16];
	struct {
		struct list_head upper;
	} adj_list;
};

struct netdev_adjacent {
	struct net_device *dev;
	_Bool master;
	struct list_head list;
};

struct sk_buff {
	struct net_device *dev;
	__u32 secmark;
	__u8 active_extensions;
};

struct nf_conn {
	unsigned long status;
};

/* The context of a program at a hook of netfilter, since Linux 6.4. */
struct nf_hook_state {
	__u8 hook, pf;
	struct net_device *in, *out;
};

struct bpf_nf_ctx {
	const struct nf_hook_state *state;
	struct sk_buff *skb;
};

#pragma clang attribute pop

/*
 * net/netfilter/nf_conntrack_bpf.c, since Linux 5.18, where connection tracking is built in or its module is loaded.
 */
struct bpf_ct_opts {
	__s32 netns_id, error;
	__u8 l4proto, dir, reserved[2];
};

struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *, struct bpf_sock_tuple *, __u32, struct bpf_ct_opts *, __u32)
__weak __ksym;
void bpf_ct_release(struct nf_conn *) __weak __ksym;

/* kernel/bpf/helpers.c, since Linux 6.2: the kernel's own form of a context, and read access to any address. */
void *bpf_cast_to_kern_ctx(void *) __ksym;
void *bpf_rdonly_cast(const void *, __u32) __ksym;

#define cast(pointer, type) ((type *)bpf_rdonly_cast((const void *)(pointer), bpf_core_type_id_kernel(type)))

/* include/uapi/linux/netfilter/nf_conntrack_common.h */
#define IPS_SRC_NAT 16
#define IPS_DST_NAT 32

/* include/uapi/linux/netfilter/nf_conntrack_tuple_common.h */
#define IP_CT_DIR_REPLY 1

/* include/uapi/linux/if.h */
#define IFF_UP 1
#define IFF_LOOPBACK 8

/* Whether the running kernel has a helper, by its number in enum bpf_func_id. */
#define kernel_has(func) bpf_core_enum_value_exists(enum bpf_func_id, func)
