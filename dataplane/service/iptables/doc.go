// Package iptables is the service data plane that tells iptables and ip6tables about frontends, in whichever of the two
// variants of those commands the host uses.
//
//	PREROUTING, OUTPUT ─▶ tree of address prefixes ─▶ leaf: one frontend ─▶ pool's chain: DNAT to a backend
//	                  ├─▶ NODEPORT ─▶ PORTS: tree of protocols and ports ─┤
//	                  └─▶ NODES: tree of other nodes ─▶ REMOTE: this node and its pods ─▶ RPORTS ─┘
//	POSTROUTING ─▶ LEAVE: hides the source where that was noted on the way in, or where a pod would answer itself
//	INPUT, FORWARD, OUTPUT of the table filter ─▶ FILTER: a tree of ClusterIPs and of those frontends that may refuse
//	FORWARD of the table filter ─▶ FORWARD: accepts established and masqueraded connections, drops invalid packets
//	INPUT of the table filter ─▶ HEALTH: accepts packets to healthCheckNodePorts
//	PREROUTING of the table raw ─▶ GUARD: loopback addresses, only where node ports serve localhost
//
// A step in the tree is one rule either way: who is in the left half's prefix goes to that half's chain, all others go
// on in this one. So 10,000 addresses cost some 14 rules, half of the tree's nodes need no chain, and what belongs to
// no Service is out after one rule for each of at most three prefixes that hold all addresses, and one for node ports.
// Only the first packet of a connection comes here at all. The filter's tree, which those see that no frontend takes,
// rejects what goes to a ClusterIP, whatever the port, and drops what goes to an unallocated address of a ServiceCIDR.
// Others meet the filter's rules alone: where they are forwarded, the one that accepts established connections.
//
// A pool has one chain, in which backend i of n is taken with chance 1/(n-i); above seven backends halves have chains
// of their own. Affinity is a list of clients for each backend (xt_recent), which lasts while the backend does.
//
// That a source is to be hidden is noted in one bit of the packet's mark, 0x4000, between PREROUTING and POSTROUTING,
// and taken away there. Where all frontends below a node of the tree agree, it is noted once for all of them; a packet
// that then belongs to none of them forgets it at the end of the tree. A pod that is sent its own packet is told by a
// BPF program that compares the addresses, so there is one rule for all pods; that also hides the source where the pod
// runs elsewhere, which no packet gets to see otherwise.
//
// Refusals stand in the table filter, as the tables nat and raw can't reject. Our rules are put before all others
// there, but whoever puts one before them later decides first.
//
// FORWARD is as kube-proxy's mode iptables has it: node ports work where the policy of that chain is DROP, as Docker
// sets it, and packets that connection tracking calls invalid are dropped, unless it is told to be liberal: they pass
// untranslated otherwise, and whoever receives one resets the connection. Rules count by nfacct, where the kernel has
// it: that costs a reader nothing, however long the tables are, and lasts when rules are written anew.
//
// Facts are a frontend's own: what the tree looks like is decided in Write, from all of them. Read looks at the rules
// loosely to find the facts, then builds everything again: a rule that is not just what it would be is reported as the
// node's fact, or the pool's, being altered.
//
// What it is not: fast to change in the legacy variant, whose kernel interface replaces a whole table. It is there for
// hosts that have nothing else, and for comparison; package nftables does the same with one table and far less work.
package iptables
