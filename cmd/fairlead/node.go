package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/resolve"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
	"fairlead.dev/fairlead/source/manifest"
)

// nodeFlags are the flags of every command that decides for a node.
type nodeFlags struct {
	source       string
	api          kube.Access
	node         string
	clusterCIDRs []string
	masquerade   bool
	nodePorts    []string
	proxyName    string
	mode         string
	scheduler    string
}

// add gives a command the flags.
func (n *nodeFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&n.source, "source", os.Getenv("FAIRLEAD_SOURCE"), "folder or file of Kubernetes YAML or JSON, or - for standard input (or $FAIRLEAD_SOURCE)")
	f.StringVar(&n.api.Kubeconfig, "kubeconfig", "", "read the Kubernetes API that this file leads to, instead of --source; in a pod neither is needed")
	f.StringVar(&n.api.Master, "master", "", "URL of the API server, in place of the kubeconfig's")
	f.StringVar(&n.node, "node", os.Getenv("FAIRLEAD_NODE"), "name of this node, as in its Node object (or $FAIRLEAD_NODE)")
	f.StringSliceVar(&n.clusterCIDRs, "cluster-cidr", nil, "sources that count as pods (default: the Node's spec.podCIDRs)")
	f.BoolVar(&n.masquerade, "masquerade-all", false, "hide the source of all traffic to ClusterIPs")
	f.StringSliceVar(&n.nodePorts, "nodeport-addresses", nil, "own addresses that take node ports: CIDRs, all, primary or localhost (default all)")
	f.StringVar(&n.proxyName, "service-proxy-name", "", "serve only Services with this label service.kubernetes.io/service-proxy-name")
	f.StringVar(&n.mode, "mode", agent.Default, "data plane for Services: "+strings.Join(modeNames(), ", "))
	f.StringVar(&n.scheduler, "scheduler", model.Random.String(), "how Services that don't say choose an endpoint: "+model.AllSchedulers.String())
	c.RegisterFlagCompletionFunc("node", n.completeNode)
	c.RegisterFlagCompletionFunc("mode", cobra.FixedCompletions(modeNames(), cobra.ShellCompDirectiveNoFileComp))
	c.RegisterFlagCompletionFunc("scheduler", cobra.FixedCompletions(schedulerNames(), cobra.ShellCompDirectiveNoFileComp))
	c.MarkFlagDirname("source")
}

func modeNames() (names []string) {
	for _, m := range agent.Modes() {
		names = append(names, m.Name)
	}
	return names
}

func schedulerNames() (names []string) {
	for _, s := range model.AllSchedulers.List() {
		names = append(names, s.String())
	}
	return names
}

// completeNode offers the names of the source's nodes.
func (n *nodeFlags) completeNode(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	if n.source == "" || n.source == manifest.Stdin {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	objects, _, err := manifest.Load(n.source)
	if err != nil {
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

// config gives the mode and what the resolver is told.
func (n *nodeFlags) config() (m agent.Mode, c resolve.Config, err error) {
	if m, err = agent.ModeOf(n.mode); err != nil {
		return m, c, fmt.Errorf("--mode: %w", err)
	}
	if c, err = n.resolve(); err != nil {
		return m, c, err
	}
	c = m.Resolve(c)
	return m, c, c.Validate()
}

func (n *nodeFlags) resolve() (resolve.Config, error) {
	c := resolve.Config{Node: n.node, MasqueradeAll: n.masquerade, NodePortAddresses: n.nodePorts, ProxyName: n.proxyName}
	switch fromAPI := n.api != (kube.Access{}); {
	case n.source != "" && fromAPI:
		return c, errors.New("--source and --kubeconfig or --master both say where to read: give one")
	case n.source == "" && !fromAPI && os.Getenv("KUBERNETES_SERVICE_HOST") == "":
		return c, errors.New("--source is missing: name a folder of Kubernetes YAML, such as examples/shop, or read the Kubernetes API with --kubeconfig")
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
	var err error
	if c.Scheduler, err = model.ParseScheduler(n.scheduler); err != nil {
		return c, fmt.Errorf("--scheduler: %w", err)
	}
	c.Addresses, err = agent.Addresses()
	return c, err
}

// kube is the Kubernetes API as the flags say.
func (n *nodeFlags) kube() *kube.Source {
	return kube.New(kube.Options{Access: n.api, Node: n.node, ProxyName: n.proxyName})
}

// open gives the source to follow.
func (n *nodeFlags) open() source.Source {
	if n.source != "" {
		return manifest.New(n.source)
	}
	return n.kube()
}

// load reads the source once, of the Kubernetes API's Pods only if asked to.
func (n *nodeFlags) load(ctx context.Context, withPods bool) ([]source.Object, []source.Problem, error) {
	if n.source != "" {
		return manifest.Load(n.source)
	}
	ctx, stop := context.WithTimeout(ctx, 30*time.Second)
	defer stop()
	return n.kube().Load(ctx, withPods)
}

// world is a source read once and decided for a node.
type world struct {
	mode     agent.Mode
	objects  []source.Object
	problems []source.Problem
	services *model.Services
}

// read reads the source, its Pods only if asked to, and decides.
func (n *nodeFlags) read(ctx context.Context, withPods bool) (*world, error) {
	m, c, err := n.config()
	if err != nil {
		return nil, err
	}
	objects, problems, err := n.load(ctx, withPods)
	if err != nil {
		return nil, err
	}
	r := resolve.New(c)
	changes := make([]source.Change, len(objects))
	for i, o := range objects {
		changes[i] = source.Change{Key: source.KeyOf(o), Object: o}
	}
	r.Apply(changes)
	w := &world{m, objects, append(problems, r.Problems()...), r.Services()}
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
