package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	cnpv1 "sigs.k8s.io/network-policy-api/apis/v1beta1"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/flowlog"
	"fairlead.dev/fairlead/reachability"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
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
app labels. What connects to all nodes on a port gets a ClusterNetworkPolicy with nodes as peers, where there is the kind.

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
			in, config, err := f.cluster(c.Context())
			if err != nil {
				return err
			}
			in.options.NodePeers = nodePeers(c.Context(), config, in)
			of, err := in.evaluate(c)
			if err != nil {
				return err
			}
			return of.Suggest(l, namespaces).WriteYAML(cli.Out(c))
		},
	}
	f.add(c)
	c.Flags().StringSliceVar(&namespaces, "namespace", nil, "only workloads of these namespaces (default all)")
	c.RegisterFlagCompletionFunc("namespace", completeNamespace)
	return c
}

// nodePeers reports whether the cluster has ClusterNetworkPolicies with nodes as peers: by its schema, else, and in
// manifests, where there are such policies or their definition.
func nodePeers(ctx context.Context, c *config.Config, in input) bool {
	if a, err := access(c); c.Own.Source == "" && err == nil {
		if has, err := kube.New(kube.Options{Access: a}).NodePeers(ctx); err == nil {
			return has
		}
	}
	return slices.ContainsFunc(in.objects, func(o source.Object) bool {
		return source.KeyOf(o).Kind == source.ClusterNetworkPolicy
	}) || slices.ContainsFunc(in.problems, func(p source.Problem) bool { return p.Object == clusterDefinition })
}

// clusterDefinition is the CustomResourceDefinition of ClusterNetworkPolicies.
var clusterDefinition = source.Key{Kind: "CustomResourceDefinition",
	Name: cnpv1.Resource("clusternetworkpolicies").String()}

func policyWhatif() *cobra.Command {
	var f clusterFlags
	var o cli.Output
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
				objects, problems, err := manifest.LoadTemplates(name)
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
			err = o.Print(cli.Out(c), r, r.table)
			if err == nil && len(r.Cut) > 0 {
				return cli.Status{Code: 1}
			}
			return err
		},
	}
	f.add(c)
	o.Add(c)
	c.Flags().StringSliceVar(&flows, "flows", nil, "`FILE`s of fairlead flows record")
	c.Flags().BoolVar(&only, "only", false, "leave out all policies but those of POLICIES")
	return cli.FailsWith(2, c)
}

func isPolicy(o source.Object) bool {
	k := source.KeyOf(o).Kind
	return k == source.NetworkPolicy || k == source.ClusterNetworkPolicy
}

// replayed is what whatif prints.
type replayed struct{ *reachability.Replay }

func (r replayed) table(p *cli.Page) error {
	var err error
	if len(r.Cut) > 0 {
		rows := [][]string{{"CUT FROM", "TO", "PORT", "CONNECTIONS", "REASON"}}
		for _, f := range r.Cut {
			rows = append(rows, []string{f.From, f.To, f.Port, fmt.Sprint(f.Connections), f.Reason})
		}
		err = p.Table(rows)
		fmt.Fprintln(p)
	}
	line := fmt.Sprintf("%d recorded flows evaluated: %d would be cut.", r.Evaluated, r.Denied)
	if r.Unknown > 0 {
		line += fmt.Sprintf(" %d flows are of workloads without a running pod and were not evaluated.", r.Unknown)
	}
	return errors.Join(err, p.Paragraph("", "", line+" Nothing was changed."))
}
