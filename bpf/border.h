/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* What is in the cluster and what is beyond, where the pod network is Fairlead's own. */
#pragma once

#include "packet.h"

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
