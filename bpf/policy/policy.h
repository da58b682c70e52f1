/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Network policies: the maps that the agent writes, the flows of accepted connections, and the function that decides
 * about a packet, whatever hook sees it.
 *
 * A packet of a known flow costs one lookup. The first packet of a connection is evaluated for the egress of its
 * source, then for the ingress of its destination, as far as each is a pod of this node (a subject): by stage, the
 * destination port leads to a peer table, the other end's address to an identity, and both to a decision.
 */
#pragma once

#include "ip.h"

/* What a stage decides: model.Verdict, and DECISION_REPORT. */
enum decision {
	DECISION_ACCEPT,
	DECISION_DROP,
	DECISION_NEXT,
	DECISION_REPORT = 1 << 2, /* audited policies would drop it */
};

/* A peer table, and what it decides about peers without a decision of their own. */
struct peer_table {
	__u64 id;
	__u32 otherwise; /* enum decision */
	__u32 flags;	 /* of a side: enum side_flag */
};

enum side_flag {
	SIDE_DECIDES = 1 << 0, /* there is a ruleset */
	SIDE_PORTS = 1 << 1,   /* it has entries in fl_policy_ports */
	SIDE_RANGES = 1 << 2,  /* it has entries in fl_port_ranges */
};

/* A ruleset of a subject, and the peer table for the ports that no entry covers. */
struct side {
	__u64 ruleset;
	struct peer_table default_table;
};

#define POLICY_STAGES 2

/* A pod's address on this node. */
struct subject {
	struct side out[POLICY_STAGES], in[POLICY_STAGES];
	__u64 device[2]; /* the name of the only one by which packets of this source enter, 0: not known */
};

/* The name of a device, a key of fl_devices: one pod's alone. */
struct device_name {
	__u64 word[2];
};

/* What may come in by such a device: all else is forged. */
struct device_sources {
	struct address first[2]; /* an address of IPv4, and one of IPv6 */
	__u32 flags;		 /* enum device_flag */
};

enum device_flag {
	DEVICE_IPV4 = 1 << 0, /* first[0] is set */
	DEVICE_IPV6 = 1 << 1, /* first[1] is set */
	DEVICE_MORE = 1 << 2, /* there are others, in fl_sources */
};

/* A key of fl_sources. */
struct device_net {
	__u32 length; /* of 288: the prefix covers the device and the family, then bits of the address */
	__u32 device[4];
	__u32 family; /* 4 or 6 */
	struct address address;
};

struct policy_port {
	__u64 ruleset;
	__be16 port;
	__u8 protocol;
	__u8 zero[5];
};

/* A key of fl_port_ranges: the prefix covers the ruleset and the protocol, then bits of the port. */
struct port_range {
	__u32 length; /* of 96 */
	__u32 ruleset[2];
	__u8 protocol;
	__u8 zero;
	__be16 port;
};

/* A key of the maps of prefixes. The family keeps a prefix of IPv6 from matching addresses of IPv4. */
struct peer_net {
	__u32 length; /* of 160 */
	__u32 family; /* 4 or 6 */
	struct address address;
};

struct peer_verdict {
	__u64 table, identity;
};

/* Addresses that aren't evaluated. */
enum exempt_flag {
	EXEMPT_NODE = 1 << 0,	      /* as a source of no device, and as a destination for ingress: the node's own */
	EXEMPT_UNTRANSLATED = 1 << 1, /* as a destination, delivered to the node: evaluated after translation */
};

struct policy_state {
	__u32 generation;    /* incremented when facts have changed: flows are evaluated again */
	__u32 flags;	     /* enum policy_flag */
	__u64 install_until; /* nanoseconds since boot: until then, connections from before the programs are picked up
			      */
};

enum policy_flag {
	POLICY_CUT = 1 << 0, /* flows that are no longer allowed are cut */
	POLICY_WRITING =
		1 << 1, /* peers and rulesets are changing: a decision by default isn't trusted for a known peer */
	POLICY_CHANGING = 1 << 2, /* entries are being written: what is decided meanwhile isn't final */
	POLICY_SOURCES = 1 << 3,  /* fl_devices has entries */
	POLICY_AGAIN = 1 << 31,	  /* of an evaluation: there was one before, of the same packet */
};

/* An accepted connection, in fl_flows by its tuple, whose source is the lower end: see flow_key(). */
struct policy_flow {
	__u32 generation; /* at which it was evaluated */
	__u32 seen;	  /* at policy_now() */
	__u32 state;	  /* enum flow_state */
	__u32 device[2];  /* the indexes of those by which packets of the key's source and destination came in last */
};

enum flow_state {
	FLOW_REVERSED = 1 << 0, /* the first packet came from the key's destination */
	FLOW_REPLIED = 1 << 1,
	FLOW_FIN = 1 << 2, /* of its source */
	FLOW_FIN_REPLY = 1 << 3,
	FLOW_RESET = 1 << 4,
	FLOW_TO_NODE = 1 << 5, /* to the node itself: there is no ingress */
	FLOW_OLDER = 1 << 6,   /* began before the program was attached: it is evaluated when that is long enough ago */
};

/* What happened to packets, counted by processor. */
enum policy_event {
	POLICY_DENIED,	    /* a new connection, by a decision */
	POLICY_AUDITED,	    /* accepted, and audited policies would drop it */
	POLICY_CUT_FLOW,    /* of a connection that is no longer allowed */
	POLICY_UNKNOWN_POD, /* from or to an address of this node's pods that no known pod has */
	POLICY_FORGED,	    /* from a pod's address by another device, or by a pod's device from another address */
	POLICY_UNPARSED,    /* of or to a pod with policies: not understood, or a fragment before its first */
	POLICY_INCOMPLETE,  /* dropped since the maps are being written */
	POLICY_FLOW,	    /* a flow began */
	POLICY_REDIRECTED,  /* accepted where it entered, and redirected to its pod, bypassing the host stack */
	POLICY_UNLOGGED,    /* an event beyond the limit, or beyond the ring's capacity */
	POLICY_EVENTS,
};

/* A packet that was denied, or would be. */
struct denial {
	__u64 time;	       /* nanoseconds since boot */
	__u64 table, identity; /* that decided, 0: none */
	struct tuple tuple;    /* in the direction in which it was evaluated */
	__u8 event;	       /* enum policy_event */
	__u8 decision;
	__u8 ingress;
	__u8 stage;
	__u32 zero;
	__u64 device[2]; /* the name of that by which it came in, 0: not known */
};

/* Connections that are recorded: those that differ in the client's port alone are one. */
struct recorded_flow {
	struct address client, server;
	__be16 port; /* of the server; 0: the protocol has none */
	__u8 protocol;
	__u8 denied; /* by policies */
};

/* Indexes of fl_recording. */
enum recording {
	RECORDING_UNTIL, /* nanoseconds since boot */
	RECORDING_LOST,	 /* connections that fl_recorded had no space for */
	RECORDING_VALUES,
};

/* Limits of events, for the whole node. */
#define DENIALS_PER_SECOND 100
#define DENIALS_AT_ONCE 200

#define SUBJECT_MAP(name, kind, size, key_type, value_type)                                                            \
	struct {                                                                                                       \
		__uint(type, kind);                                                                                    \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                                                  \
		__uint(max_entries, size);                                                                             \
		__type(key, key_type);                                                                                 \
		__type(value, value_type);                                                                             \
	} name SEC(".maps")

/* Sizes are the agent's: see maps.go. */
SUBJECT_MAP(fl_subjects, BPF_MAP_TYPE_HASH, 1 << 12, struct address, struct subject);
SUBJECT_MAP(fl_policy_ports, BPF_MAP_TYPE_HASH, 1 << 16, struct policy_port, struct peer_table);
SUBJECT_MAP(fl_port_ranges, BPF_MAP_TYPE_LPM_TRIE, 1 << 16, struct port_range, struct peer_table);
SUBJECT_MAP(fl_peers, BPF_MAP_TYPE_HASH, 1 << 16, struct address, __u64);
SUBJECT_MAP(fl_peer_nets, BPF_MAP_TYPE_LPM_TRIE, 1 << 16, struct peer_net, __u64);
SUBJECT_MAP(fl_verdicts, BPF_MAP_TYPE_HASH, 1 << 16, struct peer_verdict, __u32);
SUBJECT_MAP(fl_exempt, BPF_MAP_TYPE_LPM_TRIE, 1 << 12, struct peer_net, __u32);
SUBJECT_MAP(fl_unknown_pods, BPF_MAP_TYPE_LPM_TRIE, 1 << 12, struct peer_net, __u32);
SUBJECT_MAP(fl_devices, BPF_MAP_TYPE_HASH, 1 << 12, struct device_name, struct device_sources);
SUBJECT_MAP(fl_sources, BPF_MAP_TYPE_LPM_TRIE, 1 << 16, struct device_net, __u32);

SUBJECT_MAP(fl_recorded, BPF_MAP_TYPE_HASH, 1 << 15, struct recorded_flow, __u64);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RECORDING_VALUES);
	__type(key, __u32);
	__type(value, __u64);
} fl_recording SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 17);
	__type(key, struct tuple);
	__type(value, struct policy_flow);
} fl_flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct policy_state);
} fl_policy_state SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, POLICY_EVENTS);
	__type(key, __u32);
	__type(value, __u64);
} fl_policy_count SEC(".maps");

/* Indexes of fl_lookups. */
enum lookup_count {
	LOOKUPS,
	LOOKUPS_PACKETS, /* that were evaluated, or found their flow */
	LOOKUPS_VALUES,
};

/* By processor. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LOOKUPS_VALUES);
	__type(key, __u32);
	__type(value, __u64);
} fl_lookups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
} fl_denials SEC(".maps");

/* When the next event is due, were they evenly spread: nanoseconds since boot. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} fl_denial_due SEC(".maps");

/* A packet to decide about. */
struct policy_packet {
	struct tuple tuple;  /* ports are those of TCP, UDP and SCTP, or stand for the ID of an echo */
	struct tuple quoted; /* by an ICMP error */
	__u32 flags;	     /* of TCP; of SCTP, SYN stands for INIT */
	__u32 kind;	     /* enum packet_kind */
	__u32 to_node;	     /* it is for the node itself */
	__u32 ifindex;	     /* of the device by which it entered, 0: it is the node's own */
	__u64 device[2];     /* that device's name */
};

enum packet_kind {
	PACKET_FLOW,	   /* of a flow, or opens one */
	PACKET_ECHO_REPLY, /* of a flow: opens none */
	PACKET_ERROR,	   /* an ICMP error about a packet of a flow */
	PACKET_SINGLE,	   /* begins no flow: any other of ICMP */
	PACKET_UNPARSED,   /* tuple has its addresses alone */
	PACKET_EXEMPT,	   /* neighbour discovery */
};

enum policy_result {
	POLICY_ACCEPT,
	POLICY_IGNORE, /* accept: no end is a pod of this node */
	POLICY_DROP,
	POLICY_REVOKED, /* drop, and the connection may be reset: it isn't allowed any more */
};

/* An evaluation. */
struct evaluation {
	struct tuple tuple; /* of the connection's first packet */
	__u64 device[2];    /* by which that entered, 0: not known */
	__u32 to_node;
	__u32 flags;	/* of the state, and POLICY_AGAIN */
	__u32 event;	/* POLICY_DENIED, or POLICY_CUT_FLOW; POLICY_EVENTS: nothing is reported */
	__u64 elements; /* which elements of maps were found: their addresses, mixed */
	/* What decided: */
	__u64 table, identity;
	__u16 decision;
	__u8 stage, ingress;
};

const volatile __u32 count_lookups = 0; /* set at load time: 1 for measurements */

/* Not on the stack, which is full. */
const volatile __u32 lookups_key = LOOKUPS, packets_key = LOOKUPS_PACKETS;

static __always_inline void count_lookup(const volatile __u32 *what)
{
	__u64 *n = count_lookups ? bpf_map_lookup_elem(&fl_lookups, (const void *)what) : NULL;

	if (n)
		*n += 1;
}

/* Looks a key up in a map of keys: arrays are read in place, and don't count. */
static __always_inline void *lookup(void *map, const void *key)
{
	count_lookup(&lookups_key);
	return bpf_map_lookup_elem(map, key);
}

/* Looks a key up for an evaluation, which notes what it found. */
static __always_inline void *find(struct evaluation *e, void *map, const void *key)
{
	void *value = lookup(map, key);
	__u64 before = e->elements;

	*(void *volatile *)&e->elements = value;
	e->elements = (before + *(volatile __u64 *)&e->elements) * 0x9e3779b97f4a7c15; /* 2^64 / golden ratio */
	return value;
}

static __always_inline void count_event(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&fl_policy_count, &what);

	if (n)
		*n += 1;
}

/* Returns whether an event is within the limit: the generic cell rate algorithm (ITU-T I.371). */
static __always_inline bool may_log(__u64 now)
{
	const __u64 each = SECOND / DENIALS_PER_SECOND;
	__u32 first = 0;
	__u64 *due = bpf_map_lookup_elem(&fl_denial_due, &first), was, next;

	if (!due)
		return false;
	was = *(volatile __u64 *)due;
	next = was > now ? was : now;
	if (next - now > each * (DENIALS_AT_ONCE - 1))
		return false;
	return __sync_val_compare_and_swap(due, was, next + each) == was;
}

/* Counts an event and reports it, if that is within the limit. */
__noinline int policy_log(struct evaluation *e, __u32 event)
{
	__u64 now = bpf_ktime_get_ns();
	struct denial *d;

	if (!e || e->event == POLICY_EVENTS)
		return 0;
	count_event(event);
	d = may_log(now) ? bpf_ringbuf_reserve(&fl_denials, sizeof(*d), 0) : NULL;
	if (!d) {
		count_event(POLICY_UNLOGGED);
		return 0;
	}
	__builtin_memset(d, 0, sizeof(*d));
	d->time = now;
	d->table = e->table;
	d->identity = e->identity;
	d->tuple = e->tuple;
	d->device[0] = e->device[0];
	d->device[1] = e->device[1];
	d->event = event;
	d->decision = e->decision;
	d->ingress = e->ingress;
	d->stage = e->stage;
	bpf_ringbuf_submit(d, 0);
	return 0;
}

static __always_inline struct policy_state *policy_state(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&fl_policy_state, &first);
}

static __always_inline void net_key(struct peer_net *k, const struct address *a)
{
	k->length = 160;
	k->family = is_ipv4(a) ? 4 : 6;
	k->address = *a;
}

/* Returns an enum exempt_flag of an address, 0: none. */
__noinline __u32 exemptions(struct evaluation *e, const struct address *a)
{
	struct peer_net key;
	__u32 *flags;

	if (!e || !a)
		return 0;
	net_key(&key, a);
	flags = find(e, &fl_exempt, &key);
	return flags ? *flags : 0;
}

/* Returns whether an address is within those of this node's pods. */
__noinline int is_unknown_pod(struct evaluation *e, const struct address *a)
{
	struct peer_net key;

	if (!e || !a)
		return true;
	net_key(&key, a);
	return !!find(e, &fl_unknown_pods, &key);
}

/* Returns the identity of an address, 0 where no peer table knows it. */
__noinline __u64 identity_of(struct evaluation *e, const struct address *a)
{
	__u64 *identity;
	struct peer_net key;

	if (!e || !a)
		return 0;
	identity = find(e, &fl_peers, a);
	if (!identity) {
		net_key(&key, a);
		identity = find(e, &fl_peer_nets, &key);
	}
	return identity ? *identity : 0;
}

static __always_inline bool has_ports(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP;
}

/* Returns the peer table for a destination port: that of its entry, else the default. */
static __always_inline const struct peer_table *table_at(struct evaluation *e, const struct side *s)
{
	const struct peer_table *found = NULL;
	const struct tuple *t = &e->tuple;

	if (!has_ports(t->protocol))
		return &s->default_table;
	if (s->default_table.flags & SIDE_PORTS) {
		struct policy_port key = {.ruleset = s->ruleset, .port = t->dport, .protocol = t->protocol};

		found = find(e, &fl_policy_ports, &key);
	}
	if (!found && s->default_table.flags & SIDE_RANGES) {
		struct port_range key = {.length = 96, .port = t->dport, .protocol = t->protocol};

		__builtin_memcpy(key.ruleset, &s->ruleset, sizeof(key.ruleset));
		found = find(e, &fl_port_ranges, &key);
	}
	return found ? found : &s->default_table;
}

/* Evaluates one stage. Returns an enum decision without DECISION_REPORT. */
__noinline int evaluate_stage(struct evaluation *e, const struct side *s)
{
	const struct peer_table *table;
	struct peer_verdict key = {};
	__u32 *own = NULL;

	if (!e || !s || !(s->default_table.flags & SIDE_DECIDES))
		return DECISION_NEXT;
	table = table_at(e, s);
	e->table = table->id;
	e->decision = table->otherwise;
	if (e->identity) {
		key.table = table->id;
		key.identity = e->identity;
		own = find(e, &fl_verdicts, &key);
	}
	if (own)
		e->decision = *own;
	else if (e->flags & POLICY_WRITING && e->identity && e->decision != DECISION_DROP) {
		policy_log(e, POLICY_INCOMPLETE);
		e->event = POLICY_EVENTS;
		return DECISION_DROP;
	}
	if (e->decision & DECISION_REPORT && !(e->flags & POLICY_AGAIN))
		policy_log(e, POLICY_AUDITED);
	return e->decision & ~DECISION_REPORT;
}

/* Evaluates one direction. Returns whether it is accepted. */
static __always_inline bool evaluate_direction(struct evaluation *e, const struct side *sides, bool ingress)
{
	int d = DECISION_NEXT;

	if (!((sides[0].default_table.flags | sides[1].default_table.flags) & SIDE_DECIDES))
		return true;
	e->ingress = ingress;
	e->identity = identity_of(e, ingress ? &e->tuple.source : &e->tuple.destination);
	e->stage = 0;
	d = evaluate_stage(e, &sides[0]);
	if (d == DECISION_NEXT) {
		e->stage = 1;
		d = evaluate_stage(e, &sides[1]);
	}
	if (d != DECISION_DROP || (ingress && exemptions(e, &e->tuple.destination) & EXEMPT_NODE))
		return true;
	policy_log(e, e->event);
	return false;
}

/* Drops a packet for something else than a decision. */
static __always_inline int drop_for(struct evaluation *e, __u32 event)
{
	e->table = e->identity = 0;
	e->decision = DECISION_DROP;
	policy_log(e, event);
	return POLICY_DROP;
}

/*
 * Returns whether a packet is what IPv6 sends by itself to groups on the link, such as reports of its own groups: from
 * a link-local address, or from none.
 */
static __always_inline bool is_link_multicast(const struct tuple *t)
{
	const struct address *a = &t->source;
	bool none = !(a->word[0] | a->word[1] | a->word[2] | a->word[3]);

	return (none || (a->word[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000)) &&
	       (t->destination.word[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000);
}

/* Returns whether a packet came in by a pod's own device from an address that it doesn't admit, and counts that. */
__noinline int is_forged(const struct policy_packet *p)
{
	struct evaluation e = {};
	struct device_sources *d;
	struct device_name name;
	bool six;

	if (!p)
		return true;
	name.word[0] = p->device[0];
	name.word[1] = p->device[1];
	d = lookup(&fl_devices, &name);
	if (!d)
		return false;
	six = !is_ipv4(&p->tuple.source);
	if (d->flags & (six ? DEVICE_IPV6 : DEVICE_IPV4) &&
	    addr_equal(six ? &d->first[1] : &d->first[0], &p->tuple.source))
		return false;
	if (d->flags & DEVICE_MORE) {
		struct device_net key = {.length = 288, .family = six ? 6 : 4, .address = p->tuple.source};

		__builtin_memcpy(key.device, &name, sizeof(key.device));
		if (lookup(&fl_sources, &key))
			return false;
	}
	if (is_link_multicast(&p->tuple))
		return true;
	e.tuple = p->tuple;
	e.device[0] = name.word[0];
	e.device[1] = name.word[1];
	drop_for(&e, POLICY_FORGED);
	return true;
}

/* Returns whether a packet has the address of a pod with a known device, came in by another one, and counts that. */
__noinline int is_elsewhere(const struct policy_packet *p)
{
	struct evaluation e = {};
	struct subject *from;

	if (!p)
		return true;
	from = lookup(&fl_subjects, &p->tuple.source);
	if (!from || !from->device[0] || (p->device[0] == from->device[0] && p->device[1] == from->device[1]))
		return false;
	e.tuple = p->tuple;
	e.device[0] = p->device[0];
	e.device[1] = p->device[1];
	drop_for(&e, POLICY_FORGED);
	return true;
}

/*
 * Returns whether a packet's source isn't one of the device that it came in by. What begins a flow is evaluated for the
 * second reason by itself.
 */
static __always_inline bool has_forged_source(const struct policy_packet *p, const struct policy_state *s, bool of_flow)
{
	return s->flags & POLICY_SOURCES && p->ifindex && (is_forged(p) || (of_flow && is_elsewhere(p)));
}

/* Evaluates the first packet of a connection once. Returns an enum policy_result. */
__noinline int evaluate_once(struct evaluation *e)
{
	struct subject *from, *to;
	bool from_unknown, to_unknown;
	__u32 exempt;

	if (!e)
		return POLICY_DROP;
	from = find(e, &fl_subjects, &e->tuple.source);
	to = e->to_node ? NULL : find(e, &fl_subjects, &e->tuple.destination);
	from_unknown = !from && is_unknown_pod(e, &e->tuple.source);
	to_unknown = !to && !e->to_node && is_unknown_pod(e, &e->tuple.destination);
	e->stage = e->ingress = 0;
	if (!from && !to && !from_unknown && !to_unknown)
		return POLICY_IGNORE;
	if (from && e->device[0] && from->device[0] &&
	    (e->device[0] != from->device[0] || e->device[1] != from->device[1]))
		return drop_for(e, POLICY_FORGED);
	exempt = to ? 0 : exemptions(e, &e->tuple.destination); /* of a pod's: asked before it is denied */
	if ((e->to_node && exempt & EXEMPT_UNTRANSLATED) ||
	    (!e->device[0] && exemptions(e, &e->tuple.source) & EXEMPT_NODE))
		return POLICY_ACCEPT;
	if (from_unknown)
		return drop_for(e, POLICY_UNKNOWN_POD);
	if (from && !evaluate_direction(e, from->out, false))
		return POLICY_DROP;
	if (e->to_node || exempt & EXEMPT_NODE)
		return POLICY_ACCEPT;
	e->ingress = true;
	if (to_unknown)
		return drop_for(e, POLICY_UNKNOWN_POD);
	return !to || evaluate_direction(e, to->in, true) ? POLICY_ACCEPT : POLICY_DROP;
}

/* How often at most a connection is evaluated. */
enum { EVALUATIONS = 4 };

/*
 * Evaluates the first packet of a connection. Returns an enum policy_result. Nothing is accepted by a mixture of what
 * the maps held before and after: the kernel uses the memory of an element again once it is replaced
 * (kernel/bpf/memalloc.c), perhaps while it is read here. So the state must be the same after an evaluation as before,
 * and while entries are written, the next one must find the same elements: no write replaces one more than once.
 */
__noinline int evaluate_connection(struct evaluation *e)
{
	volatile struct policy_state *s = policy_state();
	__u32 generation, flags, again = 0;
	__u64 elements = 0;
	int i, result;

	if (!e || !s)
		return POLICY_DROP;
	for (i = 0; i < EVALUATIONS; i++) {
		generation = s->generation;
		flags = s->flags;
		e->flags = flags | again;
		e->elements = generation;
		result = evaluate_once(e);
		if (result == POLICY_DROP)
			return result;
		if (s->flags != flags || s->generation != generation)
			e->elements = 0;
		else if (likely(!(flags & POLICY_CHANGING)) || e->elements == elements)
			return result;
		elements = e->elements;
		again = POLICY_AGAIN;
	}
	return drop_for(e, POLICY_INCOMPLETE);
}

static __always_inline void reverse(struct tuple *to, const struct tuple *t)
{
	to->source = t->destination;
	to->destination = t->source;
	to->sport = t->dport;
	to->dport = t->sport;
	to->protocol = t->protocol;
	__builtin_memset(to->zero, 0, sizeof(to->zero));
}

static __always_inline int compare_words(__u32 a, __u32 b)
{
	return a < b ? -1 : a > b;
}

/* Returns whether a packet goes from the higher end to the lower one. */
static __always_inline bool goes_down(const struct tuple *t)
{
	int i, c = 0;

	for (i = 3; i >= 0 && !c; i--)
		c = compare_words(t->source.word[i], t->destination.word[i]);
	return c > 0 || (!c && t->sport > t->dport);
}

/* Sets the key of a packet's flow, which both directions share. Returns whether the packet goes down. */
static __always_inline bool flow_key(struct tuple *key, const struct tuple *t)
{
	bool down = goes_down(t);

	if (down)
		reverse(key, t);
	else
		*key = *t;
	return down;
}

const volatile __u32 ticks_per_second = 250; /* set at load time */

/* Returns the time since boot in 256 ticks. Netfilter's programs have no coarse clock in seconds, and others cost more.
 */
static __always_inline __u32 policy_now(void)
{
	return bpf_jiffies64() >> 8;
}

/* Returns for how many seconds a flow without packets is known: as connection tracking does by default. */
static __always_inline __u32 flow_timeout(const struct policy_flow *f, __u8 protocol)
{
	switch (protocol) {
	case IPPROTO_TCP:
		if (f->state & FLOW_RESET)
			return 10;
		return f->state & (FLOW_FIN | FLOW_FIN_REPLY) || !(f->state & FLOW_REPLIED) ? 120 : 5 * 24 * 3600;
	case IPPROTO_UDP:
		return f->state & FLOW_REPLIED ? 120 : 30;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return 30;
	case IPPROTO_SCTP:
		return 210;
	}
	return 600;
}

static __always_inline bool flow_alive(const struct policy_flow *f, __u8 protocol, __u32 now)
{
	return (__s32)(now - f->seen) <= (__s32)(flow_timeout(f, protocol) * ticks_per_second >> 8);
}

/* Records a packet of a flow. */
static __always_inline void touch_flow(struct policy_flow *f, const struct policy_packet *p, bool down, __u32 now)
{
	bool answer = down != !!(f->state & FLOW_REVERSED);
	__u32 state = f->state;

	if (answer)
		state |= FLOW_REPLIED;
	if (p->tuple.protocol == IPPROTO_TCP) {
		if (p->flags & FIN)
			state |= answer ? FLOW_FIN_REPLY : FLOW_FIN;
		if (p->flags & RST)
			state |= FLOW_RESET;
	}
	if (state != f->state)
		f->state = state;
	if (f->device[down] != p->ifindex)
		f->device[down] = p->ifindex;
	if (f->seen != now)
		f->seen = now;
}

static __always_inline bool is_recording(void)
{
	__u32 index = RECORDING_UNTIL;
	__u64 *until = bpf_map_lookup_elem(&fl_recording, &index);

	return unlikely(until && *until) && bpf_ktime_get_ns() < *until;
}

/* Returns whether a packet that begins a flow did so before, and had no answer since. */
static __always_inline bool is_sent_again(const struct tuple *t)
{
	struct policy_flow *f;
	struct tuple key;
	bool down = flow_key(&key, t);

	f = lookup(&fl_flows, &key);
	return f && flow_alive(f, key.protocol, policy_now()) && down == !!(f->state & FLOW_REVERSED) &&
	       !(f->state & (FLOW_REPLIED | FLOW_FIN | FLOW_RESET));
}

/* Counts a new connection, while they are recorded. */
__noinline int record_connection(const struct tuple *t, int denied)
{
	struct recorded_flow key = {.denied = denied};
	__u32 index = RECORDING_LOST;
	__u64 one = 1, *n;

	if (!t || !is_recording() || (!denied && is_sent_again(t)))
		return 0;
	key.client = t->source;
	key.server = t->destination;
	key.protocol = t->protocol;
	if (has_ports(t->protocol))
		key.port = t->dport;
	if (!bpf_map_update_elem(&fl_recorded, &key, &one, BPF_NOEXIST))
		return 0;
	n = lookup(&fl_recorded, &key);
	if (!n)
		n = bpf_map_lookup_elem(&fl_recording, &index);
	if (n)
		__sync_fetch_and_add(n, 1);
	return 0;
}

/* Makes a packet's flow known. */
__noinline int begin_flow(const struct policy_packet *p, __u32 generation, __u32 reversed, __u32 state)
{
	struct policy_flow f = {.generation = generation, .seen = policy_now(), .state = state};
	struct tuple key;
	bool down;

	if (!p)
		return 0;
	down = flow_key(&key, &p->tuple);
	if (down != reversed)
		f.state |= FLOW_REVERSED;
	if (down)
		f.device[1] = p->ifindex;
	else
		f.device[0] = p->ifindex;
	if (p->to_node)
		f.state |= FLOW_TO_NODE;
	bpf_map_update_elem(&fl_flows, &key, &f, BPF_ANY);
	count_event(POLICY_FLOW);
	return 0;
}

static __always_inline bool is_installing(const struct policy_state *s)
{
	return bpf_ktime_get_ns() < s->install_until;
}

/* The peer table of pods that are closed, since the kernel refused a part of what decides about them: model.Closed. */
enum { CLOSED_TABLE = 1 };

/*
 * Returns whether a drop was for what the policies of a generation decide: not for a pod that isn't known yet or is
 * closed, and not by entries that were being written meanwhile.
 */
static __always_inline bool is_decided(const struct evaluation *e, const struct policy_state *s, __u32 generation)
{
	return e->table && e->table != CLOSED_TABLE && e->event == POLICY_CUT_FLOW &&
	       !((e->flags | s->flags) & POLICY_CHANGING) && s->generation == generation;
}

/*
 * Evaluates a flow again, in the direction of its first packet. Returns POLICY_DROP or POLICY_REVOKED if it is no
 * longer allowed: the flow stays known, with its old generation, so that neither end can pick it up in the other
 * direction.
 */
__noinline int evaluate_again(const struct policy_packet *p, struct policy_flow *f, __u32 generation)
{
	struct evaluation e = {.event = POLICY_CUT_FLOW};
	struct policy_state *s = policy_state();

	if (!p || !f || !s)
		return POLICY_DROP;
	if (f->state & FLOW_OLDER && is_installing(s))
		return POLICY_ACCEPT;
	if (goes_down(&p->tuple) == !!(f->state & FLOW_REVERSED))
		e.tuple = p->tuple;
	else
		reverse(&e.tuple, &p->tuple);
	e.to_node = f->state & FLOW_TO_NODE;
	if (s->flags & POLICY_CUT && evaluate_connection(&e) == POLICY_DROP) {
		f->seen = policy_now();
		return is_decided(&e, s, generation) ? POLICY_REVOKED : POLICY_DROP;
	}
	f->generation = generation;
	f->state &= ~FLOW_OLDER;
	f->device[0] = f->device[1] = 0;
	return POLICY_ACCEPT;
}

/*
 * Decides about a TCP packet in mid-stream of a connection that isn't known. The lower port is taken for the server's.
 * While the program is new it is enough if either direction is allowed, so that no connection breaks; the likely one is
 * evaluated later. From then on the packet's own must be allowed, and the likely one, so that no connection is picked
 * up in the direction that is still allowed after the other was cut.
 */
__noinline int evaluate_midstream(const struct policy_packet *p, struct evaluation *e)
{
	struct policy_state *s = policy_state();
	bool answer, installing;
	__u32 generation;
	int result;

	if (!p || !e || !s)
		return POLICY_DROP;
	generation = s->generation;
	installing = is_installing(s);
	answer = bpf_ntohs(p->tuple.sport) < bpf_ntohs(p->tuple.dport);
	if (installing)
		e->event = POLICY_EVENTS;
	result = evaluate_connection(e);
	if (result == POLICY_IGNORE)
		return result;
	if (installing ? result == POLICY_DROP : result == POLICY_ACCEPT && answer) {
		reverse(&e->tuple, &p->tuple);
		e->device[0] = 0;
		result = evaluate_connection(e);
	}
	if (result == POLICY_DROP) {
		if (installing) {
			e->event = POLICY_DENIED;
			policy_log(e, POLICY_DENIED);
		}
		return POLICY_DROP;
	}
	if (!(p->flags & RST))
		begin_flow(p, generation, answer, installing ? FLOW_OLDER : 0);
	return POLICY_ACCEPT;
}

/* Decides about a packet of no known flow. */
__noinline int decide_new(const struct policy_packet *p, int opening)
{
	struct evaluation e = {.event = POLICY_DENIED};
	struct policy_state *s = policy_state();
	__u32 generation;
	int result;

	if (!p || !s)
		return POLICY_DROP;
	generation = s->generation;
	e.tuple = p->tuple;
	e.device[0] = p->device[0];
	e.device[1] = p->device[1];
	e.to_node = p->to_node;
	if (p->tuple.protocol == IPPROTO_TCP && !opening && p->kind == PACKET_FLOW) {
		/* The node's own reset of what it refuses, which met no hook of this program before: of a Service that
		 * has no endpoint. */
		if (p->flags & RST && !p->device[0])
			return POLICY_ACCEPT;
		return evaluate_midstream(p, &e);
	}
	result = evaluate_connection(&e);
	if (p->kind != PACKET_FLOW)
		return result;
	if (result == POLICY_ACCEPT) {
		record_connection(&p->tuple, false);
		begin_flow(p, generation, false, 0);
	} else if (result == POLICY_DROP && e.table && e.event == POLICY_DENIED) {
		record_connection(&p->tuple, true);
	}
	return result;
}

/* Returns whether a subject has rulesets. */
static __always_inline bool is_isolated(const struct address *a)
{
	struct subject *s = lookup(&fl_subjects, a);

	return s && (s->out[0].default_table.flags | s->out[1].default_table.flags | s->in[0].default_table.flags |
		     s->in[1].default_table.flags) &
			    SIDE_DECIDES;
}

/* Drops a packet that can't be parsed if an end of it has policies. */
__noinline int decide_unparsed(const struct policy_packet *p)
{
	struct evaluation e = {};

	if (!p || (!is_isolated(&p->tuple.source) && !is_isolated(&p->tuple.destination)))
		return POLICY_IGNORE;
	e.tuple = p->tuple;
	return drop_for(&e, POLICY_UNPARSED);
}

/*
 * Accepts an ICMP error about a packet of a flow that is allowed, if it goes to that packet's source, as connection
 * tracking does: both are translated alike. Any other is evaluated by its own addresses.
 */
__noinline int decide_error(const struct policy_packet *p)
{
	struct policy_state *s = policy_state();
	struct policy_flow *f;
	struct tuple key;

	if (!p || !s)
		return POLICY_DROP;
	flow_key(&key, &p->quoted);
	f = addr_equal(&p->quoted.source, &p->tuple.destination) ? lookup(&fl_flows, &key) : NULL;
	if (f && flow_alive(f, key.protocol, policy_now()) &&
	    (f->generation == s->generation || !(s->flags & POLICY_CUT)))
		return POLICY_ACCEPT;
	return decide_new(p, false);
}

/* Returns whether a flow is to be evaluated again. */
static __always_inline bool is_outdated(const struct policy_flow *f, const struct policy_state *s)
{
	return f->state & FLOW_OLDER || (f->generation != s->generation && s->flags & POLICY_CUT);
}

/* Decides about a packet. Returns an enum policy_result. */
static __always_inline int decide_packet(const struct policy_packet *p)
{
	struct policy_state *s = policy_state();
	__u32 now = policy_now();
	struct policy_flow *f;
	struct tuple key;
	bool down, opening;
	int result;

	if (!s)
		return POLICY_DROP;
	if (unlikely(p->kind == PACKET_EXEMPT))
		return POLICY_IGNORE;
	if (unlikely(p->kind == PACKET_UNPARSED))
		return has_forged_source(p, s, false) ? POLICY_DROP : decide_unparsed(p);
	count_lookup(&packets_key);
	if (unlikely(p->kind == PACKET_ERROR))
		return has_forged_source(p, s, true) ? POLICY_DROP : decide_error(p);
	down = flow_key(&key, &p->tuple);
	opening = (p->flags & (SYN | ACK | RST | FIN)) == SYN;
	f = p->kind == PACKET_SINGLE || opening ? NULL : lookup(&fl_flows, &key);
	if (f && !flow_alive(f, key.protocol, now))
		f = NULL;
	/* A device by which packets from there came before was checked then. */
	if ((!f || f->device[down] != p->ifindex || is_outdated(f, s)) && has_forged_source(p, s, f))
		return POLICY_DROP;
	if (!f)
		return decide_new(p, opening);
	if (unlikely(is_outdated(f, s))) {
		result = evaluate_again(p, f, s->generation);
		if (result != POLICY_ACCEPT)
			return result;
	}
	touch_flow(f, p, down, now);
	return POLICY_ACCEPT;
}
