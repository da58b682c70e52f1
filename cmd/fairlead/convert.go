package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/resolve/policy/convert"
	"fairlead.dev/fairlead/source/manifest"
)

func policyConvert() *cobra.Command {
	var file string
	c := &cobra.Command{
		Use:   "convert -f FILE",
		Short: "Write policies of older kinds as those that Fairlead evaluates",
		Long: `Write policies of older kinds as those that Fairlead evaluates, so that they decide as before:

  AdminNetworkPolicy                 ClusterNetworkPolicy v1beta1, tier Admin
  BaselineAdminNetworkPolicy         ClusterNetworkPolicy baseline-default, tier Baseline
  ClusterNetworkPolicy v1alpha2      ClusterNetworkPolicy v1beta1
  NetworkPolicy extensions/v1beta1   NetworkPolicy networking.k8s.io/v1

The policies go to standard output, and nothing is applied. A policy of which something can't be said that way, such as
sameLabels, is left out whole and named. Policies of Calico, Cilium and Antrea are named; other objects are passed over.

Exit status: 0 if every policy was converted; 1 if one was left out; 2 on an error.`,
		Example: `  fairlead policy convert -f policies.yaml > converted.yaml
  kubectl get adminnetworkpolicies -o yaml | fairlead policy convert -f -
  fairlead plan --source converted.yaml --against cluster --kubeconfig ~/.kube/config`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return convertPolicies(c, file) },
	}
	c.Flags().StringVarP(&file, "filename", "f", "", "`FILE` of policies in YAML or JSON, - for standard input")
	c.MarkFlagFilename("filename", "yaml", "yml", "json")
	return cli.FailsWith(2, c)
}

// convertPolicies prints the policies of a file converted. That one is left out is exit status 1.
func convertPolicies(c *cobra.Command, file string) error {
	text, err := readInput(c, file)
	if err != nil {
		return err
	}
	objects, problems := convert.Policies(text)
	if len(objects)+len(problems) == 0 {
		return fmt.Errorf("convert %s: it has no policy of an older kind", file)
	}
	b, err := convert.YAML(objects)
	if err != nil {
		return err
	}
	for _, p := range problems {
		p.File = file
		c.PrintErrln("warning:", escape.String(p.String()))
	}
	if _, err := c.OutOrStdout().Write(b); err != nil || len(problems) == 0 {
		return err
	}
	return cli.Status{Code: 1}
}

// readInput reads a file, or standard input.
func readInput(c *cobra.Command, file string) ([]byte, error) {
	switch file {
	case "":
		return nil, errors.New("--filename is missing: name a file of policies, or - for standard input")
	case manifest.Stdin:
		return io.ReadAll(c.InOrStdin())
	}
	return os.ReadFile(file)
}
