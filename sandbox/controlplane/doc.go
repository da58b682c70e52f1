// Package controlplane runs a real control plane in a network namespace: etcd, kube-apiserver, and the EndpointSlice
// controller where it is wanted, from the one program that test/cluster/control-plane builds. Nothing is downloaded or
// built here.
//
// Clients come with certificates, permissions are RBAC's, and all that is written stays in one folder. etcd does not
// wait for the disk, and priority and fairness are off unless asked for: it is for tests and the lab, for hours at
// most. Its processes end with the one that started them.
package controlplane
