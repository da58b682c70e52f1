package chart

import (
	"math"
	"slices"
)

// Point is a value at X with its interval; equal ends mean none.
type Point struct{ X, Y, Low, High float64 }

func (p Point) interval() bool { return p.Low != p.High }

// Series is points of one kind, by rising X.
type Series struct {
	Name   string
	Style  Style
	Points []Point
}

// Reference is a level over the whole width, with a band around it.
type Reference struct {
	Name      string
	Style     Style
	Value     float64
	Low, High float64 // of the band; equal: no band
	Dashed    bool
	Hidden    bool // only the band is drawn
}

// Ghost is a number that others published: hollow, with its own label.
type Ghost struct {
	X, Y  float64
	Label string
}

// Line is values over a varied quantity, as lines with intervals.
type Line struct {
	Frame
	X, Y       Axis
	Series     []Series
	References []Reference
	Ghosts     []Ghost
}

// dodge is how far apart the points of neighbouring series stand at the same X, so that their intervals can be told
// apart.
const dodge = 5.0

func (c Line) plot(f Frame) *plot {
	p := newPlot(f, 360, c.Y.Title, c.ghostKeys())
	xs, ys := c.values()
	tags := c.tags()
	p.axes(c.X, c.Y, xs, ys, tagSpace(tags))
	for _, r := range c.References {
		p.reference(r)
	}
	for i, s := range c.Series {
		shift := 0.0
		if slices.ContainsFunc(s.Points, Point.interval) {
			shift = (float64(i) - float64(len(c.Series)-1)/2) * dodge
		}
		p.series(s, shift, c.Y.Log)
	}
	for _, g := range c.Ghosts {
		p.ghost(g)
	}
	for i := range tags {
		tags[i].y = p.y.clamp(tags[i].y)
	}
	p.tags(tags)
	return p
}

func (c Line) ghostKeys() []key {
	if len(c.Ghosts) == 0 {
		return nil
	}
	return []key{{name: "hollow: published elsewhere, other machines", ghost: true}}
}

func (c Line) values() (xs, ys []float64) {
	for _, s := range c.Series {
		for _, q := range s.Points {
			xs, ys = append(xs, q.X), append(ys, q.Y)
			if q.interval() {
				ys = append(ys, q.Low, q.High)
			}
		}
	}
	for _, r := range c.References {
		ys = append(ys, r.Value)
		if r.Low != r.High {
			ys = append(ys, r.Low, r.High)
		}
	}
	for _, g := range c.Ghosts {
		xs, ys = append(xs, g.X), append(ys, g.Y)
	}
	return xs, ys
}

// tags name each series at its last point, and each reference, still in values.
func (c Line) tags() (tags []tag) {
	for _, r := range c.References {
		if r.Name != "" {
			tags = append(tags, tag{y: r.Value, text: r.Name})
		}
	}
	for _, s := range c.Series {
		if n := len(s.Points); n > 0 {
			tags = append(tags, tag{y: s.Points[n-1].Y, text: s.Name, key: &key{style: s.Style}})
		}
	}
	return tags
}

func (p *plot) reference(r Reference) {
	col := of(r.Style)
	if r.Low != r.High {
		p.rect(p.left, p.y.clamp(r.Low), p.right, p.y.clamp(r.High), col, ` fill-opacity=".16"`)
	}
	if r.Hidden {
		return
	}
	dash := ""
	if r.Dashed {
		dash = dashed("4 4")
	}
	p.line(p.left, p.y.clamp(r.Value), p.right, p.y.clamp(r.Value), 1.6, col, dash)
}

func (p *plot) series(s Series, shift float64, log bool) {
	var at [][2]float64
	for _, q := range s.Points {
		if math.IsNaN(q.Y) || log && q.Y <= 0 {
			continue
		}
		at = append(at, [2]float64{p.x.at(q.X) + shift, p.y.at(q.Y)})
	}
	if len(at) > 1 {
		p.path(join(at), 2, of(s.Style), dashed(s.Style.dash()))
	}
	for _, q := range s.Points {
		if q.interval() && (!log || q.Low > 0) {
			p.whisker(p.x.at(q.X)+shift, p.y.clamp(q.Low), p.y.clamp(q.High), of(s.Style))
		}
	}
	for _, a := range at {
		p.marker(a[0], a[1], s.Style, false)
	}
}

// ghost draws a number of others', its label beside it where there is room, and clear of other text if that can be.
func (p *plot) ghost(g Ghost) {
	x, y := p.x.clamp(g.X), p.y.clamp(g.Y)
	p.marker(x, y, 0, true)
	w, side, tx, left := ghostFace.width(g.Label), start, x+9, x+9
	if tx+w > p.right {
		side, tx, left = end, x-9, x-9-w
	}
	ty := y + 4
	for _, base := range []float64{y + 4, y + 17, y - 9} {
		if !slices.ContainsFunc(p.texts, (box{left, base - 8, left + w, base + 3, ""}).meets) {
			ty = base
			break
		}
	}
	p.text(tx, ty, side, ghostFace, g.Label)
}

// meets reports whether two boxes share a point.
func (b box) meets(o box) bool { return b.x0 < o.x1 && o.x0 < b.x1 && b.y0 < o.y1 && o.y0 < b.y1 }
