package result

import (
	"cmp"
	"math"
	"strings"

	"fairlead.dev/fairlead/lab/stats"
)

// Design is an experiment in words and numbers: all that a reader of the raw blocks must know to judge them.
type Design struct {
	ID       string    `json:"id"`       // such as "services"
	Title    string    `json:"title"`    // such as "What a Service costs"
	Question string    `json:"question"` // what was asked, in a sentence or two
	Vary     Axis      `json:"vary"`     // the parameter on the charts' x axis
	Arms     []Arm     `json:"arms"`     // in the order of tables and colours
	Baseline string    `json:"baseline"` // the arm that ratios are to
	Again    string    `json:"again"`    // the arm that is the baseline once more: the A/A comparison
	Margin   float64   `json:"margin"`   // of ratios, for "no difference": 0.02 stands for ±2 %
	Rounds   int       `json:"rounds"`   // planned
	Measures []Measure `json:"measures"`
	Aims     []Aim     `json:"aims,omitempty"`
	Method   []string  `json:"method,omitempty"`       // paragraphs
	Missing  []string  `json:"not_measured,omitempty"` // what a reader might expect here and won't find, and why
	Ghosts   []Ghost   `json:"ghosts,omitempty"`
	Pictures []Picture `json:"pictures,omitempty"`
}

// Picture is a chart of several measures or arms together, beside those that every measure gets.
type Picture struct {
	ID       string   `json:"id"`
	Kind     string   `json:"kind"` // one of the kinds below
	Title    string   `json:"title"`
	Measures []string `json:"measures"`
	Arms     []string `json:"arms,omitempty"`  // of which the picture is above all
	Alone    bool     `json:"alone,omitempty"` // these measures get no chart of their own
}

// The kinds of pictures.
const (
	Stack     = "stack"     // the measures' values on each other, a bar for each arm at its greatest parameter
	Overlay   = "overlay"   // all operations of a measure as histograms: the arms filled, all others as lines
	Deviation = "deviation" // a measure's mean and standard deviation over all operations, a bar for each arm
	ECDF      = "ecdf"      // all operations of a measure as cumulated shares, a curve for each arm at its greatest parameter
	Shares    = "shares"    // who gave the answers, a bar for each arm and parameter
)

// Axis is a parameter that an experiment varies.
type Axis struct {
	Param string `json:"param"` // its name in Params
	Title string `json:"title"` // such as "Services × 10 endpoints"
	Short string `json:"short"` // such as "Services": for table columns and titles
}

// Arm is one thing that is compared.
type Arm struct {
	ID    string `json:"id"`
	Title string `json:"title"`
	Text  string `json:"text,omitempty"`  // what it is, in a sentence
	Style int    `json:"style,omitempty"` // in charts, see chart.Style; 0: in the order of the arms
}

// Measure is one kind of number.
type Measure struct {
	ID     string  `json:"id"`
	Title  string  `json:"title"`            // such as "connect() alone"
	Text   string  `json:"text,omitempty"`   // what exactly is measured
	Unit   string  `json:"unit"`             // that people read: "µs", "ms", "s", "MiB", "%", or "" for a plain number
	Stat   string  `json:"stat"`             // of a block, see figure
	From   string  `json:"from,omitempty"`   // the measure whose blocks it reads; "": its own
	Ratio  bool    `json:"ratio,omitempty"`  // compared with the baseline of the same round, by ratio
	More   bool    `json:"more,omitempty"`   // likewise by difference
	Margin float64 `json:"margin,omitempty"` // for "no difference" instead of the design's; in base units for differences
	Mean   bool    `json:"mean,omitempty"`   // a cell's number is the mean over its blocks, not their median: for what comes in bursts
	Exact  bool    `json:"exact,omitempty"`  // counted: one block says all
	Detail bool    `json:"detail,omitempty"` // in the report, not in the terminal
}

// source is the measure that its blocks bear.
func (m Measure) source() string { return cmp.Or(m.From, m.ID) }

// times says whether it is about the times of operations.
func (m Measure) times() bool {
	return m.Stat == "mean" || m.Stat == "min" || m.Stat == "max" || strings.HasPrefix(m.Stat, "p")
}

// Aim is a number to be reached, or a claim to be tested: a cell's number, or what is left of it after others', against a
// bound.
type Aim struct {
	ID      string            `json:"id"`   // such as "G5"
	Text    string            `json:"text"` // such as "cold sync of 10,000 × 10 in ≤ 0.4 s"
	Measure string            `json:"measure"`
	Arm     string            `json:"arm"`
	Params  map[string]string `json:"params,omitempty"`
	Of      string            `json:"of"`               // "value", "ratio" or "more" (to the baseline), a quantile over all blocks such as "p99", "failed" (operations), or "p" (of the fit of answers)
	Less    *CellRef          `json:"less,omitempty"`   // this cell's number is taken away
	Plus    *CellRef          `json:"plus,omitempty"`   // and this one's added
	Over    *CellRef          `json:"over,omitempty"`   // the number is divided by that of this cell
	Bound   float64           `json:"bound"`            // in base units
	Least   bool              `json:"least,omitempty"`  // the bound is a lower one
	Margin  float64           `json:"margin,omitempty"` // the number is to be within this share of the bound, on both sides
	Claim   string            `json:"claim,omitempty"`  // who says so: it is confirmed or refuted, not hit or missed
	Cannot  string            `json:"cannot,omitempty"` // why it can't be tested here
}

// CellRef names a cell, and which number of it.
type CellRef struct {
	Of      string            `json:"of,omitempty"`      // "": the same
	Measure string            `json:"measure,omitempty"` // "": the same
	Arm     string            `json:"arm,omitempty"`     // "": the same
	Params  map[string]string `json:"params,omitempty"`
}

// Ghost is a published number that a chart shows beside ours, hollow: measured elsewhere, comparable in shape at best.
type Ghost struct {
	Measure string  `json:"measure"`
	X       float64 `json:"x"`
	Value   float64 `json:"value"` // base units
	Label   string  `json:"label"`
	Source  string  `json:"source"`
}

// margin is the one that holds for a measure.
func (d Design) margin(m Measure) float64 {
	if m.Margin > 0 {
		return m.Margin
	}
	return d.Margin
}

// Measure finds one by its id.
func (d Design) Measure(id string) (Measure, bool) {
	for _, m := range d.Measures {
		if m.ID == id {
			return m, true
		}
	}
	return Measure{}, false
}

// ArmTitle is an arm's title, or its id if the design doesn't know it.
func (d Design) ArmTitle(id string) string {
	for _, a := range d.Arms {
		if a.ID == id {
			return a.Title
		}
	}
	return id
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
func (a Aim) word(o Outcome) Outcome {
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

// judge says what an interval means for the aim. resolution is what the run can't tell from nothing in the aim's measure, as
// a share, 0 where it is none or no arms are compared: no difference that is smaller is claimed, also none from the bound.
func (a Aim) judge(e stats.Estimate, resolution float64) Outcome {
	if a.Margin > 0 {
		return a.within(e, resolution)
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

// within judges an interval by an equivalence test (TOST): all of it must lie within the margin of the bound, or none of it,
// nor within the resolution.
func (a Aim) within(e stats.Estimate, resolution float64) Outcome {
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
