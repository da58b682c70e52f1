package main

import (
	"log/slog"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent"
)

// runCommand serves a node.
func runCommand() *cobra.Command {
	var n nodeFlags
	var status string
	var verbose bool
	c := &cobra.Command{
		Use:   "run (--source DIR | --kubeconfig FILE) --node NAME",
		Short: "Serve a node: keep its kernel as the source says",
		Long: `Serve a node: read Services and EndpointSlices from a folder or the Kubernetes API, keep this
network namespace's kernel as they say, and follow every change. Ending the agent changes nothing
for traffic; started again it goes on from what the kernel holds. While an API server is away
everything stays as it was seen last.`,
		Example: `  fairlead run --source /etc/fairlead/manifests --node worker-1
  fairlead run --source examples/shop --node a --nodeport-addresses primary
  fairlead run --kubeconfig /etc/kubernetes/fairlead.conf --node worker-1`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			mode, config, err := n.config()
			if err != nil {
				return err
			}
			level := slog.LevelInfo
			if verbose {
				level = slog.LevelDebug
			}
			log := slog.New(slog.NewTextHandler(c.ErrOrStderr(), &slog.HandlerOptions{Level: level}))
			return agent.Run(c.Context(), agent.Options{Mode: mode, Source: n.open(), Resolve: config, Log: log, Status: status})
		},
	}
	n.add(c)
	c.Flags().StringVar(&status, "status-address", "127.0.0.1:10249", "address of /readyz, /livez, /status and /metrics; empty for none")
	c.Flags().BoolVarP(&verbose, "verbose", "v", false, "log each write")
	return c
}
