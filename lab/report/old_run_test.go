package report

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/result"
)

// testdata/run is of a program before metrics had a type and analysis a package: what follows from its raw files is
// still the same, byte for byte.
func TestReportOfEarlierProgramIsTheSame(t *testing.T) {
	earlier, dir := filepath.Join("testdata", "run"), t.TempDir()
	for _, name := range []string{result.ManifestFile, result.BlocksFile} {
		b, err := os.ReadFile(filepath.Join(earlier, name))
		if err := errors.Join(err, os.WriteFile(filepath.Join(dir, name), b, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := Build(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{analysis.SummaryFile, MarkdownFile} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		want, werr := os.ReadFile(filepath.Join(earlier, name))
		if err := errors.Join(err, werr); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s differs from that of the program that measured", name)
		}
	}
}
