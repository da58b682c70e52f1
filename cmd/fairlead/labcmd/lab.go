// Package labcmd has the commands of the lab.
package labcmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/lab"
	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/cluster"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
)

// Command returns fairlead lab, which measures.
func Command() *cobra.Command {
	c := &cobra.Command{
		Use:   "lab",
		Short: "Measure on this machine what Services cost, and tell how sure that is",
		Long: `Measure on this machine what Services cost, and tell how sure that is.

Everything is measured against the same traffic without any rule, in the same run, interleaved at random;
every number comes with its interval, every run with what it can't tell from nothing. All happens in
network namespaces that the lab makes and removes: nothing of the machine's own network is touched.`,
	}
	run := &cobra.Command{
		Use: "run", Short: "Run an experiment",
		Long: "Run an experiment: build its network, load it, and report. --help of each says what it does and how long " +
			"it takes.",
	}
	experiments := []*cobra.Command{labRunAll()}
	for _, e := range lab.Experiments() {
		experiments = append(experiments, labRun(e))
	}
	experiments = append(experiments, labRunCluster())
	return cli.Holds(c, cli.Holds(run, experiments...), labList(), labReport(), labCompare(), labPage(),
		labEndpoint())
}

// labList lists the experiments.
func labList() *cobra.Command {
	var format cli.Output
	c := &cobra.Command{
		Use: "list", Short: "List the experiments: what each asks, how long it takes here, which article it repeats",
		Long: `List the experiments: what each asks, how long it is planned to take on this machine (with --quick, and in
full), and which article it repeats. As root it tries for a few seconds what this machine can do, in namespaces of its own.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := format.Check(); err != nil {
				return err
			}
			l, err := lab.List(c.Context(), []string{"/proc/self/exe"})
			if err != nil {
				return err
			}
			return format.Print(cli.Out(c), l, func(p *cli.Page) error { return listExperiments(p, l) })
		},
	}
	format.Add(c)
	return c
}

// tableColumns is the least width of a page for a table of experiments.
const tableColumns = 76

// listExperiments writes experiments for people: as a table, or below each other on a narrow page, then what holds of
// several.
func listExperiments(p *cli.Page, l []lab.Entry) error {
	rows := [][]string{{"EXPERIMENT", "ASKS", "QUICK", "FULL", "REPEATS"}}
	var quick, full time.Duration
	var remarks []string
	for _, e := range l {
		row := []string{e.Name, e.Question, minutes(e.Quick), minutes(e.Full), cmp.Or(e.Repeats, "-")}
		if quick, full = quick+e.Quick, full+e.Full; e.Needs != "" {
			row[2], full = "-", full-e.Full
			remarks = append(remarks, fmt.Sprintf("%s needs %s, and takes it by its kubeconfig: fairlead lab run %[1]s --help",
				e.Name, e.Needs))
		}
		rows = append(rows, row)
	}
	if quick > 0 {
		text := fmt.Sprintf("all of this machine's, in turn: fairlead lab run all, %s with --quick, which ends after %.0f "+
			"min, and %s in full", minutes(quick), quickTime.Minutes(), minutes(full))
		remarks = append([]string{text}, remarks...)
	}
	if i := slices.IndexFunc(l, func(e lab.Entry) bool { return e.Unknown != "" }); i >= 0 {
		remarks = append(remarks, "times not known: "+l[i].Unknown)
	}
	var errs []error
	if p.Columns == 0 || p.Columns >= tableColumns {
		errs = append(errs, p.Table(rows))
	} else {
		for _, r := range rows[1:] {
			line := fmt.Sprintf("%s (quick %s, full %s; repeats %s)", r[1], r[2], r[3], r[4])
			line = strings.NewReplacer("quick -, full", "takes", "; repeats -", "").Replace(line)
			errs = append(errs, p.Paragraph(r[0]+"\n  ", "  ", line))
		}
	}
	for _, s := range remarks {
		errs = append(errs, p.Paragraph("\n", "", s))
	}
	return errors.Join(errs...)
}

// minutes returns "3 min", "2.5 h", or "?" for what is not known.
func minutes(d time.Duration) string {
	switch {
	case d == 0:
		return "?"
	case d < time.Minute:
		return "1 min"
	case d < 100*time.Minute:
		return fmt.Sprintf("%.0f min", d.Minutes())
	}
	return fmt.Sprintf("%.1f h", d.Hours())
}

// labRun runs an experiment.
func labRun(e experiment.Experiment) *cobra.Command {
	o, kernel := experiment.Options{Agent: []string{"/proc/self/exe"}}, hostKernel
	c := &cobra.Command{
		Use:   e.Name,
		Short: e.Short,
		Long: e.Long + `

Results go to a folder of their own below --out: the raw blocks, a summary, charts, report.html and report.md.
Ctrl-C takes everything down and reports what was measured so far.`,
		Example: fmt.Sprintf("  fairlead lab run %s --quick\n  fairlead lab run %[1]s --seed 7 --out results", e.Name),
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if elsewhere, err := inOther(c, o, kernel); elsewhere || err != nil {
				return err
			}
			if err := completeLab(c, &o); err != nil {
				return err
			}
			o.Output, o.Command = c.ErrOrStderr(), again(e, o)
			return runLab(c, e, o)
		},
	}
	labFlags(c, e, &o)
	kernelFlag(c, &kernel)
	if e.Exact {
		exactFlag(c, &o)
	}
	return c
}

// completeLab checks what the user wants, and fills in what no flag says.
func completeLab(c *cobra.Command, o *experiment.Options) error {
	if o.Rounds < 0 {
		return fmt.Errorf("invalid --rounds %d: use at least 1", o.Rounds)
	}
	if c.Flags().Changed("endpoints") && o.Endpoints < 1 {
		return fmt.Errorf("invalid --endpoints %d: use at least 1", o.Endpoints)
	}
	if !c.Flags().Changed("seed") {
		o.Seed = uint64(time.Now().UnixNano()) % 1_000_000
	}
	if !c.Flags().Changed("services") {
		o.Services = nil
	}
	return nil
}

// labFlags adds the flags of an experiment.
func labFlags(c *cobra.Command, e experiment.Experiment, o *experiment.Options) {
	f := c.Flags()
	f.BoolVar(&o.Quick, "quick", false, "minutes instead of hours: fewer rounds, wider intervals")
	f.StringVar(&o.Out, "out", "lab-results", "folder in which the run's own folder is made")
	f.Uint64Var(&o.Seed, "seed", 0, "draws every order (default: from the clock)")
	if e.Rounds {
		f.IntVar(&o.Rounds, "rounds", 0, "rounds, in each of which every arm is measured once: the more, the narrower the "+
			"intervals (default: the profile's)")
	}
	if e.Services != nil {
		f.IntSliceVar(&o.Services, "services", e.Services, "numbers of Services, rising; --quick has fewer")
	}
	if e.Sizes {
		f.IntVar(&o.Endpoints, "endpoints", 0,
			"endpoints of each Service (default: ten; without --services and --quick also 5,000 Services of fifty)")
		c.Example += fmt.Sprintf("\n  fairlead lab run %s --services 5000 --endpoints 50", e.Name)
	}
	if e.Compares {
		f.StringSliceVar(&o.Modes, "modes", nil, "modes to compare (default: the experiment's that run here)")
	}
	if e.Layouts != nil {
		f.StringSliceVar(&o.Layouts, "layouts", nil, fmt.Sprintf("layouts of kube-proxy's rules to compare with, of %s, or "+
			"%s (default: all that run here)", strings.Join(e.Layouts, ", "), experiment.NoLayouts))
		c.RegisterFlagCompletionFunc("layouts", cobra.FixedCompletions(append(slices.Clone(e.Layouts), experiment.NoLayouts),
			cobra.ShellCompDirectiveNoFileComp))
	}
	if e.Subjects != nil {
		f.StringArrayVar(&o.Subjects, "subject", nil,
			fmt.Sprintf("another's program to measure with, as `NAME=PATH`, of %s; repeatable, each once (a path without "+
				"a program is answered with the command that builds one)", strings.Join(e.Subjects, ", ")))
		last := e.Subjects[len(e.Subjects)-1]
		c.Example += fmt.Sprintf("\n  fairlead lab run %s --quick --subject %s=./%s", e.Name, last, last)
	}
	if e.Second != nil {
		secondKernelFlag(c, o, "the same experiment")
	}
	c.MarkFlagDirname("out")
}

// secondKernelFlag adds the flag for a run of an experiment under the second kernel.
func secondKernelFlag(c *cobra.Command, o *experiment.Options, of string) {
	c.Flags().StringVar(&o.Second, "second-kernel", "", "`folder` of a run of "+of+" under the second kernel, for a "+
		"panel of its own: counts and ratios")
	c.MarkFlagDirname("second-kernel")
}

// again is the command that repeats a run.
func again(e experiment.Experiment, o experiment.Options) []string {
	l := []string{"fairlead", "lab", "run", e.Name}
	if o.Quick {
		l = append(l, "--quick")
	}
	if o.Rounds > 0 {
		l = append(l, "--rounds", fmt.Sprint(o.Rounds))
	}
	if o.Services != nil {
		l = append(l, "--services", strings.ReplaceAll(strings.Trim(fmt.Sprint(o.Services), "[]"), " ", ","))
	}
	if o.Endpoints > 0 {
		l = append(l, "--endpoints", fmt.Sprint(o.Endpoints))
	}
	for _, s := range o.Subjects {
		l = append(l, "--subject", s)
	}
	if o.Second != "" {
		l = append(l, "--second-kernel", o.Second)
	}
	if o.Exact {
		l = append(l, "--exact")
	}
	if k := os.Getenv(kernelVariable); k != "" {
		l = append(l, "--kernel", k)
	}
	if o.Modes != nil {
		l = append(l, "--modes", strings.Join(o.Modes, ","))
	}
	if o.Layouts != nil {
		l = append(l, "--layouts", strings.Join(o.Layouts, ","))
	}
	return append(l, "--seed", fmt.Sprint(o.Seed))
}

// runLab runs the experiment and shows what came of it, also of a part of it.
func runLab(c *cobra.Command, e experiment.Experiment, o experiment.Options) error {
	dir, err := lab.Run(c.Context(), e, o)
	if dir == "" {
		return Interrupted(err, "nothing was measured")
	}
	if terr := showRun(cli.Out(c), dir); terr != nil {
		return errors.Join(err, terr)
	}
	return Interrupted(err, "the report covers a part of the run")
}

// Interrupted words the error of a run that ended before its end, others as they are.
func Interrupted(err error, what string) error {
	var here *testbed.LeftError
	var there *cluster.LeftError
	switch {
	case !errors.Is(err, context.Canceled):
		return err
	case errors.As(err, &here):
		return fmt.Errorf("interrupted: %s; %w", what, here)
	case errors.As(err, &there):
		return fmt.Errorf("interrupted: %s; %w", what, there)
	}
	return fmt.Errorf("interrupted: %s; everything was removed", what)
}

// showRun prints a run's answer, its tables and where its report is.
func showRun(p *cli.Page, dir string) error {
	r, err := result.Read(dir)
	if err != nil {
		return err
	}
	s, err := analysis.Summarize(r)
	if err != nil {
		return err
	}
	if err := report.Table(p, s, TableWidth(p)); err != nil {
		return err
	}
	_, err = fmt.Fprintf(p, "\nreport: %s/%s\n", strings.TrimSuffix(dir, "/"), report.HTMLFile)
	return err
}

// quickTime is the most that all experiments take with --quick.
const quickTime = 30 * time.Minute

// labRunAll runs all experiments in turn.
func labRunAll() *cobra.Command {
	o, within := experiment.Options{Agent: []string{"/proc/self/exe"}}, time.Duration(0)
	kernel := hostKernel
	c := &cobra.Command{
		Use:   "all",
		Short: "All experiments in turn, and one page that judges all claims",
		Long: `Run all experiments in turn, and write one page that judges all claims of the articles, with a link to each
experiment's report. What can't run here is named, as are claims that can't be tested here. With --quick it takes thirty
minutes at most: what would outlast that is left out, and named.

With --exact, those run that count instructions, all in one machine; the others are named. The time that this takes is the
host's and can't be bounded: the machine's own clock counts instructions.

A run of containers under the second kernel, named with --second-kernel, has what this kernel may lack: claim C19 on ipvlan
is judged by it.

Ctrl-C takes everything down and reports what was measured so far.`,
		Example: `  fairlead lab run all --quick
  fairlead lab run containers --kernel vm --quick --out second
  fairlead lab run all --quick --second-kernel second/containers-*`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if elsewhere, err := inOther(c, o, kernel); elsewhere || err != nil {
				return err
			}
			if err := completeLab(c, &o); err != nil {
				return err
			}
			if within < 0 {
				return fmt.Errorf("invalid --within %v: use a time above 0", within)
			}
			o.Output, o.Command = c.ErrOrStderr(), again(experiment.Experiment{Name: "all"}, o)
			if o.Quick && within == 0 && !o.Exact {
				within = quickTime
			}
			dir, err := lab.RunAll(c.Context(), lab.Experiments(), o, within)
			if dir == "" {
				return err
			}
			if terr := showSuite(cli.Out(c), dir); terr != nil {
				return errors.Join(err, terr)
			}
			return Interrupted(err, "the page covers a part of the run")
		},
	}
	labFlags(c, experiment.Experiment{Name: "all", Rounds: true}, &o)
	secondKernelFlag(c, &o, "containers")
	c.Flags().DurationVar(&within, "within", 0, "time that all may take (default: 30m with --quick, else any)")
	kernelFlag(c, &kernel)
	exactFlag(c, &o)
	c.MarkFlagsMutuallyExclusive("exact", "within")
	return c
}

// showSuite prints what became of all claims, and where the page is.
func showSuite(p *cli.Page, dir string) error {
	if err := report.ShowSuite(p, dir, TableWidth(p)); err != nil {
		return err
	}
	_, err := fmt.Fprintf(p, "\nreport: %s/%s\n", strings.TrimSuffix(dir, "/"), report.HTMLFile)
	return err
}

// labReport makes a run's report again.
func labReport() *cobra.Command {
	return &cobra.Command{
		Use:     "report DIR",
		Short:   "Make a run's summary, charts and report again from its raw files, and print them",
		Example: "  fairlead lab report lab-results/services-20260102-150405",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if report.IsSuite(args[0]) {
				if err := report.RebuildSuite(args[0]); err != nil {
					return err
				}
				return showSuite(cli.Out(c), args[0])
			}
			if err := report.Build(args[0]); err != nil {
				return err
			}
			return showRun(cli.Out(c), args[0])
		},
	}
}

// labCompare compares two runs.
func labCompare() *cobra.Command {
	dir := "lab-results"
	c := &cobra.Command{
		Use:   "compare A B",
		Short: "Compare two runs of one experiment: of two machines, two kernels or two programs",
		Long: `Compare two runs of one experiment, of two machines, two kernels or two programs: what differs between
them, each run's ratios to its own baseline against the other's, and histograms over each other. Absolute numbers are
compared too, with a warning: all that differed between the runs is in them. Runs of different experiments or profiles
are refused. Writes one page that needs nothing else.`,
		Example: "  fairlead lab compare lab-results/services-20260102-150405 other/services-20260102-160000",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return fmt.Errorf("lab compare: %d folders named: name two, A and B, each of one run", len(args))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			r, err := report.Compare(args[0], args[1])
			if err != nil {
				return err
			}
			path, err := r.Write(dir)
			if err != nil {
				return err
			}
			p := cli.Out(c)
			if err := r.Terminal(p, TableWidth(p)); err != nil {
				return err
			}
			_, err = fmt.Fprintf(p, "\nreport: %s\n", path)
			return err
		},
	}
	c.Flags().StringVar(&dir, "out", dir, "folder in which the page is made")
	c.MarkFlagDirname("out")
	return c
}

// TableWidth returns how many columns a report's tables may have.
func TableWidth(p *cli.Page) int { return max(60, cmp.Or(p.Columns, 100)) }
