//go:build ignore

/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Services for the sockets of a cgroup: what a program connects or sends to is translated before there is a packet, and
 * translated back for getpeername() and recvmsg(). What can't be decided here exactly, or can't be done by a socket
 * (masquerade, drop), is left to the programs at devices or the fallback plane.
 */
#include "lookup.h"

#include <linux/in.h>
#include <linux/socket.h>

#define AF_INET 2
#define ECONNREFUSED 111
#define LOCAL_OUT 3 /* NF_INET_LOCAL_OUT */

char _license[] SEC("license") = "GPL";

const volatile __u64 node_namespace = 0; /* set at load time: the cookie of the node's network namespace */

/* Set at load time: 1 where a pod's packets to itself by way of a Service are to be seen by network policies. */
const volatile __u32 own_by_packets = 0;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 17);
	__type(key, __u64);
	__type(value, struct connected);
} fl_udp_peers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, PEER_NAMES);
	__type(key, __u32);
	__type(value, struct peer_name);
} fl_peer_names SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct flow);
} fl_sk_peer SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct endpoint);
	__type(value, struct load);
} fl_open_sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct counted_socket);
} fl_sk_counted SEC(".maps");

#define SOCKET_FLOWS 8 /* a power of two */

/* The latest flows of a socket that isn't connected, a ring. */
struct socket_flows {
	__u32 next;
	__u32 zero;
	struct flow flow[SOCKET_FLOWS];
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket_flows);
} fl_sk_flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, struct netns_key);
	__type(value, struct netns_addr);
} fl_netns_addrs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct trace);
} fl_trace SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 17);
} fl_events SEC(".maps");

/* Types that no map has, but the agent needs. */
const struct event *unused_event __attribute__((unused));
const enum origin unused_origin __attribute__((unused));
const enum scheduler unused_scheduler __attribute__((unused));
const enum header_flag unused_flag __attribute__((unused));
const enum node_port unused_node_port __attribute__((unused));
const enum prefix_flag unused_place __attribute__((unused));
const enum outcome unused_outcome __attribute__((unused));

/*
 * Reads the address that a hook is called with: a peer's, or a destination. Reads and writes are of four bytes, as the
 * verifier requires.
 */
static __always_inline void get_address(struct bpf_sock_addr *ctx, struct address *a, bool six)
{
	if (!six) {
		map_ipv4(a, ctx->user_ip4);
		return;
	}
	a->word[0] = ctx->user_ip6[0];
	a->word[1] = ctx->user_ip6[1];
	a->word[2] = ctx->user_ip6[2];
	a->word[3] = ctx->user_ip6[3];
}

static __always_inline void set_addr_port(struct bpf_sock_addr *ctx, const struct address *a, __be16 port, bool six)
{
	ctx->user_port = port;
	if (!six) {
		ctx->user_ip4 = a->word[3];
		return;
	}
	ctx->user_ip6[0] = a->word[0];
	ctx->user_ip6[1] = a->word[1];
	ctx->user_ip6[2] = a->word[2];
	ctx->user_ip6[3] = a->word[3];
}

static __always_inline void set_peer(struct bpf_sock_addr *ctx, const struct addr_port_pad *p, bool six)
{
	set_addr_port(ctx, &p->address, p->port, six);
}

/* Reads the address that the socket is bound to; zero where it isn't. */
static __always_inline void bound_address(struct bpf_sock_addr *ctx, struct address *a, bool six)
{
	struct bpf_sock *sk = ctx->sk;

	__builtin_memset(a, 0, sizeof(*a));
	if (!sk)
		return;
	if (!six || sk->family == AF_INET) {
		if (sk->src_ip4)
			map_ipv4(a, sk->src_ip4);
		return;
	}
	a->word[0] = sk->src_ip6[0];
	a->word[1] = sk->src_ip6[1];
	a->word[2] = sk->src_ip6[2];
	a->word[3] = sk->src_ip6[3];
	if (is_ipv4(a) && !a->word[3])
		a->word[2] = 0;
}

#define MAX_DEVICES 8
#define MAX_ADDRESSES 8

/* Reads the first IPv6 address of a device that isn't link-local. */
static __always_inline bool global_address6(struct inet6_dev *dev, struct address *a)
{
	struct list_head *head, *at;
	int i;

	if (!dev)
		return false;
	head = (void *)dev + bpf_core_field_offset(struct inet6_dev, addr_list);
	at = BPF_CORE_READ(head, next);
	for (i = 0; i < MAX_ADDRESSES && at && at != head; i++) {
		struct inet6_ifaddr *ifa = (void *)at - bpf_core_field_offset(struct inet6_ifaddr, if_list);

		bpf_core_read(a, sizeof(*a), &ifa->addr);
		if ((a->word[0] & bpf_htonl(0xffc00000)) != bpf_htonl(0xfe800000))
			return !is_zero(a);
		at = BPF_CORE_READ(at, next);
	}
	return false;
}

/*
 * Reports whether the other end of a namespace's device is a pod's interface. The private part of a veth or netkit,
 * which follows the device, begins with a pointer to it; that of other devices has nothing there that is in the node's
 * namespace.
 */
static __noinline bool peer_is_pod_device(struct net_device *dev)
{
	struct net_device *other = NULL;

	bpf_probe_read_kernel(&other, sizeof(other),
			      (void *)dev + ((bpf_core_type_size(struct net_device) + 31) & ~31UL));
	return other && BPF_CORE_READ(other, nd_net.net, net_cookie) == node_namespace && is_pod_device(other);
}

/*
 * Reads the address that a pod's socket sends from unless it is bound: the first of the first interface of its
 * namespace that is up and isn't loopback. Stores the interface in expires. Returns false where there is none. A
 * function that isn't static, like this one, is verified once, by itself.
 */
__noinline int namespace_address(struct bpf_sock_addr *ctx, struct netns_addr *own, bool v4)
{
	struct net *net = BPF_CORE_READ((struct bpf_sock_addr_kern *)ctx, sk, __sk_common.skc_net.net);
	struct list_head *head, *at;
	int i;

	if (!net || !own)
		return false;
	head = (void *)net + bpf_core_field_offset(struct net, dev_base_head);
	at = BPF_CORE_READ(head, next);
	for (i = 0; i < MAX_DEVICES && at && at != head; i++) {
		struct net_device *dev = (void *)at - bpf_core_field_offset(struct net_device, dev_list);
		unsigned int flags = BPF_CORE_READ(dev, flags);

		at = BPF_CORE_READ(dev, dev_list.next);
		if (!(flags & IFF_UP) || (flags & IFF_LOOPBACK))
			continue;
		if (v4) {
			__be32 v = BPF_CORE_READ(dev, ip_ptr, ifa_list, ifa_local);

			if (!v)
				continue;
			map_ipv4(&own->address, v);
		} else {
			if (!bpf_core_field_exists(dev->ip6_ptr) ||
			    !global_address6(BPF_CORE_READ(dev, ip6_ptr), &own->address)) /* CONFIG_IPV6 */
				continue;
		}
		own->expires = (__u64)dev;
		return true;
	}
	return false;
}

/* Returns the cached address of a namespace for a family; NULL where there is none. */
static __always_inline struct netns_addr *cached_namespace(__u64 namespace, bool v4)
{
	struct netns_key home = {.namespace = namespace, .family = v4 ? 4 : 6};
	struct netns_addr *known = bpf_map_lookup_elem(&fl_netns_addrs, &home);

	return known && known->expires > bpf_ktime_get_coarse_ns() ? known : NULL;
}

/* Finds the address that a pod's socket sends from if it isn't bound, and caches it for a second. */
static __noinline bool resolve_source(struct bpf_sock_addr *ctx, struct lookup *q)
{
	bool v4 = is_ipv4(&q->entry.address);
	struct netns_key home = {.namespace = q->namespace, .family = v4 ? 4 : 6};
	struct netns_addr *known = cached_namespace(q->namespace, v4), found = {};

	if (known) {
		q->client = known->address;
		return true;
	}
	if (!namespace_address(ctx, &found, v4))
		return false;
	q->client = found.address;
	if (pod_interfaces() && peer_is_pod_device((void *)found.expires))
		found.flags = PREFIX_PODS;
	found.expires = bpf_ktime_get_coarse_ns() + SECOND;
	found.flags |= prefix_flags(&found.address);
	bpf_map_update_elem(&fl_netns_addrs, &home, &found, BPF_ANY);
	return true;
}

/*
 * Returns the origin of a socket of another namespace than the node's; 0 where only the interface of its packets shows
 * it.
 */
static __always_inline __u32 socket_origin(struct bpf_sock_addr *ctx, struct lookup *q, bool bound)
{
	struct netns_addr *home;

	if (is_zero(&q->client) && !resolve_source(ctx, q))
		return 0;
	if (prefix_flags(&q->client) & PREFIX_PODS)
		return FROM_POD;
	if (!pod_interfaces())
		return FROM_EXTERNAL;
	home = bound ? NULL : cached_namespace(q->namespace, is_ipv4(&q->entry.address));
	return home && home->flags & PREFIX_PODS ? FROM_POD : 0;
}

static __always_inline struct trace *trace_state(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&fl_trace, &first);
}

#include "least.h"

/* Selects by open sockets, or as packets do. */
static __always_inline __u32 select_index(struct pool *p, const struct header *h, __u32 extent, const struct lookup *q)
{
	return h->scheduler >= LEAST_CONN ? select_least(p, h, extent, q) : select_backend(p, h, extent, q);
}

/* Reports the outcome of a lookup to the reader of fl_events. */
__noinline int report_event(const struct lookup *q, __u8 outcome)
{
	struct trace *t = trace_state();
	struct event *e;
	int i;

	if (!t || !t->until || !q || (t->namespace && t->namespace != q->namespace) ||
	    t->until < bpf_ktime_get_coarse_ns())
		return 0;
	for (i = 0; t->pool[0] && i < TRACE_POOLS; i++) {
		if (t->pool[i] == q->pool)
			break;
	}
	if (i == TRACE_POOLS)
		return 0;
	e = bpf_ringbuf_reserve(&fl_events, sizeof(*e), 0);
	if (!e) {
		__sync_fetch_and_add(&t->lost, 1);
		return 0;
	}
	e->time = bpf_ktime_get_ns();
	e->namespace = q->namespace;
	e->pool = q->pool;
	e->entry = q->entry;
	e->backend = q->backend;
	e->process = bpf_get_current_pid_tgid() >> 32;
	e->protocol = q->protocol;
	e->outcome = outcome;
	e->zero = 0;
	bpf_get_current_comm(e->command, sizeof(e->command));
	bpf_ringbuf_submit(e, 0);
	return 0;
}

/* Reports whether the selected backend is the client itself. */
static __always_inline bool is_own_backend(struct bpf_sock_addr *ctx, struct lookup *q)
{
	return (!is_zero(&q->client) || resolve_source(ctx, q)) && addr_equal(&q->client, &q->backend.address);
}

#define MAX_HOOKS 16
/* The priorities of hooks that change where packets go, from NF_IP_PRI_MANGLE to NF_IP_PRI_NAT_DST. */
#define FIRST_REDIRECT (-150)
#define LAST_REDIRECT (-100)

/* Reports whether a namespace's hooks may redirect packets; others' are those of SELinux, or count or filter. */
static __noinline bool may_redirect(struct nf_hook_entries *e)
{
	__u32 n = BPF_CORE_READ(e, num_hook_entries);
	void *ops = (void *)e + bpf_core_field_offset(struct nf_hook_entries, hooks) +
		    n * bpf_core_type_size(struct nf_hook_entry);
	struct nf_hook_ops *at = NULL;
	int i, priority;

	for (i = 0; i < MAX_HOOKS && i < n; i++) {
		bpf_probe_read_kernel(&at, sizeof(at), ops + i * sizeof(at));
		priority = BPF_CORE_READ(at, priority);
		if (priority >= FIRST_REDIRECT && priority <= LAST_REDIRECT)
			return true;
	}
	return n > MAX_HOOKS;
}

/*
 * Reports whether what a pod's socket sends may be redirected in its own network namespace, as by a service mesh. Its
 * rules must see the Service's address: programs at devices translate it after them.
 */
static __noinline bool is_redirected(struct bpf_sock_addr *ctx, const struct address *to)
{
	struct net *net = BPF_CORE_READ((struct bpf_sock_addr_kern *)ctx, sk, __sk_common.skc_net.net);
	struct nf_hook_entries *e;

	if (!bpf_core_field_exists(struct netns_nf, hooks_ipv4)) /* CONFIG_NETFILTER */
		return false;
	e = is_ipv4(to) ? BPF_CORE_READ(net, nf.hooks_ipv4[LOCAL_OUT]) : BPF_CORE_READ(net, nf.hooks_ipv6[LOCAL_OUT]);
	return e && may_redirect(e);
}

/* Reports whether a TCP socket's network namespace has no hooks at all: that is read without a helper for each field.
 */
static __always_inline bool has_no_hooks(struct bpf_sock_addr *ctx, const struct address *to)
{
	struct tcp_sock *tcp = bpf_skc_to_tcp_sock(ctx->sk);
	struct net *net;

	if (!tcp)
		return false;
	if (!bpf_core_field_exists(struct netns_nf, hooks_ipv4))
		return true;
	net = tcp->inet_conn.icsk_inet.sk.__sk_common.skc_net.net;
	return is_ipv4(to) ? !net->nf.hooks_ipv4[LOCAL_OUT] : !net->nf.hooks_ipv6[LOCAL_OUT];
}

/* Resolves a lookup: a backend, refusal, or neither. Verified once for all hooks, since it isn't static. */
__noinline int resolve_lookup(struct bpf_sock_addr *ctx, struct lookup *q)
{
	struct frontend *f;
	struct header h;
	struct pool *p;
	union slot *s;
	__u32 extent, i;
	bool node, bound;

	if (!q)
		return FALLBACK;
	bound = !is_zero(&q->client);
	node = q->namespace == node_namespace;
	q->origin = node ? FROM_NODE : FROM_POD;
	f = lookup_service(q);
	if (!f)
		return FALLBACK;
	if (node ? f->node_port & NODE_ADDRESS && is_bound(ctx, q) : is_redirected(ctx, &q->entry.address))
		return FALLBACK;
	if (unlikely(!node && f->by_origin)) {
		q->origin = socket_origin(ctx, q, bound);
		if (!q->origin || (q->remote && q->origin == FROM_EXTERNAL))
			return FALLBACK;
	}
	i = q->origin == FROM_EXTERNAL ? f->external : f->internal;
	p = bpf_map_lookup_elem(&fl_pools, &i);
	if (!p)
		return FALLBACK;
	q->pool = p->id;
	q->index = i;
	if (unlikely(f->fallback & q->origin || (node && q->client.word[3] && is_loopback(&q->client))))
		return FALLBACK;
	extent = *(volatile __u32 *)&p->extent;
	s = slot_at(extent);
	if (!s || !extent)
		return FALLBACK;
	h = s->header;
	q->counted = h.scheduler >= LEAST_CONN;
	if (unlikely(!is_zero(&q->previous.address)) && retained_slot(extent, &h, &q->previous)) {
		q->backend = q->previous;
		return TRANSLATED;
	}
	if (unlikely(!h.count))
		return f->drop & q->origin ? DROPPED : REFUSED;
	if (unlikely(h.affinity || h.scheduler == SOURCE_HASH)) {
		if (!node && is_zero(&q->client) && !resolve_source(ctx, q))
			return FALLBACK;
		if (!node && p->fallback)
			q->origin = socket_origin(ctx, q, bound);
		if (!q->origin || p->fallback & q->origin)
			return FALLBACK;
	}
	if (!choose_backend(q, p, &h, extent))
		return FALLBACK;
	return unlikely(own_by_packets) && !node && is_own_backend(ctx, q) ? FALLBACK : TRANSLATED;
}

/* Counts the outcome of a lookup, and reports it if there is a trace. */
static __always_inline void count_outcome(const struct lookup *q, int outcome, const struct trace *t)
{
	struct pool *p;

	if (!q->pool)
		return;
	p = bpf_map_lookup_elem(&fl_pools, &q->index);
	if (!p)
		return;
	if (likely(outcome == TRANSLATED))
		__sync_fetch_and_add(&p->connections, 1);
	if (unlikely(outcome == REFUSED))
		__sync_fetch_and_add(&p->refused, 1);
	if (unlikely(t && t->until))
		report_event(q, outcome);
}

/* Fills a lookup from a hook's context. Returns false for protocols that aren't served here. */
static __always_inline bool read_lookup(struct bpf_sock_addr *ctx, struct lookup *q, bool six)
{
	__builtin_memset(q, 0, sizeof(*q));
	if (ctx->protocol == IPPROTO_TCP || ctx->protocol == IPPROTO_MPTCP)
		q->protocol = IPPROTO_TCP;
	else if (ctx->protocol == IPPROTO_UDP)
		q->protocol = IPPROTO_UDP;
	else
		return false;
	get_address(ctx, &q->entry.address, six);
	q->entry.port = ctx->user_port;
	q->namespace = bpf_get_netns_cookie(ctx);
	bound_address(ctx, &q->client, six);
	return true;
}

/* Refuses with ECONNREFUSED, or, where the kernel lacks that (before 5.18), with EPERM. */
static __always_inline int refuse_connect(void)
{
	if (kernel_has(BPF_FUNC_set_retval))
		bpf_set_retval(-ECONNREFUSED);
	return 0;
}

/* Returns the slot for a TCP socket's peer name, by its cookie. */
static __always_inline struct peer_name *peer_name_at(__u64 cookie)
{
	__u32 at = cookie % PEER_NAMES;

	return bpf_map_lookup_elem(&fl_peer_names, &at);
}

/*
 * Stores the peer name of a TCP socket with the socket itself, since another socket has the slot in fl_peer_names.
 */
static __noinline void save_in_socket(struct bpf_sock_addr *ctx, const struct address *entry, __be16 entry_port,
				      const struct address *backend, __be16 backend_port)
{
	struct flow *f;

	if (!ctx->sk)
		return;
	f = bpf_sk_storage_get(&fl_sk_peer, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!f)
		return;
	f->entry.address = *entry;
	f->entry.port = entry_port;
	f->backend.address = *backend;
	f->backend.port = backend_port;
}

/*
 * Stores the peer name of a TCP socket. This is as cheap as possible: storage for each connection would cost more than
 * all else here together.
 */
static __always_inline void save_peer_name(struct bpf_sock_addr *ctx, __u64 namespace, __u64 pool,
					   const struct address *entry, __be16 entry_port,
					   const struct address *backend, __be16 backend_port)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct peer_name *n = peer_name_at(cookie);

	if (!n)
		return;
	if (unlikely(n->queried && n->cookie != cookie)) {
		save_in_socket(ctx, entry, entry_port, backend, backend_port);
		return;
	}
	n->cookie = cookie;
	n->namespace = namespace;
	n->pool = pool;
	n->entry = *entry;
	n->backend = *backend;
	n->entry_port = entry_port;
	n->backend_port = backend_port;
	n->queried = 0;
}

static __noinline void save_tcp_peer(struct bpf_sock_addr *ctx, const struct lookup *q)
{
	save_peer_name(ctx, q->namespace, q->pool, &q->entry.address, q->entry.port, &q->backend.address,
		       q->backend.port);
}

/* Stores what a UDP socket is connected to. */
static __noinline void save_udp_peer(struct bpf_sock_addr *ctx, const struct lookup *q)
{
	struct connected c = {
		.flow.entry = q->entry, .flow.backend = q->backend, .namespace = q->namespace, .pool = q->pool};
	__u64 cookie = bpf_get_socket_cookie(ctx);

	bpf_map_update_elem(&fl_udp_peers, &cookie, &c, BPF_ANY);
}

/*
 * Serves most connections: TCP, by a socket that isn't bound, to an entry and a pool that need no other lookup, or to
 * no entry at all. Returns false, and has done nothing, for all others. Most of its cost is fetching code and data that
 * aren't in the nearest caches: so it is short.
 */
static __always_inline bool connect_fast(struct bpf_sock_addr *ctx, bool six)
{
	struct entry to = {.port = ctx->user_port, .protocol = IPPROTO_TCP};
	struct trace *t = trace_state();
	struct netns_addr *home;
	struct frontend *f;
	struct pool *p;
	union slot *s;
	struct port_bits *u;
	__u64 namespace, served;
	__u32 origin;

	if (ctx->protocol != IPPROTO_TCP || !ctx->sk || ctx->sk->src_ip4 || !t || t->counting | t->until)
		return false;
	if (six && (ctx->sk->src_ip6[0] | ctx->sk->src_ip6[1] | ctx->sk->src_ip6[2] | ctx->sk->src_ip6[3]))
		return false;
	get_address(ctx, &to.address, six);
	f = bpf_map_lookup_elem(&fl_services, &to);
	if (!f) {
		u = port_bits_of(&fl_port_bits);
		return u && !(u->of[to.port] & BIT_NODE_PORT);
	}
	namespace = bpf_get_netns_cookie(ctx);
	origin = namespace == node_namespace ? FROM_NODE : FROM_POD;
	if (!(f->fast & origin) || (origin == FROM_POD && !has_no_hooks(ctx, &to.address)))
		return false;
	if (origin == FROM_POD && f->by_origin) {
		home = cached_namespace(namespace, !six || is_ipv4(&to.address));
		if (!home || !(home->flags & PREFIX_PODS))
			return false;
	}
	p = bpf_map_lookup_elem(&fl_pools, &f->internal);
	if (!p)
		return false;
	served = *(volatile __u64 *)&p->extent;
	if (!FAST_COUNT(served))
		return false;
	s = select_weighted(p, __sync_fetch_and_add(&p->connections, 1), FAST_COUNT(served), EXTENT(served));
	if (!s)
		return false;
	if (unlikely(own_by_packets) && origin == FROM_POD) {
		home = cached_namespace(namespace, is_ipv4(&s->backend.address));
		if (!home || addr_equal(&home->address, &s->backend.address))
			return false;
	}
	save_peer_name(ctx, namespace, p->id, &to.address, to.port, &s->backend.address, s->backend.port);
	set_addr_port(ctx, &s->backend.address, s->backend.port, six);
	return true;
}

/*
 * Serves any connect(). Each family has its own copy: the verifier wants to see which fields of the context are meant.
 */
static __always_inline int connect_any(struct bpf_sock_addr *ctx, bool six)
{
	struct trace *t = trace_state();
	struct lookup q;
	int outcome;

	if (!read_lookup(ctx, &q, six))
		return 1;
	outcome = resolve_lookup(ctx, &q);
	count_outcome(&q, outcome, t);
	if (unlikely(t && t->counting))
		count_socket(ctx, &q, outcome == TRANSLATED && q.counted);
	if (unlikely(outcome == REFUSED))
		return refuse_connect();
	if (likely(outcome == TRANSLATED)) {
		if (q.protocol == IPPROTO_UDP)
			save_udp_peer(ctx, &q);
		else
			save_tcp_peer(ctx, &q);
		set_peer(ctx, &q.backend, six);
	} else if (q.protocol == IPPROTO_UDP) {
		__u64 cookie = bpf_get_socket_cookie(ctx);

		bpf_map_delete_elem(&fl_udp_peers, &cookie); /* of an earlier connect() */
	}
	return 1;
}

static __noinline int connect4_any(struct bpf_sock_addr *ctx)
{
	return connect_any(ctx, false);
}
static __noinline int connect6_any(struct bpf_sock_addr *ctx)
{
	return connect_any(ctx, true);
}

/*
 * Returns the index of a socket's flow to an entry, or, with back, from a backend; SOCKET_FLOWS where there is none.
 */
__noinline int flow_index(const struct socket_flows *flows, const struct addr_port_pad *at, bool back)
{
	int i;

	if (!flows || !at)
		return SOCKET_FLOWS;
	for (i = 0; i < SOCKET_FLOWS; i++) {
		const struct flow *f = &flows->flow[i];

		if (!is_zero(&f->entry.address) && same_addr_port(back ? &f->backend : &f->entry, at))
			return i;
	}
	return SOCKET_FLOWS;
}

/* Serves a datagram by a socket that isn't connected. It keeps its backend at an entry as long as that exists. */
static __always_inline int sendmsg(struct bpf_sock_addr *ctx, bool six)
{
	struct socket_flows *flows;
	struct lookup q;
	__u32 i = SOCKET_FLOWS;
	int outcome;

	if (!read_lookup(ctx, &q, six) || !ctx->sk)
		return 1;
	if (is_zero(&q.client) && !six && ctx->msg_src_ip4)
		map_ipv4(&q.client, ctx->msg_src_ip4);
	if (is_zero(&q.client) && six) {
		q.client.word[0] = ctx->msg_src_ip6[0];
		q.client.word[1] = ctx->msg_src_ip6[1];
		q.client.word[2] = ctx->msg_src_ip6[2];
		q.client.word[3] = ctx->msg_src_ip6[3];
	}
	flows = bpf_sk_storage_get(&fl_sk_flows, ctx->sk, NULL, 0);
	if (flows)
		i = flow_index(flows, &q.entry, false);
	if (flows && i < SOCKET_FLOWS)
		q.previous = flows->flow[i].backend;
	outcome = resolve_lookup(ctx, &q);
	if (outcome == TRANSLATED && same_addr_port(&q.backend, &q.previous)) {
		set_peer(ctx, &q.backend, six);
		return 1;
	}
	count_outcome(&q, outcome, trace_state());
	if (outcome == REFUSED)
		return refuse_connect();
	if (outcome != TRANSLATED)
		return 1;
	if (!flows)
		flows = bpf_sk_storage_get(&fl_sk_flows, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!flows)
		return 1;
	if (i >= SOCKET_FLOWS)
		i = flows->next++ & (SOCKET_FLOWS - 1);
	if (i < SOCKET_FLOWS) {
		flows->flow[i].entry = q.entry;
		flows->flow[i].backend = q.backend;
	}
	set_peer(ctx, &q.backend, six);
	return 1;
}

/* Replaces the address and port of a flow's backend by those of its entry, if these are at hand. */
static __always_inline bool restore_entry(struct bpf_sock_addr *ctx, const struct flow *f,
					  const struct addr_port_pad *at, bool six)
{
	if (!same_addr_port(&f->backend, at))
		return false;
	set_peer(ctx, &f->entry, six);
	return true;
}

/* A datagram from a backend is shown as coming from the entry. */
static __always_inline int recvmsg(struct bpf_sock_addr *ctx, bool six)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct addr_port_pad from = {.port = ctx->user_port};
	struct connected *c = bpf_map_lookup_elem(&fl_udp_peers, &cookie);
	struct socket_flows *flows;
	__u32 i;

	get_address(ctx, &from.address, six);
	if ((c && restore_entry(ctx, &c->flow, &from, six)) || !ctx->sk)
		return 1;
	flows = bpf_sk_storage_get(&fl_sk_flows, ctx->sk, NULL, 0);
	if (!flows)
		return 1;
	i = flow_index(flows, &from, true);
	if (i < SOCKET_FLOWS)
		set_peer(ctx, &flows->flow[i].entry, six);
	return 1;
}

/* The peer of a connected socket is shown as the entry. */
static __always_inline int getpeername(struct bpf_sock_addr *ctx, bool six)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct addr_port_pad peer = {.port = ctx->user_port};
	struct connected *c;
	struct flow *f, was = {};
	struct peer_name *n;

	get_address(ctx, &peer.address, six);
	if (ctx->protocol == IPPROTO_UDP) {
		c = bpf_map_lookup_elem(&fl_udp_peers, &cookie);
		if (c)
			restore_entry(ctx, &c->flow, &peer, six);
		return 1;
	}
	n = peer_name_at(cookie);
	if (n && n->cookie == cookie) {
		was.entry.address = n->entry;
		was.entry.port = n->entry_port;
		was.backend.address = n->backend;
		was.backend.port = n->backend_port;
		if (restore_entry(ctx, &was, &peer, six)) {
			n->queried = 1;
			return 1;
		}
	}
	if (!ctx->sk)
		return 1;
	f = bpf_sk_storage_get(&fl_sk_peer, ctx->sk, NULL, 0);
	if (f)
		restore_entry(ctx, f, &peer, six);
	return 1;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	return connect_fast(ctx, false) ? 1 : connect4_any(ctx);
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	return connect_fast(ctx, true) ? 1 : connect6_any(ctx);
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	return sendmsg(ctx, false);
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	return sendmsg(ctx, true);
}

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	return recvmsg(ctx, false);
}

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	return recvmsg(ctx, true);
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	return getpeername(ctx, false);
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	return getpeername(ctx, true);
}

/* A socket is closed: it no longer counts, and its peer name is dropped. */
SEC("cgroup/sock_release")
int release(struct bpf_sock *sk)
{
	__u64 cookie;
	struct peer_name *n;

	if (counts_sockets())
		uncount(bpf_sk_storage_get(&fl_sk_counted, sk, NULL, 0));
	cookie = bpf_get_socket_cookie(sk);
	if (sk->protocol == IPPROTO_UDP) {
		bpf_map_delete_elem(&fl_udp_peers, &cookie);
		return 1;
	}
	n = peer_name_at(cookie);
	if (n && n->cookie == cookie)
		n->cookie = n->queried = 0;
	return 1;
}
