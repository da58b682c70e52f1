package reachability

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
)

// maxClusterPorts is how many ports a rule of a ClusterNetworkPolicy may have.
const maxClusterPorts = 25

// nodeAt returns the node that has an address itself, "" if none has. Tunnels and bridges of nodes have the first
// addresses of the nodes' ranges of pods: inRange is set for one of these that no pod has.
func (c *Cluster) nodeAt(a netip.Addr) (node string, inRange bool) {
	if n := c.nodes[a]; n != "" {
		return n, false
	}
	for _, r := range c.ranges {
		if first := r.pods.Masked().Addr(); c.pods[a] == nil && (a == first || a == first.Next()) {
			return r.node, true
		}
	}
	return "", false
}

// isNode reports whether p is an address of a Node's status, which peers that are nodes match.
func (s *suggester) isNode(p Peer) bool { return p.Workload == nil && s.nodes[p.Block.Addr()] != "" }

// toAllNodes returns the ports at which egress to all nodes of the cluster was observed, if a rule can have them.
func (s *suggester) toAllNodes(o observed) map[portKey]bool {
	seen := map[portKey]map[string]bool{}
	for p, counts := range o {
		for k := range counts {
			if seen[k] == nil {
				seen[k] = map[string]bool{}
			}
			if s.isNode(p) {
				seen[k][s.nodes[p.Block.Addr()]] = true
			}
		}
	}
	ports := map[portKey]bool{}
	for k, nodes := range seen {
		if len(nodes) > 1 && len(nodes) == len(s.names) {
			ports[k] = true
		}
	}
	if len(ports) > maxClusterPorts {
		return nil
	}
	return ports
}

// promote moves egress to all nodes into a rule of a ClusterNetworkPolicy, whose peers nodes are that come later, too.
func (s *suggester) promote(w *Workload, o observed) []SuggestedRule {
	ports := s.toAllNodes(o)
	if len(ports) == 0 {
		return nil
	}
	if !s.options.NodePeers {
		s.onAllNodes = append(s.onAllNodes, w.Namespace+"/"+w.Name)
		return nil
	}
	r := SuggestedRule{Ports: slices.SortedFunc(maps.Keys(ports), portKey.compare)}
	for _, p := range slices.Collect(maps.Keys(o)) {
		if s.isNode(p) {
			r.Count += o.without(p, ports)
		}
	}
	r.Comments = []string{fmt.Sprintf("all %d nodes were seen; those that come later are allowed too", len(s.names))}
	if l := s.listeners(s.names, r.Ports); l != "" {
		r.Comments = append(r.Comments, l)
	}
	return []SuggestedRule{r}
}

// describe sets the comments of a rule whose CIDRs hold some of these addresses, which may be nodes'.
func (s *suggester) describe(r *SuggestedRule, addrs []netip.Addr, egress bool) {
	r.Blocks = map[netip.Prefix]string{}
	for _, p := range r.Peers {
		if p.Workload != nil {
			continue
		}
		all, tunnels := map[string]bool{}, 0
		for _, a := range addrs {
			if n, inRange := s.nodeAt(a); n != "" && p.Block.Contains(a) {
				if all[n] = true; inRange {
					tunnels++
				}
			}
		}
		if len(all) > 0 {
			r.Blocks[p.Block] = s.nodeComment(slices.Sorted(maps.Keys(all)), tunnels > 0, egress, r.Ports)
		}
	}
	if len(r.Blocks) == 0 {
		return
	}
	r.Comments = append(r.Comments, "a node that comes later, or gets another address, is denied until its address "+
		"stands here")
	if !egress {
		r.Comments = append(r.Comments, "what comes from a node is its own, or of clients that it masquerades")
	}
}

// nodeComment returns what a CIDR stands for.
func (s *suggester) nodeComment(nodes []string, tunnel, egress bool, ports []portKey) string {
	text := "node " + nodes[0]
	if len(nodes) > 1 {
		text = "nodes " + shortList(nodes)
	}
	if tunnel {
		text += ", by its address in the range of its pods"
	}
	if l := s.listeners(nodes, ports); egress && l != "" {
		text += "; " + l
	}
	return text
}

// shortList returns the first of a list, and how many more there are.
func shortList(l []string) string {
	if n := len(l) - maxBlocks; n > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(l[:maxBlocks], ", "), n)
	}
	return strings.Join(l, ", ")
}

// listeners returns which workloads in the host's network listen at ports of nodes, as far as their containers say so.
func (s *suggester) listeners(nodes []string, ports []portKey) string {
	found := map[string]bool{}
	for _, o := range s.Names {
		v, ok := o.(*corev1.Pod)
		if !ok || !v.Spec.HostNetwork || !slices.Contains(nodes, v.Spec.NodeName) || ended(v) {
			continue
		}
		name := v.Name
		if w := identity(v.Namespace+"/"+v.Name, v.Labels); w != nil {
			name = w.Name
		}
		for _, p := range containerPorts(v) {
			if slices.Contains(ports, portKey{protocolOf(p.Protocol), uint16(p.ContainerPort)}) {
				found[v.Namespace+"/"+name] = true
			}
		}
	}
	if len(found) == 0 {
		return ""
	}
	return "host-network pods that listen: " + shortList(slices.Sorted(maps.Keys(found)))
}

// protocolOf returns the protocol of a container's or a Service's port.
func protocolOf(p corev1.Protocol) model.Protocol {
	if of := protocols[strings.ToLower(string(p))]; of != 0 {
		return of
	}
	return model.TCP
}
