package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead.dev/fairlead/bpf/device"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/sandbox"
	"fairlead.dev/fairlead/source"
)

// The client's pod: on the far node, or on the server's own.
var (
	clientAddr    = netip.MustParseAddr("10.129.0.254")
	neighbourAddr = netip.MustParseAddr("10.128.0.253")
)

// farNode is the name of the far end as a node.
const farNode = "b"

// OwnNode is how the agent of a node runs that connects the node's pods.
type OwnNode struct {
	Mode  string
	Flags []string // beyond those that every such agent has
}

// AddOwnPair makes the namespaces of an arm with a pod connected by the node's agent, called by the CNI plugin, and
// adds them to the testbed. With an overlay, the far end is another node with an agent, and packets between them go
// through VXLAN; else it is a client outside of the cluster.
func (b *Testbed) AddOwnPair(ctx context.Context, arm string, overlay bool) (*Pair, error) {
	p, err := b.addPair(ctx, arm, nil, false)
	if err != nil {
		return p, err
	}
	node := OwnNode{Mode: "nftables"}
	far := &node
	if !overlay {
		far = nil
	}
	_, runs, err := b.startNetwork(ctx, p, node, far)
	if err == nil {
		p.pod, err = b.attachPod(p, p, runs[0], "server", podAddr)
	}
	return p, err
}

// AddOwnPods makes the namespaces of an arm with two pods connected by their nodes' agents, called by the CNI plugin,
// and adds them to the testbed: the server's on the near node, and the client's on the far one, which is on the same
// link, or beside the server's where no far node is given. It returns the nodes, the near one first.
func (b *Testbed) AddOwnPods(ctx context.Context, arm string, near OwnNode, far *OwnNode) ([]*Node, error) {
	p, err := b.addPair(ctx, arm, nil, false)
	if err == nil {
		err = errors.Join(addLink(p.Near, NodeAddr), addLink(p.Far, farAddr))
	}
	if err != nil {
		return nil, err
	}
	nodes, runs, err := b.startNetwork(ctx, p, near, far)
	if err == nil {
		p.pod, err = b.attachPod(p, p, runs[0], "server", podAddr)
	}
	switch {
	case err != nil:
	case far == nil:
		p.client, err = b.attachPod(p, p, runs[0], "client", neighbourAddr)
	default:
		p.client, err = b.attachPod(p, p.peer, runs[1], "client", clientAddr)
	}
	return nodes, err
}

// AddRoutedPods makes the namespaces of an arm with two pods behind veths or bridges, for which their nodes route,
// without any agent, and adds them to the testbed: the server's on the near node, and the client's on the far one, or
// beside the server's.
func (b *Testbed) AddRoutedPods(ctx context.Context, arm string, path Path, across bool) (*Pair, error) {
	p, err := b.AddPathPair(ctx, arm, path)
	if err != nil {
		return p, err
	}
	if p.client, err = NewNamespace(p.podName("client")); err != nil {
		return p, err
	}
	node, addr := p.Near, neighbourAddr
	if across {
		node, addr = p.Far, clientAddr
	}
	return p, routeBy(ctx, path, node, p.client, addr, "client")
}

// podName returns the name of a pod's namespace.
func (p *Pair) podName(pod string) string {
	return strings.TrimSuffix(p.Near.Name, nodeSuffix) + "-" + pod
}

// addLink adds a node's address as one on a link with the other node's.
func addLink(node *netns.Namespace, addr netip.Addr) error {
	return DialLink(node, func(c *link.Conn) error {
		eth0, err := c.Index("eth0")
		if err != nil {
			return err
		}
		return c.AddAddress(eth0, netip.PrefixFrom(addr, 24))
	})
}

// startNetwork starts agents that connect pods in a pair's near end, and in the far end if that is a node, waits until
// they are ready and rest, and returns them and the folders with their network configurations.
func (b *Testbed) startNetwork(ctx context.Context, p *Pair, near OwnNode, far *OwnNode) (nodes []*Node, runs []string,
	err error) {
	cluster := &Cluster{Objects: []source.Object{NewNodeObject(NodeName, NodeAddr, podAddr)}}
	if far != nil {
		cluster.Objects = append(cluster.Objects, NewNodeObject(farNode, farAddr, tunnelAddr))
		p.peer = &Pair{Near: p.Far}
		if b.Grouped {
			p.peer.Group()
		}
	}
	folder, err := cluster.WriteTo(b.Dir, "network-"+p.Arm, len(cluster.Objects))
	if err != nil {
		return nil, nil, err
	}
	nodes = append(nodes, NewNode(p, near.Mode, folder, near.Flags...))
	if far != nil {
		nodes = append(nodes, NewNode(p.peer, far.Mode, folder, far.Flags...))
		nodes[1].name = farNode
	}
	for _, n := range nodes {
		run, err := b.startOwn(ctx, n)
		if err != nil {
			return nil, nil, err
		}
		runs = append(runs, run)
	}
	return nodes, runs, nil
}

// startOwn starts an agent that connects pods, waits until it is ready and rests, and returns the folder with its
// network configuration.
func (b *Testbed) startOwn(ctx context.Context, n *Node) (run string, err error) {
	run = filepath.Join(b.Dir, "run-"+strings.TrimPrefix(n.Pair.Near.Name, b.Name+"-"))
	if err := os.MkdirAll(run, 0o755); err != nil {
		return "", fmt.Errorf("make a folder for the agent's socket: %w", err)
	}
	n.flags = append([]string{"--network-mode", "Own", "--network-cni-folder", run, "--network-run-folder", run},
		n.flags...)
	if _, err := b.ServeNode(ctx, n); err != nil {
		return "", err
	}
	for end := time.Now().Add(b.Within(Patience)); time.Now().Before(end); {
		if l, _ := filepath.Glob(filepath.Join(run, "*.conflist")); len(l) > 0 {
			return run, nil
		}
		if err := errors.Join(n.Agent.Err(), Sleep(ctx, 5*time.Millisecond)); err != nil {
			return "", err
		}
	}
	return "", fmt.Errorf("%s writes no network configuration into %s: %s", n.Agent.name, run, n.Agent.last())
}

// attachPod makes the namespace of one of p's pods and has it connected by the agent of a node, called by the CNI
// plugin.
func (b *Testbed) attachPod(p, node *Pair, run, pod string, addr netip.Addr) (*netns.Namespace, error) {
	ns, err := NewNamespace(p.podName(pod))
	if err != nil {
		return nil, err
	}
	r := sandbox.Runtime{Folder: run, Container: p.Arm + "-" + pod, Pod: "lab/" + pod, Netns: ns.Name,
		Addresses: []netip.Addr{addr}}
	config, err := r.Config()
	if err == nil {
		err = node.Near.Do(func() error { _, err := r.Attach(config); return err })
	}
	if err != nil {
		return ns, fmt.Errorf("attach the %s's pod on %s by the CNI plugin: %w", pod, node.Near.Name, err)
	}
	return ns, nil
}

// ExcludeWire takes a node's wire out of its fast path's map of pods' devices: it stands for a network card. It is a
// veth whose other end is in another network namespace, as a pod's device is, so that what leaves the node would be
// redirected, too. It reports whether the wire was there.
func (n *Node) ExcludeWire() (found bool, err error) {
	err = DialLink(n.Pair.Near, func(c *link.Conn) error {
		eth0, err := c.Index("eth0")
		if err != nil {
			return err
		}
		return n.Pair.Near.Do(func() error {
			f, err := device.CurrentFolders()
			if err != nil {
				return err
			}
			paths, _ := filepath.Glob(filepath.Join(f.Services, bpf.LayoutPrefix+"*", "pods"))
			for _, path := range paths {
				pods, err := bpf.Pinned[uint32, uint32](path)
				if pods == nil {
					return err
				}
				defer pods.Close()
				wire := false
				err = bpf.ReadAll(pods, func(index, _ uint32) { wire = wire || index == uint32(eth0) })
				if err == nil && wire {
					found, err = true, pods.Delete(uint32(eth0))
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil {
		err = fmt.Errorf("take the wire of %s out of the devices of its pods: %w", n.Pair.Near.Name, err)
	}
	return found, err
}

// NewNodeObject returns the Node with that address and pods in one's range.
func NewNodeObject(name string, addr, pod netip.Addr) *corev1.Node {
	n := &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Spec.PodCIDRs = []string{netip.PrefixFrom(pod, 24).Masked().String()}
	n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: addr.String()}}
	return n
}
