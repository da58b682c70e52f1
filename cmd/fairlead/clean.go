package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/migrate"
	"fairlead.dev/fairlead/agent/mode"
)

// cleanCommand removes everything of ours.
func cleanCommand() *cobra.Command {
	var after string
	var patience time.Duration
	c := &cobra.Command{
		Use:   "clean",
		Short: "Remove everything of Fairlead's from this network namespace, and nothing of others'",
		Long: `Remove everything of Fairlead's from this network namespace, and nothing of others'.
Stop the agent first: it would write it all again.

To hand a node back to kube-proxy without a gap: stop the agent, whose rules go on serving, start kube-proxy, then
run clean --after kube-proxy, which waits until that one's rules are there.`,
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
			if err := mode.Clean(c.Context()); err != nil {
				return err
			}
			fmt.Fprintln(out(c), "clean: nothing of Fairlead's is left in this network namespace")
			return nil
		},
	}
	c.Flags().StringVar(&after, "after", "", "wait until this one serves in our place: kube-proxy")
	c.Flags().DurationVar(&patience, "timeout", 2*time.Minute, "how long to wait at most")
	return c
}
