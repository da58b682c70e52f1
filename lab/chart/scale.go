package chart

import "math"

// scale maps values from [lo, hi] to pixels from a to b.
type scale struct {
	lo, hi float64
	a, b   float64
	log    bool
}

func (s scale) at(v float64) float64 {
	lo, hi := s.lo, s.hi
	if s.log {
		lo, hi, v = math.Log10(lo), math.Log10(hi), math.Log10(v)
	}
	return s.a + (v-lo)/(hi-lo)*(s.b-s.a)
}

// clamp is at, kept inside the axis.
func (s scale) clamp(v float64) float64 { return s.at(min(max(v, s.lo), s.hi)) }

// span makes a scale's ends from the values that it must show, with some air. A log axis leaves out what is not
// positive.
func span(a Axis, values []float64) (lo, hi float64) {
	lo, hi = math.Inf(1), math.Inf(-1)
	for _, v := range values {
		if math.IsNaN(v) || math.IsInf(v, 0) || a.Log && v <= 0 {
			continue
		}
		lo, hi = min(lo, v), max(hi, v)
	}
	if lo > hi {
		lo, hi = 1, 10 // nothing to show: an axis all the same
	}
	if a.Log {
		if hi/lo < 1.2 {
			lo, hi = lo/1.5, hi*1.5
		}
		air := math.Pow(hi/lo, 0.04)
		return lo / air, hi * air
	}
	if a.Zero {
		if hi <= 0 {
			hi = 1
		}
		return min(0, lo), hi * 1.06
	}
	if hi-lo < 1e-9*math.Abs(hi)+1e-300 {
		d := max(math.Abs(hi)*0.01, 1e-9)
		return lo - d, hi + d
	}
	air := (hi - lo) * 0.08
	return lo - air, hi + air
}

// tick is a mark on an axis; a minor one has a grid line only.
type tick struct {
	v     float64
	minor bool
}

// ticks returns about n marks between the scale's ends, at 1, 2 and 5 times powers of ten.
func (s scale) ticks(n int) []tick {
	if s.log && s.hi/s.lo >= 8 {
		return s.decades(n)
	}
	step := niceStep((s.hi - s.lo) / float64(n))
	var t []tick
	for i := math.Ceil(s.lo/step - 1e-9); i*step <= s.hi+step*1e-9; i++ {
		if s.log && i <= 0 {
			continue
		}
		t = append(t, tick{v: i * step})
	}
	return t
}

// decades marks powers of ten, with 2 and 5 between them where there is room: labelled below two decades, minor below
// five.
func (s scale) decades(n int) (t []tick) {
	count := math.Log10(s.hi / s.lo)
	every := math.Max(1, math.Ceil(count/float64(n+1)))
	for e := math.Floor(math.Log10(s.lo)); e <= math.Ceil(math.Log10(s.hi)); e++ {
		for _, m := range []float64{1, 2, 5} {
			v := m * math.Pow(10, e)
			labelled := m == 1 && math.Mod(math.Abs(e), every) == 0
			switch {
			case v < s.lo*(1-1e-9) || v > s.hi*(1+1e-9):
			case labelled || m != 1 && count < 2:
				t = append(t, tick{v: v})
			case count < 5:
				t = append(t, tick{v: v, minor: true})
			}
		}
	}
	return t
}

// niceStep is the least of 1, 2, 5 times a power of ten that is at least v.
func niceStep(v float64) float64 {
	if v <= 0 || math.IsInf(v, 0) || math.IsNaN(v) {
		return 1
	}
	e := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if m*e >= v*(1-1e-9) {
			return m * e
		}
	}
	return 10 * e
}
