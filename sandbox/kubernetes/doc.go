// Package kubernetes runs a real cluster on one machine: the control plane in the network namespace of a sandbox's
// client outside, and on each of its nodes a machine, which is what a kubelet and its containers take for a computer.
//
//	  outside: etcd, kube-apiserver, kube-controller-manager, kube-scheduler
//	──────┬──────────────┬───────────── wire
//	   machine a      machine b     each: containerd, kubelet, the agent, pods
//
// A machine has namespaces of its own for its network, mounts, processes, host name, System V IPC and cgroups. Its
// folders /etc, /opt and /var are the host's with a layer of its own above them, /run is empty at its start: whatever
// it writes goes with it. Nothing is downloaded here: programs come built (test/cluster builds them from their
// published modules), images are made of them or are files.
//
// It is for tests, the lab and trying things out: nothing is kept when it goes down, and etcd does not wait for the
// disk.
package kubernetes
