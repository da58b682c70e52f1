package result

import (
	"fmt"
	"maps"
	"math"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/lab/stats"
)

// judge finds an aim's number and holds it against its bound.
func judge(seed uint64, a Aim, groups []*cellBlocks, d Design) (AimResult, error) {
	r := AimResult{Aim: a, Outcome: NotMeasured}
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
	if math.IsNaN(e.Value) || math.IsInf(e.Value, 0) {
		r.Why = "it would be divided by nothing"
		return r, nil
	}
	r.Got, r.Outcome = e, a.judge(*e)
	if !e.Sure {
		r.Why = fmt.Sprintf("%d blocks are too few to bound it", e.N)
	}
	return r, nil
}

func find(groups []*cellBlocks, measure, arm string, params map[string]string) *cellBlocks {
	for _, g := range groups {
		if g.measure.ID == measure && g.arm == arm && maps.Equal(g.params, params) {
			return g
		}
	}
	return nil
}

// number is what the aim is about, nil if the blocks don't tell it.
func number(seed uint64, a Aim, g *cellBlocks, groups []*cellBlocks, d Design) (*stats.Estimate, error) {
	if a.Over != nil {
		o := *a.Over
		if o.Measure == "" {
			o.Measure = a.Measure
		}
		if o.Arm == "" {
			o.Arm = a.Arm
		}
		other := find(groups, o.Measure, o.Arm, o.Params)
		if other == nil {
			return nil, nil
		}
		return over(seed, a.Of, g, other)
	}
	var e stats.Estimate
	switch of := a.Of; {
	case of == "value":
		e = g.value()
	case of == "ratio":
		e = stats.MedianCI(g.ratios(groups, d.Baseline))
	case of == "failed":
		n := 0.0
		for _, b := range g.blocks {
			n += float64(b.Failed())
		}
		e = stats.Estimate{Value: n, CI: stats.Interval{Low: n, High: n}, N: len(g.blocks), Sure: true} // a count is exact
	case strings.HasPrefix(of, "p"):
		return pooled(seed, of, g)
	default:
		return nil, fmt.Errorf("aim %s is of %q: that is no number of a cell", a.ID, of)
	}
	if e.N == 0 {
		return nil, nil
	}
	return &e, nil
}

// over is one cell's number divided by another's: round by round where they share at least 5 rounds, else median by
// median.
func over(seed uint64, of string, g, other *cellBlocks) (*stats.Estimate, error) {
	if strings.HasPrefix(of, "p") {
		return pooled(seed, of, g, other)
	}
	e := stats.MedianCI(pairs(g.byRound(), other.byRound()))
	if e.N < 5 {
		e = stats.MedianRatio(seed, g.figures(), other.figures())
	}
	if e.N == 0 {
		return nil, nil
	}
	return &e, nil
}

// pooled is a quantile, named as in "p99", of all operations of a cell, or its ratio to that of a second cell. Its
// interval comes from resampling whole blocks, since operations of one block are not independent of each other.
func pooled(seed uint64, name string, cells ...*cellBlocks) (*stats.Estimate, error) {
	percent, err := strconv.ParseFloat(name[1:], 64)
	if err != nil || percent <= 0 || percent >= 100 {
		return nil, fmt.Errorf("%q is no quantile between p0 and p100", name)
	}
	var pools []pool
	var indices [][]float64
	enough := true
	for _, g := range cells {
		p, err := newPool(g)
		if err != nil || p.total == 0 {
			return nil, err
		}
		// Below this, the interval's upper end is beyond what was seen: 0.99^299 = 0.05.
		enough = enough && float64(p.total)*(1-percent/100) >= 3
		pools, indices = append(pools, p), append(indices, p.indices())
	}
	e := stats.Bootstrap(seed, func(samples ...[]float64) float64 {
		v := pools[0].quantile(samples[0], percent/100)
		if len(pools) > 1 {
			v /= pools[1].quantile(samples[1], percent/100)
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
