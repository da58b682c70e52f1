package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/agent/local"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/network/attach"
	"fairlead.dev/fairlead/agent/policy/names"
	"fairlead.dev/fairlead/inspect"
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
	config *config.Config // as read
	node   string
}

// asTheAgent ends the help of commands that decide as the agent of their node does.
const asTheAgent = `

As root in the network namespace of a node where an agent runs, no flag of configuration is needed: the agent's
configuration decides, with the mode that it chose. With such a flag, or without an agent, flags and defaults decide.`

// add adds the flags to a command.
func (n *nodeFlags) add(c *cobra.Command) {
	n.AddDecisions(c.Flags())
	n.complete(c)
	c.Annotations = map[string]string{decidesAsAgent: ""}
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

// choose finds out with what a configuration serves the calling thread's network namespace.
func choose(ctx context.Context, c *config.Config) (d decided, err error) {
	d.Config = c
	if d.mode, d.why, err = mode.Choose(ctx, c.Own.Mode); err != nil {
		return d, err
	}
	d.mode = d.mode.With(c.Options())
	if err = d.mode.Serves(c.PodDevice()); err != nil || !c.Policies() {
		return d, err
	}
	d.policies = &agent.PolicyOptions{}
	d.policies.Engine, d.policies.Why, err = mode.ChooseEngine(ctx, c.Own.Policy.Engine, d.mode.FastPath(c.Options()))
	if err == nil {
		err = d.policies.Engine.Serves(c.PodDevice())
	}
	return d, err
}

// decide finds out what a configuration comes to in the calling thread's network namespace.
func decide(ctx context.Context, c *config.Config) (d decided, err error) {
	set, err := c.Resolve()
	if err != nil {
		return d, err
	}
	if d, err = choose(ctx, c); err != nil {
		return d, err
	}
	d.resolve = set
	if c.Attaches() && !c.Network() && attach.MapsPorts(c.Own.Network.CNIFolder) {
		d.resolve.HostPorts = false // they are portmap's
	}
	if c.Own.Source == "" {
		if a, err := access(c); err == nil {
			d.resolve.APIServers = apiServers(ctx, a)
		}
	}
	d.resolve = d.mode.Resolve(d.resolve)
	if err = d.resolve.Validate(); err != nil || d.policies == nil {
		return d, err
	}
	d.policies.Resolve = c.ResolvePolicies(d.resolve)
	d.policies.Resolvers.Services, d.policies.Resolvers.Addresses = c.Resolvers()
	d.policies.Resolvers.AnyDevice = !c.ChecksSources()
	return d, nil
}

// inspected returns what inspects the node, with nothing decided yet.
func (d decided) inspected() *inspect.Node {
	n := &inspect.Node{Mode: d.mode, PolicyMode: string(d.Own.Policy.Mode), ProxyName: d.Own.ServiceProxyName,
		Elsewhere: func() (reachability.Options, error) { return options(d.Config) }}
	if d.policies != nil {
		n.Engine = d.policies.Engine
	}
	return n
}

// configured returns the configuration that a command on a node decides by: that of the flags, if one of them decides,
// else that of the agent of this network namespace. Without either alone is why no agent is there, and the flags'
// defaults decide.
func configured(f *config.Flags) (c *config.Config, ofAgent bool, alone, err error) {
	c, err = f.Load()
	if err != nil || f.Decide() {
		return c, false, nil, err
	}
	theirs := &config.Config{}
	err = local.Read(c.Own.Network.RunFolder, local.Configuration, func(r io.Reader) error {
		return json.NewDecoder(r).Decode(theirs)
	})
	if errors.Is(err, local.ErrNoAgent) {
		return c, false, err, nil
	}
	return theirs, true, nil, err
}

// load returns the configuration and whether it is the agent's, as configured does, and warns where no agent is there.
func (n *nodeFlags) load() (c *config.Config, ofAgent bool, err error) {
	c, ofAgent, alone, err := configured(&n.Flags)
	if err != nil {
		return nil, false, err
	}
	for _, w := range c.Warnings {
		fmt.Fprintln(os.Stderr, "fairlead: warning:", escape.String(w))
	}
	if alone != nil {
		fmt.Fprintln(os.Stderr, "fairlead: warning: the flags' defaults decide:", escape.String(alone.Error()))
	}
	return c, ofAgent, nil
}

// read returns what is decided: what the agent sends, or by reading the source, its Pods only if asked to.
func (n *nodeFlags) read(ctx context.Context, withPods bool) (*inspect.Node, error) {
	c, ofAgent, err := n.load()
	if err != nil {
		return nil, err
	}
	if ofAgent {
		return n.ofAgent(ctx, c)
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
	n.config, n.node = c, d.resolve.Node
	objects, problems, err := load(ctx, c, n.node, withPods)
	if err != nil {
		return nil, err
	}
	if d.policies == nil {
		if text := ignoredPolicies(objects); text != "" {
			fmt.Fprintln(os.Stderr, "fairlead: warning:", text)
		}
	}
	w := d.resolved(objects, problems)
	return w, knows(objects, n.node)
}

// resolved decides what objects come to.
func (d decided) resolved(objects []source.Object, problems []source.Problem) *inspect.Node {
	r := resolve.New(d.resolve)
	changes := source.Put(objects...)
	r.Apply(changes)
	w := d.inspected()
	w.Decided, w.Objects = inspect.OfServices(r), objects
	w.Problems, w.Lost = append(problems, w.Problems...), inspect.Lost(problems)
	if d.policies == nil {
		return w
	}
	set := d.policies.Resolve
	if !d.Network() && d.ChecksSources() {
		set.Devices = devicesOfPods()
	}
	p := policy.New(set)
	if d.mode.PreDNAT {
		p.ApplyServices(model.Change[model.ServicePart]{Put: w.Services.Parts()})
	}
	p.Apply(changes)
	if p.NamesInUse() {
		if l, err := names.Recorded(); err == nil { // elsewhere than on the node nothing is known of them
			p.Apply(l)
		}
	}
	w.Services.Policies = p.Policies()
	w.Problems = append(w.Problems, p.Problems()...)
	return w
}

// decidedByAgent returns what the agent of this network namespace decided.
func decidedByAgent(c *config.Config) (d *inspect.Decided, err error) {
	err = local.Read(c.Own.Network.RunFolder, local.Decided, func(r io.Reader) error {
		d, err = inspect.Decode(r)
		return err
	})
	return d, err
}

// ofAgent returns what the agent of this network namespace decided by a configuration.
func (n *nodeFlags) ofAgent(ctx context.Context, c *config.Config) (*inspect.Node, error) {
	d, err := choose(ctx, c)
	if err != nil {
		return nil, err
	}
	w := d.inspected()
	if w.Decided, err = decidedByAgent(c); err != nil {
		return nil, err
	}
	if w.Undecided != "" {
		fmt.Fprintln(os.Stderr, "fairlead: warning: network policies are left out: the agent has not decided them:",
			escape.String(w.Undecided))
	}
	n.config, n.node = c, w.Services.Node.Name
	w.List = func() ([]source.Object, error) {
		if err := readable(c); err != nil {
			return nil, err
		}
		objects, _, err := load(ctx, c, n.node, true)
		return objects, err
	}
	return w, nil
}

// loadReadable is load for a command that reads the objects itself.
func (n *nodeFlags) loadReadable() (*config.Config, error) {
	c, ofAgent, err := n.load()
	if err == nil && ofAgent {
		err = readable(c)
	}
	return c, err
}

// readable returns an error where the objects of an agent with that configuration can't be read again.
func readable(c *config.Config) error {
	if c.Own.Source == manifest.Stdin {
		return errors.New("the agent of this node read its objects from standard input: name them with --source")
	}
	return nil
}

// ignoredPolicies returns a warning that objects hold network policies which a configuration doesn't evaluate, "" for
// none.
func ignoredPolicies(objects []source.Object) string {
	count := map[source.Kind]int{}
	for _, o := range objects {
		count[source.KeyOf(o).Kind]++
	}
	if count[source.NetworkPolicy]+count[source.ClusterNetworkPolicy] == 0 {
		return ""
	}
	return fmt.Sprintf("policies of the source are not evaluated (NetworkPolicies: %d, ClusterNetworkPolicies: %d), as "+
		"policy.mode is Ignore: --policy-mode Enforce evaluates them", count[source.NetworkPolicy],
		count[source.ClusterNetworkPolicy])
}

// devicesOfPods returns the devices by which this node's routes reach pods: elsewhere than on the node those of none.
func devicesOfPods() []policy.Device {
	hosts, err := route.OpenHosts()
	if err != nil {
		return nil
	}
	defer hosts.Close()
	devices, err := hosts.Devices()
	if err != nil {
		return nil
	}
	return policyDevices(devices)
}

// knows returns an error where objects have Nodes, but none of that name.
func knows(objects []source.Object, node string) error {
	names := nodeNames(objects)
	if len(names) == 0 || slices.Contains(names, node) {
		return nil // a source of Services alone: the node is known by its name only
	}
	return fmt.Errorf("no Node %q in the source: there are %q; name one with --node", node, names)
}
