// Package kube is a source of Kubernetes objects that reads the API: it lists and watches Services, EndpointSlices and
// this node's Node, as protobuf, in streams (KEP-3157) where the server can, with client-go's reflectors.
//
// It says what the API server says and no more. It does not judge how objects fit together: that is for package
// resolve.
//
// # What is asked for
//
// Only what may count: Services with an address and the wanted service-proxy-name, EndpointSlices that are not of
// headless Services, the one Node, or from the first object on that needs them (Options.NeedsNodes) all Nodes. Without
// a wanted name, also ServiceCIDRs, if the server knows them, and the Services of other proxies, whose addresses are
// allocated. Namespaces, Pods, NetworkPolicies and ClusterNetworkPolicies only where Options.Kinds has them: no Pods
// without an address or that have ended. The streams share one connection.
//
// # What is kept
//
// No object: what comes is stripped (package strip), waits until it is delivered, and is forgotten. Of each object its
// name, resource version, age and weight stay, so that after another list only what differs is told. Changes of one
// object that come while the consumer is busy are one; an object that came and went meanwhile leaves nothing.
//
// # What is bounded
//
// Whoever may write into a namespace may write as many objects as the API server takes. So the Services, and the
// EndpointSlices, of one namespace are bound to Options.NamespaceBytes of memory, and those of all to Options.Bytes,
// for which the heaviest namespaces give way. The oldest objects stay, up to the first that doesn't fit; the others are
// as if they weren't there, and a problem names ten of them for each namespace. Once the oldest of them fits, the
// namespace is listed again: after 10 s at first, then after twice as long each time, up to 5 minutes.
//
// Where NetworkPolicies of a namespace are left out it has one in their place that isolates every pod: leaving out must
// not open what they close.
//
// A list is streamed where the server can, and taken in object by object: of it no more than the bounds allow is held
// at a time. Where it can't, a list comes in one answer from the server's cache, and one of more than 16 MiB in pages.
//
// # What stays when the API server does not answer
//
// Everything. Nothing goes away but what an API server says is gone. What can't be done without is told as it comes, so
// that it needn't all be in memory at a time, and until each kind that traffic needs has been listed whole, that it has
// not (Batch.Waiting), and so of the kinds that policies need (Batch.Unlisted). What is wrong stands as a Problem with
// the time since when; a permission that is missing names its verb and resource, stops its kind alone, and the others
// go on. A Node that may not be read is done without after five seconds.
//
// A refused connection is tried again after 0.1 to 0.8 s; a server that answers, but with an error, after up to half of
// the time that this has lasted, 10 s at most. Whenever a request fails, the kubeconfig and the files that it names are
// read again: certificates, keys, tokens and addresses may change under a running agent. A service account's token is
// read again every minute.
package kube
