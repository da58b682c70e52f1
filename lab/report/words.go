package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// units are how many base units stand in the units that people read.
var units = map[string]float64{"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9, "Gbit/s": 1.25e8, "ns/B": 1, "ms/Gbit": 0.008,
	"kB": 1e3, "kB/s": 1e3, "KiB": 1 << 10,
	"MiB": 1 << 20, "%": 0.01, "": 1}

// in converts to a unit; one that is not known stands for itself.
func in(v float64, unit string) float64 {
	if f, ok := units[unit]; ok {
		return v / f
	}
	return v
}

// amount returns "61.0 µs".
func amount(v float64, unit string) string {
	return strings.TrimSpace(chart.Number(in(v, unit)) + " " + unit)
}

// between returns "60.6–61.4", without the unit.
func between(i stats.Interval, unit string) string {
	return chart.Number(in(i.Low, unit)) + "–" + chart.Number(in(i.High, unit))
}

// ratio returns "1.068".
func ratio(v float64) string {
	if v >= 10 {
		return chart.Number(v)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

// ratios returns "1.062–1.073".
func ratios(i stats.Interval) string { return ratio(i.Low) + "–" + ratio(i.High) }

// percent returns "+6.8 %" for 1.068.
func percent(r float64) string {
	sign, v := "+", 100*(r-1)
	if v < 0 {
		sign, v = "−", -v
	}
	digits := 1
	if v >= 99.95 {
		digits = 0
	} else if v < 0.95 {
		digits = 2
	}
	return sign + strconv.FormatFloat(v, 'f', digits, 64) + " %"
}

// plusMinus returns "±0.6 %" for 0.006.
func plusMinus(v float64) string {
	s := strconv.FormatFloat(100*v, 'f', 2, 64)
	if v >= 0.00095 {
		s = strconv.FormatFloat(100*v, 'f', 1, 64)
	}
	return "±" + strings.TrimSuffix(s, ".0") + " %"
}

// verdict returns in two or three words what a ratio means.
func verdict(c analysis.Cell) string {
	if c.Ratio == nil {
		return ""
	}
	switch {
	case !c.Ratio.Sure:
		return "too few rounds"
	case c.Verdict == stats.Same && c.Ratio.CI.Contains(1):
		return "no difference"
	case c.Verdict == stats.Same:
		return percent(c.Ratio.Value) + ", in margin"
	case c.Verdict == stats.Unclear:
		return "unclear"
	}
	return percent(c.Ratio.Value)
}

// says is an aim's number and bound in their own unit: "0.84 s of ≤ 0.4 s".
func says(a analysis.AimResult, d result.Design) string {
	if a.Got == nil {
		return string(a.Outcome)
	}
	return quantity(a.Aim, d, a.Got.Value) + " of " + limit(a.Aim, d)
}

// limit returns "≤ 0.4 s", or "1 × ±2 %".
func limit(a result.Aim, d result.Design) string {
	switch {
	case a.Cannot != "":
		return ""
	case a.Margin > 0:
		return bound(a, d) + " " + plusMinus(a.Margin)
	}
	return sign(a) + " " + bound(a, d)
}

func sign(a result.Aim) string {
	if a.Least {
		return "≥"
	}
	return "≤"
}

// bound writes an aim's bound as it is, not rounded.
func bound(a result.Aim, d result.Design) string {
	v, unit := a.Bound, aimUnit(a, d)
	switch unit {
	case "×":
	case "failed":
		unit = ""
	default:
		v = in(v, unit)
	}
	return strings.TrimSpace(number(strconv.FormatFloat(math.Round(v*1e9)/1e9, 'f', -1, 64)) + " " + unit)
}

// aimUnit is the unit of an aim's number: "×" for a ratio.
func aimUnit(a result.Aim, d result.Design) string {
	m, _ := d.Measure(a.Measure)
	switch {
	case a.Over != nil || a.Across != "" || a.Of == result.Ratio:
		return "×"
	case a.Of == result.Failed:
		return "failed"
	case a.Of == result.Fit:
		return ""
	}
	return m.Unit
}

func quantity(a result.Aim, d result.Design, v float64) string {
	switch unit := aimUnit(a, d); unit {
	case "×":
		return ratio(v) + " ×"
	default:
		return amount(v, unit)
	}
}

// span returns "3 min 20 s".
func span(d time.Duration) string {
	d = d.Round(time.Second)
	h, m, s := d/time.Hour, d%time.Hour/time.Minute, d%time.Minute/time.Second
	switch {
	case h > 0:
		return fmt.Sprintf("%d h %d min", h, m)
	case m > 0:
		return fmt.Sprintf("%d min %d s", m, s)
	}
	return fmt.Sprintf("%d s", s)
}

// number writes a parameter's value for people: 10,000 for "10000".
func number(s string) string {
	if v, err := strconv.ParseFloat(s, 64); err == nil && v == math.Trunc(v) && math.Abs(v) < 1e15 {
		return group(strconv.FormatFloat(v, 'f', 0, 64))
	}
	return s
}

// group puts commas between thousands of a whole number.
func group(s string) string {
	if n := len(s); n > 3 {
		return group(s[:n-3]) + "," + s[n-3:]
	}
	return s
}

// plural returns "1 round", "21 rounds".
func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return group(strconv.Itoa(n)) + " " + word + "s"
}

// shell quotes a command's words where a shell needs it.
func shell(command []string) string {
	var b []string
	for _, w := range command {
		if w == "" || strings.ContainsAny(w, " \t\n'\"\\$&|;<>()*?[]#~`!{}") {
			w = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
		b = append(b, w)
	}
	return strings.Join(b, " ")
}
