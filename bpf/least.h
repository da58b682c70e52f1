/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Schedulers that go by open sockets. One counts for a backend from connect(), whatever comes of it, until it is closed or
 * connected elsewhere. Of up to SCAN backends the best is taken; of more, the better of two that are drawn by their weights:
 * that comes close, for the price of two look-ups (Mitzenmacher, "The power of two choices in randomized load balancing",
 * 2001).
 */
#pragma once

#define SCAN 8

/* Whether any socket may count: else there is nothing to look for. */
static __always_inline bool counting(void)
{
	struct trace *t = asked();

	return t && t->counting;
}

/* How many sockets a backend of a pool has open. */
static __always_inline __u64 opened(const struct header *h, const struct backend *b)
{
	struct endpoint m = {.pool = h->id};
	struct load *l;

	m.backend.address = b->address;
	m.backend.port = b->port;
	l = bpf_map_lookup_elem(&loads, &m);
	return l ? l->open : 0;
}

/* The backend with the least to do of those looked at: its index, or a pool's count where there was none. */
struct least {
	__u32 index;
	__u32 weight;
	__u64 open;
};

/* Takes a backend that has less to do than the least so far. A loop's body stands by itself: before Linux 6.6 or so the verifier takes few others. */
static __noinline void consider(struct least *so_far, const struct header *h, __u32 extent, __u32 i)
{
	union slot *s = slot(extent + 1 + i);
	__u32 weight;
	__u64 open;

	if (!s || i >= h->count)
		return;
	open = opened(h, &s->backend) + (h->scheduler == DELAY);
	weight = h->scheduler == LEAST || !(s->backend.weight & WEIGHT) ? 1 : s->backend.weight & WEIGHT;
	if (so_far->index < h->count && open * so_far->weight >= so_far->open * weight)
		return;
	so_far->index = i;
	so_far->weight = weight;
	so_far->open = open;
}

/* Finds the backend with the least to do: its index, or count where there is none. Of equals, the first met from anywhere. */
__noinline int least(struct pool *p, const struct header *h, __u32 extent, const struct question *q)
{
	__u32 first = bpf_get_prandom_u32(), t;
	struct least l = {};

	if (!p || !h || !q || !h->count)
		return 0;
	l.index = h->count;
	if (h->count > SCAN) {
		consider(&l, h, extent, draw(p, h, extent, q));
		consider(&l, h, extent, draw(p, h, extent, q));
		return l.index;
	}
	for (t = 0; t < SCAN && t < h->count; t++)
		consider(&l, h, extent, (first + t) % h->count);
	return l.index;
}

/* A socket counts no more. */
static __always_inline void uncount(struct counted *c)
{
	struct load *l;

	if (!c || !c->since)
		return;
	l = bpf_map_lookup_elem(&loads, &c->endpoint);
	if (l && l->since == c->since)
		__sync_fetch_and_sub(&l->open, 1);
	c->since = 0;
}

/* A socket counts no more for what it was connected to, and, with more, counts for what it connects to now. */
static __noinline void count(struct bpf_sock_addr *ctx, const struct question *q, bool more)
{
	struct load none = {}, *l;
	struct counted *c;

	if (!ctx->sk)
		return;
	c = bpf_sk_storage_get(&counted, ctx->sk, NULL, more ? BPF_SK_STORAGE_GET_F_CREATE : 0);
	uncount(c);
	if (!c || !more)
		return;
	c->endpoint.backend = q->backend;
	c->endpoint.pool = q->pool;
	none.since = bpf_ktime_get_ns();
	bpf_map_update_elem(&loads, &c->endpoint, &none, BPF_NOEXIST);
	l = bpf_map_lookup_elem(&loads, &c->endpoint);
	if (!l)
		return; /* full: this one goes uncounted */
	__sync_fetch_and_add(&l->open, 1);
	c->since = l->since;
}
