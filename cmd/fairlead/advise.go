package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/cmd/fairlead/labcmd"
	"fairlead.dev/fairlead/inspect"
	"fairlead.dev/fairlead/lab/advise"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
)

// advice is what advise prints.
type advice struct{ advise.Advice }

// adviseFlags are those of advise.
type adviseFlags struct {
	nodeFlags
	cli.Output
	time      time.Duration
	quick     bool
	report    string
	perSecond float64
	seed      uint64
}

// adviseCommand measures modes and engines for a cluster.
func adviseCommand() *cobra.Command {
	var f adviseFlags
	c := &cobra.Command{
		Use:   "advise",
		Short: "Measure which mode and policy engine fit this node and this cluster, and say why",
		Long: `Measure which mode and which policy engine serve a node of this cluster at the least cost, on this kernel, and
recommend one: with the three figures that decide, their intervals, what the cluster uses that a candidate doesn't
support, what would change, and the commands to switch. "No measurable difference: stay" is an answer, too.

The cluster's own Services, endpoints, pods and NetworkPolicies are loaded (from the Kubernetes API, or of --source) in
network namespaces that advise makes and removes: nothing of the node's own network is touched, nothing is written to
the API. What is compared with is what --mode, --policy-engine or --config say of the present agent. NetworkPolicies are
measured as enforced where there are any, unless --policy-mode Ignore. It takes --time and root.`,
		Example: "  fairlead advise --kubeconfig ~/.kube/config --node worker-1\n" +
			"  fairlead advise --source examples/shop --node a --quick --report advice.html\n" +
			"  fairlead advise --node worker-1 --mode iptables --changes 20",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			q, err := f.request(c)
			if err != nil {
				return err
			}
			a, err := advise.Run(c.Context(), q, experiment.Options{Quick: f.quick, Seed: f.seed,
				Agent: []string{"/proc/self/exe"}, Output: c.ErrOrStderr()})
			if err != nil {
				return labcmd.Interrupted(err, "there is no advice")
			}
			shown := advice{a}
			if err := f.Print(cli.Out(c), a, shown.text); err != nil {
				return err
			}
			if f.report != "" && f.Output == "" {
				_, err = fmt.Fprintf(cli.Out(c), "\nreport: %s\n", f.report)
			}
			return err
		},
	}
	f.nodeFlags.add(c)
	f.Output.Add(c)
	fs := c.Flags()
	fs.DurationVar(&f.time, "time", advise.DefaultTime, "time that all may take, about: the longer, the narrower the "+
		"intervals")
	fs.BoolVar(&f.quick, "quick", false, fmt.Sprintf("as --time %v", advise.QuickTime))
	fs.StringVar(&f.report, "report", "", "file for the report as one HTML page")
	fs.Float64Var(&f.perSecond, "changes", 1, "changes of endpoints a second in this cluster, by which the upkeep "+
		"counts; without it, those that the Kubernetes API delivers meanwhile are counted")
	fs.Uint64Var(&f.seed, "seed", 1, "draws every order")
	c.MarkFlagFilename("report", "html")
	return c
}

// check returns an error for flags that make no sense.
func (f *adviseFlags) check(c *cobra.Command) error {
	if err := f.Output.Check(); err != nil {
		return err
	}
	if f.quick && c.Flags().Changed("time") {
		return errors.New("--quick and --time exclude each other: choose one")
	}
	if f.quick {
		f.time = advise.QuickTime
	}
	const least = 5 * time.Second
	if f.time < least {
		return fmt.Errorf("invalid --time %v: use at least %v", f.time, least)
	}
	if !(f.perSecond >= 0 && f.perSecond <= 1e6) {
		return fmt.Errorf("invalid --changes %v: use a number of changes a second from 0 to 1000000", f.perSecond)
	}
	if f.report == "" {
		return nil
	}
	if i, err := os.Stat(filepath.Dir(f.report)); err != nil || !i.IsDir() {
		return errors.Join(fmt.Errorf("--report %s: its folder must exist", f.report), err)
	}
	return writable(f.report)
}

// writable returns an error where a file can't be written, before minutes are spent on what is to be in it. It leaves
// the file as it was.
func writable(path string) error {
	_, missing := os.Stat(path)
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return fmt.Errorf("--report can't be written: %w", err)
	}
	if err := file.Close(); err != nil || missing == nil {
		return err
	}
	return os.Remove(path)
}

// request reads the cluster and returns what is to be measured.
func (f *adviseFlags) request(c *cobra.Command) (q advise.Request, err error) {
	if err := f.check(c); err != nil {
		return q, err
	}
	if err := experiment.CheckRoot(); err != nil {
		return q, err
	}
	conf, err := f.Load()
	if err != nil {
		return q, err
	}
	if conf.Own.Source == "" {
		if _, err := access(conf); err != nil {
			return q, err
		}
	}
	if f.File == "" && !c.Flags().Changed("policy-mode") && os.Getenv(config.EnvPolicyMode) == "" {
		conf.Own.Policy.Mode = config.PoliciesEnforce // where there are policies
	}
	if q.Resolve, err = conf.Resolve(); err != nil {
		return q, err
	}
	objects, problems, err := load(c.Context(), conf, q.Resolve.Node, true)
	if err != nil {
		return q, err
	}
	if err := knows(objects, q.Resolve.Node); err != nil {
		return q, err
	}
	warnLost(c.ErrOrStderr(), problems)
	q.Objects, q.Options, q.PerSecond = objects, conf.Options(), f.perSecond
	q.Time, q.Cluster = f.time, advise.Transplant(objects, q.Resolve.Node, conf.Policies())
	fastPath(conf, &q)
	if len(objects) == 0 || q.Cluster.Sizes.Services == 0 {
		return q, fmt.Errorf("%s has no Service, so there is nothing to measure: name the cluster with --kubeconfig, or its "+
			"objects with --source", cmp.Or(conf.Own.Source, "the Kubernetes API"))
	}
	if conf.Own.Source == "" && !c.Flags().Changed("changes") {
		a, err := access(conf)
		if err != nil {
			return q, err
		}
		q.Watch = kube.New(kube.Options{Access: a, Node: q.Resolve.Node, ProxyName: conf.Own.ServiceProxyName})
	}
	if f.report != "" {
		q.Report = f.write
	}
	q.Current, err = current(c.Context(), conf, q.Cluster.Sizes.Policies > 0)
	return q, err
}

// current returns the candidate that a configuration comes to here, with or without a policy engine.
func current(ctx context.Context, conf *config.Config, enforce bool) (now advise.Candidate, err error) {
	m, _, err := mode.Choose(ctx, conf.Own.Mode)
	if err != nil || !enforce {
		return advise.Candidate{Mode: m.Name}, err
	}
	e, _, err := mode.ChooseEngine(ctx, conf.Own.Policy.Engine, m.FastPath(conf.Options()))
	return advise.Candidate{Mode: m.Name, Engine: e.Name}, err
}

// warnLost prints what of the source is not part of the measurement.
func warnLost(w io.Writer, problems []source.Problem) {
	const most = 5
	lost := slices.DeleteFunc(slices.Clone(problems), func(p source.Problem) bool {
		return slices.Contains(inspect.Harmless, p.Reason)
	})
	for i, p := range lost {
		if i == most {
			fmt.Fprintf(w, "fairlead: warning: not part of the measurement: %d more; fairlead show names them\n",
				len(lost)-most)
			return
		}
		fmt.Fprintln(w, "fairlead: warning: not part of the measurement:", escape.String(p.String()))
	}
}

// fastPath has mode ebpf measured as it would be on this node: without its fast path where that is off, or where other
// programs' hooks keep it off.
func fastPath(c *config.Config, q *advise.Request) {
	remark := func(format string, a ...any) {
		q.Cluster.Remarks = append(q.Cluster.Remarks, fmt.Sprintf(format, a...))
	}
	hooks := advise.ForeignHooks()
	switch {
	case c.Own.EBPF.FastPath == config.Never:
		q.NoFastPath = true
	case len(hooks) > 0:
		q.NoFastPath = true
		remark("Mode ebpf is measured without its fast path, which other programs' hooks on this node would keep off: %s.",
			strings.Join(hooks, ", "))
	default:
		remark("Mode ebpf is measured with its fast path: this node has no other program's hooks that would keep it off. " +
			"For nodes that have some, such as kubelet's or a runtime's, set --ebpf-fast-path Never.")
	}
}

// sections returns what follows the figures.
func (a advice) sections() []report.Section {
	return []report.Section{
		{Title: "What would change", List: a.Changed()},
		{Title: "What this cluster uses and a candidate doesn't support", List: a.Unsupported()},
		{Title: "Remarks", List: append([]string{"Measured with " + a.Sizes.String() + "."}, a.Remarks...)},
	}
}

// write writes the report.
func (f *adviseFlags) write(dir string, a advise.Advice) error {
	var b bytes.Buffer
	err := report.WriteAdvice(&b, dir, report.Advice{Title: "Which mode fits this cluster",
		Question: "What do connections and upkeep cost on a node of this cluster, by mode and policy engine, on this kernel?",
		Answer:   a.Sentences(), Commands: a.Commands(), Rows: a.Table(), Sections: advice{a}.sections()})
	if err == nil {
		err = os.WriteFile(f.report, b.Bytes(), 0o644)
	}
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// text prints advice for people.
func (a advice) text(p *cli.Page) error {
	var errs []error
	for i, s := range a.Sentences() {
		mark := "  - "
		if i == 0 {
			mark = ""
		}
		errs = append(errs, p.Paragraph(mark, strings.Repeat(" ", len(mark)), s))
	}
	_, err := fmt.Fprintf(p, "\n%s\n", a.Chart(labcmd.TableWidth(p)))
	errs = append(errs, err, p.Table(a.Table()))
	for _, s := range a.sections() {
		errs = append(errs, p.List(s.Title+":", s.List))
	}
	if l := a.Commands(); len(l) > 0 {
		_, err = fmt.Fprintf(p, "\nTo switch:\n  %s\n", strings.Join(slices.Clone(l), "\n  "))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
