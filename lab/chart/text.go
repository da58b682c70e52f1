package chart

import (
	"math"
	"strconv"
	"strings"
)

// widths are those of Helvetica and its metric twins, in thousandths of the size, for the characters from space to
// tilde.
var widths = [...]int16{278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278,
	556, 556, 556, 556, 556, 556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556,
	1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556, 833, 722, 778,
	667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556,
	333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556,
	556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584}

// width estimates how wide a text is in px, a little generously, since the reader's font is not known.
func (f face) width(s string) float64 {
	sum := 0.0
	for _, r := range s {
		switch {
		case r >= ' ' && r <= '~':
			sum += float64(widths[r-' '])
		case r == '·' || r == '\u202f' || r == '\u00a0':
			sum += 278
		case r > 0x2000 && r != '–' && r != '’':
			sum += 900 // arrows, checks and the like
		default:
			sum += 590
		}
	}
	if f.bold {
		sum *= 1.07
	}
	return sum * f.size / 1000 * 1.03
}

// sticky words stay on a line with the word before them, or behind them: numbers keep their signs and units.
var (
	stickyBefore = map[string]bool{"%": true, "×": true, "µs": true, "ms": true, "s": true, "MiB": true, "–": true,
		"/": true}
	stickyAfter = map[string]bool{"≤": true, "≥": true, "×": true, "±": true, "n": true, "=": true}
)

// words splits a text where a line may end.
func words(s string) (out []string) {
	glue := false
	for _, w := range strings.Fields(s) {
		if n := len(out); n > 0 && (glue || stickyBefore[w]) {
			out[n-1] += " " + w
		} else {
			out = append(out, w)
		}
		glue = stickyAfter[w]
	}
	return out
}

// widest is by how much DejaVu Sans Bold is wider than width says: the sans-serif of many a machine that has none of
// the named fonts.
const widest = 1.17

// wrap breaks a text into lines no wider than w in any font, at spaces. A word that is wider stands alone.
func (f face) wrap(s string, w float64) (lines []string) {
	line := ""
	for _, word := range words(s) {
		switch {
		case line == "":
			line = word
		case f.width(line+" "+word)*widest <= w:
			line += " " + word
		default:
			lines = append(lines, line)
			line = word
		}
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

// Number writes v for people: three significant digits, thousands apart, no exponent: 0.00123, 1.23, 12.3, 123, 12,345.
func Number(v float64) string {
	if v == 0 {
		return "0"
	}
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return "–"
	}
	digits := min(max(2-int(math.Floor(math.Log10(math.Abs(v)))), 0), 9)
	// Rounding may add a digit: 9.996 is 10.0, not 10.00.
	if r, err := strconv.ParseFloat(strconv.FormatFloat(v, 'f', digits, 64), 64); err == nil && r != 0 {
		digits = min(max(2-int(math.Floor(math.Log10(math.Abs(r)))), 0), 9)
	}
	return group(strconv.FormatFloat(v, 'f', digits, 64))
}

// tickNumber is Number without trailing zeros, for round values.
func tickNumber(v float64) string {
	if math.Abs(v) < 1e-12 {
		return "0"
	}
	return group(strconv.FormatFloat(math.Round(v*1e9)/1e9, 'f', -1, 64))
}

// tickLabels writes an axis' marks, "" for the minor ones: with equally many digits where they stand at equal
// distances, so that 1 is 1.00 beside 1.05.
func tickLabels(ticks []tick, log bool, suffix string) (labels []string) {
	digits := 0
	for _, t := range ticks {
		_, part, _ := strings.Cut(tickNumber(t.v), ".")
		digits = max(digits, len(part))
	}
	for _, t := range ticks {
		switch {
		case t.minor:
			labels = append(labels, "")
		case log || t.v == 0:
			labels = append(labels, tickNumber(t.v)+suffix)
		default:
			labels = append(labels, group(strconv.FormatFloat(t.v, 'f', digits, 64))+suffix)
		}
	}
	return labels
}

// group puts a comma between thousands.
func group(s string) string {
	sign := ""
	if strings.HasPrefix(s, "-") {
		sign, s = "−", s[1:]
	}
	whole, part, found := strings.Cut(s, ".")
	var b strings.Builder
	for i, d := range whole {
		if i > 0 && (len(whole)-i)%3 == 0 {
			b.WriteByte(',')
		}
		b.WriteRune(d)
	}
	if found {
		b.WriteString("." + part)
	}
	return sign + b.String()
}
