// Package testbed is what experiments measure on. A Testbed is a value: this machine's processors, network namespaces
// in pairs (a near one with the client and perhaps an agent or a kube-proxy, a far one with the server), and the
// programs in them. Open makes an empty one, methods add to it, Close removes everything. Traffic has the arms of a
// testbed do operations round by round and records their blocks.
//
// The product is used from outside alone, as its users have it: manifests or an API server's objects go in, packets,
// netlink events, the status page and /proc come out. Which modes this kernel supports is tried: FindModes. What is
// measured and what it means is up to experiments.
package testbed
