// Package chart draws measurements as SVG: lines with intervals, bars, histograms, distributions, percentiles, and
// the forest plot of claims. A chart is a value; SVG gives its text, the same for the same value.
//
// Every chart carries a title that states what was found, its axes' units, how many numbers stand behind it, and a
// footer that says where it was measured. Colours are safe for colour-blind readers and never the only difference;
// dark mode and print are in the drawing's own style; <title> and <desc> speak to screen readers. No script, no font,
// no other file is needed.
//
// It knows no statistics: intervals come from outside, in the units that the axes name.
package chart

import (
	"encoding/xml"
	"fmt"
	"strconv"
	"strings"
)

// Frame is what every chart has around its data.
type Frame struct {
	ID     string // unique among the drawings of one page: letters, digits, hyphens
	Title  string // what was found, neutrally
	Sub    string // what is shown and of how many: "median of 21 blocks, 95 % interval"
	Desc   string // the numbers in words, for those who can't see the drawing
	Footer string // kernel, processor, commit
	Width  int    // px; 0: 560
	Height int    // px; 0: what the kind of chart needs
}

// phone is the width of drawings for narrow screens.
const phone = 380

// narrowed returns the frame of the same drawing for a narrow screen.
func (f Frame) narrowed() Frame {
	f.ID, f.Width, f.Height = f.ID+"-narrow", phone, 0
	return f
}

// Chart is a kind of chart with its data.
type Chart interface {
	frame() Frame
	plot(Frame) *plot // draws it in this frame
}

func (f Frame) frame() Frame { return f }

// SVG draws a chart.
func SVG(c Chart) []byte { return c.plot(c.frame()).done() }

// Narrow draws a chart for a narrow screen.
func Narrow(c Chart) []byte { return c.plot(c.frame().narrowed()).done() }

// Axis is one direction of a chart. Values come in the unit that its title names.
type Axis struct {
	Title  string
	Log    bool
	Zero   bool   // a linear axis begins at 0
	Suffix string // of every tick, such as " %"
}

// Style is a colour with its marker and dashes, by number: 0 is the baseline's grey, the others as they come.
type Style int

// tint is a colour on light and on dark ground.
type tint struct{ light, dark string }

// tints are chosen for a contrast of 3 and more on both grounds, and to differ in lightness where red-green blindness
// brings their hues together.
var tints = []tint{
	{"#5b6470", "#aab4c0"}, // baseline: grey
	{"#0068a8", "#58b4f0"}, // blue
	{"#c24e00", "#ff9354"}, // vermilion
	{"#007a56", "#2fcf9c"}, // green
	{"#9c3d82", "#e99bd0"}, // purple
	{"#866000", "#e6bc43"}, // ochre
	{"#2c2f8f", "#a9adff"}, // indigo
	{"#a3123f", "#ff8fab"}, // crimson
	{"#00707f", "#4cc9d9"}, // teal
	{"#6b3a22", "#d8a88f"}, // brown
	{"#3f5a00", "#b4e04a"}, // olive
}

// Grounds and inks.
var (
	ground = tint{"#ffffff", "#14181d"}
	ink    = tint{"#1a1f26", "#e8ecf0"}
	mute   = tint{"#59626d", "#9aa5b1"}
	grid   = tint{"#e4e7eb", "#2b323a"}
	good   = tint{"#007a56", "#2fcf9c"}
	bad    = tint{"#b3261e", "#ff8a80"}
)

var dashes = []string{"", "", "7 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2", "3 2", "14 3 3 3", "6 2 2 2 2 2", "1 4"}

func (s Style) class() string { return "c" + strconv.Itoa(s.index()) }
func (s Style) tint() tint    { return tints[s.index()] }
func (s Style) dash() string  { return dashes[s.index()] }

// index wraps around, past the baseline's.
func (s Style) index() int {
	if i := int(s); i < len(tints) {
		return i
	}
	return 1 + (int(s)-1)%(len(tints)-1)
}

// style is the drawing's style sheet. Drawings share it, so that several on one page agree. Where custom properties
// are not understood, the presentation attributes of each element hold, in light colours.
var style = func() string {
	vars := func(pick func(tint) string) string {
		var b strings.Builder
		for i, t := range tints {
			fmt.Fprintf(&b, "--c%d:%s;", i, pick(t))
		}
		for _, n := range named {
			fmt.Fprintf(&b, "--%s:%s;", n.name, pick(n.tint))
		}
		return b.String()
	}
	var b strings.Builder
	b.WriteString(".flc{" + vars(func(t tint) string { return t.light }) +
		"font-family:Arial,Helvetica,'Liberation Sans',sans-serif}\n")
	b.WriteString("@media screen and (prefers-color-scheme:dark){.flc{" + vars(func(t tint) string { return t.dark }) +
		"}}\n")
	class := func(name string) {
		fmt.Fprintf(&b, ".flc .f-%s{fill:var(--%s)}.flc .s-%s{stroke:var(--%s)}\n", name, name, name, name)
	}
	for i := range tints {
		class("c" + strconv.Itoa(i))
	}
	for _, n := range named {
		class(n.name)
	}
	return b.String()
}()

var named = []struct {
	name string
	tint tint
}{{"ground", ground}, {"ink", ink}, {"mute", mute}, {"grid", grid}, {"good", good}, {"bad", bad}}

// colour is a tint by its class.
type colour struct {
	class string
	tint
}

func of(s Style) colour { return colour{s.class(), s.tint()} }

var (
	cGround = colour{"ground", ground}
	cInk    = colour{"ink", ink}
	cMute   = colour{"mute", mute}
	cGrid   = colour{"grid", grid}
	cGood   = colour{"good", good}
	cBad    = colour{"bad", bad}
)

// canvas collects a drawing.
type canvas struct {
	b     strings.Builder
	texts []box // where text stands, for tests
}

type box struct {
	x0, y0, x1, y1 float64
	text           string
}

// anchor is where a text's x is.
type anchor string

const (
	start  anchor = "start"
	middle anchor = "middle"
	end    anchor = "end"
)

// face is how text looks.
type face struct {
	size   float64
	bold   bool
	italic bool
	halo   bool // in the ground's colour, for text that may stand on lines
	colour colour
}

var (
	titleFace  = face{size: 15, bold: true, colour: cInk}
	subFace    = face{size: 12, colour: cMute}
	tickFace   = face{size: 11.5, colour: cMute}
	axisFace   = face{size: 12, colour: cInk}
	labelFace  = face{size: 12, colour: cInk}
	footFace   = face{size: 10, colour: cMute}
	valueFace  = face{size: 12, halo: true, colour: cInk}
	partFace   = face{size: 10, bold: true, colour: cGround}
	ghostFace  = face{size: 11, italic: true, halo: true, colour: cMute}
	lineHeight = 1.3
)

// px writes a coordinate with one digit, without trailing zeros.
func px(v float64) string {
	s := strconv.FormatFloat(v, 'f', 1, 64)
	s = strings.TrimSuffix(s, ".0")
	if s == "-0" {
		return "0"
	}
	return s
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder can't fail
	return b.String()
}

// text puts a line of text with its base line at y.
func (c *canvas) text(x, y float64, a anchor, f face, s string) {
	if s == "" {
		return
	}
	w := f.width(s)
	x0 := map[anchor]float64{start: x, middle: x - w/2, end: x - w}[a]
	c.texts = append(c.texts, box{x0, y - 0.75*f.size, x0 + w, y + 0.22*f.size, s})
	fmt.Fprintf(&c.b, `<text x="%s" y="%s" font-size="%s"`, px(x), px(y), px(f.size))
	if a != start {
		fmt.Fprintf(&c.b, ` text-anchor="%s"`, a)
	}
	if f.bold {
		c.b.WriteString(` font-weight="bold"`)
	}
	if f.italic {
		c.b.WriteString(` font-style="italic"`)
	}
	class := "f-" + f.colour.class
	if f.halo {
		class += " s-ground"
		fmt.Fprintf(&c.b, ` paint-order="stroke" stroke="%s" stroke-width="4" stroke-linejoin="round"`, ground.light)
	}
	fmt.Fprintf(&c.b, ` class="%s" fill="%s">%s</text>`+"\n", class, f.colour.light, escape(s))
}

// line draws a straight stroke.
func (c *canvas) line(x0, y0, x1, y1, width float64, col colour, more string) {
	fmt.Fprintf(&c.b, `<line x1="%s" y1="%s" x2="%s" y2="%s" stroke-width="%s" class="s-%s" stroke="%s"%s/>`+"\n",
		px(x0), px(y0), px(x1), px(y1), px(width), col.class, col.light, more)
}

// rect fills a rectangle, whatever the order of its corners.
func (c *canvas) rect(x0, y0, x1, y1 float64, col colour, more string) {
	fmt.Fprintf(&c.b, `<rect x="%s" y="%s" width="%s" height="%s" class="f-%s" fill="%s"%s/>`+"\n",
		px(min(x0, x1)), px(min(y0, y1)), px(max(x1-x0, x0-x1)), px(max(y1-y0, y0-y1)), col.class, col.light, more)
}

// path strokes a path.
func (c *canvas) path(d string, width float64, col colour, more string) {
	fmt.Fprintf(&c.b, `<path d="%s" fill="none" stroke-linejoin="round" stroke-width="%s" class="s-%s" stroke="%s"%s/>`+
		"\n",
		d, px(width), col.class, col.light, more)
}

// area fills a path.
func (c *canvas) area(d string, col colour, more string) {
	fmt.Fprintf(&c.b, `<path d="%s" class="f-%s" fill="%s"%s/>`+"\n", d, col.class, col.light, more)
}

func dashed(pattern string) string {
	if pattern == "" {
		return ""
	}
	return ` stroke-dasharray="` + pattern + `"`
}

// marker draws a style's sign, filled, or hollow for what others measured.
func (c *canvas) marker(x, y float64, s Style, hollow bool) {
	const r = 4.2
	col := of(s)
	fill, stroke := col, cGround
	if hollow {
		fill, stroke = cGround, col
	}
	attrs := fmt.Sprintf(` class="f-%s s-%s" fill="%s" stroke="%s" stroke-width="%s"`, fill.class, stroke.class,
		fill.light,
		stroke.light,
		map[bool]string{true: "1.5", false: "1"}[hollow])
	at := func(dx, dy float64) string { return px(x+dx*r) + " " + px(y+dy*r) }
	poly := func(p ...string) { fmt.Fprintf(&c.b, `<path d="M%sZ"%s/>`+"\n", strings.Join(p, "L"), attrs) }
	switch s.index() {
	case 2:
		poly(at(-0.9, -0.9), at(0.9, -0.9), at(0.9, 0.9), at(-0.9, 0.9))
	case 3:
		poly(at(0, -1.15), at(1.1, 0.85), at(-1.1, 0.85))
	case 4:
		poly(at(0, -1.3), at(1.3, 0), at(0, 1.3), at(-1.3, 0))
	case 5:
		poly(at(0, 1.15), at(1.1, -0.85), at(-1.1, -0.85))
	case 6:
		poly(at(-1.2, -0.45), at(-0.45, -0.45), at(-0.45, -1.2), at(0.45, -1.2), at(0.45, -0.45), at(1.2, -0.45),
			at(1.2, 0.45), at(0.45, 0.45), at(0.45, 1.2), at(-0.45, 1.2), at(-0.45, 0.45), at(-1.2, 0.45))
	case 7:
		poly(at(-1.2, -0.6), at(1.2, -0.6), at(1.2, 0.6), at(-1.2, 0.6))
	case 8:
		poly(at(0, -1.2), at(1.15, -0.35), at(0.7, 1), at(-0.7, 1), at(-1.15, -0.35))
	case 9:
		poly(at(-1.1, -1.1), at(1.1, -1.1), at(-1.1, 1.1), at(1.1, 1.1))
	case 10:
		poly(at(-0.6, -1.2), at(0.6, -1.2), at(0.6, 1.2), at(-0.6, 1.2))
	default:
		fmt.Fprintf(&c.b, `<circle cx="%s" cy="%s" r="%s"%s/>`+"\n", px(x), px(y), px(r), attrs)
	}
}

// whisker draws an interval with caps, upright.
func (c *canvas) whisker(x, y0, y1 float64, col colour) {
	c.line(x, y0, x, y1, 1.4, col, "")
	c.line(x-3.5, y0, x+3.5, y0, 1.4, col, "")
	c.line(x-3.5, y1, x+3.5, y1, 1.4, col, "")
}

// svg closes the drawing.
func (c *canvas) svg(f Frame, w, h float64) []byte {
	desc := f.Desc
	if desc == "" {
		desc = f.Sub
	}
	return []byte(fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" class="flc" viewBox="0 0 %s %s" width="%s" height="%s" role="img" aria-labelledby="%s-t %s-d">
<title id="%s-t">%s</title>
<desc id="%s-d">%s</desc>
<style>
%s</style>
<rect width="100%%" height="100%%" class="f-ground" fill="%s"/>
%s</svg>
`, px(w), px(h), px(w), px(h), f.ID, f.ID, f.ID, escape(f.Title), f.ID, escape(desc), style, ground.light, c.b.String()))
}
