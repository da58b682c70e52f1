package analysis

import (
	"cmp"
	"slices"

	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// Answer is what a run says to its design's question.
type Answer struct {
	Findings []Found `json:"findings"`
	Chart    string  `json:"chart,omitempty"` // the measure or the picture that shows it
}

// Found is a finding with its numbers.
type Found struct {
	result.Finding
	Numbers []Number `json:"numbers,omitempty"` // of the cells that were measured
}

// Number is one cell's in a finding.
type Number struct {
	Measure    string         `json:"measure"`
	Arm        string         `json:"arm"`
	Params     result.Params  `json:"params,omitempty"`
	Got        stats.Estimate `json:"got"`
	Verdict    stats.Verdict  `json:"verdict,omitempty"`    // on a ratio
	Margin     float64        `json:"margin,omitempty"`     // for "no difference"
	Resolution float64        `json:"resolution,omitempty"` // what the run can't tell from nothing
}

// Compared reports whether the finding's numbers are ratios.
func (f Found) Compared() bool { return f.Of == result.Ratio || f.Over != nil }

// answer finds the numbers of the design's answer, or of the usual one.
func answer(seed uint64, groups []*cellBlocks, s Summary) (a Answer, err error) {
	want := s.Design.Answer
	if want == nil {
		want = usual(s)
	}
	a.Chart = want.Chart
	for _, f := range want.Findings {
		found := Found{Finding: f}
		for _, ref := range f.Cells {
			n, ok, err := numberOf(seed, f, ref, groups, s)
			if err != nil {
				return a, err
			}
			if ok {
				found.Numbers = append(found.Numbers, n)
			}
		}
		a.Findings = append(a.Findings, found)
	}
	return a, nil
}

// numberOf returns a cell's number and what it means, false where the run has none.
func numberOf(seed uint64, f result.Finding, ref result.CellRef, groups []*cellBlocks, s Summary) (n Number, ok bool,
	err error) {
	g := find(groups, ref.Measure, ref.Arm, ref.Params)
	if g == nil {
		return n, false, nil
	}
	of := result.Aim{Measure: ref.Measure, Arm: ref.Arm, Params: ref.Params, Of: f.Of, Over: f.Over}
	e, err := number(seed, of, g, groups, s.Design)
	if err != nil || e == nil || !finite(e.Value) {
		return n, false, err
	}
	n = Number{Measure: ref.Measure, Arm: ref.Arm, Params: ref.Params, Got: *e}
	if (Found{Finding: f}).Compared() {
		if !g.counted {
			n.Margin, n.Resolution = marginOf(s.Design, g.measure), s.Resolution[g.measure.ID].Half
		}
		n.Verdict = stats.Compare(*e, n.Margin, n.Resolution)
	}
	return n, true, nil
}

// mostFindings is how many sentences an answer has.
const mostFindings = 3

// usual is the answer of a design that names none: its first measures with a baseline, or its first measures, each arm
// at its greatest parameter, and then its claims or aims.
func usual(s Summary) *result.Answer {
	a := &result.Answer{}
	tally := result.Tally("")
	for _, x := range s.Aims {
		if x.Claim != "" {
			tally = result.TallyClaims
			break
		}
		tally = result.TallyAims
	}
	most := mostFindings
	if tally != "" {
		most--
	}
	for _, compared := range []bool{true, false} {
		for _, m := range s.Design.Measures {
			if f := usualFinding(s, m); m.Ratio == compared && !m.Detail && len(f.Cells) > 0 && len(a.Findings) < most {
				a.Findings, a.Chart = append(a.Findings, f), cmp.Or(a.Chart, m.ID)
			}
		}
	}
	if tally != "" {
		a.Findings = append(a.Findings, result.Finding{Tally: tally})
	}
	return a
}

// usualFinding is about every arm of a measure, at its greatest parameter.
func usualFinding(s Summary, m result.Measure) result.Finding {
	f := result.Finding{Subject: "“" + m.Title + "”", Verb: "is", Of: result.Value}
	if m.Ratio {
		f.Verb, f.Of = "costs", result.Ratio
	}
	for _, arm := range s.Design.Arms {
		cells := slices.DeleteFunc(s.Select(m.ID, arm.ID), func(c Cell) bool {
			return c.Value == nil || m.Ratio && c.Ratio == nil
		})
		if arm.ID != s.Design.Again && len(cells) > 0 {
			c := cells[len(cells)-1]
			f.Cells = append(f.Cells, result.CellRef{Measure: m.ID, Arm: arm.ID, Params: c.Params})
		}
	}
	return f
}
