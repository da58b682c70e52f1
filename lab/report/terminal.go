package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
)

// column of a terminal's table. Where width is short, the ones with the largest drop go first; 0 always stays.
type column struct {
	title string
	left  bool
	drop  int
	cut   bool // shortened instead, where at least 16 columns are left for it
	cells []string
}

func (c column) width() (w int) {
	for _, s := range append(c.cells, c.title) {
		w = max(w, utf8.RuneCountInString(s))
	}
	return w
}

// Table writes a summary for a terminal of so many columns: its answer, in sentences and bars, then warnings, a table
// per measure that has a baseline, one of all others or one for each, claims and aims. Columns that matter less are
// left out where width is short.
func Table(w io.Writer, s analysis.Summary, width int) error {
	var b strings.Builder
	termAnswer(&b, s, width)
	if len(s.Warnings) > 0 || s.Noise.Noisy {
		b.WriteString("\n")
	}
	for _, line := range s.Warnings {
		fmt.Fprintf(&b, "! %s\n", line)
	}
	if s.Noise.Noisy {
		b.WriteString(wrapped("! noisy run: "+strings.Join(s.Noise.Why, "; "), width))
	}
	if broad(s.Design) {
		for _, g := range append(grids(s, true), grids(s, false)...) {
			if !g.m.Detail {
				g.term(&b, s, width)
			}
		}
		termTable(&b, fits(s), width)
		fmt.Fprint(&b, "\n  =  no difference beyond the margin    ?  unclear\n")
	} else {
		few(&b, s, width)
	}
	for _, claims := range []bool{true, false} {
		if cols := aimColumns(s, claims); len(cols[0].cells) > 0 {
			fmt.Fprintf(&b, "\n%s: %s\n", kind(claims), tally(s, claims))
			render(&b, cols, width)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// few writes the tables of a design with few arms.
func few(b *strings.Builder, s analysis.Summary, width int) {
	for _, m := range measured(s, true) {
		columns := measureColumns(s, m)
		if len(columns[0].cells) == 0 {
			continue
		}
		fmt.Fprintf(b, "\n%s%s\n", m.Title, resolutionWords(s, m))
		render(b, columns, width)
	}
	if columns := upkeepColumns(s); columns != nil {
		fmt.Fprint(b, "\nProgramming and upkeep  (medians, on this machine)\n")
		render(b, columns, width)
	}
}

func resolutionWords(s analysis.Summary, m result.Measure) string {
	r, ok := s.Resolution[m.ID]
	if !ok {
		return ""
	}
	return fmt.Sprintf("  (resolution %s by A/A, margin %s)", plusMinus(r.Half), plusMinus(margin(s.Design, m)))
}

// measureColumns has a row per cell of a measure.
func measureColumns(s analysis.Summary, m result.Measure) []column {
	d := s.Design
	cols := []column{
		{title: "", left: true}, {title: d.Vary.Short}, {title: "median"}, {title: "95 %", drop: 2},
		{title: "× " + d.ArmTitle(d.Baseline)}, {title: "95 %", drop: 1}, {title: "verdict", left: true},
		{title: "p99", drop: 3}, {title: "blocks", drop: 4}, {title: "failed"}, {title: "packets/op", drop: 5},
	}
	for _, c := range s.Cells {
		if c.Measure != m.ID {
			continue
		}
		row := measureRow(s, m, c)
		for i := range cols {
			cols[i].cells = append(cols[i].cells, row[i])
		}
	}
	return slices.DeleteFunc(cols[:], func(c column) bool { // what nothing has needs no column, but the first must stay
		return c.title != "" && !slices.ContainsFunc(c.cells, func(s string) bool { return s != "" })
	})
}

func measureRow(s analysis.Summary, m result.Measure, c analysis.Cell) []string {
	h := head(s.Design, c)
	row := []string{h[0].Text, h[1].Text, "–", "", "", "", verdict(c), "", fmt.Sprint(c.Blocks), "", ""}
	if e := c.Value; e != nil {
		row[2] = amount(e.Value, m.Unit)
		if e.CI.Low != e.CI.High {
			row[3] = between(e.CI, m.Unit)
		}
	}
	if e := c.Ratio; e != nil {
		row[4], row[5] = ratio(e.Value), ratios(e.CI)
	}
	if q, ok := c.Quantiles["p99"]; ok {
		row[7] = chart.Number(in(q, m.Unit))
	}
	if n := c.Failed(); n > 0 {
		row[9] = group(fmt.Sprint(n))
	}
	if _, ok := c.Counters["softnet"]; ok {
		row[10] = countCell(c.Counters, "softnet").Text
	}
	return row
}

func aimColumns(s analysis.Summary, claims bool) []column {
	cols := []column{{left: true}, {left: true}, {left: true}, {left: true, drop: 1, cut: true}}
	for _, a := range chosen(s, claims) {
		for i, text := range []string{outcomeSign(a.Outcome), a.ID, says(a, s.Design), a.Text} {
			cols[i].cells = append(cols[i].cells, text)
		}
	}
	return cols
}

// render writes columns two spaces apart, without those that would pass the width.
func render(b *strings.Builder, cols []column, width int) {
	for total(cols) > width {
		worst := slices.MaxFunc(cols, func(x, y column) int { return cmp.Compare(x.drop, y.drop) })
		if worst.drop == 0 {
			break
		}
		if space := width - total(cols) + worst.width(); worst.cut && space >= 16 {
			worst.shorten(space)
			break
		}
		cols = slices.DeleteFunc(cols, func(c column) bool { return c.drop == worst.drop })
	}
	row := func(text func(column) string) {
		var line strings.Builder
		for _, c := range cols {
			s := text(c)
			pad := strings.Repeat(" ", c.width()-utf8.RuneCountInString(s))
			if c.left {
				line.WriteString("  " + s + pad)
			} else {
				line.WriteString("  " + pad + s)
			}
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	if slices.ContainsFunc(cols, func(c column) bool { return c.title != "" }) {
		row(func(c column) string { return c.title })
	}
	for i := range cols[0].cells {
		row(func(c column) string { return c.cells[i] })
	}
}

// shorten cuts every cell to so many columns.
func (c column) shorten(width int) {
	for i, s := range c.cells {
		c.cells[i] = cut(s, width)
	}
}

func total(cols []column) (w int) {
	for _, c := range cols {
		w += c.width() + 2
	}
	return w
}
