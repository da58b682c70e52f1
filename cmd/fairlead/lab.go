package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"fairlead.dev/fairlead/lab"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/result"
)

// labCommand measures.
func labCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "lab",
		Short: "Measure on this machine what Services cost, and tell how sure that is",
		Long: `Measure on this machine what Services cost, and tell how sure that is.

Everything is measured against the same traffic without any rule, in the same run, interleaved at random;
every number comes with its interval, every run with what it can't tell from nothing. All happens in
network namespaces that the lab makes and removes: nothing of the machine's own network is touched.`,
		Args: cobra.NoArgs,
	}
	run := &cobra.Command{Use: "run", Short: "Run an experiment", Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	run.AddCommand(labServices())
	c.AddCommand(run, labReport())
	return c
}

// labServices runs the experiment services.
func labServices() *cobra.Command {
	var quick bool
	var out string
	var services []int
	var seed uint64
	c := &cobra.Command{
		Use:   "services",
		Short: "What a Service costs a connection, and what it costs to keep the kernel up to date",
		Long: `Measure what a connection through a Service costs at 1 to 10,000 Services of ten endpoints, against the same
connection without any rule, and what it costs to keep the kernel up to date: cold sync, one change, a saved file,
memory, idle time, and connections lost while everything changes. It takes about four minutes with --quick, one to two
hours without, and root.

Results go to a folder of their own below --out: the raw blocks, a summary, charts, report.html and report.md.
Ctrl-C takes everything down and reports what was measured so far.`,
		Example: `  fairlead lab run services --quick
  fairlead lab run services --services 10,1000 --seed 7 --out results`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			p := lab.Full()
			if quick {
				p = lab.Quick()
			}
			if c.Flags().Changed("services") {
				p.Services = services
			}
			if !c.Flags().Changed("seed") {
				seed = uint64(time.Now().UnixNano()) % 1_000_000
			}
			o := lab.Options{Profile: p, Seed: seed, Out: out, Agent: []string{"/proc/self/exe"}, Output: c.ErrOrStderr(),
				Command: again(p, quick, seed)}
			return runLab(c, o)
		},
	}
	f := c.Flags()
	f.BoolVar(&quick, "quick", false, "about four minutes instead of hours: fewer rounds, wider intervals")
	f.StringVar(&out, "out", "lab-results", "folder in which the run's own folder is made")
	f.IntSliceVar(&services, "services", lab.Full().Services, "numbers of Services, rising")
	f.Uint64Var(&seed, "seed", 0, "draws every order (default: from the clock)")
	c.MarkFlagDirname("out")
	return c
}

// again is the command that repeats a run.
func again(p lab.Profile, quick bool, seed uint64) []string {
	l := []string{"fairlead", "lab", "run", "services"}
	if quick {
		l = append(l, "--quick")
	}
	var n []string
	for _, s := range p.Services {
		n = append(n, strconv.Itoa(s))
	}
	return append(l, "--services", strings.Join(n, ","), "--seed", strconv.FormatUint(seed, 10))
}

// runLab runs the experiment and shows what came of it, also of a part of it.
func runLab(c *cobra.Command, o lab.Options) error {
	dir, err := lab.Services(c.Context(), o)
	if dir == "" {
		return err
	}
	if terr := showRun(c.OutOrStdout(), dir); terr != nil {
		return errors.Join(err, terr)
	}
	if errors.Is(err, context.Canceled) {
		return fmt.Errorf("interrupted: the report is of a part of the run; everything was taken down")
	}
	return err
}

// showRun prints a run's table and where its report is.
func showRun(w io.Writer, dir string) error {
	r, err := result.Read(dir)
	if err != nil {
		return err
	}
	s, err := result.Summarize(r)
	if err != nil {
		return err
	}
	if err := report.Table(w, s, columns(w)); err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "\nreport: %s/%s\n", strings.TrimSuffix(dir, "/"), report.HTMLFile)
	return err
}

// columns is the width of a terminal, 100 where w is none.
func columns(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil && n >= 60 {
			return n
		}
	}
	return 100
}

// labReport makes a run's report again.
func labReport() *cobra.Command {
	return &cobra.Command{
		Use:     "report DIR",
		Short:   "Make a run's summary, charts and report again from its raw files, and print the table",
		Example: "  fairlead lab report lab-results/services-20260102-150405",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := report.Build(args[0]); err != nil {
				return err
			}
			return showRun(c.OutOrStdout(), args[0])
		},
	}
}
