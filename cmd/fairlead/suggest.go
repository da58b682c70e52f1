package main

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/reachability"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/manifest"
)

// readFlows reads all files.
func readFlows(names []string) (*flowlog.Log, error) {
	var files []*flowlog.File
	var err error
	for _, name := range names {
		f, failed := flowlog.Read(name)
		files, err = append(files, f), errors.Join(err, failed)
	}
	if err != nil {
		return nil, err
	}
	return flowlog.Merge(files...), nil
}

func policySuggest() *cobra.Command {
	var f clusterFlags
	var namespaces []string
	c := &cobra.Command{
		Use:   "suggest FLOWS... --source DIR",
		Short: "Write NetworkPolicies that allow the connections that were recorded, and no others",
		Long: `Write NetworkPolicies that allow the connections that were recorded, and no others: one for each workload, with
DNS. FLOWS are files of fairlead flows record, of all nodes. A workload is the pods of a namespace with the same
app labels.

The policies go to standard output. Read them before you apply them: what did not happen while flows were recorded
is denied.`,
		Example: `  fairlead policy suggest a.flows b.flows --source manifests > policies.yaml
  fairlead policy whatif policies.yaml --flows a.flows,b.flows --source manifests`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, files []string) error {
			l, err := readFlows(files)
			if err != nil {
				return err
			}
			in, _, err := f.cluster(c.Context())
			if err != nil {
				return err
			}
			of, err := in.evaluate(c)
			if err != nil {
				return err
			}
			return of.Suggest(l, namespaces).WriteYAML(out(c))
		},
	}
	f.add(c)
	c.Flags().StringSliceVar(&namespaces, "namespace", nil, "only workloads of these namespaces (default all)")
	c.RegisterFlagCompletionFunc("namespace", completeNamespace)
	return c
}

func policyWhatif() *cobra.Command {
	var f clusterFlags
	var o output
	var flows []string
	var only bool
	c := &cobra.Command{
		Use:   "whatif [POLICIES...] --flows FILE --source DIR",
		Short: "List the recorded connections that changed policies would cut",
		Long: `List the recorded connections that changed policies would cut, and the rules that would. POLICIES are files or
folders with what changes: objects of the same name are replaced, others added. Without them the objects are
evaluated as they are.

Exit status: 0 if nothing would be cut; 1 if something would; 2 on an error.`,
		Example: `  fairlead policy whatif policies.yaml --flows a.flows,b.flows --source manifests
  fairlead policy whatif policies.yaml --only --flows a.flows --kubeconfig ~/.kube/config`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, changed []string) error {
			if len(flows) == 0 {
				return errors.New("--flows is missing: name files of fairlead flows record")
			}
			l, err := readFlows(flows)
			if err != nil {
				return err
			}
			in, _, err := f.cluster(c.Context())
			if err != nil {
				return err
			}
			if only {
				in.objects = slices.DeleteFunc(slices.Clone(in.objects), isPolicy)
			}
			for _, name := range changed {
				objects, problems, err := manifest.Load(name)
				if err != nil {
					return err
				}
				in.objects, in.problems = overlay(in.objects, objects), append(in.problems, problems...)
			}
			of, err := in.evaluate(c)
			if err != nil {
				return err
			}
			r := replayed{of.Replay(l)}
			err = o.print(out(c), r, r.table)
			if err == nil && len(r.Cut) > 0 {
				return status{code: 1}
			}
			return err
		},
	}
	f.add(c)
	o.add(c)
	c.Flags().StringSliceVar(&flows, "flows", nil, "`FILE`s of fairlead flows record")
	c.Flags().BoolVar(&only, "only", false, "leave out all policies but those of POLICIES")
	return failsWith(2, c)
}

func isPolicy(o source.Object) bool {
	k := source.KeyOf(o).Kind
	return k == source.NetworkPolicy || k == source.ClusterNetworkPolicy
}

// replayed is what whatif prints.
type replayed struct{ *reachability.Replay }

func (r replayed) table(p *page) error {
	var err error
	if len(r.Cut) > 0 {
		rows := [][]string{{"CUT FROM", "TO", "PORT", "CONNECTIONS", "REASON"}}
		for _, f := range r.Cut {
			rows = append(rows, []string{f.From, f.To, f.Port, fmt.Sprint(f.Connections), f.Reason})
		}
		err = p.table(rows)
		fmt.Fprintln(p)
	}
	line := fmt.Sprintf("%d recorded flows evaluated: %d would be cut.", r.Evaluated, r.Denied)
	if r.Unknown > 0 {
		line += fmt.Sprintf(" %d flows are of workloads without a running pod and were not evaluated.", r.Unknown)
	}
	return errors.Join(err, p.paragraph("", "", line+" Nothing was changed."))
}
