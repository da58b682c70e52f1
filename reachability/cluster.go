// Package reachability decides from the objects of a cluster alone which of its ends can open connections to which: it
// needs no kernel, no agent and no rights. A connection is evaluated as the nodes of the cluster would: Services and
// the egress policies of its source on the source's node, the ingress policies of each backend on the backend's node,
// with the source address that is seen there.
//
// On that stand expectations, which people write about their policies and a CI checks (Check), the matrix of all pods
// (NewMatrix), and what a change of the objects would newly allow or deny (Compare).
package reachability

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve/policy"
	"fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// Options are what the agents of a cluster are configured with. The names and addresses of their nodes come from the
// objects.
type Options struct {
	Services service.Config
	Policies policy.Config
	// NodePeers has nodes be peers of suggested ClusterNetworkPolicies: the cluster has that kind, with this field.
	NodePeers bool
}

// wholeCluster is how many times the bounds of one node's policies, all bounds together, hold for a whole cluster.
const wholeCluster = 256

// Cluster is what the objects of a cluster come to on all of its nodes. It is not safe for use by several goroutines at
// once.
type Cluster struct {
	Names
	options  Options
	changes  []source.Change
	policies *model.Policies // with the pods of all nodes
	resolver *policy.Resolver
	pods     map[netip.Addr]*corev1.Pod // those that count, by address
	byName   map[string]*corev1.Pod     // the same by "namespace/name"; nil until it is asked for
	nodes    map[netip.Addr]string
	ranges   []podRange
	names    []string                   // of nodes, sorted
	own      map[string][]netip.Addr    // the addresses of nodes
	services map[string]*model.Snapshot // of nodes that were asked for
	views    map[string]*model.Policies // likewise
}

// podRange is addresses of a node's pods.
type podRange struct {
	pods netip.Prefix
	node string
}

// New returns the Cluster that has these objects. Pods that stand for pod templates (source.Template) get addresses,
// unless there are pods of the template, and Services without EndpointSlices lead to the pods that they select then.
func New(objects []source.Object, o Options) *Cluster {
	objects = withTemplates(objects, o.Policies.PodRanges)
	c := &Cluster{Names: objects, options: o, pods: map[netip.Addr]*corev1.Pod{}, nodes: map[netip.Addr]string{},
		own: map[string][]netip.Addr{}, services: map[string]*model.Snapshot{}, views: map[string]*model.Policies{}}
	for _, x := range objects {
		c.changes = append(c.changes, source.Change{Key: source.KeyOf(x), Object: x})
		if v, ok := x.(*corev1.Node); ok {
			c.own[v.Name] = nodeAddresses(v)
			for _, a := range c.own[v.Name] {
				c.nodes[a] = v.Name
			}
			for _, text := range v.Spec.PodCIDRs {
				if p, err := service.ParsePrefix(text); err == nil {
					c.ranges = append(c.ranges, podRange{p, v.Name})
				}
			}
		}
	}
	c.names = slices.Sorted(maps.Keys(c.own))
	o.Policies.Node, o.Policies.Addresses, o.Policies.AllNodes = "", nil, true
	o.Policies.Limits = policy.DefaultLimits.Times(wholeCluster)
	r := policy.New(o.Policies)
	r.Apply(c.changes)
	c.policies, c.resolver = r.Policies(), r
	for _, x := range objects {
		if v, ok := x.(*corev1.Pod); ok && counts(v) {
			for _, a := range podAddresses(v) {
				if s := c.policies.Subjects[a]; s == nil || s.Pod == source.KeyOf(v).Namespace+"/"+v.Name {
					c.pods[a] = v
				}
			}
		}
	}
	return c
}

// Problems returns what is wrong with the policies, as the agents of all nodes would report it.
func (c *Cluster) Problems() []source.Problem { return c.resolver.Problems() }

// NodeOf returns the node that has an address itself, runs the pod that has it, or has it in the range of its pods, ""
// if none is known.
func (c *Cluster) NodeOf(a netip.Addr) string {
	if p := c.pods[a]; p != nil {
		return p.Spec.NodeName
	}
	if n := c.nodes[a]; n != "" {
		return n
	}
	for _, r := range c.ranges {
		if r.pods.Contains(a) {
			return r.node
		}
	}
	return ""
}

// snapshot returns what a node does about Services.
func (c *Cluster) snapshot(node string) *model.Snapshot {
	s := c.services[node]
	if s == nil {
		config := c.options.Services
		config.Node, config.Addresses, config.Primary, config.Nodeless = node, nil, netip.Addr{}, true
		r := service.New(config)
		r.Apply(c.changes)
		s = r.Services()
		c.services[node] = s
	}
	return s
}

// view returns the policies of the cluster as a node sees them, where its own packets are not evaluated.
func (c *Cluster) view(node string) *model.Policies {
	v := c.views[node]
	if v == nil {
		of := *c.policies
		n := *of.Node
		n.Addresses = c.own[node]
		of.Node, v = &n, &of
		c.views[node] = v
	}
	return v
}

// Path is one course that a connection may take.
type Path struct {
	Node   string     // where it ends, "" outside of the cluster
	Source netip.Addr // the address that it comes from there
	Policy verdict.PolicyOutcome
}

// Outcome is what becomes of a connection.
type Outcome struct {
	Node   string // where it meets Services
	Action verdict.Action
	Stage  verdict.Stage // where Services reject or drop it
	Reason string        // why they do
	Paths  []Path        // one for each backend, or for the destination itself; none where Services reject or drop it
}

// Decide returns what becomes of the connection that begins with p.
func (c *Cluster) Decide(p verdict.Packet) Outcome {
	node := c.NodeOf(p.Src.Addr())
	if node != "" {
		return c.onNode(node, p, nil)
	}
	if node = c.NodeOf(p.Dst.Addr()); node != "" {
		return c.onNode(node, p, nil)
	}
	var first *Outcome // a load balancer sends to nodes that serve; without a node, policies alone decide
	for _, node := range append(slices.Clone(c.names), "") {
		o := c.onNode(node, p, nil)
		if o.Action == verdict.Forward {
			return o
		}
		if first == nil {
			first = &o
		}
	}
	return *first
}

// onNode returns what becomes of p where it meets a node. egress is what was decided about it on another one, if
// something was.
func (c *Cluster) onNode(node string, p verdict.Packet, egress *verdict.PolicyOutcome) Outcome {
	v := verdict.Of(c.snapshot(node), p)
	o := Outcome{Node: node, Action: v.Action}
	if o.Action == verdict.Reject || o.Action == verdict.Drop {
		o.Stage, o.Reason = v.Steps[len(v.Steps)-1].Stage, v.Reason
		return o
	}
	from := func(p verdict.Packet) verdict.PolicyOutcome {
		if egress != nil {
			return *egress
		}
		return verdict.Egress(c.view(node), p)
	}
	if o.Action == verdict.Pass {
		dst := p.Dst.Addr()
		if other := c.nodes[dst]; other != "" && other != node && egress == nil {
			at := from(p)
			if at.Verdict == model.VerdictAccept {
				return c.onNode(other, p, &at)
			}
		}
		if dst == p.Src.Addr() {
			own := verdict.PolicyOutcome{Reason: "a packet to its own address never leaves the pod"}
			o.Paths = []Path{{Node: c.NodeOf(dst), Source: dst, Policy: own}}
		} else {
			o.Paths = []Path{c.Path(node, p, false, from(p))}
		}
		return o
	}
	for _, k := range v.Candidates {
		q := p
		q.Dst = k.Backend.Addr
		o.Paths = append(o.Paths, c.Path(node, q, k.Masqueraded, from(q)))
	}
	return o
}

// Path returns the course of p, which node sends to its destination with its own address if it masquerades it. egress
// is what the policies of its source decided.
func (c *Cluster) Path(node string, p verdict.Packet, masquerades bool, egress verdict.PolicyOutcome) Path {
	path := Path{Node: c.NodeOf(p.Dst.Addr()), Source: p.Src.Addr()}
	if masquerades && path.Node != node {
		path.Source = c.ownAddress(node, p.Dst.Addr().Is4(), path.Source)
		p.Src = netip.AddrPortFrom(path.Source, p.Src.Port())
	}
	path.Policy = verdict.Ingress(c.view(path.Node), p, egress)
	return path
}

// ownAddress returns the node's first address of a family, else another one.
func (c *Cluster) ownAddress(node string, v4 bool, other netip.Addr) netip.Addr {
	for _, a := range c.own[node] {
		if a.Is4() == v4 {
			return a
		}
	}
	return other
}

// Fate is what becomes of a connection, in a word.
type Fate string

// The fates.
const (
	Allowed     Fate = "allowed"
	Denied      Fate = "denied"
	Mixed       Fate = "mixed"       // policies deny some of the backends
	Unreachable Fate = "unreachable" // Services have nothing behind it, so that policies don't count
)

// Fate returns what becomes of the connection, why, and the rules that decide it.
func (o Outcome) Fate() (f Fate, reason string, by []model.RuleRef) {
	switch {
	case len(o.Paths) == 0 && o.Stage == verdict.StageSources:
		return Denied, o.Reason, nil
	case len(o.Paths) == 0:
		return Unreachable, o.Reason, nil
	}
	dropped := 0
	for _, p := range o.Paths {
		if drops := p.Policy.Verdict == model.VerdictDrop; drops || reason == "" {
			if reason, by = p.Policy.Reason, p.Policy.Deciders(); drops {
				dropped++
			}
		}
	}
	switch dropped {
	case 0:
		return Allowed, reason, by
	case len(o.Paths):
		return Denied, reason, by
	}
	return Mixed, fmt.Sprintf("denied at %d of %d backends: %s", dropped, len(o.Paths), reason), by
}
