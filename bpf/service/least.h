/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Schedulers by open sockets. A socket counts for a backend from connect(), whether that succeeds or not, until it is
 * closed or connects elsewhere. Of up to LEAST_SCAN backends the best is selected; of more, the better of two random
 * ones: that comes close, for two lookups (Mitzenmacher, "The power of two choices in randomized load balancing",
 * 2001).
 */
#pragma once

#define LEAST_SCAN 8

/* Reports whether any pool's sockets are counted. */
static __always_inline bool counts_sockets(void)
{
	struct trace *t = trace_state();

	return t && t->counting;
}

/* Returns how many sockets a backend of a pool has open. */
static __always_inline __u64 sockets_open(const struct header *h, const struct backend *b)
{
	struct endpoint m = {.pool = h->id};
	struct load *l;

	m.backend.address = b->address;
	m.backend.port = b->port;
	l = bpf_map_lookup_elem(&fl_open_sockets, &m);
	return l ? l->open : 0;
}

/* The best backend so far: its index, or the pool's count where there is none. */
struct candidate {
	__u32 index;
	__u32 weight;
	__u64 open;
};

/*
 * Replaces the candidate by a backend with fewer sockets. The loop's body is a function of its own: before Linux 6.6
 * the verifier accepts few others.
 */
static __noinline void consider(struct candidate *so_far, const struct header *h, __u32 extent, __u32 i)
{
	union slot *s = slot_at(extent + 1 + i);
	__u32 weight;
	__u64 open;

	if (!s || i >= h->count)
		return;
	open = sockets_open(h, &s->backend) + (h->scheduler == SHORTEST_DELAY);
	weight = h->scheduler == LEAST_CONN || !(s->backend.weight & WEIGHT) ? 1 : s->backend.weight & WEIGHT;
	if (so_far->index < h->count && open * so_far->weight >= so_far->open * weight)
		return;
	so_far->index = i;
	so_far->weight = weight;
	so_far->open = open;
}

/*
 * Returns the index of the backend with the fewest sockets, or count where there is none. Of equal ones, the first from
 * a random start.
 */
__noinline int select_least(struct pool *p, const struct header *h, __u32 extent, const struct lookup *q)
{
	__u32 first = bpf_get_prandom_u32(), t;
	struct candidate l = {};

	if (!p || !h || !q || !h->count)
		return 0;
	l.index = h->count;
	if (h->count > LEAST_SCAN) {
		consider(&l, h, extent, select_backend(p, h, extent, q));
		consider(&l, h, extent, select_backend(p, h, extent, q));
		return l.index;
	}
	for (t = 0; t < LEAST_SCAN && t < h->count; t++)
		consider(&l, h, extent, (first + t) % h->count);
	return l.index;
}

/* Stops counting a socket. */
static __always_inline void uncount(struct counted_socket *c)
{
	struct load *l;

	if (!c || !c->since)
		return;
	l = bpf_map_lookup_elem(&fl_open_sockets, &c->endpoint);
	if (l && l->since == c->since)
		__sync_fetch_and_sub(&l->open, 1);
	c->since = 0;
}

/* Stops counting a socket for its former endpoint, and, with more, counts it for the new one. */
static __noinline void count_socket(struct bpf_sock_addr *ctx, const struct lookup *q, bool more)
{
	struct load none = {}, *l;
	struct counted_socket *c;

	if (!ctx->sk)
		return;
	c = bpf_sk_storage_get(&fl_sk_counted, ctx->sk, NULL, more ? BPF_SK_STORAGE_GET_F_CREATE : 0);
	uncount(c);
	if (!c || !more)
		return;
	c->endpoint.backend = q->backend;
	c->endpoint.pool = q->pool;
	none.since = bpf_ktime_get_ns();
	bpf_map_update_elem(&fl_open_sockets, &c->endpoint, &none, BPF_NOEXIST);
	l = bpf_map_lookup_elem(&fl_open_sockets, &c->endpoint);
	if (!l)
		return; /* full: this one isn't counted */
	__sync_fetch_and_add(&l->open, 1);
	c->since = l->since;
}
