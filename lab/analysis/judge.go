package analysis

import (
	"math"

	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// times reports whether a measure is about the times of operations.
func times(m result.Measure) bool {
	return m.Stat == result.Mean || m.Stat == result.Min || m.Stat == result.Max || m.Stat.IsQuantile()
}

// marginOf is the margin that holds for a measure.
func marginOf(d result.Design, m result.Measure) float64 {
	if m.Margin > 0 {
		return m.Margin
	}
	return d.Margin
}

// Outcome of an aim.
type Outcome string

// The outcomes.
const (
	Hit          Outcome = "hit"          // the whole interval keeps the bound, and what the run can't tell from it
	Miss         Outcome = "miss"         // none of that does
	Inconclusive Outcome = "unclear"      // the bound lies in that, or there are too few blocks
	NotMeasured  Outcome = "not measured" // this run has no such cell

	// Of claims.
	Confirmed   Outcome = "confirmed"
	Refuted     Outcome = "refuted"
	Undecided   Outcome = "inconclusive"
	NotTestable Outcome = "not testable here"
)

// word is an outcome in the words of the kind of aim.
func word(a result.Aim, o Outcome) Outcome {
	if a.Claim != "" {
		switch o {
		case Hit:
			return Confirmed
		case Miss:
			return Refuted
		case Inconclusive:
			return Undecided
		}
	}
	return o
}

// judge is what an interval means for an aim. resolution is what the run can't tell from nothing in the aim's measure,
// as a share, 0 where it is none or no arms are compared: no difference that is smaller is claimed, also none from the
// bound.
func judge(a result.Aim, e stats.Estimate, resolution float64) Outcome {
	if a.Margin > 0 {
		return within(a, e, resolution)
	}
	low, high := e.CI.Low-resolution*math.Abs(e.CI.Low), e.CI.High+resolution*math.Abs(e.CI.High)
	if a.Least {
		low, high = -high, -low
	}
	bound := a.Bound
	if a.Least {
		bound = -bound
	}
	switch {
	case !e.Sure:
		return Inconclusive
	case high <= bound:
		return Hit
	case low > bound:
		return Miss
	}
	return Inconclusive
}

// within judges an interval by an equivalence test (TOST): all of it must lie within the margin of the bound, or none
// of it, nor within the resolution.
func within(a result.Aim, e stats.Estimate, resolution float64) Outcome {
	low, high := a.Bound*(1-a.Margin), a.Bound*(1+a.Margin)
	far := max(a.Margin, resolution)
	switch {
	case !e.Sure:
		return Inconclusive
	case e.CI.Low >= low && e.CI.High <= high:
		return Hit
	case e.CI.High < a.Bound*(1-far) || e.CI.Low > a.Bound*(1+far):
		return Miss
	}
	return Inconclusive
}
