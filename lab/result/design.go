package result

import (
	"cmp"
	"slices"
	"strings"
)

// Design is an experiment in words and numbers: all that a reader of the raw blocks must know to judge them.
type Design struct {
	ID       string    `json:"id"`       // such as "services"
	Title    string    `json:"title"`    // such as "What a Service costs"
	Question string    `json:"question"` // in a sentence or two
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
	Exact    bool      `json:"exact,omitempty"`  // instructions are counted, not time
	Answer   *Answer   `json:"answer,omitempty"` // nil: of earlier programs, whose reports make one up
}

// Answer is which cells answer a design's question. A report opens with a sentence on each finding and with one chart.
type Answer struct {
	Findings []Finding `json:"findings"` // three at most
	Chart    string    `json:"chart"`    // the measure or the picture that shows it
}

// Finding is one sentence of an answer. Its numbers, and what they mean, come out of the run.
type Finding struct {
	Subject string    `json:"subject"`           // such as "a connection to one of 10,000 Services"
	Verb    string    `json:"verb,omitempty"`    // such as "takes"
	Object  string    `json:"object,omitempty"`  // such as "time"; of counts, what is counted
	Of      Metric    `json:"of,omitempty"`      // Ratio, Value or a quantile, of each cell
	Cells   []CellRef `json:"cells,omitempty"`   // whose numbers the sentence states, in this order
	Over    *CellRef  `json:"over,omitempty"`    // that they are divided by; "" in it: as in the cell
	Against string    `json:"against,omitempty"` // what Over is, such as "one of 10 Services"
	Tally   Tally     `json:"tally,omitempty"`   // instead: how many aims became what
}

// Tally is which aims a finding counts.
type Tally string

// The tallies.
const (
	TallyAims   Tally = "aims"   // the project's
	TallyClaims Tally = "claims" // of others
)

// Picture is a chart of several measures or arms together, beside those that every measure gets.
type Picture struct {
	ID       string      `json:"id"`
	Kind     PictureKind `json:"kind"`
	Title    string      `json:"title"`
	Measures []string    `json:"measures"`
	Arms     []string    `json:"arms,omitempty"`  // of which the picture is above all
	Alone    bool        `json:"alone,omitempty"` // these measures get no chart of their own
	Of       Metric      `json:"of,omitempty"`    // of Family: Value, or Ratio, which is shown as a change in per cent
	Most     float64     `json:"most,omitempty"`  // of Family: the greatest parameter in the chart; 0: all
	Ghosts   []Ghost     `json:"ghosts,omitempty"`
}

// PictureKind is how a picture shows its measures.
type PictureKind string

// The kinds of pictures.
const (
	Stack     PictureKind = "stack"     // the measures' values on each other, a bar for each arm at its greatest parameter
	Overlay   PictureKind = "overlay"   // all operations of a measure as histograms: the arms filled, all others as lines
	Deviation PictureKind = "deviation" // a measure's mean and standard deviation over all operations, a bar for each arm
	// all operations of a measure as cumulated shares, a curve for each arm at its greatest parameter
	ECDF   PictureKind = "ecdf"
	Shares PictureKind = "shares" // of the answers, by server: a bar for each arm and parameter
	// the measures of one arm, a line for each, over the varied parameter from the baseline on, and as a table
	Family PictureKind = "family"
	// a measure's value in each arm, a bar each, with the change against the baseline in per cent; its ghosts likewise,
	// the first of them the others' baseline
	Change PictureKind = "change"
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
	Stat   Metric  `json:"stat"`             // of a block
	From   string  `json:"from,omitempty"`   // the measure whose blocks it reads; "": its own
	Ratio  bool    `json:"ratio,omitempty"`  // compared with the baseline of the same round, by ratio
	More   bool    `json:"more,omitempty"`   // likewise by difference
	Margin float64 `json:"margin,omitempty"` // for "no difference" instead of the design's; in base units for differences
	// a cell's number is the mean over its blocks, not their median: for what comes in bursts
	Mean   bool `json:"mean,omitempty"`
	Exact  bool `json:"exact,omitempty"`  // counted: one block says all
	Detail bool `json:"detail,omitempty"` // in the report, not in the terminal
	// Text of an exact run, where a measure of time is processor time; "": its operations are counted each, and traced
	Counted string `json:"-"`
}

// Source is the measure that its blocks bear.
func (m Measure) Source() string { return cmp.Or(m.From, m.ID) }

// Aim is a number to be reached, or a claim to be tested: a cell's number, or what is left of it after others', against
// a bound.
type Aim struct {
	ID      string   `json:"id"`   // such as "G5"
	Text    string   `json:"text"` // such as "cold sync of 10,000 × 10 in ≤ 0.4 s"
	Measure string   `json:"measure"`
	Arm     string   `json:"arm"`
	Params  Params   `json:"params,omitempty"`
	Of      Metric   `json:"of"`               // of the cell; a quantile is over all blocks
	Less    *CellRef `json:"less,omitempty"`   // this cell's number is taken away
	Plus    *CellRef `json:"plus,omitempty"`   // and this one's added
	Over    *CellRef `json:"over,omitempty"`   // the number is divided by that of this cell
	Bound   float64  `json:"bound"`            // in base units
	Least   bool     `json:"least,omitempty"`  // the bound is a lower one
	Margin  float64  `json:"margin,omitempty"` // the number is to be within this share of the bound, on both sides
	Claim   string   `json:"claim,omitempty"`  // its source: it is confirmed or refuted, not hit or missed
	Cannot  string   `json:"cannot,omitempty"` // why it can't be tested here
	// it is of two machines' results, which differ in this: the number of the one with it over that of the other
	Across Difference `json:"across,omitempty"`
}

// Difference is what two machines differ in.
type Difference string

// Hypervisor is the difference between a virtual machine and one that is none.
const Hypervisor Difference = "hypervisor"

// CellRef names a cell, and which number of it.
type CellRef struct {
	Of      Metric `json:"of,omitempty"`      // "": the same
	Measure string `json:"measure,omitempty"` // "": the same
	Arm     string `json:"arm,omitempty"`     // "": the same
	Params  Params `json:"params,omitempty"`
}

// Ghost is a published number that a chart shows beside ours, hollow: measured elsewhere, comparable in shape at best.
type Ghost struct {
	Measure string  `json:"measure"`
	X       float64 `json:"x"`
	Value   float64 `json:"value"` // base units
	Label   string  `json:"label"`
	Source  string  `json:"source"`
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

// Instructions is the unit of measures of exact runs.
const Instructions = "instr."

// Counts reports whether a measure's numbers are counted: they have no interval. All of an exact run are: it leaves out
// what is not, and what it allocates or sends is the same wherever it runs.
func (d Design) Counts(m Measure) bool { return m.Exact || d.Exact }

// partMark is between the ids of a measure and of a part of its instructions.
const partMark = "-of-"

// PartID returns the id of the measure of a part of another's instructions.
func PartID(measure, part string) string { return measure + partMark + part }

// Whole returns the id of the measure that a part's is of, and whether id is a part's.
func Whole(id string) (measure string, is bool) {
	measure, _, is = strings.Cut(id, partMark)
	return measure, is
}

// Counted returns the design of a run that counts instructions, one for each nanosecond: of every measure that has a
// unit of time. Bounds in units of time and numbers published in them are left out.
func (d Design) Counted() Design {
	d.Measures = slices.Clone(d.Measures)
	var counted []string
	for i := range d.Measures {
		m := &d.Measures[i]
		if !slices.Contains([]string{"ns", "µs", "ms", "s"}, m.Unit) {
			continue
		}
		m.Unit, m.Text = Instructions, cmp.Or(m.Counted, m.Text)
		counted = append(counted, m.ID)
	}
	d.Aims = slices.DeleteFunc(slices.Clone(d.Aims), func(a Aim) bool {
		return slices.Contains(counted, a.Measure) && a.Of != Ratio && a.Of != Failed && a.Over == nil
	})
	d.dropGhosts(counted)
	d.Exact, d.Margin = true, 0.001
	if d.Answer != nil {
		a := *d.Answer
		a.Findings = slices.Clone(a.Findings)
		for i := range a.Findings {
			if f := &a.Findings[i]; f.Object == "time" {
				f.Object = "instructions"
			}
		}
		d.Answer = &a
	}
	d.Method = append([]string{"Instructions are counted, not time: all runs in an emulated machine of one processor, " +
		"of which the clocks advance by one with each instruction. Client and server are one thread, so that neither " +
		"waits: a connection is what both ends and all between them execute. What programs do is their processor time, " +
		"of all their threads; Go's collections fall where they may and are part of it. A repeated string instruction " +
		"counts once for each repetition. What this can't see: caches, the prediction of branches, memory, real devices, " +
		"other processors."},
		d.Method...)
	return d
}

// dropGhosts drops the published numbers of measures.
func (d *Design) dropGhosts(measures []string) {
	of := func(g Ghost) bool { return slices.Contains(measures, g.Measure) }
	d.Ghosts = slices.DeleteFunc(slices.Clone(d.Ghosts), of)
	d.Pictures = slices.Clone(d.Pictures)
	for i := range d.Pictures {
		p := &d.Pictures[i]
		p.Ghosts = slices.DeleteFunc(slices.Clone(p.Ghosts), of)
	}
}

// LeaveOut leaves measures out, with what reads them: aims, published numbers, pictures, and findings. A line in
// Missing names them and says why. IDs of which the design has no measure are ignored.
func (d *Design) LeaveOut(why string, measures ...string) {
	var titles []string
	out := func(id string) bool { return slices.Contains(measures, id) }
	d.Measures = slices.DeleteFunc(slices.Clone(d.Measures), func(m Measure) bool {
		gone := out(m.ID) || out(m.From)
		if gone {
			titles = append(titles, m.Title)
		}
		return gone
	})
	if len(titles) == 0 {
		return
	}
	d.Aims = slices.DeleteFunc(slices.Clone(d.Aims), func(a Aim) bool {
		reads := func(c *CellRef) bool { return c != nil && out(c.Measure) }
		return out(a.Measure) || reads(a.Less) || reads(a.Plus) || reads(a.Over)
	})
	d.dropGhosts(measures) // of pictures that are this design's own from here on
	for i := range d.Pictures {
		d.Pictures[i].Measures = slices.DeleteFunc(slices.Clone(d.Pictures[i].Measures), out)
	}
	d.Pictures = slices.DeleteFunc(d.Pictures, func(p Picture) bool { return len(p.Measures) == 0 })
	if d.Answer != nil {
		a := *d.Answer
		a.Findings = slices.DeleteFunc(slices.Clone(a.Findings), func(f Finding) bool {
			return slices.ContainsFunc(f.Cells, func(c CellRef) bool { return out(c.Measure) }) ||
				f.Over != nil && out(f.Over.Measure)
		})
		d.Answer = &a
	}
	d.Missing = append(slices.Clone(d.Missing), strings.Join(titles, ", ")+": "+why)
}
