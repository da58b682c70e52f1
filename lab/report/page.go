package report

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// page is the report's content, the same for HTML and Markdown.
type page struct {
	Title, Question string
	Where           string // profile, date, duration, in a line
	Answer          []string
	Caution         string
	tables
	Noise    []string
	Noisy    bool
	Warnings []string
	Remarks  []string
	Method   []string
	Missing  []string
	origin
	Opening []drawn // the chart that shows the answer, if there is any
	Charts  []drawn // the others
	Ghosts  []string
}

// tables are a page's numbers.
type tables struct {
	Claims   *table   // of others
	Aims     *table   // our own
	Answers  []*table // measures with a baseline: arm × parameter
	Absolute []*table // the others
	Counters *table
	Upkeep   *table // counts of the others
}

// origin is where a page's numbers come from.
type origin struct {
	Machine []pair
	More    []pair // of the machine, for those who want to know more
	Files   []rawFile
	Command string
}

type pair struct{ Name, Value string }

// table is rows of text. Rows[i] is as long as Head.
type table struct {
	Title  string // if there are several of a kind
	Head   []string
	Groups []heading // above Head, if any
	Rows   [][]cell
	Remark string

	Stacked bool // intervals stand below their numbers
	Claims  bool // of claims or aims: on a narrow screen each row stands as a paragraph
}

// numeric reports whether a column's last cell is a number: the baseline, which comes first, has none in some.
func (t *table) numeric(i int) bool {
	return len(t.Rows) > 0 && t.Rows[len(t.Rows)-1][i].Class == "num"
}

// heading is a heading over several columns.
type heading struct {
	Title string
	Cols  int
}

// cell is a text with a second, fainter one, and a class that says what it means: "num", "same", "higher", "lower",
// "unclear", "hit", "miss", "base".
type cell struct{ Text, Small, Class string }

func newPage(r result.Run, s analysis.Summary, files []rawFile) (*page, error) {
	charts, err := draw(r, s)
	if err != nil {
		return nil, err
	}
	d, m := s.Design, r.Manifest
	p := &page{
		Title: d.Title, Question: d.Question, Where: where(m, s), Answer: answerWords(s), Caution: caution(s),
		Noise: noiseWords(s.Noise), Noisy: s.Noise.Noisy,
		Warnings: s.Warnings, Remarks: m.Remarks, Method: append(method(s), d.Method...), Missing: d.Missing,
		origin: origin{Files: files, Command: shell(m.Command)},
		tables: tables{Claims: aims(s, true), Aims: aims(s, false)},
	}
	p.Opening, p.Charts = opening(s, charts)
	p.Answers = families(s)
	if broad(d) {
		for _, g := range grids(s, true) {
			p.Answers = append(p.Answers, g.table(s))
		}
		p.Absolute = some(fits(s))
		for _, g := range grids(s, false) {
			p.Absolute = append(p.Absolute, g.table(s))
		}
	} else {
		p.Answers, p.Absolute = append(p.Answers, some(answers(s))...), some(absolute(s))
		p.Counters, p.Upkeep = counters(s), upkeepCounts(s)
	}
	ghosts := d.Ghosts
	for _, x := range d.Pictures {
		ghosts = append(ghosts, x.Ghosts...)
	}
	for _, g := range ghosts {
		if s := g.Label + ": " + g.Source; !slices.Contains(p.Ghosts, s) {
			p.Ghosts = append(p.Ghosts, s)
		}
	}
	p.Machine, p.More = machine(m)
	return p, nil
}

// some is a table, if there is one.
func some(t *table) []*table {
	if t == nil {
		return nil
	}
	return []*table{t}
}

func where(m result.Manifest, s analysis.Summary) string {
	l := []string{"experiment " + m.Design.ID, m.Profile + " profile", m.Started.UTC().Format("2 January 2006, 15:04 UTC")}
	if !m.Ended.IsZero() {
		l = append(l, span(m.Ended.Sub(m.Started)))
	}
	return strings.Join(append(l, plural(s.Rounds, "round"), plural(s.Blocks, "block")), " · ")
}

func margin(d result.Design, m result.Measure) float64 {
	if m.Margin > 0 {
		return m.Margin
	}
	return d.Margin
}

func noiseWords(n analysis.Noise) []string {
	l := []string{fmt.Sprintf("The hypervisor took %.2f %% of the processors' time; other processes used %.1f %%.",
		100*n.Steal, 100*n.Others)}
	for _, w := range n.Why {
		l = append(l, strings.ToUpper(w[:1])+w[1:]+".")
	}
	return l
}

// rows returns every arm and parameter that has a cell in one of the measures, in order.
func rows(s analysis.Summary, measures []result.Measure) (keys []analysis.Cell) {
	for _, arm := range s.Design.Arms {
		var of []analysis.Cell
		for _, m := range measures {
			for _, c := range s.Select(m.ID, arm.ID) {
				if !slices.ContainsFunc(of, func(o analysis.Cell) bool { return maps.Equal(o.Params, c.Params) }) {
					of = append(of, analysis.Cell{Arm: c.Arm, Params: c.Params, X: c.X})
				}
			}
		}
		slices.SortStableFunc(of, func(a, b analysis.Cell) int { return int(a.X - b.X) })
		keys = append(keys, of...)
	}
	return keys
}

// head begins a row: the arm, and the varied parameter with the others.
func head(d result.Design, c analysis.Cell) []cell {
	var params []string
	if v, ok := c.Params[d.Vary.Param]; ok {
		params = append(params, number(v))
	}
	for _, k := range slices.Sorted(maps.Keys(c.Params)) {
		if k != d.Vary.Param {
			params = append(params, k+" "+c.Params[k])
		}
	}
	class := ""
	if c.Arm == d.Baseline || c.Arm == d.Again {
		class = "base"
	}
	return []cell{{Text: d.ArmTitle(c.Arm), Class: class}, {Text: strings.Join(params, ", "), Class: "num"}}
}

// measured are the measures with or without a baseline that have a cell.
func measured(s analysis.Summary, ratio bool) (ms []result.Measure) {
	for _, m := range s.Design.Measures {
		if compared(m) == ratio && slices.ContainsFunc(s.Cells,
			func(c analysis.Cell) bool { return c.Measure == m.ID && c.Value != nil }) {
			ms = append(ms, m)
		}
	}
	return ms
}

// answers has two columns per measure: the time, and the ratio with its interval and verdict.
func answers(s analysis.Summary) *table {
	d, ms := s.Design, measured(s, true)
	if len(ms) == 0 {
		return nil
	}
	t := &table{Head: []string{"", d.Vary.Short}, Groups: []heading{{"", 2}}}
	for _, m := range ms {
		t.Groups = append(t.Groups, heading{m.Title, 2})
		t.Head = append(t.Head, m.Unit, "× "+d.ArmTitle(d.Baseline))
	}
	for _, k := range rows(s, ms) {
		row := head(d, k)
		for _, m := range ms {
			c, _ := s.Cell(m.ID, k.Arm, k.Params)
			row = append(row, valueCell(c, m, false), ratioCell(c))
		}
		t.Rows = append(t.Rows, row)
	}
	var l []string
	for _, m := range ms {
		if r, ok := s.Resolution[m.ID]; ok {
			l = append(l, m.Title+" "+plusMinus(r.Half))
		}
	}
	t.Remark = fmt.Sprintf("Medians over blocks; ratios are medians over rounds of block to the %s blocks of the same "+
		"round, with 95 %% intervals. “No difference” means that the whole interval lies within %s and holds 1; “in "+
		"margin”, that it lies within but does not hold 1.", d.ArmTitle(d.Baseline), plusMinus(d.Margin))
	if len(l) > 0 {
		t.Remark += " What this run can't tell from nothing (A/A): " + strings.Join(l, ", ") + "."
	}
	return t
}

func valueCell(c analysis.Cell, m result.Measure, interval bool) cell {
	if c.Value == nil {
		return cell{Text: "–", Class: "num"}
	}
	out := cell{Text: chart.Number(in(c.Value.Value, m.Unit)), Class: "num"}
	if interval && c.Value.CI.Low != c.Value.CI.High {
		out.Small = between(c.Value.CI, m.Unit)
	}
	return out
}

func ratioCell(c analysis.Cell) cell {
	if c.Ratio == nil {
		return cell{Text: "–", Class: "base"}
	}
	class := string(c.Verdict)
	if !c.Ratio.Sure {
		class = string(stats.Unclear)
	}
	return cell{Text: ratio(c.Ratio.Value) + "  " + verdict(c), Small: ratios(c.Ratio.CI), Class: class}
}

// counters has what was counted exactly, per operation, for measures with a baseline.
func counters(s analysis.Summary) *table {
	d, ms := s.Design, measured(s, true)
	names := counterNames(s, ms)
	if len(names) == 0 {
		return nil
	}
	t := &table{Head: []string{"", d.Vary.Short}, Groups: []heading{{"", 2}},
		Remark: "Counts per operation, medians over blocks. Packets through the receive path and context switches are " +
			"exact for the machine; traffic of other processes adds to the former."}
	for _, m := range ms {
		t.Groups = append(t.Groups, heading{m.Title, len(names)})
		for _, n := range names {
			t.Head = append(t.Head, counterTitle(n))
		}
	}
	for _, k := range rows(s, ms) {
		row := head(d, k)
		for _, m := range ms {
			c, _ := s.Cell(m.ID, k.Arm, k.Params)
			for _, n := range names {
				row = append(row, countCell(c.Counters, n))
			}
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// hiddenCounters say nothing that others don't.
var hiddenCounters = map[string]bool{"softnet_pinned": true, "servers": true, "bytes": true, "preempted": true,
	"faults": true}

// counterNames are those that are not 0 everywhere.
func counterNames(s analysis.Summary, ms []result.Measure) []string {
	names := map[string]bool{}
	for _, c := range s.Cells {
		if !slices.ContainsFunc(ms, func(m result.Measure) bool { return m.ID == c.Measure }) {
			continue
		}
		for n, v := range c.Counters {
			if v != 0 && !hiddenCounters[n] {
				names[n] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}

func counterTitle(n string) string {
	switch n {
	case "softnet":
		return "packets received"
	case "switches":
		return "context switches"
	}
	return strings.ReplaceAll(n, "_", " ")
}

func countCell(counters map[string]float64, name string) cell {
	v, ok := counters[name]
	if !ok {
		return cell{Text: "–", Class: "num"}
	}
	return cell{Text: strings.TrimSuffix(strconv.FormatFloat(v, 'f', 2, 64), ".00"), Class: "num"}
}

// kind is what aims are called: others' or our own.
func kind(claims bool) string { return map[bool]string{true: "Claims", false: "Aims"}[claims] }

// chosen are the claims of others, or our own aims.
func chosen(s analysis.Summary, claims bool) (l []analysis.AimResult) {
	for _, a := range s.Aims {
		if (a.Claim != "") == claims {
			l = append(l, a)
		}
	}
	return l
}

func aims(s analysis.Summary, claims bool) *table {
	l := chosen(s, claims)
	if len(l) == 0 {
		return nil
	}
	t := &table{Title: upper(tally(s, claims)) + ".", Claims: true,
		Head: []string{"", map[bool]string{true: "claim", false: "aim"}[claims], "measured", "bound", "outcome"}}
	for _, a := range l {
		got := cell{Text: "–", Class: "num"}
		if a.Got != nil {
			got.Text = quantity(a.Aim, s.Design, a.Got.Value)
			if a.Got.CI.Low != a.Got.CI.High {
				got.Small = quantity(a.Aim, s.Design, a.Got.CI.Low) + " – " + quantity(a.Aim, s.Design, a.Got.CI.High)
			}
		}
		t.Rows = append(t.Rows, []cell{{Text: a.ID}, {Text: a.Text, Small: a.Claim}, got,
			{Text: limit(a.Aim, s.Design), Class: "num"},
			{Text: outcomeSign(a.Outcome) + " " + string(a.Outcome), Small: a.Why, Class: outcomeClass(a.Outcome)}})
	}
	return t
}

func outcomeSign(o analysis.Outcome) string {
	return map[analysis.Outcome]string{analysis.Hit: "✓", analysis.Miss: "✗", analysis.Inconclusive: "?",
		analysis.NotMeasured: "–",
		analysis.Confirmed:   "✓", analysis.Refuted: "✗", analysis.Undecided: "?", analysis.NotTestable: "–"}[o]
}

func outcomeClass(o analysis.Outcome) string {
	return map[analysis.Outcome]string{analysis.Hit: "hit", analysis.Miss: "miss", analysis.Inconclusive: "unclear",
		analysis.NotMeasured: "base",
		analysis.Confirmed:   "hit", analysis.Refuted: "miss", analysis.Undecided: "unclear", analysis.NotTestable: "base"}[o]
}

// method is what holds for every experiment.
func method(s analysis.Summary) []string {
	d := s.Design
	base := d.ArmTitle(d.Baseline)
	if base == "" {
		return []string{"Intervals hold 95 %: bootstrap of the median over blocks, expanded for small counts (Hesterberg " +
			"2015), computed rather than drawn."}
	}
	return []string{
		fmt.Sprintf("Nothing is compared across runs. Work is done in short blocks; each round has every arm once, in "+
			"random order, with %s at both ends. A ratio is a block's median over the mean of its own round's %s blocks, and "+
			"the number given is the median of those ratios over rounds.", base, base),
		"Intervals hold 95 %: bootstrap of the median over blocks or rounds, expanded for small counts (Hesterberg 2015), " +
			"computed rather than drawn. Quantiles over all operations get theirs from resampling whole blocks.",
		fmt.Sprintf("%s is measured twice under two names in every round (A/A). How far that ratio's interval reaches from "+
			"1 is the resolution: smaller differences can't be told from nothing here.",
			strings.ToUpper(base[:1])+base[1:]),
		fmt.Sprintf("“No difference” and “in margin” are equivalence claims: the whole interval lies within %s of 1 (two "+
			"one-sided tests). A difference is claimed only when the interval lies beyond the resolution. Everything else "+
			"is unclear.", plusMinus(d.Margin)),
		"Closed loops send the next request when the last is answered, so their tails are too kind; open loops count from " +
			"the intended start.",
	}
}

func machine(m result.Manifest) (short, more []pair) {
	x, b := m.Machine, m.Build
	virtual := ""
	if x.Hypervisor {
		virtual = ", in a virtual machine"
	}
	short = []pair{
		{"Kernel", "Linux " + x.Kernel},
		{"Processor", cpuName(x) + virtual},
		{"Memory", amount(float64(x.Memory), "MiB")},
		{"Clock", x.Clocksource},
		{"Commit", commitName(b)},
		{"Program", fmt.Sprintf("%s %s, %s, SHA-256 %.12s…", b.Module, b.Version, b.Go, b.Binary)},
		{"Seed", fmt.Sprint(m.Seed)},
		{"Load before", m.Before.Average},
		{"Load after", m.After.Average},
		{"Stolen time", fmt.Sprintf("%s before, %s after, since boot", m.Before.Steal.Round(10*time.Millisecond),
			m.After.Steal.Round(10*time.Millisecond))},
		{"Control group", strings.TrimSpace(x.Cgroup + " " + x.CPUMax)},
	}
	for _, v := range m.Versions {
		short = append(short, pair{"With", v})
	}
	short = slices.DeleteFunc(short, func(p pair) bool { return p.Value == "" })
	for _, group := range []struct {
		title string
		of    map[string]string
	}{{"Kernel option", x.Config}, {"Setting", x.Sysctls}, {"Mitigation", x.Mitigations}} {
		for _, k := range slices.Sorted(maps.Keys(group.of)) {
			more = append(more, pair{group.title + " " + k, group.of[k]})
		}
	}
	return short, more
}
