// Package rules counts the rules that a packet is really tested against, in two ways that know nothing of each other
// and must agree: a walk of the rule set on paper (Static), and what the kernel says when it traces one packet (Trace).
// Counters of iptables and nftables can't tell, since they count matches only.
//
// A rule counts once each time the kernel looks at it, whether it matches or not, in every table and hook on the
// packet's way. Policies and the invisible ends of chains are no rules. Where rules draw at random the walk takes every
// way and weighs it: the mean is exact, and so are the least and the most.
//
// The walk knows the matches and targets of the data planes here and of kube-proxy. What it does not know is an error
// that names it, never a guess. It reads iptables from `iptables-save` and `ipset save`, and nf_tables from the
// kernel's own instructions, of which it is a small interpreter; so it depends on no command's syntax.
//
// A trace is the namespace's own: that of ip_tables is heard through nfnetlink_log, that of nf_tables as its events; no
// setting of the host changes and no other namespace is traced.
//
// It is no firewall tester: routing, fragments, other protocols than TCP and UDP, and how a flow changes over time are
// not there.
package rules
