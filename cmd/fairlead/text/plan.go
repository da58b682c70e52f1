package text

import (
	"fmt"

	"fairlead.dev/fairlead/agent/escape"
	"fairlead.dev/fairlead/cmd/fairlead/cli"
	"fairlead.dev/fairlead/inspect"
)

// Plan prints a plan for people.
type Plan struct{ *inspect.Plan }

// Table prints its counts by kind of fact, and the operations that are listed.
func (p Plan) Table(w *cli.Page) error {
	rows := [][]string{{"KIND", "PUT", "REPLACE", "DELETE"}}
	for _, kind := range cli.SortedKeys(p.ByKind) {
		n := p.ByKind[kind]
		rows = append(rows, []string{kind, fmt.Sprint(n[0]), fmt.Sprint(n[1]), fmt.Sprint(n[2])})
	}
	if len(rows) > 1 {
		if err := w.Table(rows); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	for _, op := range p.Operations {
		fmt.Fprintln(w, escape.String(op))
	}
	fmt.Fprintf(w, "node %s: put %d, replace %d, delete %d, leave %d unchanged: %d transactions, about %s. Nothing was "+
		"changed.\n",
		p.Node, p.Put, p.Replace, p.Delete, p.Unchanged, p.Transactions, p.Estimate)
	return Problems(w, p.Problems)
}
