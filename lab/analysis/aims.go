package analysis

import (
	"cmp"
	"fmt"
	"maps"
	"math"

	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// resultOf finds an aim's number and holds it against its bound.
func resultOf(seed uint64, a result.Aim, groups []*cellBlocks, s Summary) (AimResult, error) {
	d := s.Design
	r := AimResult{Aim: a, Outcome: NotMeasured}
	if a.Cannot != "" {
		r.Outcome, r.Why = NotTestable, a.Cannot
		return r, nil
	}
	if a.Across != "" {
		r.Outcome, r.Why = NotTestable, "it is of two machines: fairlead lab compare A B judges it"
		return r, nil
	}
	g := find(groups, a.Measure, a.Arm, a.Params)
	if g == nil {
		r.Why = fmt.Sprintf("no block of %s %s%s", d.ArmTitle(a.Arm), a.Measure, suffix(a.Params))
		return r, nil
	}
	e, err := number(seed, a, g, groups, d)
	if err != nil || e == nil {
		r.Why = "the blocks hold no such number"
		return r, err
	}
	if !finite(e.Value) {
		r.Why = "it would be divided by nothing"
		return r, nil
	}
	half := 0.0
	if !g.counted && g.measure.Ratio && (a.Of == result.Ratio || a.Over != nil || a.Margin > 0) { // what compares arms
		half = s.Resolution[a.Measure].Half
	}
	outcome := judge(a, *e, half)
	switch {
	case !e.Sure:
		r.Why = map[bool]string{true: "one block is", false: fmt.Sprint(e.N, " blocks are")}[e.N == 1] +
			" too few to bound it"
	case outcome != judge(a, *e, 0):
		r.Why = fmt.Sprintf("the interval alone would decide it, but this run can't tell less than %.1f %% from nothing "+
			"(A/A)", 100*half)
	}
	r.Got, r.Outcome = e, word(a, outcome)
	return r, nil
}

// finite reports whether v is a number.
func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

func find(groups []*cellBlocks, measure, arm string, params result.Params) *cellBlocks {
	for _, g := range groups {
		if g.measure.ID == measure && g.arm == arm && maps.Equal(g.params, params) {
			return g
		}
	}
	return nil
}

// number is what the aim is about, nil if the blocks don't hold it.
func number(seed uint64, a result.Aim, g *cellBlocks, groups []*cellBlocks, d result.Design) (*stats.Estimate, error) {
	of := func(ref *result.CellRef) (*cellBlocks, result.Metric) {
		if ref == nil {
			return nil, ""
		}
		o := find(groups, cmp.Or(ref.Measure, a.Measure), cmp.Or(ref.Arm, a.Arm), ref.Params)
		return o, cmp.Or(ref.Of, a.Of)
	}
	if under, what := of(a.Over); a.Over != nil {
		if under == nil {
			return nil, nil
		}
		return over(seed, a.Of, g, what, under, groups, d)
	}
	if a.Less != nil || a.Plus != nil {
		return sum(seed, a, g, of, groups, d)
	}
	switch {
	case a.Of == result.Failed:
		n := 0.0
		for _, b := range g.blocks {
			n += float64(b.Failed())
		}
		// a count is exact
		return &stats.Estimate{Value: n, CI: stats.Interval{Low: n, High: n}, N: len(g.blocks), Sure: true}, nil
	case a.Of == result.Fit:
		f := g.fit()
		if f == nil {
			return nil, nil
		}
		return &stats.Estimate{Value: f.P, CI: stats.Interval{Low: f.P, High: f.P}, N: len(g.blocks), Sure: true}, nil
	case a.Of.IsQuantile():
		return pooled(seed, []result.Metric{a.Of}, g)
	}
	e, err := g.estimate(a.Of, groups, d)
	if err != nil || e.N == 0 {
		return nil, err
	}
	return &e, nil
}

// estimate is a cell's "value", "ratio" or "more".
func (g *cellBlocks) estimate(of result.Metric, groups []*cellBlocks, d result.Design) (e stats.Estimate, err error) {
	switch {
	case of == result.Value:
		return g.value(), nil
	case of == result.Ratio:
		return g.ratio(groups, d.Baseline), nil
	}
	l, err := g.numbers(of, groups, d)
	return stats.MedianCI(l), err
}

// numbers are what an estimate is the median of.
func (g *cellBlocks) numbers(of result.Metric, groups []*cellBlocks, d result.Design) ([]float64, error) {
	switch of {
	case result.Value:
		return g.figures(), nil
	case result.Ratio:
		return g.ratios(groups, d.Baseline), nil
	case result.More:
		return g.differences(groups, d.Baseline), nil
	}
	return nil, fmt.Errorf("%q is no number of a cell", of)
}

// over is one cell's number divided by another's: values round by round where they share at least 5 rounds, else median
// by median.
func over(seed uint64, of result.Metric, g *cellBlocks, under result.Metric, other *cellBlocks, groups []*cellBlocks,
	d result.Design) (*stats.Estimate, error) {
	if of.IsQuantile() {
		return pooled(seed, []result.Metric{of, under}, g, other)
	}
	if of == result.Value && under == result.Value {
		if g.counted && other.counted && len(g.figures()) > 0 && len(other.figures()) > 0 {
			e := exact(g.value().Value / other.value().Value)
			return &e, nil
		}
		if e := stats.MedianCI(pairs(g.byRound(), other.byRound())); e.N >= 5 {
			return &e, nil
		}
	}
	a, err := g.numbers(of, groups, d)
	if err != nil {
		return nil, err
	}
	b, err := other.numbers(under, groups, d)
	if err != nil {
		return nil, err
	}
	e := stats.MedianRatio(seed, a, b)
	if e.N == 0 {
		return nil, nil
	}
	return &e, nil
}

// sum is a cell's number, less another's, plus a third one's: of what is counted, of the numbers themselves. Else what
// is taken away is taken round by round where they share at least 5 rounds.
func sum(seed uint64, a result.Aim, g *cellBlocks, of func(*result.CellRef) (*cellBlocks, result.Metric),
	groups []*cellBlocks, d result.Design) (*stats.Estimate, error) {
	own, err := g.numbers(a.Of, groups, d)
	if err != nil {
		return nil, err
	}
	samples, signs, counted := [][]float64{own}, []float64{1}, g.counted
	for _, part := range []struct {
		ref  *result.CellRef
		sign float64
	}{{a.Less, -1}, {a.Plus, 1}} {
		if part.ref == nil {
			continue
		}
		o, what := of(part.ref)
		if o == nil {
			return nil, nil
		}
		if a.Of == result.Value && what == result.Value && part.sign < 0 {
			if l := differences(g.byRound(), o.byRound()); len(l) >= 5 {
				samples[0] = l
				continue
			}
		}
		l, err := o.numbers(what, groups, d)
		if err != nil || len(l) == 0 {
			return nil, err
		}
		samples, signs, counted = append(samples, l), append(signs, part.sign), counted && o.counted
	}
	value := func(s ...[]float64) (v float64) {
		for i, l := range s {
			v += signs[i] * stats.Median(l)
		}
		return v
	}
	if counted && len(own) > 0 {
		e := exact(value(samples...))
		return &e, nil
	}
	e := stats.Bootstrap(seed, value, samples...)
	if e.N == 0 {
		return nil, nil
	}
	return &e, nil
}

// pooled is a quantile, named as in "p99", of all operations of a cell, or its ratio to one of a second cell. Its
// interval comes from resampling whole blocks, since operations of one block are not independent of each other.
func pooled(seed uint64, names []result.Metric, cells ...*cellBlocks) (*stats.Estimate, error) {
	var pools []pool
	var indices [][]float64
	var at []float64
	enough := true
	for i, g := range cells {
		percent, err := names[i].Percent()
		if err != nil {
			return nil, err
		}
		p, err := newPool(g)
		if err != nil || p.total == 0 {
			return nil, err
		}
		// Below this, the interval's upper end is beyond what was seen: 0.99^299 = 0.05.
		enough = enough && float64(p.total)*min(percent, 100-percent)/100 >= 3
		at = append(at, percent/100)
		pools, indices = append(pools, p), append(indices, p.indices())
	}
	e := stats.Bootstrap(seed, func(samples ...[]float64) float64 {
		v := pools[0].quantile(samples[0], at[0])
		if len(pools) > 1 {
			v /= pools[1].quantile(samples[1], at[1])
		}
		return v
	}, indices...)
	e.Sure = e.Sure && enough
	return &e, nil
}

// pool is the histograms of a cell's blocks on common values, ready to be resampled.
type pool struct {
	values []float64   // rising, ns
	counts [][]float64 // by block, then by value
	total  int64
	sum    []float64 // room for quantile
}

func newPool(g *cellBlocks) (pool, error) {
	hs, err := g.hists()
	if err != nil {
		return pool{}, err
	}
	all, err := g.hist()
	if err != nil || all == nil {
		return pool{}, err
	}
	p := pool{total: all.TotalCount()}
	at := map[int64]int{}
	for _, b := range all.Distribution() {
		if b.Count > 0 {
			at[b.To] = len(p.values)
			p.values = append(p.values, float64(b.To))
		}
	}
	for _, h := range hs {
		row := make([]float64, len(p.values))
		for _, b := range h.Distribution() {
			if b.Count == 0 {
				continue
			}
			i, ok := at[b.To]
			if !ok {
				return pool{}, fmt.Errorf("%s %s: a histogram of another shape", g.arm, g.measure.ID)
			}
			row[i] += float64(b.Count)
		}
		p.counts = append(p.counts, row)
	}
	p.sum = make([]float64, len(p.values))
	return p, nil
}

// indices are 0, 1, 2 … by block: what Bootstrap draws from.
func (p pool) indices() []float64 {
	idx := make([]float64, len(p.counts))
	for i := range idx {
		idx[i] = float64(i)
	}
	return idx
}

// quantile is that of the blocks drawn.
func (p pool) quantile(blocks []float64, q float64) float64 {
	clear(p.sum)
	total := 0.0
	for _, i := range blocks {
		for v, n := range p.counts[int(i)] {
			p.sum[v] += n
			total += n
		}
	}
	need := q * total
	for v, n := range p.sum {
		if need -= n; need <= 0 {
			return p.values[v]
		}
	}
	return p.values[len(p.values)-1]
}
