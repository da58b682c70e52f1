// Command fairlead is the node network for Kubernetes, in one binary. Commands here only wire packages together.
package main

import (
	"context"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/cmd/fairlead/labcmd"
	"fairlead.dev/fairlead/cmd/fairlead/sandboxcmd"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		os.Exit(cli.Exit(err))
	}
}

// rootCommand gathers the commands.
func rootCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "fairlead",
		Short: "The node network for Kubernetes, and the proof of what it costs",
		Long: `Fairlead carries Service traffic to the right pods, says why a packet goes where it goes,
and measures on your own machine what that costs.

  Start with a cluster in a box:    fairlead sandbox up examples/shop
  or with a measurement:            fairlead lab run services --quick`,
		Version:       thisBuild().String(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	c.AddGroup(
		&cobra.Group{ID: "node", Title: "On a node:"},
		&cobra.Group{ID: "look", Title: "Look before you leap:"},
		&cobra.Group{ID: "box", Title: "On your own machine:"},
		&cobra.Group{ID: "program", Title: "About the program:"},
	)
	add := func(group string, cs ...*cobra.Command) {
		for _, s := range cs {
			s.GroupID = group
			c.AddCommand(s)
		}
	}
	add("node", runCommand(), flowsCommand(), migrateCommand(), cleanCommand())
	add("look", showCommand(), planCommand(), explainCommand(), policyCommand(), traceCommand(), modesCommand(),
		adviseCommand())
	add("box", sandboxcmd.Command(), sandboxcmd.ClusterCommand(), labcmd.Command())
	add("program", versionCommand(), optionsCommand())
	c.SetHelpCommandGroupID("program")
	c.SetCompletionCommandGroupID("program")
	wrapHelp(c)
	return c
}
