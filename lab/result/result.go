// Package result is the format of a run's directory: what was to be measured and on which machine (manifest.json), what
// was measured (blocks.jsonl, one line per block, only ever appended to) and, of some runs, every single time
// (samples.csv). It measures nothing and computes nothing: what follows from a run is in package analysis.
//
// All numbers are in base units: times in ns, memory in bytes, shares and ratios as plain numbers. A Measure says in
// which unit people read it.
package result

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"fairlead.dev/fairlead/lab/load"
)

// Schema is the version of the directory's format that this package writes.
const Schema = 1

// The files of a run.
const (
	ManifestFile = "manifest.json"
	BlocksFile   = "blocks.jsonl"
	SamplesFile  = "samples.csv" // of runs that keep every operation's time
)

// Manifest is what was run, with what, where and when.
type Manifest struct {
	Schema   int       `json:"schema"`
	Design   Design    `json:"design"`
	Command  []string  `json:"command"` // that repeats the run
	Profile  string    `json:"profile"` // such as "full" or "quick"
	Seed     uint64    `json:"seed"`
	Started  time.Time `json:"started"`
	Ended    time.Time `json:"ended,omitzero"`    // zero: killed, or still running
	Outcome  string    `json:"outcome,omitempty"` // "" for a run that came to its end, else what ended it
	Build    Build     `json:"build"`
	Machine  Machine   `json:"machine"`
	Before   Load      `json:"before"`
	After    Load      `json:"after,omitzero"`
	Remarks  []string  `json:"remarks,omitempty"`  // of the experiment, found out on the way
	Versions []string  `json:"versions,omitempty"` // of other programs that took part
}

// Block is what one arm did in one short stretch of one measure. Blocks of one round stand between the same two
// baselines.
type Block struct {
	Experiment string           `json:"experiment"`
	Measure    string           `json:"measure"`
	Arm        string           `json:"arm"`
	Params     Params           `json:"params,omitempty"`
	Round      int              `json:"round"`
	Order      int              `json:"order"` // of the block in the run, from 0
	Start      time.Time        `json:"start"`
	Since      time.Duration    `json:"since"` // ns from the run's start, on the monotonic clock
	Wall       time.Duration    `json:"wall"`  // ns
	Ops        int64            `json:"ops"`
	Errors     map[string]int64 `json:"errors,omitempty"`
	// "p50" and so on in ns, "mean", "min", "max"; "value" for what is no distribution
	Figures  map[string]float64 `json:"quantiles,omitempty"`
	CPU      *load.CPU          `json:"cpu,omitempty"`
	Counters map[string]float64 `json:"counters,omitempty"` // over the whole block
	Answers  map[string]int64   `json:"answers,omitempty"`  // by server
	Operations
}

// Operations is what is recorded of a block's single operations.
type Operations struct {
	Hist  string      `json:"hist,omitempty"`  // HdrHistogram V2, compressed, base64; ns
	Trace *load.Trace `json:"trace,omitempty"` // of an open loop
}

// Timed fills a block's numbers from a load's sample.
func (b Block) Timed(s load.Sample) (Block, error) {
	b.Start, b.Wall, b.Ops, b.Errors, b.Figures, b.Counters = s.Start, s.Wall, s.Ops, s.Errors, s.Quantiles, s.Counters
	b.CPU = &s.CPU
	for id, n := range s.Answers {
		if b.Answers == nil {
			b.Answers = map[string]int64{}
		}
		b.Answers[fmt.Sprint(id)] = n
	}
	return b.hist(s.Hist)
}

// Times fills a block's numbers from single times in ns, such as one per change. It sorts them.
func (b Block) Times(ns []int64) (Block, error) {
	figures, h := load.Quantiles(ns)
	b.Ops, b.Figures = int64(len(ns)), figures
	return b.hist(h)
}

func (b Block) hist(h *hdrhistogram.Histogram) (Block, error) {
	enc, err := h.EncodeV2()
	if err != nil {
		return b, fmt.Errorf("encode the histogram of %s %s: %w", b.Arm, b.Measure, err)
	}
	b.Hist = string(enc)
	return b, nil
}

// Is makes a block of one number in base units.
func (b Block) Is(value float64) Block {
	b.Ops, b.Figures = 1, map[string]float64{string(Value): value}
	return b
}

// Failed is the number of operations that did not succeed.
func (b Block) Failed() (n int64) {
	for _, e := range b.Errors {
		n += e
	}
	return n
}

// Run is a directory as read.
type Run struct {
	Manifest Manifest
	Blocks   []Block
	Cut      bool // the last line of the blocks was incomplete and is left out: the run was killed while it wrote
}

// Writer fills a run's directory.
type Writer struct {
	dir      string
	manifest Manifest
	blocks   *os.File
	samples  *bufio.Writer // nil: none yet
	file     *os.File      // that it writes to
	order    int
	begun    time.Time // with its monotonic reading
	traces   []Trace   // not folded yet
}

// Create makes the directory, which must not hold a run yet, and writes the manifest. Started is now.
func Create(dir string, m Manifest) (*Writer, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the run's directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, BlocksFile), os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return nil, fmt.Errorf("begin a run: %w", err)
	}
	w := &Writer{dir: dir, manifest: m, blocks: f, begun: time.Now()}
	w.manifest.Schema, w.manifest.Started = Schema, w.begun.Round(0)
	if err := WriteJSON(filepath.Join(dir, ManifestFile), w.manifest); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return w, nil
}

// Add appends a block, in one write. It sets the experiment, Order, and Since from Start (now, if Start is zero).
func (w *Writer) Add(b Block) error {
	if b.Start.IsZero() {
		b.Start = time.Now().Add(-b.Wall)
	}
	b.Experiment, b.Order, b.Since = w.manifest.Design.ID, w.order, b.Start.Sub(w.begun)
	w.order++
	line, err := json.Marshal(b)
	if err != nil {
		return fmt.Errorf("block %d, %s %s: %w", b.Order, b.Arm, b.Measure, err)
	}
	if _, err := w.blocks.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("write block %d: %w", b.Order, err)
	}
	return nil
}

// AddValue appends a block that is one number of a measure, in base units.
func (w *Writer) AddValue(b Block, measure string, value float64) error {
	b.Measure = measure
	return w.Add(b.Is(value))
}

// AddTimes appends a block of single times of a measure, in ns, which it sorts.
func (w *Writer) AddTimes(b Block, measure string, ns []int64) error {
	b.Measure = measure
	b, err := b.Times(ns)
	if err != nil {
		return err
	}
	return w.Add(b)
}

// Samples appends the time of each of a block's operations, in ns and in order, to the samples' file, of which the
// first line names the columns. None make no file.
func (w *Writer) Samples(b Block, ns []int64) (err error) {
	if len(ns) == 0 {
		return nil
	}
	if w.samples == nil {
		if w.file, err = os.OpenFile(filepath.Join(w.dir, SamplesFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL,
			0o644); err != nil {
			return fmt.Errorf("begin the samples: %w", err)
		}
		w.samples = bufio.NewWriter(w.file)
		fmt.Fprintln(w.samples, "measure,arm,round,number,ns")
	}
	for i, t := range ns {
		fmt.Fprintf(w.samples, "%s,%s,%d,%d,%d\n", b.Measure, b.Arm, b.Round, i, t)
	}
	if err := w.samples.Flush(); err != nil {
		return fmt.Errorf("write samples: %w", err)
	}
	return nil
}

// Remark adds a remark, which the report prints.
func (w *Writer) Remark(s string) { w.manifest.Remarks = append(w.manifest.Remarks, s) }

// Close ends the run: the manifest records when, how ("" for well) and what else the machine did until then.
func (w *Writer) Close(outcome string, after Load) error {
	for _, t := range w.traces {
		_ = os.Remove(t.Path) // of a run that ended before it was folded; it may not be written yet
	}
	w.manifest.Ended, w.manifest.Outcome, w.manifest.After = time.Now().Round(0), outcome, after
	if err := errors.Join(w.blocks.Sync(), w.blocks.Close()); err != nil {
		return fmt.Errorf("end the blocks: %w", err)
	}
	if w.file != nil {
		if err := w.file.Close(); err != nil {
			return fmt.Errorf("end the samples: %w", err)
		}
	}
	return WriteJSON(filepath.Join(w.dir, ManifestFile), w.manifest)
}

// Read returns what a directory holds. An incomplete last line is left out and sets Cut; any other bad line is an
// error.
func Read(dir string) (r Run, err error) {
	b, err := os.ReadFile(filepath.Join(dir, ManifestFile))
	if errors.Is(err, fs.ErrNotExist) {
		return r, fmt.Errorf("%s holds no run: %w; name a folder that fairlead lab run made", dir, err)
	}
	if err != nil {
		return r, fmt.Errorf("read a run: %w", err)
	}
	if err := json.Unmarshal(b, &r.Manifest); err != nil {
		return r, fmt.Errorf("read %s: %w", filepath.Join(dir, ManifestFile), err)
	}
	if s := r.Manifest.Schema; s != Schema {
		return r, fmt.Errorf("read %s: its schema is %d, this program reads %d; read it with the program that wrote it, or "+
			"run the experiment again", dir, s, Schema)
	}
	f, err := os.Open(filepath.Join(dir, BlocksFile))
	if err != nil {
		return r, fmt.Errorf("read a run: %w", err)
	}
	defer f.Close()
	if r.Blocks, r.Cut, err = readBlocks(f); err != nil {
		return r, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	return r, nil
}

func readBlocks(r io.Reader) (blocks []Block, cut bool, err error) {
	in := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		if err == io.EOF { // whatever it holds, its newline was never written
			return blocks, len(line) > 0, nil
		}
		if err != nil {
			return blocks, false, err
		}
		var b Block
		if err := json.Unmarshal(line, &b); err != nil {
			return blocks, false, fmt.Errorf("line %d: %w", n, err)
		}
		blocks = append(blocks, b)
	}
}

// WriteJSON replaces a file as a whole, so that no reader ever sees half of it.
func WriteJSON(path string, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.WriteFile(path+".new", b.Bytes(), fs.FileMode(0o644)); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return os.Rename(path+".new", path)
}
