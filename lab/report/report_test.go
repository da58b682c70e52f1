package report

import (
	"bytes"
	"encoding/xml"
	"flag"
	"html"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

// copyTo is where TestBuild leaves its made-up report: go test ./lab/report -run Build -keep DIR
var copyTo = flag.String("keep", "", "copy the made-up run with its report to this folder")

// tree is every file of a folder.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		files[strings.TrimPrefix(path, dir+"/")] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestBuild(t *testing.T) {
	dir := madeUp(t, 21, nil)
	raw := tree(t, dir)
	if err := Build(dir); err != nil {
		t.Fatal(err)
	}
	got := tree(t, dir)
	for _, name := range []string{result.ManifestFile, result.BlocksFile} {
		if raw[name] != got[name] {
			t.Errorf("%s was changed", name)
		}
	}
	charts := 0
	for name := range got {
		if strings.HasPrefix(name, ChartsDir+"/") {
			charts++
		}
	}
	if charts != 20 { // the aims; 4 for each of 3 compared measures; cold, 2 changes with ECDFs, memory, idle
		t.Errorf("%d charts", charts)
	}
	// A report is a pure function of the directory: elsewhere and over an older report, the same comes out.
	other := filepath.Join(t.TempDir(), "copy")
	if err := os.CopyFS(other, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(other, ChartsDir, "old.svg"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Build(other); err != nil {
		t.Fatal(err)
	}
	again := tree(t, other)
	for name := range got {
		if again[name] != got[name] {
			t.Errorf("%s is not the same twice", name)
		}
	}
	if len(again) != len(got) {
		t.Errorf("%d files, then %d", len(got), len(again))
	}
	if *copyTo != "" {
		if err := os.MkdirAll(*copyTo, 0o755); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("cp", "-r", dir+"/.", *copyTo).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
}

// reports builds a report and returns its HTML and Markdown.
func reports(t *testing.T, dir string) (htmlText, markdown string) {
	t.Helper()
	if err := Build(dir); err != nil {
		t.Fatal(err)
	}
	f := tree(t, dir)
	return f[HTMLFile], f[MarkdownFile]
}

func TestHTMLNeedsNothingElse(t *testing.T) {
	text, _ := reports(t, madeUp(t, 6, nil))
	for _, bad := range []string{"<script", "<link", "<img", "src=", "href=", "@import", "url(", "http://", "https://"} {
		if s := strings.ReplaceAll(text, `xmlns="http://www.w3.org/2000/svg"`, ""); strings.Contains(s, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	ids := map[string]bool{}
	for _, m := range regexp.MustCompile(` id="([^"]+)"`).FindAllStringSubmatch(text, -1) {
		if ids[m[1]] {
			t.Errorf("the id %q stands twice", m[1])
		}
		ids[m[1]] = true
	}
	wellFormed(t, text)
}

// wellFormed reads the page as XML, its doctype aside.
func wellFormed(t *testing.T, text string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(strings.TrimPrefix(text, "<!doctype html>")))
	d.Entity = xml.HTMLEntity
	for {
		_, err := d.Token()
		if err == io.EOF {
			return
		}
		if err != nil {
			line, _ := d.InputPos()
			t.Fatalf("line %d: %v", line, err)
		}
	}
}

func TestReportsSayTheSame(t *testing.T) {
	dir := madeUp(t, 21, nil)
	h, md := reports(t, dir)
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := analysis.Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	var term bytes.Buffer
	if err := Table(&term, s, 200); err != nil {
		t.Fatal(err)
	}
	c, _ := s.Cell("crr", "nftables", map[string]string{"services": "10000"})
	plain := html.UnescapeString(h)
	for _, want := range []string{ratio(c.Ratio.Value), ratios(c.Ratio.CI), verdict(c), "in margin", "G6a"} {
		for where, text := range map[string]string{"HTML": plain, "Markdown": md, "terminal": term.String()} {
			if !strings.Contains(text, want) {
				t.Errorf("%s doesn't say %q", where, want)
			}
		}
	}
	for _, want := range []string{"IPVS and eBPF: these planes are not built yet.",
		"fairlead lab run services --profile full --seed 7 --out 'my results'",
		"Linux ", "f06a0ae5f06a", "These numbers are made up.", "nft 1.0.6, for reading back only", "5 hit, 1 miss"} {
		for where, text := range map[string]string{"HTML": plain, "Markdown": md} {
			if !strings.Contains(text, want) {
				t.Errorf("%s doesn't say %q", where, want)
			}
		}
	}
	for _, link := range regexp.MustCompile(`\]\(([^)]+)\)`).FindAllStringSubmatch(md, -1) {
		if _, err := os.Stat(filepath.Join(dir, link[1])); err != nil {
			t.Errorf("the Markdown links to %v", err)
		}
	}
}

// Every chart must say what it could resolve, of how many it is, and where it was measured.
func TestChartsSayWhatTheyRestOn(t *testing.T) {
	dir := madeUp(t, 6, nil)
	if err := Build(dir); err != nil {
		t.Fatal(err)
	}
	for name, svg := range tree(t, filepath.Join(dir, ChartsDir)) {
		wants := []string{"Linux ", "f06a0ae5f06a", "seed 7"}
		switch {
		case strings.HasPrefix(name, "connect"), strings.HasPrefix(name, "crr"), strings.HasPrefix(name, "rr"):
			wants = append(wants, "resolution ±")
		case name != "aims.svg":
			wants = append(wants, "no baseline")
		}
		text := strings.Join(strings.Fields(regexp.MustCompile(`<[^>]*>`).ReplaceAllString(svg, " ")), " ")
		for _, w := range wants {
			if !strings.Contains(text, w) {
				t.Errorf("%s doesn't say %q", name, w)
			}
		}
	}
}

func TestKilledRunIsReported(t *testing.T) {
	dir := madeUp(t, 2, nil)
	path := filepath.Join(dir, result.BlocksFile)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b[:len(b)-10], 0o644); err != nil {
		t.Fatal(err)
	}
	h, md := reports(t, dir)
	for _, text := range []string{h, md} {
		for _, want := range []string{"written incompletely", "2 of 21 planned rounds", "too few rounds"} {
			if !strings.Contains(text, want) {
				t.Errorf("the report doesn't say %q", want)
			}
		}
	}
}

func TestRunWithoutBlocksIsReported(t *testing.T) {
	h, md := reports(t, madeUp(t, 0, nil))
	for _, text := range []string{h, md} {
		if !strings.Contains(text, "not measured") || !strings.Contains(text, "0 of 21 planned rounds") {
			t.Error("the report doesn't say that nothing was measured")
		}
	}
	wellFormed(t, h)
}

func TestHostileWordsStayWords(t *testing.T) {
	const evil = `<script>alert(1)</script> & "quotes" | pipe`
	dir := madeUp(t, 5, func(m *result.Manifest) {
		m.Design.Title, m.Design.Measures[0].Title, m.Design.Arms[2].Title, m.Machine.CPU = evil, evil, evil, evil
	})
	h, md := reports(t, dir)
	if strings.Contains(h, "<script") || strings.Contains(md, "<script") {
		t.Error("a title became an element")
	}
	wellFormed(t, h)
}

func TestTableFitsItsWidth(t *testing.T) {
	r, err := result.Read(madeUp(t, 21, nil))
	if err != nil {
		t.Fatal(err)
	}
	s, err := analysis.Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	s.Noise = analysis.Noise{} // whose line is not part of the tables
	for _, width := range []int{76, 100, 160} {
		var b bytes.Buffer
		if err := Table(&b, s, width); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(b.String()) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > width {
				t.Errorf("width %d: %d columns: %s", width, n, line)
			}
		}
		if !strings.Contains(b.String(), "verdict") || !strings.Contains(b.String(), "cold sync of") {
			t.Errorf("width %d lost what matters:\n%s", width, b.String())
		}
	}
}

func TestWords(t *testing.T) {
	for got, want := range map[string]string{
		percent(1.0681): "+6.8 %", percent(0.97): "−3.0 %", percent(1.0012): "+0.12 %", percent(3): "+200 %",
		percent(1):       "+0.00 %",
		plusMinus(0.006): "±0.6 %", plusMinus(0.02): "±2 %", plusMinus(0.0004): "±0.04 %",
		ratio(1.06814): "1.068", ratio(0.0074): "0.007", ratio(123.4): "123",
		amount(61_300, "µs"): "61.3 µs", amount(118<<20, "MiB"): "118 MiB", amount(0.0002, "%"): "0.0200 %",
		amount(3, ""): "3.00",
		between(stats.Interval{Low: 60e3, High: 61e3}, "µs"): "60.0–61.0",
		span(200 * time.Second):                              "3 min 20 s", span(7384 * time.Second): "2 h 3 min",
		span(4 * time.Second): "4 s",
		number("10000"):       "10,000", number("first"): "first", number("2.5"): "2.5", group("1234567"): "1,234,567",
		group("123"):       "123",
		plural(1, "round"): "1 round", plural(2100, "block"): "2,100 blocks",
		shell([]string{"a", "b c", "it's", ""}):                                                          `a 'b c' 'it'\''s' ''`,
		limit(result.Aim{Across: result.Hypervisor, Measure: "crr", Bound: 3, Margin: 0.25}, services()): "3 × ±25 %",
		lower("Kernel"): "kernel", lower("CPU"): "CPU", lower(""): "",
		size(100): "100 bytes", size(2048): "2.0 KiB", size(3 << 20): "3.0 MiB",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestVerdictWords(t *testing.T) {
	cell := func(v stats.Verdict, low, value, high float64, sure bool) analysis.Cell {
		ratio := &stats.Estimate{Value: value, CI: stats.Interval{Low: low, High: high}, Sure: sure}
		return analysis.Cell{Numbers: analysis.Numbers{Verdict: v, Ratio: ratio}}
	}
	for want, c := range map[string]analysis.Cell{
		"no difference":     cell(stats.Same, 0.99, 1, 1.01, true),
		"+1.2 %, in margin": cell(stats.Same, 1.005, 1.012, 1.019, true),
		"+6.8 %":            cell(stats.Higher, 1.06, 1.068, 1.08, true),
		"−10.0 %":           cell(stats.Lower, 0.88, 0.9, 0.92, true),
		"unclear":           cell(stats.Unclear, 0.9, 1.05, 1.2, true),
		"too few rounds":    cell(stats.Unclear, 1, 1.05, 1.2, false),
		"":                  {},
	} {
		if got := verdict(c); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
