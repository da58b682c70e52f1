package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"

	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/source"
)

// PodNetwork is what connects the cast's pods.
type PodNetwork struct {
	Name string
	// Apart has the nodes on links of their own, so that they reach each other's pods through a tunnel. Else they are
	// on one link.
	Apart bool
	// Start has a node's pods connected by the CNI plugin, once it has written a network configuration into a folder. It
	// is called in the node's network namespace, and returns when pods can be attached.
	Start func(ctx context.Context, node, folder string, objects []source.Object) (NodeNetwork, error)
}

// NodeNetwork is the pod network at work on a node.
type NodeNetwork interface {
	io.Closer
	// Decided returns what it has come to.
	Decided() *model.PodNetwork
}

// networkRanges are the nodes' podCIDRs over a pod network, which has the first address of each for itself.
var networkRanges = map[string][]string{
	"a": {"10.244.0.0/23", "fd00:10:244::/63"},
	"b": {"10.244.2.0/23", "fd00:10:244:2::/63"},
}

// ownAddresses returns the addresses that a pod network adds to a node: the first of each of its ranges, as the source
// of clients that it masquerades through a tunnel.
func ownAddresses(node string) (l []netip.Addr) {
	for _, r := range networkRanges[node] {
		l = append(l, netip.MustParsePrefix(r).Addr().Next())
	}
	return l
}

// podNetwork is the pod network of a testbed.
type podNetwork struct {
	*PodNetwork
	folder string
	nodes  []NodeNetwork // in the order of nodes
}

// openNetwork returns how the sandbox of a testbed connects pods; nil: by its own wires.
func openNetwork(p *PodNetwork, o *sandbox.Options) (*podNetwork, error) {
	if p == nil {
		return nil, nil
	}
	folder, err := os.MkdirTemp("", "fairlead-network-")
	if err != nil {
		return nil, err
	}
	n := &podNetwork{PodNetwork: p, folder: folder}
	o.CNI, o.Apart = func(node string) string { return filepath.Join(folder, node) }, p.Apart
	for _, x := range o.Objects {
		if node, is := x.(*corev1.Node); is {
			node.Spec.PodCIDRs = networkRanges[node.Name]
			node.Spec.PodCIDR = node.Spec.PodCIDRs[0]
		}
	}
	return n, nil
}

// connect starts the network of each node and connects the pods.
func (n *podNetwork) connect(ctx context.Context, c *sandbox.Cluster, objects []source.Object) error {
	if n == nil {
		return nil
	}
	for _, node := range nodes {
		host, err := c.Node(node)
		if err != nil {
			return err
		}
		folder := filepath.Join(n.folder, node)
		err = errors.Join(os.Mkdir(folder, 0o700), host.Do(func() error {
			x, err := n.Start(ctx, node, folder, objects)
			if err == nil {
				n.nodes = append(n.nodes, x)
			}
			return err
		}))
		if err != nil {
			return fmt.Errorf("start the pod network on node %s: %w", node, err)
		}
	}
	return c.Attach(ctx)
}

// close ends what runs on nodes.
func (n *podNetwork) close() error {
	if n == nil {
		return nil
	}
	var errs []error
	for _, x := range n.nodes {
		errs = append(errs, x.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(n.folder))...)
}
