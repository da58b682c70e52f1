package inspect

import (
	"context"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reachability"
	"fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/verdict"
)

// Node is what was decided for a node, by its agent or by reading a source once, and what else is known of the node and
// its cluster.
type Node struct {
	*Decided
	Mode       mode.Mode
	Engine     mode.Engine // of policies, if they are on
	PolicyMode string
	ProxyName  string                               // of the Services that it serves
	Elsewhere  func() (reachability.Options, error) // how other nodes decide
	Objects    []source.Object                      // as far as they are listed
	List       func() ([]source.Object, error)      // nil: they are listed
}

// All returns the source's objects. Where the agent has decided they are listed now, at the first call.
func (n *Node) All() (_ []source.Object, err error) {
	if n.List != nil {
		n.Objects, err = n.List()
		n.List = nil
	}
	return n.Objects, err
}

// names returns what finds ends of connections by name, as far as objects are listed.
func (n *Node) names() reachability.Names { return n.Objects }

// serviceNames returns what finds Services by name: without objects, those that have a frontend or a problem.
func (n *Node) serviceNames() (l reachability.Names) {
	if n.List == nil {
		return n.names()
	}
	keys := map[source.Key]bool{}
	for _, f := range n.Services.Frontends {
		keys[keyOf(f.Owner)] = true
	}
	for _, p := range n.Problems {
		keys[p.Object] = true
	}
	for k := range keys {
		if k.Kind == source.Service {
			l = append(l, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: k.Namespace, Name: k.Name}})
		}
	}
	return l
}

// keyOf returns the key of an owner's object.
func keyOf(o model.Owner) source.Key {
	return source.Key{Kind: source.Kind(o.Kind), Namespace: o.Namespace, Name: o.Name}
}

// Packet returns the first packet of a connection between two ends, as reachability.Names.Packet has them. Addresses
// are enough: only names have objects listed.
func (n *Node) Packet(from, to string) (verdict.Packet, error) {
	if p, err := n.names().Packet(from, to); err == nil || n.List == nil {
		return p, err
	}
	if _, err := n.All(); err != nil {
		return verdict.Packet{}, fmt.Errorf("look for the ends of the connection: %w; addresses and numbers need no objects",
			err)
	}
	return n.names().Packet(from, to)
}

// Pods returns "namespace/name" of pods by their addresses, as far as they are known: those of this node if policies
// are enforced, and where objects are listed all.
func (n *Node) Pods() map[netip.Addr]string {
	m := n.names().Pods()
	if n.Services.Policies != nil {
		for a, s := range n.Services.Policies.Subjects {
			m[a] = s.Pod
		}
	}
	return m
}

// Pools returns the pools by their IDs.
func (n *Node) Pools() map[uint64]*model.Pool {
	pools := map[uint64]*model.Pool{}
	for _, p := range n.Services.Pools() {
		pools[p.ID] = p
	}
	return pools
}

// Unread returns an error where an object could not be read.
func (d *Decided) Unread() error {
	if d.Lost == 0 {
		return nil
	}
	return fmt.Errorf("not every object could be read: %d problems of the source, see above", d.Lost)
}

// Audit is what the kernel holds against what was decided.
type Audit struct {
	*mode.Audit                   // of Services and policies
	policies    *mode.PolicyAudit // nil where they are off
}

// Audit compares the kernel of the calling thread's network namespace with what is decided. Nothing is written for it.
func (n *Node) Audit(ctx context.Context) (a *Audit, err error) {
	a = &Audit{}
	if a.Audit, err = mode.Check(ctx, n.Mode, n.Services); err != nil || n.Services.Policies == nil {
		return a, err
	}
	if a.policies, err = mode.CheckPolicies(ctx, n.Engine, n.Services.Policies); err != nil {
		return a, err
	}
	p := a.policies
	a.Put, a.Del = append(a.Put, p.Put...), append(a.Del, p.Del...)
	a.Wanted += p.Held + len(p.Put)
	a.Held += p.Held + len(p.Del)
	return a, nil
}

// frontend words what an audit found of a frontend.
func (n *Node) frontend(a *Audit, f *model.Frontend) string {
	if n.Mode.Ends {
		return "in the agent's process: see its /status"
	}
	if missing, of := a.Lacks(f); missing > 0 {
		return lacks(missing, of)
	}
	if missing, of := a.Attached(n.Services.ServiceNode); missing > 0 {
		return fmt.Sprintf("not served: the node lacks %d of %d facts", missing, of)
	}
	return InSync
}

// InSync is what an audit finds where the kernel lacks nothing.
const InSync = "in sync"

func lacks(missing, of int) string { return fmt.Sprintf("lacks %d of %d facts", missing, of) }

// unserved returns why no Service has an address, as far as objects are listed.
func (n *Node) unserved(a netip.Addr) string { return service.UnservedAt(n.Objects, a, n.ProxyName) }
