package report

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/lab/analysis"
)

var update = flag.Bool("update", false, "write what follows from testdata/run anew")

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err := errors.Join(err, os.WriteFile(to, b, 0o644)); err != nil {
		t.Fatal(err)
	}
}

// The raw files of testdata/run are of a program before metrics had a type, analysis a package and designs an answer:
// they are still read, and what follows from them is the same on every machine, byte for byte.
func TestReportOfEarlierProgramIsTheSame(t *testing.T) {
	earlier, dir := filepath.Join("testdata", "run"), earlierRun(t)
	if err := Build(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{analysis.SummaryFile, MarkdownFile} {
		if *update {
			copyFile(t, filepath.Join(dir, name), filepath.Join(earlier, name))
		}
		got, err := os.ReadFile(filepath.Join(dir, name))
		want, werr := os.ReadFile(filepath.Join(earlier, name))
		if err := errors.Join(err, werr); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s differs: go test ./lab/report -run Earlier -update", name)
		}
	}
}
