// Package report turns a run's directory into what people read: report.html (one file that needs nothing else),
// report.md, the charts as SVG, and a table for the terminal. It is a pure function of the directory: it measures
// nothing, and the same raw files give the same report on any machine.
package report

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/result"
)

// The files that Build makes beside the run's own.
const (
	HTMLFile     = "report.html"
	MarkdownFile = "report.md"
	ChartsDir    = "charts"
)

// Build makes the summary, the charts and both reports of a run's directory, in place of older ones.
func Build(dir string) error {
	r, err := result.Read(dir)
	if err != nil {
		return err
	}
	s, err := analysis.WriteSummary(dir)
	if err != nil {
		return err
	}
	files, err := rawFiles(dir)
	if err != nil {
		return err
	}
	p, err := newPage(r, s, files)
	if err != nil {
		return fmt.Errorf("report on %s: %w", dir, err)
	}
	if err := writeCharts(filepath.Join(dir, ChartsDir), slices.Concat(p.Opening, p.Charts)); err != nil {
		return err
	}
	var html, md bytes.Buffer
	if err := errors.Join(p.html(&html), p.markdown(&md)); err != nil {
		return fmt.Errorf("report on %s: %w", dir, err)
	}
	return errors.Join(
		write(filepath.Join(dir, HTMLFile), html.Bytes()),
		write(filepath.Join(dir, MarkdownFile), md.Bytes()),
	)
}

func write(path string, b []byte) error {
	if err := os.WriteFile(path, b, 0o644); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// writeCharts replaces the folder's drawings, so that none of an older report stays.
func writeCharts(dir string, charts []drawn) error {
	old, err := filepath.Glob(filepath.Join(dir, "*.svg"))
	if err != nil {
		return err
	}
	for _, f := range old {
		if err := os.Remove(f); err != nil {
			return fmt.Errorf("remove an old chart: %w", err)
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the charts' folder: %w", err)
	}
	for _, c := range charts {
		if err := write(filepath.Join(dir, c.Name+".svg"), c.SVG); err != nil {
			return err
		}
	}
	return nil
}

// rawFile is a file that the report rests on.
type rawFile struct {
	Name, Text string
	Size       int
	Hash       string
}

func rawFiles(dir string) (files []rawFile, err error) {
	for _, f := range []rawFile{
		{Name: result.ManifestFile, Text: "what was run, with what, where and when"},
		{Name: result.BlocksFile, Text: "every block as it was measured, one line each, never edited"},
		{Name: result.SamplesFile, Text: "the time of every single operation"},
	} {
		b, err := os.ReadFile(filepath.Join(dir, f.Name))
		if f.Name == result.SamplesFile && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("report on %s: %w", dir, err)
		}
		sum := sha256.Sum256(b)
		f.Size, f.Hash = len(b), hex.EncodeToString(sum[:])
		files = append(files, f)
	}
	return files, nil
}
