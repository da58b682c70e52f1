// Package lab runs experiments: it builds the network that one needs, loads it, and writes what it saw into a run's
// directory, from which package report makes what people read.
//
//	services     what a Service costs a connection, and what it costs to keep the kernel as a cluster of many says
//	tigera       round trips, processor time and rules per connection in every mode and with kube-proxy's rules, by number of
//	             Services; the claims of "Comparing kube-proxy modes: iptables or IPVS?"
//	connect      connect() and connections in so many blocks that 1 % shows, hot and cold; run times of eBPF programs
//	centurylink  round trips of userspace against iptables and all others, as histograms; a stream's throughput
//	balance      how evenly each scheduler spreads connections, and whom a hash moves when a backend goes
//
// The product is used from outside alone, as its users have it: manifests go in, packets, netlink events, the status page
// and /proc come out. Which modes this kernel can do is tried, not guessed: findModes.
//
// An experiment is a work: a design, which says in words and numbers all that a reader must know to judge the raw blocks,
// and steps. What they share is run: namespaces in pairs, agents, rounds in which every arm does every operation in random
// order with the baseline first and last, and the taking down of all that.
//
// Others' programs that are given as subjects (subject.go) are arms beside ours: kube-proxy, by package kubeproxy.
//
// The parts stand by themselves: stats (arithmetic), load (packets), classic (kube-proxy's rules), rules (counting them),
// result (the directory), chart and report (drawing and words), progress. What is measured and how is here; no number is
// judged here.
package lab
