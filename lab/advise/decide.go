// Package advise decides which mode and which policy engine serve a node of a given cluster at the least cost: it
// measures the candidates on this kernel with the cluster's own objects (cluster.go, measure.go), finds what each does
// not support of what the cluster uses (support.go), and judges by intervals (decide.go). Nothing of the machine's own
// network is touched.
package advise

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// Option is a candidate with all that is known of it.
type Option struct {
	Candidate
	Current bool      `json:"current,omitempty"`
	Cannot  string    `json:"not_measured,omitempty"` // why
	Lacks   []string  `json:"lacks,omitempty"`        // what the cluster uses and it doesn't support: sentences
	Failed  int64     `json:"failed,omitempty"`       // operations
	Figures []Figure  `json:"figures,omitempty"`
	Changes []Changed `json:"changes,omitempty"` // against the current one
}

// Figure is a measured number.
type Figure struct {
	ID      string          `json:"id"`
	Title   string          `json:"title"`
	Unit    string          `json:"unit"`              // of Value as people read it
	Value   stats.Estimate  `json:"value"`             // in base units
	Over    *stats.Estimate `json:"ratio,omitempty"`   // to the current candidate's; nil: not compared, or it is that
	Verdict stats.Verdict   `json:"verdict,omitempty"` // on Over
	// what this run can't tell from nothing, as a share
	Resolution float64 `json:"resolution,omitempty"`
}

// figure returns a figure by its measure.
func (o Option) figure(id string) (f Figure, ok bool) {
	i := slices.IndexFunc(o.Figures, func(f Figure) bool { return f.ID == id })
	if i < 0 {
		return f, false
	}
	return o.Figures[i], true
}

// fit reports whether an option was measured and supports what the cluster uses.
func (o Option) fit() bool { return o.Cannot == "" && len(o.Lacks) == 0 && o.Failed == 0 }

// Outcome is what an advice rests on.
type Outcome string

// The outcomes.
const (
	Better  Outcome = "better"  // another is measurably better, and in nothing worse
	Same    Outcome = "same"    // no other is measurably better: stay
	Unclear Outcome = "unclear" // another may be better; the intervals are too wide: stay
	Unfit   Outcome = "unfit"   // the current one can't serve what the cluster uses
	None    Outcome = "none"    // no option can
)

// Advice is an answer.
type Advice struct {
	Current     Candidate `json:"current"`
	Recommended Candidate `json:"recommended"`
	Outcome     Outcome   `json:"outcome"`
	// the option that the current one is compared with: the recommended one or, where that is the current one, the best
	// of the others; nil: there is no other
	Against   *Option  `json:"against,omitempty"`
	Options   []Option `json:"options"`
	PerSecond float64  `json:"changes_per_second"` // of endpoints, that are assumed
	Sizes     Sizes    `json:"cluster"`
	Remarks   []string `json:"remarks,omitempty"`
}

// matters is what share of a core upkeep must save or cost to count.
const matters = 0.01

// Decide returns the advice that follows from options, the current one among them, at so many changes of endpoints a
// second.
func Decide(options []Option, perSecond float64) Advice {
	a := Advice{Options: options, PerSecond: perSecond, Outcome: Same}
	i := slices.IndexFunc(options, func(o Option) bool { return o.Current })
	if i < 0 {
		return a
	}
	now := options[i]
	a.Current, a.Recommended = now.Candidate, now.Candidate
	var rest, better []Option
	for _, o := range options {
		switch {
		case o.Current || !o.fit():
			continue
		case a.better(o, now):
			better = append(better, o)
		case maybe(o):
			a.Outcome = Unclear
		}
		rest = append(rest, o)
	}
	best := func(l []Option) *Option {
		if len(l) == 0 {
			return nil
		}
		o := slices.MinFunc(l, func(x, y Option) int { return a.compare(x, y) })
		return &o
	}
	a.Against = best(rest)
	switch {
	case !now.fit() && len(rest) == 0:
		a.Outcome = None
	case !now.fit():
		a.Outcome, a.Recommended = Unfit, a.Against.Candidate
	case len(better) > 0:
		a.Outcome, a.Against = Better, best(better)
		a.Recommended = a.Against.Candidate
	}
	return a
}

// ratios are the measures that are compared by ratio.
var ratios = []string{connection, incoming, roundTrip}

// better reports whether o is measurably better than the current option in a ratio or in upkeep, and worse in none.
func (a Advice) better(o, now Option) bool {
	lower := false
	for _, id := range ratios {
		f, _ := o.figure(id)
		if f.Verdict == stats.Higher {
			return false
		}
		lower = lower || f.Verdict == stats.Lower
	}
	x, ok := o.figure(upkeep)
	y, also := now.figure(upkeep)
	if !ok || !also {
		return lower
	}
	if a.share(x.Value.CI.Low-y.Value.CI.High) > matters {
		return false
	}
	return lower || a.share(y.Value.CI.Low-x.Value.CI.High) > matters
}

// share returns the share of a core that a time for each change comes to.
func (a Advice) share(perChange float64) float64 {
	return perChange * a.PerSecond / float64(time.Second)
}

// maybe reports whether an option may be better in a ratio, for all that the intervals say, and is worse in none.
func maybe(o Option) bool {
	unclear := false
	for _, id := range ratios {
		f, _ := o.figure(id)
		if f.Verdict == stats.Higher {
			return false
		}
		unclear = unclear || f.Verdict == stats.Unclear && f.Over != nil && f.Over.Value < 1-margin
	}
	return unclear
}

// compare orders options: by their connections' times together, or, where these are the same within the margin, by
// upkeep.
func (a Advice) compare(x, y Option) int {
	weight := func(o Option) (w float64) { // of logarithms
		for _, id := range []string{connection, incoming} {
			if f, ok := o.figure(id); ok && f.Value.Value > 0 {
				w += math.Log(f.Value.Value)
			}
		}
		return w
	}
	if d := weight(x) - weight(y); math.Abs(d) > margin {
		return cmp.Compare(d, 0)
	}
	cost := func(o Option) float64 {
		f, _ := o.figure(upkeep)
		return f.Value.Value
	}
	return cmp.Or(cmp.Compare(cost(x), cost(y)), cmp.Compare(x.arm(), y.arm()))
}

// Options returns the candidates of a run, the current one among them also where it was not measured.
func Options(r result.Run, s analysis.Summary, current Candidate, list []Candidate, cannot map[string]string) []Option {
	if !slices.Contains(list, current) {
		list = append([]Candidate{current}, list...)
	}
	var l []Option
	for _, c := range list {
		o := Option{Candidate: c, Current: c == current, Cannot: cannot[c.arm()]}
		if o.Cannot == "" {
			o.Cannot = cannot[c.Mode]
		}
		for _, m := range s.Design.Measures {
			for _, cell := range s.Select(m.ID, c.arm()) {
				o.Failed += cell.Failed()
				if cell.Value != nil {
					o.Figures = append(o.Figures, figure(s, m, c, *cell.Value))
				}
			}
		}
		if o.Cannot == "" && len(o.Figures) == 0 {
			o.Cannot = cmp.Or(r.Manifest.Outcome, "it was not measured")
		}
		l = append(l, o)
	}
	return l
}

// figure returns a candidate's number of a measure, with its ratio to the current one's where the run's answer has it.
func figure(s analysis.Summary, m result.Measure, c Candidate, value stats.Estimate) Figure {
	f := Figure{ID: m.ID, Title: m.Title, Unit: m.Unit, Value: value}
	for _, found := range s.Answer.Findings {
		for _, n := range found.Numbers {
			if n.Measure == m.ID && n.Arm == c.arm() {
				f.Over, f.Verdict, f.Resolution = &n.Got, n.Verdict, n.Resolution
			}
		}
	}
	return f
}

// Amount returns a figure's number as people read it.
func (f Figure) Amount(v float64) string {
	scale := map[string]float64{"µs": 1e3, "ms": 1e6, "MiB": 1 << 20}[f.Unit]
	if scale == 0 {
		scale = 1
	}
	v /= scale
	switch {
	case math.Abs(v) >= 100:
		return fmt.Sprintf("%.0f %s", v, f.Unit)
	case math.Abs(v) >= 10:
		return fmt.Sprintf("%.1f %s", v, f.Unit)
	}
	return fmt.Sprintf("%.2f %s", v, f.Unit)
}
