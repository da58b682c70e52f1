package service

import (
	"fmt"
	"net/netip"
	"slices"
	"unique"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/source"
)

// nodeState is what is known of this node: what the configuration says, and what the Node object adds once it is seen.
type nodeState struct {
	*settings
	model    *model.ServiceNode
	zone     unique.Handle[string] // by the label topology.kubernetes.io/zone; zero: not known
	podsIn   families              // families in which pods are told from others
	podsHere families              // families in which only this node's pods count as pods
	remote   bool                  // node ports are served at other nodes' addresses, too
	healthAt []netip.Addr          // where health checks are served; nil: at all addresses
	problems []source.Problem      // of the Node object
}

// peer is what a Node of the cluster says that counts on all nodes.
type peer struct {
	addresses []netip.Addr // the internal ones first
	pods      []netip.Prefix
}

// readPeer reads a Node.
func readPeer(obj *corev1.Node) peer {
	n := &model.Node{}
	return peer{readAddresses(obj, n, &report{}), readPodCIDRs(obj, &report{})}
}

func (p peer) equal(o peer) bool {
	return slices.Equal(p.addresses, o.addresses) && slices.Equal(p.pods, o.pods)
}

// addressesOf returns the addresses of all Nodes, sorted, each once.
func addressesOf(nodes map[string]peer) (l []netip.Addr) {
	for _, p := range nodes {
		l = append(l, p.addresses...)
	}
	slices.SortFunc(l, netip.Addr.Compare)
	return slices.Compact(l)
}

// remoteNodePorts returns the addresses of other Nodes than n that accept NodePort traffic as n's own do. One in a
// range of pods or Services isn't a node's, whatever its Node says.
func (set *settings) remoteNodePorts(nodes map[string]peer, n *model.ServiceNode) (l []netip.Addr) {
	if set.Capabilities.NoRemote != "" || set.MasqueradeAll {
		return nil
	}
	var pods []netip.Prefix
	for name, p := range nodes {
		if pods = append(pods, p.pods...); name == set.Node {
			continue
		}
		for _, a := range p.addresses {
			if slices.ContainsFunc(set.ranges, func(r model.Range) bool { return r.Contains(a) }) {
				l = append(l, a)
			}
		}
		if set.primary {
			for _, r := range primaries(p.addresses) {
				l = append(l, r.First)
			}
		}
	}
	pods = outermost(pods)
	slices.SortFunc(l, netip.Addr.Compare)
	l = slices.DeleteFunc(slices.Compact(l), func(a netip.Addr) bool {
		_, own := slices.BinarySearchFunc(n.Addresses, a, netip.Addr.Compare)
		return own || contains(pods, a) ||
			slices.ContainsFunc(n.ServiceRanges, func(r model.Range) bool { return r.Contains(a) })
	})
	if len(l) == 0 {
		return nil // as of a node that never had any
	}
	return l
}

// locate reads the Node object, nil for none. nodes are all Nodes, remote is whether node ports are served at their
// addresses, and ranges returns the Node's ServiceRanges; nil: none. Parts equal to old's keep their pointer.
func locate(set *settings, obj *corev1.Node, nodes map[string]peer, remote bool,
	ranges func(*model.Node) ([]model.Range, []source.Problem), old *model.ServiceNode) *nodeState {
	p := &nodeState{settings: set, remote: remote}
	n := &model.ServiceNode{Node: &model.Node{Name: set.Node, Addresses: slices.Clone(set.Addresses),
		Pods: set.ClusterCIDRs, PodInterfaces: set.PodInterfaces},
		NodePorts: set.ranges, Localhost: set.localhost, DSR: set.DirectServerReturn}
	if set.DirectServerReturn {
		n.Nodes = addressesOf(nodes)
	}
	var own []netip.Addr
	if set.Primary.IsValid() {
		own = append(own, set.Primary)
	}
	if obj != nil {
		rep := &report{object: source.KeyOf(obj)}
		p.zone = intern(obj.Labels[corev1.LabelTopologyZone])
		own = append(own, readAddresses(obj, n.Node, rep)...)
		if !set.podsConfigured || set.DirectServerReturn {
			pods := readPodCIDRs(obj, rep)
			if !set.podsConfigured {
				n.Pods = pods
				if len(obj.Spec.PodCIDRs) == 0 && obj.Spec.PodCIDR == "" {
					rep.add("spec.podCIDRs", PodsUnknown, "is empty, so %s; set clusterCIDR, or the pods' interfaces by "+
						"detectLocalMode BridgeInterface or InterfaceNamePrefix", unknownPods)
				}
			}
			if set.DirectServerReturn {
				n.PodCIDRs = pods
			}
		}
		p.problems = rep.list
	}
	if set.primary {
		n.NodePorts = merge(append(slices.Clone(set.ranges), primaries(own)...))
	}
	slices.SortFunc(n.Addresses, netip.Addr.Compare)
	n.Addresses = slices.Compact(n.Addresses)
	p.readPods(n, obj)
	if ranges != nil {
		var wrong []source.Problem
		n.ServiceRanges, wrong = ranges(n.Node)
		p.problems = append(p.problems, wrong...)
	}
	if remote {
		n.RemoteNodePorts = set.remoteNodePorts(nodes, n)
	}
	if old != nil && equalNode(n.Node, old.Node) {
		n.Node = old.Node
	}
	if old != nil && equalServiceNode(n, old) {
		n = old
	}
	p.model, p.healthAt = n, healthAddresses(n)
	return p
}

// readPods determines in which families pods are told from others, and there from other nodes' pods.
func (p *nodeState) readPods(n *model.ServiceNode, obj *corev1.Node) {
	if n.PodInterfaces.Name != "" {
		p.podsIn, p.podsHere = families{true, true}, families{true, true}
		return
	}
	var own []netip.Prefix
	if obj != nil {
		own = readPodCIDRs(obj, &report{})
	}
	p.podsHere = families{true, true}
	for _, pods := range n.Pods {
		p.podsIn.add(familyOf(pods.Addr()))
		within := func(r netip.Prefix) bool { return r.Bits() <= pods.Bits() && r.Contains(pods.Addr()) }
		if !slices.ContainsFunc(own, within) {
			p.podsHere.remove(familyOf(pods.Addr()))
		}
	}
}

// toBeDeleted is the taint that the cluster autoscaler puts on a node before it deletes it.
const toBeDeleted = "ToBeDeletedByClusterAutoscaler"

// leaving returns why a node is not to be sent anything new, or "".
func leaving(obj *corev1.Node) string {
	if obj.DeletionTimestamp != nil {
		return "the Node is being deleted"
	}
	if slices.ContainsFunc(obj.Spec.Taints, func(t corev1.Taint) bool { return t.Key == toBeDeleted }) {
		return "the Node has the taint " + toBeDeleted
	}
	return ""
}

// readAddresses adds the node's internal and external addresses to n and returns them, the internal ones first.
func readAddresses(obj *corev1.Node, n *model.Node, rep *report) []netip.Addr {
	var internal, external []netip.Addr
	for i, a := range obj.Status.Addresses {
		if a.Type != corev1.NodeInternalIP && a.Type != corev1.NodeExternalIP {
			continue
		}
		addr, err := parseAddr(a.Address)
		if err != nil {
			rep.flawed(fmt.Sprintf("status.addresses[%d].address", i), err,
				"it doesn't count as this node's; have the kubelet report another one")
			continue
		}
		n.Addresses = append(n.Addresses, addr)
		if a.Type == corev1.NodeInternalIP {
			internal = append(internal, addr)
		} else {
			external = append(external, addr)
		}
	}
	return append(internal, external...)
}

// healthAddresses returns the addresses that health checks are served at: the node's that take node ports, as with
// kube-proxy; nil where all do.
func healthAddresses(n *model.ServiceNode) []netip.Addr {
	accepts := func(a netip.Addr) bool {
		return slices.ContainsFunc(n.NodePorts, func(r model.Range) bool { return r.Contains(a) })
	}
	if !slices.ContainsFunc(everywhere, func(r model.Range) bool { return !accepts(r.First) || !accepts(r.Last) }) {
		return nil
	}
	at := []netip.Addr{}
	for _, a := range append(n.Addresses[:len(n.Addresses):len(n.Addresses)], loopback4.First.Next()) {
		if accepts(a) {
			at = append(at, a)
		}
	}
	slices.SortFunc(at, netip.Addr.Compare)
	return at
}

// primaries returns the first address of each family, as ranges.
func primaries(list []netip.Addr) (rs []model.Range) {
	var seen families
	for _, a := range list {
		if f := familyOf(a); !seen.has(f) {
			seen.add(f)
			rs = append(rs, model.Range{First: a, Last: a})
		}
	}
	return rs
}

func readPodCIDRs(obj *corev1.Node, rep *report) (pods []netip.Prefix) {
	list := obj.Spec.PodCIDRs
	if len(list) == 0 && obj.Spec.PodCIDR != "" {
		list = []string{obj.Spec.PodCIDR}
	}
	for i, s := range list {
		p, err := parsePrefix(s)
		if err != nil {
			rep.flawed(fmt.Sprintf("spec.podCIDRs[%d]", i), err,
				"its addresses don't count as pods; correct it, or configure ClusterCIDRs")
			continue
		}
		pods = append(pods, p)
	}
	return outermost(pods)
}

func equalNode(a, b *model.Node) bool {
	return a.Name == b.Name && slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.Pods, b.Pods) &&
		a.PodInterfaces == b.PodInterfaces
}

func equalServiceNode(a, b *model.ServiceNode) bool {
	return equalNode(a.Node, b.Node) && a.Localhost == b.Localhost && a.DSR == b.DSR &&
		slices.Equal(a.Nodes, b.Nodes) && slices.Equal(a.PodCIDRs, b.PodCIDRs) && slices.Equal(a.NodePorts, b.NodePorts) &&
		slices.Equal(a.ServiceRanges, b.ServiceRanges) && slices.Equal(a.RemoteNodePorts, b.RemoteNodePorts)
}

// owns reports whether a is one of this node's addresses.
func (p *nodeState) owns(a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(p.model.Addresses, a, netip.Addr.Compare)
	return found
}

// hasNodePorts reports whether a, an address of this node, takes node ports.
func (p *nodeState) hasNodePorts(a netip.Addr) bool {
	return slices.ContainsFunc(p.model.NodePorts, func(r model.Range) bool { return r.Contains(a) })
}

// ownsSome reports whether one of this node's addresses is in one of the ranges.
func (p *nodeState) ownsSome(ranges []netip.Prefix) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool {
		return slices.ContainsFunc(p.model.Addresses, r.Contains)
	})
}

// intern returns one handle for equal texts, the zero handle for "".
func intern(s string) (h unique.Handle[string]) {
	if s != "" {
		h = unique.Make(s)
	}
	return h
}
