// Package cri tests the CNI plugin and its agent with a container runtime, containerd, without Kubernetes: the test
// speaks the Container Runtime Interface in the kubelet's place.
//
// containerd and the agent are in one network namespace of the test's. containerd runs as the program of a machine of
// package kubernetes, with which its pods, mounts and cgroups end; of its files only the socket, the folder of network
// configurations and that of plugins are shared with the test, in a temporary folder.
//
// What containerd 2.4.2 calls (its internal/cri/server, by go-cni 1.1.14):
//
//	STATUS  in each Status of the CRI, which the kubelet requests every few seconds; NetworkReady has the error's
//	        message, without its code
//	ADD     in RunPodSandbox
//	DEL     in StopPodSandbox, again in RemovePodSandbox, and where RunPodSandbox fails
//	CHECK   never
//	GC      never: go-cni has no function for it
package cri
