// Command fairlead is the node network for Kubernetes, in one binary. Commands here only wire packages together.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "fairlead:", err)
		os.Exit(1)
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
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	c.AddGroup(
		&cobra.Group{ID: "node", Title: "On a node:"},
		&cobra.Group{ID: "look", Title: "Look before you leap:"},
		&cobra.Group{ID: "box", Title: "On your own machine:"},
	)
	add := func(group string, cs ...*cobra.Command) {
		for _, s := range cs {
			s.GroupID = group
			c.AddCommand(s)
		}
	}
	add("node", runCommand(), cleanCommand())
	add("look", showCommand(), planCommand(), explainCommand(), traceCommand(), modesCommand())
	add("box", sandboxCommand(), labCommand())
	return c
}

// version names the commit that the binary was built from.
func version() string {
	v := "unknown commit"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				v = s.Value
			case s.Key == "vcs.modified" && s.Value == "true":
				v += ", modified"
			}
		}
	}
	return v
}
