package stats

import "math"

// The special functions below are accurate to about 1e-12 in the range that the lab uses: series and continued
// fractions as in Abramowitz and Stegun (6.5.29, 6.5.31, 26.5.8), evaluated with Lentz's method.

const (
	tiny = 1e-300
	eps  = 1e-15
)

// normalTail is the chance of a standard normal number above z.
func normalTail(z float64) float64 { return math.Erfc(z/math.Sqrt2) / 2 }

// studentQuantile is the p-quantile, 0.5 < p < 1, of Student's t with v degrees of freedom, by bisection.
func studentQuantile(p, v float64) float64 {
	below := func(t float64) float64 { return 1 - incompleteBeta(v/2, 0.5, v/(v+t*t))/2 }
	lo, hi := 0.0, 1.0
	for below(hi) < p {
		hi *= 2
	}
	for range 200 {
		mid := (lo + hi) / 2
		if below(mid) < p {
			lo = mid
		} else {
			hi = mid
		}
	}
	return (lo + hi) / 2
}

// gammaTail is the regularised upper incomplete gamma function Q(a, x), a > 0, x ≥ 0.
func gammaTail(a, x float64) float64 {
	if x <= 0 {
		return 1
	}
	lg, _ := math.Lgamma(a)
	front := math.Exp(-x + a*math.Log(x) - lg)
	if x < a+1 {
		term, sum := 1/a, 1/a
		for n := 1.0; n < 1e6 && term > sum*eps; n++ {
			term *= x / (a + n)
			sum += term
		}
		return 1 - front*sum
	}
	return front / fraction(x+1-a, func(n float64) (num, den float64) { return -n * (n - a), x + 2*n + 1 - a })
}

// incompleteBeta is the regularised incomplete beta function I_x(a, b).
func incompleteBeta(a, b, x float64) float64 {
	if x <= 0 {
		return 0
	}
	if x >= 1 {
		return 1
	}
	if x > (a+1)/(a+b+2) {
		return 1 - incompleteBeta(b, a, 1-x)
	}
	la, _ := math.Lgamma(a)
	lb, _ := math.Lgamma(b)
	lab, _ := math.Lgamma(a + b)
	front := math.Exp(lab-la-lb+a*math.Log(x)+b*math.Log1p(-x)) / a
	return front / fraction(1, func(n float64) (num, den float64) {
		m := math.Floor(n / 2)
		if math.Mod(n, 2) == 0 {
			return m * (b - m) * x / ((a + n - 1) * (a + n)), 1
		}
		return -(a + m) * (a + b + m) * x / ((a + n - 1) * (a + n)), 1
	})
}

// fraction evaluates b0 + a1/(b1 + a2/(b2 + …)), where term(n) gives a and b of step n from 1 on.
func fraction(b0 float64, term func(n float64) (a, b float64)) float64 {
	f := b0
	if f == 0 {
		f = tiny
	}
	c, d := f, 0.0
	for n := 1.0; n < 1e6; n++ {
		a, b := term(n)
		d = b + a*d
		if d == 0 {
			d = tiny
		}
		c = b + a/c
		if c == 0 {
			c = tiny
		}
		d = 1 / d
		f *= c * d
		if math.Abs(c*d-1) < eps {
			break
		}
	}
	return f
}
