package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent/mode"
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
	var o output
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
				return o.print(out(c), l, l.table)
			}
			return o.print(out(c), l[0], l[0].describe)
		},
	}
	o.add(c)
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

func (l shownModes) table(p *page) error {
	rows := [][]string{{"MODE", "HERE", "WHAT IT IS", "SCHEDULERS"}}
	for _, m := range l {
		what := m.Summary
		if m.Here != "yes" {
			what = "needs " + m.Needs
		}
		rows = append(rows, []string{m.Name, m.available(), what, fmt.Sprint(len(m.Schedulers))})
	}
	if err := p.table(rows); err != nil {
		return err
	}
	_, err := fmt.Fprintln(p, "\nWhat one needs, its schedulers and limits: fairlead modes NAME")
	return err
}

// describe prints one mode whole.
func (m shownMode) describe(p *page) error {
	here := m.Here
	if here == "yes" && len(m.Lacks) > 0 {
		here = "in part"
	}
	_, err := fmt.Fprintln(p, m.Name)
	for _, line := range [][2]string{{"is", m.Summary}, {"needs", m.Needs}, {"here", here},
		{"schedulers", strings.Join(m.Schedulers, ", ")}} {
		err = errors.Join(err, p.paragraph(fmt.Sprintf("  %-12s", line[0]+":"), strings.Repeat(" ", 14), line[1]))
	}
	return errors.Join(err, p.list("Missing in this kernel:", m.Lacks), p.list("Limits:", m.Remarks))
}

// list writes sentences below a title, nothing where there are none.
func (p *page) list(title string, sentences []string) error {
	if len(sentences) == 0 {
		return nil
	}
	_, err := fmt.Fprintf(p, "\n%s\n", title)
	for _, s := range sentences {
		err = errors.Join(err, p.paragraph("  - ", "    ", s))
	}
	return err
}
