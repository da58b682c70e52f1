package chart

import (
	"cmp"
	"fmt"
	"math"
)

// Outcome of a claim.
type Outcome uint8

// The outcomes.
const (
	Open    Outcome = iota // the interval crosses the bound, or is not sure
	Met                    // all of the interval keeps the bound
	Broken                 // none of it does
	Missing                // not measured
	Equal                  // of a comparison: all of the interval lies within the margin
	Apart                  // of a comparison: it differs
)

var outcomeAttrs = map[Outcome]struct {
	sign, word string
	colour     colour
}{Open: {"?", "unclear", cInk}, Met: {"✓", "hit", cGood}, Broken: {"✗", "miss", cBad},
	Missing: {"–", "not measured", cMute}, Equal: {"=", "same", cGood}, Apart: {"≠", "different", of(1)}}

// Claim is one line of a forest plot: a number and its interval as multiples of the bound, so that every bound stands
// at 1.
type Claim struct {
	ID, Text  string
	Value     float64 // over the bound
	Low, High float64
	Least     bool    // the bound is a lower one: to keep it is to be above 1
	Margin    float64 // above 0: the bound is on both sides, 1 ± Margin
	Says      string  // the number and its bound in their own unit
	Outcome   Outcome
}

// Forest is every claim against its bound. For a claim with a lower bound, the bound over the number is drawn, so
// that left of the line is always good.
type Forest struct {
	Frame
	Claims []Claim
	Better string // which way is good; "": "← better"
	Same   bool   // 1 is no bound: the numbers are compared with it, and neither side is good
}

// forestText is the width of the claims' words.
const forestText = 300.0

func (c Forest) plot(f Frame) *plot {
	c.Frame = f
	if c.Frame.Width == 0 {
		c.Frame.Width = 920
	}
	heights, sum := c.rows()
	if c.Frame.Height == 0 {
		probe := newPlot(c.Frame, 1000, "", nil)
		c.Frame.Height = int(probe.top + 20 + sum + 40 + 1000 - probe.bottom)
	}
	p := newPlot(c.Frame, 0, "", nil)
	p.top += 20
	p.bottom -= 40
	says := labelFace.width("not measured")
	for _, cl := range c.Claims {
		says = max(says, labelFace.width(cl.Says))
	}
	if !c.stacked() {
		p.left += c.names() + forestText
		p.right -= says*widest + 34
	}
	p.forestAxis(c)
	y := p.top
	for i, cl := range c.Claims {
		if c.stacked() {
			p.stackedClaim(cl, y, heights[i], c.Same)
		} else {
			p.claim(cl, y, heights[i], margin+c.names())
		}
		y += heights[i]
	}
	return p
}

// stacked reports whether words stand above their numbers: the drawing is too narrow for both side by side.
func (c Forest) stacked() bool { return c.Frame.Width <= phone }

// Of a stacked row: its first line, and the strip of its number.
const (
	stackedHead  = 20.0
	stackedStrip = 24.0
)

// claimFace is that of the claims' names.
var claimFace = face{size: 12, bold: true, colour: cInk}

// names is the width of the claims' names and the room after them.
func (c Forest) names() (w float64) {
	for _, cl := range c.Claims {
		w = max(w, claimFace.width(cl.ID))
	}
	return max(40, w*widest+8)
}

// rows is how high each claim's row is.
func (c Forest) rows() (h []float64, sum float64) {
	for _, cl := range c.Claims {
		if c.stacked() {
			lines := len(labelFace.wrap(cl.Text, float64(c.Frame.Width)-2*margin))
			h = append(h, stackedHead+float64(lines)*labelFace.size*lineHeight+
				map[bool]float64{true: 8, false: stackedStrip}[cl.Outcome == Missing])
			sum += h[len(h)-1]
			continue
		}
		lines := len(labelFace.wrap(cl.Text, forestText))
		h = append(h, math.Max(26, float64(lines)*labelFace.size*lineHeight+10))
		sum += h[len(h)-1]
	}
	return h, sum
}

// oriented is the claim's number so that less is better.
func (cl Claim) oriented() (value, low, high float64) {
	if cl.Least {
		return 1 / cl.Value, 1 / cl.High, 1 / cl.Low
	}
	return cl.Value, cl.Low, cl.High
}

// The farthest that a forest plot reaches; what lies beyond is an arrow.
const forestMost = 32.0

func (p *plot) forestAxis(c Forest) {
	values := []float64{0.8, 1.25}
	for _, cl := range c.Claims {
		if cl.Outcome != Missing {
			v, lo, hi := cl.oriented()
			for _, x := range []float64{v, lo, hi} {
				values = append(values, min(max(x, 1/forestMost), forestMost))
			}
		}
	}
	p.x = scale{a: p.left + 13, b: p.right - 13, log: true}
	p.x.lo, p.x.hi = span(Axis{Log: true}, values)
	one := p.x.at(1)
	top := p.top
	if c.stacked() {
		top = p.bottom // no line through words
	} else if !c.Same {
		p.rect(p.left, p.top, one, p.bottom, cGood, ` fill-opacity=".08"`)
	}
	last := math.Inf(-1)
	for _, v := range []float64{0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 2, 5, 10, 20, 50} {
		at := p.x.at(v)
		label := tickNumber(v) + " ×"
		w := tickFace.width(label)
		if v < p.x.lo || v > p.x.hi || at-w/2 < last && v != 1 {
			continue
		}
		if v != 1 && v < 1 && at+w/2 > one-w { // the bound's own label comes first
			continue
		}
		p.line(at, top, at, p.bottom+3, 1, cGrid, "")
		p.text(at, p.bottom+16, middle, tickFace, label)
		last = at + w/2 + 6
	}
	if !c.stacked() {
		p.line(one, p.top-4, one, p.bottom, 1.6, cInk, "")
	}
	if c.Same {
		p.text(one, p.top-8, middle, labelFace, "same")
		p.text((p.left+p.right)/2, p.bottom+33, middle, axisFace, "B ÷ A")
		return
	}
	p.text(one, p.top-8, middle, labelFace, "bound")
	p.text(one-30, p.top-8, end, ghostFace, cmp.Or(c.Better, "← better"))
	p.text((p.left+p.right)/2, p.bottom+33, middle, axisFace, "measured ÷ bound")
}

// stackedClaim draws a row of which the words stand above the number.
func (p *plot) stackedClaim(cl Claim, top, h float64, same bool) {
	attrs := outcomeAttrs[cl.Outcome]
	p.line(margin, top, p.w-margin, top, 1, cGrid, "")
	p.text(margin, top+15, start, claimFace, cl.ID)
	p.text(p.w-margin, top+15, end, labelFace, cmp.Or(cl.Says, attrs.word))
	p.text(p.w-margin-labelFace.width(cmp.Or(cl.Says, attrs.word))*widest-4, top+15, end,
		face{size: 13, bold: true, colour: attrs.colour}, attrs.sign)
	for i, l := range labelFace.wrap(cl.Text, p.w-2*margin) {
		p.text(margin, top+stackedHead+labelFace.size*lineHeight*(float64(i)+0.8), start, labelFace, l)
	}
	if cl.Outcome == Missing {
		return
	}
	y, one := top+h-stackedStrip/2, p.x.at(1)
	if !same {
		p.rect(p.left, y-8, one, y+8, cGood, ` fill-opacity=".08"`)
	}
	p.line(one, y-9, one, y+9, 1.6, cInk, "")
	p.number(cl, y, attrs.colour)
}

// number draws a claim's number, with the margin on both sides of its bound if there is one.
func (p *plot) number(cl Claim, y float64, col colour) {
	if cl.Margin > 0 { // the bound's other side, and no line of "better"
		p.rect(p.x.clamp(1-cl.Margin), y-7, p.x.clamp(1+cl.Margin), y+7, cMute, ` fill-opacity=".25"`)
	}
	p.interval(cl, y, col)
}

// claim draws a row whose words begin at x = words.
func (p *plot) claim(cl Claim, top, h, words float64) {
	attrs := outcomeAttrs[cl.Outcome]
	y := top + h/2
	p.line(margin, top, p.w-margin, top, 1, cGrid, "")
	p.text(margin, y+4, start, claimFace, cl.ID)
	lines := labelFace.wrap(cl.Text, forestText)
	step := labelFace.size * lineHeight
	for i, l := range lines {
		p.text(words, y+4+step*(float64(i)-float64(len(lines)-1)/2), start, labelFace, l)
	}
	p.text(p.right+12, y+4, start, face{size: 13, bold: true, colour: attrs.colour}, attrs.sign)
	if cl.Says == "" {
		cl.Says = attrs.word
	}
	p.text(p.right+30, y+4, start, labelFace, cl.Says)
	if cl.Outcome == Missing {
		return
	}
	p.number(cl, y, attrs.colour)
}

// interval draws the claim's number, with an arrow where it leaves the axis.
func (p *plot) interval(cl Claim, y float64, col colour) {
	v, lo, hi := cl.oriented()
	a, b, at := p.x.clamp(lo), p.x.clamp(hi), p.x.clamp(v)
	p.line(a, y, b, y, 2, col, "")
	for _, e := range []struct {
		x, direction float64
		out          bool
	}{{a, -1, lo < p.x.lo}, {b, 1, hi > p.x.hi}} {
		if e.out {
			p.area(fmt.Sprintf("M%s %sL%s %sL%s %sZ", px(e.x+11*e.direction), px(y), px(e.x+5*e.direction), px(y-4),
				px(e.x+5*e.direction),
				px(y+4)), col, "")
		} else {
			p.line(e.x, y-4, e.x, y+4, 1.6, col, "")
		}
	}
	p.rect(at-4, y-4, at+4, y+4, col, "")
}
