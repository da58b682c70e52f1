package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/HdrHistogram/hdrhistogram-go"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// drawn is a chart of the report.
type drawn struct {
	Name string // of its file, without .svg
	Kind string // "forest", or the measure that it belongs to
	SVG  []byte
	Text string // its title, for Markdown
	// for narrow screens, where it opens a report or is wide; nil elsewhere
	narrow []byte
}

// artist draws a run's charts.
type artist struct {
	run    result.Run
	s      analysis.Summary
	d      result.Design
	charts []drawn
}

// wide is the kind of charts that take a page's width.
const wide = "forest"

// drawing returns a chart with its drawings.
func drawing(name, kind, title string, c chart.Chart) drawn {
	return drawn{Name: name, Kind: kind, SVG: chart.SVG(c), Text: title, narrow: chart.Narrow(c)}
}

func (a *artist) add(name, kind, title string, c chart.Chart) {
	a.charts = append(a.charts, drawing(name, kind, title, c))
}

// draw makes every chart that the run has numbers for, in the order of the report.
func draw(r result.Run, s analysis.Summary) ([]drawn, error) {
	a := &artist{run: r, s: s, d: s.Design}
	a.forest(true)
	a.forest(false)
	if err := a.pictures(); err != nil {
		return nil, err
	}
	for _, m := range s.Design.Measures {
		var err error
		switch {
		case len(a.arms(m.ID)) == 0 || a.pictured(m):
		case broad(s.Design):
			a.broadly(m)
		case m.Ratio:
			err = a.compared(m)
		default:
			err = a.alone(m)
		}
		if err != nil {
			return nil, err
		}
	}
	return a.charts, nil
}

// arms are those with at least one number in a measure.
func (a *artist) arms(measure string) (ids []string) {
	for _, arm := range a.d.Arms {
		for _, c := range a.s.Select(measure, arm.ID) {
			if c.Value != nil {
				ids = append(ids, arm.ID)
				break
			}
		}
	}
	return ids
}

// style is an arm's, the same in every chart: the baseline is grey, so is its repetition, the others have their own or
// follow in order.
func (a *artist) style(arm string) chart.Style {
	n := 0
	for _, x := range a.d.Arms {
		if x.ID == arm && x.Style > 0 {
			return chart.Style(x.Style)
		}
		if x.ID != a.d.Baseline && x.ID != a.d.Again {
			n++
		}
		if x.ID == arm {
			break
		}
	}
	if arm == a.d.Baseline || arm == a.d.Again {
		return 0
	}
	return chart.Style(n)
}

// subjects are the arms that are neither the baseline nor its repetition.
func (a *artist) subjects(measure string) (ids []string) {
	for _, id := range a.arms(measure) {
		if id != a.d.Baseline && id != a.d.Again {
			ids = append(ids, id)
		}
	}
	return ids
}

func (a *artist) frame(id, title, sub, desc string, m *result.Measure) chart.Frame {
	return chart.Frame{ID: id, Title: title, Sub: sub, Desc: desc, Footer: a.footer(m)}
}

// footer returns where and with what a number was measured, what can be told from nothing, and whether the machine was
// quiet.
func (a *artist) footer(m *result.Measure) string {
	mf := a.run.Manifest
	f := []string{kernelName(mf.Machine), cpuName(mf.Machine), "commit " + commitName(mf.Build),
		mf.Profile + " profile, seed " + fmt.Sprint(mf.Seed),
		mf.Started.UTC().Format("2006-01-02")}
	switch {
	case m == nil:
	case m.Exact:
		f = append(f, "counted")
	case !compared(*m):
		f = append(f, "no baseline: holds for this machine")
	default:
		if r, ok := a.s.Resolution[m.ID]; ok && m.More {
			f = append(f, "resolution ±"+amount(r.Half, m.Unit)+" (A/A)")
		} else if ok {
			f = append(f, "resolution "+plusMinus(r.Half)+" (A/A)")
		} else {
			f = append(f, "resolution not known: no A/A blocks")
		}
	}
	if a.s.Noise.Noisy {
		f = append(f, "NOISY RUN")
	}
	return strings.Join(f, " · ")
}

func kernelName(m result.Machine) string {
	release, _, _ := strings.Cut(m.Kernel, " ")
	return "Linux " + release
}

func cpuName(m result.Machine) string {
	if m.CPU == "" {
		return fmt.Sprintf("%s, %s", m.Arch, plural(m.CPUs, "processor"))
	}
	return fmt.Sprintf("%s, %s", m.CPU, plural(m.CPUs, "processor"))
}

func commitName(b result.Build) string {
	c := b.Commit
	switch {
	case c == "":
		return "not recorded"
	case len(c) > 12:
		c = c[:12]
	}
	if b.Modified {
		c += " with changes"
	}
	return c
}

func (a *artist) vary() chart.Axis { return chart.Axis{Title: a.d.Vary.Title, Log: true} }

// points are an arm's cells with a varied parameter, as value or ratio.
func points(cells []analysis.Cell, pick func(analysis.Cell) *stats.Estimate, unit string) (ps []chart.Point) {
	for _, c := range cells {
		if e := pick(c); c.HasX && e != nil {
			ps = append(ps, chart.Point{X: c.X, Y: in(e.Value, unit), Low: in(e.CI.Low, unit), High: in(e.CI.High, unit)})
		}
	}
	return ps
}

func value(c analysis.Cell) *stats.Estimate    { return c.Value }
func toDirect(c analysis.Cell) *stats.Estimate { return c.Ratio }

// series has a line for each arm and each further parameter.
func (a *artist) series(m result.Measure, arms []string, pick func(analysis.Cell) *stats.Estimate,
	unit string) (ss []chart.Series) {
	for _, arm := range arms {
		var names []string
		of := map[string][]analysis.Cell{}
		for _, c := range a.s.Select(m.ID, arm) {
			name := lineName(a.d, result.Measure{Title: a.d.ArmTitle(arm)}, c, false)
			if of[name] == nil {
				names = append(names, name)
			}
			of[name] = append(of[name], c)
		}
		for _, name := range names {
			if p := points(of[name], pick, unit); len(p) > 0 {
				ss = append(ss, chart.Series{Name: name, Style: a.style(arm), Points: p})
			}
		}
	}
	return ss
}

// levels are the arms in which nothing varies, as lines across.
func (a *artist) levels(m result.Measure, arms []string, pick func(analysis.Cell) *stats.Estimate,
	unit string) (rs []chart.Reference) {
	for _, arm := range arms {
		c := first(a.s.Select(m.ID, arm))
		if e := pick(c); e != nil && !c.HasX {
			rs = append(rs, chart.Reference{Name: a.d.ArmTitle(arm), Style: a.style(arm), Value: in(e.Value, unit),
				Dashed: true})
		}
	}
	return rs
}

// split are a measure's values; the lines of an only arm look different.
func (a *artist) split(m result.Measure, arms []string) []chart.Series {
	ss := a.series(m, arms, value, m.Unit)
	if len(arms) == 1 {
		for i := range ss {
			ss[i].Style = chart.Style(i + 1)
		}
	}
	return ss
}

// open reports whether a measure is of an open loop.
func (a *artist) open(m result.Measure) bool {
	return slices.ContainsFunc(a.run.Blocks, func(b result.Block) bool { return b.Measure == m.ID && b.Trace != nil })
}

// tails draws every operation of an open loop, whose slowest ones are what it is for.
func (a *artist) tails(m result.Measure, arms []string) error {
	var curves []chart.Series
	slowest := 0.0
	for _, arm := range arms {
		for _, c := range a.s.Select(m.ID, arm) {
			h, err := analysis.Hist(a.run, c)
			if err != nil {
				return err
			}
			if h == nil || len(curves) == 8 {
				continue
			}
			slowest = max(slowest, float64(h.Max()))
			curves = append(curves, chart.Series{Name: lineName(a.d, result.Measure{Title: a.d.ArmTitle(arm)}, c, false),
				Style: chart.Style(len(curves) + 1), Points: percentiles(h, m.Unit)})
		}
	}
	if len(curves) == 0 {
		return nil
	}
	title := fmt.Sprintf("%s: the slowest took %s", m.Title, amount(slowest, m.Unit))
	a.add(m.ID, m.ID, title, chart.Percentiles{Frame: a.frame(m.ID, title,
		"every connection, from its intended start; marks at 50, 90, 99 and 99.9 %", a.words(m), &m),
		Y: chart.Axis{Title: perWhat(m), Log: true}, Curves: curves})
	return nil
}

// compared draws a measure that has a baseline: its value, its ratio, and how it is distributed.
func (a *artist) compared(m result.Measure) error {
	arms := a.subjects(m.ID)
	base := first(a.s.Select(m.ID, a.d.Baseline))
	half := a.s.Resolution[m.ID].Half
	if ss := a.series(m, arms, value, m.Unit); len(ss) > 0 {
		title := fmt.Sprintf("%s: %s", m.Title, a.spread(m, arms))
		line := chart.Line{Frame: a.frame(m.ID, title, blocksOf(a.s, m, arms), a.words(m), &m), X: a.vary(),
			Y: chart.Axis{Title: perWhat(m), Zero: true}, Series: ss, Ghosts: a.ghosts(m)}
		if base.Value != nil {
			v := in(base.Value.Value, m.Unit)
			line.References = []chart.Reference{{Name: a.d.ArmTitle(a.d.Baseline), Value: v, Low: v * (1 - half),
				High: v * (1 + half)}}
		}
		line.References = append(line.References, a.levels(m, arms, value, m.Unit)...)
		a.add(m.ID, m.ID, title, line)
	}
	if ss := a.series(m, arms, toDirect, ""); len(ss) > 0 {
		title := fmt.Sprintf("%s, to %s: %s", m.Title, a.d.ArmTitle(a.d.Baseline), a.ratioRange(m, arms))
		margin := m.Margin
		if margin == 0 {
			margin = a.d.Margin
		}
		name := a.d.ArmTitle(a.d.Baseline)
		if half > 0 {
			name += " " + plusMinus(half)
		}
		sub := fmt.Sprintf("median of the ratios to %s in the same round, %s; 95 %% interval; grey: what can't be told "+
			"from nothing",
			a.d.ArmTitle(a.d.Baseline), roundsOf(a.s, m, arms))
		a.add(m.ID+"-ratio", m.ID, title, chart.Line{Frame: a.frame(m.ID+"-ratio", title, sub, a.words(m), &m), X: a.vary(),
			Y: chart.Axis{Title: "ratio to " + a.d.ArmTitle(a.d.Baseline), Suffix: " ×"}, Series: ss,
			References: append([]chart.Reference{
				{Name: name, Value: 1, Low: 1 - half, High: 1 + half},
				{Name: plusMinus(margin) + " margin", Value: 1 + margin, Dashed: true},
				{Value: 1 - margin, Dashed: true},
			}, a.levels(m, arms, toDirect, "")...)})
	}
	return a.distributions(m, arms)
}

// distributions draws all operations of the baseline and of each arm at its largest parameter.
func (a *artist) distributions(m result.Measure, arms []string) error {
	cells := []analysis.Cell{first(a.s.Select(m.ID, a.d.Baseline))}
	for _, arm := range arms {
		cells = append(cells, last(a.s.Select(m.ID, arm)))
	}
	var curves []chart.Series
	var sets []chart.Counts
	var says []string
	ops := int64(0)
	for _, c := range cells {
		h, err := analysis.Hist(a.run, c)
		if err != nil {
			return err
		}
		if h == nil {
			continue
		}
		name := a.cellName(c)
		curves = append(curves, chart.Series{Name: name, Style: a.style(c.Arm), Points: percentiles(h, m.Unit)})
		sets = append(sets, chart.Counts{Name: name, Style: a.style(c.Arm), Bins: bins(h, m.Unit)})
		says = append(says, fmt.Sprintf("%s %s", amount(float64(h.ValueAtQuantile(99)), m.Unit), a.longName(c)))
		ops = max(ops, h.TotalCount())
	}
	if len(curves) < 2 {
		return nil
	}
	title := fmt.Sprintf("%s: 99 %% within %s", m.Title, strings.Join(says, ", "))
	sub := fmt.Sprintf("all operations of all blocks, up to %s each; closed loop; marks at 50, 90, 99 and 99.9 %%",
		group(fmt.Sprint(ops)))
	a.add(m.ID+"-percentiles", m.ID, title, chart.Percentiles{Frame: a.frame(m.ID+"-percentiles", title, sub, "", &m),
		Y: chart.Axis{Title: perWhat(m), Log: true}, Curves: curves})
	title = fmt.Sprintf("%s: where the times lie", m.Title)
	a.add(m.ID+"-histogram", m.ID, title, chart.Histogram{Frame: a.frame(m.ID+"-histogram", title,
		"all operations of all blocks, shares of each arm's own total", "", &m), X: chart.Axis{Title: perWhat(m), Log: true},
		Sets: sets})
	return nil
}

// alone draws a measure without a baseline.
func (a *artist) alone(m result.Measure) error {
	arms := a.arms(m.ID)
	ss := a.split(m, arms)
	title := fmt.Sprintf("%s: %s", m.Title, a.spread(m, arms))
	frame := a.frame(m.ID, title, blocksOf(a.s, m, arms), a.words(m), &m)
	lo, hi, most := extent(ss)
	switch open := a.open(m); {
	case open:
		return a.tails(m, arms)
	case most < 3 || lo <= 0 || m.Unit == "MiB" || m.Unit == "%":
		a.bars(m, arms, frame)
	default:
		a.add(m.ID, m.ID, title, chart.Line{Frame: frame, X: a.vary(),
			Y: chart.Axis{Title: perWhat(m), Log: hi > 5*lo, Zero: hi <= 5*lo}, Series: ss, Ghosts: a.ghosts(m)})
	}
	return a.ecdf(m, arms)
}

// extent is the least and greatest value, and the number of points in the longest line.
func extent(ss []chart.Series) (lo, hi float64, most int) {
	lo = math.Inf(1)
	for _, s := range ss {
		most = max(most, len(s.Points))
		for _, p := range s.Points {
			lo, hi = min(lo, p.Y, p.Low), max(hi, p.Y, p.High)
		}
	}
	return lo, hi, most
}

func (a *artist) bars(m result.Measure, arms []string, f chart.Frame) {
	b := chart.Bars{Frame: f, X: chart.Axis{Title: perWhat(m)}}
	for _, arm := range arms {
		for _, c := range a.s.Select(m.ID, arm) {
			if e := c.Value; e != nil {
				b.Bars = append(b.Bars, chart.Bar{Name: a.cellName(c), Style: a.style(arm), Parts: []float64{in(e.Value, m.Unit)},
					Low: in(e.CI.Low, m.Unit), High: in(e.CI.High, m.Unit)})
			}
		}
	}
	for _, aim := range a.d.Aims {
		if aim.Measure == m.ID && aim.Of == result.Value && aim.Over == nil && in(aim.Bound, m.Unit) > 0 {
			b.Bound, b.Limits = in(aim.Bound, m.Unit), fmt.Sprintf("%s: %s %s", aim.ID, sign(aim), bound(aim, a.d))
		}
	}
	a.add(m.ID, m.ID, f.Title, b)
}

// ecdf draws the distributions of a measure without a baseline: every parameter of a single arm, the largest of
// several.
func (a *artist) ecdf(m result.Measure, arms []string) error {
	var cells []analysis.Cell
	for _, arm := range arms {
		of := a.s.Select(m.ID, arm)
		if len(arms) > 1 {
			of = of[len(of)-1:]
		}
		cells = append(cells, of...)
	}
	if most := 5; len(arms) == 1 && len(cells) > most {
		cells = cells[len(cells)-most:]
	}
	var curves []chart.Series
	says := ""
	type half struct {
		arm  string
		time int64
	}
	var halves []half
	n := int64(math.MaxInt64)
	for i, c := range cells {
		h, err := analysis.Hist(a.run, c)
		if err != nil {
			return err
		}
		if h == nil || h.TotalCount() < 20 {
			continue
		}
		style := a.style(c.Arm)
		if len(arms) == 1 {
			style = chart.Style(i + 1)
		}
		curves = append(curves, chart.Series{Name: a.cellName(c), Style: style, Points: cumulative(h, m.Unit)})
		says = fmt.Sprintf("%s: half within %s, 99 %% within %s", a.longName(c),
			amount(float64(h.ValueAtQuantile(50)), m.Unit), amount(float64(h.ValueAtQuantile(99)), m.Unit))
		halves = append(halves, half{a.d.ArmTitle(c.Arm), h.ValueAtQuantile(50)})
		n = min(n, h.TotalCount())
	}
	if len(curves) == 0 {
		return nil
	}
	title := m.Title + ", " + says
	if len(arms) > 1 && len(curves) > 1 {
		order := func(x, y half) int { return cmp.Compare(x.time, y.time) }
		lo, hi := slices.MinFunc(halves, order), slices.MaxFunc(halves, order)
		title = fmt.Sprintf("%s: half within %s (%s) to %s (%s)", m.Title, amount(float64(lo.time), m.Unit), lo.arm,
			amount(float64(hi.time), m.Unit), hi.arm)
	}
	sub := fmt.Sprintf("at least %s each; marks at the quarters", group(fmt.Sprint(n)))
	a.add(m.ID+"-ecdf", m.ID, title, chart.ECDF{Frame: a.frame(m.ID+"-ecdf", title, sub, "", &m),
		X: chart.Axis{Title: perWhat(m), Log: true}, Curves: curves})
	return nil
}

func (a *artist) ghosts(m result.Measure) (gs []chart.Ghost) {
	for _, g := range a.d.Ghosts {
		if g.Measure == m.ID {
			gs = append(gs, chart.Ghost{X: g.X, Y: in(g.Value, m.Unit), Label: g.Label})
		}
	}
	return gs
}

// outcomes are the outcomes' in a forest.
var outcomes = map[analysis.Outcome]chart.Outcome{analysis.Hit: chart.Met, analysis.Miss: chart.Broken,
	analysis.Inconclusive: chart.Open, analysis.NotMeasured: chart.Missing,
	analysis.Confirmed: chart.Met, analysis.Refuted: chart.Broken, analysis.Undecided: chart.Open,
	analysis.NotTestable: chart.Missing}

// claimOf returns an aim's line in a forest.
func claimOf(x analysis.AimResult, d result.Design) chart.Claim {
	c := chart.Claim{ID: x.ID, Text: x.Text, Least: x.Least, Margin: x.Margin, Says: says(x, d),
		Outcome: outcomes[x.Outcome]}
	switch {
	case x.Got == nil:
		c.Outcome = chart.Missing
	case x.Bound > 0:
		c.Value, c.Low, c.High = x.Got.Value/x.Bound, x.Got.CI.Low/x.Bound, x.Got.CI.High/x.Bound
	default: // a bound of 0, such as failed connections: 0 is on the good side, anything else beyond the plot
		c.Value = map[bool]float64{true: 0.5, false: 1e9}[x.Got.Value <= 0]
		c.Low, c.High = c.Value, c.Value
	}
	return c
}

// forest draws every claim of others, or every aim of our own, against its bound.
func (a *artist) forest(others bool) {
	var claims []chart.Claim
	for _, x := range chosen(a.s, others) {
		claims = append(claims, claimOf(x, a.d))
	}
	if len(claims) == 0 {
		return
	}
	title, name, better := kind(others)+": "+tally(a.s, others), strings.ToLower(kind(others)), ""
	sub := "each number over its bound, with its 95 % interval; an interval that holds the bound is unclear"
	if others {
		better = "← it holds"
		sub = "each number over its bound, with its 95 % interval; a grey box is a bound on both sides, in which the whole " +
			"interval must lie"
	}
	a.add(name, "forest", title, chart.Forest{Frame: chart.Frame{ID: name, Width: 920, Title: title, Sub: sub,
		Footer: a.footer(nil)}, Claims: claims, Better: better})
}

// tally returns "3 hit, 2 miss, 1 unclear".
func tally(s analysis.Summary, claims bool) string {
	n := map[analysis.Outcome]int{}
	for _, a := range chosen(s, claims) {
		n[a.Outcome]++
	}
	var l []string
	for _, o := range []analysis.Outcome{analysis.Hit, analysis.Miss, analysis.Inconclusive, analysis.Confirmed,
		analysis.Refuted, analysis.Undecided, analysis.NotTestable, analysis.NotMeasured} {
		if n[o] > 0 {
			l = append(l, fmt.Sprintf("%d %s", n[o], o))
		}
	}
	return strings.Join(l, ", ")
}

// cellName returns "nftables, 10,000".
func (a *artist) cellName(c analysis.Cell) string { return a.name(c, "") }

// longName returns "nftables, 10,000 Services".
func (a *artist) longName(c analysis.Cell) string { return a.name(c, " "+a.d.Vary.Short) }

func (a *artist) name(c analysis.Cell, of string) string {
	name := a.d.ArmTitle(c.Arm)
	if v, ok := c.Params[a.d.Vary.Param]; ok {
		name += ", " + number(v) + of
	}
	for _, k := range slices.Sorted(maps.Keys(c.Params)) {
		if k != a.d.Vary.Param {
			name += ", " + k + " " + c.Params[k]
		}
	}
	return name
}

// spread returns "nftables 65.1 to 66.0 µs, direct 61.0 µs".
func (a *artist) spread(m result.Measure, arms []string) string {
	var l []string
	for _, arm := range arms {
		l = append(l, a.d.ArmTitle(arm)+" "+a.extremes(m, a.s.Select(m.ID, arm)))
	}
	if base := first(a.s.Select(m.ID, a.d.Baseline)); m.Ratio && base.Value != nil {
		l = append(l, a.d.ArmTitle(a.d.Baseline)+" "+amount(base.Value.Value, m.Unit))
	}
	return strings.Join(l, ", ")
}

// extremes returns "65.1 µs" or "65.1 to 66.0 µs", with the numbers between which it varies.
func (a *artist) extremes(m result.Measure, cells []analysis.Cell) string {
	lo, hi := math.Inf(1), math.Inf(-1)
	for _, c := range cells {
		if c.Value != nil {
			lo, hi = min(lo, c.Value.Value), max(hi, c.Value.Value)
		}
	}
	if x, y := chart.Number(in(lo, m.Unit)), amount(hi, m.Unit); amount(lo, m.Unit) != y {
		return x + " to " + y
	}
	return amount(hi, m.Unit)
}

// ratioRange returns "nftables 1.061 to 1.076 ×".
func (a *artist) ratioRange(m result.Measure, arms []string) string {
	var l []string
	for _, arm := range arms {
		lo, hi := math.Inf(1), math.Inf(-1)
		for _, c := range a.s.Select(m.ID, arm) {
			if c.Ratio != nil {
				lo, hi = min(lo, c.Ratio.Value), max(hi, c.Ratio.Value)
			}
		}
		s := a.d.ArmTitle(arm) + " " + ratio(lo)
		if ratio(lo) != ratio(hi) {
			s += " to " + ratio(hi)
		}
		l = append(l, s+" ×")
	}
	return strings.Join(l, ", ")
}

// words are a measure's numbers for those who can't see the chart.
func (a *artist) words(m result.Measure) string {
	var l []string
	for _, c := range a.s.Cells {
		if c.Measure != m.ID || c.Value == nil {
			continue
		}
		s := a.cellName(c) + ": " + amount(c.Value.Value, m.Unit)
		if c.Ratio != nil {
			s += fmt.Sprintf(", ratio %s (%s)", ratio(c.Ratio.Value), ratios(c.Ratio.CI))
		}
		l = append(l, s)
	}
	return strings.Join(l, "; ")
}

// perWhat is an axis' title: the measure and its unit.
func perWhat(m result.Measure) string {
	if m.Unit == "" {
		return m.Title
	}
	return m.Unit + ", " + m.Title
}

// blocksOf returns "median of 21 blocks, 95 % interval".
func blocksOf(s analysis.Summary, m result.Measure, arms []string) string {
	n, of := counted(s, m, arms, "block", value), "median of "
	switch {
	case n == "1 block":
		return n
	case m.Mean:
		of = "mean of "
	}
	return of + n + ", 95 % interval"
}

func roundsOf(s analysis.Summary, m result.Measure, arms []string) string {
	return counted(s, m, arms, "round", toDirect)
}

// counted returns "21 blocks", or "20 to 21 blocks" where cells differ.
func counted(s analysis.Summary, m result.Measure, arms []string, word string,
	pick func(analysis.Cell) *stats.Estimate) string {
	lo, hi := math.MaxInt, 0
	for _, arm := range arms {
		for _, c := range s.Select(m.ID, arm) {
			if e := pick(c); e != nil {
				lo, hi = min(lo, e.N), max(hi, e.N)
			}
		}
	}
	if lo < hi {
		return fmt.Sprintf("%d to %s", lo, plural(hi, word))
	}
	return plural(hi, word)
}

func first(cells []analysis.Cell) (c analysis.Cell) {
	if len(cells) > 0 {
		c = cells[0]
	}
	return c
}

func last(cells []analysis.Cell) (c analysis.Cell) {
	if len(cells) > 0 {
		c = cells[len(cells)-1]
	}
	return c
}

// percentiles, cumulative and bins read a histogram's filled buckets.
func percentiles(h *hdrhistogram.Histogram, unit string) (ps []chart.Point) {
	seen, total := int64(0), float64(h.TotalCount())
	for _, b := range h.Distribution() {
		if b.Count > 0 {
			ps = append(ps, chart.Point{X: float64(seen) / total, Y: in(float64(b.To), unit)})
			seen += b.Count
		}
	}
	return ps
}

func cumulative(h *hdrhistogram.Histogram, unit string) (ps []chart.Point) {
	seen, total := int64(0), float64(h.TotalCount())
	for _, b := range h.Distribution() {
		if b.Count > 0 {
			seen += b.Count
			ps = append(ps, chart.Point{X: in(float64(b.To), unit), Y: float64(seen) / total})
		}
	}
	return ps
}

func bins(h *hdrhistogram.Histogram, unit string) (bs []chart.Bin) {
	for _, b := range h.Distribution() {
		if b.Count > 0 {
			bs = append(bs, chart.Bin{From: in(float64(b.From), unit), To: in(float64(b.To+1), unit), Count: float64(b.Count)})
		}
	}
	return bs
}
