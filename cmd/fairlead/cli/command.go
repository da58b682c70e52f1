// Package cli has what commands share: output for people and programs, exit statuses, commands that hold others.
package cli

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/escape"
)

// Status ends the process with an exit status of its own.
type Status struct {
	Err  error // is printed; nil: nothing is
	Code int
}

// Error implements error.
func (s Status) Error() string { return fmt.Sprintf("exit status %d: %v", s.Code, s.Err) }

// Exit prints an error and returns the exit status that it ends the process with.
func Exit(err error) int {
	s := Status{err, 1}
	errors.As(err, &s)
	if s.Err != nil {
		fmt.Fprintln(escape.Writer(os.Stderr), "fairlead:", s.Err)
	}
	return s.Code
}

// FailsWith has each error of a command end the process with an exit status, those that have another aside.
func FailsWith(code int, c *cobra.Command) *cobra.Command {
	wrap := func(err error) error {
		var s Status
		if err == nil || errors.As(err, &s) {
			return err
		}
		return Status{err, code}
	}
	args, run := c.Args, c.RunE
	c.Args = func(c *cobra.Command, l []string) error { return wrap(args(c, l)) }
	c.RunE = func(c *cobra.Command, l []string) error { return wrap(run(c, l)) }
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return wrap(err) })
	return c
}

// Holds has a command hold others: alone it prints its help, and a name that none has is an error.
func Holds(c *cobra.Command, others ...*cobra.Command) *cobra.Command {
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
