package report

import (
	"cmp"
	"slices"
	"strconv"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// member is a measure of a family's arm: its cells by rising parameter, the baseline's at 0 first.
type member struct {
	m     result.Measure
	cells []analysis.Cell
}

// members returns those of a family that were measured.
func members(s analysis.Summary, p result.Picture) (l []member) {
	for _, id := range p.Measures {
		m, known := s.Design.Measure(id)
		x := member{m: m}
		for _, c := range append(slices.Clone(s.Select(id, s.Design.Baseline)), s.Select(id, p.Arms[0])...) {
			if picked(c, p) != nil {
				x.cells = append(x.cells, c)
			}
		}
		slices.SortStableFunc(x.cells, func(a, b analysis.Cell) int { return cmp.Compare(a.X, b.X) })
		if known && len(x.cells) > 1 {
			l = append(l, x)
		}
	}
	return l
}

// picked returns a cell's number in a family: in the measure's unit, or its change in per cent. The baseline's is none.
func picked(c analysis.Cell, p result.Picture) *stats.Estimate {
	switch {
	case p.Of != result.Ratio:
		return c.Value
	case c.Ratio == nil && !c.HasX:
		return &stats.Estimate{Value: 1, CI: stats.Interval{Low: 1, High: 1}, Sure: true}
	}
	return c.Ratio
}

// shown returns a family's number as people read it.
func shown(v float64, m result.Measure, p result.Picture) float64 {
	if p.Of == result.Ratio {
		return 100 * (v - 1)
	}
	return in(v, m.Unit)
}

// family draws the measures of one arm over the varied parameter.
func (a *artist) family(p result.Picture) {
	line := chart.Line{X: chart.Axis{Title: a.d.Vary.Title}, Y: chart.Axis{Title: "% more than " +
		a.d.ArmTitle(a.d.Baseline), Suffix: " %", Zero: true}}
	for i, x := range members(a.s, p) {
		s := chart.Series{Name: x.m.Title, Style: chart.Style(i + 1)}
		for _, c := range x.cells {
			if e := picked(c, p); p.Most == 0 || c.X <= p.Most {
				s.Points = append(s.Points, chart.Point{X: c.X, Y: shown(e.Value, x.m, p), Low: shown(e.CI.Low, x.m, p),
					High: shown(e.CI.High, x.m, p)})
			}
		}
		line.Series = append(line.Series, s)
		if p.Of != result.Ratio {
			line.Y = chart.Axis{Title: x.m.Unit, Log: true}
		}
		for _, g := range p.Ghosts {
			if g.Measure == x.m.ID {
				line.Ghosts = append(line.Ghosts, chart.Ghost{X: g.X, Y: shown(g.Value, x.m, p)})
			}
		}
	}
	if len(line.Series) == 0 {
		return
	}
	first, _ := a.d.Measure(p.Measures[0])
	line.Frame = a.frame(p.ID, p.Title, "medians over rounds, 95 % interval; 0: "+a.d.ArmTitle(a.d.Baseline), "", &first)
	line.Frame.Height = 420
	a.add(p.ID, "picture", p.Title, line)
}

// families returns each family's table: the varied parameter by measures, with what others published.
func families(s analysis.Summary) (tables []*table) {
	for _, p := range s.Design.Pictures {
		if p.Kind != result.Family {
			continue
		}
		l := members(s, p)
		if len(l) == 0 {
			continue
		}
		t := &table{Title: p.Title, Head: []string{s.Design.Vary.Short}, Stacked: true,
			Remark: "0: " + s.Design.ArmTitle(s.Design.Baseline) + "."}
		for _, x := range l {
			t.Head = append(t.Head, x.m.Title)
		}
		for i, c := range l[0].cells {
			row := []cell{{Text: number(strconv.FormatFloat(c.X, 'f', -1, 64)), Class: "num"}}
			for _, x := range l {
				row = append(row, x.cell(min(i, len(x.cells)-1), p))
			}
			t.Rows = append(t.Rows, row)
		}
		if len(p.Ghosts) > 0 {
			t.Remark += " In brackets: " + p.Ghosts[0].Label + ", " + p.Ghosts[0].Source + "."
		}
		tables = append(tables, t)
	}
	return tables
}

// cell returns the i-th cell of a measure for a table, with its interval and what was published.
func (x member) cell(i int, p result.Picture) cell {
	c := x.cells[i]
	e := picked(c, p)
	text := func(v float64) string {
		if p.Of == result.Ratio {
			return signed(v-1, "%")
		}
		return amount(v, x.m.Unit)
	}
	r := cell{Text: text(e.Value), Class: "num"}
	if e.CI.Low != e.CI.High {
		r.Small = text(e.CI.Low) + " – " + text(e.CI.High)
	}
	for _, g := range p.Ghosts {
		if g.Measure == x.m.ID && g.X == c.X {
			r.Text += " [" + text(g.Value) + "]"
		}
	}
	return r
}
