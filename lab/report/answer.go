package report

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/chart"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// answerWords returns a sentence on each finding of a run's answer.
func answerWords(s analysis.Summary) (l []string) {
	for _, f := range s.Answer.Findings {
		if f.Tally != "" {
			l = append(l, tallyWords(s, f))
			continue
		}
		l = append(l, findingWords(s, f))
	}
	return l
}

// findingWords returns "Against direct, a connection takes 25.1 % more time with nftables (95 % interval 24.2–26.6 %);
// the same with ebpf: no measurable difference (0.997–1.008 ×, within ±2 %)."
func findingWords(s analysis.Summary, f analysis.Found) string {
	subject := f.Subject
	if len(f.Numbers) == 0 {
		return upper(subject) + ": not measured in this run."
	}
	if f.Compared() {
		subject = "against " + cmp.Or(f.Against, s.Design.ArmTitle(s.Design.Baseline)) + ", " + subject
	}
	if x, ok := f.Numbers[0].Params[s.Design.Vary.Param]; ok && s.Design.Answer == nil { // else the subject has it
		subject += fmt.Sprintf(" at %s %s", number(x), s.Design.Vary.Short)
	}
	if f.Verb != "" {
		subject += " " + f.Verb
	}
	var l []string
	explained := false // why a number is unclear: once is enough
	for i, n := range f.Numbers {
		object, with := "", ""
		if i == 0 {
			object = f.Object
		}
		if f.Over == nil || f.Over.Arm != "" || len(f.Numbers) > 1 { // else the subject has it
			with = " with " + s.Design.ArmTitle(n.Arm)
		}
		if f.Compared() {
			text, why, _ := strings.Cut(comparedWords(n, object, with, i == 0), because)
			if why != "" && !explained {
				text, explained = text+because+why, true
			}
			l = append(l, text)
		} else {
			l = append(l, valueWords(s, f, n, with, i == 0))
		}
	}
	return upper(subject) + " " + strings.Join(l, "; ") + "."
}

// because begins the reason of an unclear number.
const because = ", since this run resolves "

// comparedWords returns what a ratio says of a cell.
func comparedWords(n analysis.Number, object, with string, first bool) string {
	e := n.Got
	of := map[bool]string{true: " the " + object}[object != ""]
	more := map[bool]string{true: " " + object}[object != ""]
	label := map[bool]string{true: "95 % interval "}[first]
	bounds := func(words string) string { // nothing of what is counted
		if e.CI.Low == e.CI.High {
			return ""
		}
		return fmt.Sprintf(" (%s%s)", label, words)
	}
	switch {
	case !e.Sure:
		return fmt.Sprintf("about %s ×%s%s, from too few rounds to be sure", ratio(e.Value), of, with)
	case n.Verdict == stats.Same && e.CI.Low == e.CI.High && e.Value == 1:
		return fmt.Sprintf("exactly the same%s%s", more, with)
	case n.Verdict == stats.Same && e.CI.Contains(1):
		return fmt.Sprintf("the same%s%s: no measurable difference (%s ×, within %s)", more, with, ratios(e.CI),
			plusMinus(n.Margin))
	case n.Verdict == stats.Unclear:
		return fmt.Sprintf("between %s and %s ×%s%s: unclear%s%s", ratio(e.CI.Low), ratio(e.CI.High), of, with, because,
			plusMinus(max(n.Margin, n.Resolution)))
	}
	within := map[bool]string{true: ", which lies within the margin of " + plusMinus(n.Margin)}[n.Verdict == stats.Same]
	switch {
	case e.Value >= 2 || e.Value <= 0.5:
		return fmt.Sprintf("%s ×%s%s%s%s", ratio(e.Value), of, with, bounds(ratios(e.CI)), within)
	case e.Value >= 1:
		return fmt.Sprintf("%s more%s%s%s%s", share(e.Value-1), more, with,
			bounds(shares(stats.Interval{Low: e.CI.Low - 1, High: e.CI.High - 1})), within)
	}
	return fmt.Sprintf("%s less%s%s%s%s", share(1-e.Value), more, with,
		bounds(shares(stats.Interval{Low: 1 - e.CI.High, High: 1 - e.CI.Low})), within)
}

// valueWords returns "110 µs with nftables (105–115)".
func valueWords(s analysis.Summary, f analysis.Found, n analysis.Number, with string, first bool) string {
	m, _ := s.Design.Measure(n.Measure)
	text := amount(n.Got.Value, m.Unit)
	if m.Exact && m.Unit == "" {
		text = chart.Number(n.Got.Value)
		if n.Got.Value == math.Trunc(n.Got.Value) {
			text = group(fmt.Sprintf("%.0f", n.Got.Value))
		}
	}
	if first && f.Object != "" {
		text += " " + f.Object
	}
	text += with
	switch {
	case n.Got.CI.Low == n.Got.CI.High:
	case n.Got.Sure:
		text += fmt.Sprintf(" (%s%s)", map[bool]string{true: "95 % interval "}[first], between(n.Got.CI, m.Unit))
	default:
		text += fmt.Sprintf(" (seen: %s, too few to bound it)", between(n.Got.CI, m.Unit))
	}
	return text
}

// share returns "25.1 %" for 0.251.
func share(v float64) string { return strings.TrimPrefix(percent(1+v), "+") }

// shares returns "24.2–26.6 %".
func shares(i stats.Interval) string {
	return strings.TrimSuffix(share(i.Low), " %") + "–" + share(i.High)
}

// mostNamed is how many aims a sentence names.
const mostNamed = 4

// tallyWords returns "Of 23 claims 9 are confirmed, 2 refuted (C4, average; C9) and 12 inconclusive."
func tallyWords(s analysis.Summary, f analysis.Found) string {
	claims := f.Tally == result.TallyClaims
	l := chosen(s, claims)
	if len(l) == 0 {
		return "This design has no " + strings.ToLower(kind(claims)) + "."
	}
	var missed []string
	for _, a := range l {
		if a.Outcome == analysis.Miss || a.Outcome == analysis.Refuted {
			missed = append(missed, a.ID)
		}
	}
	text := fmt.Sprintf("Of %s: ", plural(len(l), strings.ToLower(strings.TrimSuffix(kind(claims), "s"))))
	if f.Subject != "" {
		text = upper(f.Subject) + ": of " + text[len("Of "):]
	}
	text += tally(s, claims)
	word := map[bool]string{true: "refuted", false: "missed"}[claims]
	switch n := len(missed); {
	case n > mostNamed:
		text += fmt.Sprintf("; %s: %s and %d more", word, strings.Join(missed[:mostNamed], "; "), n-mostNamed)
	case n > 0:
		text += "; " + word + ": " + strings.Join(missed, "; ")
	}
	return text + "."
}

// upper returns text with a capital at its beginning.
func upper(s string) string {
	r, n := utf8.DecodeRuneInString(s)
	if n == 0 {
		return s
	}
	return strings.ToUpper(string(r)) + s[n:]
}

// opening splits a run's charts into the one that shows the answer and the others.
func opening(s analysis.Summary, charts []drawn) (first, others []drawn) {
	if len(charts) == 0 {
		return nil, nil
	}
	at := -1
	for _, name := range []string{s.Answer.Chart + "-ratio", s.Answer.Chart} {
		if at < 0 {
			at = slices.IndexFunc(charts, func(c drawn) bool { return c.Name == name })
		}
	}
	if at < 0 {
		at = max(0, slices.IndexFunc(charts, func(c drawn) bool { return c.Kind == s.Answer.Chart }))
	}
	others = slices.Delete(slices.Clone(charts), at, at+1)
	for i := range others {
		if others[i].Kind != wide { // these fit
			others[i].narrow = nil
		}
	}
	return charts[at : at+1], others
}

// caution returns what a reader of the answer must know of the run, "" for a quiet and whole one.
func caution(s analysis.Summary) string {
	switch {
	case len(s.Warnings) > 0 && s.Noise.Noisy:
		return "Caution: this is not a whole, clean run, and it was noisy; see below."
	case len(s.Warnings) > 0:
		return "Caution: this is not a whole, clean run; see below."
	case s.Noise.Noisy:
		return "Caution: this run was noisy; see below."
	}
	return ""
}

// termAnswer writes the answer for a terminal: its sentences, and the numbers of its first finding as bars.
func termAnswer(w io.Writer, s analysis.Summary, width int) {
	io.WriteString(w, wrapped(s.Design.Title, width))
	for _, line := range answerWords(s) {
		fmt.Fprintf(w, "\n%s", wrapped(line, width))
	}
	if c := caution(s); c != "" {
		fmt.Fprintf(w, "\n%s", wrapped(c, width))
	}
	bars := func(f analysis.Found) int { // with the one that they are compared with
		return len(f.Numbers) + map[bool]int{true: 1}[f.Compared() && len(f.Numbers) > 0]
	}
	i := slices.IndexFunc(s.Answer.Findings, func(f analysis.Found) bool { return bars(f) > 1 })
	if i < 0 {
		i = slices.IndexFunc(s.Answer.Findings, func(f analysis.Found) bool { return bars(f) > 0 })
	}
	if i < 0 {
		return
	}
	f := s.Answer.Findings[i]
	var rows []Bar
	if f.Compared() {
		rows = append(rows, Bar{cmp.Or(f.Against, s.Design.ArmTitle(s.Design.Baseline)), "1", 1})
	}
	for _, n := range f.Numbers {
		m, _ := s.Design.Measure(n.Measure)
		text := amount(n.Got.Value, m.Unit)
		if f.Compared() {
			text = ratio(n.Got.Value) + " ×"
		}
		rows = append(rows, Bar{s.Design.ArmTitle(n.Arm), text, n.Got.Value})
	}
	fmt.Fprintf(w, "\n%s", Bars(rows, width))
}

// Bar is a number by name, and as people read it.
type Bar struct {
	Name, Text string
	Value      float64
}

// Bars draws bars from 0 for a terminal, each in a line of so many columns at most.
func Bars(rows []Bar, width int) string {
	names, texts, most := 0, 0, 0.0
	for _, r := range rows {
		names, texts = max(names, utf8.RuneCountInString(r.Name)), max(texts, utf8.RuneCountInString(r.Text))
		most = max(most, r.Value)
	}
	space := min(60, width-names-texts-6)
	if space < 8 || most <= 0 {
		space = 0
	}
	var b strings.Builder
	for _, r := range rows {
		line := ""
		if space > 0 {
			eighths := int(math.Round(max(0, r.Value) / most * float64(8*space)))
			line = strings.Repeat("█", eighths/8) + strings.TrimSpace(string([]rune(" ▏▎▍▌▋▊▉")[eighths%8]))
		}
		fmt.Fprintf(&b, "%s\n", strings.TrimRight(fmt.Sprintf("  %-*s  %*s  %s", names, r.Name, texts, r.Text, line), " "))
	}
	return b.String()
}

// stuck stands for a space at which no line may end: numbers keep their signs and units.
const stuck = "\x00"

var signs = strings.NewReplacer(" %", stuck+"%", " ×", stuck+"×", " µs", stuck+"µs", " ms", stuck+"ms")

// wrapped returns text in lines of at most so many columns.
func wrapped(text string, width int) string {
	var b strings.Builder
	column := 0
	for _, word := range strings.Fields(signs.Replace(text)) {
		word = strings.ReplaceAll(word, stuck, " ")
		n := utf8.RuneCountInString(word)
		switch {
		case column > 0 && column+1+n > width:
			b.WriteString("\n")
			column = 0
		case column > 0:
			b.WriteString(" ")
			column++
		}
		b.WriteString(word)
		column += n
	}
	return b.String() + "\n"
}
