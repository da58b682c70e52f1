package source

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Attached has the addresses that pods of one node were attached with. They count before a Pod's status names them, and
// after it does: but for that Pod alone, on that node. A Pod of the same name that came later has another UID.
type Attached map[Key]attachedPod

type attachedPod struct {
	uid       string       // "": the runtime doesn't say
	addresses []netip.Addr // none: it was detached, and its Pod is still there
}

// Attach takes in the addresses that a pod has been given.
func (a Attached) Attach(key Key, uid string, addresses []netip.Addr) {
	a[key] = attachedPod{uid, addresses}
}

// Detach takes in that a pod has addresses no more, and reports whether those were its last ones. there is whether its
// Pod is known.
func (a Attached) Detach(key Key, addresses []netip.Addr, there bool) bool {
	p, known := a[key]
	if !known || !slices.Equal(p.addresses, addresses) { // it has been attached anew since
		return false
	}
	if p.addresses = nil; there {
		a[key] = p
	} else {
		delete(a, key)
	}
	return true
}

// Forget takes in that a Pod is gone, or is another node's now: what is still attached of it ends with Detach.
func (a Attached) Forget(key Key) {
	if len(a[key].addresses) == 0 {
		delete(a, key)
	}
}

// Of returns the addresses of a Pod of the node, and whether they are known: else its status has them.
func (a Attached) Of(key Key, o *corev1.Pod) (addresses []netip.Addr, known bool) {
	p, known := a[key]
	if known && Same(p.uid, string(o.UID)) {
		return p.addresses, true
	}
	return nil, known
}

// Same reports whether two UIDs may be of one Pod: one that isn't known may be any's.
func Same(a, b string) bool { return a == "" || b == "" || a == b }
