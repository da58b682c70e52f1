package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// nodeFlags are the flags of every command that decides for a node.
type nodeFlags struct {
	source       string
	node         string
	clusterCIDRs []string
	masquerade   bool
	nodePorts    []string
	proxyName    string
}

// add gives a command the flags.
func (n *nodeFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&n.source, "source", os.Getenv("FAIRLEAD_SOURCE"), "folder or file of Kubernetes YAML or JSON, or - for standard input (or $FAIRLEAD_SOURCE)")
	f.StringVar(&n.node, "node", os.Getenv("FAIRLEAD_NODE"), "name of this node, as in its Node object (or $FAIRLEAD_NODE)")
	f.StringSliceVar(&n.clusterCIDRs, "cluster-cidr", nil, "sources that count as pods (default: the Node's spec.podCIDRs)")
	f.BoolVar(&n.masquerade, "masquerade-all", false, "hide the source of all traffic to ClusterIPs")
	f.StringSliceVar(&n.nodePorts, "nodeport-addresses", nil, "own addresses that take node ports: CIDRs, all, primary or localhost (default all)")
	f.StringVar(&n.proxyName, "service-proxy-name", "", "serve only Services with this label service.kubernetes.io/service-proxy-name")
	c.RegisterFlagCompletionFunc("node", n.completeNode)
	c.MarkFlagDirname("source")
}

// completeNode offers the names of the source's nodes.
func (n *nodeFlags) completeNode(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	objects, _, err := manifest.Load(n.source)
	if n.source == "" || n.source == "-" || err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return nodeNames(objects), cobra.ShellCompDirectiveNoFileComp
}

func nodeNames(objects []source.Object) (names []string) {
	for _, o := range objects {
		if k := source.KeyOf(o); k.Kind == source.Node {
			names = append(names, k.Name)
		}
	}
	return names
}

// config gives what the resolver is told.
func (n *nodeFlags) config() (resolve.Config, error) {
	c := resolve.Config{Node: n.node, MasqueradeAll: n.masquerade, NodePortAddresses: n.nodePorts, ProxyName: n.proxyName}
	if n.source == "" {
		return c, errors.New("--source is missing: name a folder of Kubernetes YAML, such as examples/shop")
	}
	if n.node == "" {
		return c, errors.New("--node is missing: name the node to decide for, as in its Node object")
	}
	for _, s := range n.clusterCIDRs {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return c, fmt.Errorf("--cluster-cidr %q: %w: write it like 10.244.0.0/16", s, err)
		}
		c.ClusterCIDRs = append(c.ClusterCIDRs, p)
	}
	addrs, err := agent.Addresses()
	if err != nil {
		return c, err
	}
	c.Addresses = addrs
	return c, c.Validate()
}

// world is a source read once and decided for a node.
type world struct {
	objects  []source.Object
	problems []source.Problem
	services *model.Services
}

// read reads the source and decides.
func (n *nodeFlags) read() (*world, error) {
	c, err := n.config()
	if err != nil {
		return nil, err
	}
	objects, problems, err := manifest.Load(n.source)
	if err != nil {
		return nil, err
	}
	r := resolve.New(c)
	changes := make([]source.Change, len(objects))
	for i, o := range objects {
		changes[i] = source.Change{Key: source.KeyOf(o), Object: o}
	}
	r.Apply(changes)
	w := &world{objects, append(problems, r.Problems()...), r.Services()}
	return w, w.knows(n.node)
}

// knows says if the source has no such node.
func (w *world) knows(node string) error {
	names := nodeNames(w.objects)
	for _, m := range names {
		if m == node {
			return nil
		}
	}
	if len(names) == 0 {
		return nil // a source of Services alone: the node is known by its name only
	}
	return fmt.Errorf("no Node %q in the source: there are %q", node, names)
}
