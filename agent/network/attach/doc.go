// Package attach serves the CNI plugin of a node: it allocates pods' addresses, has their attachments put into the
// kernel, and answers when everything that a pod needs is there.
//
// Requests about one attachment are served one after the other, others side by side. A DEL that comes while its ADD
// runs
// ends that ADD first. What is attached is in ipam's records, from which a new process goes on; the kernel tells when a
// pod's network namespace has gone without a DEL.
package attach
