package main

import (
	"errors"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/cmd/fairlead/text"
)

// planCommand reports what a sync would do.
func planCommand() *cobra.Command {
	var n nodeFlags
	var o cli.Output
	var all bool
	var against string
	c := &cobra.Command{
		Use:   "plan [--source DIR --node NAME]",
		Short: "Print what serving a folder would change in the kernel, and change nothing",
		Long: `Print what serving a folder would change in the kernel, and change nothing.

With --against, no kernel is read: it prints which workloads could newly open connections, and which no longer, if
the objects of --against became those of --source.

Exit status, as kubectl diff has it: 0 if nothing would change; 1 if something would; 2 on an error, and where an object
could not be read.` + asTheAgent,
		Example: `  fairlead plan --source new-manifests --node worker-1
  fairlead plan --source new-manifests --node worker-1 --operations
  fairlead plan --source new-manifests --against old-manifests
  fairlead plan --source changed-policies --against cluster --kubeconfig ~/.kube/config`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if against != "" {
				return comparePolicies(c, &n, o, against)
			}
			w, err := n.read(c.Context(), false)
			if err != nil {
				return err
			}
			a, err := w.Audit(c.Context())
			if err != nil {
				return err
			}
			p := w.Plan(a, all)
			err = errors.Join(o.Print(cli.Out(c), p, text.Plan{Plan: p}.Table), w.Unread())
			if err == nil && p.Put+p.Replace+p.Delete > 0 {
				return cli.Status{Code: 1}
			}
			return err
		},
	}
	n.add(c)
	o.Add(c)
	c.Flags().BoolVar(&all, "operations", false, "list each operation")
	c.Flags().StringVar(&against, "against", "", `folder or file of the objects before: compare what policies allow; `+
		`"cluster": those of --kubeconfig, which --source changes and adds to`)
	c.MarkFlagDirname("against")
	return cli.FailsWith(2, c)
}
