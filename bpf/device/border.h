/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* What is in the cluster and what is beyond, where the pod network is Fairlead's own. */
#pragma once

#include "packet.h"

/*
 * The bit of a packet's mark by which a pod's packet to another node's own address goes by the underlay though that
 * node is behind the tunnel (dataplane/network).
 */
#define UNDERLAY_MARK 0x20000000

/*
 * Ranges of this node's pods, and of what sees their own addresses, by prefix. Written by the agent where the pod
 * network is ours (dataplane/network/masquerade).
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, struct prefix);
	__type(value, __u32); /* enum masq_range */
} fl_masq_ranges SEC(".maps");

/*
 * Returns whether a packet from a pod's address to another leaves the cluster; of a packet that enters, whether its
 * replies do.
 */
__noinline int leaves_cluster(const struct address *pod, const struct address *outside)
{
	struct prefix key = {.length = 128};
	__u32 *is;

	if (!pod || !outside)
		return false;
	key.address = *outside;
	if (bpf_map_lookup_elem(&fl_masq_ranges, &key))
		return false;
	key.address = *pod;
	is = bpf_map_lookup_elem(&fl_masq_ranges, &key);
	return is && *is & RANGE_PODS;
}

/* Returns whether an address is another node's own, of one behind the tunnel. */
__noinline int is_tunneled_node(const struct address *a)
{
	struct prefix key = {.length = 128};
	__u32 *is;

	if (!a)
		return false;
	key.address = *a;
	is = bpf_map_lookup_elem(&fl_masq_ranges, &key);
	return is && *is & RANGE_NODES;
}
