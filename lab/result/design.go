package result

import "fairlead.dev/fairlead/lab/stats"

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
}

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
	Text  string `json:"text,omitempty"` // what it is, in a sentence
}

// Measure is one kind of number.
type Measure struct {
	ID     string  `json:"id"`
	Title  string  `json:"title"`            // such as "connect() alone"
	Text   string  `json:"text,omitempty"`   // what exactly is measured
	Unit   string  `json:"unit"`             // that people read: "µs", "ms", "s", "MiB", "%", or "" for a plain number
	Stat   string  `json:"stat"`             // of a block: "p50" or another of its figures, "value", or "counter:NAME" for a counter per operation
	Ratio  bool    `json:"ratio,omitempty"`  // compared with the baseline of the same round
	Margin float64 `json:"margin,omitempty"` // for "no difference" instead of the design's
	Mean   bool    `json:"mean,omitempty"`   // a cell's number is the mean over its blocks, not their median: for what comes in bursts
}

// Aim is a number to be reached, or a claim to be tested: a cell's number against a bound.
type Aim struct {
	ID      string            `json:"id"`   // such as "G5"
	Text    string            `json:"text"` // such as "cold sync of 10,000 × 10 in ≤ 0.4 s"
	Measure string            `json:"measure"`
	Arm     string            `json:"arm"`
	Params  map[string]string `json:"params,omitempty"`
	Of      string            `json:"of"`              // "value", "ratio" (to the baseline), a quantile over all blocks such as "p99", or "failed" (operations)
	Over    *CellRef          `json:"over,omitempty"`  // the number is divided by that of this cell
	Bound   float64           `json:"bound"`           // in base units
	Least   bool              `json:"least,omitempty"` // the bound is a lower one
}

// CellRef names a cell.
type CellRef struct {
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
	Hit          Outcome = "hit"          // the whole interval keeps the bound
	Miss         Outcome = "miss"         // none of it does
	Inconclusive Outcome = "unclear"      // the bound lies in the interval, or there are too few blocks
	NotMeasured  Outcome = "not measured" // this run has no such cell
)

// judge says what an interval means for the aim.
func (a Aim) judge(e stats.Estimate) Outcome {
	low, high := e.CI.Low, e.CI.High
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
