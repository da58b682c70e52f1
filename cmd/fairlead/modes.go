package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
)

// shownMode is one mode as modes prints it.
type shownMode struct {
	Name       string   `json:"name"`
	Here       string   `json:"here"`            // "yes", or why this kernel doesn't support it
	Lacks      []string `json:"lacks,omitempty"` // what this kernel lacks that it can do without, and what follows
	Summary    string   `json:"summary"`
	Needs      string   `json:"needs"`
	Schedulers []string `json:"schedulers"`
	Remarks    []string `json:"notes,omitempty"`
}

type shownModes []shownMode

// modesCommand lists the data planes.
func modesCommand() *cobra.Command {
	var o cli.Output
	c := &cobra.Command{
		Use:   "modes [NAME]",
		Short: "List the data planes and whether this kernel supports them, or describe one",
		Long: `List the data planes that fairlead run --mode accepts, and whether this kernel supports them with this user's
rights. With a name, describe that one: what it needs, its schedulers and its limits. Nothing is written.`,
		Example: "  fairlead modes\n  fairlead modes ebpf\n" +
			"  fairlead modes -o json | jq -r '.[] | select(.here == \"yes\").name'",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.FixedCompletions(mode.Names(), cobra.ShellCompDirectiveNoFileComp),
		RunE: func(c *cobra.Command, args []string) error {
			var l shownModes
			for _, m := range mode.All() {
				if len(args) == 0 || args[0] == m.Name {
					l = append(l, showMode(c, m))
				}
			}
			if len(l) == 0 {
				return fmt.Errorf("invalid mode %q: use one of %s", args[0], strings.Join(mode.Names(), ", "))
			}
			if len(args) == 0 {
				return o.Print(cli.Out(c), l, l.table)
			}
			return o.Print(cli.Out(c), l[0], l[0].describe)
		},
	}
	o.Add(c)
	return c
}

// showMode gathers what is printed of a mode.
func showMode(c *cobra.Command, m mode.Mode) shownMode {
	s := shownMode{Name: m.Name, Here: "yes", Summary: m.Summary, Needs: m.Needs}
	if err := m.Probe(c.Context()); err != nil {
		s.Here = "no: " + err.Error()
	} else {
		s.Lacks = m.Missing()
	}
	for _, x := range m.Schedulers.List() {
		s.Schedulers = append(s.Schedulers, x.String())
	}
	for _, n := range m.Remarks {
		s.Remarks = append(s.Remarks, n.Text)
	}
	return s
}

// available returns whether this kernel supports the mode, in a few words.
func (m shownMode) available() string {
	switch {
	case m.Here != "yes":
		return "no"
	case len(m.Lacks) > 0:
		return "in part"
	}
	return "yes"
}

// whatColumns is the width of what a mode is: with the other columns, that of help.
const whatColumns = helpColumns - len("iptables-legacy  in part  SCHEDULERS  ")

func (l shownModes) table(p *cli.Page) error {
	rows := [][]string{{"MODE", "HERE", "SCHEDULERS", "WHAT IT IS"}}
	for _, m := range l {
		what := m.Summary
		if m.Here != "yes" {
			what = "needs " + m.Needs
		}
		row := []string{m.Name, m.available(), fmt.Sprint(len(m.Schedulers))}
		for _, line := range cli.Wrap(what, whatColumns) {
			rows = append(rows, append(row, line))
			row = []string{"", "", ""}
		}
	}
	if err := p.Table(rows); err != nil {
		return err
	}
	_, err := fmt.Fprintln(p, "\nWhat one needs, its schedulers and limits: fairlead modes NAME")
	return err
}

// describe prints one mode whole.
func (m shownMode) describe(p *cli.Page) error {
	here := m.Here
	if here == "yes" && len(m.Lacks) > 0 {
		here = "in part"
	}
	_, err := fmt.Fprintln(p, m.Name)
	for _, line := range [][2]string{{"is", m.Summary}, {"needs", m.Needs}, {"here", here},
		{"schedulers", strings.Join(m.Schedulers, ", ")}} {
		err = errors.Join(err, p.Paragraph(fmt.Sprintf("  %-12s", line[0]+":"), strings.Repeat(" ", 14), line[1]))
	}
	return errors.Join(err, p.List("Missing in this kernel:", m.Lacks), p.List("Limits:", m.Remarks))
}
