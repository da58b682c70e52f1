package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent"
)

// cleanCommand removes everything of ours.
func cleanCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "clean",
		Short: "Remove everything of Fairlead's from this network namespace, and nothing of others'",
		Long: `Remove everything of Fairlead's from this network namespace, and nothing of others'.
Stop the agent first: it would write it all again.`,
		Example: "  fairlead clean\n  ip netns exec fl1a2b-a fairlead clean",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := agent.Clean(c.Context()); err != nil {
				return err
			}
			fmt.Fprintln(c.OutOrStdout(), "clean: nothing of Fairlead's is left in this network namespace")
			return nil
		},
	}
}
