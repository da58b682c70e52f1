// Package nftables is the policy data plane that writes nf_tables: one table of the inet family, of a constant number
// of chains and maps. Pods, policies and peers are elements of maps to plain values, never chains.
//
// For each family (4 and 6) there is
//
//	node          address                        of the node itself
//	untranslated  range of addresses             destinations that are evaluated after their translation, at input
//	unknown       range of addresses             of this node's pods, where pods that aren't known are dropped
//	subject       address → stages               of pods on this node; a bit for each stage that has a ruleset
//	device        address                        of those with a known device
//	entry         address · device               by which alone these may send, and what else a pod's device admits
//	admitted      device · range of addresses    likewise
//	ruleset       stage · address → ruleset      stages 0 and 1 are of egress, 2 and 3 of ingress
//	peer          address → identity
//	range         range of addresses → identity  where there is no peer
//
// and for both
//
//	midstream     0                              for a minute from when the table is made on
//	current       number                         of the state that the sets are in
//	pod           device                         of one pod alone
//	port          0 · ruleset · protocol · port → peer table
//	portspan      0 · ruleset · protocol · first to last port → peer table
//	default       0 · ruleset → peer table       where no port matches
//	decision      0 · peer table · 0 · identity → decision
//	otherwise     0 · peer table → decision      where the other end has no identity, or the peer table no decision
//
// and for both, in each direction, or for each family and direction, such as egress4
//
//	act-egress      0 · decision · stage · 0 → verdict
//	                                             allow, deny, return to the next stage; reported or not
//	family-egress   family → verdict             goto egress4 or egress6
//	stages-egress4  0 · stages → verdict         goto the chain for pods with rulesets of these
//
// Ranges are disjoint and of one field, but for admitted: to portspan its whole key is one number. A packet that opens
// a connection passes these chains, those of the first lines at hooks:
//
//	cut-forward, cut-input, cut-output       marked as cut? cut; there only while model.PolicyNode.CutMark says so
//	forward-egress, input, output-egress     neither established nor related? egress4; not of TCP, and by a pod's
//	                                         device? sources
//	forward-ingress, output-ingress          established or related? accept; else ingress4
//	egress4                 from a subject? egress4-pod-admin-last or another, by its stages; by a pod's device?
//	                        sources; from an unknown pod? deny
//	egress4-pod-admin-last  no entry? elsewhere4; by its rulesets egress4-admin, then egress4-last
//	elsewhere4              from a subject with a device? forged-egress; by a pod's device? sources
//	sources                 in entry or admitted, or neighbour discovery? return; to a group of IPv6 from the link?
//	                        drop; else forged
//	egress4-admin           to a peer? egress4-admin-peer; to a range? egress4-admin-range; else by ports, otherwise
//	egress4-admin-peer      by port or portspan, else by default: decision, else otherwise; nothing there? deny
//	allow-egress            of the current state? accept; else drop
//	deny-egress             exempt-egress; deny: count, log, drop
//	report-accept-egress, report-next-egress   exempt-egress; report: count, log; allow-egress or return: what audited
//	                        policies drop
//	exempt-egress           exempt; of the node itself, or delivered untranslated? accept
//	exempt                  neighbour discovery, or midstream? accept
//	forged-egress           exempt; forged: count, log, drop
//	cut                     reset TCP, drop
//
// ingress4 and its chains are alike, for the destination, and exempt what goes to the node. What policies don't apply
// to is tested last, before a packet is dropped or reported, so that allowed packets meet few rules: the first of a
// connection to a pod from elsewhere that a port and a peer allow meets 8, or 9 where the port is one of a span. Egress
// and ingress have chains at hooks of their own, so that an accept ends one of them, and no chain of one leads to the
// other: the kernel follows every path through the chains when it checks a table.
//
// No packet is accepted by a mixture of what the sets held before a transaction and hold after it. The kernel has a
// packet meet the rules that were there when it came, but look each key up in what is in force by then. So the rules of
// allow-egress, made anew by each transaction, name the state by a number, and accept while that is the current one.
// Ranges come into force after all else of their transaction: where one changes some, there is no current state before
// a second transaction, and the first packet of a connection that policies would accept is lost if it comes in between.
//
// What tests for pods' devices is there only while model.PolicyNode.Devices says so: sources, elsewhere4, and the rules
// that lead there; else egress4-pod-admin-last leads to forged-egress itself. The first packet from elsewhere meets one
// rule more then, that of a pod none. Packets of open connections are tested, too, but not those of TCP: who sends as
// an end of one has to know its sequence numbers.
//
// Neighbour discovery is accepted. Protocols without ports are decided by default. A log goes to nflog group LogGroup,
// limited, with the prefix PrefixDeny, PrefixForged or PrefixAudit. Tables of other owners aren't touched, and what
// this one accepts they may drop.
//
// The rules switch connection tracking on. Connections that run by then appear in mid-stream, perhaps by their replies
// first: for a minute TCP packets other than a first SYN are accepted, so that no connection ends because policies
// come. What of them is denied agent/policy/revoke finds and cuts.
//
// From Linux 6.9 on the table belongs to the process that writes it: others read it, and what flushes every table
// leaves it alone. It outlives the process; the next one makes it its own. On older kernels whoever flushes every table
// flushes this one too, and until it is repaired everything passes.
//
// A table of another layout is made anew in one transaction, so that either enforces. Where the kernel refuses a part
// of the new one, the former stays in force until the rest can replace it: see package reconcile.
//
// Tried on Linux 6.18 only.
package nftables
