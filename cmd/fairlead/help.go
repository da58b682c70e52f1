package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
)

// helpColumns is the width that help is wrapped to.
const helpColumns = 100

// wrapHelp wraps the help of a command and of those below it.
func wrapHelp(c *cobra.Command) {
	c.SetUsageTemplate(strings.ReplaceAll(c.UsageTemplate(), ".FlagUsages", wrapped))
	wrapLong(c)
	shortenFlags(c, agentFlags())
}

// wrapped is what the template of usage calls for the text of flags.
var wrapped = fmt.Sprintf(".FlagUsagesWrapped %d", helpColumns)

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
			lines = append(lines, cli.Wrap(paragraph, helpColumns)...)
		}
	}
	c.Long = strings.Join(lines, "\n")
	for _, s := range c.Commands() {
		wrapLong(s)
	}
}

// decidesAsAgent is the annotation of commands that have an agent's flags beside their own.
const decidesAsAgent = "fairlead.dev/decides-as-agent"

// agentFlags returns the flags by which an agent decides.
func agentFlags() *pflag.FlagSet {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	new(config.Flags).AddDecisions(fs)
	return fs
}

// shortenFlags has the help of a command that decides, and of those below it, list the command's own flags, then those
// for the source of objects. The others of an agent are left to fairlead options.
func shortenFlags(c *cobra.Command, agents *pflag.FlagSet) {
	for _, s := range c.Commands() {
		shortenFlags(s, agents)
	}
	if _, is := c.Annotations[decidesAsAgent]; !is {
		return
	}
	c.InitDefaultHelpFlag()
	group := func(name string) string {
		if agents.Lookup(name) == nil {
			return ""
		}
		return config.Group(name)
	}
	own, sources := groupUsage(c.LocalFlags(), "", group), groupUsage(c.LocalFlags(), config.Sources, group)
	text := fmt.Sprintf("%s\n%s:\n%s\nUse \"fairlead options\" for a list of an agent's other flags, which work here as "+
		"well.", own, config.Sources, sources)
	c.SetUsageTemplate(strings.Replace(c.Root().UsageTemplate(), "{{.LocalFlags"+wrapped+" | trimTrailingWhitespaces}}",
		text, 1))
}

// optionsCommand lists the flags by which an agent decides.
func optionsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "options",
		Short: "List the flags by which an agent decides, which other commands accept as well",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			fmt.Fprintln(cli.Out(c), "An agent decides by these flags. Commands that show or explain its decisions accept "+
				"them, too.")
			for _, title := range config.Groups {
				if text := groupUsage(agentFlags(), title, config.Group); text != "" {
					fmt.Fprintf(cli.Out(c), "\n%s:\n%s", title, text)
				}
			}
			return nil
		},
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
	group := func(name string) string {
		if name == "help" || name == "help-all" {
			return ""
		}
		return config.Group(name)
	}
	c.SetUsageFunc(func(c *cobra.Command) error {
		w := c.OutOrStderr()
		fmt.Fprintf(w, "Usage:\n  %s\n\nExamples:\n%s\n", c.UseLine(), c.Example)
		for _, title := range append([]string{""}, config.Groups...) {
			if text := groupUsage(c.LocalFlags(), title, group); text != "" && (*all || title != config.NoEffect) {
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
func groupUsage(all *pflag.FlagSet, group string, groupOf func(name string) string) string {
	of := pflag.NewFlagSet("", pflag.ContinueOnError)
	of.SortFlags = false
	all.VisitAll(func(f *pflag.Flag) {
		if groupOf(f.Name) == group {
			of.AddFlag(f)
		}
	})
	return of.FlagUsagesWrapped(helpColumns)
}
