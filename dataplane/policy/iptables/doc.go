// Package iptables is the policy data plane that writes iptables and IP sets, in whichever of the two variants of the
// tools the host uses: legacy or nft.
//
// A set holds addresses, not pairs, so ports are matched first, then peers. A Join stands in front of the plane: it
// makes of identities the addresses that each peer table decides about otherwise than about all others. For each
// family there are, in the table filter and named FLPOLICY-…,
//
//	FORWARD, INPUT, OUTPUT   first in the built-in chain of that name. Established, related, or of the node itself?
//	                         return; then DV; at INPUT untranslated? return; then E0, and unless it goes to the node I0
//	E0, I0                   a tree of subjects by prefixes of their addresses, for egress and ingress, to a ruleset
//	E1, I1                   the same, to the ruleset of the last stage, for what the first leaves to it
//	DV                       a tree of subjects with a known device: what comes in elsewhere goes to FORGED
//	RE0…, RE1…, RI0…, RI1…   a ruleset by its ID: a tree over its port entries (S…) to peer tables
//	TE0…, TE1…, TI0…, TI1…   a peer table by its ID: a match of its sets, each with a verdict, then its Otherwise
//	DENY, FORGED, AUDIT      log, limited, to nflog group LogGroup; the first two drop
//	CUT                      resets TCP and drops the rest of connections whose mark has the bit model.PolicyNode.CutMark
//
// A verdict drops or returns to the hook's chain, so what policies accept other rules may still drop. All chains
// below a tree are entered by goto; so the first stage leaves a packet to the second by the tree E1, not by a return.
// A chain that doesn't accept and isn't a subject's ends by dropping addresses of this node's pods, where unknown
// pods are dropped. INPUT evaluates egress alone, OUTPUT not the devices.
//
// Sets are of type hash:net and named fl_policy4_… and fl_policy6_…: node, pods and untranslated, and two letters
// after a peer table's ID say what it decides about others and about the set's addresses: accept, drop, next, in
// capitals where it is reported. The kernel prefers the longest prefix: an address about which a table decides
// otherwise than about the range around it is an element that doesn't match (nomatch). So a table's sets hold an
// address only if it differs from its range. The set midstream holds every address, for a minute from when it is made
// on: TCP packets other than a first SYN pass as long, so that connections that run before connection tracking does
// go on.
//
// Trees are wide and not deep: nf_tables follows chains to 16 levels. A new connection to one of 128 pods evaluates
// some 34 rules with 10 policies on the pod, at most 46; 64 with 10,000, at most 101; and a match for each set of a
// peer table, at most two without audit. In the legacy variant, whose depth is not bounded, rulesets' trees are
// deeper and cheaper.
//
// Write makes one restore of what chains change, between two batches of changes of elements: what lets fewer packets
// pass comes before, what lets more pass comes after. Peer tables beyond a bound (MaxElements, MaxSets) drop
// everything, which is named by a refused fact. Read finds subjects in the trees and builds these again: what differs
// is the trees' fact, altered. Sets of other names, types and revisions are never read.
//
// Changes by other programs are noticed as iptables.Conn.Watch does; of sets by the number of their elements, every
// five seconds. A rule that another program puts before ours, and that accepts, decides until then.
package iptables
