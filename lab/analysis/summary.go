package analysis

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// busy is processor time per time: of the client, the server, the agent, softirq's, or "", the first three together,
// which hold softirq's time: it is spent in whoever is interrupted.
func busy(b result.Block, part string) (float64, bool) {
	if b.CPU == nil || b.Wall <= 0 {
		return 0, false
	}
	client := b.CPU.User + b.CPU.System
	parts := map[string]time.Duration{"": client + b.CPU.Server + b.CPU.Agent, "client": client, "server": b.CPU.Server,
		"agent": b.CPU.Agent, "softirq": b.CPU.Softirq}
	v, ok := parts[part]
	return float64(v) / float64(b.Wall), ok
}

// imbalance is the greatest number of answers from one server over the mean, less 1. A server without answers is one
// that Counters["servers"] knows of.
func imbalance(b result.Block) (float64, bool) {
	n := b.Counters["servers"]
	if n == 0 || len(b.Answers) == 0 {
		return 0, false
	}
	most, sum := 0.0, 0.0
	for _, a := range b.Answers {
		most, sum = max(most, float64(a)), sum+float64(a)
	}
	return most*n/sum - 1, true
}

// SummaryFile is what follows from a run.
const SummaryFile = "summary.json"

// WriteSummary makes the summary of a directory from its raw files.
func WriteSummary(dir string) (Summary, error) {
	r, err := result.Read(dir)
	if err != nil {
		return Summary{}, err
	}
	s, err := Summarize(r)
	if err != nil {
		return s, fmt.Errorf("summarize %s: %w", dir, err)
	}
	return s, result.WriteJSON(filepath.Join(dir, SummaryFile), s)
}

// Summary is what follows from a run: a pure function of its manifest and blocks.
type Summary struct {
	Schema  int           `json:"schema"`
	Design  result.Design `json:"design"`
	Profile string        `json:"profile"`
	// that have at least one block in a measure with a baseline, if any has one
	Rounds     int                   `json:"rounds"`
	Blocks     int                   `json:"blocks"`
	Resolution map[string]Resolution `json:"resolution"` // by measure
	// by measure and arm as in the design, then by X, then as they came
	Cells    []Cell      `json:"cells"`
	Aims     []AimResult `json:"aims"`
	Answer   Answer      `json:"answer"`
	Noise    Noise       `json:"noise"`
	Warnings []string    `json:"warnings,omitempty"` // what keeps this run from being a whole one
}

// Resolution is what a measure can tell in this run.
type Resolution struct {
	AA   stats.Estimate `json:"aa"`   // the baseline again, as a ratio to the baseline, or its difference
	Half float64        `json:"half"` // differences below this are not told from nothing: 0.01 is ±1 %, or base units
}

// Cell is one arm with one set of parameters, in one measure.
type Cell struct {
	Measure string           `json:"measure"`
	Arm     string           `json:"arm"`
	Params  result.Params    `json:"params,omitempty"`
	X       float64          `json:"x,omitempty"` // the varied parameter as a number
	HasX    bool             `json:"has_x"`
	Blocks  int              `json:"blocks"`
	Ops     int64            `json:"ops"`
	Errors  map[string]int64 `json:"errors,omitempty"`
	Numbers
	Answers   map[string]int64   `json:"answers,omitempty"`   // by server
	Fit       *stats.Fit         `json:"fit,omitempty"`       // of Answers to equal shares
	Quantiles map[string]float64 `json:"quantiles,omitempty"` // over all blocks' operations, ns
	Counters  map[string]float64 `json:"counters,omitempty"`  // per operation, median over blocks
	CPU       map[string]float64 `json:"cpu,omitempty"`       // ns per operation, over all blocks
}

// Numbers are a cell's own, and those against the baseline.
type Numbers struct {
	// median (or mean, see Measure) over blocks of the measure's figure, base units; nil: no block has one
	Value *stats.Estimate `json:"value,omitempty"`
	Ratio *stats.Estimate `json:"ratio,omitempty"` // median over rounds of the ratio to that round's baseline
	// median over rounds of the difference to that round's baseline, base units
	More    *stats.Estimate `json:"more,omitempty"`
	Verdict stats.Verdict   `json:"verdict,omitempty"` // on Ratio or More
}

// Failed is the number of operations that did not succeed.
func (c Cell) Failed() (n int64) {
	for _, e := range c.Errors {
		n += e
	}
	return n
}

// AimResult is what became of an aim.
type AimResult struct {
	result.Aim
	Got     *stats.Estimate `json:"got,omitempty"`
	Outcome Outcome         `json:"outcome"`
	Why     string          `json:"why,omitempty"`
}

// Noise is how quiet the machine was.
type Noise struct {
	Noisy  bool     `json:"noisy"`
	Steal  float64  `json:"steal"`  // share of all processors' time that the hypervisor gave away
	Others float64  `json:"others"` // share of all processors' time that other processes took
	Why    []string `json:"why,omitempty"`
}

// The bounds beyond which a run calls itself noisy.
const (
	mostSteal  = 0.01
	mostOthers = 0.05
	mostHalf   = 0.03 // of a measure's resolution
	mostSpread = 0.10 // of the baseline between its quarters, over its median
)

// Cell finds one.
func (s Summary) Cell(measure, arm string, params result.Params) (Cell, bool) {
	for _, c := range s.Cells {
		if c.Measure == measure && c.Arm == arm && maps.Equal(c.Params, params) {
			return c, true
		}
	}
	return Cell{}, false
}

// Select returns a measure's cells of one arm, by rising X.
func (s Summary) Select(measure, arm string) (cells []Cell) {
	for _, c := range s.Cells {
		if c.Measure == measure && c.Arm == arm {
			cells = append(cells, c)
		}
	}
	return cells
}

// Summarize makes a run's summary. It fails on blocks that don't belong to the design and on histograms that can't be
// read.
func Summarize(r result.Run) (Summary, error) {
	d := r.Manifest.Design
	s := Summary{Schema: result.Schema, Design: d, Profile: r.Manifest.Profile, Blocks: len(r.Blocks),
		Resolution: map[string]Resolution{}}
	groups, err := group(r)
	if err != nil {
		return s, err
	}
	s.Rounds = roundsOf(groups)
	for _, g := range groups {
		if m := g.measure; m.Ratio && g.arm == d.Again {
			if e := g.ratio(groups, d.Baseline); e.N > 0 {
				s.Resolution[m.ID] = Resolution{AA: e, Half: stats.Resolution(e)}
			}
		} else if m.More && g.arm == d.Again {
			if e := stats.MedianCI(g.differences(groups, d.Baseline)); e.N > 0 {
				s.Resolution[m.ID] = Resolution{AA: e, Half: max(e.CI.Half(), -e.CI.Low, e.CI.High)}
			}
		}
	}
	for _, g := range groups {
		c, err := g.cell(s, groups)
		if err != nil {
			return s, err
		}
		s.Cells = append(s.Cells, c)
	}
	for i, a := range d.Aims {
		got, err := resultOf(r.Manifest.Seed+uint64(i), a, groups, s)
		if err != nil {
			return s, err
		}
		s.Aims = append(s.Aims, got)
	}
	if s.Answer, err = answer(r.Manifest.Seed, groups, s); err != nil {
		return s, err
	}
	s.Noise = noise(r.Manifest, s, groups)
	s.Warnings = warnings(r, s)
	return s, nil
}

// cellBlocks is the blocks of one cell.
type cellBlocks struct {
	measure result.Measure
	arm     string
	params  result.Params
	x       float64
	hasX    bool
	counted bool // its numbers have no interval
	blocks  []result.Block
}

// group sorts blocks into cells, in the order of tables.
func group(r result.Run) ([]*cellBlocks, error) {
	d := r.Manifest.Design
	byKey := map[string]*cellBlocks{}
	var all []*cellBlocks
	for _, b := range r.Blocks {
		known := false
		for _, m := range d.Measures {
			if m.Source() != b.Measure || !slices.ContainsFunc(d.Arms, func(a result.Arm) bool { return a.ID == b.Arm }) {
				continue
			}
			known = true
			key := m.ID + "\x00" + b.Arm + "\x00" + b.Params.String()
			g := byKey[key]
			if g == nil {
				g = newCell(d, m, b)
				byKey[key] = g
				all = append(all, g)
			}
			g.blocks = append(g.blocks, b)
		}
		if !known {
			return nil, fmt.Errorf("block %d: the design knows no measure %q of an arm %q", b.Order, b.Measure, b.Arm)
		}
	}
	rank := func(g *cellBlocks) (int, int) {
		return slices.IndexFunc(d.Measures, func(m result.Measure) bool { return m.ID == g.measure.ID }),
			slices.IndexFunc(d.Arms, func(a result.Arm) bool { return a.ID == g.arm })
	}
	slices.SortStableFunc(all, func(a, b *cellBlocks) int {
		am, aa := rank(a)
		bm, ba := rank(b)
		return cmp.Or(am-bm, aa-ba, cmp.Compare(a.x, b.x)) // then in the order of the run
	})
	return all, nil
}

// newCell is a cell of b's, without blocks.
func newCell(d result.Design, m result.Measure, b result.Block) *cellBlocks {
	kind, _ := m.Stat.Split() // an exact run counts events of each operation, too
	g := &cellBlocks{measure: m, arm: b.Arm, params: b.Params,
		counted: d.Counts(m) || d.Exact && kind == result.KindCounter}
	x, err := strconv.ParseFloat(b.Params[d.Vary.Param], 64)
	if g.hasX = err == nil && !math.IsInf(x, 0) && !math.IsNaN(x); g.hasX {
		g.x = x
	}
	return g
}

// figure is a block's number in its measure.
func figure(m result.Measure, b result.Block) (float64, bool) {
	v, ok := b.Figures[string(m.Stat)]
	kind, name := m.Stat.Split()
	switch kind {
	case result.KindCounter:
		v, ok = b.Counters[name]
		v /= float64(b.Ops)
	case result.KindRate:
		v, ok = b.Counters[name]
		v /= b.Wall.Seconds()
	case result.KindSpent:
		if v, ok = busy(b, ""); ok {
			v *= float64(b.Wall) / b.Counters[name]
		}
	case result.CPU:
		v, ok = busy(b, name)
	case result.Imbalance:
		v, ok = imbalance(b)
	case result.StdDev:
		v, ok = deviation(b)
	}
	return v, ok && b.Ops > 0 && !math.IsNaN(v) && !math.IsInf(v, 0)
}

// deviation is the standard deviation of a block's operations, ns.
func deviation(b result.Block) (float64, bool) {
	if b.Hist == "" {
		return 0, false
	}
	h, err := hdrhistogram.Decode([]byte(b.Hist))
	if err != nil { // which is reported where all histograms are read
		return 0, false
	}
	return h.StdDev(), true
}

// compareMore judges a difference as a ratio would be: by its distance from nothing.
func compareMore(e stats.Estimate, margin, resolution float64) stats.Verdict {
	e.Value, e.CI = e.Value+1, stats.Interval{Low: e.CI.Low + 1, High: e.CI.High + 1}
	return stats.Compare(e, margin, resolution)
}

// roundsOf counts those of the measures that have a baseline, or of all where none has.
func roundsOf(groups []*cellBlocks) int {
	compared, all := map[int]bool{}, map[int]bool{}
	for _, g := range groups {
		for _, b := range g.blocks {
			all[b.Round] = true
			if g.measure.Ratio {
				compared[b.Round] = true
			}
		}
	}
	if len(compared) > 0 {
		return len(compared)
	}
	return len(all)
}

// exact is a number that was counted.
func exact(v float64) stats.Estimate {
	return stats.Estimate{Value: v, CI: stats.Interval{Low: v, High: v}, N: 1, Sure: true}
}

// value is the cell's number.
func (g *cellBlocks) value() stats.Estimate {
	f := g.figures()
	if g.counted && len(f) > 0 {
		return exact(stats.Median(f))
	}
	if !g.measure.Mean || len(f) == 0 {
		return stats.MedianCI(f)
	}
	return stats.Bootstrap(1, func(s ...[]float64) float64 { return stats.Mean(s[0]) }, f)
}

// figures are the blocks' numbers, in order.
func (g *cellBlocks) figures() (v []float64) {
	for _, b := range g.blocks {
		if f, ok := figure(g.measure, b); ok {
			v = append(v, f)
		}
	}
	return v
}

// ratio is the cell's to the baseline: of what is counted, that of both numbers.
func (g *cellBlocks) ratio(all []*cellBlocks, baseline string) stats.Estimate {
	l := g.ratios(all, baseline)
	if base := find(all, g.measure.ID, baseline, nil); g.counted && len(l) > 0 && base != nil {
		return exact(g.value().Value / base.value().Value)
	}
	return stats.MedianCI(l)
}

// byRound is the mean of the numbers of each round: of the two ends, for the baseline.
func (g *cellBlocks) byRound() map[int]float64 {
	sum, n := map[int]float64{}, map[int]float64{}
	for _, b := range g.blocks {
		if f, ok := figure(g.measure, b); ok {
			sum[b.Round] += f
			n[b.Round]++
		}
	}
	for r := range sum {
		sum[r] /= n[r]
	}
	return sum
}

// ratios are to the baseline of the same measure and round: rounds without one, or with one of 0, are left out.
func (g *cellBlocks) ratios(all []*cellBlocks, baseline string) []float64 {
	return pairs(g.byRound(), g.base(all, baseline))
}

// differences are likewise.
func (g *cellBlocks) differences(all []*cellBlocks, baseline string) []float64 {
	return differences(g.byRound(), g.base(all, baseline))
}

// differences subtracts what both have, in the order of rounds.
func differences(of, less map[int]float64) (l []float64) {
	for _, r := range slices.Sorted(maps.Keys(of)) {
		if b, ok := less[r]; ok {
			l = append(l, of[r]-b)
		}
	}
	return l
}

// base is the baseline of the same measure, by round.
func (g *cellBlocks) base(all []*cellBlocks, baseline string) map[int]float64 {
	base := map[int]float64{}
	for _, b := range all {
		if b.measure.ID == g.measure.ID && b.arm == baseline {
			maps.Copy(base, b.byRound())
		}
	}
	return base
}

// pairs divides what both have, in the order of rounds.
func pairs(over, under map[int]float64) (ratios []float64) {
	for _, r := range slices.Sorted(maps.Keys(over)) {
		if u := under[r]; u > 0 {
			ratios = append(ratios, over[r]/u)
		}
	}
	return ratios
}

func (g *cellBlocks) cell(s Summary, all []*cellBlocks) (Cell, error) {
	c := Cell{Measure: g.measure.ID, Arm: g.arm, Params: g.params, X: g.x, HasX: g.hasX, Blocks: len(g.blocks)}
	for _, b := range g.blocks {
		c.Ops += b.Ops
		for k, n := range b.Errors {
			if c.Errors == nil {
				c.Errors = map[string]int64{}
			}
			c.Errors[k] += n
		}
	}
	if e := g.value(); e.N > 0 {
		c.Value = &e
	}
	if g.measure.Ratio && g.arm != s.Design.Baseline {
		if e := g.ratio(all, s.Design.Baseline); e.N > 0 {
			c.Ratio = &e
			c.Verdict = stats.Compare(e, marginOf(s.Design, g.measure), s.Resolution[g.measure.ID].Half)
		}
	}
	if m := g.measure; m.More && g.arm != s.Design.Baseline {
		if e := stats.MedianCI(g.differences(all, s.Design.Baseline)); e.N > 0 {
			c.More = &e
			c.Verdict = compareMore(e, marginOf(s.Design, m), s.Resolution[m.ID].Half)
		}
	}
	if g.measure.From == "" {
		c.Answers, c.Fit = g.answers(), g.fit()
	}
	h, err := g.hist()
	if err != nil {
		return c, err
	}
	if h != nil && (g.measure.From == "" || times(g.measure)) {
		c.Quantiles = map[string]float64{}
		for _, q := range []float64{0.01, 0.1, 0.5, 0.9, 0.99, 0.999} {
			c.Quantiles[load.QuantileName(q)] = float64(h.ValueAtQuantile(q * 100))
		}
		c.Quantiles["max"] = float64(h.Max())
	}
	if g.measure.From == "" {
		c.Counters, c.CPU = g.perOp()
	}
	return c, nil
}

// perOp returns counters, as medians over blocks, and processor times, as the mean over all, per operation.
func (g *cellBlocks) perOp() (counters, cpu map[string]float64) {
	values := map[string][]float64{}
	var sum load.CPU
	ops := 0.0
	for _, b := range g.blocks {
		if b.Ops == 0 {
			continue
		}
		for k, v := range b.Counters {
			values[k] = append(values[k], v/float64(b.Ops))
		}
		if c := b.CPU; c != nil {
			ops += float64(b.Ops)
			sum.User, sum.System, sum.Server = sum.User+c.User, sum.System+c.System, sum.Server+c.Server
			sum.Agent, sum.Softirq = sum.Agent+c.Agent, sum.Softirq+c.Softirq
		}
	}
	for k, v := range values {
		if counters == nil {
			counters = map[string]float64{}
		}
		counters[k] = stats.Median(v)
	}
	if ops > 0 {
		cpu = map[string]float64{"user": float64(sum.User) / ops, "system": float64(sum.System) / ops,
			"server": float64(sum.Server) / ops, "agent": float64(sum.Agent) / ops, "softirq": float64(sum.Softirq) / ops}
	}
	return counters, cpu
}

// hists decodes the blocks' histograms; blocks without one are left out.
func (g *cellBlocks) hists() (hs []*hdrhistogram.Histogram, err error) {
	for _, b := range g.blocks {
		if b.Hist == "" {
			continue
		}
		h, err := hdrhistogram.Decode([]byte(b.Hist))
		if err != nil {
			return nil, fmt.Errorf("block %d: its histogram: %w", b.Order, err)
		}
		if h.TotalCount() > 0 {
			hs = append(hs, h)
		}
	}
	return hs, nil
}

// hist is all blocks' operations in one, nil if there are none.
func (g *cellBlocks) hist() (*hdrhistogram.Histogram, error) {
	hs, err := g.hists()
	if err != nil || len(hs) == 0 {
		return nil, err
	}
	all := load.NewHist()
	for _, h := range hs {
		if lost := all.Merge(h); lost > 0 {
			return nil, fmt.Errorf("%s %s: %d operations are beyond the histogram's range", g.arm, g.measure.ID, lost)
		}
	}
	return all, nil
}

// Hist is all operations of a cell in one histogram, ns, nil if it has none.
func Hist(r result.Run, c Cell) (*hdrhistogram.Histogram, error) {
	g := &cellBlocks{arm: c.Arm}
	m, _ := r.Manifest.Design.Measure(c.Measure)
	for _, b := range r.Blocks {
		if b.Measure == m.Source() && b.Arm == c.Arm && maps.Equal(b.Params, c.Params) {
			g.blocks = append(g.blocks, b)
		}
	}
	return g.hist()
}

func noise(m result.Manifest, s Summary, groups []*cellBlocks) Noise {
	n := Noise{}
	if span := float64(m.After.Total - m.Before.Total); span > 0 && m.After.Total > 0 {
		n.Steal = float64(m.After.Steal-m.Before.Steal) / span
		n.Others = max(0, float64(m.After.Busy-m.Before.Busy-(m.After.Own-m.Before.Own))/span)
	}
	say := func(format string, a ...any) { n.Why = append(n.Why, fmt.Sprintf(format, a...)) }
	if m.Design.Exact {
		return exactNoise(s)
	}
	if m.Machine.Emulated() {
		say("the processor is emulated: times and shares of it say nothing about a real one; ratios between arms of this " +
			"run say a little, exact counts all")
	}
	if n.Steal > mostSteal {
		say("the hypervisor took more than %g %% of the processors' time", 100*mostSteal)
	}
	if n.Others > mostOthers {
		say("other processes used more than %g %% of the processors' time", 100*mostOthers)
	}
	for _, m := range s.Design.Measures {
		r, ok := s.Resolution[m.ID]
		switch {
		case !ok || !m.Ratio:
		case !r.AA.CI.Contains(1):
			say("%s: the baseline differs from itself (%.3f to %.3f)", m.Title, r.AA.CI.Low, r.AA.CI.High)
		case r.Half > mostHalf:
			say("%s: differences below %.1f %% can't be told from nothing", m.Title, 100*r.Half)
		}
	}
	for _, g := range groups {
		if g.arm != s.Design.Baseline || !g.measure.Ratio {
			continue
		}
		v := g.figures()
		if spread := (stats.Quantile(v, 0.75) - stats.Quantile(v, 0.25)) / stats.Median(v); spread > mostSpread {
			say("%s: the middle half of the baseline's blocks spreads over %.0f %% of their median", g.measure.Title, 100*spread)
		}
	}
	n.Noisy = len(n.Why) > 0
	return n
}

// exactNoise is what scatters though instructions are counted: chains of hash tables, above all.
func exactNoise(s Summary) (n Noise) {
	for _, m := range s.Design.Measures {
		if r, ok := s.Resolution[m.ID]; ok && m.Ratio && r.Half > s.Design.Margin {
			n.Why = append(n.Why, fmt.Sprintf("%s: differences below %.2f %% can't be told from nothing", m.Title, 100*r.Half))
		}
	}
	n.Noisy = len(n.Why) > 0
	return n
}

func warnings(r result.Run, s Summary) (w []string) {
	say := func(format string, a ...any) { w = append(w, fmt.Sprintf(format, a...)) }
	m := r.Manifest
	if m.Ended.IsZero() {
		say("the run has no end: it was killed, or is still going on")
	}
	if m.Outcome != "" {
		say("the run ended early: %s", m.Outcome)
	}
	if r.Cut {
		say("the last block was written incompletely and is left out")
	}
	if s.Rounds < s.Design.Rounds {
		say("%d of %d planned rounds were measured", s.Rounds, s.Design.Rounds)
	}
	for _, c := range s.Cells {
		m, _ := s.Design.Measure(c.Measure)
		if n := c.Failed(); n > 0 && m.From == "" {
			say("%s, %s%s: %d of %d operations failed (%s)", m.Title, s.Design.ArmTitle(c.Arm), suffix(c.Params), n, n+c.Ops,
				kinds(c.Errors))
		}
	}
	return w
}

func suffix(p result.Params) string {
	if len(p) == 0 {
		return ""
	}
	return " (" + p.String() + ")"
}

// kinds returns "3 refused, 1 timeout".
func kinds(errors map[string]int64) string {
	var l []string
	for _, k := range slices.Sorted(maps.Keys(errors)) {
		l = append(l, fmt.Sprintf("%d %s", errors[k], k))
	}
	return strings.Join(l, ", ")
}

// answers returns all blocks' answers, by server.
func (g *cellBlocks) answers() (sum map[string]int64) {
	for _, b := range g.blocks {
		for id, n := range b.Answers {
			if sum == nil {
				sum = map[string]int64{}
			}
			sum[id] += n
		}
	}
	return sum
}

// fit tests whether as many servers as the blocks name gave equal shares of all answers; nil where they name none.
func (g *cellBlocks) fit() *stats.Fit {
	if len(g.blocks) == 0 {
		return nil
	}
	n, sum := int(g.blocks[0].Counters["servers"]), g.answers()
	if n < 2 || len(sum) == 0 {
		return nil
	}
	observed := make([]float64, max(n, len(sum)))
	for i, id := range slices.Sorted(maps.Keys(sum)) {
		observed[i] = float64(sum[id])
	}
	f := stats.ChiSquare(observed, nil)
	return &f
}
