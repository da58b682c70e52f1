package chart

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestDrawingsAreWellFormed(t *testing.T) {
	for name, d := range drawings() {
		svg := d.plot().done()
		if !bytes.Equal(svg, d.plot().done()) {
			t.Errorf("%s: not the same twice", name)
		}
		seen := map[string]int{}
		text := ""
		dec := xml.NewDecoder(bytes.NewReader(svg))
		for {
			tok, err := dec.Token()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			switch tok := tok.(type) {
			case xml.StartElement:
				seen[tok.Name.Local]++
				for _, a := range tok.Attr {
					if strings.Contains(a.Value, "NaN") || strings.Contains(a.Value, "Inf") || a.Name.Local == "href" ||
						a.Name.Local == "src" {
						t.Errorf("%s: %s has %s=%q", name, tok.Name.Local, a.Name.Local, a.Value)
					}
				}
			case xml.CharData:
				text += string(tok) + "\n"
			}
		}
		if seen["title"] != 1 || seen["desc"] != 1 || seen["style"] != 1 || seen["script"] != 0 {
			t.Errorf("%s: elements %v", name, seen)
		}
		if f := d.plot().frame; !strings.Contains(strings.ReplaceAll(text, "\n", " "), strings.Fields(f.Footer)[0]) {
			t.Errorf("%s: no footer", name)
		}
	}
}

// Text must stand inside the drawing and never on other text, by an estimate of its width that is a little generous.
func TestTextDoesNotOverlap(t *testing.T) {
	for name, d := range drawings() {
		p := d.plot()
		for i, a := range p.texts {
			if a.x0 < 0 || a.y0 < 0 || a.x1 > p.w || a.y1 > p.h {
				t.Errorf("%s: %q leaves the drawing: %.0f,%.0f to %.0f,%.0f of %.0f×%.0f", name, a.text, a.x0, a.y0, a.x1, a.y1,
					p.w, p.h)
			}
			for _, b := range p.texts[:i] {
				if a.x0 < b.x1 && b.x0 < a.x1 && a.y0 < b.y1 && b.y0 < a.y1 {
					t.Errorf("%s: %q stands on %q", name, a.text, b.text)
				}
			}
		}
	}
}

// Data must stay inside its rectangle: lines, bars and markers of the samples do not reach into the labels.
func TestMarksAreWhereTheValuesAre(t *testing.T) {
	c := Line{Frame: Frame{ID: "x"}, X: Axis{Log: true}, Y: Axis{Zero: true},
		Series: []Series{{Name: "a", Style: 1, Points: []Point{{1, 10, 9, 12}, {100, 20, 20, 20}}}}}
	p := c.plot(c.Frame)
	if x := p.x.at(10); math.Abs(x-(p.x.at(1)+p.x.at(100))/2) > 1e-9 {
		t.Errorf("10 is not in the middle between 1 and 100: %v", x)
	}
	if p.y.at(0) != p.bottom || p.y.at(20) > p.y.at(10) || p.y.at(20) < p.top {
		t.Errorf("0 at %v, 10 at %v, 20 at %v, between %v and %v", p.y.at(0), p.y.at(10), p.y.at(20), p.bottom, p.top)
	}
	svg := string(p.done())
	for _, q := range c.Series[0].Points {
		want := fmt.Sprintf(`<circle cx="%s" cy="%s"`, px(p.x.at(q.X)), px(p.y.at(q.Y)))
		if !strings.Contains(svg, want) {
			t.Errorf("no marker %s", want)
		}
	}
	whisker := fmt.Sprintf(`<line x1="%[1]s" y1="%[2]s" x2="%[1]s" y2="%[3]s"`, px(p.x.at(1)), px(p.y.at(9)),
		px(p.y.at(12)))
	if !strings.Contains(svg, whisker) {
		t.Errorf("no whisker %s", whisker)
	}
}

func TestBarsAreAsLongAsTheirValues(t *testing.T) {
	c := Bars{Frame: Frame{ID: "x"}, Bars: []Bar{{Name: "a", Style: 1, Parts: []float64{30}},
		{Name: "b", Style: 1, Parts: []float64{10, 5}}}}
	var got []float64
	for _, m := range regexp.MustCompile(`<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)" height="[\d.]+" class="f-c1"`).
		FindAllStringSubmatch(string(SVG(c)), -1) {
		w, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, w)
	}
	if len(got) != 3 || math.Abs(got[0]/got[1]-3) > 0.01 || math.Abs(got[0]/got[2]-6) > 0.02 {
		t.Errorf("widths %v, want 6 : 2 : 1", got)
	}
}

func TestForestTurnsLowerBoundsAround(t *testing.T) {
	v, lo, hi := Claim{Value: 4, Low: 2, High: 8, Least: true}.oriented()
	if v != 0.25 || lo != 0.125 || hi != 0.5 {
		t.Errorf("%v from %v to %v", v, lo, hi)
	}
	p := Forest{Claims: []Claim{{ID: "a", Value: 1e9, Low: 1e8, High: 1e10, Outcome: Broken}}}.plot(Frame{})
	if x := p.x.clamp(1e9); x > p.right {
		t.Errorf("a claim at %v leaves the axis that ends at %v", x, p.right)
	}
}

func TestHistogramShares(t *testing.T) {
	s := Counts{Bins: []Bin{{1, 2, 1}, {2, 4, 2}, {10, 10, 1}}}
	got := s.shares(scale{lo: 1, hi: 10, a: 0, b: columns})
	if sum := total(got); math.Abs(sum-100) > 1e-9 {
		t.Errorf("the shares make %v", sum)
	}
	if first := total(got[:7]); math.Abs(first-25) > 1 { // 1 to 2 is a ninth of 64 columns
		t.Errorf("the first ninth holds %v %%, want about 25", first)
	}
	if last := got[columns-1]; last != 25 {
		t.Errorf("the last column holds %v %%, want 25", last)
	}
	h := Histogram{Sets: []Counts{{Name: "a", Bins: []Bin{{1, 2, 998}, {2, 3, 1}, {50, 60, 1}}}}}
	if lo, hi, words := h.reach(); lo != 1 || hi != 2 || !strings.Contains(words, "a: 0.2 % beyond") {
		t.Errorf("reach %v to %v, %q", lo, hi, words)
	}
}

func total(v []float64) (sum float64) {
	for _, x := range v {
		sum += x
	}
	return sum
}

func TestTicks(t *testing.T) {
	for _, c := range []struct {
		s    scale
		n    int
		want []float64
	}{
		{scale{lo: 0, hi: 70}, 4, []float64{0, 20, 40, 60}},
		{scale{lo: 0.93, hi: 1.12}, 4, []float64{0.95, 1, 1.05, 1.1}},
		{scale{lo: 1, hi: 10000, log: true}, 5, []float64{1, 10, 100, 1000, 10000}},
		{scale{lo: 3, hi: 60, log: true}, 5, []float64{5, 10, 20, 50}},
		{scale{lo: 60, hi: 90, log: true}, 3, []float64{60, 70, 80, 90}},
		{scale{lo: 1e-3, hi: 1e9, log: true}, 3, []float64{1e-3, 1, 1e3, 1e6, 1e9}},
	} {
		var got []float64
		for _, k := range c.s.ticks(c.n) {
			if !k.minor {
				got = append(got, math.Round(k.v*1e9)/1e9)
			}
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%+v: -want +got\n%s", c.s, d)
		}
	}
	if d := cmp.Diff([]string{"0.95", "1.00", "", "1.05"},
		tickLabels([]tick{{v: 0.95}, {v: 1}, {v: 1.02, minor: true}, {v: 1.05}}, false, "")); d != "" {
		t.Errorf("labels: -want +got\n%s", d)
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.00123: "0.00123", 1.234: "1.23", 9.996: "10.0", 12.34: "12.3", 99.96: "100", 123.4: "123", 1234.5: "1,234",
		14300:   "14,300",
		1234567: "1,234,567", -5.5: "−5.50", math.NaN(): "–", math.Inf(1): "–", 1e-12: "0.000000000",
	} {
		if got := Number(v); got != want {
			t.Errorf("%v is %q, want %q", v, got, want)
		}
	}
}

func TestWrap(t *testing.T) {
	got := labelFace.wrap("one endpoint change takes at most ≤ 0.3 ms and ± 2 % more", 90)
	for _, l := range got {
		if strings.HasPrefix(l, "ms") || strings.HasPrefix(l, "%") || strings.HasSuffix(l, "≤") || strings.HasSuffix(l, "±") {
			t.Errorf("%q parts a number from its sign or unit", got)
		}
	}
	if len(got) < 3 || strings.Join(got, " ") != "one endpoint change takes at most ≤ 0.3 ms and ± 2 % more" {
		t.Errorf("lines %q", got)
	}
}

func TestApart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.SliceOfN(rapid.Float64Range(0, 200), 1, 12).Draw(t, "want")
		slices.Sort(want)
		got := apart(want, 15, 0, 200)
		if len(got) != len(want) {
			t.Fatalf("%d of %d", len(got), len(want))
		}
		for i := range got {
			if i > 0 && got[i]-got[i-1] < 15-1e-9 {
				t.Fatalf("%v stand too near: %v", want, got)
			}
			if got[i] < -1e-9 || len(got) <= 13 && got[i] > 200+1e-9 {
				t.Fatalf("%v leaves the range: %v", want, got)
			}
		}
	})
	if got := apart([]float64{10, 100}, 15, 0, 200); got[0] != 10 || got[1] != 100 {
		t.Errorf("what stands apart was moved: %v", got)
	}
}

// luminance is WCAG's relative luminance of "#rrggbb".
func luminance(hex string) float64 {
	n, err := strconv.ParseUint(hex[1:], 16, 32)
	if err != nil {
		panic(err)
	}
	sum := 0.0
	for i, w := range []float64{0.0722, 0.7152, 0.2126} {
		v := float64(n>>(8*i)&255) / 255
		if v <= 0.04045 {
			v /= 12.92
		} else {
			v = math.Pow((v+0.055)/1.055, 2.4)
		}
		sum += w * v
	}
	return sum
}

func contrast(a, b string) float64 {
	x, y := luminance(a), luminance(b)
	return (max(x, y) + 0.05) / (min(x, y) + 0.05)
}

// WCAG 2.2 asks for 3 for graphics (1.4.11) and 4.5 for text (1.4.3).
func TestContrast(t *testing.T) {
	least := map[string]float64{}
	for i := range tints {
		least[Style(i).class()] = 3
	}
	for _, n := range []string{"ink", "mute", "good", "bad"} {
		least[n] = 4.5
	}
	check := func(name string, c tint) {
		if l, d := contrast(c.light, ground.light), contrast(c.dark, ground.dark); l < least[name] || d < least[name] {
			t.Errorf("%s: contrast %.1f light, %.1f dark; want %.1f", name, l, d, least[name])
		}
	}
	for i := range tints {
		check(Style(i).class(), Style(i).tint())
	}
	for _, n := range named {
		if least[n.name] > 0 {
			check(n.name, n.tint)
		}
	}
}

func TestStylesNeverDifferByColourAlone(t *testing.T) {
	seen := map[string]Style{}
	for s := Style(1); int(s) < len(tints); s++ {
		var c canvas
		c.marker(0, 0, s, false)
		shape := regexp.MustCompile(`(class|fill|stroke)="[^"]*"`).ReplaceAllString(c.b.String(), "") + s.dash()
		if other, ok := seen[shape]; ok {
			t.Errorf("styles %d and %d have the same marker and dashes", other, s)
		}
		seen[shape] = s
	}
	if n := len(tints); Style(n).index() != 1 || Style(2*n-2).index() != n-1 {
		t.Error("styles beyond the last don't wrap around")
	}
}
