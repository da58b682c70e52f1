package chart

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// most is the share of a distribution that an axis shows at least; the rest is told in words.
const most = 0.99

// ECDF is empirical distributions: for each X, the share of numbers at most X, rising from 0 to 1. What lies beyond the
// 99th percentile of every curve is left out and told.
type ECDF struct {
	Frame
	X      Axis
	Curves []Series // Points carry X and, as Y, the share
}

func (c ECDF) plot(f Frame) *plot {
	xs, beyond := c.reach()
	f.Sub = strings.TrimSpace(f.Sub + beyond)
	p := newPlot(f, 340, "share of all at most x", curveKeys(c.Curves))
	p.axes(c.X, Axis{Suffix: " %"}, xs, []float64{0, 100}, 8)
	for _, s := range c.Curves {
		p.steps(s)
	}
	return p
}

// reach is the values that the axis shows, and words for the rest.
func (c ECDF) reach() (xs []float64, words string) {
	hi := math.Inf(-1)
	for _, s := range c.Curves {
		for _, q := range s.Points {
			if hi = max(hi, q.X); q.Y >= most {
				break
			}
		}
	}
	beyond := 0.0
	for _, s := range c.Curves {
		upTo := 0.0
		for _, q := range s.Points {
			if q.X <= hi {
				xs, upTo = append(xs, q.X), q.Y
			}
		}
		beyond = max(beyond, 1-upTo)
	}
	if beyond > 1e-9 {
		words = fmt.Sprintf("; at most %.2g %% lie beyond the right edge", 100*beyond)
	}
	return xs, words
}

func curveKeys(curves []Series) (keys []key) {
	for _, s := range curves {
		keys = append(keys, key{name: s.Name, style: s.Style})
	}
	return keys
}

// steps draws a distribution and marks its quarters.
func (p *plot) steps(s Series) {
	var at [][2]float64
	y, mark := p.y.at(0), 0.25
	var marks [][2]float64
	for _, q := range s.Points {
		if q.X > p.x.hi*(1+1e-9) {
			break
		}
		x := p.x.clamp(q.X)
		if len(at) == 0 {
			at = append(at, [2]float64{p.left, y})
		}
		at = append(at, [2]float64{x, y})
		y = p.y.at(100 * q.Y)
		at = append(at, [2]float64{x, y})
		for ; mark < 0.8 && q.Y >= mark; mark += 0.25 {
			marks = append(marks, [2]float64{x, p.y.at(100 * mark)})
		}
	}
	if len(at) == 0 {
		return
	}
	at = append(at, [2]float64{p.right, y})
	p.path(join(thin(at)), 2, of(s.Style), dashed(s.Style.dash()))
	for _, m := range marks {
		p.marker(m[0], m[1], s.Style, false)
	}
}

// thin leaves out points less than 0.3 px from the last one drawn; the last one stays.
func thin(at [][2]float64) [][2]float64 {
	var out [][2]float64
	for i, q := range at {
		if n := len(out); n == 0 || i == len(at)-1 || math.Abs(q[0]-out[n-1][0])+math.Abs(q[1]-out[n-1][1]) >= 0.3 {
			out = append(out, q)
		}
	}
	return out
}

// Percentiles is an HDR percentile plot: the value below which a share lies, the share drawn as the logarithm of 1/(1
// - share), so that every further nine takes the same width.
type Percentiles struct {
	Frame
	Y      Axis
	Curves []Series // Points carry the share as X, below 1, and the value as Y
}

func (c Percentiles) plot(f Frame) *plot {
	p := newPlot(f, 340, c.Y.Title, nil)
	var xs, ys []float64
	var tags []tag
	for _, s := range c.Curves {
		for _, q := range s.Points {
			if q.X < 1 {
				xs, ys = append(xs, nines(q.X)), append(ys, q.Y)
			}
		}
		if n := len(s.Points); n > 0 {
			tags = append(tags, tag{y: s.Points[n-1].Y, text: s.Name, key: &key{style: s.Style}})
		}
	}
	p.percentAxes(c.Y, append(xs, 0), ys, tagSpace(tags))
	for _, s := range c.Curves {
		p.percentile(s)
	}
	for i := range tags {
		tags[i].y = p.y.clamp(tags[i].y)
	}
	p.tags(tags)
	return p
}

// nines is log10 of 1/(1-q): 1 for 90 %, 2 for 99 %.
func nines(q float64) float64 { return -math.Log10(1 - q) }

// percentAxes is axes with marks of its own below: 0, 50, 90, 99, 99.9 % …
func (p *plot) percentAxes(y Axis, xs, ys []float64, space float64) {
	p.bottom -= 38
	p.right -= space
	p.axisY(y, ys)
	p.x = scale{a: p.left + airX, b: p.right - airX, hi: max(1, slices.Max(xs))}
	last := math.Inf(-1)
	for _, q := range []float64{0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999} {
		v, label := nines(q), tickNumber(math.Round(q*1e7)/1e5)+" %"
		if v > p.x.hi {
			break
		}
		at, w := p.x.at(v), tickFace.width(label)
		p.line(at, p.top, at, p.bottom, 1, cGrid, "")
		if at-w/2 > last {
			p.text(at, p.bottom+17, middle, tickFace, label)
			last = at + w/2 + 4
		}
	}
	p.text((p.left+p.right)/2, p.bottom+34, middle, axisFace, "share of all that took at most so long")
}

func (p *plot) percentile(s Series) {
	var at [][2]float64
	for _, q := range s.Points {
		if q.X < 1 && (!p.y.log || q.Y > 0) {
			at = append(at, [2]float64{p.x.at(nines(q.X)), p.y.clamp(q.Y)})
		}
	}
	if len(at) == 0 {
		return
	}
	p.path(join(thin(at)), 2, of(s.Style), dashed(s.Style.dash()))
	for _, q := range []float64{0.5, 0.9, 0.99, 0.999} {
		for _, pt := range s.Points {
			if pt.X >= q && pt.X < 1 {
				p.marker(p.x.at(nines(pt.X)), p.y.clamp(pt.Y), s.Style, false)
				break
			}
		}
	}
}

// Bin is how many numbers lie in a range.
type Bin struct{ From, To, Count float64 }

// beyond reports whether the bin begins where an axis ends.
func (b Bin) beyond(hi float64) bool { return b.From >= hi && b.To > hi }

// Counts is one set of numbers, by bins of rising value.
type Counts struct {
	Name  string
	Style Style
	Bins  []Bin
	Line  bool // its outline alone is drawn
}

// Histogram is sets of numbers by value, each as shares of its own total, over a logarithmic axis if X says so. What
// lies beyond the 99th percentile of every set is left out and told.
type Histogram struct {
	Frame
	X    Axis
	Sets []Counts
}

// columns is how many a histogram has.
const columns = 64

func (c Histogram) plot(f Frame) *plot {
	lo, hi, beyond := c.reach()
	var keys []key
	for _, s := range c.Sets {
		keys = append(keys, key{name: s.Name, style: s.Style, plain: !s.Line, bare: s.Line})
	}
	f.Sub = strings.TrimSpace(f.Sub + beyond)
	p := newPlot(f, 330, "share per column", keys)
	cols := scale{lo: lo, hi: hi, a: 0, b: columns, log: c.X.Log}
	ys := []float64{0}
	var shares [][]float64
	for _, s := range c.Sets {
		sh := s.shares(cols)
		shares, ys = append(shares, sh), append(ys, sh...)
	}
	p.axes(c.X, Axis{Zero: true, Suffix: " %"}, []float64{lo, hi}, ys, 8)
	for i, s := range c.Sets {
		p.outline(shares[i], s)
	}
	return p
}

// reach is the values from the least to the 99th percentile of the widest set, and words for the rest.
func (c Histogram) reach() (lo, hi float64, words string) {
	lo = math.Inf(1)
	for _, s := range c.Sets {
		need := most * s.total()
		for _, b := range s.Bins {
			if b.Count == 0 || c.X.Log && b.From <= 0 {
				continue
			}
			lo = min(lo, b.From)
			if need > 0 {
				hi = max(hi, b.To)
			}
			need -= b.Count
		}
	}
	if lo >= hi {
		return 1, 10, ""
	}
	for _, s := range c.Sets {
		out := 0.0
		for _, b := range s.Bins {
			if b.beyond(hi) {
				out += b.Count
			}
		}
		if share := 100 * out / s.total(); share > 0 {
			words += fmt.Sprintf("; %s: %.2g %% beyond the right edge", s.Name, share)
		}
	}
	return lo, hi, words
}

func (s Counts) total() (n float64) {
	for _, b := range s.Bins {
		n += b.Count
	}
	return n
}

// shares is the set by columns, in percent. A bin that lies across columns is spread over them.
func (s Counts) shares(cols scale) []float64 {
	out := make([]float64, columns)
	total := s.total()
	for _, b := range s.Bins {
		from, to := b.From, max(b.To, b.From)
		if b.Count == 0 || b.beyond(cols.hi) || cols.log && from <= 0 {
			continue
		}
		a, z := cols.clamp(from), cols.clamp(to)
		if z-a < 1e-9 {
			out[min(int(a), columns-1)] += 100 * b.Count / total
			continue
		}
		for i := int(a); i < columns && float64(i) < z; i++ {
			part := (min(z, float64(i+1)) - max(a, float64(i))) / (z - a)
			out[i] += 100 * b.Count / total * part
		}
	}
	return out
}

// outline draws a histogram's upper edge, and fills it faintly unless it is a line alone.
func (p *plot) outline(shares []float64, c Counts) {
	s := c.Style
	step := (p.x.b - p.x.a) / columns
	first := slices.IndexFunc(shares, func(v float64) bool { return v > 0 })
	if first < 0 {
		return
	}
	at := [][2]float64{{p.x.a + float64(first)*step, p.bottom}}
	for i := first; i < len(shares) && slices.Max(shares[i:]) > 0; i++ {
		x, y := p.x.a+float64(i)*step, p.y.at(shares[i])
		at = append(at, [2]float64{x, y}, [2]float64{x + step, y})
	}
	at = append(at, [2]float64{at[len(at)-1][0], p.bottom})
	d := join(at)
	if !c.Line {
		p.area(d+"Z", of(s), ` fill-opacity=".3"`)
	}
	p.path(d, 1.6, of(s), dashed(s.dash()))
}
