package report

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

//go:embed compare.html.tmpl
var compareText string

var compareTemplate = template.Must(template.Must(htmlTemplate.Clone()).New("compare").Parse(compareText))

// Comparison is a report on two runs of one experiment.
type Comparison struct {
	Title, Question string
	Sides           []pair // what A and B are
	Answer          []string
	Cautions        []string
	Differences     *table
	Charts          []drawn
	Claims          *table
	Tables          []*table // ratios, differences, counts
	Values          *table
	Left            []string

	folders  [2]string // their names
	machines [2]result.Machine
	c        analysis.Comparison
}

// acrossRuns is what every absolute number of two runs comes with.
const acrossRuns = "These are compared across runs: all that differed between the two runs is in them, also what " +
	"else the machines did. Believe them only where both were at rest."

// Compare compares the runs in two folders. It returns an error that names what can't be compared.
func Compare(dirA, dirB string) (*Comparison, error) {
	for _, dir := range []string{dirA, dirB} {
		if IsSuite(dir) {
			return nil, fmt.Errorf("can't compare %s: it holds runs of several experiments; compare one of the folders below "+
				"it with a run of the same experiment", dir)
		}
	}
	if a, err := os.Stat(dirA); err == nil {
		if b, err := os.Stat(dirB); err == nil && os.SameFile(a, b) {
			return nil, fmt.Errorf("can't compare %s with itself: name the folders of two runs", dirA)
		}
	}
	a, err := result.Read(dirA)
	if err != nil {
		return nil, err
	}
	b, err := result.Read(dirB)
	if err != nil {
		return nil, err
	}
	c, err := analysis.Compare(a, b)
	if err != nil {
		return nil, err
	}
	d := c.A.Design
	p := &Comparison{Title: d.Title + ": two runs compared", Question: d.Question, Left: c.Left, c: c,
		folders:  [2]string{folderName(dirA), folderName(dirB)},
		machines: [2]result.Machine{a.Manifest.Machine, b.Manifest.Machine},
		Sides:    []pair{{"A", side(dirA, a.Manifest, c.A)}, {"B", side(dirB, b.Manifest, c.B)}}}
	for i, s := range []analysis.Summary{c.A, c.B} {
		if text := caution(s); text != "" {
			p.Cautions = append(p.Cautions, p.Sides[i].Name+": "+strings.TrimPrefix(strings.TrimSuffix(text, "; see below."),
				"Caution: ")+"; see its own report.")
		}
	}
	p.differences()
	p.tables()
	p.Answer = p.sentences()
	if err := p.draw(a, b); err != nil {
		return nil, err
	}
	return p, nil
}

// folderName returns the name of a folder, also of ".".
func folderName(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	return filepath.Base(dir)
}

// side returns which run it is.
func side(dir string, m result.Manifest, s analysis.Summary) string {
	return fmt.Sprintf("%s · %s · %s · commit %s", folderName(dir), where(m, s), kernelName(m.Machine),
		commitName(m.Build))
}

// HTML writes the report as one page that needs nothing else.
func (p *Comparison) HTML(w io.Writer) error { return compareTemplate.Execute(w, p) }

// Write writes the page into a folder, which it makes, and returns its path.
func (p *Comparison) Write(dir string) (path string, err error) {
	var b bytes.Buffer
	if err := p.HTML(&b); err != nil {
		return "", fmt.Errorf("write the comparison: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make the comparison's folder: %w", err)
	}
	path = filepath.Join(dir, fmt.Sprintf("compare-%s-%s.html", p.folders[0], p.folders[1]))
	return path, write(path, b.Bytes())
}

func (p *Comparison) differences() {
	if len(p.c.Differences) == 0 {
		return
	}
	p.Differences = &table{Title: "What differs between the machines", Head: []string{"", "A", "B"}}
	for _, x := range p.c.Differences {
		p.Differences.Rows = append(p.Differences.Rows, []cell{{Text: x.Name}, {Text: recorded(x.A)}, {Text: recorded(x.B)}})
	}
}

// What compares two runs' numbers.
const (
	overA = "B ÷ A"
	lessA = "B − A"
)

// tables makes those of claims, ratios, differences, counts and values.
func (p *Comparison) tables() {
	c, d := p.c, p.c.A.Design
	if len(c.Claims) > 0 {
		p.Claims = aims(analysis.Summary{Design: d, Aims: c.Claims}, true)
		p.Claims.Remark = acrossRuns
	}
	base := d.ArmTitle(d.Baseline)
	ratios := p.table("Ratios to "+base, c.Ratios, overA, func(_ result.Measure, v float64) string { return ratio(v) })
	if ratios != nil {
		ratios.Remark = "Each run's ratios are to its own baseline in the same round, and may be compared. “Same” means " +
			"that all of the interval lies within the margin; a difference is claimed beyond what both runs together " +
			"can't tell from nothing."
	}
	unit := func(m result.Measure, v float64) string { return amount(v, m.Unit) }
	more := p.table("More than "+base, c.More, lessA, unit)
	counts := p.table("Counts that differ", slices.DeleteFunc(slices.Clone(c.Counts), func(v analysis.Versus) bool {
		return v.A.Value == v.B.Value
	}), overA, unit)
	p.Tables = p.counted()
	for _, t := range []*table{ratios, more, counts} {
		p.Tables = append(p.Tables, some(t)...)
	}
	if p.Values = p.table("Absolute numbers", c.Values, overA, unit); p.Values != nil {
		p.Values.Remark = acrossRuns
	}
}

// table has a row for each cell that both runs have, nil where there is none.
func (p *Comparison) table(title string, l []analysis.Versus, over string,
	text func(result.Measure, float64) string) *table {
	if len(l) == 0 {
		return nil
	}
	d := p.c.A.Design
	t := &table{Title: title, Head: []string{"", "", d.Vary.Short, "A", "B", over, "95 %", "verdict"}}
	for _, v := range l {
		m, _ := d.Measure(v.Measure)
		h := head(d, analysis.Cell{Arm: v.Arm, Params: v.Params})
		number := func(e stats.Estimate) cell {
			c := cell{Text: text(m, e.Value), Class: "num"}
			if e.CI.Low != e.CI.High {
				c.Small = text(m, e.CI.Low) + " – " + text(m, e.CI.High)
			}
			return c
		}
		quotient, interval := ratio(v.Over.Value)+" ×", ratios(v.Over.CI)
		if over == lessA {
			quotient = signed(v.Over.Value, m.Unit)
			interval = signed(v.Over.CI.Low, m.Unit) + " to " + signed(v.Over.CI.High, m.Unit)
		}
		t.Rows = append(t.Rows, []cell{{Text: m.Title}, h[0], h[1], number(v.A), number(v.B),
			{Text: quotient, Class: "num"}, {Text: interval, Class: "num"},
			{Text: versusWord(v), Class: map[stats.Verdict]string{stats.Same: "same", stats.Unclear: "unclear"}[v.Verdict]}})
	}
	return t
}

// versusWord returns what a comparison means.
func versusWord(v analysis.Versus) string {
	if !v.Over.Sure {
		return "too few rounds"
	}
	return map[stats.Verdict]string{stats.Same: "same", stats.Unclear: "unclear", stats.Higher: "higher in B",
		stats.Lower: "lower in B"}[v.Verdict]
}

// sentences returns the answer: what differs, what the ratios say, and what the claims or the baseline do.
func (p *Comparison) sentences() (l []string) {
	c, d := p.c, p.c.A.Design
	l = append(l, differenceWords(c.Differences))
	l = append(l, p.countedSentences()...)
	n := map[stats.Verdict]int{}
	far := analysis.Versus{}
	for _, v := range c.Ratios {
		n[v.Verdict]++
		if v.Verdict == stats.Higher || v.Verdict == stats.Lower {
			if far.Measure == "" || distance(v.Over.Value) > distance(far.Over.Value) {
				far = v
			}
		}
	}
	if len(c.Ratios) > 0 {
		text := fmt.Sprintf("Of %s to %s, %s", plural(len(c.Ratios), "ratio"), d.ArmTitle(d.Baseline), verdictCounts(n))
		if n[stats.Unclear] == len(c.Ratios) {
			text = fmt.Sprintf("Nothing can be told of the ratios to %s: all %d are unclear, since the intervals of these runs "+
				"are too wide", d.ArmTitle(d.Baseline), len(c.Ratios))
		}
		if far.Measure != "" {
			text += fmt.Sprintf("; the farthest is %s: %s × in A, %s × in B (%s × A's)", p.name(far), ratio(far.A.Value),
				ratio(far.B.Value), ratios(far.Over.CI))
		}
		l = append(l, text+".")
	}
	if n := len(c.Counts); n > 0 {
		other := 0
		for _, v := range c.Counts {
			other += map[bool]int{true: 1}[v.A.Value != v.B.Value]
		}
		l = append(l, fmt.Sprintf("Of %s, %d differ.", plural(n, "exact count"), other))
	}
	judged := slices.DeleteFunc(slices.Clone(c.Claims), func(a analysis.AimResult) bool { return a.Got == nil })
	for _, a := range judged {
		l = append(l, fmt.Sprintf("%s is %s: %s (%s–%s) of %s, across runs.", a.ID, a.Outcome,
			quantity(a.Aim, d, a.Got.Value), quantity(a.Aim, d, a.Got.CI.Low), quantity(a.Aim, d, a.Got.CI.High),
			limit(a.Aim, d)))
	}
	if len(judged) == 0 && len(c.Values) > 0 {
		timed := func(v analysis.Versus) bool { m, _ := d.Measure(v.Measure); return ofTime[m.Unit] }
		v := c.Values[max(0, slices.IndexFunc(c.Values, timed))]
		if i := slices.IndexFunc(c.Values, func(v analysis.Versus) bool { return v.Measure == c.A.Answer.Chart }); i >= 0 {
			v = c.Values[i]
		}
		m, _ := d.Measure(v.Measure)
		l = append(l, fmt.Sprintf("%s took %s in A and %s in B, %s × as much (%s): %s. That is across runs, and holds no "+
			"farther than both machines were at rest.", upper(p.name(v)), amount(v.A.Value, m.Unit), amount(v.B.Value, m.Unit),
			ratio(v.Over.Value), ratios(v.Over.CI), versusWord(v)))
	}
	return l
}

// verdictCounts returns "15 are the same in both runs, 3 higher in B and 2 unclear".
func verdictCounts(n map[stats.Verdict]int) string {
	var l []string
	for _, x := range []struct {
		verdict stats.Verdict
		word    string
	}{{stats.Same, "the same in both runs"}, {stats.Higher, "higher in B"}, {stats.Lower, "lower in B"},
		{stats.Unclear, "unclear"}} {
		if n[x.verdict] > 0 {
			l = append(l, fmt.Sprintf("%d %s", n[x.verdict], x.word))
		}
	}
	verb := " are "
	if strings.HasPrefix(l[0], "1 ") {
		verb = " is "
	}
	l[0] = strings.Replace(l[0], " ", verb, 1)
	if k := len(l) - 1; k > 0 {
		l = append(l[:k-1], l[k-1]+" and "+l[k])
	}
	return strings.Join(l, ", ")
}

// distance is how far a ratio is from 1, alike above and below.
func distance(r float64) float64 {
	if r > 0 && r < 1 {
		return 1 / r
	}
	return r
}

// mostDifferences is how many a sentence names.
const mostDifferences = 3

// differenceWords returns "The runs differ in 7 recorded respects: Kernel (6.1 in A, 6.18 in B) …".
func differenceWords(l []analysis.Difference) string {
	if len(l) == 0 {
		return "Machine, program and settings are the same in both runs, as far as they are recorded."
	}
	var named []string
	for _, x := range l[:min(mostDifferences, len(l))] {
		named = append(named, fmt.Sprintf("%s (%s in A, %s in B)", lower(x.Name), brief(x.A), brief(x.B)))
	}
	text := fmt.Sprintf("The runs differ in %s: %s", plural(len(l), "recorded respect"), strings.Join(named, ", "))
	if n := len(l) - len(named); n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text + "."
}

// lower returns a name as it stands within a sentence.
func lower(s string) string {
	r, n := utf8.DecodeRuneInString(s)
	if next, _ := utf8.DecodeRuneInString(s[n:]); n == 0 || unicode.IsUpper(next) { // CPU
		return s
	}
	return strings.ToLower(string(r)) + s[n:]
}

// brief returns the beginning of a setting.
func brief(s string) string {
	const most = 40
	return cut(recorded(s), most)
}

// recorded returns a setting, or that there is none in the manifest.
func recorded(s string) string { return cmp.Or(s, "not recorded") }

// cut returns a text of so many characters at most, the last one an ellipsis where it was longer.
func cut(s string, most int) string {
	if r := []rune(s); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return s
}

// name returns "connect, request, close of nftables at 10,000 Services".
func (p *Comparison) name(v analysis.Versus) string {
	d := p.c.A.Design
	m, _ := d.Measure(v.Measure)
	return m.Title + " of " + p.cell(v)
}

// cell returns "nftables at 10,000 Services".
func (p *Comparison) cell(v analysis.Versus) string {
	d := p.c.A.Design
	text := d.ArmTitle(v.Arm)
	for _, k := range slices.Sorted(maps.Keys(v.Params)) {
		if k == d.Vary.Param {
			text += fmt.Sprintf(" at %s %s", number(v.Params[k]), d.Vary.Short)
		} else {
			text += ", " + k + " " + v.Params[k]
		}
	}
	return text
}

// draw makes the forest of ratios, and histograms of both runs over each other.
func (p *Comparison) draw(a, b result.Run) error {
	p.forest(a.Manifest, b.Manifest)
	for _, at := range p.histogramCells() {
		if err := p.histogram(a, b, at); err != nil {
			return err
		}
	}
	return nil
}

// mostRows is how many ratios the forest has at most, the deciding ones first.
const mostRows = 24

func (p *Comparison) forest(a, b result.Manifest) {
	d := p.c.A.Design
	f := chart.Forest{Same: true, Frame: chart.Frame{ID: "forest", Width: 920,
		Title: "Ratios to " + d.ArmTitle(d.Baseline) + ", B's over A's",
		Sub:   "each with its 95 % interval; grey: the margin within which two ratios are the same",
		Footer: fmt.Sprintf("A: %s, commit %s, %s · B: %s, commit %s, %s", kernelName(a.Machine), commitName(a.Build),
			cpuName(a.Machine), kernelName(b.Machine), commitName(b.Build), cpuName(b.Machine))}}
	for _, v := range p.c.Ratios {
		m, _ := d.Measure(v.Measure)
		if m.Detail || v.Over.Value <= 0 || len(f.Claims) == mostRows {
			continue
		}
		outcome := map[stats.Verdict]chart.Outcome{stats.Same: chart.Equal, stats.Higher: chart.Apart,
			stats.Lower: chart.Apart}[v.Verdict]
		h := head(d, analysis.Cell{Arm: v.Arm, Params: v.Params})
		f.Claims = append(f.Claims, chart.Claim{ID: strings.TrimSuffix(h[0].Text+", "+h[1].Text, ", "), Text: m.Title,
			Value: v.Over.Value, Low: v.Over.CI.Low, High: v.Over.CI.High, Margin: v.Margin, Outcome: outcome,
			Says: fmt.Sprintf("%s → %s ×", ratio(v.A.Value), ratio(v.B.Value))})
	}
	if len(f.Claims) > 0 {
		p.Charts = append(p.Charts, drawing("forest", wide, f.Title, f))
	}
}

// mostHistograms is how many a comparison has at most.
const mostHistograms = 8

// histogramCells are the cells of the answer and the baseline's beside them.
func (p *Comparison) histogramCells() (l []analysis.Cell) {
	add := func(c analysis.Cell) {
		known := slices.ContainsFunc(l, func(o analysis.Cell) bool {
			return o.Measure == c.Measure && o.Arm == c.Arm && maps.Equal(o.Params, c.Params)
		})
		if !known && len(l) < mostHistograms {
			l = append(l, c)
		}
	}
	for _, f := range p.c.A.Answer.Findings {
		for _, n := range f.Numbers {
			if base := p.c.A.Design.Baseline; base != "" {
				add(analysis.Cell{Measure: n.Measure, Arm: base})
			}
			add(analysis.Cell{Measure: n.Measure, Arm: n.Arm, Params: n.Params})
		}
	}
	return l
}

// ofTime are the units of what histograms hold.
var ofTime = map[string]bool{"ns": true, "µs": true, "ms": true, "s": true}

func (p *Comparison) histogram(a, b result.Run, at analysis.Cell) error {
	d := p.c.A.Design
	m, _ := d.Measure(at.Measure)
	if o, ok := p.c.B.Design.Measure(at.Measure); !ok || o.Unit != m.Unit || !ofTime[m.Unit] {
		return nil
	}
	f := chart.Histogram{X: chart.Axis{Title: perWhat(m), Log: true}}
	for i, r := range []result.Run{a, b} {
		h, err := analysis.Hist(r, at)
		if err != nil || h == nil {
			return err
		}
		f.Sets = append(f.Sets, chart.Counts{Style: chart.Style(1 + i), Bins: bins(h, m.Unit), Line: i > 0,
			Name: fmt.Sprintf("%s: %s ± %s", p.Sides[i].Name, chart.Number(in(h.Mean(), m.Unit)),
				amount(h.StdDev(), m.Unit))})
	}
	title := upper(p.name(analysis.Versus{Measure: at.Measure, Arm: at.Arm, Params: at.Params}))
	f.Frame = chart.Frame{ID: fmt.Sprintf("histogram-%d", len(p.Charts)), Title: title,
		Sub:    "all operations of all blocks, shares of each run's own total; mean ± standard deviation",
		Footer: "A: " + kernelName(a.Manifest.Machine) + " · B: " + kernelName(b.Manifest.Machine) + " · across runs"}
	p.Charts = append(p.Charts, drawing(f.Frame.ID, m.ID, title, f))
	return nil
}

// Terminal writes the report for a terminal of so many columns.
func (p *Comparison) Terminal(w io.Writer, width int) error {
	var b bytes.Buffer
	b.WriteString(wrapped(p.Title, width))
	b.WriteString(wrapped(fmt.Sprintf("A is %s, B is %s.", p.folders[0], p.folders[1]), width))
	for _, s := range append(p.Answer, p.Cautions...) {
		fmt.Fprintf(&b, "\n%s", wrapped(s, width))
	}
	b.WriteString(p.bars(width) + "\n")
	for _, s := range p.Sides {
		b.WriteString(wrapped(s.Name+": "+s.Value, width))
	}
	termTable(&b, shortened(p.Differences, (width-30)/2), width)
	termTable(&b, p.Claims, width, 0, 4, 1, 2)
	tables := slices.Concat(p.Tables, some(p.Values))
	if l := p.counted(); len(l) > 0 { // their parts are on the page
		termTable(&b, l[0], width, 0, 0, 0, 3, 3, 0, 1, 4, 4, 2)
		tables = tables[len(l):]
	}
	for _, t := range tables {
		for _, of := range byMeasure(t) {
			termTable(&b, of, width, 0, 0, 3, 3, 0, 2)
		}
	}
	if p.Values != nil {
		b.WriteString(wrapped(acrossRuns, width))
	}
	for _, s := range p.Left {
		b.WriteString(wrapped("Not compared: "+s, width))
	}
	_, err := w.Write(b.Bytes())
	return err
}

// bars draws the first ratios of both runs, or the first numbers where there are no ratios.
func (p *Comparison) bars(width int) string {
	const most = 4
	d := p.c.A.Design
	l, unit, to := p.c.Ratios, func(result.Measure) string { return "×" }, ", × "+d.ArmTitle(d.Baseline)
	if len(l) == 0 {
		l, unit, to = p.c.Values, func(m result.Measure) string { return m.Unit }, ""
	}
	if i := slices.IndexFunc(l, func(v analysis.Versus) bool { return v.Measure == p.c.A.Answer.Chart }); i > 0 {
		l = l[i:]
	}
	var rows []Bar
	title := ""
	for i, v := range l {
		if i == most || v.Measure != l[0].Measure { // others have other units
			break
		}
		m, _ := d.Measure(v.Measure)
		for side, e := range []stats.Estimate{v.A, v.B} {
			text := amount(e.Value, unit(m))
			if unit(m) == "×" {
				text = ratio(e.Value) + " ×"
			}
			title = upper(m.Title) + to + ":"
			rows = append(rows, Bar{p.Sides[side].Name + ": " + cut(p.cell(v), width/2), text, e.Value})
		}
	}
	if len(rows) == 0 {
		return ""
	}
	return "\n" + wrapped(title, width) + Bars(rows, width)
}

// byMeasure returns a table for each measure of one in which the first column names it.
func byMeasure(t *table) (l []*table) {
	for _, row := range t.Rows {
		title := t.Title + ": " + row[0].Text
		if len(l) == 0 || l[len(l)-1].Title != title {
			l = append(l, &table{Title: title, Head: t.Head[1:]})
		}
		l[len(l)-1].Rows = append(l[len(l)-1].Rows, row[1:])
	}
	return l
}

// shortened returns a table of which no cell has more than so many characters, nil for nil.
func shortened(t *table, most int) *table {
	if t == nil {
		return nil
	}
	short := &table{Title: t.Title, Head: t.Head}
	for _, row := range t.Rows {
		row = slices.Clone(row)
		for i := range row {
			row[i].Text = cut(row[i].Text, most)
		}
		short.Rows = append(short.Rows, row)
	}
	return short
}
