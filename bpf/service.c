/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Services for the sockets of a cgroup: what a program connects or sends to is translated before there is a packet, and
 * translated back where it asks who it talks to. What can't be decided here exactly, or can't be done by a socket (hide
 * the client's address, stay silent), goes on as it is, to whoever serves the node's packets.
 */
#include "choose.h"

#include <linux/in.h>
#include <linux/socket.h>

#define AF_INET 2
#define ECONNREFUSED 111

char _license[] SEC("license") = "GPL";

const volatile __u64 node_namespace = 0; /* set at load time: the cookie of the node's network namespace */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 17);
	__type(key, __u64);
	__type(value, struct connected);
} connected SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, NAMES);
	__type(key, __u32);
	__type(value, struct name);
} names SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct flow);
} named SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct endpoint);
	__type(value, struct load);
} loads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct counted);
} counted SEC(".maps");

#define FLOWS 8 /* a power of two */

/* The latest flows of a socket that isn't connected, round and round. */
struct flows {
	__u32 next;
	__u32 zero;
	struct flow flow[FLOWS];
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct flows);
} peers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, struct home);
	__type(value, struct address_of);
} homes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct trace);
} traced SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 17);
} events SEC(".maps");

/* Types that no map has, but the agent needs. */
const struct event *unused_event __attribute__((unused));
const enum origin unused_origin __attribute__((unused));
const enum scheduler unused_scheduler __attribute__((unused));
const enum header_flag unused_flag __attribute__((unused));
const enum place unused_place __attribute__((unused));
const enum outcome unused_outcome __attribute__((unused));

/* The address that a hook is about: a peer's, or a destination. Reads and writes are of four bytes, as the verifier asks. */
static __always_inline void get_address(struct bpf_sock_addr *ctx, struct address *a, bool six)
{
	if (!six) {
		map4(a, ctx->user_ip4);
		return;
	}
	a->word[0] = ctx->user_ip6[0];
	a->word[1] = ctx->user_ip6[1];
	a->word[2] = ctx->user_ip6[2];
	a->word[3] = ctx->user_ip6[3];
}

static __always_inline void set_end(struct bpf_sock_addr *ctx, const struct address *a, __be16 port, bool six)
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

static __always_inline void set_place(struct bpf_sock_addr *ctx, const struct place_of *p, bool six)
{
	set_end(ctx, &p->address, p->port, six);
}

/* Where the socket is bound; zero where it isn't. */
static __always_inline void get_source(struct bpf_sock_addr *ctx, struct address *a, bool six)
{
	struct bpf_sock *sk = ctx->sk;

	__builtin_memset(a, 0, sizeof(*a));
	if (!sk)
		return;
	if (!six || sk->family == AF_INET) {
		if (sk->src_ip4)
			map4(a, sk->src_ip4);
		return;
	}
	a->word[0] = sk->src_ip6[0];
	a->word[1] = sk->src_ip6[1];
	a->word[2] = sk->src_ip6[2];
	a->word[3] = sk->src_ip6[3];
	if (is4(a) && !a->word[3])
		a->word[2] = 0;
}

#define DEVICES 8
#define ADDRESSES 8

/* The first IPv6 address of a device that others than its neighbours know. */
static __always_inline bool address6(struct inet6_dev *dev, struct address *a)
{
	struct list_head *head, *at;
	int i;

	if (!dev)
		return false;
	head = (void *)dev + bpf_core_field_offset(struct inet6_dev, addr_list);
	at = BPF_CORE_READ(head, next);
	for (i = 0; i < ADDRESSES && at && at != head; i++) {
		struct inet6_ifaddr *ifa = (void *)at - bpf_core_field_offset(struct inet6_ifaddr, if_list);

		bpf_core_read(a, sizeof(*a), &ifa->addr);
		if ((a->word[0] & bpf_htonl(0xffc00000)) != bpf_htonl(0xfe800000))
			return !zero(a);
		at = BPF_CORE_READ(at, next);
	}
	return false;
}

/*
 * Whether the other end of a namespace's device is an interface of pods: a veth's or netkit's private part, which follows the device, begins
 * with it. What is none of these has something else there, and nothing that is in the node's namespace.
 */
static __noinline bool leads_to_pods_interface(struct net_device *dev)
{
	struct net_device *other = NULL;

	bpf_probe_read_kernel(&other, sizeof(other), (void *)dev + ((bpf_core_type_size(struct net_device) + 31) & ~31UL));
	return other && BPF_CORE_READ(other, nd_net.net, net_cookie) == node_namespace && is_of_pods(other);
}

/*
 * The address that a socket of a pod sends from, unless it is bound: the first of the first interface of its namespace
 * that is up and isn't loopback. The place of until has that interface. False where there is none. A function that is not static, like this, is verified by
 * itself, not again for every way that leads to it.
 */
__noinline int own_address(struct bpf_sock_addr *ctx, struct address_of *own, bool v4)
{
	struct net *net = BPF_CORE_READ((struct bpf_sock_addr_kern *)ctx, sk, __sk_common.skc_net.net);
	struct list_head *head, *at;
	int i;

	if (!net || !own)
		return false;
	head = (void *)net + bpf_core_field_offset(struct net, dev_base_head);
	at = BPF_CORE_READ(head, next);
	for (i = 0; i < DEVICES && at && at != head; i++) {
		struct net_device *dev = (void *)at - bpf_core_field_offset(struct net_device, dev_list);
		unsigned int flags = BPF_CORE_READ(dev, flags);

		at = BPF_CORE_READ(dev, dev_list.next);
		if (!(flags & IFF_UP) || (flags & IFF_LOOPBACK))
			continue;
		if (v4) {
			__be32 v = BPF_CORE_READ(dev, ip_ptr, ifa_list, ifa_local);

			if (!v)
				continue;
			map4(&own->address, v);
		} else {
			if (!bpf_core_field_exists(dev->ip6_ptr) || !address6(BPF_CORE_READ(dev, ip6_ptr), &own->address)) /* CONFIG_IPV6 */
				continue;
		}
		own->until = (__u64)dev;
		return true;
	}
	return false;
}

/* Where a namespace's sockets send from that aren't bound, by a family of addresses; NULL where that isn't known. */
static __always_inline struct address_of *home_of(__u64 namespace, bool v4)
{
	struct home home = {.namespace = namespace, .family = v4 ? 4 : 6};
	struct address_of *known = bpf_map_lookup_elem(&homes, &home);

	return known && known->until > bpf_ktime_get_coarse_ns() ? known : NULL;
}

/* Finds where a pod's socket that isn't bound sends from. An address is remembered for a second. */
static __noinline bool find_source(struct bpf_sock_addr *ctx, struct question *q)
{
	bool v4 = is4(&q->entry.address);
	struct home home = {.namespace = q->namespace, .family = v4 ? 4 : 6};
	struct address_of *known = home_of(q->namespace, v4), found = {};

	if (known) {
		q->from = known->address;
		return true;
	}
	if (!own_address(ctx, &found, v4))
		return false;
	q->from = found.address;
	if (interfaces_of_pods() && leads_to_pods_interface((void *)found.until))
		found.place = PODS;
	found.until = bpf_ktime_get_coarse_ns() + SECOND;
	found.place |= place(&found.address);
	bpf_map_update_elem(&homes, &home, &found, BPF_ANY);
	return true;
}

/* What a socket of another namespace than the node's is, bound to an address or not; 0 where its packets alone show that, by their interface. */
static __always_inline __u32 origin_of(struct bpf_sock_addr *ctx, struct question *q, bool bound)
{
	struct address_of *home;

	if (zero(&q->from) && !find_source(ctx, q))
		return 0;
	if (place(&q->from) & PODS)
		return FROM_POD;
	if (!interfaces_of_pods())
		return FROM_OUTSIDE;
	home = bound ? NULL : home_of(q->namespace, is4(&q->entry.address));
	return home && home->place & PODS ? FROM_POD : 0;
}

static __always_inline struct trace *asked(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&traced, &first);
}

#include "least.h"

/* Counts sockets, or draws. */
static __always_inline __u32 drawn(struct pool *p, const struct header *h, __u32 extent, const struct question *q)
{
	return h->scheduler >= LEAST ? least(p, h, extent, q) : draw(p, h, extent, q);
}

/* Tells whoever listens what became of a question. */
__noinline int report(const struct question *q, __u8 outcome)
{
	struct trace *t = asked();
	struct event *e;
	int i;

	if (!t || !t->until || !q || (t->namespace && t->namespace != q->namespace) || t->until < bpf_ktime_get_coarse_ns())
		return 0;
	for (i = 0; t->pool[0] && i < TRACED; i++) {
		if (t->pool[i] == q->pool)
			break;
	}
	if (i == TRACED)
		return 0;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
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

/* Answers a question: where to go, refusal, or nothing. Verified once for all hooks, since it is not static. */
__noinline int decide(struct bpf_sock_addr *ctx, struct question *q)
{
	struct frontend *f;
	struct header h;
	struct pool *p;
	union slot *s;
	__u32 extent, i;
	bool node, bound;

	if (!q)
		return LEFT;
	bound = !zero(&q->from);
	node = q->namespace == node_namespace;
	q->origin = node ? FROM_NODE : FROM_POD;
	f = find(q);
	if (!f)
		return LEFT;
	if (unlikely(!node && f->ask)) {
		q->origin = origin_of(ctx, q, bound);
		if (!q->origin)
			return LEFT;
	}
	i = q->origin == FROM_OUTSIDE ? f->outside : f->inside;
	p = bpf_map_lookup_elem(&pools, &i);
	if (!p)
		return LEFT;
	q->pool = p->id;
	q->index = i;
	if (unlikely(f->leave & q->origin || (node && q->from.word[3] && loopback(&q->from))))
		return LEFT;
	extent = *(volatile __u32 *)&p->extent;
	s = slot(extent);
	if (!s || !extent)
		return LEFT;
	h = s->header;
	q->counted = h.scheduler >= LEAST;
	if (unlikely(!zero(&q->kept.address)) && retained(extent, &h, &q->kept)) {
		q->backend = q->kept;
		return TRANSLATED;
	}
	if (unlikely(!h.count))
		return f->drop & q->origin ? SILENT : REFUSED;
	if (unlikely(h.affinity || h.scheduler == SOURCE)) {
		if (!node && zero(&q->from) && !find_source(ctx, q))
			return LEFT;
		if (!node && p->leave)
			q->origin = origin_of(ctx, q, bound);
		if (!q->origin || p->leave & q->origin)
			return LEFT;
	}
	return choose(q, p, &h, extent) ? TRANSLATED : LEFT;
}

/* Counts a question's outcome, and reports it if somebody has asked for that. */
static __always_inline void note(const struct question *q, int outcome, const struct trace *t)
{
	struct pool *p;

	if (!q->pool)
		return;
	p = bpf_map_lookup_elem(&pools, &q->index);
	if (!p)
		return;
	if (likely(outcome == TRANSLATED))
		__sync_fetch_and_add(&p->connections, 1);
	if (unlikely(outcome == REFUSED))
		__sync_fetch_and_add(&p->refused, 1);
	if (unlikely(t && t->until))
		report(q, outcome);
}

/* Reads the question from a hook's context. False where it isn't for us. */
static __always_inline bool ask(struct bpf_sock_addr *ctx, struct question *q, bool six)
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
	get_source(ctx, &q->from, six);
	return true;
}

/* Refuses with ECONNREFUSED, or, where the kernel lacks that (before 5.18), with EPERM. */
static __always_inline int refuse(void)
{
	if (kernel_has(BPF_FUNC_set_retval))
		bpf_set_retval(-ECONNREFUSED);
	return 0;
}

/* Where to note what a TCP socket is connected to, by its cookie. */
static __always_inline struct name *name_of(__u64 cookie)
{
	__u32 at = cookie % NAMES;

	return bpf_map_lookup_elem(&names, &at);
}

/* Notes with a TCP socket itself what it is connected to, since another has the place in names. */
static __noinline void keep_apart(struct bpf_sock_addr *ctx, const struct address *entry, __be16 entry_port, const struct address *backend, __be16 backend_port)
{
	struct flow *f;

	if (!ctx->sk)
		return;
	f = bpf_sk_storage_get(&named, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!f)
		return;
	f->entry.address = *entry;
	f->entry.port = entry_port;
	f->backend.address = *backend;
	f->backend.port = backend_port;
}

/*
 * Notes what a TCP socket is connected to. This must cost next to nothing: to give each connection memory of its own would take longer
 * than all else here together.
 */
static __always_inline void keep(struct bpf_sock_addr *ctx, __u64 namespace, __u64 pool, const struct address *entry, __be16 entry_port,
				 const struct address *backend, __be16 backend_port)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct name *n = name_of(cookie);

	if (!n)
		return;
	if (unlikely(n->asked && n->cookie != cookie)) {
		keep_apart(ctx, entry, entry_port, backend, backend_port);
		return;
	}
	n->cookie = cookie;
	n->namespace = namespace;
	n->pool = pool;
	n->entry = *entry;
	n->backend = *backend;
	n->entry_port = entry_port;
	n->backend_port = backend_port;
	n->asked = 0;
}

static __noinline void keep_connection(struct bpf_sock_addr *ctx, const struct question *q)
{
	keep(ctx, q->namespace, q->pool, &q->entry.address, q->entry.port, &q->backend.address, q->backend.port);
}

/* Notes what a UDP socket is connected to. */
static __noinline void keep_datagrams(struct bpf_sock_addr *ctx, const struct question *q)
{
	struct connected c = {.flow.entry = q->entry, .flow.backend = q->backend, .namespace = q->namespace, .pool = q->pool};
	__u64 cookie = bpf_get_socket_cookie(ctx);

	bpf_map_update_elem(&connected, &cookie, &c, BPF_ANY);
}

/*
 * Serves what nearly all connections are: of TCP, by a socket that isn't bound, to an entry and a pool that need no further look, or to
 * no entry at all. False for what isn't like that: nothing was done. What this takes is mostly to fetch what of code and data isn't in the
 * processor's nearest caches: so it is short.
 */
static __always_inline bool connect_quickly(struct bpf_sock_addr *ctx, bool six)
{
	struct entry to = {.port = ctx->user_port, .protocol = IPPROTO_TCP};
	struct trace *t = asked();
	struct address_of *home;
	struct frontend *f;
	struct pool *p;
	union slot *s;
	struct uses *u;
	__u64 namespace, served;
	__u32 origin;

	if (ctx->protocol != IPPROTO_TCP || !ctx->sk || ctx->sk->src_ip4 || !t || t->counting | t->until)
		return false;
	if (six && (ctx->sk->src_ip6[0] | ctx->sk->src_ip6[1] | ctx->sk->src_ip6[2] | ctx->sk->src_ip6[3]))
		return false;
	get_address(ctx, &to.address, six);
	f = bpf_map_lookup_elem(&frontends, &to);
	if (!f) {
		u = uses(&ports);
		return u && !(u->of[to.port] & USE_ANY);
	}
	namespace = bpf_get_netns_cookie(ctx);
	origin = namespace == node_namespace ? FROM_NODE : FROM_POD;
	if (!(f->quick & origin))
		return false;
	if (origin == FROM_POD && f->ask) {
		home = home_of(namespace, !six || is4(&to.address));
		if (!home || !(home->place & PODS))
			return false;
	}
	p = bpf_map_lookup_elem(&pools, &f->inside);
	if (!p)
		return false;
	served = *(volatile __u64 *)&p->extent;
	if (!QUICK(served))
		return false;
	s = toss(p, __sync_fetch_and_add(&p->connections, 1), QUICK(served), EXTENT(served));
	if (!s)
		return false;
	keep(ctx, namespace, p->id, &to.address, to.port, &s->backend.address, s->backend.port);
	set_end(ctx, &s->backend.address, s->backend.port, six);
	return true;
}

/* Serves any connect(), with its own copy for each family: the verifier wants to see which fields of a hook's context are meant. */
static __always_inline int connect_any(struct bpf_sock_addr *ctx, bool six)
{
	struct trace *t = asked();
	struct question q;
	int outcome;

	if (!ask(ctx, &q, six))
		return 1;
	outcome = decide(ctx, &q);
	note(&q, outcome, t);
	if (unlikely(t && t->counting))
		count(ctx, &q, outcome == TRANSLATED && q.counted);
	if (unlikely(outcome == REFUSED))
		return refuse();
	if (likely(outcome == TRANSLATED)) {
		if (q.protocol == IPPROTO_UDP)
			keep_datagrams(ctx, &q);
		else
			keep_connection(ctx, &q);
		set_place(ctx, &q.backend, six);
	} else if (q.protocol == IPPROTO_UDP) {
		__u64 cookie = bpf_get_socket_cookie(ctx);

		bpf_map_delete_elem(&connected, &cookie); /* of an earlier connect() */
	}
	return 1;
}

static __noinline int connect4_any(struct bpf_sock_addr *ctx) { return connect_any(ctx, false); }
static __noinline int connect6_any(struct bpf_sock_addr *ctx) { return connect_any(ctx, true); }

/* The index of a socket's flow to an entry, or, with back, from a backend; FLOWS where there is none. */
__noinline int which(const struct flows *flows, const struct place_of *at, bool back)
{
	int i;

	if (!flows || !at)
		return FLOWS;
	for (i = 0; i < FLOWS; i++) {
		const struct flow *f = &flows->flow[i];

		if (!zero(&f->entry.address) && same_place(back ? &f->backend : &f->entry, at))
			return i;
	}
	return FLOWS;
}

/* A datagram by a socket that isn't connected. A socket keeps its backend at an entry while that is one. */
static __always_inline int send(struct bpf_sock_addr *ctx, bool six)
{
	struct flows *flows;
	struct question q;
	__u32 i = FLOWS;
	int outcome;

	if (!ask(ctx, &q, six) || !ctx->sk)
		return 1;
	if (zero(&q.from) && !six && ctx->msg_src_ip4)
		map4(&q.from, ctx->msg_src_ip4);
	if (zero(&q.from) && six) {
		q.from.word[0] = ctx->msg_src_ip6[0];
		q.from.word[1] = ctx->msg_src_ip6[1];
		q.from.word[2] = ctx->msg_src_ip6[2];
		q.from.word[3] = ctx->msg_src_ip6[3];
	}
	flows = bpf_sk_storage_get(&peers, ctx->sk, NULL, 0);
	if (flows)
		i = which(flows, &q.entry, false);
	if (flows && i < FLOWS)
		q.kept = flows->flow[i].backend;
	outcome = decide(ctx, &q);
	if (outcome == TRANSLATED && same_place(&q.backend, &q.kept)) {
		set_place(ctx, &q.backend, six);
		return 1;
	}
	note(&q, outcome, asked());
	if (outcome == REFUSED)
		return refuse();
	if (outcome != TRANSLATED)
		return 1;
	if (!flows)
		flows = bpf_sk_storage_get(&peers, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!flows)
		return 1;
	if (i >= FLOWS)
		i = flows->next++ & (FLOWS - 1);
	if (i < FLOWS) {
		flows->flow[i].entry = q.entry;
		flows->flow[i].backend = q.backend;
	}
	set_place(ctx, &q.backend, six);
	return 1;
}

/* Puts the entry of a flow in its backend's place, if that is the place at hand. */
static __always_inline bool put_back(struct bpf_sock_addr *ctx, const struct flow *f, const struct place_of *at, bool six)
{
	if (!same_place(&f->backend, at))
		return false;
	set_place(ctx, &f->entry, six);
	return true;
}

/* What a UDP socket hears from a backend comes from the entry that it asked. */
static __always_inline int hear(struct bpf_sock_addr *ctx, bool six)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct place_of from = {.port = ctx->user_port};
	struct connected *c = bpf_map_lookup_elem(&connected, &cookie);
	struct flows *flows;
	__u32 i;

	get_address(ctx, &from.address, six);
	if ((c && put_back(ctx, &c->flow, &from, six)) || !ctx->sk)
		return 1;
	flows = bpf_sk_storage_get(&peers, ctx->sk, NULL, 0);
	if (!flows)
		return 1;
	i = which(flows, &from, true);
	if (i < FLOWS)
		set_place(ctx, &flows->flow[i].entry, six);
	return 1;
}

/* The peer of a connected socket is the entry that it asked for. */
static __always_inline int name(struct bpf_sock_addr *ctx, bool six)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct place_of peer = {.port = ctx->user_port};
	struct connected *c;
	struct flow *f, was = {};
	struct name *n;

	get_address(ctx, &peer.address, six);
	if (ctx->protocol == IPPROTO_UDP) {
		c = bpf_map_lookup_elem(&connected, &cookie);
		if (c)
			put_back(ctx, &c->flow, &peer, six);
		return 1;
	}
	n = name_of(cookie);
	if (n && n->cookie == cookie) {
		was.entry.address = n->entry;
		was.entry.port = n->entry_port;
		was.backend.address = n->backend;
		was.backend.port = n->backend_port;
		if (put_back(ctx, &was, &peer, six)) {
			n->asked = 1;
			return 1;
		}
	}
	if (!ctx->sk)
		return 1;
	f = bpf_sk_storage_get(&named, ctx->sk, NULL, 0);
	if (f)
		put_back(ctx, f, &peer, six);
	return 1;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	return connect_quickly(ctx, false) ? 1 : connect4_any(ctx);
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	return connect_quickly(ctx, true) ? 1 : connect6_any(ctx);
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	return send(ctx, false);
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	return send(ctx, true);
}

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	return hear(ctx, false);
}

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	return hear(ctx, true);
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	return name(ctx, false);
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	return name(ctx, true);
}

/* A socket is closed: it counts no more, and is connected no more. */
SEC("cgroup/sock_release")
int release(struct bpf_sock *sk)
{
	__u64 cookie;
	struct name *n;

	if (counting())
		uncount(bpf_sk_storage_get(&counted, sk, NULL, 0));
	cookie = bpf_get_socket_cookie(sk);
	if (sk->protocol == IPPROTO_UDP) {
		bpf_map_delete_elem(&connected, &cookie);
		return 1;
	}
	n = name_of(cookie);
	if (n && n->cookie == cookie)
		n->cookie = n->asked = 0;
	return 1;
}
