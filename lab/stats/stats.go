// Package stats is the arithmetic of the lab: medians and quantiles with intervals, equivalence, goodness of fit, and
// the empirical distribution. It is pure: the same numbers in give the same numbers out. It knows no file, no unit and
// no network, and it offers no significance test: "no difference" is claimed by equivalence with a margin, or not at
// all.
package stats

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Level is the confidence level of every interval here.
const Level = 0.95

// Interval is a closed range.
type Interval struct {
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// Contains reports whether x is in i.
func (i Interval) Contains(x float64) bool { return i.Low <= x && x <= i.High }

// Within reports whether all of i lies in o.
func (i Interval) Within(o Interval) bool { return o.Low <= i.Low && i.High <= o.High }

// Half is half of the interval's width.
func (i Interval) Half() float64 { return (i.High - i.Low) / 2 }

// Estimate is a statistic of N numbers and its interval at Level. Where N is too small for such an interval, the
// numbers' own range stands there and Sure is false.
type Estimate struct {
	Value float64  `json:"value"`
	CI    Interval `json:"ci"`
	N     int      `json:"n"`
	Sure  bool     `json:"sure"` // the interval holds the true value about as often as Level promises
}

// Median is the middle number, the mean of the two middle ones for an even count, NaN for none. xs stays as it is.
func Median(xs []float64) float64 { return Quantile(xs, 0.5) }

// Mean is the arithmetic mean, NaN for no numbers.
func Mean(xs []float64) float64 {
	sum := 0.0
	for _, x := range xs {
		sum += x
	}
	return sum / float64(len(xs))
}

// Quantile is the q-quantile, 0 ≤ q ≤ 1, linear between neighbours (type 7 of Hyndman and Fan, 1996), NaN for no
// numbers. xs stays as it is.
func Quantile(xs []float64, q float64) float64 { return quantile(sorted(xs), q) }

func quantile(s []float64, q float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	h := q * float64(len(s)-1)
	i := int(h)
	if i+1 >= len(s) {
		return s[len(s)-1]
	}
	return s[i] + (h-float64(i))*(s[i+1]-s[i])
}

func sorted(xs []float64) []float64 {
	s := slices.Clone(xs)
	slices.Sort(s)
	return s
}

// MedianCI is the median with its bootstrap interval: the expanded percentile interval of Hesterberg (What Teachers
// Should Know About the Bootstrap, 2015, section 5), with the bootstrap's distribution computed, not drawn.
//
// Why percentile and not BCa: BCa's acceleration comes from the jackknife, which is inconsistent for a median (leaving
// one number out moves it by one of two steps, whatever the sample looks like), so its correction would be noise. Why
// expanded: the plain percentile interval is too narrow for few numbers; of 21 it takes the 7th to the 15th, which hold
// the true median 92 % of the time. The expanded one takes the 6th to the 16th: 97 % (93 to 99 % over all counts from 5
// to 120, 96 % on average). Why computed: a resample's median is one of the numbers, and the chance that it is at most
// the k-th of n is that of a binomial (n, k/n) reaching the middle (Efron, 1979), so nothing need be drawn, and the
// interval depends on no seed.
//
// Fewer than 5 numbers can't bound a median: their range is given, and Sure is false.
func MedianCI(xs []float64) Estimate { return QuantileCI(xs, 0.5) }

// QuantileCI is the q-quantile with its interval as for MedianCI, from the order statistics around it. Sure is false
// where the numbers are too few to bound the quantile, such as a 99th percentile of 100.
func QuantileCI(xs []float64, q float64) Estimate {
	s := sorted(xs)
	n := len(s)
	e := Estimate{Value: quantile(s, q), N: n}
	if n == 0 {
		e.CI = Interval{math.NaN(), math.NaN()}
		return e
	}
	e.CI = Interval{s[0], s[n-1]}
	if n < 2 {
		return e
	}
	tail := expandedTail(n)
	h := q * float64(n-1)
	lo := orderBound(n, int(math.Floor(h))+1, tail)
	hi := orderBound(n, int(math.Ceil(h))+1, 1-tail)
	e.CI = Interval{s[lo-1], s[hi-1]}
	// How many of n numbers lie below the true quantile is binomial (n, q), whatever the distribution: the interval
	// holds it when at least lo and fewer than hi do. Steps between numbers cost up to 0.02 of coverage.
	e.Sure = atLeast(n, lo, q)-atLeast(n, hi, q) >= Level-0.02
	return e
}

// orderBound is the smallest k with P(r-th of a resample ≤ k-th of the sample) ≥ p.
func orderBound(n, r int, p float64) int {
	for k := 1; k < n; k++ {
		if atLeast(n, r, float64(k)/float64(n)) >= p {
			return k
		}
	}
	return n
}

// atLeast is the chance of r or more successes in n trials of chance p.
func atLeast(n, r int, p float64) float64 {
	if r <= 0 {
		return 1
	}
	if r > n {
		return 0
	}
	return incompleteBeta(float64(r), float64(n-r+1), p)
}

// expandedTail is the tail that makes a percentile interval as wide as Student's t and the n-1 divisor ask for.
func expandedTail(n int) float64 {
	t := studentQuantile(1-(1-Level)/2, float64(n-1))
	return normalTail(t * math.Sqrt(float64(n)/float64(n-1)))
}

// Resamples is how many resamples Bootstrap draws.
const Resamples = 10_000

// Bootstrap is a statistic of one or more samples, resampled independently, with its expanded percentile interval by
// simulation: for statistics whose bootstrap distribution has no closed form. The same seed gives the same interval.
// The statistic must not keep or sort the slices it is given. N is the smallest sample's size, and Sure says that it
// is at least 5.
func Bootstrap(seed uint64, stat func(samples ...[]float64) float64, samples ...[]float64) Estimate {
	e := Estimate{Value: stat(samples...), N: math.MaxInt}
	for _, s := range samples {
		e.N = min(e.N, len(s))
	}
	if e.N == 0 || len(samples) == 0 {
		return Estimate{Value: math.NaN(), CI: Interval{math.NaN(), math.NaN()}}
	}
	r := rand.New(rand.NewPCG(seed, 0x6661_6972_6c65_6164))
	draws := make([]float64, Resamples)
	again := make([][]float64, len(samples))
	for i, s := range samples {
		again[i] = make([]float64, len(s))
	}
	for d := range draws {
		for i, s := range samples {
			for j := range again[i] {
				again[i][j] = s[r.IntN(len(s))]
			}
		}
		draws[d] = stat(again...)
	}
	tail := 0.0
	if e.N > 1 {
		tail = expandedTail(e.N)
	}
	slices.Sort(draws)
	e.CI = Interval{quantile(draws, tail), quantile(draws, 1-tail)}
	e.Sure = e.N >= 5
	return e
}

// MedianRatio is the median of a over the median of b, for samples that are not paired, with a Bootstrap interval.
func MedianRatio(seed uint64, a, b []float64) Estimate {
	return Bootstrap(seed, func(s ...[]float64) float64 { return Median(s[0]) / Median(s[1]) }, a, b)
}

// Verdict returns what a ratio's interval allows to be said about it.
type Verdict string

// The verdicts.
const (
	Same    Verdict = "same"    // the whole interval lies within the margin: equivalent
	Higher  Verdict = "higher"  // the whole interval lies above 1, farther than the resolution, and it leaves the margin
	Lower   Verdict = "lower"   // likewise below
	Unclear Verdict = "unclear" // none of these: more blocks or a quieter machine would be needed
)

// Compare judges a ratio to 1 by inclusion of its interval: two one-sided tests (TOST, Schuirmann 1987) with
// equivalence range [1-margin, 1+margin]. A 95 % interval makes each of the two tests one at 2.5 %, stricter than the
// customary 5 %. resolution is the least deviation that this run can tell from nothing (see Resolution), 0 if
// unknown: with an interval that enters [1-resolution, 1+resolution] neither Higher nor Lower is claimed. The two may
// both be small and true: an interval wholly above 1 and within the margin is Same, since no difference that matters
// is what was asked.
func Compare(e Estimate, margin, resolution float64) Verdict {
	switch {
	case !e.Sure || math.IsNaN(e.Value):
		return Unclear
	case e.CI.Within(Interval{1 - margin, 1 + margin}):
		return Same
	case e.CI.Low > 1+resolution:
		return Higher
	case e.CI.High < 1-resolution:
		return Lower
	}
	return Unclear
}

// Resolution is what an A/A comparison, the baseline against itself, can't tell from nothing: half of its interval's
// width, or the farther end's distance from 1 where the interval is not centred on 1.
func Resolution(aa Estimate) float64 { return max(aa.CI.Half(), 1-aa.CI.Low, aa.CI.High-1) }

// Fit is the outcome of a chi-square test.
type Fit struct {
	ChiSquare float64 `json:"chi_square"`
	Freedom   int     `json:"freedom"` // degrees of freedom
	P         float64 `json:"p"`       // chance of so bad a fit, or a worse one, if the expectation is true
}

// ChiSquare is Pearson's test of counts against what was expected, of equal lengths ≥ 2. A nil expected means all
// equal. The approximation wants expected counts of 5 or more.
func ChiSquare(observed, expected []float64) Fit {
	f := Fit{Freedom: len(observed) - 1}
	for i, o := range observed {
		e := Mean(observed)
		if expected != nil {
			e = expected[i]
		}
		f.ChiSquare += (o - e) * (o - e) / e
	}
	f.P = gammaTail(float64(f.Freedom)/2, f.ChiSquare/2)
	return f
}
