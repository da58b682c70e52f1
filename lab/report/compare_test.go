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
