package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"fairlead.dev/fairlead/agent/config"
)

// help returns what a command prints with arguments.
func help(t *testing.T, args ...string) string {
	t.Helper()
	var b bytes.Buffer
	c := rootCommand()
	c.SetOut(&b)
	c.SetArgs(args)
	if err := c.Execute(); err != nil {
		t.Fatalf("fairlead %q: %v", args, err)
	}
	return b.String()
}

func TestHelpFitsTheScreen(t *testing.T) {
	var all func(c *cobra.Command, path []string)
	all = func(c *cobra.Command, path []string) {
		for line := range strings.Lines(help(t, append(path, "--help")...)) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > helpColumns {
				t.Errorf("fairlead %s --help: %d columns: %s", strings.Join(path, " "), n, line)
			}
		}
		for _, s := range c.Commands() {
			if s.Name() != "help" && s.Name() != "completion" {
				all(s, append(path[:len(path):len(path)], s.Name()))
			}
		}
	}
	all(rootCommand(), nil)
}

// Each flag of run is in a group, and those without effect are left to --help-all.
func TestRunHelpIsGrouped(t *testing.T) {
	short, long := help(t, "run", "--help"), help(t, "run", "--help-all", "--source", ".")
	run, _, err := rootCommand().Find([]string{"run"})
	if err != nil {
		t.Fatal(err)
	}
	shown := 0
	run.LocalFlags().VisitAll(func(f *pflag.Flag) {
		is := func(text string) bool { return strings.Contains(text, "--"+f.Name+" ") }
		if !f.Hidden && !is(long) {
			t.Errorf("--help-all lacks --%s", f.Name)
		}
		if is(short) {
			shown++
		}
		if !f.Hidden && is(short) == (config.Group(f.Name) == config.NoEffect) {
			t.Errorf("--help and --%s: %s", f.Name, f.Usage)
		}
	})
	if !strings.Contains(short, "\nSource of objects:\n") || shown < 20 {
		t.Errorf("help has %d flags:\n%s", shown, short)
	}
}

// A command that decides as an agent would lists its own flags and the source's, and leaves the others to options.
func TestHelpLeavesAgentFlagsToOptions(t *testing.T) {
	listed := func(text string, f *pflag.Flag) bool {
		return regexp.MustCompile(`(?m)^ +(-., )?--` + f.Name + ` `).MatchString(text)
	}
	options := help(t, "options")
	agentFlags().VisitAll(func(f *pflag.Flag) {
		if !listed(options, f) {
			t.Errorf("options lacks --%s", f.Name)
		}
	})
	for _, path := range [][]string{{"show"}, {"show", "network"}, {"plan"}, {"explain"}, {"trace"}, {"migrate"},
		{"advise"}, {"flows", "record"}, {"policy", "check"}, {"policy", "suggest"}} {
		c, _, err := rootCommand().Find(path)
		if err != nil {
			t.Fatal(err)
		}
		text := help(t, append(path, "--help")...)
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			want := !f.Hidden && (agentFlags().Lookup(f.Name) == nil || config.Group(f.Name) == config.Sources)
			if listed(text, f) != want {
				t.Errorf("%s --help lists --%s: %t, want %t", c.CommandPath(), f.Name, !want, want)
			}
		})
		if !strings.Contains(text, "\nUse \"fairlead options\" ") {
			t.Errorf("%s --help doesn't name options:\n%s", c.CommandPath(), text)
		}
	}
}
