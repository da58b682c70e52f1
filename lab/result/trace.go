package result

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// TracesFolder is where an exact run has what was traced, by stack of functions (package instructions).
const TracesFolder = "traces"

// Trace is the file with the addresses of the instructions that an operation executed.
type Trace struct {
	Measure, Arm string
	Params       Params
	Path         string
}

// Trace returns the path for the trace of a measure's operation in an arm, "" if there is one already.
func (w *Writer) Trace(t Trace) (path string, err error) {
	name := t.Measure + "_" + t.Arm
	for _, k := range slices.Sorted(maps.Keys(t.Params)) {
		name += "_" + k + "=" + t.Params[k]
	}
	dir, err := filepath.Abs(filepath.Join(w.dir, TracesFolder))
	if err != nil {
		return "", err
	}
	t.Path = filepath.Join(dir, strings.ReplaceAll(name, "/", "-")+".addresses")
	if slices.ContainsFunc(w.traces, func(o Trace) bool { return o.Path == t.Path }) {
		return "", nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	w.traces = append(w.traces, t)
	return t.Path, nil
}

// Folded replaces each trace by what fold makes of it, a file with the suffix .folded. The values that fold returns
// are added as blocks, each of the trace's measure with its key behind.
func (w *Writer) Folded(fold func([]byte) (text string, values map[string]float64, err error)) error {
	for _, t := range w.traces {
		b, err := os.ReadFile(t.Path)
		if err != nil {
			return fmt.Errorf("read a trace: %w", err)
		}
		text, values, err := fold(b)
		if err == nil {
			err = os.WriteFile(strings.TrimSuffix(t.Path, ".addresses")+".folded", []byte(text), 0o644)
		}
		if err = errors.Join(err, os.Remove(t.Path)); err != nil {
			return fmt.Errorf("trace of %s, %s: %w", t.Measure, t.Arm, err)
		}
		for _, k := range slices.Sorted(maps.Keys(values)) {
			if err := w.AddValue(Block{Arm: t.Arm, Params: t.Params}, t.Measure+k, values[k]); err != nil {
				return err
			}
		}
	}
	w.traces = nil
	return nil
}
