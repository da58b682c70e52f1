package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// broad reports whether a design has so many arms that each measure gets a table of its own, arms by the varied
// parameter, instead of a row for each arm and parameter.
func broad(d result.Design) bool {
	n := 0
	for _, a := range d.Arms {
		if a.ID != d.Baseline && a.ID != d.Again {
			n++
		}
	}
	return n > 3
}

// grid is a measure's cells, arms by the varied parameter.
type grid struct {
	m    result.Measure
	base analysis.Cell // the baseline's, if it is compared
	xs   []string
	rows []*line
}

// compared reports whether a measure has a baseline.
func compared(m result.Measure) bool { return m.Ratio || m.More }

// grids returns the measures that have a cell, with or without a baseline.
func grids(s analysis.Summary, with bool) (l []grid) {
	for _, m := range s.Design.Measures {
		if g := gridOf(s, m); compared(m) == with && len(g.rows) > 0 {
			l = append(l, g)
		}
	}
	return l
}

func gridOf(s analysis.Summary, m result.Measure) grid {
	g, at, byName := grid{m: m}, map[string]float64{}, map[string]*line{}
	for _, c := range s.Cells {
		switch {
		case c.Measure != m.ID || c.Value == nil:
			continue
		case compared(m) && c.Arm == s.Design.Baseline:
			g.base = c
			continue
		}
		x := c.Params[s.Design.Vary.Param]
		at[x] = c.X
		name := lineName(s.Design, result.Measure{Title: s.Design.ArmTitle(c.Arm)}, c, false)
		l := byName[name]
		if l == nil {
			l = &line{m, name, map[string]analysis.Cell{}}
			byName[name], g.rows = l, append(g.rows, l)
		}
		l.cells[x] = c
	}
	g.xs = slices.SortedFunc(maps.Keys(at),
		func(a, b string) int { return cmp.Or(cmp.Compare(at[a], at[b]), strings.Compare(a, b)) })
	if len(g.xs) > 1 && g.xs[0] == "" { // what the parameter doesn't touch stands in the other columns' place
		g.xs = g.xs[1:]
		for _, l := range g.rows {
			if c, ok := l.cells[""]; ok {
				l.cells[g.xs[0]] = c
			}
		}
	}
	return g
}

// table writes a grid for a page.
func (g grid) table(s analysis.Summary) *table {
	t := &table{Title: g.m.Title, Head: []string{"", ""}, Stacked: true, Remark: g.remark(s)}
	if len(g.xs) > 1 || g.xs[0] != "" {
		t.Groups = []heading{{"", 2}, {s.Design.Vary.Short, len(g.xs)}}
	}
	for _, x := range g.xs {
		t.Head = append(t.Head, number(x))
	}
	for _, l := range g.rows {
		t.Rows = append(t.Rows, l.row(g.xs, cell{Text: l.name}, func(c analysis.Cell) cell { return gridCell(c, g.m) }))
	}
	return t
}

// remark returns what a grid's numbers are.
func (g grid) remark(s analysis.Summary) string {
	base := s.Design.ArmTitle(s.Design.Baseline)
	text := strings.TrimSuffix(g.m.Text, ".")
	if text != "" {
		text = strings.ToUpper(text[:1]) + text[1:] + ". "
	}
	r, ok := s.Resolution[g.m.ID]
	switch {
	case g.base.Value == nil:
		return strings.TrimSpace(text)
	case g.m.Ratio && ok:
		text += fmt.Sprintf("%s: %s; resolution %s; margin %s.", base, amount(g.base.Value.Value, g.m.Unit),
			plusMinus(r.Half), plusMinus(margin(s.Design, g.m)))
	case ok:
		text += fmt.Sprintf("%s: %s; resolution ±%s.", base, amount(g.base.Value.Value, g.m.Unit), amount(r.Half, g.m.Unit))
	default:
		text += fmt.Sprintf("%s: %s.", base, amount(g.base.Value.Value, g.m.Unit))
	}
	return text + signWords
}

func gridCell(c analysis.Cell, m result.Measure) cell {
	switch {
	case m.Ratio && c.Ratio != nil:
		class := gridClass(c, c.Ratio)
		return cell{Text: ratio(c.Ratio.Value) + " ×  " + amount(c.Value.Value, m.Unit),
			Small: ratios(c.Ratio.CI) + verdictSigns[class], Class: string(class)}
	case m.More && c.More != nil:
		class := gridClass(c, c.More)
		return cell{Text: signed(c.More.Value, m.Unit) + "  of " + amount(c.Value.Value, m.Unit),
			Small: between(c.More.CI, m.Unit) + verdictSigns[class], Class: string(class)}
	}
	return valueCell(c, m, true)
}

// verdictSigns follow numbers, for readers without colours; signWords says what they mean.
var verdictSigns = map[stats.Verdict]string{stats.Same: " =", stats.Unclear: " ?", stats.Higher: " ▲",
	stats.Lower: " ▼"}

const signWords = " ▲ more, ▼ less, = the same within the margin, ? unclear."

func gridClass(c analysis.Cell, e *stats.Estimate) stats.Verdict {
	if !e.Sure {
		return stats.Unclear
	}
	return c.Verdict
}

// signed returns "+2.41 %".
func signed(v float64, unit string) string {
	if v < 0 {
		return "−" + amount(-v, unit)
	}
	return "+" + amount(v, unit)
}

// fits has how answers were shared out, for cells that know of how many servers.
func fits(s analysis.Summary) *table {
	t := &table{Title: "Shares of the answers", Head: []string{"", "", "answers", "least", "most", "even", "chi-square",
		"freedom", "p"},
		Remark: "Answers by server: the least and the most of one, and what equal shares would be. p is the chance " +
			"of shares so uneven, or more, if every server were equally likely."}
	for _, c := range s.Cells {
		if c.Fit == nil {
			continue
		}
		n := c.Fit.Freedom + 1
		sum, least, most := int64(0), int64(math.MaxInt64), int64(0)
		for _, v := range c.Answers {
			sum, least, most = sum+v, min(least, v), max(most, v)
		}
		if len(c.Answers) < n {
			least = 0
		}
		row := head(s.Design, c)
		row[1].Class = ""
		for _, text := range []string{group(fmt.Sprint(sum)), group(fmt.Sprint(least)), group(fmt.Sprint(most)),
			chart.Number(float64(sum) / float64(n)),
			chart.Number(c.Fit.ChiSquare), fmt.Sprint(c.Fit.Freedom), probability(c.Fit.P)} {
			row = append(row, cell{Text: text, Class: "num"})
		}
		t.Rows = append(t.Rows, row)
	}
	if len(t.Rows) == 0 {
		return nil
	}
	return t
}

// termTable writes a page's table for a terminal. Where width is short, columns are shortened, or left out, in the
// order of their drops.
func termTable(w io.Writer, t *table, width int, drops ...int) {
	if t == nil {
		return
	}
	var cols []column
	for i, h := range t.Head {
		c := column{title: h, left: !t.numeric(i)}
		if i < len(drops) {
			c.drop, c.cut = drops[i], c.left
		}
		for _, r := range t.Rows {
			c.cells = append(c.cells, r[i].Text)
		}
		cols = append(cols, c)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s\n", t.Title)
	render(&b, cols, width)
	io.WriteString(w, b.String())
}

// term writes a grid for a terminal.
func (g grid) term(w io.Writer, s analysis.Summary, width int) {
	about := map[bool]string{true: "  " + g.m.Unit}[g.m.Unit != ""]
	if base := g.base.Value; base != nil {
		unit := map[bool]string{true: ", × ", false: ", more than "}[g.m.Ratio] + s.Design.ArmTitle(s.Design.Baseline)
		about = fmt.Sprintf("%s  (%s %s", unit, s.Design.ArmTitle(s.Design.Baseline), amount(base.Value, g.m.Unit))
		if r, ok := s.Resolution[g.m.ID]; ok && g.m.Ratio {
			about += ", resolution " + plusMinus(r.Half)
		} else if ok {
			about += ", resolution ±" + amount(r.Half, g.m.Unit)
		}
		about += ")"
	}
	fmt.Fprintf(w, "\n%s%s\n", g.m.Title, about)
	cols := []column{{left: true}}
	for i, x := range g.xs {
		cols = append(cols, column{title: number(x), drop: len(g.xs) - 1 - i})
	}
	for _, l := range g.rows {
		cols[0].cells = append(cols[0].cells, l.name)
		for i, x := range g.xs {
			c, ok := l.cells[x]
			cols[i+1].cells = append(cols[i+1].cells, map[bool]string{true: gridWord(c, g.m)}[ok])
		}
	}
	var b strings.Builder
	render(&b, cols, width)
	io.WriteString(w, b.String())
}

// gridWord is a number with "=" for no difference that matters, and "?" for none that is sure.
func gridWord(c analysis.Cell, m result.Measure) string {
	sign := map[stats.Verdict]string{stats.Same: " =", stats.Unclear: " ?"}[c.Verdict]
	switch {
	case m.Ratio && c.Ratio != nil:
		return ratio(c.Ratio.Value) + cmp.Or(sign, "  ")
	case m.More && c.More != nil:
		return signed(c.More.Value, m.Unit) + cmp.Or(sign, "  ")
	case c.Value == nil:
		return "–"
	}
	return chart.Number(in(c.Value.Value, m.Unit))
}
