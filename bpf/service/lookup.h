/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Selection of a backend, for every program: the maps that the agent writes, lookup of a frontend, and selection from
 * its pool.
 */
#pragma once

#include "service.h"

#include <linux/in.h>

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct entry);
	__type(value, struct frontend);
} fl_services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << 16);
	__type(key, __u32);
	__type(value, struct pool);
} fl_pools SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << 19);
	__type(key, __u32);
	__type(value, union slot);
} fl_backends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct prefix);
	__type(value, __u32);
} fl_prefixes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pod_interfaces);
} fl_pod_ifaces SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 16);
	__type(key, struct affinity_key);
	__type(value, struct affinity_entry);
} fl_affinity SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct port_bits);
} fl_port_bits SEC(".maps");

/* A lookup: what a client connects or sends to, and the backend selected. */
struct lookup {
	struct addr_port_pad entry;
	struct address client;	       /* the client, if known: of a socket, the address that it is bound to; or zero */
	struct addr_port_pad previous; /* the backend of the socket's earlier datagrams to the entry, or zero */
	struct addr_port_pad backend;  /* the result */
	__u64 namespace;
	__u64 pool;  /* the pool of the entry, */
	__u32 index; /* its index in fl_pools */
	__u32 origin;
	__u32 protocol;
	__u32 client_port; /* the client's, if known */
	__u32 counted;	   /* 1: the pool's scheduler counts open sockets */
	__u32 remote;	   /* 1: a node port at another node's address, which external clients pass */
};

static __always_inline bool same_addr_port(const struct addr_port_pad *a, const struct addr_port_pad *b)
{
	return addr_equal(&a->address, &b->address) && a->port == b->port;
}

static __always_inline struct addr_port addr_port_of(const struct address *address, __be16 port)
{
	struct addr_port e = {.address = *address, .port = port};

	return e;
}

static __always_inline __u32 prefix_flags(const struct address *a)
{
	struct prefix key = {.length = 128, .address = *a};
	__u32 *is = bpf_map_lookup_elem(&fl_prefixes, &key);

	return is ? *is : 0;
}

/* The interfaces of pods, NULL where pods are known by their addresses. */
static __always_inline struct pod_interfaces *pod_interfaces(void)
{
	__u32 first = 0;
	struct pod_interfaces *i = bpf_map_lookup_elem(&fl_pod_ifaces, &first);

	return i && i->length ? i : NULL;
}

#define UPPER_DEVICES 4 /* devices above one another that are followed */

/*
 * Reports whether the host stack sees packets that enter by a device as entering by a pod's interface: it sees a bridge
 * or bond in place of its port.
 */
static __noinline bool is_pod_device(struct net_device *d)
{
	struct pod_interfaces *fl_pods = pod_interfaces();
	char name[sizeof(fl_pods->name)];
	int i;

	if (!fl_pods)
		return false;
	for (i = 0; i < UPPER_DEVICES && BPF_CORE_READ(d, rx_handler); i++) {
		struct list_head *first = BPF_CORE_READ(d, adj_list.upper.next);
		struct netdev_adjacent *above = (void *)first - bpf_core_field_offset(struct netdev_adjacent, list);

		if (first == (void *)d + bpf_core_field_offset(struct net_device, adj_list.upper) ||
		    !BPF_CORE_READ(above, master))
			break;
		d = BPF_CORE_READ(above, dev);
	}
	BPF_CORE_READ_INTO(&name, d, name);
#pragma unroll
	for (i = 0; i < sizeof(name); i++) {
		if (i >= fl_pods->length)
			break;
		if (name[i] != fl_pods->name[i])
			return false;
	}
	return true;
}

static __always_inline struct port_bits *port_bits_of(void *map)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(map, &first);
}

/* Returns the frontend of a lookup among node ports, and sets remote. */
static __noinline struct frontend *lookup_node_port(struct lookup *q)
{
	struct entry to = {.port = q->entry.port, .protocol = q->protocol};
	struct frontend *f;
	__u32 flags;

	if (is_ipv4(&q->entry.address))
		map_ipv4(&to.address, 0);
	f = bpf_map_lookup_elem(&fl_services, &to);
	if (!f)
		return NULL;
	flags = prefix_flags(&q->entry.address);
	if (!(flags & PREFIX_NODE_PORTS)) {
		q->remote = f->node_port & NODE_PORT_REMOTE && flags & PREFIX_REMOTE_NODE_PORTS;
		return q->remote ? f : NULL;
	}
	if (q->origin != FROM_NODE && is_loopback(&q->entry.address))
		return NULL; /* the pod's own */
	return f;
}

/* Returns the frontend of a lookup: one with exactly its address, or a node port. */
static __always_inline struct frontend *lookup_service(struct lookup *q)
{
	struct entry to = {.address = q->entry.address, .port = q->entry.port, .protocol = q->protocol};
	struct frontend *f;

	if (!to.address.word[3] && (is_zero(&to.address) || is_ipv4(&to.address)))
		return NULL; /* 0.0.0.0 and :: are this host, and no node port's */
	f = bpf_map_lookup_elem(&fl_services, &to);
	return f ? f : lookup_node_port(q);
}

/*
 * Reports whether a process of the node is bound to an entry at the node's own address: it goes before the Service. The
 * context must be of the node's network namespace.
 */
static __noinline bool is_bound(void *ctx, const struct lookup *q)
{
	bool six = !is_ipv4(&q->entry.address);
	struct bpf_sock_tuple s = {};
	struct address at = {};
	struct bpf_sock *sk;
	__u32 size, v4;

	if (six) {
		__builtin_memcpy(s.ipv6.daddr, &q->entry.address, sizeof(s.ipv6.daddr));
		s.ipv6.dport = q->entry.port;
		size = sizeof(s.ipv6);
	} else {
		s.ipv4.daddr = q->entry.address.word[3];
		s.ipv4.dport = q->entry.port;
		size = sizeof(s.ipv4);
	}
	if (q->protocol == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(ctx, &s, size, BPF_F_CURRENT_NETNS, 0);
	else
		sk = bpf_sk_lookup_tcp(ctx, &s, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	v4 = sk->src_ip4; /* both are read here: the verifier takes no pointer to either */
	at.word[0] = sk->src_ip6[0];
	at.word[1] = sk->src_ip6[1];
	at.word[2] = sk->src_ip6[2];
	at.word[3] = sk->src_ip6[3];
	bpf_sk_release(sk);
	if (!six)
		map_ipv4(&at, v4);
	return addr_equal(&at, &q->entry.address);
}

static __always_inline union slot *slot_at(__u32 at)
{
	return bpf_map_lookup_elem(&fl_backends, &at);
}

static __always_inline __u32 mix(__u32 h)
{
	/* the finalizer of MurmurHash3 */
	h ^= h >> 16;
	h *= 0x85ebca6b;
	h ^= h >> 13;
	h *= 0xc2b2ae35;
	h ^= h >> 16;
	return h;
}

static __always_inline __u32 addr_hash(const struct address *a)
{
	return mix(mix(mix(mix(a->word[0] + 1) ^ a->word[1]) ^ a->word[2]) ^ a->word[3]);
}

/* Returns the index of a backend selected by the pool's scheduler, or count where there is none. */
__noinline int select_backend(struct pool *p, const struct header *h, __u32 extent, const struct lookup *q)
{
	__u32 r, i;
	union slot *s;

	if (!p || !h || !q || !h->count)
		return 0;
	switch (h->scheduler) {
	case ROUND_ROBIN:
		r = __sync_fetch_and_add(&p->next, 1);
		break;
	case SOURCE_HASH:
		r = addr_hash(&q->client);
		if (h->flags & HASH_PORT)
			r = mix(r ^ q->client_port);
		break;
	case DESTINATION_HASH:
		r = addr_hash(&q->entry.address);
		break;
	default:
		r = bpf_get_prandom_u32();
	}
	if (h->choices) {
		r %= h->choices;
		s = slot_at(extent + 1 + h->count + r / CHOICES_PER_SLOT);
		r %= CHOICES_PER_SLOT;
		barrier_var(r); /* or the compiler drops the check that the verifier requires */
		if (!s || r >= CHOICES_PER_SLOT)
			return h->count;
		return s->choice[r];
	}
	i = r % h->count;
	if (h->scheduler == ROUND_ROBIN)
		return i;
	s = slot_at(extent + 1 + i);
	if (!s)
		return h->count;
	return (mix(r) & 0xffff) <= s->backend.threshold ? i : s->backend.alias;
}

/* Compares addresses as bytes, then ports: less than 0, 0 or more than 0. */
static __always_inline int compare_backend(const struct addr_port_pad *a, const struct backend *b)
{
	__u64 x, y;

	x = (__u64)bpf_ntohl(a->address.word[0]) << 32 | bpf_ntohl(a->address.word[1]);
	y = (__u64)bpf_ntohl(b->address.word[0]) << 32 | bpf_ntohl(b->address.word[1]);
	if (x != y)
		return x < y ? -1 : 1;
	x = (__u64)bpf_ntohl(a->address.word[2]) << 32 | bpf_ntohl(a->address.word[3]);
	y = (__u64)bpf_ntohl(b->address.word[2]) << 32 | bpf_ntohl(b->address.word[3]);
	if (x != y)
		return x < y ? -1 : 1;
	return (int)bpf_ntohs(a->port) - (int)bpf_ntohs(b->port);
}

/* Returns the number of a backend with that address and port in an extent, from 1; 0 where there is none. */
__noinline int backend_number(__u32 extent, __u32 count, const struct addr_port_pad *at)
{
	__u32 low = 0, high = count;
	int i;

	if (!at)
		return 0;

	for (i = 0; i < 17 && low < high; i++) {
		__u32 middle = (low + high) / 2;
		union slot *s = slot_at(extent + 1 + middle);
		int c;

		if (!s)
			return 0;
		c = compare_backend(at, &s->backend);
		if (!c)
			return middle + 1;
		if (c < 0)
			high = middle;
		else
			low = middle + 1;
	}
	return 0;
}

/*
 * Returns the index in fl_backends of an endpoint that an established flow may continue to use: a backend, or one that
 * gets no new flow. 0 where it is neither.
 */
__noinline int retained_slot(__u32 extent, const struct header *h, const struct addr_port_pad *at)
{
	__u32 number, others;
	union slot *s;

	if (!h || !at)
		return 0;
	number = backend_number(extent, h->count, at);
	if (number)
		return extent + number;
	if (!(h->flags & UNSELECTED))
		return 0;
	others = extent + 1 + h->count + (h->choices + CHOICES_PER_SLOT - 1) / CHOICES_PER_SLOT;
	s = slot_at(others);
	number = s ? backend_number(others, s->header.count, at) : 0;
	return number ? others + number : 0;
}

/*
 * Returns the backend of a client with session affinity, if its entry hasn't expired and the backend still exists.
 */
static __noinline bool affinity_backend(const struct affinity_key *c, const struct header *h, __u32 extent,
					struct addr_port_pad *to)
{
	struct affinity_entry *m = bpf_map_lookup_elem(&fl_affinity, c);
	__u64 now;

	if (!m)
		return false;
	now = bpf_ktime_get_coarse_ns();
	if (m->seen + h->affinity * SECOND <= now || !backend_number(extent, h->count, &m->backend))
		return false;
	*to = m->backend;
	m->seen = now;
	return true;
}

static __noinline void save_affinity(const struct affinity_key *c, const struct addr_port_pad *to)
{
	struct affinity_entry m = {.backend = *to, .seen = bpf_ktime_get_coarse_ns()};

	bpf_map_update_elem(&fl_affinity, c, &m, BPF_ANY);
}

/* Each program defines how it selects. */
static __always_inline __u32 select_index(struct pool *p, const struct header *h, __u32 extent, const struct lookup *q);

static __always_inline void set_backend(struct lookup *q, const struct backend *b)
{
	q->backend.address = b->address;
	q->backend.port = b->port;
}

/*
 * Returns number n of the sequence of a seed: SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
 * Generators, 2014).
 */
static __always_inline __u64 splitmix64(__u64 seed, __u64 n)
{
	__u64 x = seed + n * 0x9e3779b97f4a7c15ULL;

	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
	return x ^ x >> 31;
}

/*
 * Selects a backend for connection n of a pool in which nothing but weights counts, as in most, with less code than
 * select_index(). The kernel's random numbers would cost nearly half as much as all else at connect().
 */
static __always_inline union slot *select_weighted(const struct pool *p, __u64 n, __u32 count, __u32 extent)
{
	__u64 r = (splitmix64((__u64)p->next << 32, n) >> 32) * count; /* an index, and below it the fraction */
	union slot *s = slot_at(extent + 1 + (__u32)(r >> 32));

	if (s && unlikely((__u32)r >> 16 > s->backend.threshold))
		s = slot_at(extent + 1 + s->backend.alias);
	return s;
}

/* Selects a backend of a pool that has some: by session affinity, else by the scheduler. */
static __always_inline bool choose_backend(struct lookup *q, struct pool *p, const struct header *h, __u32 extent)
{
	struct affinity_key client = {};
	union slot *s;
	__u32 i;

	if (unlikely(h->affinity)) {
		client.address = q->client;
		client.pool = h->id;
		if (affinity_backend(&client, h, extent, &q->backend))
			return true;
	}
	i = select_index(p, h, extent, q);
	if (i >= h->count)
		return false;
	s = slot_at(extent + 1 + i);
	if (!s)
		return false;
	set_backend(q, &s->backend);
	if (h->affinity)
		save_affinity(&client, &q->backend);
	return true;
}
