// Command render prints the chart's manifests, for kubectl: it is `helm template` for those who have Go and no Helm.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/deploy"
)

func main() {
	var r deploy.Release
	var chart string
	c := &cobra.Command{
		Use:           "render",
		Short:         "Print the manifests that Helm would install",
		Example:       "  render --set apiServer.host=192.0.2.10 | kubectl apply -f -",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(c *cobra.Command, _ []string) error {
			text, err := deploy.Render(chart, r)
			if err == nil {
				_, err = fmt.Fprint(c.OutOrStdout(), text)
			}
			return err
		},
	}
	c.Flags().StringVar(&chart, "chart", "chart", "the chart's folder")
	c.Flags().StringVar(&r.Name, "name", "fairlead", "the release's name")
	c.Flags().StringVarP(&r.Namespace, "namespace", "n", "kube-system", "the release's namespace")
	c.Flags().StringArrayVarP(&r.Files, "values", "f", nil, "files of values")
	c.Flags().StringArrayVar(&r.Set, "set", nil, "values, such as mode=ebpf")
	if err := c.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}
