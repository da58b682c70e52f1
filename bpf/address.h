/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Addresses of both families in 16 bytes, IPv4 as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2), in network byte order; and what
 * every program uses.
 */
#pragma once

#include "kernel.h"

#include <stdbool.h>

struct address {
	__be32 word[4];
};

/* For the compiler, which may move rare code aside. */
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

static __always_inline bool is_zero(const struct address *a)
{
	return !(a->word[0] | a->word[1] | a->word[2] | a->word[3]);
}

static __always_inline bool addr_equal(const struct address *a, const struct address *b)
{
	return !((a->word[0] ^ b->word[0]) | (a->word[1] ^ b->word[1]) | (a->word[2] ^ b->word[2]) |
		 (a->word[3] ^ b->word[3]));
}

static __always_inline bool is_ipv4(const struct address *a)
{
	return !a->word[0] && !a->word[1] && a->word[2] == bpf_htonl(0xffff);
}

static __always_inline bool is_loopback(const struct address *a)
{
	if (is_ipv4(a))
		return (a->word[3] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
	return !a->word[0] && !a->word[1] && !a->word[2] && a->word[3] == bpf_htonl(1);
}

static __always_inline void map_ipv4(struct address *a, __be32 v4)
{
	a->word[0] = a->word[1] = 0;
	a->word[2] = bpf_htonl(0xffff);
	a->word[3] = v4;
}

#define SECOND 1000000000ULL
