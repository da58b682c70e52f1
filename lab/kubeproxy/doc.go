// Package kubeproxy runs a real kube-proxy as a subject of the lab: in a network namespace of the lab's, against a
// server of sandbox/apiserver or whichever a kubeconfig names, asked for nothing but what it tells everybody (metrics,
// /proc).
//
// The binary is given, never built or downloaded here. A kube-proxy writes into its network namespace alone; its
// configuration, log and lock are in a folder of its own. It is as upstream configures it, except that it leaves the
// conntrack limits of the machine alone, and listens on the loopback only.
//
// An arm of an experiment is three calls:
//
//	n, cold, err := NewNode(ctx, Options{Binary: path, Mode: NFTables, Namespace: ns, Node: "a", Dir: dir}, objects...)
//	took, err := probe.Move(ctx, n.Tell) // a Probe's objects must be among them
//	err = n.Close()
//
// A kube-proxy syncs at most once a second (MinSyncPeriod), so a change that comes sooner after another waits for that:
// let it rest between two, where the change alone is to be measured.
package kubeproxy
