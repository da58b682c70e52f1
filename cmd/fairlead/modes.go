package main

import (
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"fairlead.dev/fairlead/agent"
)

// shownMode is one mode as modes prints it.
type shownMode struct {
	Name       string   `json:"name"`
	Here       string   `json:"here"`            // "yes", or why this kernel can't
	Lacks      []string `json:"lacks,omitempty"` // what this kernel lacks that it can do without, and what follows
	Schedulers []string `json:"schedulers"`
	Notes      []string `json:"notes,omitempty"`
}

type shownModes []shownMode

// modesCommand lists the data planes.
func modesCommand() *cobra.Command {
	var o output
	c := &cobra.Command{
		Use:   "modes",
		Short: "List the data planes, what each can do, and whether this kernel can",
		Long: `List the data planes that fairlead run --mode takes, what each can do, and whether this kernel, with this
user's rights, can. Nothing is written.`,
		Example: "  fairlead modes\n  fairlead modes -o json | jq -r '.[] | select(.here == \"yes\").name'",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			var l shownModes
			for _, m := range agent.Modes() {
				s := shownMode{Name: m.Name, Here: "yes", Notes: m.Notes}
				if err := m.Probe(c.Context()); err != nil {
					s.Here = "no: " + err.Error()
				} else if m.Lacks != nil {
					s.Lacks = m.Lacks()
				}
				for _, x := range m.Schedulers.List() {
					s.Schedulers = append(s.Schedulers, x.String())
				}
				l = append(l, s)
			}
			return o.print(out(c), l, l.table)
		},
	}
	o.add(c)
	return c
}

func (l shownModes) table(w io.Writer) error {
	rows := [][]string{{"MODE", "HERE", "SCHEDULERS"}}
	for _, m := range l {
		rows = append(rows, []string{m.Name, m.Here, few(m.Schedulers)})
	}
	if err := table(w, rows); err != nil {
		return err
	}
	for i, m := range l {
		for _, n := range m.Lacks {
			fmt.Fprintf(w, "%s, here: %s\n", m.Name, n)
		}
		if i > 0 && slices.Equal(m.Notes, l[i-1].Notes) {
			continue // a variant
		}
		for _, n := range m.Notes {
			fmt.Fprintf(w, "%s: %s\n", m.Name, n)
		}
	}
	return nil
}
