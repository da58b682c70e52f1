// Package conformance is the one behaviour suite that every data plane must pass, of Services and of network policies:
// cases that people can read, random worlds, change under traffic, and faults.
//
// A case is a text file in the folder cases: a cluster, packets, and what must become of them (cases/README.md has the
// format). Each packet is judged twice. First verdict, over the model that resolve makes of the cluster for the node
// where the packet enters, must say what the case says. Then the packet is sent for real: through a sandbox whose nodes
// each run the data plane, until every endpoint that may answer has answered, and never another.
//
// The suite knows no data plane and has no exceptions for any: it says how packets fare, never how a kernel is told.
// One that can't serve some frontend says so in Subject.Unserved, by name; its packets are then judged by verdict
// alone.
//
// It takes root, for network namespaces.
package conformance
