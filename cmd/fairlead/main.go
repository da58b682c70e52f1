// Command fairlead is the node network for Kubernetes, in one binary. Commands here only wire packages together.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent/escape"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		os.Exit(exitStatus(err))
	}
}

// status ends the process with an exit status of its own.
type status struct {
	err  error // is printed; nil: nothing is
	code int
}

// Error implements error.
func (s status) Error() string { return fmt.Sprintf("exit status %d: %v", s.code, s.err) }

// exitStatus prints an error and returns the exit status that it ends the process with.
func exitStatus(err error) int {
	s := status{err, 1}
	errors.As(err, &s)
	if s.err != nil {
		fmt.Fprintln(escape.Writer(os.Stderr), "fairlead:", s.err)
	}
	return s.code
}

// failsWith has each error of a command end the process with an exit status, those that have another aside.
func failsWith(code int, c *cobra.Command) *cobra.Command {
	wrap := func(err error) error {
		var s status
		if err == nil || errors.As(err, &s) {
			return err
		}
		return status{err, code}
	}
	args, run := c.Args, c.RunE
	c.Args = func(c *cobra.Command, l []string) error { return wrap(args(c, l)) }
	c.RunE = func(c *cobra.Command, l []string) error { return wrap(run(c, l)) }
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return wrap(err) })
	return c
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
	add("box", sandboxCommand(), clusterCommand(), labCommand())
	c.AddCommand(versionCommand())
	wrapHelp(c)
	return c
}

// holds makes of a command one that holds others: alone it tells of them, and a name that none has is an error.
func holds(c *cobra.Command, others ...*cobra.Command) *cobra.Command {
	c.AddCommand(others...)
	c.DisableFlagsInUseLine = true
	c.Args = cobra.ArbitraryArgs
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 || args[0] == "help" {
			return c.Help()
		}
		c.SuggestionsMinimumDistance = min(2, len(args[0])/2) // of "rm", "up" and "ls" are no misspelling
		if like := c.SuggestionsFor(args[0]); len(like) > 0 {
			return fmt.Errorf("%s: there is no %q: did you mean %s?", c.CommandPath(), args[0], strings.Join(like, " or "))
		}
		var all []string
		for _, o := range others {
			if o.IsAvailableCommand() {
				all = append(all, o.Name())
			}
		}
		return fmt.Errorf("%s: there is no %q: choose one of %s", c.CommandPath(), args[0], strings.Join(all, ", "))
	}
	return c
}
