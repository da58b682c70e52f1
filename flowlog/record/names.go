package record

import (
	"maps"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/source"
)

// names are the pods of the cluster by their addresses, and which of these are this node's. It is safe for concurrent
// use.
type names struct {
	node string

	mu   sync.Mutex
	pods map[netip.Addr]*flowlog.Pod // a pod that is gone stays until another one has its address
	cidr []netip.Prefix              // of this node's pods
	own  map[netip.Addr]bool         // the node's own addresses
}

// apply makes changes true.
func (n *names) apply(changes []source.Change) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.pods == nil {
		n.pods = map[netip.Addr]*flowlog.Pod{}
	}
	for _, c := range changes {
		switch v := c.Object.(type) {
		case *corev1.Pod:
			n.pod(v)
		case *corev1.Node:
			if v.Name == n.node {
				n.cidr = nil
				for _, text := range v.Spec.PodCIDRs {
					if p, err := netip.ParsePrefix(text); err == nil {
						n.cidr = append(n.cidr, p.Masked())
					}
				}
			}
		}
	}
}

// pod records a pod's addresses. One that has ended may have addresses that others have by now.
func (n *names) pod(v *corev1.Pod) {
	if v.Spec.HostNetwork || v.Status.Phase == corev1.PodSucceeded || v.Status.Phase == corev1.PodFailed {
		return
	}
	p := &flowlog.Pod{Name: v.Namespace + "/" + v.Name, Node: v.Spec.NodeName, Labels: maps.Clone(v.Labels)}
	for _, ip := range v.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			n.pods[a.Unmap()] = p
		}
	}
}

func (n *names) setOwn(own map[netip.Addr]bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.own = own
}

// of returns the pod that has an address, nil where none is known, and whether it is this node's.
func (n *names) of(a netip.Addr) (p *flowlog.Pod, local bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.own[a] {
		return nil, false
	}
	if p = n.pods[a]; p != nil {
		return p, p.Node == n.node
	}
	return nil, slices.ContainsFunc(n.cidr, func(c netip.Prefix) bool { return c.Contains(a) })
}

// isOwn reports whether an address is the node's own.
func (n *names) isOwn(a netip.Addr) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.own[a]
}
