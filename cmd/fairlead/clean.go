package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/migrate"
	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/agent/network/attach"
	"fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
)

// cleanCommand removes everything of ours.
func cleanCommand() *cobra.Command {
	var f config.Flags
	var after string
	var network, force bool
	var patience time.Duration
	c := &cobra.Command{
		Use:   "clean",
		Short: "Remove everything of Fairlead's from this network namespace, and nothing of others'",
		Long: `Remove everything of Fairlead's from this network namespace, and nothing of others'.
Stop the agent first: it would write it all again.

To hand a node back to kube-proxy without a gap: stop the agent, whose rules go on serving, start kube-proxy, then
run clean --after kube-proxy, which waits until that one's rules are there.

The pod network (network.mode Own) stays, with the network configuration of the container runtime, unless --network is
given: pods on it would lose their connection. Of network.mode Chained, --network removes that configuration, in the
folder of --config or --network-cni-folder: pods keep their network, new ones are the other plugin's alone. What the
agent changed of how devices accept router advertisements is put back from the folder of --network-run-folder. An agent
that runs here knows both folders.`,
		Example: "  fairlead clean\n  fairlead clean --after kube-proxy --timeout 5m\n  ip netns exec fl1a2b-a " +
			"fairlead clean",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			switch after {
			case "":
			case "kube-proxy":
				ctx, stop := context.WithTimeout(c.Context(), patience)
				defer stop()
				if err := migrate.Await(ctx); err != nil {
					return fmt.Errorf("nothing was removed: %w", err)
				}
			default:
				return fmt.Errorf("invalid --after %q: use kube-proxy", after)
			}
			return cleanNode(c, &f, network, force)
		},
	}
	c.Flags().StringVar(&after, "after", "", "wait until this one serves in our place: kube-proxy")
	c.Flags().BoolVar(&network, "network", false, "also remove the pod network, if no pod is on it, and the container "+
		"runtime's network configuration")
	c.Flags().BoolVar(&force, "force", false, "with --network: although pods are on it")
	c.Flags().DurationVar(&patience, "timeout", 2*time.Minute, "how long to wait at most")
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.AddDecisions(all)
	for _, name := range []string{"config", "network-cni-folder", "network-run-folder"} {
		c.Flags().AddFlag(all.Lookup(name))
	}
	return c
}

// cleanNode removes everything of ours, of the pod network only where that is asked for.
func cleanNode(c *cobra.Command, f *config.Flags, network, force bool) error {
	loaded, _, _, err := configured(f)
	if err != nil {
		return err
	}
	pods, err := mode.AttachedPods(c.Context())
	if err != nil {
		return err
	}
	if network && pods > 0 && !force {
		return fmt.Errorf("nothing was removed: %d pods of this node would lose their network; drain the node, or use "+
			"--force",
			pods)
	}
	if err := mode.Clean(c.Context()); err != nil {
		return err
	}
	if network {
		if err := errors.Join(mode.CleanNetwork(c.Context()),
			node.RestoreAdvertisements(advertisementsFile(loaded)),
			attach.RemoveConfig(loaded.Own.Network.CNIFolder)); err != nil {
			return err
		}
	} else if pods > 0 {
		fmt.Fprintf(cli.Out(c), "clean: the network of %d pods stays; nothing else of Fairlead's is left here\n", pods)
		return nil
	}
	fmt.Fprintln(cli.Out(c), "clean: nothing of Fairlead's is left in this network namespace")
	return nil
}
