package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
)

// line is what was measured without a baseline: a measure of an arm, over the values of the varied parameter.
type line struct {
	measure result.Measure
	name    string
	cells   map[string]analysis.Cell // by the varied parameter, "" where there is none
}

// upkeep returns every measure without a baseline, line by line, and the values of the varied parameter that they have.
func upkeep(s analysis.Summary) (xs []string, lines []*line) {
	d, ms := s.Design, measured(s, false)
	arms, at := map[string]bool{}, map[string]float64{}
	for _, c := range s.Cells {
		if slices.ContainsFunc(ms, func(m result.Measure) bool { return m.ID == c.Measure }) {
			arms[c.Arm], at[c.Params[d.Vary.Param]] = true, c.X
		}
	}
	byName := map[string]*line{}
	for _, m := range ms {
		for _, c := range s.Cells {
			if c.Measure != m.ID {
				continue
			}
			name := lineName(d, m, c, len(arms) > 1)
			l := byName[name]
			if l == nil {
				l = &line{m, name, map[string]analysis.Cell{}}
				byName[name] = l
				lines = append(lines, l)
			}
			l.cells[c.Params[d.Vary.Param]] = c
		}
	}
	xs = slices.SortedFunc(maps.Keys(at), func(a,
		b string) int {
		return cmp.Or(cmp.Compare(at[a], at[b]), strings.Compare(a, b))
	})
	return xs, lines
}

// lineName returns "agent's memory, after the first sync", with the arm where there are several.
func lineName(d result.Design, m result.Measure, c analysis.Cell, arm bool) string {
	name := m.Title
	if arm {
		name += ", " + d.ArmTitle(c.Arm)
	}
	for _, k := range slices.Sorted(maps.Keys(c.Params)) {
		if k != d.Vary.Param {
			name += ", " + k + " " + c.Params[k]
		}
	}
	return name
}

// has reports whether one of the cells has something.
func (l *line) has(what func(analysis.Cell) bool) bool {
	for _, c := range l.cells {
		if what(c) {
			return true
		}
	}
	return false
}

func (l *line) tails() bool { return l.has(func(c analysis.Cell) bool { return c.Quantiles != nil }) }

func (l *line) failures() bool { return l.has(func(c analysis.Cell) bool { return c.Failed() > 0 }) }

// absolute has a row per line, and one for its tail if it is a distribution.
func absolute(s analysis.Summary) *table {
	xs, lines := upkeep(s)
	if len(lines) == 0 {
		return nil
	}
	t := &table{Head: []string{"", ""}, Groups: []heading{{"", 2}, {s.Design.Vary.Short, len(xs)}},
		Remark: "Medians over blocks, or means where the measure says so, with 95 % intervals; " +
			"99 % and slowest are over all operations. These have no baseline: they hold for this machine.", Stacked: true}
	for _, x := range xs {
		t.Head = append(t.Head, number(x))
	}
	for _, l := range lines {
		t.Rows = append(t.Rows, l.row(xs, cell{Text: l.name},
			func(c analysis.Cell) cell { return valueCell(c, l.measure, true) }))
		if l.tails() {
			for _, tail := range []struct{ title, of string }{{"  99 % within", "p99"}, {"  slowest", "max"}} {
				t.Rows = append(t.Rows, l.row(xs, cell{Text: tail.title, Class: "base"},
					func(c analysis.Cell) cell { return tailCell(c, l.measure, tail.of) }))
			}
		}
		if l.failures() {
			t.Rows = append(t.Rows, l.row(xs, cell{Text: "  failed", Class: "miss"}, func(c analysis.Cell) cell {
				return cell{Text: group(fmt.Sprint(c.Failed())), Class: "num"}
			}))
		}
	}
	return t
}

func (l *line) row(xs []string, name cell, text func(analysis.Cell) cell) []cell {
	row := []cell{name, {Text: l.measure.Unit, Class: "base"}}
	for _, x := range xs {
		c, ok := l.cells[x]
		if !ok {
			row = append(row, cell{Text: "–", Class: "num"})
			continue
		}
		row = append(row, text(c))
	}
	return row
}

func tailCell(c analysis.Cell, m result.Measure, of string) cell {
	v, ok := c.Quantiles[of]
	if !ok {
		return cell{Text: "–", Class: "num"}
	}
	return cell{Text: chart.Number(in(v, m.Unit)), Class: "num"}
}

// upkeepColumns is the same for a terminal, without intervals. Where width is short the smaller values of the parameter
// go first.
func upkeepColumns(s analysis.Summary) []column {
	t := absolute(s)
	if t == nil {
		return nil
	}
	cols := []column{{left: true, drop: 1000, cut: true}, {left: true}}
	for i, x := range t.Head[2:] {
		cols = append(cols, column{title: x, drop: len(t.Head) - 3 - i})
	}
	for _, row := range t.Rows {
		for i, c := range row {
			cols[i].cells = append(cols[i].cells, c.Text)
		}
	}
	return cols
}

// upkeepCounts are the counters of measures without a baseline, per operation: those that the experiment itself
// counted.
func upkeepCounts(s analysis.Summary) *table {
	_, lines := upkeep(s)
	names := map[string]bool{}
	for _, c := range ownCounters {
		for _, l := range lines {
			if l.has(func(cell analysis.Cell) bool { _, ok := cell.Counters[c.name]; return ok }) {
				names[c.name] = true
			}
		}
	}
	if len(names) == 0 {
		return nil
	}
	t := &table{Head: []string{"", s.Design.Vary.Short},
		Remark: "Per operation, medians over blocks. Processor times are the whole program's, garbage collection included."}
	for _, c := range ownCounters {
		if names[c.name] {
			t.Head = append(t.Head, strings.TrimSuffix(c.title+", "+c.unit, ", "))
		}
	}
	for _, l := range lines {
		for _, c := range sortedCells(l.cells) {
			row, some := []cell{{Text: l.name}, {Text: number(c.Params[s.Design.Vary.Param]), Class: "num"}}, false
			for _, n := range ownCounters {
				if !names[n.name] {
					continue
				}
				v, ok := c.Counters[n.name]
				some = some || ok
				row = append(row, n.cell(v, ok))
			}
			if some {
				t.Rows = append(t.Rows, row)
			}
		}
	}
	return t
}

func sortedCells(cells map[string]analysis.Cell) []analysis.Cell {
	return slices.SortedFunc(maps.Values(cells), func(a, b analysis.Cell) int { return cmp.Compare(a.X, b.X) })
}

// counter is one with its unit.
type counter struct{ name, title, unit string }

// ownCounters are those of programming and upkeep that the table shows.
var ownCounters = []counter{
	{"facts", "facts", ""}, {"transactions", "transactions", ""}, {"netlink_bytes", "netlink", "KiB"},
	{"user", "user", "ms"}, {"system", "system", "ms"},
	{"wakeups", "wake-ups", ""}, {"most", "most memory", "MiB"},
}

func (n counter) cell(v float64, ok bool) cell {
	switch {
	case !ok:
		return cell{Text: "–", Class: "num"}
	case n.unit == "":
		return cell{Text: group(fmt.Sprint(int64(v + 0.5))), Class: "num"}
	}
	return cell{Text: chart.Number(in(v, n.unit)), Class: "num"}
}
