package report

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/result"
)

// The page has a column for each kernel and number of Services, parts, the distance to a run by time, and what judged
// each aim.
func TestExactPage(t *testing.T) {
	aim := result.Aim{ID: "G1", Text: "ebpf takes ≤ 0.92 × direct's", Measure: "crr", Arm: "ebpf",
		Params: result.Params{"services": "10"}, Of: result.Ratio, Bound: 0.92}
	numbers := map[string][2]float64{"direct": {100_000, 50_000}, "ebpf": {90_000, 40_000}}
	first := exactRun(t, "6.12.1", numbers, aim)
	second := exactRun(t, "6.1.9", map[string][2]float64{"direct": {100_000, 51_000}, "nftables": {121_000, 52_000}}, aim)
	timed := madeUp(t, 9, nil)
	page, err := ExactPage([]string{first, second, timed})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"can't see**: caches", "The exact runs are of one program.",
		"|  | Linux 6.12.1, 10 Services | Linux 6.1.9, 10 Services |",
		"| direct | 100,000 | 100,000 |", "| nftables | – | 121,000 (1.210) |", "| ebpf | 90,000 (0.900) | – |",
		"parts, Linux 6.12.1", "| TCP | 50,000 | 40,000 |", "| TCP | 51,000 | 52,000 |",
		"Not counted: Linux 6.12.1 at 10 Services: direct again, nftables; Linux 6.1.9 at 10 Services: direct again, ebpf.",
		"| G1 | ebpf takes ≤ 0.92 × direct's | instructions, Linux 6.12.1 | 0.900 × | hit |",
		"Not measured: instructions, Linux 6.1.9: G1",
		"| G6a |", "| time, Linux 6.12.0 |",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page doesn't say %q", want)
		}
	}
	if strings.Contains(page, "beside those of times") {
		t.Error("ratios are compared of which the first kernel's runs have none")
	}
	page, err = ExactPage([]string{second, first, timed})
	if want := "| nftables | 10 | – | 1.210 · 1.14"; err != nil || !strings.Contains(page, want) {
		t.Errorf("the page doesn't say %q: %v\n%s", want, err, page)
	}
	for _, dirs := range [][]string{nil, {timed}, {t.TempDir()}} {
		if _, err := ExactPage(dirs); err == nil {
			t.Errorf("a page of %q", dirs)
		}
	}
}

// A kernel has columns for those parameters alone that its own runs have.
func TestExactPageHasNoEmptyColumns(t *testing.T) {
	two, ten := exactRun(t, "6.12.1", map[string][2]float64{"direct": {100_000, 1}, "ebpf": {90_000, 1}}), t.TempDir()
	if err := os.CopyFS(ten, os.DirFS(two)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(ten, "blocks.jsonl")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	many := bytes.ReplaceAll(b, []byte(`"services":"10"`), []byte(`"services":"10000"`))
	if err := os.WriteFile(path, many, 0o644); err != nil || bytes.Equal(many, b) {
		t.Fatalf("%v\n%s", err, b)
	}
	page, err := ExactPage([]string{two, ten, exactRun(t, "6.1.9", map[string][2]float64{"direct": {100_000, 1},
		"ebpf": {90_000, 1}})})
	if want := "|  | Linux 6.12.1, 10 Services | Linux 6.12.1, 10,000 Services | Linux 6.1.9, 10 Services |"; err != nil ||
		!strings.Contains(page, want) {
		t.Errorf("the page doesn't say %q: %v\n%s", want, err, page)
	}
}

// Where nothing is varied, each kernel has a column.
func TestExactPageOfNothingVaried(t *testing.T) {
	var runs []string
	for _, kernel := range []string{"6.12.95+deb12-cloud-amd64", "6.1.0-50-cloud-amd64"} {
		dir := exactRun(t, kernel, map[string][2]float64{"direct": {100_000, 50_000}, "ebpf": {90_000, 40_000}})
		path := filepath.Join(dir, "blocks.jsonl")
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		none := bytes.ReplaceAll(b, []byte(`"params":{"services":"10"},`), nil)
		if err := os.WriteFile(path, none, 0o644); err != nil || bytes.Equal(none, b) {
			t.Fatalf("%v\n%s", err, b)
		}
		runs = append(runs, dir)
	}
	page, err := ExactPage(append(runs, madeUp(t, 9, nil)))
	for _, want := range []string{"|  | Linux 6.12.95 | Linux 6.1.0-50 |", "| ebpf | 90,000 (0.900) | 90,000 (0.900) |",
		"| part | direct | ebpf |", "Not counted: Linux 6.12.95: direct again, nftables;"} {
		if err != nil || !strings.Contains(page, want) {
			t.Errorf("the page doesn't say %q: %v\n%s", want, err, page)
		}
	}
}

// Several runs in one kernel fill one table; of what both have, the first counts.
func TestExactPageOfOneKernel(t *testing.T) {
	second := exactRun(t, "6.12.1", map[string][2]float64{"direct": {50_000, 1}, "ebpf": {10_000, 1},
		"nftables": {60_000, 1}})
	path := filepath.Join(second, result.ManifestFile)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b = bytes.Replace(b, []byte(`"machine": {`), []byte(`"build": {"commit": "0123abc"}, "machine": {`), 1)
	b = bytes.Replace(b, []byte(`"command": null`), []byte(`"command": ["lab", "run", "--subject", "x=/a/b/c"]`), 1)
	b = bytes.Replace(b, []byte(`"ended": "2`), []byte(`"outcome": "it was interrupted", "ended": "2`), 1)
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	page, err := ExactPage([]string{
		exactRun(t, "6.12.1", map[string][2]float64{"direct": {100_000, 1}, "ebpf": {90_000, 1}}), second})
	for _, want := range []string{
		"| exact, not to its end | Linux 6.12.1 | 0123abc | lab run --subject x=c |", "| exact | Linux 6.12.1 |",
		"The exact runs are of 2 programs", "| direct | 100,000 |",
		"| ebpf | 90,000 (0.900) |", "| nftables | 60,000 (1.200) |"} {
		if err != nil || !strings.Contains(page, want) {
			t.Errorf("the page doesn't say %q: %v\n%s", want, err, page)
		}
	}
}

// What no ratio is counted of, such as a cold sync, has a row for each of its parameters, and a column for each arm.
func TestExactPageOfWhatElseIsCounted(t *testing.T) {
	dir := exactRun(t, "6.12.1", map[string][2]float64{"direct": {100_000, 1}, "ebpf": {90_000, 1}})
	path := filepath.Join(dir, "blocks.jsonl")
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{`"arm":"ebpf","params":{"services":"10000"},"quantiles":{"value":1234567}`,
		`"arm":"nftables","params":{"services":"10000"},"quantiles":{"value":7654321}`,
		`"arm":"nftables","params":{"services":"10"},"quantiles":{"value":4321}`} {
		if _, err := f.WriteString(`{"experiment":"services","measure":"cold","ops":1,` + line + "}\n"); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	page, err := ExactPage([]string{dir})
	for _, want := range []string{"### What else is counted, Linux 6.12.1", "|  | Services | nftables | ebpf |",
		"| cold sync | 10 | 4,321 |  |\n| cold sync | 10,000 | 7,654,321 | 1,234,567 |",
		"|  | Linux 6.12.1, 10 Services |\n"} {
		if err != nil || !strings.Contains(page, want) {
			t.Errorf("the page doesn't say %q: %v\n%s", want, err, page)
		}
	}
}
