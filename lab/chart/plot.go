package chart

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// plot is a drawing under way: the frame is drawn, the rectangle between its sides takes the data.
type plot struct {
	canvas
	frame                    Frame
	w, h                     float64
	left, right, top, bottom float64 // of the data's rectangle
	x, y                     scale
}

const (
	margin  = 14.0 // around the whole drawing
	airX    = 12.0 // between the data's rectangle and the first and last value
	legendH = 20.0
)

// key is an entry of a legend.
type key struct {
	name  string
	style Style
	ghost bool // hollow, no line
	plain bool // a block of colour instead of line and marker
	bare  bool // no marker

	number string // in the block
}

// newPlot draws title, sub-title, legend and footer and leaves the rest to the data. yTitle stands above the upright
// axis.
func newPlot(f Frame, height int, yTitle string, legend []key) *plot {
	p := &plot{frame: f, w: float64(f.Width), h: float64(f.Height)}
	if f.Width == 0 {
		p.w = 560
	}
	if f.Height == 0 {
		p.h = float64(height)
	}
	p.left, p.right, p.top, p.bottom = margin, p.w-margin, margin, p.h-8
	p.block(titleFace, f.Title, 0)
	p.block(subFace, f.Sub, 1)
	p.top += 4
	p.legend(legend)
	if yTitle != "" {
		p.top += 16
		p.text(margin, p.top, start, axisFace, yTitle)
		p.top += 4
	}
	lines := footFace.wrap(f.Footer, p.w-2*margin)
	p.bottom -= footFace.size * lineHeight * float64(len(lines))
	for i, l := range lines {
		p.text(margin, p.bottom-3+footFace.size*lineHeight*float64(i+1), start, footFace, l)
	}
	p.bottom -= 6
	return p
}

// block sets wrapped text at the top and moves the top below it.
func (p *plot) block(f face, s string, air float64) {
	p.top += air
	for _, line := range f.wrap(s, p.w-2*margin) {
		p.top += f.size * lineHeight
		p.text(margin, p.top-0.25*f.size, start, f, line)
	}
}

// legend sets keys in rows.
func (p *plot) legend(keys []key) {
	if len(keys) == 0 {
		return
	}
	x := margin
	p.top += legendH - 4
	for _, k := range keys {
		w := 30 + labelFace.width(k.name) + 18
		if x > margin && x+w-18 > p.w-margin {
			x = margin
			p.top += legendH
		}
		p.sample(x, p.top-4, k)
		p.text(x+30, p.top, start, labelFace, k.name)
		x += w
	}
	p.top += 6
}

// sample draws a key's sign, 24 px wide.
func (p *plot) sample(x, y float64, k key) {
	if k.plain {
		p.rect(x+6, y-6, x+22, y+6, of(k.style), "")
		p.text(x+14, y+3.5, middle, partFace, k.number)
		return
	}
	if !k.ghost {
		p.line(x, y, x+24, y, 2, of(k.style), dashed(k.style.dash()))
	}
	if k.bare {
		return
	}
	p.marker(x+12, y, k.style, k.ghost)
}

// axes makes the scales, makes room for their labels, and draws grid and ticks. rightRoom is kept free beside the data.
func (p *plot) axes(x, y Axis, xs, ys []float64, rightMargin float64) {
	p.bottom -= 20 + 18 // tick labels, title
	p.right -= rightMargin
	p.axisY(y, ys)
	p.x = scale{a: p.left + airX, b: p.right - airX, log: x.Log}
	p.x.lo, p.x.hi = span(x, xs)
	if !x.Zero { // the air is in pixels here: the data may reach both ends
		p.x.lo, p.x.hi = tight(x, xs, p.x.lo, p.x.hi)
	}
	p.drawX(x)
	if len(xs) == 0 || len(ys) == 0 {
		p.text((p.left+p.right)/2, (p.top+p.bottom)/2, middle, ghostFace, "no numbers")
	}
}

// axisY makes the upright scale, makes room for its labels and draws its grid.
func (p *plot) axisY(y Axis, ys []float64) {
	p.y = scale{a: p.bottom, b: p.top + 6, log: y.Log}
	p.y.lo, p.y.hi = span(y, ys)
	ticks := p.y.ticks(max(3, int((p.bottom-p.top)/40)))
	labels := tickLabels(ticks, y.Log, y.Suffix)
	space := 0.0
	for _, l := range labels {
		space = max(space, tickFace.width(l))
	}
	p.left += space + 7
	for i, t := range ticks {
		at := p.y.at(t.v)
		p.line(p.left, at, p.right, at, 1, cGrid, minorAttrs(t))
		p.text(p.left-7, at+4, end, tickFace, labels[i])
	}
	p.line(p.left, p.bottom, p.right, p.bottom, 1, cMute, "")
}

// tight takes span's air away again.
func tight(a Axis, values []float64, lo, hi float64) (float64, float64) {
	least, most := math.Inf(1), math.Inf(-1)
	for _, v := range values {
		if !a.Log || v > 0 {
			least, most = min(least, v), max(most, v)
		}
	}
	if least < most && !math.IsInf(most-least, 0) && (!a.Log || most/least >= 1.2) {
		return least, most
	}
	return lo, hi
}

func minorAttrs(t tick) string {
	if t.minor {
		return ` stroke-opacity=".5"`
	}
	return ""
}

func (p *plot) drawX(x Axis) {
	n := max(3, int((p.right-p.left)/80))
	last := math.Inf(-1)
	ticks := p.x.ticks(n)
	labels := tickLabels(ticks, x.Log, x.Suffix)
	for i, t := range ticks {
		at := p.x.at(t.v)
		p.line(at, p.bottom, at, p.bottom+map[bool]float64{true: 3, false: 5}[t.minor], 1, cMute, "")
		if w := tickFace.width(labels[i]); !t.minor && at-w/2 > last {
			p.text(at, p.bottom+17, middle, tickFace, labels[i])
			last = at + w/2 + 4
		}
	}
	p.text((p.left+p.right)/2, p.bottom+34, middle, axisFace, x.Title)
}

// tag is a label beside the data, at the height of what it names.
type tag struct {
	y    float64
	text string
	key  *key // its sign, nil for none
}

// tagSpace is how wide the room for tags must be.
func tagSpace(tags []tag) float64 {
	space := 0.0
	for _, t := range tags {
		w := labelFace.width(t.text) + 12
		if t.key != nil {
			w += 14
		}
		space = max(space, w)
	}
	return space
}

// tags sets labels at the right side, moved apart where they would overlap, with a leader where one was moved.
func (p *plot) tags(tags []tag) {
	slices.SortStableFunc(tags, func(a, b tag) int {
		switch {
		case a.y < b.y:
			return -1
		case a.y > b.y:
			return 1
		}
		return 0
	})
	var want []float64
	for _, t := range tags {
		want = append(want, t.y)
	}
	for i, y := range apart(want, 15, p.top+6, p.bottom-2) {
		t, x := tags[i], p.right+6
		if math.Abs(y-t.y) > 5 {
			p.line(p.right-1, t.y, x+4, y, 1, cMute, ` stroke-opacity=".6"`)
			x += 2
		}
		x += 4
		if t.key != nil {
			p.marker(x+4, y, t.key.style, t.key.ghost)
			x += 14
		}
		p.text(x, y+4, start, labelFace, t.text)
	}
}

// apart moves rising positions so that neighbours stand at least gap apart, as little as possible in sum, within [lo,
// hi] where they fit.
func apart(want []float64, gap, lo, hi float64) []float64 {
	type cluster struct {
		sum float64 // of want minus the offset in the cluster
		n   int
	}
	first := func(c cluster) float64 {
		at := c.sum / float64(c.n)
		return max(lo, min(at, hi-gap*float64(c.n-1)))
	}
	var cs []cluster
	for _, w := range want {
		cs = append(cs, cluster{w, 1})
		for len(cs) > 1 {
			a, b := cs[len(cs)-2], cs[len(cs)-1]
			if first(a)+gap*float64(a.n) <= first(b) {
				break
			}
			merged := cluster{a.sum + b.sum - gap*float64(a.n)*float64(b.n), a.n + b.n}
			cs = append(cs[:len(cs)-2], merged)
		}
	}
	var out []float64
	for _, c := range cs {
		for i := range c.n {
			out = append(out, first(c)+gap*float64(i))
		}
	}
	return out
}

// join makes a path of straight lines.
func join(points [][2]float64) string {
	var b strings.Builder
	for i, q := range points {
		if i == 0 {
			b.WriteByte('M')
		} else {
			b.WriteByte('L')
		}
		fmt.Fprintf(&b, "%s %s", px(q[0]), px(q[1]))
	}
	return b.String()
}

func (p *plot) done() []byte { return p.svg(p.frame, p.w, p.h) }
