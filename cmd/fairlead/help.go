package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/agent/config"
)

// helpColumns is the width that help is wrapped to.
const helpColumns = 100

// wrapHelp wraps the help of a command and of those below it.
func wrapHelp(c *cobra.Command) {
	c.SetUsageTemplate(strings.ReplaceAll(c.UsageTemplate(), ".FlagUsages",
		fmt.Sprintf(".FlagUsagesWrapped %d", helpColumns)))
	wrapLong(c)
}

// wrapLong wraps the descriptions of a command and of those below it. Lines that begin with a space stay as they are.
func wrapLong(c *cobra.Command) {
	var lines []string
	for paragraph := range strings.SplitSeq(c.Long, "\n\n") {
		if lines != nil {
			lines = append(lines, "")
		}
		if strings.Contains(paragraph, "\n ") || strings.HasPrefix(paragraph, " ") {
			lines = append(lines, paragraph)
		} else {
			lines = append(lines, wrap(paragraph, helpColumns)...)
		}
	}
	c.Long = strings.Join(lines, "\n")
	for _, s := range c.Commands() {
		wrapLong(s)
	}
}

// groupFlags has a command's help list the flags of an agent by groups, those without effect only with --help-all.
func groupFlags(c *cobra.Command) {
	all := c.Flags().Bool("help-all", false, "help with all flags, also those accepted without effect")
	run := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		if *all {
			return c.Help()
		}
		return run(c, args)
	}
	c.SetUsageFunc(func(c *cobra.Command) error {
		w := c.OutOrStderr()
		fmt.Fprintf(w, "Usage:\n  %s\n\nExamples:\n%s\n", c.UseLine(), c.Example)
		for _, title := range append([]string{""}, config.Groups...) {
			if text := groupUsage(c, title); text != "" && (*all || title != config.NoEffect) {
				fmt.Fprintf(w, "\n%s:\n%s", heading(title), text)
			}
		}
		return nil
	})
}

// heading returns the title of a group; "" is that of flags of the command itself.
func heading(group string) string {
	if group == "" {
		return "Help"
	}
	return group
}

// groupUsage returns what help says of the flags of a group, "" where there are none.
func groupUsage(c *cobra.Command, group string) string {
	of := pflag.NewFlagSet("", pflag.ContinueOnError)
	of.SortFlags = false
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		is := ""
		if f.Name != "help" && f.Name != "help-all" {
			is = config.Group(f.Name)
		}
		if is == group {
			of.AddFlag(f)
		}
	})
	return of.FlagUsagesWrapped(helpColumns)
}
