package chart

import (
	"math"
	"strconv"
)

// Bar is one value, or a stack of parts, by name.
type Bar struct {
	Name      string
	Style     Style
	Parts     []float64 // from the left; one is usual
	Low, High float64   // interval of the sum; equal: none
	Text      string    // at the end; "": the sum
}

func (b Bar) sum() (v float64) {
	for _, p := range b.Parts {
		v += p
	}
	return v
}

// Bars is values by name, lying, from 0.
type Bars struct {
	Frame
	X      Axis
	Bars   []Bar
	Stack  []string // names of the parts, with colours and numbers 1, 2, 3 …; none: each bar has its own style
	Bound  float64  // a line across, 0 for none
	Limits string   // what the line stands for
}

const barH = 26.0

func (c Bars) plot(f Frame) *plot {
	var keys []key
	for i, n := range c.Stack {
		keys = append(keys, key{name: n, style: Style(i + 1), plain: true, number: strconv.Itoa(i + 1)})
	}
	if f.Height == 0 { // as many rows as there are bars
		probe := newPlot(f, 1000, "", keys)
		f.Height = int(probe.top + barH*float64(len(c.Bars)) + 38 + 1000 - probe.bottom +
			map[bool]float64{true: 16}[c.Limits != ""] + 8)
	}
	p := newPlot(f, 0, "", keys)
	p.bars(c)
	return p
}

func (p *plot) bars(c Bars) {
	p.bottom -= 38
	if c.Limits != "" {
		p.top += 16
	}
	names, ends, most := 0.0, 0.0, c.Bound
	for _, b := range c.Bars {
		names = max(names, labelFace.width(b.Name))
		ends = max(ends, labelFace.width(b.text()))
		most = max(most, b.sum(), b.High)
	}
	p.left += names + 10
	p.right -= ends + 12
	if most <= 0 {
		most = 1
	}
	p.x = scale{a: p.left, b: p.right, hi: most}
	for _, t := range p.x.ticks(max(3, int((p.right-p.left)/80))) {
		at := p.x.at(t.v)
		p.line(at, p.top, at, p.bottom, 1, cGrid, "")
		p.text(at, p.bottom+17, middle, tickFace, tickNumber(t.v)+c.X.Suffix)
	}
	p.text((p.left+p.right)/2, p.bottom+34, middle, axisFace, c.X.Title)
	row := (p.bottom - p.top) / math.Max(1, float64(len(c.Bars)))
	for i, b := range c.Bars {
		p.bar(b, p.top+row*(float64(i)+0.5), row, len(c.Stack) > 0)
	}
	p.line(p.left, p.top, p.left, p.bottom, 1, cMute, "")
	if c.Limits != "" {
		at := p.x.at(c.Bound)
		p.line(at, p.top-2, at, p.bottom, 1.6, cInk, dashed("5 3"))
		a := middle
		if w := labelFace.width(c.Limits); at+w/2 > p.w-margin {
			at, a = p.w-margin, end
		}
		p.text(at, p.top-6, a, labelFace, c.Limits)
	}
}

func (b Bar) text() string {
	if b.Text != "" {
		return b.Text
	}
	return Number(b.sum())
}

func (p *plot) bar(b Bar, y, row float64, stacked bool) {
	p.text(p.left-8, y+4, end, labelFace, b.Name)
	from, thick := 0.0, math.Min(row*0.34, 11)
	for i, v := range b.Parts {
		s := b.Style
		if stacked {
			s = Style(i + 1)
		}
		a, b := p.x.at(from), p.x.at(from+v)
		p.rect(a, y-thick, b, y+thick, of(s), ` fill-opacity=".85"`)
		if stacked && i > 0 && b-a > 2 {
			p.line(a, y-thick, a, y+thick, 1.5, cGround, "")
		}
		if n := strconv.Itoa(i + 1); stacked && b-a > partFace.width(n)+4 {
			p.text((a+b)/2, y+3.5, middle, partFace, n)
		}
		from += v
	}
	tip := from
	if b.Low != b.High {
		lo, hi := p.x.at(b.Low), p.x.at(b.High)
		p.line(lo, y, hi, y, 1.4, cInk, "")
		p.line(lo, y-3.5, lo, y+3.5, 1.4, cInk, "")
		p.line(hi, y-3.5, hi, y+3.5, 1.4, cInk, "")
		tip = max(tip, b.High)
	}
	p.text(p.x.at(tip)+7, y+4, start, valueFace, b.text())
}
