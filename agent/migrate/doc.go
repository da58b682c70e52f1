// Package migrate finds what a kube-proxy has written into a network namespace, reports whether one still runs there,
// and removes what it left, so that a node can be migrated from one and back.
//
// Both may stand beside each other: a connection is translated by whoever meets its first packet first, and both choose
// living endpoints as long as both are told of changes. What connection tracking remembers of a connection outlives the
// rules that made it, so nothing that is established is cut when either's rules go: only kube-proxy's IPVS services
// hold their connections themselves.
package migrate
