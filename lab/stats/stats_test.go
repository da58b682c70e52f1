package stats

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tolerance) {
		t.Errorf("%s = %v, want %v ± %v", what, got, want, tolerance)
	}
}

func count(n int) []float64 {
	xs := make([]float64, n)
	for i := range xs {
		xs[i] = float64(i + 1)
	}
	return xs
}

func TestQuantile(t *testing.T) {
	for _, c := range []struct {
		xs      []float64
		q, want float64
	}{
		{[]float64{7}, 0.5, 7},
		{[]float64{3, 1, 2}, 0.5, 2},
		{[]float64{4, 1, 3, 2}, 0.5, 2.5},
		{[]float64{4, 1, 3, 2}, 0, 1},
		{[]float64{4, 1, 3, 2}, 1, 4},
		{count(101), 0.99, 100},
		{count(10), 0.25, 3.25}, // R: quantile(1:10, .25)
		{count(10), 0.9, 9.1},
	} {
		before := slices.Clone(c.xs)
		near(t, "Quantile", Quantile(c.xs, c.q), c.want, 1e-12)
		if !slices.Equal(before, c.xs) {
			t.Errorf("Quantile moved its argument: %v", c.xs)
		}
	}
	if !math.IsNaN(Median(nil)) {
		t.Error("the median of nothing is a number")
	}
}

// The values are those of R's pt, qt, pgamma, pbeta and pnorm, and of any printed table.
func TestFunctions(t *testing.T) {
	near(t, "normal tail 1.96", normalTail(1.959963984540054), 0.025, 1e-14)
	near(t, "t 0.975, 20", studentQuantile(0.975, 20), 2.085963447, 1e-8)
	near(t, "t 0.975, 1", studentQuantile(0.975, 1), 12.70620474, 1e-7)
	near(t, "t 0.95, 9", studentQuantile(0.95, 9), 1.833112933, 1e-8)
	near(t, "I 0.5(2,3)", incompleteBeta(2, 3, 0.5), 0.6875, 1e-14)
	near(t, "I 0.1(5,2)", incompleteBeta(5, 2, 0.1), 0.000055, 1e-15)
	near(t, "P(Bin(21,1/2)≥11)", atLeast(21, 11, 0.5), 0.5, 1e-13)
	near(t, "P(Bin(10,0.3)≥4)", atLeast(10, 4, 0.3), 0.3503892816, 1e-10)
	for _, c := range []struct{ x, df, p float64 }{
		{3.841458821, 1, 0.05}, {6.634896601, 1, 0.01}, {18.30703805, 10, 0.05}, {124.3421134, 100, 0.05},
		{9.341817766, 10, 0.5},
		{2.705543454, 1, 0.1}, {1073.642651, 999, 0.05},
	} {
		near(t, "chi-square tail", gammaTail(c.df/2, c.x/2), c.p, 1e-8)
	}
}

func TestChiSquare(t *testing.T) {
	f := ChiSquare([]float64{44, 56}, nil) // (6²+6²)/50
	near(t, "chi-square", f.ChiSquare, 1.44, 1e-12)
	near(t, "p", f.P, 0.2301393404, 1e-9)
	f = ChiSquare([]float64{315, 101, 108, 32}, []float64{312.75, 104.25, 104.25, 34.75}) // Mendel's peas, 9:3:3:1
	near(t, "Mendel", f.ChiSquare, 0.470024, 1e-6)
	near(t, "Mendel's p", f.P, 0.925426, 1e-6)
	if f.Freedom != 3 {
		t.Errorf("freedom %d, want 3", f.Freedom)
	}
	if p := ChiSquare([]float64{1000, 1100, 900, 1000}, nil).P; p > 0.001 {
		t.Errorf("an uneven split has p = %v", p)
	}
}

func TestMedianCI(t *testing.T) {
	for _, c := range []struct {
		n        int
		low, hig float64
		sure     bool
	}{{1, 1, 1, false}, {4, 1, 4, false}, {5, 1, 5, true}, {11, 3, 9, true}, {21, 6, 16, true}, {22, 6, 17, true},
		{41, 15, 27, true}} {
		xs := count(c.n)
		rand.New(rand.NewPCG(1, 2)).Shuffle(c.n, func(i, j int) { xs[i], xs[j] = xs[j], xs[i] })
		want := Estimate{Value: float64(c.n+1) / 2, CI: Interval{c.low, c.hig}, N: c.n, Sure: c.sure}
		if d := cmp.Diff(want, MedianCI(xs)); d != "" {
			t.Errorf("of %d: -want +got\n%s", c.n, d)
		}
	}
	if e := MedianCI(nil); e.Sure || !math.IsNaN(e.Value) {
		t.Errorf("of nothing: %+v", e)
	}
}

func TestQuantileCI(t *testing.T) {
	if e := QuantileCI(count(100), 0.99); e.Sure || e.CI.High != 100 {
		t.Errorf("100 numbers can't bound their 99th percentile: %+v", e)
	}
	e := QuantileCI(count(1000), 0.99)
	if !e.Sure || e.CI.Low != 982 || e.CI.High != 996 {
		t.Errorf("p99 of 1…1000: %+v, want 982 to 996", e)
	}
}

// The computed interval must be the one that drawing gives, up to the drawing's own noise.
func TestMedianCIIsTheBootstraps(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	xs := make([]float64, 201)
	for i := range xs {
		xs[i] = math.Exp(r.NormFloat64())
	}
	c, b := MedianCI(xs), Bootstrap(1, func(s ...[]float64) float64 { return Median(s[0]) }, xs)
	near(t, "low", b.CI.Low, c.CI.Low, 0.02)
	near(t, "high", b.CI.High, c.CI.High, 0.02)
	near(t, "value", b.Value, c.Value, 0)
}

// How often the interval of 21 skewed numbers holds the true median. 4,000 trials of chance 0.973: sd 0.0026.
func TestMedianCICoverage(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	hit, xs := 0, make([]float64, 21)
	for range 4000 {
		for i := range xs {
			xs[i] = math.Exp(r.NormFloat64())
		}
		if MedianCI(xs).CI.Contains(1) {
			hit++
		}
	}
	near(t, "coverage", float64(hit)/4000, 0.973, 0.012)
}

func TestBootstrapIsDeterministic(t *testing.T) {
	a, b := []float64{10, 11, 12, 13, 14, 15, 16}, []float64{20, 22, 24, 26, 28, 30, 33}
	one, two, three := MedianRatio(1, a, b), MedianRatio(1, a, b), MedianRatio(2, a, b)
	if one != two {
		t.Errorf("the same seed gave %+v and %+v", one, two)
	}
	near(t, "ratio", one.Value, 0.5, 1e-12)
	near(t, "another seed's low end", three.CI.Low, one.CI.Low, 0.02)
	if e := MedianRatio(1, a, nil); e.Sure || !math.IsNaN(e.Value) {
		t.Errorf("over nothing: %+v", e)
	}
}

func TestCompare(t *testing.T) {
	e := func(low, value, high float64) Estimate { return Estimate{value, Interval{low, high}, 21, true} }
	for _, c := range []struct {
		name       string
		e          Estimate
		resolution float64
		want       Verdict
	}{
		{"inside the margin", e(0.985, 1.001, 1.015), 0, Same},
		{"inside and above 1", e(1.005, 1.010, 1.015), 0, Same},
		{"above", e(1.05, 1.07, 1.09), 0.01, Higher},
		{"above, across the margin", e(1.011, 1.025, 1.03), 0.01, Higher},
		{"above 1 but not above the resolution", e(1.005, 1.025, 1.03), 0.01, Unclear},
		{"below", e(0.80, 0.9, 0.95), 0.01, Lower},
		{"wide", e(0.9, 1.0, 1.1), 0, Unclear},
		{"too few", Estimate{1, Interval{1, 1}, 1, false}, 0, Unclear},
		{"nothing", Estimate{Value: math.NaN(), Sure: true}, 0, Unclear},
	} {
		if got := Compare(c.e, 0.02, c.resolution); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestResolution(t *testing.T) {
	near(t, "centred", Resolution(Estimate{CI: Interval{0.99, 1.01}}), 0.01, 1e-12)
	near(t, "off centre", Resolution(Estimate{CI: Interval{1.002, 1.02}}), 0.02, 1e-12)
}

func TestOrderProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		xs := rapid.SliceOfN(rapid.Float64Range(-1e6, 1e6), 1, 60).Draw(t, "xs")
		e := MedianCI(xs)
		if e.CI.Low > e.Value || e.Value > e.CI.High {
			t.Fatalf("the median %v lies outside its interval %v", e.Value, e.CI)
		}
	})
}
