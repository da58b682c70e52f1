package report

import (
	"bytes"
	"html"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

func TestCompare(t *testing.T) {
	a := madeUp(t, 21, func(m *result.Manifest) { m.Design.Answer = crrAnswer() })
	b := madeUp(t, 21, func(m *result.Manifest) {
		m.Design.Answer = crrAnswer()
		m.Machine.Kernel, m.Machine.CPU = "6.99.0 <b>", "Another Processor"
	})
	c, err := Compare(a, b)
	if err != nil {
		t.Fatal(err)
	}
	path, err := c.Write(filepath.Join(t.TempDir(), "new"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	page := string(text)
	wellFormed(t, page)
	for _, want := range []string{"What differs between the machines", "6.99.0 <b>", "Another Processor",
		"Of 15 ratios to direct, 15 are the same in both runs", "across runs", "B ÷ A"} {
		if !strings.Contains(html.UnescapeString(page), want) {
			t.Errorf("the page doesn't say %q", want)
		}
	}
	if strings.Contains(page, "<b>") {
		t.Error("a kernel's name became an element")
	}
	if strings.Index(page, "What differs") > strings.Index(page, "<svg") {
		t.Error("what differs does not come first")
	}
	if n := strings.Count(page, "where the times lie") + strings.Count(page, `id="histogram-`); n < 4 { // two ids a chart
		t.Errorf("%d histograms' ids", n)
	}
	again, err := Compare(a, b)
	if err != nil {
		t.Fatal(err)
	}
	var second bytes.Buffer
	if err := again.HTML(&second); err != nil || second.String() != page {
		t.Errorf("the same folders make another page: %v", err)
	}
	for _, width := range []int{80, 120} {
		var b bytes.Buffer
		if err := c.Terminal(&b, width); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(b.String(), "kernel (6.12.0 #1 SMP in A, 6.99.0 <b> in B)") && width == 120 {
			t.Errorf("the terminal:\n%s", b.String())
		}
		for _, want := range []string{"Ratios to direct: connect, request, close", "Another Processor",
			"Connect, request, close, × direct:\n  A: nftables at 1 Services ", "  B: nftables at 10 Services "} {
			if !strings.Contains(b.String(), want) {
				t.Errorf("width %d: the terminal doesn't say %q:\n%s", width, want, b.String())
			}
		}
		for line := range strings.Lines(b.String()) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > width {
				t.Errorf("width %d: %d columns: %s", width, n, line)
			}
		}
	}
	suite := t.TempDir()
	if err := (Suite{Schema: SuiteSchema}).Write(suite); err != nil {
		t.Fatal(err)
	}
	if _, err := Compare(suite, b); err == nil || !strings.Contains(err.Error(), "several experiments") {
		t.Errorf("a run of several experiments: %v", err)
	}
	if text := c.Answer[0]; !strings.HasPrefix(text, "The runs differ in 2 recorded respects: kernel (") ||
		!strings.Contains(c.Answer[2], "took 61.7 µs in A") {
		t.Errorf("the answer: %q", c.Answer)
	}
	if got := verdictCounts(map[stats.Verdict]int{stats.Higher: 1, stats.Lower: 2, stats.Unclear: 3}); got !=
		"1 is higher in B, 2 lower in B and 3 unclear" {
		t.Errorf("verdicts: %q", got)
	}
	if _, err := Compare(a, a+"/."); err == nil || !strings.Contains(err.Error(), "with itself") {
		t.Errorf("a run and itself: %v", err)
	}
	if _, err := Compare(a, t.TempDir()); err == nil || !strings.Contains(err.Error(), "holds no run") {
		t.Errorf("a folder without a run: %v", err)
	}
	if _, err := Compare(a, madeUpModes(t)); err == nil || !strings.Contains(err.Error(), `"modes"`) {
		t.Errorf("runs of two experiments: %v", err)
	}
}

// Runs of an experiment with many arms, of differences and of counts, compare too.
func TestCompareModes(t *testing.T) {
	a := madeUpModes(t)
	c, err := Compare(a, madeUpModes(t))
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := c.HTML(&b); err != nil {
		t.Fatal(err)
	}
	wellFormed(t, b.String())
	if text := b.String(); !strings.Contains(text, "More than direct") || strings.Contains(text, "Counts that differ") ||
		strings.Contains(text, ">higher in B") {
		t.Errorf("a run differs from itself, or its differences are not compared:\n%s", terminal(t, c))
	}
}

// terminal returns what a terminal shows.
func terminal(t *testing.T, c *Comparison) string {
	t.Helper()
	var b bytes.Buffer
	if err := c.Terminal(&b, 120); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// Two exact runs are compared by absolute numbers: the greatest difference first, with the parts that grew.
func TestCompareExactRuns(t *testing.T) {
	a := exactRun(t, "6.12.1", map[string][2]float64{"direct": {100_000, 50_000}, "ebpf": {90_000, 40_000}})
	same := exactRun(t, "6.12.1", map[string][2]float64{"direct": {100_000, 50_000}, "ebpf": {90_450, 40_440}})
	other := exactRun(t, "6.1.9", map[string][2]float64{"direct": {98_000, 48_000}, "ebpf": {88_000, 38_000}})
	for _, tt := range []struct {
		b    string
		want []string
	}{
		{same, []string{"same kernel image, Linux 6.12.1", "Of 2 numbers 1 are equal, 1 are higher in B and 0 lower",
			"90,000 in A, 90,450 in B (+450, +0.50 %)", "did so in TCP +440", "parts that grew", "some ten instructions"}},
		{other, []string{"A counted in Linux 6.12.1, B in Linux 6.1.9: what these kernels differ in is in every number",
			"−2,000", "0.898"}},
	} {
		c, err := Compare(a, tt.b)
		if err != nil {
			t.Fatal(err)
		}
		var page, term bytes.Buffer
		if err := c.HTML(&page); err != nil {
			t.Fatal(err)
		}
		wellFormed(t, page.String())
		if err := c.Terminal(&term, 200); err != nil {
			t.Fatal(err)
		}
		for _, want := range tt.want {
			if !strings.Contains(html.UnescapeString(page.String()), want) {
				t.Errorf("the page doesn't say %q", want)
			}
		}
		text := strings.Join(strings.Fields(term.String()), " ")
		for _, want := range tt.want[:2] {
			if !strings.Contains(text, want) {
				t.Errorf("the terminal doesn't say %q:\n%s", want, term.String())
			}
		}
		if strings.Contains(text, "unclear") || strings.Contains(text, "95 %") {
			t.Error("what is counted has an interval")
		}
	}
}

// exactRun writes an exact run: of each arm its instructions, and how many of them are TCP's.
func exactRun(t *testing.T, kernel string, arms map[string][2]float64, aims ...result.Aim) string {
	t.Helper()
	d := services().Counted()
	d.Arms = append(d.Arms, result.Arm{ID: "ebpf", Title: "ebpf"})
	d.Aims, d.Ghosts, d.Answer, d.Rounds = aims, nil, crrAnswer(), 1
	d.Measures = append(d.Measures, result.Measure{ID: result.PartID("crr", "tcp"), Unit: result.Instructions,
		Title: "connect, request, close: TCP", Stat: result.Value, Exact: true})
	dir := filepath.Join(t.TempDir(), "exact-"+kernel)
	w, err := result.Create(dir, result.Manifest{Design: d, Profile: "quick",
		Machine: result.Machine{Kernel: kernel + " #1", CPU: "QEMU TCG", CPUs: 1}})
	if err != nil {
		t.Fatal(err)
	}
	for arm, v := range arms {
		b := result.Block{Measure: "crr", Arm: arm, Ops: 51, Figures: map[string]float64{"p50": v[0]}}
		part := result.Block{Measure: result.PartID("crr", "tcp"), Arm: arm}.Is(v[1])
		if arm != d.Baseline {
			b.Params, part.Params = result.Params{"services": "10"}, result.Params{"services": "10"}
		}
		for _, b := range []result.Block{b, part} {
			if err := w.Add(b); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close("", result.Load{}); err != nil {
		t.Fatal(err)
	}
	return dir
}
