/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Services for packets at a node's devices: for clients that no cgroup hook sees, and for what a socket can't do. As
 * with the kernel's own NAT, a packet's destination is translated where it enters, its source where it leaves, and in
 * between it is routed as any other. Nothing else in the kernel has to know of its flow.
 *
 * A flow has at most four NAT entries, each under the tuple of the packets that it translates. A client C sends to an
 * entry F and gets a backend B; where it is masqueraded, B sees it as M:
 *
 * 	fl_nat_dst	C→F: B		B→M: C
 * 	fl_nat_src	C→B: M		B→C: F
 *
 * A client that sends to two entries from one port may get the same backend by both. Then it is C' to the second, with
 * another port:
 *
 * 	fl_nat_dst	C→F: B, from C'
 * 	fl_nat_src	B→C': F, to C
 *
 * With direct server return, this node's entries are those of a client that isn't masqueraded. The packet that opens a
 * flow, and each UDP packet, passes F to the backend's node (dsr.h), which has one entry:
 *
 * 	fl_nat_src	B→C: F
 *
 * Packets of clients on the node itself are translated where they leave, and enter again by the loopback device, since
 * their destination has changed; so do replies to them, of which both ends are translated.
 */
#pragma once

#include "border.h"
#include "dsr.h"
#include "reject.h"
#include "reverse.h"

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 17);
	__type(key, struct tuple);
	__type(value, struct nat_entry);
} fl_nat_dst SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 17);
	__type(key, struct tuple);
	__type(value, struct nat_entry);
} fl_nat_src SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct port_bits);
} fl_addr_bits SEC(".maps");

/*
 * When UDP flows with a node port's number as source port were last seen, by the replies' tuple: those of this node's
 * sockets, and those from other nodes.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, struct tuple);
	__type(value, __u32);
} fl_node_udp SEC(".maps");

/* Counts changes of frontends and pools, by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} fl_changes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct allowed_source);
	__type(value, __u32);
} fl_allowed_src SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct prefix);
	__type(value, __u32); /* enum unmatched_action */
} fl_unmatched SEC(".maps");

/* Memory for a lookup: the stack has too little. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct lookup);
} fl_lookup SEC(".maps");

/* A bit that programs set, of either generation. */
#define EITHER_GENERATION(use) ((use) | (use) << BIT_GENERATION_SHIFT)

/* Sets a bit of a port or an address, in the current generation. */
static __always_inline void set_bit(void *map, __u16 port, __u32 use)
{
	struct port_bits *u = port_bits_of(map);
	__u32 at = port;

	if (!u)
		return;
	barrier_var(at); /* or the compiler drops the mask that the verifier requires: it doesn't know that a register
			    holds 16 bits */
	at &= 0xffff;
	if (*(volatile __u32 *)&u->generation)
		use <<= BIT_GENERATION_SHIFT;
	if (!(u->of[at] & use))
		__sync_fetch_and_or(&u->word[at / 2], use << (at % 2 * 16));
}

/* A hash of the exclusive or of an address's words. The agent computes it, too. */
static __always_inline __u16 short_hash(__be32 words)
{
	return words * 0x9e3779b1U >> 16;
}

static __always_inline __u32 generation(void)
{
	__u32 first = 0, *n = bpf_map_lookup_elem(&fl_changes, &first);

	return n ? *n : 0;
}

/* Writes the tuple of packets from one end to another. */
static __always_inline void make_tuple(struct tuple *t, const struct addr_port *from, const struct addr_port *to,
				       __u8 protocol)
{
	__builtin_memset(t, 0, sizeof(*t));
	t->source = from->address;
	t->sport = from->port;
	t->destination = to->address;
	t->dport = to->port;
	t->protocol = protocol;
}

/* Writes the tuple of replies to a packet. */
static __always_inline void reply_tuple(struct tuple *t, const struct packet *p)
{
	struct addr_port source = addr_port_of(&p->tuple.source, p->tuple.sport),
			 destination = addr_port_of(&p->tuple.destination, p->tuple.dport);

	make_tuple(t, &destination, &source, p->tuple.protocol);
}

static __always_inline bool is_closed(const struct nat_entry *e)
{
	if (dsr && e->state & (DSR | DSR_LEARNT) && e->state & FIN_SENDER) /* the other side's aren't seen */
		return true;
	return e->state & RESET || (e->state & (FIN_SENDER | FIN_PEER)) == (FIN_SENDER | FIN_PEER);
}

/*
 * Returns for how many seconds an entry without packets lasts: the defaults of nf_conntrack, whose states are named.
 */
static __always_inline __u32 lifetime(const struct nat_entry *e, __u8 protocol)
{
	__u32 state = e->state;

	if (protocol != IPPROTO_TCP)
		return state & SEEN_REPLY ? 120 : 30;
	if (state & RESET)
		return 10; /* CLOSE */
	if ((state & (FIN_SENDER | FIN_PEER)) == (FIN_SENDER | FIN_PEER))
		return state & FIN_ACKED ? 120 : 30; /* TIME_WAIT, LAST_ACK */
	if (state & (FIN_SENDER | FIN_PEER)) /* FIN_WAIT, CLOSE_WAIT; with DSR the other side's packets aren't seen */
		return (state & (FIN_ACKED | DSR | DSR_LEARNT)) == FIN_ACKED ? 60 : 120;
	if (state & UNASSURED)
		return state & SEEN_REPLY ? 60 : 120; /* SYN_RECV, SYN_SENT */
	if (!(state & SEEN_REPLY))
		return 120;
	return state & (CLIENT_UNACKED | BACKEND_UNACKED) ? 300 : 5 * 24 * 3600; /* unacknowledged data, ESTABLISHED */
}

/* Returns whether an entry had expired when p was seen, of its protocol. */
static __always_inline bool expired(const struct nat_entry *e, const struct packet *p)
{
	return e->seen + lifetime(e, p->tuple.protocol) < p->now;
}

static __always_inline bool is_syn(const struct packet *p)
{
	return p->tuple.protocol == IPPROTO_TCP && (p->flags & (SYN | ACK)) == SYN;
}

static __always_inline void set_state(struct nat_entry *e, __u32 state)
{
	if ((e->state & state) != state)
		__sync_fetch_and_or(&e->state, state);
}

static __always_inline void clear_state(struct nat_entry *e, __u32 state)
{
	if (e->state & state)
		__sync_fetch_and_and(&e->state, ~state);
}

/* The interval, in seconds, at which entries of a flow refresh each other. */
#define REFRESH_AFTER 8

/*
 * The tc_index of a packet whose destination was translated, until it leaves. It distinguishes packets of a flow whose
 * client is masqueraded from others between the same ends: the client may send to the backend directly, too, from the
 * same port. The stack copies it (ip_copy_metadata). Another program that ends the ingress hook (TCX_PASS) clears it:
 * then flows are distinguished by their tuples alone.
 */
#define NAT_MARK 0xfa1d

/* Returns whether a client is in the allowed source ranges of an entry. */
__noinline int source_allowed(const struct lookup *q, int any)
{
	struct allowed_source key = {.length = 8 * (sizeof(struct entry) + sizeof(struct address))};

	if (!q)
		return false;
	key.client = q->client;
	key.entry.address = q->entry.address;
	key.entry.port = q->entry.port;
	key.entry.protocol = q->protocol;
	if (any && is_ipv4(&key.entry.address))
		key.entry.address.word[3] = 0;
	else if (any)
		__builtin_memset(&key.entry.address, 0, sizeof(key.entry.address));
	return bpf_map_lookup_elem(&fl_allowed_src, &key) != NULL;
}

/* Returns the lookup of a packet. */
static __always_inline struct lookup *lookup_of(const struct packet *p, __u32 origin)
{
	__u32 first = 0;
	struct lookup *q = bpf_map_lookup_elem(&fl_lookup, &first);

	if (!q)
		return NULL;
	__builtin_memset(q, 0, sizeof(*q));
	q->entry.address = p->tuple.destination;
	q->entry.port = p->tuple.dport;
	q->client = p->tuple.source;
	q->client_port = p->tuple.sport;
	q->protocol = p->tuple.protocol;
	q->origin = origin;
	return q;
}

static __always_inline struct pool *pool_for(struct lookup *q, const struct frontend *f)
{
	q->index = q->origin == FROM_EXTERNAL ? f->external : f->internal;
	return bpf_map_lookup_elem(&fl_pools, &q->index);
}

/*
 * Returns the slot of an endpoint that an established flow may continue to use, NULL where the frontend has none, or
 * doesn't allow the client.
 */
static __always_inline union slot *endpoint_slot(struct lookup *q, const struct frontend *f,
						 const struct addr_port_pad *at)
{
	struct pool *pool;
	__u32 extent, number;
	union slot *s;

	if (!f || (f->restricted && !source_allowed(q, f->node_port)))
		return NULL;
	pool = pool_for(q, f);
	if (!pool)
		return NULL;
	extent = *(volatile __u32 *)&pool->extent;
	s = slot_at(extent);
	if (!s || !extent)
		return NULL;
	number = retained_slot(extent, &s->header, at);
	return number ? slot_at(number) : NULL;
}

/* Returns whether the endpoint of a client's flow still serves it. */
__noinline int still_serves(const struct nat_entry *e, const struct packet *p)
{
	struct addr_port_pad at = {};
	struct lookup *q;

	if (!e || !p)
		return false;
	q = lookup_of(p, e->origin);
	if (!q)
		return false;
	at.address = e->to.address;
	at.port = e->to.port;
	return endpoint_slot(q, lookup_service(q), &at) != NULL;
}

/*
 * Returns whether a SYN that matches an entry begins another connection: after a FIN or RST, or where the backend no
 * longer serves its frontend, as with all once these programs drain. A SYN that was answered with a SYN, ACK may be
 * retransmitted.
 */
static __always_inline bool reopens(const struct nat_entry *e, const struct packet *p)
{
	if (e->state & (FIN_SENDER | FIN_PEER | RESET))
		return true;
	if (!(e->state & DIR_ORIGINAL) || (e->state & (UNASSURED | SEEN_REPLY)) == (UNASSURED | SEEN_REPLY))
		return false;
	return !still_serves(e, p);
}

/* Returns whether an entry no longer applies: the packet begins another flow. */
static __always_inline bool is_stale(struct nat_entry *e, const struct packet *p)
{
	__u32 now;

	if (expired(e, p))
		return true;
	if (is_syn(p))
		return reopens(e, p);
	if (!(e->state & DIR_ORIGINAL) || p->tuple.protocol != IPPROTO_UDP)
		return false;
	now = generation();
	if (e->change == now)
		return false;
	if (!still_serves(e, p))
		return true;
	e->change = now;
	return false;
}

/* Updates an entry's TCP state by the flags of a packet. end is FIN_SENDER or FIN_PEER. */
static __always_inline void track_tcp(struct nat_entry *e, const struct packet *p, __u32 end)
{
	if (p->flags & RST) {
		set_state(e, RESET);
	} else if (p->flags & FIN) {
		if (!(e->state & end))
			clear_state(e, FIN_ACKED);
		set_state(e, end);
	} else if (e->state & (FIN_SENDER | FIN_PEER)) {
		set_state(e, FIN_ACKED);
	}
}

/* Updates the entry of a client when a reply to it is seen. t is the tuple of its packets. */
static __always_inline void saw_reply(const struct tuple *t, const struct packet *p, __u32 state)
{
	struct nat_entry *e = bpf_map_lookup_elem(&fl_nat_dst, t);

	if (!e)
		return;
	set_state(e, state);
	clear_state(e, CLIENT_UNACKED);
	track_tcp(e, p, FIN_PEER);
	e->seen = p->now;
}

/* Refreshes the reply entry of a client's flow, or ends it, and writes it anew if it was evicted. */
__noinline int refresh_reply(const struct nat_entry *e, const struct packet *p)
{
	struct nat_entry *r, made = {.state = DIR_REPLY};
	struct tuple back;
	struct addr_port client;
	__u32 ends;

	if (!e || !p)
		return 0;
	ends = (e->state & (CLIENT_UNACKED | RESET)) | (e->state & FIN_SENDER ? FIN_PEER : 0);
	client = addr_port_of(&p->tuple.source, p->tuple.sport);
	made.to = addr_port_of(&p->tuple.destination, p->tuple.dport);
	made.seen = e->seen;
	made.state |= ends | (e->state & (SEEN_REPLY | PORT_ALIAS | DSR | MASQUERADED | UNASSURED | UNDERLAY));
	if (e->state & PORT_ALIAS) {
		made.from = client;
		client = e->from;
	}
	make_tuple(&back, &e->to, &client, p->tuple.protocol);
	r = bpf_map_lookup_elem(&fl_nat_src, &back);
	if (r) {
		r->seen = e->seen;
		if (~r->state & ends & FIN_PEER)
			clear_state(r, FIN_ACKED);
		set_state(r, ends);
	} else if (!bpf_map_update_elem(&fl_nat_src, &back, &made, BPF_NOEXIST)) {
		set_bit(&fl_port_bits, back.sport, BIT_BACKEND);
	}
	return 0;
}

/* Extends the lifetime of a flow's entry to that of an established connection. */
static __always_inline void assure(struct nat_entry *e)
{
	if (e && e->state & UNASSURED)
		__sync_fetch_and_and(&e->state, ~UNASSURED);
}

/* Returns whether a TCP packet is past the handshake's first two: it has neither SYN nor RST. */
static __always_inline bool is_past_handshake(const struct packet *p)
{
	return p->tuple.protocol == IPPROTO_TCP && !p->inner && !(p->flags & (SYN | RST));
}

/*
 * Extends the lifetime of a connection's entries once a packet shows that the handshake is complete: the client's after
 * a reply, or one of the backend that isn't a SYN, ACK. e, in fl_nat_dst, is the entry of the packet, which isn't
 * translated yet.
 */
__noinline int establish(struct nat_entry *e, const struct packet *p)
{
	struct tuple other;
	struct addr_port end;

	if (!e || !p || !is_past_handshake(p))
		return 0;
	if (!(e->state & DIR_ORIGINAL)) {
		end = addr_port_of(&p->tuple.source, p->tuple.sport);
		make_tuple(&other, &e->to, &end, p->tuple.protocol); /* of a masqueraded client */
		assure(e);
		assure(bpf_map_lookup_elem(&fl_nat_src, &other));
		return 0;
	}
	if (!(e->state & SEEN_REPLY))
		return 0;
	end = e->state & PORT_ALIAS ? e->from : addr_port_of(&p->tuple.source, p->tuple.sport);
	make_tuple(&other, &e->to, &end, p->tuple.protocol);
	assure(e);
	assure(bpf_map_lookup_elem(&fl_nat_src, &other));
	assure(bpf_map_lookup_elem(&fl_nat_dst, &other)); /* of a client on this node */
	return 0;
}

/* The same where e is in fl_nat_src, and the packet is translated. */
__noinline int establish_source(struct nat_entry *e, const struct packet *p)
{
	struct tuple back;
	struct nat_entry *other;

	if (!e || !p || !is_past_handshake(p))
		return 0;
	reply_tuple(&back, p);
	other = bpf_map_lookup_elem(&fl_nat_dst, &back);
	if (e->state & DIR_REPLY || (other && other->state & SEEN_REPLY)) {
		assure(e);
		assure(other);
	}
	return 0;
}

/* Redirects a packet to the ingress of the loopback device: it is routed anew. */
static __always_inline int redirect_to_loopback(struct __sk_buff *skb)
{
	struct ethhdr e = {.h_proto = skb->protocol};

	if (!l2_len && bpf_skb_change_head(skb, sizeof(e), 0))
		return TC_ACT_SHOT;
	bpf_skb_store_bytes(skb, 0, &e, sizeof(e), 0);
	return bpf_redirect(LOOPBACK, BPF_F_INGRESS);
}

/*
 * Drops a packet without the sender's notice. A socket would get an error if its packet were dropped at egress: so it
 * is redirected to the loopback device as if it were for another host, and ends there.
 */
static __always_inline int drop_unnoticed(struct __sk_buff *skb, bool own)
{
	const __u8 other_host = 2; /* the first byte of such a host's address, locally administered */
	int result;

	if (!own)
		return TC_ACT_SHOT;
	result = redirect_to_loopback(skb);
	bpf_skb_store_bytes(skb, 0, &other_host, 1, 0);
	return result;
}

static __always_inline int drop_counted(struct __sk_buff *skb, bool own)
{
	count_packet(EVENT_DROPPED);
	return drop_unnoticed(skb, own);
}

/* Sends a packet to a backend whose node answers the client directly, with the DSR option. */
__noinline int forward_dsr(struct __sk_buff *skb, struct packet *p, const struct addr_port *backend)
{
	struct addr_port entry;

	if (!p || !backend)
		return TC_ACT_SHOT;
	entry = addr_port_of(&p->tuple.destination, p->tuple.dport);
	rewrite(skb, p, backend, true);
	if (write_dsr_option(skb, p, &entry))
		return TCX_NEXT;
	count_packet(EVENT_MAP_FULL);
	return TC_ACT_SHOT;
}

/*
 * Returns whether a packet of a DSR flow carries the option: one that opens a connection, and all of UDP but later
 * fragments.
 */
static __always_inline bool carries_dsr(const struct packet *p)
{
	return p->transport && !p->inner && (p->tuple.protocol == IPPROTO_UDP || is_syn(p));
}

/* Translates a packet by its entry in fl_nat_dst. */
static __always_inline int translate(struct __sk_buff *skb, struct packet *p, struct nat_entry *e, bool own)
{
	__u32 now = p->now, state = e->state;
	struct addr_port to = e->to, from = e->from;
	struct tuple request;
	bool news;

	if (!p->inner) {
		track_tcp(e, p, FIN_SENDER);
		if (!(state & DIR_ORIGINAL) || (dsr && state & DSR && !is_syn(p)))
			set_state(e, SEEN_REPLY);
		clear_state(e, BACKEND_UNACKED);
		news = e->seen + REFRESH_AFTER <= now;
		if (e->seen != now)
			e->seen = now;
		if (news && p->flags & DATA && (state & (DIR_ORIGINAL | DSR)) == DIR_ORIGINAL)
			set_state(e, CLIENT_UNACKED);
		if (state & DIR_ORIGINAL && (news || p->flags & (FIN | RST)))
			refresh_reply(e, p);
		if (unlikely(state & UNASSURED))
			establish(e, p);
	}
	if (state & NODE_CLIENT) {
		make_tuple(&request, &to, &from, p->tuple.protocol);
		if (!p->inner)
			saw_reply(&request, p, SEEN_REPLY);
	}
	skb->tc_index = NAT_MARK;
	if (pod_network && state & UNDERLAY)
		skb->mark |= UNDERLAY_MARK;
	if (state & (NODE_CLIENT | PORT_ALIAS))
		rewrite(skb, p, &from, false);
	if (dsr && state & DSR && carries_dsr(p))
		return forward_dsr(skb, p, &to);
	rewrite(skb, p, &to, true);
	return own || state & NODE_CLIENT ? redirect_to_loopback(skb) : TCX_NEXT;
}

static __always_inline int reject(struct __sk_buff *skb, const struct packet *p, bool own)
{
	if (!p->transport) /* a later fragment: the first one is rejected */
		return drop_unnoticed(skb, own);
	count_packet(EVENT_REJECTED);
	if (!(p->tuple.protocol == IPPROTO_TCP ? make_reset(skb, p) : make_unreachable(skb, p)))
		return drop_unnoticed(skb, own);
	return own ? redirect_to_loopback(skb) : bpf_redirect(skb->ifindex, 0);
}

static __always_inline bool nat_insert(void *map, const struct tuple *t, const struct nat_entry *e)
{
	if (!bpf_map_update_elem(map, t, e, BPF_ANY))
		return true;
	count_packet(EVENT_MAP_FULL);
	return false;
}

/*
 * Returns the state of a client at an entry with direct server return: see client_state. It is masqueraded all the same
 * if the backend's node isn't known to support DSR, or is the client, or doesn't know the entry; if it is its own
 * backend; if its port was replaced; and if it is behind this node, where a reply with another source address would
 * count as forged.
 */
static __always_inline __u32 dsr_client_state(const struct packet *p, const struct lookup *q, const struct frontend *f,
					      __u32 weight)
{
	if (addr_equal(&q->client, &q->backend.address) ||
	    prefix_flags(&q->client) & (PREFIX_NODES | PREFIX_BEHIND_NODE) ||
	    (f->node_port & NODE_PORT && !(prefix_flags(&q->entry.address) & PREFIX_NODES)))
		return MASQ_PENDING;
	if (weight & LOCAL)
		return 0;
	return weight & REMOTE && q->client_port == p->tuple.sport ? DSR : MASQ_PENDING;
}

/* Returns the state of a client at its backend: MASQ_PENDING, DSR where the backend's node answers it, or 0. */
static __always_inline __u32 client_state(const struct packet *p, const struct lookup *q, const struct frontend *f,
					  const struct header *h, __u32 extent)
{
	const struct address *a = &q->client, *b = &q->backend.address;
	bool pod_kept = q->remote && q->origin == FROM_POD; /* nor do other nodes' pods come here */
	bool masq = (f->masquerade & q->origin && !pod_kept) || is_loopback(a),
	     returns = q->origin != FROM_NODE && addr_equal(a, b);
	__u32 number, weight;
	union slot *s;

	if (masq && !(dsr && f->dsr & q->origin))
		return MASQ_PENDING;
	if (!masq && !returns)
		return 0;
	number = backend_number(extent, h->count, &q->backend);
	s = slot_at(extent + number);
	weight = number && s ? s->backend.weight : 0;
	if (masq)
		return dsr_client_state(p, q, f, weight);
	return weight & LOCAL ? MASQ_PENDING : 0;
}

/* Writes a tuple for the kernel's lookups, and returns its size. */
static __always_inline __u32 socket_tuple(struct bpf_sock_tuple *s, const struct tuple *t, bool six)
{
	__builtin_memset(s, 0, sizeof(*s));
	if (six) {
		__builtin_memcpy(s->ipv6.saddr, &t->source, sizeof(s->ipv6.saddr));
		__builtin_memcpy(s->ipv6.daddr, &t->destination, sizeof(s->ipv6.daddr));
		s->ipv6.sport = t->sport;
		s->ipv6.dport = t->dport;
		return sizeof(s->ipv6);
	}
	s->ipv4.saddr = t->source.word[3];
	s->ipv4.daddr = t->destination.word[3];
	s->ipv4.sport = t->sport;
	s->ipv4.dport = t->dport;
	return sizeof(s->ipv4);
}

/* Returns whether a socket of this node receives packets of a tuple, from a backend. */
__noinline int has_socket(struct __sk_buff *skb, const struct tuple *t, int six)
{
	struct bpf_sock_tuple s;
	struct bpf_sock *sk;
	__u32 size, state;

	if (!t)
		return true;
	if (is_icmp(t->protocol))
		return false;
	size = socket_tuple(&s, t, six);
	if (t->protocol == IPPROTO_UDP) {
		sk = bpf_sk_lookup_udp(skb, &s, size, BPF_F_CURRENT_NETNS, 0);
		if (sk)
			bpf_sk_release(sk);
		return sk != NULL;
	}
	sk = bpf_skc_lookup_tcp(skb, &s, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	state = sk->state;
	bpf_sk_release(sk);
	return state != BPF_TCP_LISTEN;
}

/*
 * Returns the bits of nf_conn.status that say how connection tracking translates a tuple's flow, 0 where it doesn't.
 */
__noinline int conntrack_nat(struct __sk_buff *skb, const struct tuple *t, int six)
{
	struct bpf_ct_opts o = {.netns_id = BPF_F_CURRENT_NETNS};
	struct bpf_sock_tuple s;
	struct nf_conn *c;
	int status;

	if (!t || !bpf_core_type_exists(struct bpf_ct_opts))
		return 0;
	o.l4proto = t->protocol;
	c = bpf_skb_ct_lookup(skb, &s, socket_tuple(&s, t, six), &o, sizeof(o));
	if (!c)
		return 0;
	status = c->status & (IPS_SRC_NAT | IPS_DST_NAT);
	bpf_ct_release(c);
	return status;
}

/*
 * Returns whether connection tracking translates a packet's connection, which began while another mode, or a
 * kube-proxy, served its entry. It continues as it began.
 */
static __always_inline bool is_tracked(struct __sk_buff *skb, const struct packet *p)
{
	return p->tuple.protocol == IPPROTO_TCP && !is_syn(p) && conntrack_nat(skb, &p->tuple, p->six) & IPS_DST_NAT;
}

/* Returns whether the flow of a reply entry has ended. request is the tuple of its client's packets. */
static __always_inline bool flow_ended(const struct nat_entry *back, const struct tuple *request,
				       const struct packet *p)
{
	const struct nat_entry *entry = back;

	if (!dsr || !(back->state & DSR_LEARNT)) /* of that, there is no other entry here */
		entry = bpf_map_lookup_elem(&fl_nat_dst, request);
	return !entry || is_closed(entry) || expired(entry, p);
}

#define PORT_TRIES 24
#define MIN_PORT 1024

/*
 * Selects the port at which a backend sees a client: its own, unless another flow of the client to that backend has it,
 * by another entry. Returns false where there is none.
 */
__noinline int select_client_port(struct __sk_buff *skb, const struct packet *p, struct lookup *q)
{
	struct addr_port client, backend;
	struct nat_entry *held;
	struct tuple t;
	int i;

	if (!p || !q)
		return false;
	client = addr_port_of(&q->client, q->client_port);
	backend = addr_port_of(&q->backend.address, q->backend.port);
	make_tuple(&t, &backend, &client, q->protocol);
	held = bpf_map_lookup_elem(&fl_nat_src, &t);
	if (!held || !(held->state & DIR_REPLY))
		return true;
	if (held->state & PORT_ALIAS)
		client = held->from;
	else if (held->to.port == q->entry.port && addr_equal(&held->to.address, &q->entry.address))
		return true;
	make_tuple(&t, &client, &held->to, q->protocol);
	if (flow_ended(held, &t, p))
		return true;
	client.address = q->client;
	for (i = 0; i < PORT_TRIES; i++) {
		client.port = bpf_htons(MIN_PORT + bpf_get_prandom_u32() % (65536 - MIN_PORT));
		make_tuple(&t, &backend, &client, q->protocol);
		held = bpf_map_lookup_elem(&fl_nat_src, &t);
		if (held && !expired(held, p))
			continue;
		if (q->origin == FROM_NODE && (bpf_map_lookup_elem(&fl_nat_dst, &t) || has_socket(skb, &t, p->six)))
			continue;
		q->client_port = client.port;
		return true;
	}
	count_packet(EVENT_NO_PORT);
	return false;
}

/* Writes the entries of a new flow. client_nat is that of client_state. Returns false where a map is full. */
__noinline int create_flow(const struct packet *p, const struct lookup *q, __u32 client_nat)
{
	bool masq = client_nat & MASQ_PENDING;
	struct nat_entry e = {};
	struct tuple t;
	struct addr_port client, seen, entry, backend;
	__u32 alias = 0, masq_state = (masq ? MASQUERADED : 0) | (client_nat & UNDERLAY);

	if (!p || !q)
		return false;
	client = addr_port_of(&q->client, p->tuple.sport);
	seen = addr_port_of(&q->client, q->client_port);
	entry = addr_port_of(&q->entry.address, q->entry.port);
	backend = addr_port_of(&q->backend.address, q->backend.port);
	e.seen = p->now;
	e.to = entry;
	if (seen.port != client.port) {
		alias = PORT_ALIAS;
		e.from = client;
	}
	if (p->tuple.protocol == IPPROTO_TCP)
		masq_state |= UNASSURED;
	e.state = DIR_REPLY | alias | masq_state | (client_nat & DSR);
	make_tuple(&t, &backend, &seen, q->protocol);
	if (!nat_insert(&fl_nat_src, &t, &e))
		return false;
	set_bit(&fl_port_bits, backend.port, BIT_BACKEND);
	if (q->origin == FROM_NODE && !masq) {
		e.to = client;
		e.from = entry;
		e.state = NODE_CLIENT | (masq_state & UNASSURED);
		if (!nat_insert(&fl_nat_dst, &t, &e))
			return false;
		set_bit(&fl_port_bits, seen.port, BIT_MASQ_PORT);
	}
	if (masq) {
		e.to = client;
		e.from = entry;
		e.state = MASQ_PENDING | masq_state | (q->origin == FROM_NODE ? NODE_CLIENT : 0);
		make_tuple(&t, &seen, &backend, q->protocol);
		if (!nat_insert(&fl_nat_src, &t, &e))
			return false;
		set_bit(&fl_port_bits, backend.port, BIT_MASQ_BACKEND);
	}
	__builtin_memset(&e.from, 0, sizeof(e.from));
	if (alias)
		e.from = seen;
	e.to = backend;
	e.state = DIR_ORIGINAL | alias | masq_state | (client_nat & DSR);
	e.origin = q->origin;
	e.change = generation();
	if (!nat_insert(&fl_nat_dst, &p->tuple, &e))
		return false;
	count_packet(EVENT_FLOW);
	return true;
}

/*
 * Flows of packets are no open sockets: schedulers by these use round-robin for them, by weight where they heed
 * weights.
 */
static __always_inline __u32 select_index(struct pool *p, const struct header *h, __u32 extent, const struct lookup *q)
{
	return select_backend(p, h, extent, q);
}

/* Selects a backend, with a stack frame of its own. */
__noinline int pick_backend(struct lookup *q, struct pool *p, const struct header *h, __u32 extent)
{
	return q && p && h && choose_backend(q, p, h, extent);
}

/* Sets the bits of a client's entry: its packets are looked up also when there is no frontend any more. */
__noinline int mark_service_bits(const struct lookup *q)
{
	const __be32 *e;

	if (!q)
		return 0;
	e = q->entry.address.word;
	set_bit(&fl_addr_bits, short_hash(e[0] ^ e[1] ^ e[2] ^ e[3]), BIT_CLIENT);
	set_bit(&fl_port_bits, q->entry.port, BIT_CLIENT);
	return 0;
}

/* Returns whether a packet enters by an interface of pods. */
__noinline int from_pod_device(struct __sk_buff *skb)
{
	struct sk_buff *kernels;

	if (!pod_interfaces())
		return false;
	kernels = bpf_cast_to_kern_ctx(skb);
	return is_pod_device(kernels->dev);
}

/* For how many seconds a socket that isn't connected may receive replies to what it sent. */
#define REPLY_WITHIN 120

/* Records when a reply to a packet was last due. */
static __always_inline void record_reply(const struct packet *p)
{
	struct tuple back;
	__u32 *seen, now = p->now;

	reply_tuple(&back, p);
	seen = bpf_map_lookup_elem(&fl_node_udp, &back);
	if (!seen)
		bpf_map_update_elem(&fl_node_udp, &back, &now, BPF_ANY);
	else if (*seen != now)
		*seen = now;
}

/* Records that a socket of this node sends UDP with a node port's number. */
__noinline int record_node_udp(struct __sk_buff *skb, const struct packet *p)
{
	struct port_bits *u = port_bits_of(&fl_port_bits);
	struct bpf_sock *sk = skb->sk;

	if (!p || !u || !sk || !(u->of[p->tuple.sport] & BIT_NODE_PORT) || bpf_htons(sk->src_port) != p->tuple.sport)
		return 0;
	record_reply(p);
	return 0;
}

/* Records UDP from another node with a node port's number as source port, such as of a client that it masquerades. */
__noinline int record_remote_udp(const struct packet *p)
{
	struct port_bits *u = port_bits_of(&fl_port_bits);

	if (p && u && p->tuple.protocol == IPPROTO_UDP && !p->inner && u->of[p->tuple.sport] & BIT_NODE_PORT &&
	    prefix_flags(&p->tuple.source) & PREFIX_REMOTE_NODE_PORTS)
		record_reply(p);
	return 0;
}

/*
 * Returns whether a packet to a node port's number at another node's address is for that node: a reply to what came
 * from there, or one that doesn't begin a connection.
 */
__noinline int is_remote_reply(const struct packet *p)
{
	__u32 *seen;

	if (!p || p->tuple.protocol == IPPROTO_TCP)
		return !p || !is_syn(p);
	seen = bpf_map_lookup_elem(&fl_node_udp, &p->tuple);
	if (!seen || *seen + REPLY_WITHIN < p->now)
		return false;
	if (*seen != p->now)
		*seen = p->now;
	return true;
}

/*
 * Returns whether a socket of this node expects a packet: one that is connected to its source, or has sent UDP there.
 */
__noinline int socket_expects(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock_tuple s;
	struct bpf_sock *sk;
	__u32 *seen, state;

	if (!p)
		return false;
	if (p->tuple.protocol == IPPROTO_TCP)
		return has_socket(skb, &p->tuple, p->six);
	sk = bpf_sk_lookup_udp(skb, &s, socket_tuple(&s, &p->tuple, p->six), BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	state = sk->state;
	bpf_sk_release(sk);
	if (state == BPF_TCP_ESTABLISHED)
		return true;
	seen = bpf_map_lookup_elem(&fl_node_udp, &p->tuple);
	if (!seen || *seen + REPLY_WITHIN < p->now)
		return false;
	*seen = p->now;
	return true;
}

/*
 * Returns whether a packet is a reply to a flow that this node began or masqueraded, from a node port's number: it
 * isn't for the node port. Only connection tracking knows of flows that others masquerade.
 */
__noinline int is_reply(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_ct_opts o = {.netns_id = BPF_F_CURRENT_NETNS};
	struct bpf_sock_tuple s;
	struct nf_conn *c;

	if (!p || is_syn(p))
		return false;
	if (socket_expects(skb, p))
		return true;
	if (!bpf_core_type_exists(struct bpf_ct_opts))
		return false;
	o.l4proto = p->tuple.protocol;
	c = bpf_skb_ct_lookup(skb, &s, socket_tuple(&s, &p->tuple, p->six), &o, sizeof(o));
	if (!c)
		return false;
	bpf_ct_release(c);
	return o.dir == IP_CT_DIR_REPLY;
}

/*
 * Rejects or drops a packet that matches no frontend, if it opens a flow to a ClusterIP or to an unallocated address.
 */
__noinline int handle_unmatched(struct __sk_buff *skb, const struct packet *p, int own)
{
	struct prefix key = {.length = 128};
	__u32 *action;

	if (!p || (p->tuple.protocol == IPPROTO_TCP && !is_syn(p)))
		return TCX_NEXT;
	key.address = p->tuple.destination;
	action = bpf_map_lookup_elem(&fl_unmatched, &key);
	if (!action)
		return TCX_NEXT;
	if (*action == UNMATCHED_DROP)
		return drop_counted(skb, own);
	if (reverse_path && !own && !reverse_path_ok(skb, p))
		return drop_forged(skb);
	return reject(skb, p, own);
}

/* Serves a packet without an entry. */
__noinline int serve_new(struct __sk_buff *skb, struct packet *p, int own)
{
	struct lookup *q;
	struct frontend *f;
	struct header h;
	struct pool *pool;
	struct addr_port to;
	__u32 extent, seen;
	union slot *s;

	if (!p)
		return TCX_NEXT;
	q = lookup_of(p, own ? FROM_NODE : FROM_EXTERNAL);
	if (!q)
		return TCX_NEXT;
	f = lookup_service(q);
	if (!f)
		return handle_unmatched(skb, p, own);
	if (f->node_port & NODE_ADDRESS && is_bound(skb, q))
		return TCX_NEXT;
	if (!own && (prefix_flags(&q->client) & PREFIX_PODS || from_pod_device(skb)))
		q->origin = FROM_POD;
	if (q->remote && (q->origin == FROM_EXTERNAL || is_remote_reply(p)))
		return TCX_NEXT;
	if (is_tracked(skb, p) || is_reply(skb, p))
		return TCX_NEXT;
	if (reverse_path && !own && !reverse_path_ok(skb, p))
		return drop_forged(skb);
	if (f->restricted && !source_allowed(q, f->node_port))
		return drop_counted(skb, own);
	pool = pool_for(q, f);
	if (!pool)
		return TCX_NEXT;
	extent = *(volatile __u32 *)&pool->extent;
	s = slot_at(extent);
	if (!s || !extent)
		return TCX_NEXT;
	h = s->header;
	if (!h.count) {
		if (f->drop & q->origin)
			return drop_counted(skb, own);
		if (p->transport)
			__sync_fetch_and_add(&pool->refused, 1);
		return reject(skb, p, own);
	}
	if (h.scheduler >= LEAST_CONN)
		h.scheduler = ROUND_ROBIN;
	if (p->flags & RST || !pick_backend(q, pool, &h, extent))
		return TCX_NEXT;
	if (!select_client_port(skb, p, q))
		return TC_ACT_SHOT;
	seen = client_state(p, q, f, &h, extent);
	if (pod_network && !own && is_tunneled_node(&q->client)) {
		seen |= UNDERLAY;
		skb->mark |= UNDERLAY_MARK;
	}
	mark_service_bits(q);
	if (!create_flow(p, q, seen))
		return TC_ACT_SHOT;
	__sync_fetch_and_add(&pool->connections, 1);
	skb->tc_index = NAT_MARK;
	if (q->client_port != p->tuple.sport) {
		to = addr_port_of(&q->client, q->client_port);
		rewrite(skb, p, &to, false);
	}
	to = addr_port_of(&q->backend.address, q->backend.port);
	if (dsr && seen & DSR && p->transport)
		return forward_dsr(skb, p, &to);
	rewrite(skb, p, &to, true);
	return own ? redirect_to_loopback(skb) : TCX_NEXT;
}

/*
 * Deletes the entries of a flow whose client begins another one from its port. request is the tuple of the client's
 * packets. Entries of the backend's tuples may belong to the other by now.
 */
__noinline int delete_flow(const struct tuple *request)
{
	struct addr_port client, backend;
	struct tuple t;
	struct nat_entry *e;

	if (!request)
		return 0;
	e = bpf_map_lookup_elem(&fl_nat_dst, request);
	if (!e)
		return 0;
	client = e->state & PORT_ALIAS ? e->from : addr_port_of(&request->source, request->sport);
	backend = e->to;
	bpf_map_delete_elem(&fl_nat_dst, request);
	make_tuple(&t, &backend, &client, request->protocol);
	e = bpf_map_lookup_elem(&fl_nat_src, &t);
	if (!e || e->to.port != request->dport || !addr_equal(&e->to.address, &request->destination))
		return 0;
	bpf_map_delete_elem(&fl_nat_src, &t);
	bpf_map_delete_elem(&fl_nat_dst, &t); /* of a client on this node */
	make_tuple(&t, &client, &backend, request->protocol);
	e = bpf_map_lookup_elem(&fl_nat_src, &t);
	if (!e)
		return 0;
	client = e->to; /* as the backend sees it, or itself */
	bpf_map_delete_elem(&fl_nat_src, &t);
	make_tuple(&t, &backend, &client, request->protocol);
	bpf_map_delete_elem(&fl_nat_dst, &t);
	return 0;
}

#define NEW_FLOW -2 /* of translate_destination: the packet has no entry yet */

/* Translates a packet's destination: that of a client, or of a backend's reply to a masqueraded one. */
__noinline int translate_destination(struct __sk_buff *skb, struct packet *p, int own)
{
	struct nat_entry *e;

	if (!p)
		return TCX_NEXT;
	e = bpf_map_lookup_elem(&fl_nat_dst, &p->tuple);
	if (e && !is_stale(e, p))
		return translate(skb, p, e, own);
	if (e && is_syn(p))
		delete_flow(&p->tuple);
	return p->inner || is_icmp(p->tuple.protocol) ? TCX_NEXT : NEW_FLOW;
}

/* Returns whether the flow of a reply entry has ended. p is a client's packet to the backend. */
__noinline int reply_flow_ended(const struct nat_entry *back, const struct packet *p)
{
	struct tuple request;
	struct addr_port client;

	if (!back || !p)
		return true;
	client = back->state & PORT_ALIAS ? back->from : addr_port_of(&p->tuple.source, p->tuple.sport);
	make_tuple(&request, &client, &back->to, p->tuple.protocol);
	return flow_ended(back, &request, p);
}

/*
 * A client sends to a backend directly. If it did so by an entry before, from the same port, and that flow has ended,
 * replies are no longer translated. Of UDP the latest packet counts: its socket may be another, which connect() has
 * translated. On the backend's node of a DSR flow, later fragments look like that.
 */
__noinline int forget_closed_flow(const struct packet *p)
{
	struct tuple back, request;
	struct addr_port client;
	struct nat_entry *e;

	if (!p)
		return 0;
	reply_tuple(&back, p);
	e = bpf_map_lookup_elem(&fl_nat_src, &back);
	if (!e || (p->tuple.protocol == IPPROTO_UDP ? e->state & DSR_LEARNT : !reply_flow_ended(e, p)))
		return 0;
	client = e->state & PORT_ALIAS ? e->from : addr_port_of(&p->tuple.source, p->tuple.sport);
	make_tuple(&request, &client, &e->to, p->tuple.protocol);
	delete_flow(&request);
	bpf_map_delete_elem(&fl_nat_src, &back);
	return 0;
}

/* Returns the frontend of an entry in a DSR option: one of this node's own, or a node port of any Node. */
static __always_inline struct frontend *lookup_dsr_service(struct lookup *q)
{
	struct entry any = {.port = q->entry.port, .protocol = q->protocol};
	struct frontend *f = lookup_service(q);

	if (f || !(prefix_flags(&q->entry.address) & PREFIX_NODES))
		return f;
	if (is_ipv4(&q->entry.address))
		map_ipv4(&any.address, 0);
	return bpf_map_lookup_elem(&fl_services, &any);
}

/*
 * Returns whether a packet's destination is a backend, on this node, of the entry in its DSR option, and the frontend
 * uses DSR and allows the client: otherwise senders could choose the source address of a pod's replies.
 */
__noinline int dsr_option_valid(const struct packet *p, const struct addr_port *entry)
{
	struct frontend *f;
	struct lookup *q;
	union slot *s;

	if (!p || !entry)
		return false;
	q = lookup_of(p, FROM_EXTERNAL);
	if (!q)
		return false;
	q->backend = q->entry;
	q->entry.address = entry->address;
	q->entry.port = entry->port;
	f = lookup_dsr_service(q);
	if (!f || !(f->dsr & FROM_EXTERNAL))
		return false;
	s = endpoint_slot(q, f, &q->backend);
	return s && s->backend.weight & LOCAL;
}

/*
 * Stores the entry of a DSR option, so that replies are translated here, and passes the packet on as the client sent
 * it.
 */
__noinline int learn_dsr(struct __sk_buff *skb, struct packet *p, const struct addr_port *entry)
{
	struct nat_entry *held, e = {.state = DIR_REPLY | DSR_LEARNT};
	bool same, answered;
	struct tuple back;

	if (!p || !entry)
		return TC_ACT_SHOT;
	reply_tuple(&back, p);
	e.to = *entry;
	e.seen = p->now;
	held = bpf_map_lookup_elem(&fl_nat_src, &back);
	same = held && held->state & DSR_LEARNT && held->to.port == entry->port &&
	       addr_equal(&held->to.address, &entry->address);
	answered = held && p->tuple.protocol == IPPROTO_TCP && held->state & SEEN_REPLY && !reply_flow_ended(held, p);
	if (same && (answered || !is_syn(p))) {
		held->seen = e.seen;
	} else if (answered) { /* the backend's socket has this very connection */
		count_packet(EVENT_FORGED);
		return TC_ACT_SHOT;
	} else if (!nat_insert(&fl_nat_src, &back, &e)) {
		return TC_ACT_SHOT;
	}
	set_bit(&fl_port_bits, back.sport, BIT_BACKEND);
	return remove_dsr_option(skb, p) ? TCX_NEXT : TC_ACT_SHOT;
}

#define NO_DSR_OPTION -2 /* of receive_dsr: the packet has no valid option */

/* Handles the DSR option of a packet. */
__noinline int receive_dsr(struct __sk_buff *skb, struct packet *p)
{
	struct addr_port entry;

	return p && read_dsr_option(skb, p, &entry) && from_uplink(skb) && dsr_option_valid(p, &entry)
		       ? learn_dsr(skb, p, &entry)
		       : NO_DSR_OPTION;
}

/* Reads the address by which this node reaches a packet's destination through the device that it leaves by. */
static __always_inline bool node_address(struct __sk_buff *skb, const struct packet *p, struct address *a)
{
	struct bpf_fib_lookup f = {
		.family = p->six ? AF_INET6 : AF_INET, .l4_protocol = p->tuple.protocol, .ifindex = skb->ifindex};
	long result;

	if (p->six)
		__builtin_memcpy(f.ipv6_dst, &p->tuple.destination, sizeof(f.ipv6_dst));
	else
		f.ipv4_dst = p->tuple.destination.word[3];
	result = bpf_fib_lookup(skb, &f, sizeof(f),
				BPF_FIB_LOOKUP_OUTPUT | BPF_FIB_LOOKUP_SKIP_NEIGH | BPF_FIB_LOOKUP_SRC);
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return false;
	if (p->six) {
		__builtin_memcpy(a, f.ipv6_src, sizeof(*a));
		return !is_zero(a);
	}
	map_ipv4(a, f.ipv4_src);
	return f.ipv4_src;
}

/*
 * Masquerades a client with an address of this node and a random free port: one that no other flow to that backend has,
 * also in connection tracking, and no socket of the node. The client's own port may have belonged to a socket of the
 * node a moment ago, and the backend, in TIME_WAIT, would not accept the client's SYN.
 */
__noinline int masquerade(struct __sk_buff *skb, const struct packet *p, const struct nat_entry *e)
{
	struct nat_entry back = {}, out;
	struct tuple t;
	int i;

	if (!p || !e)
		return false;
	out = *e;
	out.state &= ~(MASQ_PENDING | NODE_CLIENT);
	__builtin_memset(&out.from, 0, sizeof(out.from));
	if (!node_address(skb, p, &out.to.address)) {
		count_packet(EVENT_NO_ADDRESS);
		return false;
	}
	back.seen = p->now;
	back.to = e->state & NODE_CLIENT ? e->to : addr_port_of(&p->tuple.source, p->tuple.sport);
	back.from = e->from;
	back.state = e->state & (NODE_CLIENT | UNASSURED | MASQUERADED | POD_FLOW | UNDERLAY);
	reply_tuple(&t, p);
	t.destination = out.to.address;
	for (i = 0; i < PORT_TRIES; i++) {
		struct nat_entry *held;

		out.to.port = bpf_htons(MIN_PORT + bpf_get_prandom_u32() % (65536 - MIN_PORT));
		t.dport = out.to.port;
		held = bpf_map_lookup_elem(&fl_nat_dst, &t);
		if (held && !is_closed(held) && !expired(held, p))
			continue;
		if (has_socket(skb, &t, p->six) || conntrack_nat(skb, &t, p->six))
			continue;
		if (held)
			bpf_map_delete_elem(&fl_nat_dst, &t);
		if (bpf_map_update_elem(&fl_nat_dst, &t, &back, BPF_NOEXIST))
			continue;
		set_bit(&fl_port_bits, out.to.port, BIT_MASQ_PORT);
		return nat_insert(&fl_nat_src, &p->tuple, &out);
	}
	count_packet(EVENT_NO_PORT);
	return false;
}

/* Returns whether a packet may be its flow's first, of those for which that matters. */
static __always_inline bool may_begin(const struct packet *p)
{
	return !p->inner && (p->tuple.protocol == IPPROTO_UDP || is_syn(p));
}

/*
 * Returns whether a socket of the node, or a client that other rules masquerade, uses a port that a backend knows
 * another client by. Then it gets another port. If the client's flow has ended, the port is free.
 */
__noinline int port_clashes(const struct packet *p)
{
	struct nat_entry *held, e = {.state = MASQ_PENDING};
	struct port_bits *u = port_bits_of(&fl_port_bits);
	struct tuple back;

	if (!p || !u || !(u->of[p->tuple.sport] & EITHER_GENERATION(BIT_MASQ_PORT)))
		return false;
	reply_tuple(&back, p);
	held = bpf_map_lookup_elem(&fl_nat_dst, &back);
	if (!held)
		return false;
	if (is_closed(held) || expired(held, p)) {
		bpf_map_delete_elem(&fl_nat_dst, &back);
		return false;
	}
	if (held->state & NODE_CLIENT && held->to.port == p->tuple.sport &&
	    addr_equal(&held->to.address, &p->tuple.source)) /* its own, by an entry */
		return false;
	e.seen = p->now;
	return nat_insert(&fl_nat_src, &p->tuple, &e);
}

/*
 * Lowers the MTU in an ICMP error about a packet with a DSR option: the client's own packet is that much shorter.
 */
__noinline int shrink_mtu(struct __sk_buff *skb, const struct packet *p)
{
	struct icmp i;
	__u32 mtu;

	if (!p || bpf_skb_load_bytes(skb, p->transport, &i, sizeof(i)) || bpf_ntohl(i.rest) <= dsr_option_size(p) ||
	    (p->six ? i.type != ICMPV6_PKT_TOOBIG : i.type != ICMP_DEST_UNREACH || i.code != ICMP_FRAG_NEEDED))
		return 0;
	mtu = bpf_htonl(bpf_ntohl(i.rest) - dsr_option_size(p));
	bpf_l4_csum_replace(skb, p->transport + offsetof(struct icmp, check), i.rest, mtu, 4);
	bpf_skb_store_bytes(skb, p->transport + offsetof(struct icmp, rest), &mtu, sizeof(mtu), 0);
	return 0;
}

/*
 * Returns whether a packet without NAT_MARK belongs to another flow, though its tuple is that of a masqueraded
 * client's. Another program removes the mark if the flow's packets enter and none with a mark was seen for a while.
 */
__noinline int is_unrelated(const struct packet *p, struct nat_entry *e)
{
	struct addr_port source;
	struct nat_entry *other;
	struct tuple t;

	if (!p || !e || (e->state & (MARK_SEEN | MARK_STRIPPED)) != MARK_SEEN)
		return false;
	reply_tuple(&t, p);
	other = bpf_map_lookup_elem(&fl_nat_src, &t);
	if (other) {
		source = other->state & PORT_ALIAS ? other->from : addr_port_of(&p->tuple.source, p->tuple.sport);
		make_tuple(&t, &source, &other->to, p->tuple.protocol);
		other = bpf_map_lookup_elem(&fl_nat_dst, &t);
	}
	if (other && other->seen <= e->seen + REFRESH_AFTER)
		return true;
	set_state(e, MARK_STRIPPED);
	return false;
}

/*
 * Records that a client outside the cluster sends UDP to a pod's own address: the pod's replies keep their source. Of
 * TCP, and of ICMP echo, packets show which side began. A client whose packets the route back doesn't lead to might
 * be a forgery, by which a pod would keep others' flows from being masqueraded.
 */
__noinline int record_direct(struct __sk_buff *skb, const struct packet *p)
{
	struct nat_entry *held, e = {.state = DIRECT | SEEN_REPLY};
	struct tuple back;

	if (!p || p->inner || p->tuple.protocol != IPPROTO_UDP || skb->tc_index == NAT_MARK ||
	    !leaves_cluster(&p->tuple.destination, &p->tuple.source))
		return 0;
	reply_tuple(&back, p);
	held = bpf_map_lookup_elem(&fl_nat_src, &back);
	if (held && !expired(held, p)) {
		if (held->state & DIRECT && held->seen != p->now)
			held->seen = p->now;
		return 0;
	}
	if (!reverse_path_ok(skb, p))
		return 0;
	e.to = addr_port_of(&back.source, back.sport);
	e.seen = p->now;
	return nat_insert(&fl_nat_src, &back, &e);
}

/*
 * Returns whether the flow of a pod out of the cluster has ended, or its port at the node is another flow's by now. e
 * is its entry in fl_nat_src. Only TCP's is checked for each packet that opens a connection.
 */
__noinline int masquerade_ended(const struct packet *p, const struct nat_entry *e)
{
	struct nat_entry *back;
	struct tuple t;

	if (!p || !e || (!is_syn(p) && e->seen + REFRESH_AFTER > p->now))
		return false;
	reply_tuple(&t, p);
	t.destination = e->to.address;
	t.dport = e->to.port;
	back = bpf_map_lookup_elem(&fl_nat_dst, &t);
	return !back || is_closed(back) || back->to.port != p->tuple.sport ||
	       !addr_equal(&back->to.address, &p->tuple.source);
}

/*
 * Writes the entry of a packet that begins a flow of a pod out of the cluster, with a port that isn't chosen yet. e is
 * the tuple's entry until now, or NULL. Returns false where there is no space.
 */
__noinline int begin_masquerade(const struct packet *p, const struct nat_entry *e)
{
	struct nat_entry made = {.state = MASQ_PENDING | POD_FLOW};

	if (!p || (!may_begin(p) && !(p->flags & ECHO_REQUEST)))
		return true;
	if (e && !expired(e, p) && ((e->state & (POD_FLOW | MASQ_PENDING)) != POD_FLOW || !masquerade_ended(p, e)))
		return true;
	if (!leaves_cluster(&p->tuple.source, &p->tuple.destination)) {
		if (e) /* over; the destination is inside by now */
			bpf_map_delete_elem(&fl_nat_src, &p->tuple);
		return true;
	}
	if (p->tuple.protocol == IPPROTO_TCP)
		made.state |= UNASSURED;
	made.seen = p->now;
	if (!nat_insert(&fl_nat_src, &p->tuple, &made))
		return false;
	set_bit(&fl_port_bits, p->tuple.dport, BIT_MASQ_BACKEND);
	return true;
}

/*
 * Redirects a reply to another node's own address, whose source is this node's by now, to the device that a route from
 * there leads to: it was routed as a pod's packet, into the tunnel.
 */
__noinline int reroute(struct __sk_buff *skb, const struct packet *p, const struct addr_port *source)
{
	struct bpf_fib_lookup f = {.ifindex = skb->ingress_ifindex};

	if (!p || !source)
		return TCX_NEXT;
	f.family = p->six ? AF_INET6 : AF_INET;
	if (p->six) {
		__builtin_memcpy(f.ipv6_src, &source->address, sizeof(f.ipv6_src));
		__builtin_memcpy(f.ipv6_dst, &p->tuple.destination, sizeof(f.ipv6_dst));
	} else {
		f.ipv4_src = source->address.word[3];
		f.ipv4_dst = p->tuple.destination.word[3];
	}
	if (bpf_fib_lookup(skb, &f, sizeof(f), BPF_FIB_LOOKUP_SKIP_NEIGH) != BPF_FIB_LKUP_RET_SUCCESS ||
	    f.ifindex == skb->ifindex)
		return TCX_NEXT;
	if (!l2_len && bpf_skb_change_head(skb, sizeof(struct ethhdr), 0))
		return TC_ACT_SHOT;
	return bpf_redirect_neigh(f.ifindex, NULL, 0, 0);
}

/* Translates a packet's source: a backend's reply, or a masqueraded client. */
__noinline int translate_source(struct __sk_buff *skb, struct packet *p, int own, int marked)
{
	struct addr_port to, client;
	struct tuple back;
	__u32 now, alias, reply_state;
	struct nat_entry *e;
	bool news, underlay;

	if (!p)
		return TCX_NEXT;
	e = bpf_map_lookup_elem(&fl_nat_src, &p->tuple);
	if (own && !marked && may_begin(p) && (!e || e->state & MASQUERADED)) { /* to the backend directly */
		forget_closed_flow(p);
		e = bpf_map_lookup_elem(&fl_nat_src, &p->tuple);
	}
	/* At a port of a bridge, a packet whose client was masqueraded at the bridge would seem to clash with itself.
	 */
	if (!e && !p->inner && (own || may_begin(p)) && !is_bridge_port(skb) && port_clashes(p))
		e = bpf_map_lookup_elem(&fl_nat_src, &p->tuple);
	if (pod_network && !own && !p->inner) {
		if (!begin_masquerade(p, e))
			return TC_ACT_SHOT;
		e = bpf_map_lookup_elem(&fl_nat_src, &p->tuple);
	}
	if (!e || expired(e, p))
		return TCX_NEXT;
	if (pod_network && e->state & DIRECT) {
		e->seen = p->now;
		return TCX_NEXT;
	}
	if (!marked && !own && !p->inner && is_unrelated(p, e))
		return TCX_NEXT;
	if (e->state & MASQ_PENDING) {
		if (p->inner)
			return TCX_NEXT;
		if (!masquerade(skb, p, e))
			return TC_ACT_SHOT;
		e = bpf_map_lookup_elem(&fl_nat_src, &p->tuple);
		if (!e)
			return TC_ACT_SHOT;
	}
	to = e->to;
	client = e->from;
	alias = e->state & PORT_ALIAS;
	rewrite(skb, p, &to, false);
	if (alias)
		rewrite(skb, p, &client, true);
	if (dsr && p->inner && e->state & DSR)
		shrink_mtu(skb, p);
	underlay = pod_network && (e->state & (UNDERLAY | DIR_REPLY)) == (UNDERLAY | DIR_REPLY);
	if (p->inner)
		return underlay ? reroute(skb, p, &to) : TCX_NEXT;
	if (marked && e->state & MASQUERADED)
		set_state(e, MARK_SEEN);
	now = p->now;
	news = e->seen + REFRESH_AFTER <= now;
	if ((e->state & (SEEN_REPLY | CLIENT_UNACKED)) != SEEN_REPLY || news || p->flags & (FIN | RST) ||
	    (e->state & (FIN_PEER | FIN_ACKED)) == FIN_PEER) {
		reply_tuple(&back, p);
		reply_state = e->state & DIR_REPLY ? SEEN_REPLY : 0;
		if (reply_state && news && p->flags & DATA)
			reply_state |= BACKEND_UNACKED;
		saw_reply(&back, p, reply_state);
		clear_state(e, CLIENT_UNACKED);
		set_state(e, SEEN_REPLY);
	}
	track_tcp(e, p, FIN_SENDER);
	if (unlikely(e->state & UNASSURED))
		establish_source(e, p);
	if (e->seen != now)
		e->seen = now;
	return underlay ? reroute(skb, p, &to) : TCX_NEXT;
}
