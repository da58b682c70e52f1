// Package names learns the addresses of the domain names that policies name, from the DNS answers that pods of this
// node receive. Its source is package dataplane/dns, which queues to it the messages between those pods and the
// configured resolvers; what it learns are changes as of any source of objects.
//
// An answer counts only if a resolver sent it, by a device that leads back to it, to a pod that a rule with a domain
// name selects, in reply to a query that was seen: from the same address and port, with the same ID, name and type (A
// or AAAA). It teaches the name that was asked for, of those of the pod's own rules, the addresses at the end of its
// chain of CNAMEs; no other name of the answer. It waits until the addresses are in force in the engine, at most 50 ms.
// Addresses that lead to nowhere else (loopback, link-local, multicast) teach nothing.
//
// A pod has a share of the messages that are held, and one of those that are copied beyond it; what is beyond both
// passes unread. So a pod that floods the resolver with queries delays its own names alone.
//
// An address lives for its TTL, at least a minute and at most a day, and as long as a connection to it. Over TCP, a
// message counts that is whole in one packet. The agent's records are in the kernel, so that the next agent has them.
package names
