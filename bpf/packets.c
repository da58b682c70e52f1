/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Services for packets at a node's devices: for clients that no hook of a cgroup sees, and for what a socket can't do. Like the
 * kernel's own address translation, a packet's destination is changed where it comes in, its source where it leaves, and
 * between them it is routed as any other. Nothing else in the kernel has to know of its flow.
 *
 * A flow is at most four ways, each under the tuple of the packets that take it. A client C asks an entry F and is given a
 * backend B; where its address is hidden, it is seen as H:
 *
 *	destinations	C→F: B		B→H: C
 *	sources		C→B: H		B→C: F
 *
 * A client that asks two entries from one port may be given the same backend by both. Then it is C' to the second, of another port:
 *
 *	destinations	C→F: B, from C'
 *	sources		B→C': F, to C
 *
 * Where the backend's node answers a client itself, this node's ways are as of a client that isn't hidden. What opens a flow, and each
 * packet of UDP, tells that node of F (direct.h), and there is one way:
 *
 *	sources		B→C: F
 *
 * A client on the node itself is served where its packets leave, and these come in again by the loopback device, now that
 * their destination is another; so do the replies to it, whose ends are both changed.
 */
#include "answer.h"
#include "direct.h"
#include "reverse.h"
#include "shortcut.h"

char _license[] SEC("license") = "GPL";

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 17);
	__type(key, struct tuple);
	__type(value, struct way);
} destinations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 17);
	__type(key, struct tuple);
	__type(value, struct way);
} sources SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct uses);
} addresses SEC(".maps");

/* When flows of UDP that sockets of this node send from the number of a node port were last seen, by the replies' tuple. */
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
} changes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct permit);
	__type(value, __u32);
} permitted SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct prefix);
	__type(value, __u32); /* enum unmatched_action */
} unmatched SEC(".maps");

/* Room for a question while a packet is looked at: the stack has none. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct question);
} question SEC(".maps");

const enum event_of_packet unused_event __attribute__((unused));
const enum way_state unused_state __attribute__((unused));
const enum use unused_use __attribute__((unused));
const enum slow unused_slow __attribute__((unused));
const enum unmatched_action unused_action __attribute__((unused));

/* The bits of a use of which programs set one, of either generation. */
#define EITHER(use) ((use) | (use) << USE_SHIFT)

/* Notes a use of a port or an address, in the current generation. */
static __always_inline void note(void *map, __u16 port, __u32 use)
{
	struct uses *u = uses(map);
	__u32 at = port;

	if (!u)
		return;
	barrier_var(at); /* or the compiler drops the mask that the verifier wants: it knows of no 16 bits in a register */
	at &= 0xffff;
	if (*(volatile __u32 *)&u->generation)
		use <<= USE_SHIFT;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
	if (!(u->of[at] & use))
		__sync_fetch_and_or(&u->word[at / 2], use << (at % 2 * 16));
#else
	if (!(u->of[at] & use))
		__sync_fetch_and_or(&u->word[at / 2], use << (16 - at % 2 * 16));
#endif
}

/* A hash of the exclusive or of an address's words, which the agent computes too. */
static __always_inline __u16 short_hash(__be32 words) { return words * 0x9e3779b1U >> 16; }

static __always_inline __u32 changed(void)
{
	__u32 first = 0, *n = bpf_map_lookup_elem(&changes, &first);

	return n ? *n : 0;
}

/* The tuple of packets from one end to another. */
static __always_inline void from_to(struct tuple *t, const struct end *from, const struct end *to, __u8 protocol)
{
	__builtin_memset(t, 0, sizeof(*t));
	t->source = from->address;
	t->from = from->port;
	t->destination = to->address;
	t->to = to->port;
	t->protocol = protocol;
}

/* The tuple of the answers to a packet. */
static __always_inline void back_of(struct tuple *t, const struct packet *p)
{
	struct end source = end_of(&p->tuple.source, p->tuple.from), destination = end_of(&p->tuple.destination, p->tuple.to);

	from_to(t, &destination, &source, p->tuple.protocol);
}

static __always_inline bool over(const struct way *w)
{
	if (direct && w->state & (DIRECT | LEARNT) && w->state & ENDS) /* nobody sees the other end's */
		return true;
	return w->state & RESET || (w->state & (ENDS | ENDED)) == (ENDS | ENDED);
}

/* Returns for how many seconds an entry without packets lasts: the defaults of nf_conntrack, whose states are named. */
static __always_inline __u32 lifetime(const struct way *w, __u8 protocol)
{
	__u32 state = w->state;

	if (protocol == IPPROTO_UDP)
		return state & ANSWERED ? 120 : 30;
	if (state & RESET)
		return 10; /* CLOSE */
	if ((state & (ENDS | ENDED)) == (ENDS | ENDED))
		return state & ACKED ? 120 : 30; /* TIME_WAIT, LAST_ACK */
	if (state & (ENDS | ENDED)) /* FIN_WAIT, CLOSE_WAIT; of a direct flow the other end's packets aren't seen */
		return (state & (ACKED | DIRECT | LEARNT)) == ACKED ? 60 : 120;
	if (state & UNASSURED)
		return state & ANSWERED ? 60 : 120; /* SYN_RECV, SYN_SENT */
	if (!(state & ANSWERED))
		return 120;
	return state & (CLIENT_UNACKED | BACKEND_UNACKED) ? 300 : 5 * 24 * 3600; /* unacknowledged data, ESTABLISHED */
}

/* Whether a way had no packets for too long when p came, of its protocol. */
static __always_inline bool expired(const struct way *w, const struct packet *p)
{
	return w->seen + lifetime(w, p->tuple.protocol) < p->now;
}

static __always_inline bool opens(const struct packet *p)
{
	return p->tuple.protocol == IPPROTO_TCP && (p->flags & (SYN | ACK)) == SYN;
}

static __always_inline void mark(struct way *w, __u32 state)
{
	if ((w->state & state) != state)
		__sync_fetch_and_or(&w->state, state);
}

static __always_inline void unmark(struct way *w, __u32 state)
{
	if (w->state & state)
		__sync_fetch_and_and(&w->state, ~state);
}

/* How long, in seconds, until the ways of a flow tell each other that it has packets. */
#define NEWS 8

/*
 * The tc_index of a packet whose destination is changed, until it leaves. By it a packet of a flow whose client is hidden is told from
 * others between the ends that it has by then: the client may reach the backend itself, too, from the same port. The stack takes it
 * along (ip_copy_metadata). Another's program that ends the look at a packet as it comes in (TCX_PASS) takes it away: then flows are
 * told by their ends alone.
 */
#define MARK 0xfa1d

/* Whether an entry lets a client in. */
__noinline int allowed(const struct question *q, int any)
{
	struct permit key = {.length = 8 * (sizeof(struct entry) + sizeof(struct address))};

	if (!q)
		return false;
	key.client = q->from;
	key.entry.address = q->entry.address;
	key.entry.port = q->entry.port;
	key.entry.protocol = q->protocol;
	if (any && is4(&key.entry.address))
		key.entry.address.word[3] = 0;
	else if (any)
		__builtin_memset(&key.entry.address, 0, sizeof(key.entry.address));
	return bpf_map_lookup_elem(&permitted, &key) != NULL;
}

/* What a packet asks for. */
static __always_inline struct question *ask(const struct packet *p, __u32 origin)
{
	__u32 first = 0;
	struct question *q = bpf_map_lookup_elem(&question, &first);

	if (!q)
		return NULL;
	__builtin_memset(q, 0, sizeof(*q));
	q->entry.address = p->tuple.destination;
	q->entry.port = p->tuple.to;
	q->from = p->tuple.source;
	q->port = p->tuple.from;
	q->protocol = p->tuple.protocol;
	q->origin = origin;
	return q;
}

static __always_inline struct pool *pool_of(struct question *q, const struct frontend *f)
{
	q->index = q->origin == FROM_OUTSIDE ? f->outside : f->inside;
	return bpf_map_lookup_elem(&pools, &q->index);
}

/* The slot of an endpoint that a flow stays with, NULL where the frontend has no such, or doesn't let the client in. */
static __always_inline union slot *backend_of(struct question *q, const struct frontend *f, const struct place_of *at)
{
	struct pool *pool;
	__u32 extent, number;
	union slot *s;

	if (!f || (f->some && !allowed(q, f->any)))
		return NULL;
	pool = pool_of(q, f);
	if (!pool)
		return NULL;
	extent = *(volatile __u32 *)&pool->extent;
	s = slot(extent);
	if (!s || !extent)
		return NULL;
	number = retained(extent, &s->header, at);
	return number ? slot(number) : NULL;
}

/* Whether a client's flow stays with its endpoint. */
__noinline int serves(const struct way *w, const struct packet *p)
{
	struct place_of at = {};
	struct question *q;

	if (!w || !p)
		return false;
	q = ask(p, w->origin);
	if (!q)
		return false;
	at.address = w->to.address;
	at.port = w->to.port;
	return backend_of(q, find(q), &at) != NULL;
}

/*
 * Whether a SYN that matches an entry begins another connection: after a FIN or RST, or where the backend doesn't serve its
 * frontend any more, which is so of all once these programs are retired. A SYN that was answered with SYN, ACK may be sent
 * again.
 */
static __always_inline bool reopens(const struct way *w, const struct packet *p)
{
	if (w->state & (ENDS | ENDED | RESET))
		return true;
	if (!(w->state & ASKS) || (w->state & (UNASSURED | ANSWERED)) == (UNASSURED | ANSWERED))
		return false;
	return !serves(w, p);
}

/* Whether a way can't be taken any more: the packet begins another flow. */
static __always_inline bool stale(struct way *w, const struct packet *p)
{
	__u32 now;

	if (expired(w, p))
		return true;
	if (opens(p))
		return reopens(w, p);
	if (!(w->state & ASKS) || p->tuple.protocol != IPPROTO_UDP)
		return false;
	now = changed();
	if (w->change == now)
		return false;
	if (!serves(w, p))
		return true;
	w->change = now;
	return false;
}

/* Notes what of a flow's life a packet shows that takes a way as this one does. */
static __always_inline void live(struct way *w, const struct packet *p, __u32 end)
{
	if (p->flags & RST) {
		mark(w, RESET);
	} else if (p->flags & FIN) {
		if (!(w->state & end))
			unmark(w, ACKED);
		mark(w, end);
	} else if (w->state & (ENDS | ENDED)) {
		mark(w, ACKED);
	}
}

/* Lets a client's way know of a packet of its answers. t is the tuple of its packets. */
static __always_inline void answer(const struct tuple *t, const struct packet *p, __u32 state)
{
	struct way *w = bpf_map_lookup_elem(&destinations, t);

	if (!w)
		return;
	mark(w, state);
	unmark(w, CLIENT_UNACKED);
	live(w, p, ENDED);
	w->seen = p->now;
}

/* Lets what belongs to a client's way live on with it, or end, and makes it anew where it had to make room. */
__noinline int renew(const struct way *w, const struct packet *p)
{
	struct way *r, made = {.state = REPLIES};
	struct tuple back;
	struct end client;
	__u32 ends;

	if (!w || !p)
		return 0;
	ends = (w->state & (CLIENT_UNACKED | RESET)) | (w->state & ENDS ? ENDED : 0);
	client = end_of(&p->tuple.source, p->tuple.from);
	made.to = end_of(&p->tuple.destination, p->tuple.to);
	made.seen = w->seen;
	made.state |= ends | (w->state & (ANSWERED | ALIAS | DIRECT | HIDDEN | UNASSURED));
	if (w->state & ALIAS) {
		made.from = client;
		client = w->from;
	}
	from_to(&back, &w->to, &client, p->tuple.protocol);
	r = bpf_map_lookup_elem(&sources, &back);
	if (r) {
		r->seen = w->seen;
		if (~r->state & ends & ENDED)
			unmark(r, ACKED);
		mark(r, ends);
	} else if (!bpf_map_update_elem(&sources, &back, &made, BPF_NOEXIST)) {
		note(&ports, back.from, USE_BACKEND);
	}
	return 0;
}

/* Extends the lifetime of a flow's entry to that of an established connection. */
static __always_inline void assure(struct way *w)
{
	if (w && w->state & UNASSURED)
		__sync_fetch_and_and(&w->state, ~UNASSURED);
}

/* Whether a packet is one of TCP behind the handshake's first two: it has neither SYN nor RST. */
static __always_inline bool follows(const struct packet *p)
{
	return p->tuple.protocol == IPPROTO_TCP && !p->inner && !(p->flags & (SYN | RST));
}

/*
 * Has the entries of a connection last, once a packet shows that its handshake is complete: the client's after an answer, or the backend's
 * that isn't a SYN, ACK. w, in destinations, is the entry of the packet, which isn't changed yet.
 */
__noinline int establish(struct way *w, const struct packet *p)
{
	struct tuple other;
	struct end end;

	if (!w || !p || !follows(p))
		return 0;
	if (!(w->state & ASKS)) {
		end = end_of(&p->tuple.source, p->tuple.from);
		from_to(&other, &w->to, &end, p->tuple.protocol); /* of a client that is hidden */
		assure(w);
		assure(bpf_map_lookup_elem(&sources, &other));
		return 0;
	}
	if (!(w->state & ANSWERED))
		return 0;
	end = w->state & ALIAS ? w->from : end_of(&p->tuple.source, p->tuple.from);
	from_to(&other, &w->to, &end, p->tuple.protocol);
	assure(w);
	assure(bpf_map_lookup_elem(&sources, &other));
	assure(bpf_map_lookup_elem(&destinations, &other)); /* of this node's own client */
	return 0;
}

/* The same where w is in sources, and the packet is changed. */
__noinline int establish_source(struct way *w, const struct packet *p)
{
	struct tuple back;
	struct way *other;

	if (!w || !p || !follows(p))
		return 0;
	back_of(&back, p);
	other = bpf_map_lookup_elem(&destinations, &back);
	if (w->state & REPLIES || (other && other->state & ANSWERED)) {
		assure(w);
		assure(other);
	}
	return 0;
}

/* Sends a packet in by the loopback device: its route is to be looked up anew. */
static __always_inline int return_in(struct __sk_buff *skb)
{
	struct ethhdr e = {.h_proto = skb->protocol};

	if (!head && bpf_skb_change_head(skb, sizeof(e), 0))
		return TC_ACT_SHOT;
	bpf_skb_store_bytes(skb, 0, &e, sizeof(e), 0);
	return bpf_redirect(LOOPBACK, BPF_F_INGRESS);
}

/*
 * Drops a packet in silence. Were one that a socket sends dropped where it leaves, the socket would hear of it: so it goes to
 * the loopback device as if it were for another host, and ends there.
 */
static __always_inline int vanish(struct __sk_buff *skb, bool own)
{
	const __u8 elsewhere = 2; /* the first byte of such a host's address, locally administered */
	int result;

	if (!own)
		return TC_ACT_SHOT;
	result = return_in(skb);
	bpf_skb_store_bytes(skb, 0, &elsewhere, 1, 0);
	return result;
}

static __always_inline int silence(struct __sk_buff *skb, bool own)
{
	count(SILENCED);
	return vanish(skb, own);
}

/* Sends a packet to a backend whose node answers the client itself, and tells that node of the entry. */
__noinline int convey(struct __sk_buff *skb, struct packet *p, const struct end *backend)
{
	struct end entry;

	if (!p || !backend)
		return TC_ACT_SHOT;
	entry = end_of(&p->tuple.destination, p->tuple.to);
	set(skb, p, backend, true);
	if (write_told(skb, p, &entry))
		return TCX_NEXT;
	count(NO_ROOM);
	return TC_ACT_SHOT;
}

/* Whether a packet of a direct flow tells of its entry: what opens a connection, and all of UDP but later fragments. */
static __always_inline bool tells(const struct packet *p)
{
	return p->transport && !p->inner && (p->tuple.protocol == IPPROTO_UDP || opens(p));
}

/* Takes a packet on its way. */
static __always_inline int go(struct __sk_buff *skb, struct packet *p, struct way *w, bool own)
{
	__u32 now = p->now, state = w->state;
	struct end to = w->to, from = w->from;
	struct tuple ask;
	bool news;

	if (!p->inner) {
		live(w, p, ENDS);
		if (!(state & ASKS) || (direct && state & DIRECT && !opens(p)))
			mark(w, ANSWERED);
		unmark(w, BACKEND_UNACKED);
		news = w->seen + NEWS <= now;
		if (w->seen != now)
			w->seen = now;
		if (news && p->flags & DATA && (state & (ASKS | DIRECT)) == ASKS)
			mark(w, CLIENT_UNACKED);
		if (state & ASKS && (news || p->flags & (FIN | RST)))
			renew(w, p);
		if (unlikely(state & UNASSURED))
			establish(w, p);
	}
	if (state & OURS) {
		from_to(&ask, &to, &from, p->tuple.protocol);
		if (!p->inner)
			answer(&ask, p, ANSWERED);
	}
	skb->tc_index = MARK;
	if (state & (OURS | ALIAS))
		set(skb, p, &from, false);
	if (direct && state & DIRECT && tells(p))
		return convey(skb, p, &to);
	set(skb, p, &to, true);
	return own || state & OURS ? return_in(skb) : TCX_NEXT;
}

static __always_inline int refuse(struct __sk_buff *skb, const struct packet *p, bool own)
{
	if (!p->transport) /* a fragment behind the first, which is answered */
		return vanish(skb, own);
	count(REJECTED);
	if (!(p->tuple.protocol == IPPROTO_TCP ? reset(skb, p) : unreachable(skb, p)))
		return vanish(skb, own);
	return own ? return_in(skb) : bpf_redirect(skb->ifindex, 0);
}

static __always_inline bool put(void *map, const struct tuple *t, const struct way *w)
{
	if (!bpf_map_update_elem(map, t, w, BPF_ANY))
		return true;
	count(NO_ROOM);
	return false;
}

/*
 * What becomes of a client's address where backends' nodes may answer clients: see seen_as. A client is hidden still from a backend
 * whose node isn't known to do so, or is the client, or doesn't know the entry; from itself; if its port here isn't its own; and if it
 * is behind this node, which would take an answer that comes from elsewhere by an address of its own for forged.
 */
static __always_inline __u32 shown(const struct packet *p, const struct question *q, const struct frontend *f, __u32 weight)
{
	if (equal(&q->from, &q->backend.address) || place(&q->from) & (NODES | BEHIND) || (f->any && !(place(&q->entry.address) & NODES)))
		return UNHIDDEN;
	if (weight & LOCAL)
		return 0;
	return weight & AWAY && q->port == p->tuple.from ? DIRECT : UNHIDDEN;
}

/* What becomes of a client's address at its backend: UNHIDDEN where it is to be hidden, DIRECT where the backend's node answers the client. */
static __always_inline __u32 seen_as(const struct packet *p, const struct question *q, const struct frontend *f, const struct header *h, __u32 extent)
{
	const struct address *a = &q->from, *b = &q->backend.address;
	bool hidden = f->hide & q->origin || loopback(a), returns = q->origin != FROM_NODE && equal(a, b);
	__u32 number, weight;
	union slot *s;

	if (hidden && !(direct && f->direct & q->origin))
		return UNHIDDEN;
	if (!hidden && !returns)
		return 0;
	number = member(extent, h->count, &q->backend);
	s = slot(extent + number);
	weight = number && s ? s->backend.weight : 0;
	if (hidden)
		return shown(p, q, f, weight);
	return weight & LOCAL ? UNHIDDEN : 0;
}

/* Writes a tuple as the kernel's look-ups take it, and gives how much of that. */
static __always_inline __u32 sought(struct bpf_sock_tuple *s, const struct tuple *t, bool six)
{
	__builtin_memset(s, 0, sizeof(*s));
	if (six) {
		__builtin_memcpy(s->ipv6.saddr, &t->source, sizeof(s->ipv6.saddr));
		__builtin_memcpy(s->ipv6.daddr, &t->destination, sizeof(s->ipv6.daddr));
		s->ipv6.sport = t->from;
		s->ipv6.dport = t->to;
		return sizeof(s->ipv6);
	}
	s->ipv4.saddr = t->source.word[3];
	s->ipv4.daddr = t->destination.word[3];
	s->ipv4.sport = t->from;
	s->ipv4.dport = t->to;
	return sizeof(s->ipv4);
}

/* Whether a socket of this node hears what a backend sends to an end. t is the tuple of that. */
__noinline int heard(struct __sk_buff *skb, const struct tuple *t, int six)
{
	struct bpf_sock_tuple s;
	struct bpf_sock *sk;
	__u32 size, state;

	if (!t)
		return true;
	size = sought(&s, t, six);
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

/* Returns the bits of nf_conn.status that say how connection tracking translates a tuple's flow, 0 where it doesn't. */
__noinline int translation(struct __sk_buff *skb, const struct tuple *t, int six)
{
	struct bpf_ct_opts o = {.netns_id = BPF_F_CURRENT_NETNS};
	struct bpf_sock_tuple s;
	struct nf_conn *c;
	int status;

	if (!t || !bpf_core_type_exists(struct bpf_ct_opts))
		return 0;
	o.l4proto = t->protocol;
	c = bpf_skb_ct_lookup(skb, &s, sought(&s, t, six), &o, sizeof(o));
	if (!c)
		return 0;
	status = c->status & (IPS_SRC_NAT | IPS_DST_NAT);
	bpf_ct_release(c);
	return status;
}

/*
 * Whether a packet is of a connection that the kernel's connection tracking translates, as it was begun while another mode,
 * or a kube-proxy, served its entry. It goes on as it began.
 */
static __always_inline bool tracked(struct __sk_buff *skb, const struct packet *p)
{
	return p->tuple.protocol == IPPROTO_TCP && !opens(p) && translation(skb, &p->tuple, p->six) & IPS_DST_NAT;
}

/* Whether the flow of a way back is over. ask is the tuple of its client's packets. */
static __always_inline bool ended(const struct way *back, const struct tuple *ask, const struct packet *p)
{
	const struct way *asked = back;

	if (!direct || !(back->state & LEARNT)) /* of that, all that is known is here */
		asked = bpf_map_lookup_elem(&destinations, ask);
	return !asked || over(asked) || expired(asked, p);
}

#define TRIES 24
#define LOWEST 1024 /* port */

/*
 * Finds the port at which a backend is to see a client: its own, unless another flow of the client's to that backend has it, by way of
 * another entry. False where there is none.
 */
__noinline int distinguish(struct __sk_buff *skb, const struct packet *p, struct question *q)
{
	struct end client, backend;
	struct way *held;
	struct tuple t;
	int i;

	if (!p || !q)
		return false;
	client = end_of(&q->from, q->port);
	backend = end_of(&q->backend.address, q->backend.port);
	from_to(&t, &backend, &client, q->protocol);
	held = bpf_map_lookup_elem(&sources, &t);
	if (!held || !(held->state & REPLIES))
		return true;
	if (held->state & ALIAS)
		client = held->from;
	else if (held->to.port == q->entry.port && equal(&held->to.address, &q->entry.address))
		return true;
	from_to(&t, &client, &held->to, q->protocol);
	if (ended(held, &t, p))
		return true;
	client.address = q->from;
	for (i = 0; i < TRIES; i++) {
		client.port = bpf_htons(LOWEST + bpf_get_prandom_u32() % (65536 - LOWEST));
		from_to(&t, &backend, &client, q->protocol);
		held = bpf_map_lookup_elem(&sources, &t);
		if (held && !expired(held, p))
			continue;
		if (q->origin == FROM_NODE && (bpf_map_lookup_elem(&destinations, &t) || heard(skb, &t, p->six)))
			continue;
		q->port = client.port;
		return true;
	}
	count(NO_PORT);
	return false;
}

/* Writes the ways of a new flow. seen_as is what becomes of its client's address. False where there is no room for them. */
__noinline int begin(const struct packet *p, const struct question *q, __u32 seen_as)
{
	bool hidden = seen_as & UNHIDDEN;
	struct way w = {};
	struct tuple t;
	struct end client, seen, entry, backend;
	__u32 alias = 0, is_hidden = hidden ? HIDDEN : 0;

	if (!p || !q)
		return false;
	client = end_of(&q->from, p->tuple.from);
	seen = end_of(&q->from, q->port);
	entry = end_of(&q->entry.address, q->entry.port);
	backend = end_of(&q->backend.address, q->backend.port);
	w.seen = p->now;
	w.to = entry;
	if (seen.port != client.port) {
		alias = ALIAS;
		w.from = client;
	}
	if (p->tuple.protocol == IPPROTO_TCP)
		is_hidden |= UNASSURED;
	w.state = REPLIES | alias | is_hidden | (seen_as & DIRECT);
	from_to(&t, &backend, &seen, q->protocol);
	if (!put(&sources, &t, &w))
		return false;
	note(&ports, backend.port, USE_BACKEND);
	if (q->origin == FROM_NODE && !hidden) {
		w.to = client;
		w.from = entry;
		w.state = OURS | (is_hidden & UNASSURED);
		if (!put(&destinations, &t, &w))
			return false;
		note(&ports, seen.port, USE_TAKEN);
	}
	if (hidden) {
		w.to = client;
		w.from = entry;
		w.state = UNHIDDEN | is_hidden | (q->origin == FROM_NODE ? OURS : 0);
		from_to(&t, &seen, &backend, q->protocol);
		if (!put(&sources, &t, &w))
			return false;
		note(&ports, backend.port, USE_HIDDEN);
	}
	__builtin_memset(&w.from, 0, sizeof(w.from));
	if (alias)
		w.from = seen;
	w.to = backend;
	w.state = ASKS | alias | is_hidden | (seen_as & DIRECT);
	w.origin = q->origin;
	w.change = changed();
	if (!put(&destinations, &p->tuple, &w))
		return false;
	count(BEGAN);
	return true;
}

/* Flows of packets count for no scheduler that goes by sockets: its backends take turns for them, by weight where it heeds weights. */
static __always_inline __u32 drawn(struct pool *p, const struct header *h, __u32 extent, const struct question *q)
{
	return draw(p, h, extent, q);
}

/* Chooses a backend, with room on the stack for that. */
__noinline int pick(struct question *q, struct pool *p, const struct header *h, __u32 extent)
{
	return q && p && h && choose(q, p, h, extent);
}

/* Notes where a client's way leads to: its packets are looked at also when there is no frontend any more. */
__noinline int note_asked(const struct question *q)
{
	const __be32 *w;

	if (!q)
		return 0;
	w = q->entry.address.word;
	note(&addresses, short_hash(w[0] ^ w[1] ^ w[2] ^ w[3]), USE_ASKED);
	note(&ports, q->entry.port, USE_ASKED);
	return 0;
}

/* Whether a packet comes in by an interface of pods. */
__noinline int comes_by_pods_interface(struct __sk_buff *skb)
{
	struct sk_buff *kernels;

	if (!interfaces_of_pods())
		return false;
	kernels = bpf_cast_to_kern_ctx(skb);
	return is_of_pods(kernels->dev);
}

/* For how many seconds a socket that isn't connected may receive replies to what it sent. */
#define REPLY_WITHIN 120

/* Notes that a socket of this node sends UDP from the number of a node port. */
__noinline int note_node_udp(struct __sk_buff *skb, const struct packet *p)
{
	struct uses *u = uses(&ports);
	struct bpf_sock *sk = skb->sk;
	struct tuple back;
	__u32 *seen, now;

	if (!p || !u || !sk || !(u->of[p->tuple.from] & USE_ANY) || bpf_htons(sk->src_port) != p->tuple.from)
		return 0;
	back_of(&back, p);
	now = p->now;
	seen = bpf_map_lookup_elem(&fl_node_udp, &back);
	if (!seen)
		bpf_map_update_elem(&fl_node_udp, &back, &now, BPF_ANY);
	else if (*seen != now)
		*seen = now;
	return 0;
}

/* Returns whether a socket of this node awaits a packet: one that is connected to its source, or has sent UDP there. */
__noinline int awaited(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock_tuple s;
	struct bpf_sock *sk;
	__u32 *seen, state;

	if (!p)
		return false;
	if (p->tuple.protocol == IPPROTO_TCP)
		return heard(skb, &p->tuple, p->six);
	sk = bpf_sk_lookup_udp(skb, &s, sought(&s, &p->tuple, p->six), BPF_F_CURRENT_NETNS, 0);
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
 * Returns whether a packet replies to a flow that this node began or masqueraded, from the number of a node port: it is
 * none for the node port. Only the kernel's connection tracking knows of flows that others masquerade.
 */
__noinline int is_reply(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_ct_opts o = {.netns_id = BPF_F_CURRENT_NETNS};
	struct bpf_sock_tuple s;
	struct nf_conn *c;

	if (!p || opens(p))
		return false;
	if (awaited(skb, p))
		return true;
	if (!bpf_core_type_exists(struct bpf_ct_opts))
		return false;
	o.l4proto = p->tuple.protocol;
	c = bpf_skb_ct_lookup(skb, &s, sought(&s, &p->tuple, p->six), &o, sizeof(o));
	if (!c)
		return false;
	bpf_ct_release(c);
	return o.dir == IP_CT_DIR_REPLY;
}

/* Rejects or drops a packet that matches no frontend, if it opens a flow to a ClusterIP or to an unallocated address. */
__noinline int judge_unmatched(struct __sk_buff *skb, const struct packet *p, int own)
{
	struct prefix key = {.length = 128};
	__u32 *action;

	if (!p || (p->tuple.protocol == IPPROTO_TCP && !opens(p)))
		return TCX_NEXT;
	key.address = p->tuple.destination;
	action = bpf_map_lookup_elem(&unmatched, &key);
	if (!action)
		return TCX_NEXT;
	if (*action == UNMATCHED_DROP)
		return silence(skb, own);
	if (reverse_path && !own && !comes_by_its_route(skb, p))
		return drop_forged(skb);
	return refuse(skb, p, own);
}

/* Serves a packet that has no way yet. */
__noinline int serve(struct __sk_buff *skb, struct packet *p, int own)
{
	struct question *q;
	struct frontend *f;
	struct header h;
	struct pool *pool;
	struct end to;
	__u32 extent, seen;
	union slot *s;

	if (!p)
		return TCX_NEXT;
	q = ask(p, own ? FROM_NODE : FROM_OUTSIDE);
	if (!q)
		return TCX_NEXT;
	f = find(q);
	if (!f)
		return judge_unmatched(skb, p, own);
	if (tracked(skb, p) || is_reply(skb, p))
		return TCX_NEXT;
	if (reverse_path && !own && !comes_by_its_route(skb, p))
		return drop_forged(skb);
	if (!own && (place(&q->from) & PODS || comes_by_pods_interface(skb)))
		q->origin = FROM_POD;
	if (f->some && !allowed(q, f->any))
		return silence(skb, own);
	pool = pool_of(q, f);
	if (!pool)
		return TCX_NEXT;
	extent = *(volatile __u32 *)&pool->extent;
	s = slot(extent);
	if (!s || !extent)
		return TCX_NEXT;
	h = s->header;
	if (!h.count) {
		if (f->drop & q->origin)
			return silence(skb, own);
		if (p->transport)
			__sync_fetch_and_add(&pool->refused, 1);
		return refuse(skb, p, own);
	}
	if (h.scheduler >= LEAST)
		h.scheduler = TURNS;
	if (p->flags & RST || !pick(q, pool, &h, extent))
		return TCX_NEXT;
	if (!distinguish(skb, p, q))
		return TC_ACT_SHOT;
	seen = seen_as(p, q, f, &h, extent);
	note_asked(q);
	if (!begin(p, q, seen))
		return TC_ACT_SHOT;
	__sync_fetch_and_add(&pool->connections, 1);
	skb->tc_index = MARK;
	if (q->port != p->tuple.from) {
		to = end_of(&q->from, q->port);
		set(skb, p, &to, false);
	}
	to = end_of(&q->backend.address, q->backend.port);
	if (direct && seen & DIRECT && p->transport)
		return convey(skb, p, &to);
	set(skb, p, &to, true);
	return own ? return_in(skb) : TCX_NEXT;
}

/*
 * Deletes the entries of a flow whose client sends another from its port. asked is the tuple of the client's packets. Entries of
 * the backend's tuples may be the other's by now.
 */
__noinline int drop_flow(const struct tuple *asked)
{
	struct end client, backend;
	struct tuple t;
	struct way *w;

	if (!asked)
		return 0;
	w = bpf_map_lookup_elem(&destinations, asked);
	if (!w)
		return 0;
	client = w->state & ALIAS ? w->from : end_of(&asked->source, asked->from);
	backend = w->to;
	bpf_map_delete_elem(&destinations, asked);
	from_to(&t, &backend, &client, asked->protocol);
	w = bpf_map_lookup_elem(&sources, &t);
	if (!w || w->to.port != asked->to || !equal(&w->to.address, &asked->destination))
		return 0;
	bpf_map_delete_elem(&sources, &t);
	bpf_map_delete_elem(&destinations, &t); /* of this node's own client */
	from_to(&t, &client, &backend, asked->protocol);
	w = bpf_map_lookup_elem(&sources, &t);
	if (!w)
		return 0;
	client = w->to; /* as it is seen, or itself */
	bpf_map_delete_elem(&sources, &t);
	from_to(&t, &backend, &client, asked->protocol);
	bpf_map_delete_elem(&destinations, &t);
	return 0;
}

#define FIRST -2 /* of inward: the packet has no way yet */

/* Changes where a packet goes: that of a client, or of a backend that answers one that is hidden. */
__noinline int inward(struct __sk_buff *skb, struct packet *p, int own)
{
	struct way *w;

	if (!p)
		return TCX_NEXT;
	w = bpf_map_lookup_elem(&destinations, &p->tuple);
	if (w && !stale(w, p))
		return go(skb, p, w, own);
	if (w && opens(p))
		drop_flow(&p->tuple);
	return p->inner ? TCX_NEXT : FIRST;
}

/* Whether the flow is over of a way back from the backend that a client's packet goes to. */
__noinline int is_over(const struct way *back, const struct packet *p)
{
	struct tuple ask;
	struct end client;

	if (!back || !p)
		return true;
	client = back->state & ALIAS ? back->from : end_of(&p->tuple.source, p->tuple.from);
	from_to(&ask, &client, &back->to, p->tuple.protocol);
	return ended(back, &ask, p);
}

/*
 * A client sends to a backend itself. If it did so through an entry before, from this very port, and that is over, what the
 * backend answers is from the backend. Of UDP the latest counts: its socket may be another, which connect() has translated.
 * Of an entry that another node told, later fragments look like that.
 */
__noinline int forget(const struct packet *p)
{
	struct tuple back, asked;
	struct end client;
	struct way *w;

	if (!p)
		return 0;
	back_of(&back, p);
	w = bpf_map_lookup_elem(&sources, &back);
	if (!w || (p->tuple.protocol == IPPROTO_UDP ? w->state & LEARNT : !is_over(w, p)))
		return 0;
	client = w->state & ALIAS ? w->from : end_of(&p->tuple.source, p->tuple.from);
	from_to(&asked, &client, &w->to, p->tuple.protocol);
	drop_flow(&asked);
	bpf_map_delete_elem(&sources, &back);
	return 0;
}

/* The frontend that an entry told by another node leads to: one of this node's own, or a node port of any of the cluster's nodes. */
static __always_inline struct frontend *find_told(const struct question *q)
{
	struct entry any = {.port = q->entry.port, .protocol = q->protocol};
	struct frontend *f = find(q);

	if (f || !(place(&q->entry.address) & NODES))
		return f;
	if (is4(&q->entry.address))
		map4(&any.address, 0);
	return bpf_map_lookup_elem(&frontends, &any);
}

/*
 * Whether a packet's destination is a backend, on this node, of the entry that the packet tells of, which is one whose clients
 * are answered so and lets this one in: nobody is to have a pod answer by an address of his choice.
 */
__noinline int believes(const struct packet *p, const struct end *entry)
{
	struct frontend *f;
	struct question *q;
	union slot *s;

	if (!p || !entry)
		return false;
	q = ask(p, FROM_OUTSIDE);
	if (!q)
		return false;
	q->backend = q->entry;
	q->entry.address = entry->address;
	q->entry.port = entry->port;
	f = find_told(q);
	if (!f || !(f->direct & FROM_OUTSIDE))
		return false;
	s = backend_of(q, f, &q->backend);
	return s && s->backend.weight & LOCAL;
}

/* Learns what entry a client asked another node, to answer the client from here, and lets its packet on as the client sent it. */
__noinline int learn(struct __sk_buff *skb, struct packet *p, const struct end *entry)
{
	struct way *held, w = {.state = REPLIES | LEARNT};
	bool same, answered;
	struct tuple back;

	if (!p || !entry)
		return TC_ACT_SHOT;
	back_of(&back, p);
	w.to = *entry;
	w.seen = p->now;
	held = bpf_map_lookup_elem(&sources, &back);
	same = held && held->state & LEARNT && held->to.port == entry->port && equal(&held->to.address, &entry->address);
	answered = held && p->tuple.protocol == IPPROTO_TCP && held->state & ANSWERED && !is_over(held, p);
	if (same && (answered || !opens(p))) {
		held->seen = w.seen;
	} else if (answered) { /* the backend's socket has this very connection */
		count(FORGED);
		return TC_ACT_SHOT;
	} else if (!put(&sources, &back, &w)) {
		return TC_ACT_SHOT;
	}
	note(&ports, back.from, USE_BACKEND);
	return drop_told(skb, p) ? TCX_NEXT : TC_ACT_SHOT;
}

#define UNTOLD -2 /* of hear: the packet tells of no entry that is believed */

/* Takes a packet that tells what its client asked another node. */
__noinline int hear(struct __sk_buff *skb, struct packet *p)
{
	struct end entry;

	return p && read_told(skb, p, &entry) && leads_to_nodes(skb) && believes(p, &entry) ? learn(skb, p, &entry) : UNTOLD;
}

/* The address by which this node reaches a packet's destination through the device that it leaves by. */
static __always_inline bool own_address(struct __sk_buff *skb, const struct packet *p, struct address *a)
{
	struct bpf_fib_lookup f = {.family = p->six ? AF_INET6 : AF_INET, .l4_protocol = p->tuple.protocol, .ifindex = skb->ifindex};
	long result;

	if (p->six)
		__builtin_memcpy(f.ipv6_dst, &p->tuple.destination, sizeof(f.ipv6_dst));
	else
		f.ipv4_dst = p->tuple.destination.word[3];
	result = bpf_fib_lookup(skb, &f, sizeof(f), BPF_FIB_LOOKUP_OUTPUT | BPF_FIB_LOOKUP_SKIP_NEIGH | BPF_FIB_LOOKUP_SRC);
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return false;
	if (p->six) {
		__builtin_memcpy(a, f.ipv6_src, sizeof(*a));
		return !zero(a);
	}
	map4(a, f.ipv4_src);
	return f.ipv4_src;
}

/*
 * Hides a client behind an address of this node and a random port that is free: that no other flow to that backend has, be it
 * conntrack's, and no socket of the node. Were it the client's own port, a socket of the node may have had that a moment ago, and
 * the backend, in TIME_WAIT, would not accept the client's SYN.
 */
__noinline int hide(struct __sk_buff *skb, const struct packet *p, const struct way *w)
{
	struct way back = {}, out;
	struct tuple t;
	int i;

	if (!p || !w)
		return false;
	out = *w;
	out.state &= ~(UNHIDDEN | OURS);
	__builtin_memset(&out.from, 0, sizeof(out.from));
	if (!own_address(skb, p, &out.to.address)) {
		count(NO_ADDRESS);
		return false;
	}
	back.seen = p->now;
	back.to = w->state & OURS ? w->to : end_of(&p->tuple.source, p->tuple.from);
	back.from = w->from;
	back.state = w->state & (OURS | UNASSURED | HIDDEN);
	back_of(&t, p);
	t.destination = out.to.address;
	for (i = 0; i < TRIES; i++) {
		struct way *held;

		out.to.port = bpf_htons(LOWEST + bpf_get_prandom_u32() % (65536 - LOWEST));
		t.to = out.to.port;
		held = bpf_map_lookup_elem(&destinations, &t);
		if (held && !over(held) && !expired(held, p))
			continue;
		if (heard(skb, &t, p->six) || translation(skb, &t, p->six))
			continue;
		if (held)
			bpf_map_delete_elem(&destinations, &t);
		if (bpf_map_update_elem(&destinations, &t, &back, BPF_NOEXIST))
			continue;
		note(&ports, out.to.port, USE_TAKEN);
		return put(&sources, &p->tuple, &out);
	}
	count(NO_PORT);
	return false;
}

/* Whether a packet may be its flow's first, of those that only the first need be looked at for. */
static __always_inline bool begins(const struct packet *p)
{
	return !p->inner && (p->tuple.protocol == IPPROTO_UDP || opens(p));
}

/*
 * Whether a socket of the node, or a client that other rules masquerade, uses a port behind which a client is hidden already,
 * to the same backend. Then it is given another port there. If the client's flow is over, the port is free.
 */
__noinline int clashes(const struct packet *p)
{
	struct way *held, w = {.state = UNHIDDEN};
	struct uses *u = uses(&ports);
	struct tuple back;

	if (!p || !u || !(u->of[p->tuple.from] & EITHER(USE_TAKEN)))
		return false;
	back_of(&back, p);
	held = bpf_map_lookup_elem(&destinations, &back);
	if (!held)
		return false;
	if (over(held) || expired(held, p)) {
		bpf_map_delete_elem(&destinations, &back);
		return false;
	}
	if (held->state & OURS)
		return false;
	w.seen = p->now;
	return put(&sources, &p->tuple, &w);
}

/* Has an error about a packet too long that told of its entry leave room for that: the client's own is so much shorter. */
__noinline int narrow(struct __sk_buff *skb, const struct packet *p)
{
	struct icmp i;
	__u32 mtu;

	if (!p || bpf_skb_load_bytes(skb, p->transport, &i, sizeof(i)) || bpf_ntohl(i.rest) <= size_of_told(p) ||
	    (p->six ? i.type != ICMPV6_PKT_TOOBIG : i.type != ICMP_DEST_UNREACH || i.code != ICMP_FRAG_NEEDED))
		return 0;
	mtu = bpf_htonl(bpf_ntohl(i.rest) - size_of_told(p));
	bpf_l4_csum_replace(skb, p->transport + offsetof(struct icmp, check), i.rest, mtu, 4);
	bpf_skb_store_bytes(skb, p->transport + offsetof(struct icmp, rest), &mtu, sizeof(mtu), 0);
	return 0;
}

/*
 * Whether a packet without MARK is of no flow, though its ends are those of a way of a flow whose client is hidden. Somebody takes the
 * flow's MARK from it if its packets come in and none with one was here for a while.
 */
__noinline int foreign(const struct packet *p, struct way *w)
{
	struct end source;
	struct way *other;
	struct tuple t;

	if (!p || !w || (w->state & (MARKED | BARED)) != MARKED)
		return false;
	back_of(&t, p);
	other = bpf_map_lookup_elem(&sources, &t);
	if (other) {
		source = other->state & ALIAS ? other->from : end_of(&p->tuple.source, p->tuple.from);
		from_to(&t, &source, &other->to, p->tuple.protocol);
		other = bpf_map_lookup_elem(&destinations, &t);
	}
	if (other && other->seen <= w->seen + NEWS)
		return true;
	mark(w, BARED);
	return false;
}

/* Changes where a packet comes from: a backend that answers, or a client that is hidden. */
__noinline int outward(struct __sk_buff *skb, struct packet *p, int own, int marked)
{
	struct end to, client;
	struct tuple back;
	__u32 now, alias, told;
	struct way *w;
	bool news;

	if (!p)
		return TCX_NEXT;
	w = bpf_map_lookup_elem(&sources, &p->tuple);
	if (own && !marked && begins(p) && (!w || w->state & HIDDEN)) { /* to the backend itself */
		forget(p);
		w = bpf_map_lookup_elem(&sources, &p->tuple);
	}
	/* At a port, a packet whose client was hidden at the device above would seem to clash with itself. */
	if (!w && !p->inner && (own || begins(p)) && !at_port(skb) && clashes(p))
		w = bpf_map_lookup_elem(&sources, &p->tuple);
	if (!w || expired(w, p))
		return TCX_NEXT;
	if (!marked && !own && !p->inner && foreign(p, w))
		return TCX_NEXT;
	if (w->state & UNHIDDEN) {
		if (p->inner)
			return TCX_NEXT;
		if (!hide(skb, p, w))
			return TC_ACT_SHOT;
		w = bpf_map_lookup_elem(&sources, &p->tuple);
		if (!w)
			return TC_ACT_SHOT;
	}
	to = w->to;
	client = w->from;
	alias = w->state & ALIAS;
	set(skb, p, &to, false);
	if (alias)
		set(skb, p, &client, true);
	if (direct && p->inner && w->state & DIRECT)
		narrow(skb, p);
	if (p->inner)
		return TCX_NEXT;
	if (marked && w->state & HIDDEN)
		mark(w, MARKED);
	now = p->now;
	news = w->seen + NEWS <= now;
	if ((w->state & (ANSWERED | CLIENT_UNACKED)) != ANSWERED || news || p->flags & (FIN | RST) ||
	    (w->state & (ENDED | ACKED)) == ENDED) {
		back_of(&back, p);
		told = w->state & REPLIES ? ANSWERED : 0;
		if (told && news && p->flags & DATA)
			told |= BACKEND_UNACKED;
		answer(&back, p, told);
		unmark(w, CLIENT_UNACKED);
		mark(w, ANSWERED);
	}
	live(w, p, ENDS);
	if (unlikely(w->state & UNASSURED))
		establish_source(w, p);
	if (w->seen != now)
		w->seen = now;
	return TCX_NEXT;
}

/* What a look at a packet shows without an extra look-up: is it worth one? */
enum glance { NOTHING, INWARD = 1, OUTWARD = 2, OPENS = 4, ODD_ONE = 8, AS_IS = 16 /* nor where it leaves */ };

/* Whether frontends or clients' ways are at an address, by the exclusive or of its words: if only by its hash. */
static __noinline bool at_address(__be32 words)
{
	struct uses *u = uses(&addresses);

	return u && u->of[short_hash(words)] & (USE_ENTRY | EITHER(USE_ASKED));
}

static __always_inline __be32 words_of(void *ip, bool is6)
{
	struct in6_addr *a = &((struct ipv6hdr *)ip)->daddr;

	if (!is6)
		return bpf_htonl(0xffff) ^ ((struct iphdr *)ip)->daddr;
	return a->in6_u.u6_addr32[0] ^ a->in6_u.u6_addr32[1] ^ a->in6_u.u6_addr32[2] ^ a->in6_u.u6_addr32[3];
}

/* The part of an address by which the networks of Services are told from most others. */
static __always_inline __be32 network_of(void *ip, bool is6)
{
	struct in6_addr *a = &((struct ipv6hdr *)ip)->daddr;

	if (!is6)
		return ((struct iphdr *)ip)->daddr & bpf_htonl(0xffff0000);
	return a->in6_u.u6_addr32[0] ^ a->in6_u.u6_addr32[1];
}

/* Whether a plain packet opens a flow to an address that only Services have, if only by its hash. */
static __always_inline bool asks_services(void *ip, void *end, struct udphdr *ports_of, bool is6)
{
	__u8 protocol = is6 ? ((struct ipv6hdr *)ip)->nexthdr : ((struct iphdr *)ip)->protocol;
	struct tcphdr *tcp = (void *)ports_of;
	struct uses *u;

	if (protocol == IPPROTO_TCP && ((void *)(tcp + 1) > end || !tcp->syn || tcp->ack))
		return false;
	u = uses(&addresses);
	return u && (u->of[short_hash(words_of(ip, is6))] & USE_ENTRY || u->of[short_hash(network_of(ip, is6))] & USE_SERVICES);
}

/* Whether a packet's destination, whose port has that use, may be an entry. */
static __always_inline bool enters(__u32 use, void *ip, bool is6)
{
	return unlikely(use & (USE_ENTRY | EITHER(USE_ASKED))) && (use & USE_ANY || at_address(words_of(ip, is6)));
}

static __always_inline __u32 by_ends(void *ip, const struct udphdr *ports_of, bool is6, bool in, bool own)
{
	struct uses *u = uses(&ports);
	__u32 use, from, may = NOTHING;

	if (!u)
		return NOTHING;
	use = u->of[ports_of->dest];
	if (in) {
		if (use & EITHER(USE_TAKEN) || enters(use, ip, is6))
			may = INWARD;
		if (use & EITHER(USE_BACKEND))
			may |= OPENS;
		return may || use & EITHER(USE_HIDDEN) || u->of[ports_of->source] & EITHER(USE_BACKEND) ? may : AS_IS;
	}
	if (own && enters(use, ip, is6))
		may = INWARD;
	from = u->of[ports_of->source];
	return use & EITHER(USE_HIDDEN) || from & EITHER(USE_BACKEND) || (own && from & USE_ANY) ? may | OUTWARD : may;
}

/* What a plain packet's ends say; if that is anything, reads it. ODD_ONE where it isn't so plain. */
static __always_inline __u32 glance_plain(struct packet *p, void *ip, void *end, struct udphdr *ports_of, bool is6, bool in, bool own)
{
	__u32 may = by_ends(ip, ports_of, is6, in, own);

	if (!(may & INWARD) && (in || own) && asks_services(ip, end, ports_of, is6))
		may = (may & ~AS_IS) | INWARD;
	return likely(!(may & ~AS_IS)) || read_plain(p, ip, end, ports_of, is6) ? may : ODD_ONE;
}

/* Tells at little cost why a packet may be ours, and reads it then. All that is out of the ordinary may be. */
static __always_inline __u32 glance(struct __sk_buff *skb, struct packet *p, bool in, bool own)
{
	void *ip = (void *)(long)skb->data + head, *end = (void *)(long)skb->data_end;
	struct udphdr *ports_of;
	__u32 may = ODD_ONE;
	enum kind kind;

	if (skb->vlan_present)
		return NOTHING; /* the VLAN's own device will see it */
	kind = kind_of(skb, ip, end, &ports_of);
	if (kind == FOREIGN)
		return NOTHING;
	if (kind == PLAIN4)
		may = glance_plain(p, ip, end, ports_of, false, in, own);
	if (kind == PLAIN6)
		may = glance_plain(p, ip, end, ports_of, true, in, own);
	if (may != ODD_ONE)
		return may;
	return read_packet(skb, p) ? INWARD | OUTWARD | OPENS : NOTHING;
}

SEC("tcx/ingress")
int arrive(struct __sk_buff *skb)
{
	struct packet p;
	__u32 may = glance(skb, &p, true, false);
	int result;

	if (likely(may == AS_IS))
		return head ? shortcut(skb) : TCX_NEXT;
	if (!may)
		return TCX_NEXT;
	if (direct && !p.inner) {
		result = hear(skb, &p);
		if (result != UNTOLD)
			return result;
	}
	/* What a port has translated comes in again by the device above: it begins nothing. */
	if (may & OPENS && skb->tc_index != MARK && begins(&p))
		forget(&p);
	if (!(may & INWARD))
		return TCX_NEXT;
	result = inward(skb, &p, false);
	return result == FIRST ? serve(skb, &p, false) : result;
}

SEC("tcx/egress")
int leave(struct __sk_buff *skb)
{
	bool own = !skb->ingress_ifindex, marked = skb->tc_index == MARK;
	struct packet p;
	__u32 may = glance(skb, &p, false, own);
	int result;

	if (marked)
		skb->tc_index = 0;
	if (!may)
		return TCX_NEXT;
	if (own && may & INWARD) {
		result = inward(skb, &p, true);
		if (result == FIRST)
			result = serve(skb, &p, true);
		if (result != TCX_NEXT)
			return result;
	}
	if (own && p.tuple.protocol == IPPROTO_UDP && !p.inner)
		note_node_udp(skb, &p);
	return may & OUTWARD ? outward(skb, &p, own, marked) : TCX_NEXT;
}
