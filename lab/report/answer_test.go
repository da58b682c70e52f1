package report

import (
	"bytes"
	"html"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

func TestComparedWords(t *testing.T) {
	of := func(v stats.Verdict, low, value, high float64, sure bool) analysis.Number {
		return analysis.Number{Verdict: v, Margin: 0.02, Resolution: 0.01,
			Got: stats.Estimate{Value: value, CI: stats.Interval{Low: low, High: high}, Sure: sure}}
	}
	for want, n := range map[string]analysis.Number{
		"25.1 % more time with x (95 % interval 24.2–26.6 %)": of(stats.Higher, 1.242, 1.251, 1.266, true),
		"10.0 % less time with x (95 % interval 8.0–12.0 %)":  of(stats.Lower, 0.88, 0.9, 0.92, true),
		"2.700 × the time with x (95 % interval 2.600–2.800)": of(stats.Higher, 2.6, 2.7, 2.8, true),
		"0.300 × the time with x (95 % interval 0.200–0.400)": of(stats.Lower, 0.2, 0.3, 0.4, true),
		"the same time with x: no measurable difference (0.997–1.008 ×, within ±2 %)": of(stats.Same, 0.997, 1, 1.008,
			true),
		"1.2 % more time with x (95 % interval 0.50–1.9 %), which lies within the margin of ±2 %": of(stats.Same, 1.005,
			1.012, 1.019, true),
		"between 0.950 and 1.050 × the time with x: unclear, since this run resolves ±2 %": of(stats.Unclear, 0.95, 1, 1.05,
			true),
		"about 1.300 × the time with x, from too few rounds to be sure": of(stats.Unclear, 1, 1.3, 1.5, false),
		"exactly the same time with x":                                  of(stats.Same, 1, 1, 1, true),
	} {
		if got := comparedWords(n, "time", " with x", true); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := comparedWords(of(stats.Higher, 1.06, 1.07, 1.08, true), "", " with y", false); got !=
		"7.0 % more with y (6.0–8.0 %)" {
		t.Errorf("a second number: %q", got)
	}
}

// crrAnswer is a design's answer of every kind of finding.
func crrAnswer() *result.Answer {
	at := func(n string) result.Params { return result.Params{"services": n} }
	return &result.Answer{Chart: "crr", Findings: []result.Finding{
		{Subject: "a connection to one of 10,000 Services", Verb: "takes", Object: "time", Of: result.Ratio,
			Cells: []result.CellRef{{Measure: "crr", Arm: "nftables", Params: at("10000")}, {Measure: "crr", Arm: "ebpf"}}},
		{Subject: "one to one of 10,000", Verb: "takes", Object: "time", Of: result.Value, Against: "one of 10",
			Over:  &result.CellRef{Params: at("10")},
			Cells: []result.CellRef{{Measure: "crr", Arm: "nftables", Params: at("10000")}}},
		{Subject: "the whole", Tally: result.TallyAims},
	}}
}

// The sentences come out of the run: what a design names and the run lacks is left out, and said where nothing is left.
func TestAnswerOfDesign(t *testing.T) {
	edit := func(m *result.Manifest) { m.Design.Answer = crrAnswer() }
	_, s := summaryOf(t, madeUp(t, 21, edit))
	l := answerWords(s)
	for i, want := range []string{"Against direct, a connection to one of 10,000 Services takes 15.",
		"Against one of 10, one to one of 10,000 takes 0.76 % more time (95 % interval 0.20–1.5 %), which",
		"The whole: of 8 aims: 5 hit, 1 miss, 1 unclear, 1 not measured; missed: S1."} {
		if !strings.HasPrefix(l[i], want) {
			t.Errorf("%q, want %q", l[i], want)
		}
	}
	if strings.Contains(l[0], "ebpf") {
		t.Errorf("%q is of an arm that was not measured", l[0])
	}
	_, s = summaryOf(t, madeUp(t, 0, edit))
	if l := answerWords(s); l[0] != "A connection to one of 10,000 Services: not measured in this run." {
		t.Errorf("of a run without blocks: %q", l)
	}
}

// summaryOf reads a run and summarizes it.
func summaryOf(t *testing.T, dir string) (result.Run, analysis.Summary) {
	t.Helper()
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := analysis.Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	return r, s
}

// Reports open with three sentences and one chart, which stands nowhere else, before any table.
func TestReportsOpenWithTheAnswer(t *testing.T) {
	for name, dir := range map[string]string{"few arms": madeUp(t, 21, func(m *result.Manifest) {
		m.Design.Answer = crrAnswer()
	}), "many arms": madeUpModes(t), "an earlier design": madeUp(t, 6, nil),
		"an earlier program": earlierRun(t), "nothing measured": madeUp(t, 0, nil)} {
		h, md := reports(t, dir)
		_, s := summaryOf(t, dir)
		if n := len(s.Answer.Findings); n == 0 || n > 3 {
			t.Errorf("%s: %d findings", name, n)
		}
		for _, sentence := range answerWords(s) {
			for of, text := range map[string]string{"HTML": html.UnescapeString(h), "Markdown": md} {
				if of == "Markdown" {
					sentence = escape(sentence)
				}
				at := strings.Index(text, sentence)
				table := max(strings.Index(text, "<table"), strings.Index(text, "| --"))
				if at < 0 || table >= 0 && at > table {
					t.Errorf("%s: %s doesn't open with %q", name, of, sentence)
				}
			}
		}
		body := h[strings.Index(h, "<body>"):]
		if svg, table := strings.Index(body, "<svg"), strings.Index(body, "<table"); svg < 0 || table < svg {
			t.Errorf("%s: no chart before the first table", name)
		}
		first := body[strings.Index(body, "<figure"):]
		if !strings.HasPrefix(first[strings.Index(first, "</figure>"):], `</figure><figure class="narrow"><svg`) {
			t.Errorf("%s: the first chart has no form for narrow screens", name)
		}
	}
	h, _ := reports(t, madeUp(t, 21, func(m *result.Manifest) { m.Design.Answer = crrAnswer() }))
	if n := strings.Count(h, `id="crr-ratio-t"`); n != 1 {
		t.Errorf("the chart of the answer stands %d times", n)
	}
	if first := h[strings.Index(h, `<svg`):]; !strings.Contains(first[:strings.Index(first, "<style>")], `"crr-ratio-t`) {
		t.Error("the page does not open with the design's chart")
	}
}

func TestTerminalOpensWithTheAnswer(t *testing.T) {
	_, s := summaryOf(t, madeUp(t, 21, func(m *result.Manifest) { m.Design.Answer = crrAnswer() }))
	for _, width := range []int{60, 100} {
		var b bytes.Buffer
		termAnswer(&b, s, width)
		for line := range strings.Lines(b.String()) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > width {
				t.Errorf("width %d: %d columns: %s", width, n, line)
			}
		}
		text := b.String()
		if !strings.Contains(text, "15.2 % more time") || !strings.Contains(text, "  direct          1  █") ||
			!strings.Contains(text, "nftables  1.15") {
			t.Errorf("width %d:\n%s", width, text)
		}
	}
	if got := Bars([]Bar{{"a", "1", 1}, {"bc", "0", 0}}, 20); got != "  a   1  ███████████\n  bc  0\n" {
		t.Errorf("bars: %q", got)
	}
}

// earlierRun returns a copy of the run of an earlier program.
func earlierRun(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{result.ManifestFile, result.BlocksFile} {
		copyFile(t, filepath.Join("testdata", "run", name), filepath.Join(dir, name))
	}
	return dir
}
