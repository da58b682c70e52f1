package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"fairlead.dev/fairlead/agent/escape"
)

// output is the flag -o of commands that print for people and for programs.
type output string

func (o *output) add(c *cobra.Command) {
	c.Flags().StringVarP((*string)(o), "output", "o", "", "json or yaml, for programs")
	c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"json", "yaml"}, cobra.ShellCompDirectiveNoFileComp))
}

// out returns where a command prints: what objects, processes and servers say can't control a terminal there.
func out(c *cobra.Command) io.Writer { return escape.Writer(c.OutOrStdout()) }

// print writes v as the flag says, or calls table.
func (o output) print(w io.Writer, v any, table func(io.Writer) error) error {
	switch o {
	case "":
		return table(w)
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(v)
	case "yaml":
		b, err := yaml.Marshal(v)
		if err == nil {
			_, err = w.Write(b)
		}
		return err
	}
	return fmt.Errorf("--output %q: json and yaml are known", string(o))
}

// table writes rows in aligned columns, the first as heading. Each row is one line, whatever its cells say.
func table(w io.Writer, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		cells := make([]string, len(r))
		for i, c := range r {
			cells[i] = escape.String(c)
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

// sortedKeys gives a map's keys in order.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
