package policy

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/source"
)

// attachments is what is known of pods that the container runtime has the agent attach. Their policies are in force
// before their status names an address.
type attachments struct {
	here     map[source.Key]*corev1.Pod // this node's Pods
	attached source.Attached
}

// AttachPod takes in the addresses that a pod of this node has been given. The next Change has what follows from them.
func (r *Resolver) AttachPod(key source.Key, uid string, addresses []netip.Addr) {
	r.attached.Attach(key, uid, addresses)
	if o := r.here[key]; o != nil {
		r.setPod(key, o)
	}
}

// DetachPod takes in that a pod of this node has addresses no more. The next Change has what follows from it.
func (r *Resolver) DetachPod(key source.Key, addresses []netip.Addr) {
	o := r.here[key]
	if r.attached.Detach(key, addresses, o != nil) && o != nil {
		r.setPod(key, o)
	}
}

// HasPod reports whether a Pod of this node is known.
func (r *Resolver) HasPod(key source.Key, uid string) bool {
	o := r.here[key]
	return o != nil && source.Same(string(o.UID), uid)
}

// follow remembers this node's Pods.
func (r *Resolver) follow(key source.Key, o *corev1.Pod) {
	switch {
	case o != nil && o.Spec.NodeName == r.config.Node && r.config.Node != "":
		r.here[key] = o
	case r.here[key] != nil:
		delete(r.here, key)
		r.attached.Forget(key)
	}
}
