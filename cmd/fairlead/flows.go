package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/flowlog/record"
)

// flowsCommand holds what observes connections.
func flowsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "flows",
		Short: "Record which pods open connections to which",
		Long: `Record which pods open connections to which, for policies that allow just those: fairlead policy suggest; and to
see which of them a change of policies would cut: fairlead policy whatif.`,
	}
	return cli.Holds(c, flowsRecord())
}

func flowsRecord() *cobra.Command {
	var n nodeFlags
	o := record.Options{Entries: 100_000, PerPod: 4096}
	file, lasts := "", time.Duration(0)
	c := &cobra.Command{
		Use:   "record --for 10m --out FILE",
		Short: "Record the connections of this node's pods to a file",
		Long: `Record the connections of this node's pods to a file: which pod opened how many to which, on which port. Those that
are open already count too; those that this node's policies deny don't. Run it on each node at the same time.

Where the policy engine ebpf evaluates a policy, its program counts new connections, those that policies deny on
their own. Elsewhere they are read from connection tracking. Where that is off, as in mode ebpf without a policy, it
is an error, unless --track switches it on for that time. The file is rewritten once a minute, and holds at most
--entries flows, of one pod of this node at most --entries-per-pod. What is missing is counted and said in the file.` + asTheAgent,
		Example: `  fairlead flows record --for 1h --out a.flows --kubeconfig ~/.kube/config --node a
  fairlead policy suggest *.flows --kubeconfig ~/.kube/config > policies.yaml`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if lasts <= 0 || file == "" {
				return fmt.Errorf("--for and --out are missing: say how long to record, such as --for 10m, and to which file")
			}
			effective, err := n.loadReadable()
			if err != nil {
				return err
			}
			resolved, err := effective.Resolve()
			if err != nil {
				return err
			}
			o.Node = resolved.Node
			if o.Source, err = podSource(effective, o.Node); err != nil {
				return err
			}
			o.Write = func(f *flowlog.File) error { return replaceFile(file, f) }
			o.Ready = func(warning string) {
				if warning != "" {
					c.PrintErrln("warning:", warning)
				}
				c.PrintErrf("recording on node %s for %s, until then interrupt to end\n", o.Node, lasts)
			}
			ctx, stop := context.WithTimeout(c.Context(), lasts)
			defer stop()
			f, err := record.Run(ctx, o)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cli.Out(c), "%s: %s\n", file, f)
			return err
		},
	}
	n.add(c)
	fs := c.Flags()
	fs.DurationVar(&lasts, "for", 0, "how long to record, such as 10m or 24h")
	fs.StringVar(&file, "out", "", "write to this `FILE`")
	fs.IntVar(&o.Entries, "entries", o.Entries, "at most so many flows: some 300 bytes of memory and of disk each")
	fs.IntVar(&o.PerPod, "entries-per-pod", o.PerPod, "at most so many flows of one pod of this node")
	fs.BoolVar(&o.Track, "track", false, "record from connection tracking, and switch it on meanwhile where it is off")
	c.MarkFlagFilename("out")
	return c
}

// replaceFile writes a file in place of one that is whole or absent.
func replaceFile(name string, f *flowlog.File) error {
	w, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	err = f.Write(w)
	if closed := w.Close(); closed != nil {
		err = cmp.Or(err, closed)
	}
	if err == nil {
		err = os.Rename(w.Name(), name)
	}
	if err != nil {
		os.Remove(w.Name())
	}
	return err
}
