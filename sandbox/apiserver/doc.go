// Package apiserver is a small Kubernetes API server for tests and the lab: enough for kube-proxy, and for any client
// that lists and watches what Fairlead reads.
//
// It holds objects in memory and serves them over plain HTTP: discovery, get, list and watch with resource versions,
// selectors, bookmarks, streamed lists (KEP-3157) and pages, as JSON and as Kubernetes' protobuf. Objects change by
// Apply alone: it accepts no writes but Events, which it counts and forgets. It compresses nothing, knows no identity,
// no tables, no subresources, and validates nothing: what is put in is what is served. Never listen with it where
// others can reach it.
//
// Fast at 10,000 Services and as many EndpointSlices: each version of an object is encoded once per format, and lists
// and watches share the bytes.
package apiserver
