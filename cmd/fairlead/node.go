package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/agent/attach"
	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/names"
	"fairlead.dev/fairlead/kernel/route"
	"fairlead.dev/fairlead/model"
	"fairlead.dev/fairlead/reachability"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// nodeFlags are the flags of every command that decides for a node.
type nodeFlags struct {
	config.Flags
	source string // as loaded
	node   string
}

// add adds the flags to a command.
func (n *nodeFlags) add(c *cobra.Command) {
	n.AddDecisions(c.Flags())
	n.complete(c)
}

// complete returns a command's flags their completions.
func (n *nodeFlags) complete(c *cobra.Command) {
	c.RegisterFlagCompletionFunc("node", completeNode)
	c.RegisterFlagCompletionFunc("mode", cobra.FixedCompletions(append(mode.Names(), mode.Auto),
		cobra.ShellCompDirectiveNoFileComp))
	c.RegisterFlagCompletionFunc("scheduler", cobra.FixedCompletions(schedulerNames(), cobra.ShellCompDirectiveNoFileComp))
	c.MarkFlagDirname("source")
	c.MarkFlagFilename("config", "yaml", "yml", "json")
}

func schedulerNames() (names []string) {
	for _, s := range model.AllSchedulers.List() {
		names = append(names, s.String())
	}
	return names
}

// completeNode offers the names of the source's nodes.
func completeNode(c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	path, _ := c.Flags().GetString("source")
	objects, _, err := manifest.Load(path)
	if path == "" || path == manifest.Stdin || err != nil {
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

// decided is a configuration with what follows from it here.
type decided struct {
	*config.Config
	mode    mode.Mode
	why     string
	resolve resolve.Config
	// how policies are enforced; nil: not at all
	policies *agent.PolicyOptions
}

// decide finds out what a configuration comes to in the calling thread's network namespace.
func decide(ctx context.Context, c *config.Config) (d decided, err error) {
	d.Config = c
	if d.resolve, err = c.Resolve(); err != nil {
		return d, err
	}
	if c.Attaches() && !c.Network() && attach.MapsPorts(c.Own.Network.CNIFolder) {
		d.resolve.HostPorts = false // they are portmap's
	}
	if d.mode, d.why, err = mode.Choose(ctx, c.Own.Mode); err != nil {
		return d, err
	}
	d.mode = d.mode.With(c.Options())
	if err = d.mode.Serves(c.PodDevice()); err != nil {
		return d, err
	}
	if c.Own.Source == "" {
		if a, err := access(c); err == nil {
			d.resolve.APIServers = apiServers(ctx, a)
		}
	}
	d.resolve = d.mode.Resolve(d.resolve)
	if err = d.resolve.Validate(); err != nil || !c.Policies() {
		return d, err
	}
	d.policies = &agent.PolicyOptions{Resolve: c.ResolvePolicies(d.resolve)}
	d.policies.Resolvers.Services, d.policies.Resolvers.Addresses = c.Resolvers()
	d.policies.Engine, d.policies.Why, err = mode.ChooseEngine(ctx, c.Own.Policy.Engine)
	if err == nil {
		err = d.policies.Engine.Serves(c.PodDevice())
	}
	return d, err
}

// snapshot is a source read once and decided for a node.
type snapshot struct {
	config   *config.Config
	mode     mode.Mode
	objects  []source.Object
	problems []source.Problem
	lost     int                      // problems that kept an object from being read
	services *model.Snapshot          // with the policies, if they are on
	engine   mode.Engine              // of policies, if they are on
	whyEmpty func(model.Entry) string // why a frontend has no backend
}

// names returns what finds ends of connections by name.
func (w *snapshot) names() reachability.Names { return w.objects }

// read reads the source, its Pods only if asked to, and decides.
func (n *nodeFlags) read(ctx context.Context, withPods bool) (*snapshot, error) {
	c, err := n.Load()
	if err != nil {
		return nil, err
	}
	for _, w := range c.Warnings {
		fmt.Fprintln(os.Stderr, "fairlead: warning:", escape.String(w))
	}
	if c.Own.Source == "" {
		if _, err := access(c); err != nil {
			return nil, err
		}
	}
	d, err := decide(ctx, c)
	if err != nil {
		return nil, err
	}
	n.source, n.node = c.Own.Source, d.resolve.Node
	objects, problems, err := load(ctx, c, n.node, withPods)
	if err != nil {
		return nil, err
	}
	r := resolve.New(d.resolve)
	changes := make([]source.Change, len(objects))
	for i, o := range objects {
		changes[i] = source.Change{Key: source.KeyOf(o), Object: o}
	}
	r.Apply(changes)
	w := &snapshot{config: c, mode: d.mode, objects: objects, problems: append(problems, r.Problems()...),
		lost: losses(problems), services: r.Services(), whyEmpty: r.WhyEmpty}
	if d.policies != nil {
		set := d.policies.Resolve
		if !c.Network() && c.ChecksSources() {
			set.Devices = podDevices()
		}
		p := policy.New(set)
		if d.mode.PreDNAT {
			p.ApplyServices(model.Change[model.ServicePart]{Put: w.services.Parts()})
		}
		p.Apply(changes)
		if p.NamesInUse() {
			if l, err := names.Recorded(); err == nil { // elsewhere than on the node nothing is known of them
				p.Apply(l)
			}
		}
		w.services.Policies, w.engine = p.Policies(), d.policies.Engine
		w.problems = append(w.problems, p.Problems()...)
	}
	return w, w.knows(n.node)
}

// podDevices returns the devices by which this node's routes reach pods: elsewhere than on the node those of none.
func podDevices() map[netip.Addr]string {
	hosts, err := route.OpenHosts()
	if err != nil {
		return nil
	}
	defer hosts.Close()
	devices, err := hosts.Devices()
	if err != nil {
		return nil
	}
	return devices
}

// harmless are the reasons of a source's problems that keep no object from being read.
var harmless = []string{manifest.KindNotRead, manifest.Duplicate, manifest.NotWatched, manifest.StillOpen}

// losses counts the problems of a source that kept an object from being read.
func losses(problems []source.Problem) (n int) {
	for _, p := range problems {
		if !slices.Contains(harmless, p.Reason) {
			n++
		}
	}
	return n
}

// unread returns an error where an object could not be read.
func (w *snapshot) unread() error {
	if w.lost == 0 {
		return nil
	}
	return fmt.Errorf("not every object could be read: %d problems of the source, see above", w.lost)
}

// knows reports whether the source has no such node.
func (w *snapshot) knows(node string) error {
	names := nodeNames(w.objects)
	for _, m := range names {
		if m == node {
			return nil
		}
	}
	if len(names) == 0 {
		return nil // a source of Services alone: the node is known by its name only
	}
	return fmt.Errorf("no Node %q in the source: there are %q; name one with --node", node, names)
}
