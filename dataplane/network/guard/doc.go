// Package guard is the data plane that drops forged sources of the pod network, by nf_tables: table "fairlead-guard",
// of the calling thread's network namespace, ahead of connection tracking, translation and routing.
//
//	hook    UDP port · VNI · destination in "outer4" or "outer6" → underlay
//	        IPIP · destination in "ipip" → underlay
//	        device group of pods' devices → pod; device in "device" → tunnel
//	underlay  source in "peer4" or "peer6", or drop, counted
//	pod     device · source in "source4" or "source6", or in "allowed4" or "allowed6"; fe80::/10 to fe80::1;
//	        drop multicast of IPv6 link-local sources; drop all else, counted ("forged")
//	tunnel  source in "cluster4", "cluster6", "peer4" or "peer6", or drop, counted ("foreign")
//
// Pods' devices are known by their group, not by name: one that has no sources yet, or no longer, sends nothing. ARP
// never comes here: pods' devices answer none, and learn nothing from it (attachment).
package guard
