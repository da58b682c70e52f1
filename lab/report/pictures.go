package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// pictures draws those that the design asks for.
func (a *artist) pictures() error {
	for _, p := range a.d.Pictures {
		var err error
		switch p.Kind {
		case result.Stack:
			a.stack(p)
		case result.Overlay:
			err = a.overlay(p)
		case result.Deviation:
			err = a.deviation(p)
		case result.ECDF:
			if m, _ := a.d.Measure(p.Measures[0]); broad(a.d) { // else the measure itself has one
				err = a.ecdf(m, a.arms(m.ID))
			}
		case result.Shares:
			a.shares(p)
		case result.Family:
			a.family(p)
		case result.Change:
			a.change(p)
		default:
			err = fmt.Errorf("picture %s is of an unknown kind %q", p.ID, p.Kind)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// pictured reports whether a measure is drawn in a picture and nowhere else.
func (a *artist) pictured(m result.Measure) bool {
	return slices.ContainsFunc(a.d.Pictures,
		func(p result.Picture) bool { return p.Alone && slices.Contains(p.Measures, m.ID) })
}

// stack draws measures' values on each other.
func (a *artist) stack(p result.Picture) {
	b := chart.Bars{}
	var m result.Measure
	for _, id := range p.Measures {
		m, _ = a.d.Measure(id)
		b.Stack = append(b.Stack, m.Title)
	}
	for _, arm := range a.d.Arms {
		bar := chart.Bar{Name: arm.Title, Style: a.style(arm.ID)}
		for _, id := range p.Measures {
			of, _ := a.d.Measure(id)
			v := 0.0
			if c := last(a.s.Select(id, arm.ID)); c.Value != nil {
				v = in(c.Value.Value, of.Unit)
				bar.Name = a.cellName(c)
			}
			bar.Parts = append(bar.Parts, max(0, v))
		}
		if len(a.s.Select(p.Measures[0], arm.ID)) > 0 {
			b.Bars = append(b.Bars, bar)
		}
	}
	if len(b.Bars) == 0 {
		return
	}
	first, _ := a.d.Measure(p.Measures[0])
	b.Frame, b.X = a.frame(p.ID, p.Title, "medians over blocks, each arm at its greatest number", "", &first),
		chart.Axis{Title: m.Unit + " of a core"}
	a.add(p.ID, "picture", p.Title, b)
}

// overlay draws histograms of all operations, each arm at its greatest parameter.
func (a *artist) overlay(p result.Picture) error {
	m, _ := a.d.Measure(p.Measures[0])
	var sets []chart.Counts
	ops := int64(0)
	for _, arm := range a.d.Arms {
		c := last(a.s.Select(m.ID, arm.ID))
		h, err := analysis.Hist(a.run, c)
		if err != nil {
			return err
		}
		if h == nil || arm.ID == a.d.Again {
			continue
		}
		ops = max(ops, h.TotalCount())
		sets = append(sets, chart.Counts{Name: arm.Title, Style: a.style(arm.ID), Bins: bins(h, m.Unit),
			Line: !slices.Contains(p.Arms, arm.ID)})
	}
	if len(sets) == 0 {
		return nil
	}
	// lines over what is filled
	slices.SortStableFunc(sets, func(x, y chart.Counts) int { return b2i(x.Line) - b2i(y.Line) })
	f := a.frame(p.ID, p.Title, fmt.Sprintf("all operations of all blocks, up to %s each, shares of each arm's own total",
		group(fmt.Sprint(ops))), "", &m)
	f.Width, f.Height = 920, 420
	a.add(p.ID, "forest", p.Title, chart.Histogram{Frame: f, X: chart.Axis{Title: perWhat(m), Log: true}, Sets: sets})
	return nil
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// deviation draws mean and standard deviation.
func (a *artist) deviation(p result.Picture) error {
	m, _ := a.d.Measure(p.Measures[0])
	b := chart.Bars{X: chart.Axis{Title: perWhat(m) + ": mean ± standard deviation"}}
	for _, arm := range a.d.Arms {
		c := last(a.s.Select(m.ID, arm.ID))
		h, err := analysis.Hist(a.run, c)
		if err != nil {
			return err
		}
		if h == nil {
			continue
		}
		mean, sd := in(h.Mean(), m.Unit), in(h.StdDev(), m.Unit)
		b.Bars = append(b.Bars, chart.Bar{Name: arm.Title, Style: a.style(arm.ID), Parts: []float64{mean},
			Low: max(0, mean-sd), High: mean + sd,
			Text: chart.Number(mean) + " ± " + chart.Number(sd)})
	}
	if len(b.Bars) > 0 {
		b.Frame = a.frame(p.ID, p.Title, "over all operations of all blocks; a few slow ones make most of the deviation", "",
			&m)
		a.add(p.ID, "picture", p.Title, b)
	}
	return nil
}

// change draws a measure before and after: a bar for the baseline and each arm, with its change.
func (a *artist) change(p result.Picture) {
	m, _ := a.d.Measure(p.Measures[0])
	var b chart.Bars
	for _, arm := range a.d.Arms {
		c := first(a.s.Select(m.ID, arm.ID))
		if c.Value == nil || arm.ID == a.d.Again {
			continue
		}
		bar := chart.Bar{Name: arm.Title, Style: a.style(arm.ID), Parts: []float64{in(c.Value.Value, m.Unit)},
			Low: in(c.Value.CI.Low, m.Unit), High: in(c.Value.CI.High, m.Unit), Text: amount(c.Value.Value, m.Unit)}
		if c.Ratio != nil {
			bar.Text += ", " + percent(c.Ratio.Value)
		}
		b.Bars = append(b.Bars, bar)
	}
	if len(b.Bars) == 0 {
		return
	}
	for i, g := range p.Ghosts {
		bar := chart.Bar{Name: g.Label, Parts: []float64{in(g.Value, m.Unit)}, Text: amount(g.Value, m.Unit)} // in grey
		if i > 0 {
			bar.Text += ", " + percent(g.Value/p.Ghosts[0].Value)
		}
		b.Bars = append(b.Bars, bar)
	}
	b.X = chart.Axis{Title: perWhat(m), Zero: true}
	b.Frame = a.frame(p.ID, p.Title, "95 % interval; the change is the median of the ratios to "+
		a.d.ArmTitle(a.d.Baseline)+" in the same round", a.words(m), &m)
	b.Frame.Width = 920
	a.add(p.ID, "forest", p.Title, b)
}

// shares draws who gave the answers.
func (a *artist) shares(p result.Picture) {
	m, _ := a.d.Measure(p.Measures[0])
	b := chart.Bars{X: chart.Axis{Title: "share of all connections", Suffix: " %"}}
	n := int64(0)
	for _, c := range a.s.Cells {
		if c.Measure != m.ID || c.Fit == nil {
			continue
		}
		bar := chart.Bar{Name: a.cellName(c), Style: a.style(c.Arm)}
		sum := int64(0)
		for _, v := range c.Answers {
			sum += v
		}
		n = max(n, sum)
		ids := answerers(c)
		for _, id := range ids {
			bar.Parts = append(bar.Parts, 100*float64(c.Answers[id])/float64(sum))
		}
		bar.Text = "p " + probability(c.Fit.P)
		b.Bars = append(b.Bars, bar)
		for len(b.Stack) < len(ids) {
			b.Stack = append(b.Stack, fmt.Sprint(len(b.Stack)+1))
		}
	}
	if len(b.Bars) == 0 {
		return
	}
	b.Frame = a.frame(p.ID, p.Title, fmt.Sprintf("%s connections each; p: chance of shares so uneven, or more, if all "+
		"were equally likely", group(fmt.Sprint(n))), "", &m)
	b.Frame.Width = 920
	a.add(p.ID, "forest", p.Title, b)
}

// answerers are who answered, in order.
func answerers(c analysis.Cell) (ids []string) {
	for id := range c.Answers {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b string) int {
		if len(a) != len(b) {
			return len(a) - len(b)
		}
		return strings.Compare(a, b)
	})
	return ids
}

// probability returns "0.42", or "< 0.001".
func probability(p float64) string {
	if p < 0.001 {
		return "< 0.001"
	}
	return fmt.Sprintf("%.2g", p)
}

// broadly draws a measure of a design with many arms: its value, and its ratio or difference to the baseline, over the
// varied parameter, or as bars where there is one value of it.
func (a *artist) broadly(m result.Measure) {
	half, base := a.s.Resolution[m.ID].Half, a.d.ArmTitle(a.d.Baseline)
	const grey = "; 95 % interval; grey: what can't be told from nothing"
	arms := a.subjects(m.ID)
	switch {
	case m.Ratio:
		v := first(a.s.Select(m.ID, a.d.Baseline)).Value
		if !m.Detail && v != nil {
			at := in(v.Value, m.Unit)
			a.over(m, m.ID+"-value", arms, value, m.Unit, blocksOf(a.s, m, arms), chart.Axis{Title: perWhat(m), Zero: true},
				chart.Reference{Name: base, Value: at, Low: at * (1 - half), High: at * (1 + half)})
		}
		a.over(m, m.ID, arms, toDirect, "", fmt.Sprintf("median of the ratios to %s in the same round, %s", base,
			roundsOf(a.s, m, arms))+grey,
			chart.Axis{Title: "ratio to " + base, Suffix: " ×"},
			chart.Reference{Name: base, Value: 1, Low: 1 - half, High: 1 + half})
	case m.More:
		a.over(m, m.ID, arms, toDirectMore, m.Unit, "median of the differences to "+base+" in the same round"+grey,
			chart.Axis{Title: m.Unit + " more than " + base, Suffix: " " + m.Unit},
			chart.Reference{Name: base, Low: in(-half, m.Unit), High: in(half, m.Unit)})
	case m.Exact:
		a.over(m, m.ID, a.arms(m.ID), value, m.Unit, "counted, not sampled", chart.Axis{Title: perWhat(m), Log: true})
	default:
		a.over(m, m.ID, a.arms(m.ID), value, m.Unit, blocksOf(a.s, m, arms), chart.Axis{Title: perWhat(m), Log: true})
	}
}

func toDirectMore(c analysis.Cell) *stats.Estimate { return c.More }

// over draws a number of a measure's cells over the varied parameter.
func (a *artist) over(m result.Measure, name string, arms []string, pick func(analysis.Cell) *stats.Estimate, unit,
	sub string, y chart.Axis, refs ...chart.Reference) {
	ss := a.series(m, arms, pick, unit)
	title := m.Title + a.ends(ss, unit)
	if lo, hi, most := extent(ss); most < 2 {
		if !strings.HasSuffix(name, "-value") {
			a.barsOf(m, arms, pick, unit, a.frame(name, title, sub, a.words(m), &m), y)
		}
		return
	} else if y.Log && lo > 0 && hi < 5*lo {
		y.Log, y.Zero = false, true
	}
	if compared(m) {
		var far string
		if ss, far = near(ss); far != "" {
			sub += "; far above and left out: " + far
		}
	}
	f := a.frame(name, title, sub, a.words(m), &m)
	f.Height = 400
	line := chart.Line{Frame: f, X: a.vary(), Y: y, Series: ss, References: refs}
	if unit == m.Unit && !m.More {
		line.Ghosts = a.ghosts(m)
	}
	a.add(name, m.ID, title, line)
}

// near leaves out the series that never come near the others, which would be one line beside them, and says which.
func near(ss []chart.Series) (in []chart.Series, out string) {
	least := func(s chart.Series) float64 {
		return slices.MinFunc(s.Points, func(a, b chart.Point) int { return cmp.Compare(a.Y, b.Y) }).Y
	}
	sorted := slices.SortedFunc(slices.Values(ss), func(a, b chart.Series) int { return cmp.Compare(least(a), least(b)) })
	cut := math.Inf(1)
	for i := 1; i < len(sorted); i++ {
		if v := least(sorted[i]); v > 2*least(sorted[i-1]) && v > 0 && i > len(sorted)/2 {
			cut = v
			break
		}
	}
	var far []string
	for _, s := range ss {
		if least(s) < cut {
			in = append(in, s)
			continue
		}
		most := slices.MaxFunc(s.Points, func(a, b chart.Point) int { return cmp.Compare(a.Y, b.Y) }).Y
		far = append(far, fmt.Sprintf("%s, %s to %s", s.Name, chart.Number(least(s)), chart.Number(most)))
	}
	return in, strings.Join(far, "; ")
}

// ends returns ": 1.02 (ebpf) to 4.31 (ipt-classic19) at 10,000 Services", of the last points.
func (a *artist) ends(ss []chart.Series, unit string) string {
	if len(ss) == 0 {
		return ""
	}
	at := func(s chart.Series) chart.Point { return s.Points[len(s.Points)-1] }
	order := func(x, y chart.Series) int { return cmp.Compare(at(x).Y, at(y).Y) }
	lo, hi := slices.MinFunc(ss, order), slices.MaxFunc(ss, order)
	return fmt.Sprintf(": %s (%s) to %s (%s) at %s %s", chart.Number(at(lo).Y), lo.Name,
		strings.TrimSpace(chart.Number(at(hi).Y)+" "+unit), hi.Name,
		group(strconv.FormatFloat(at(hi).X, 'f', -1, 64)), a.d.Vary.Short)
}

// barsOf has a bar for each cell.
func (a *artist) barsOf(m result.Measure, arms []string, pick func(analysis.Cell) *stats.Estimate, unit string,
	f chart.Frame, x chart.Axis) {
	b := chart.Bars{X: chart.Axis{Title: x.Title, Suffix: x.Suffix}}
	f.Height = 0
	for _, arm := range arms {
		for _, c := range a.s.Select(m.ID, arm) {
			if e := pick(c); e != nil {
				b.Bars = append(b.Bars, chart.Bar{Name: a.cellName(c), Style: a.style(arm), Parts: []float64{max(0,
					in(e.Value, unit))}, Low: in(e.CI.Low, unit), High: in(e.CI.High, unit), Text: chart.Number(in(e.Value, unit))})
			}
		}
	}
	if len(b.Bars) == 0 {
		return
	}
	if m.Ratio {
		b.Bound, b.Limits = 1, a.d.ArmTitle(a.d.Baseline)
	}
	b.Frame = f
	a.add(m.ID, m.ID, f.Title, b)
}
