/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * How a client is given a backend, for every program that does so: the maps that the agent writes, and what finds a frontend
 * and draws from its pool.
 */
#pragma once

#include "kernel.h"
#include "service.h"

#include <stdbool.h>

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct entry);
	__type(value, struct frontend);
} frontends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << 16);
	__type(key, __u32);
	__type(value, struct pool);
} pools SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << 19);
	__type(key, __u32);
	__type(value, union slot);
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 14);
	__type(key, struct prefix);
	__type(value, __u32);
} places SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct interfaces);
} pod_interfaces SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 16);
	__type(key, struct client);
	__type(value, struct memory);
} affinity SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct uses);
} ports SEC(".maps");

/* What a client asks for, and what it is told. */
struct question {
	struct place_of entry;
	struct address from;	/* the client, where it is known: of a socket, what it is bound to; or zero */
	struct place_of kept;	/* where the socket's datagrams to the entry went before, or zero */
	struct place_of backend; /* the answer */
	__u64 namespace;
	__u64 pool; /* that serves it, */
	__u32 index; /* its place in pools */
	__u32 origin;
	__u32 protocol;
	__u32 port;    /* the client's, where it is known */
	__u32 counted; /* 1: the pool's sockets are counted */
	__u32 zero;
};

/* For the compiler, which may put what is rare out of the way. */
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

static __always_inline bool zero(const struct address *a)
{
	return !(a->word[0] | a->word[1] | a->word[2] | a->word[3]);
}

static __always_inline bool equal(const struct address *a, const struct address *b)
{
	return !((a->word[0] ^ b->word[0]) | (a->word[1] ^ b->word[1]) | (a->word[2] ^ b->word[2]) | (a->word[3] ^ b->word[3]));
}

static __always_inline bool is4(const struct address *a)
{
	return !a->word[0] && !a->word[1] && a->word[2] == bpf_htonl(0xffff);
}

static __always_inline bool loopback(const struct address *a)
{
	if (is4(a))
		return (a->word[3] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
	return !a->word[0] && !a->word[1] && !a->word[2] && a->word[3] == bpf_htonl(1);
}

static __always_inline bool same_place(const struct place_of *a, const struct place_of *b)
{
	return equal(&a->address, &b->address) && a->port == b->port;
}

static __always_inline struct end end_of(const struct address *address, __be16 port)
{
	struct end e = {.address = *address, .port = port};

	return e;
}

static __always_inline void map4(struct address *a, __be32 v4)
{
	a->word[0] = a->word[1] = 0;
	a->word[2] = bpf_htonl(0xffff);
	a->word[3] = v4;
}

#define SECOND 1000000000ULL

static __always_inline __u32 place(const struct address *a)
{
	struct prefix key = {.length = 128, .address = *a};
	__u32 *is = bpf_map_lookup_elem(&places, &key);

	return is ? *is : 0;
}

/* The interfaces by which pods are known, NULL where they are known by their addresses. */
static __always_inline struct interfaces *interfaces_of_pods(void)
{
	__u32 first = 0;
	struct interfaces *i = bpf_map_lookup_elem(&pod_interfaces, &first);

	return i && i->length ? i : NULL;
}

#define ABOVE 4 /* how many devices one above the other are looked at */

/* Whether what comes in by a device comes in by an interface of pods for the node's stack, which sees a bridge or bond in place of its port. */
static __noinline bool is_of_pods(struct net_device *d)
{
	struct interfaces *pods = interfaces_of_pods();
	char name[sizeof(pods->name)];
	int i;

	if (!pods)
		return false;
	for (i = 0; i < ABOVE && BPF_CORE_READ(d, rx_handler); i++) {
		struct list_head *first = BPF_CORE_READ(d, adj_list.upper.next);
		struct netdev_adjacent *above = (void *)first - bpf_core_field_offset(struct netdev_adjacent, list);

		if (first == (void *)d + bpf_core_field_offset(struct net_device, adj_list.upper) || !BPF_CORE_READ(above, master))
			break;
		d = BPF_CORE_READ(above, dev);
	}
	BPF_CORE_READ_INTO(&name, d, name);
#pragma unroll
	for (i = 0; i < sizeof(name); i++) {
		if (i >= pods->length)
			break;
		if (name[i] != pods->name[i])
			return false;
	}
	return true;
}

static __always_inline struct uses *uses(void *map)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(map, &first);
}

/* The frontend that serves the question as a node port. */
static __noinline struct frontend *find_node_port(const struct question *q)
{
	struct entry to = {.port = q->entry.port, .protocol = q->protocol};
	struct frontend *f;

	if (is4(&q->entry.address))
		map4(&to.address, 0);
	f = bpf_map_lookup_elem(&frontends, &to);
	if (!f || !(place(&q->entry.address) & NODE_PORTS))
		return NULL;
	if (q->origin != FROM_NODE && loopback(&q->entry.address))
		return NULL; /* the pod's own */
	return f;
}

/* The frontend that serves the question: one of exactly its address, or a node port. */
static __always_inline struct frontend *find(const struct question *q)
{
	struct entry to = {.address = q->entry.address, .port = q->entry.port, .protocol = q->protocol};
	struct frontend *f;

	if (!to.address.word[3] && (zero(&to.address) || is4(&to.address)))
		return NULL; /* 0.0.0.0 and :: are this host, and no node port's */
	f = bpf_map_lookup_elem(&frontends, &to);
	return f ? f : find_node_port(q);
}

static __always_inline union slot *slot(__u32 at)
{
	return bpf_map_lookup_elem(&slots, &at);
}

static __always_inline __u32 mix(__u32 h)
{
	/* the finish of MurmurHash3 */
	h ^= h >> 16;
	h *= 0x85ebca6b;
	h ^= h >> 13;
	h *= 0xc2b2ae35;
	h ^= h >> 16;
	return h;
}

static __always_inline __u32 hash(const struct address *a)
{
	return mix(mix(mix(mix(a->word[0] + 1) ^ a->word[1]) ^ a->word[2]) ^ a->word[3]);
}

/* Draws a backend as the pool's scheduler has it: its index, or count where there is none. */
__noinline int draw(struct pool *p, const struct header *h, __u32 extent, const struct question *q)
{
	__u32 r, i;
	union slot *s;

	if (!p || !h || !q || !h->count)
		return 0;
	switch (h->scheduler) {
	case TURNS:
		r = __sync_fetch_and_add(&p->next, 1);
		break;
	case SOURCE:
		r = hash(&q->from);
		if (h->flags & BY_PORT)
			r = mix(r ^ q->port);
		break;
	case DESTINATION:
		r = hash(&q->entry.address);
		break;
	default:
		r = bpf_get_prandom_u32();
	}
	if (h->choices) {
		r %= h->choices;
		s = slot(extent + 1 + h->count + r / CHOICES);
		r %= CHOICES;
		barrier_var(r); /* or the compiler drops the check that the verifier wants */
		if (!s || r >= CHOICES)
			return h->count;
		return s->choice[r];
	}
	i = r % h->count;
	if (h->scheduler == TURNS)
		return i;
	s = slot(extent + 1 + i);
	if (!s)
		return h->count;
	return (mix(r) & 0xffff) <= s->backend.own ? i : s->backend.other;
}

/* Compares addresses as bytes, then ports: less than 0, 0 or more than 0. */
static __always_inline int compare(const struct place_of *a, const struct backend *b)
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

/* The number of a place among an extent's backends, from 1; 0 where it isn't, or is no more, one of them. */
__noinline int member(__u32 extent, __u32 count, const struct place_of *at)
{
	__u32 low = 0, high = count;
	int i;

	if (!at)
		return 0;

	for (i = 0; i < 17 && low < high; i++) {
		__u32 middle = (low + high) / 2;
		union slot *s = slot(extent + 1 + middle);
		int c;

		if (!s)
			return 0;
		c = compare(at, &s->backend);
		if (!c)
			return middle + 1;
		if (c < 0)
			high = middle;
		else
			low = middle + 1;
	}
	return 0;
}

/* The index in slots of an endpoint that a flow stays with: a backend, or one that gets no new flow. 0 where it is neither. */
__noinline int retained(__u32 extent, const struct header *h, const struct place_of *at)
{
	__u32 number, others;
	union slot *s;

	if (!h || !at)
		return 0;
	number = member(extent, h->count, at);
	if (number)
		return extent + number;
	if (!(h->flags & UNSELECTED))
		return 0;
	others = extent + 1 + h->count + (h->choices + CHOICES - 1) / CHOICES;
	s = slot(others);
	number = s ? member(others, s->header.count, at) : 0;
	return number ? others + number : 0;
}

/* The backend of a client with affinity, if it has one that still counts. */
static __noinline bool remembered(const struct client *c, const struct header *h, __u32 extent, struct place_of *to)
{
	struct memory *m = bpf_map_lookup_elem(&affinity, c);
	__u64 now;

	if (!m)
		return false;
	now = bpf_ktime_get_coarse_ns();
	if (m->seen + h->affinity * SECOND <= now || !member(extent, h->count, &m->backend))
		return false;
	*to = m->backend;
	m->seen = now;
	return true;
}

static __noinline void remember(const struct client *c, const struct place_of *to)
{
	struct memory m = {.backend = *to, .seen = bpf_ktime_get_coarse_ns()};

	bpf_map_update_elem(&affinity, c, &m, BPF_ANY);
}

/* Each program's own way to an index: a draw, or more. */
static __always_inline __u32 drawn(struct pool *p, const struct header *h, __u32 extent, const struct question *q);

static __always_inline void assign(struct question *q, const struct backend *b)
{
	q->backend.address = b->address;
	q->backend.port = b->port;
}

/* The n-th of the numbers that a seed leads to: SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014). */
static __always_inline __u64 split(__u64 seed, __u64 n)
{
	__u64 x = seed + n * 0x9e3779b97f4a7c15ULL;

	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
	return x ^ x >> 31;
}

/*
 * Draws a backend for a pool's n-th connection where weights alone count: what most pools want, with less code than drawn() takes. To ask
 * the kernel for a number takes nearly half as long as all else at connect().
 */
static __always_inline union slot *toss(const struct pool *p, __u64 n, __u32 count, __u32 extent)
{
	__u64 r = (split((__u64)p->next << 32, n) >> 32) * count; /* an index, and below it the fraction beyond */
	union slot *s = slot(extent + 1 + (__u32)(r >> 32));

	if (s && unlikely((__u32)r >> 16 > s->backend.own))
		s = slot(extent + 1 + s->backend.other);
	return s;
}

/* Chooses a backend of a pool that has some: the client's by affinity, or a drawn one. */
static __always_inline bool choose(struct question *q, struct pool *p, const struct header *h, __u32 extent)
{
	struct client client = {};
	union slot *s;
	__u32 i;

	if (unlikely(h->affinity)) {
		client.address = q->from;
		client.pool = h->id;
		if (remembered(&client, h, extent, &q->backend))
			return true;
	}
	i = drawn(p, h, extent, q);
	if (i >= h->count)
		return false;
	s = slot(extent + 1 + i);
	if (!s)
		return false;
	assign(q, &s->backend);
	if (h->affinity)
		remember(&client, &q->backend);
	return true;
}
