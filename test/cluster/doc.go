// Package cluster tries the shipped agent against a real control plane: etcd, kube-apiserver and the EndpointSlice
// controller, which the module in ./control-plane builds. `make` here lists how.
//
// The control plane runs in the network namespace of a sandbox's client outside, at that host's address: nodes reach it
// over the wire, as they do in a cluster, and nothing listens on the machine itself.
package cluster
