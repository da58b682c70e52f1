package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/agent/event"
	"fairlead.dev/fairlead/agent/local"
	"fairlead.dev/fairlead/agent/migrate"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/inspect"
)

// runCommand serves a node.
func runCommand() *cobra.Command {
	var n nodeFlags
	c := &cobra.Command{
		Use:   "run [--config FILE] [--source DIR | --kubeconfig FILE] [--node NAME]",
		Short: "Run the agent of a node: keep its kernel in sync with Services",
		Long: `Run the agent of a node: read Services and EndpointSlices from a folder or the Kubernetes API, write them to
the kernel of this network namespace, and follow every change. When the agent ends, traffic continues; a
restarted agent continues from what the kernel holds. While the API server is unavailable, the last state stays.

kube-proxy's configuration file and flags are accepted unchanged: what has no effect gives a warning. A
changed file is applied at once without interrupting traffic; an invalid one, or one that is impossible here, is
reported, and the last good one stays in force.`,
		Example: `  fairlead run --config /var/lib/kube-proxy/config.conf --migrate-from-kube-proxy Remove
  fairlead run --kubeconfig /etc/kubernetes/fairlead.conf --node worker-1
  fairlead run --source /etc/fairlead/manifests --node worker-1
  fairlead run --source examples/shop --node a --nodeport-addresses primary --mode auto`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return run(c, &n) },
	}
	n.Add(c.Flags())
	n.complete(c)
	groupFlags(c)
	return c
}

// run does what the flags say, again with each configuration that the file comes to hold.
func run(c *cobra.Command, n *nodeFlags) error {
	if n.Version.Requested() {
		printVersion(c.OutOrStdout(), n.Version)
		return nil
	}
	if n.CleanUp {
		return mode.Clean(c.Context())
	}
	effective, err := n.Load()
	if err != nil {
		return err
	}
	if n.WriteTo != "" {
		text, err := effective.YAML()
		if err == nil {
			err = os.WriteFile(n.WriteTo, text, 0o644)
		}
		return err
	}
	p := process{setUpOnly: n.SetUpOnly, flags: map[string]string{}}
	c.Flags().VisitAll(func(f *pflag.Flag) { p.flags[f.Name] = f.Value.String() })
	return errors.Join(p.run(c, n, effective), p.previous.Close())
}

// process is what outlives the changes of a configuration.
type process struct {
	setUpOnly bool
	flags     map[string]string
	previous  agent.PreviousMode
	rejected  agent.RejectedConfig
}

// run serves as a configuration says until another takes its place, and so on. If a changed one can't be
// started, the last good one comes back: the first, or one that has served.
func (p *process) run(c *cobra.Command, n *nodeFlags, now *config.Config) error {
	var good *config.Config
	for back := false; ; {
		log := logger(escape.Writer(c.ErrOrStderr()), now)
		for _, w := range now.Warnings {
			log.Warn("configuration", "warning", w)
		}
		ctx, stop := context.WithCancel(c.Context())
		next := n.Follow(ctx, now, config.Following{Log: log, Check: p.check, Report: p.rejected.Set, Stop: stop})
		served := false
		err := p.serve(ctx, now, log, &served)
		stop()
		newer := <-next
		switch {
		case c.Context().Err() != nil && errors.Is(err, context.Canceled):
			return nil
		case err == nil && newer == nil, err != nil && (good == nil || back || served):
			return err
		case err != nil:
			log.Error("the changed configuration failed to start; returning to the last one",
				"error", err)
			p.rejected.Set(err)
			now, back = good.Despite(now), true
			continue
		case served || good == nil:
			good = now
		}
		log.Info("applying the changed configuration; traffic continues")
		p.rejected.Set(nil)
		now, back = newer, false
	}
}

// check returns why a configuration can't come into force in the calling thread's network namespace.
func (p *process) check(ctx context.Context, c *config.Config) error {
	d, err := decide(ctx, c)
	if err != nil {
		return err
	}
	if _, _, err := openSource(c, &d.resolve, slog.New(slog.DiscardHandler)); err != nil {
		return err
	}
	if err := d.mode.Check(ctx); err != nil || d.policies == nil {
		return err
	}
	return d.policies.Engine.Probe(ctx)
}

// sourceName returns where objects come from, for the log.
func sourceName(c *config.Config) string {
	return cmp.Or(c.Own.Source, c.Server, c.Proxy.ClientConnection.Kubeconfig, "the API server of this cluster")
}

// logger makes the log as a configuration says. Durations have units in both formats.
func logger(w io.Writer, c *config.Config) *slog.Logger {
	o := &slog.HandlerOptions{Level: slog.LevelInfo, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Value.Kind() == slog.KindDuration {
			a.Value = slog.StringValue(a.Value.Duration().String())
		}
		if a.Value.Kind() == slog.KindAny && a.Value.Any() == nil {
			return slog.Attr{} // an error that there isn't
		}
		return a
	}}
	if c.Proxy.Logging.Verbosity >= 4 {
		o.Level = slog.LevelDebug
	}
	if c.Proxy.Logging.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// serve serves the node until ctx ends, and reports in served whether it came to that. The system's settings it makes
// once nothing can refuse the start any more; with setUpOnly that is all it does.
func (p *process) serve(ctx context.Context, c *config.Config, log *slog.Logger, served *bool) error {
	d, err := decide(ctx, c)
	if err != nil {
		return err
	}
	set, again := c.System(d.mode), false
	if p.setUpOnly {
		return errors.Join(set.Apply(log), d.mode.Prepare(), acceptAdvertisements(ctx, c))
	}
	objects, recorder, err := openSource(c, &d.resolve, log)
	if err != nil {
		return err
	}
	addresses, err := node.OpenAddresses()
	if err != nil {
		return err
	}
	defer addresses.Close()
	o := agent.Options{Mode: d.mode, Why: d.why, Source: objects, Resolve: d.resolve, Policies: d.policies,
		Log: log, Servers: servers(c), Addresses: addresses, Previous: &p.previous, Rejected: &p.rejected}
	interfaces, err := podNetwork(c, d.resolve, &o)
	if err != nil {
		return err
	}
	defer interfaces.Close()
	p.describe(&o, c, processMetrics(c))
	starting := func() {}
	if firewall, err := node.OpenFirewall(); err != nil {
		log.Warn("checking whether the node drops forwarded packets failed", "error", err)
	} else {
		defer firewall.Close()
		o.Firewall = firewall
	}
	if recorder != nil {
		t := event.New(recorder, log)
		o.Report = t.Report
		starting = func() { t.Starting(d.resolve.Node, "serves Services by "+d.mode.Name) }
	}
	var commands *local.Server
	defer func() { commands.Close() }()
	o.Prepare = func(decided func() (*inspect.Decided, error)) {
		commands = d.announce(log, decided)
		if err := set.Apply(log); err != nil {
			log.Warn("applying system settings failed; retrying once Services are served", "error", err)
			again = true
		}
	}
	o.OnReady = func(ctx context.Context) {
		*served = true
		starting()
		if again {
			if err := set.Apply(log); err != nil {
				log.Warn("applying system settings failed", "error", err)
			}
		}
		removeKubeProxys(ctx, c, log)
	}
	return agent.Run(ctx, o)
}

// announce logs what of a configuration deserves a warning, and returns what sends it and what is decided by it to
// commands on the node, nil where that fails.
func (d decided) announce(log *slog.Logger, decided func() (*inspect.Decided, error)) *local.Server {
	if d.OpenNodePorts() {
		log.Warn("nodePortAddresses is not set: node ports are open at all addresses of the node; consider primary")
	}
	node.LogConcerns(log, d.mode.Tracks())
	engine := ""
	if d.policies != nil {
		engine = d.policies.Engine.Name
	}
	chosen, err := d.Chosen(d.resolve.Node, d.mode.Name, engine)
	var s *local.Server
	if err == nil {
		s, err = local.Serve(d.Own.Network.RunFolder, local.Replies{
			local.Configuration: func(w io.Writer) error { return json.NewEncoder(w).Encode(chosen) },
			local.Decided: func(w io.Writer) error {
				now, err := decided()
				if err != nil {
					return err
				}
				return now.Encode(w)
			}})
	}
	if err != nil {
		log.Warn("commands on this node decide by their own flags: the agent can't reply to them", "error", err)
	}
	return s
}

// describe sets what an agent says of itself.
func (p *process) describe(o *agent.Options, c *config.Config, metrics prometheus.Gatherer) {
	o.About = []any{"version", thisBuild().short(), "source", sourceName(c), "config", p.flags["config"]}
	o.Servers.Flags, o.Servers.Process = p.flags, metrics
	build := buildInfo()
	o.Servers.Version, o.Servers.Emulates = thisBuild().String(), build.Major+"."+build.Minor
}

// removeKubeProxys waits for a kube-proxy to stop and removes its rules, where c has it so.
func removeKubeProxys(ctx context.Context, c *config.Config, log *slog.Logger) {
	o := migrate.Options{Remove: c.Own.MigrateFromKubeProxy == config.Remove, Exclude: c.ExcludedCIDRs()}
	if err := migrate.Run(ctx, log, o); err != nil && !errors.Is(err, context.Canceled) {
		log.Warn("removing kube-proxy's rules failed", "error", err)
	}
}

// servers returns what an agent serves beside packets, and where, as configured.
func servers(c *config.Config) agent.Servers {
	s := c.Servers()
	return agent.Servers{Health: s.Health, Metrics: s.Metrics, HardFail: s.HardFail, Profiling: s.Profiling, Late: s.Late,
		Config: s.Config}
}
