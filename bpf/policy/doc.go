// Package policy is the Go side of the program of network policies (policy.c, policy.h): its maps, typed, its
// attachments to netfilter's hooks, and what it reports.
package policy

//go:generate sh ../generate.sh -type side -type subject -type policy_port -type port_range -type peer_net -type peer_verdict -type peer_table -type policy_state -type policy_flow -type device_name -type device_sources -type device_net -type denial
