// Package result is a run's directory: what was asked and on which machine (manifest.json), what was seen
// (blocks.jsonl, one line per block, only ever appended to) and what follows from it (summary.json, which Summarize
// can make again from the other two at any time). It measures nothing and draws nothing.
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
	SummaryFile  = "summary.json"
	SamplesFile  = "samples.csv" // of runs that keep every operation's time
)

// Manifest says what was run, with what, where and when.
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
	Experiment string             `json:"experiment"`
	Measure    string             `json:"measure"`
	Arm        string             `json:"arm"`
	Params     map[string]string  `json:"params,omitempty"`
	Round      int                `json:"round"`
	Order      int                `json:"order"` // of the block in the run, from 0
	Start      time.Time          `json:"start"`
	Since      time.Duration      `json:"since"` // ns from the run's start, on the monotonic clock
	Wall       time.Duration      `json:"wall"`  // ns
	Ops        int64              `json:"ops"`
	Errors     map[string]int64   `json:"errors,omitempty"`
	Figures    map[string]float64 `json:"quantiles,omitempty"` // "p50" and so on in ns, "mean", "min", "max"; "value" for what is no distribution
	CPU        *load.CPU          `json:"cpu,omitempty"`
	Counters   map[string]float64 `json:"counters,omitempty"` // over the whole block
	Answers    map[string]int64   `json:"answers,omitempty"`  // by who gave them
	Hist       string             `json:"hist,omitempty"`     // HdrHistogram V2, compressed, base64; ns
	Trace      *load.Trace        `json:"trace,omitempty"`    // of an open loop
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
	b.Ops, b.Figures = 1, map[string]float64{"value": value}
	return b
}

// Failed is the number of operations that did not succeed.
func (b Block) Failed() (n int64) {
	for _, e := range b.Errors {
		n += e
	}
	return n
}

// busy is processor time per time: of the client, the server, the agent, softirq's, or "", the first three together, which
// hold softirq's time: it is spent in whoever is interrupted.
func (b Block) busy(part string) (float64, bool) {
	if b.CPU == nil || b.Wall <= 0 {
		return 0, false
	}
	client := b.CPU.User + b.CPU.System
	parts := map[string]time.Duration{"": client + b.CPU.Server + b.CPU.Agent, "client": client, "server": b.CPU.Server, "agent": b.CPU.Agent, "softirq": b.CPU.Softirq}
	v, ok := parts[part]
	return float64(v) / float64(b.Wall), ok
}

// imbalance is the greatest number of answers from one server over the mean, less 1. A server without answers is one that
// Counters["servers"] knows of.
func (b Block) imbalance() (float64, bool) {
	n := b.Counters["servers"]
	if n == 0 || len(b.Answers) == 0 {
		return 0, false
	}
	most, sum := 0.0, 0.0
	for _, a := range b.Answers {
		most, sum = max(most, float64(a)), sum+float64(a)
	}
	return most*n/sum - 1, true
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
	if err := writeJSON(filepath.Join(dir, ManifestFile), w.manifest); err != nil {
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

// Samples appends the time of each of a block's operations, in ns and in order, to the samples' file, of which the first line
// names the columns. None make no file.
func (w *Writer) Samples(b Block, ns []int64) (err error) {
	if len(ns) == 0 {
		return nil
	}
	if w.samples == nil {
		if w.file, err = os.OpenFile(filepath.Join(w.dir, SamplesFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644); err != nil {
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

// Remark adds something that the report must tell.
func (w *Writer) Remark(s string) { w.manifest.Remarks = append(w.manifest.Remarks, s) }

// Close ends the run: the manifest learns when and how ("" for well), and the summary is written.
func (w *Writer) Close(outcome string) error {
	w.manifest.Ended, w.manifest.Outcome, w.manifest.After = time.Now().Round(0), outcome, ReadLoad()
	if err := errors.Join(w.blocks.Sync(), w.blocks.Close()); err != nil {
		return fmt.Errorf("end the blocks: %w", err)
	}
	if w.file != nil {
		if err := w.file.Close(); err != nil {
			return fmt.Errorf("end the samples: %w", err)
		}
	}
	if err := writeJSON(filepath.Join(w.dir, ManifestFile), w.manifest); err != nil {
		return err
	}
	_, err := WriteSummary(w.dir)
	return err
}

// Read gives what a directory holds. An incomplete last line is left out and told by Cut; any other bad line is an error.
func Read(dir string) (r Run, err error) {
	b, err := os.ReadFile(filepath.Join(dir, ManifestFile))
	if err != nil {
		return r, fmt.Errorf("read a run: %w", err)
	}
	if err := json.Unmarshal(b, &r.Manifest); err != nil {
		return r, fmt.Errorf("read %s: %w", filepath.Join(dir, ManifestFile), err)
	}
	if s := r.Manifest.Schema; s != Schema {
		return r, fmt.Errorf("read %s: its schema is %d; this program reads %d", dir, s, Schema)
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

// WriteSummary makes the summary of a directory from its raw files.
func WriteSummary(dir string) (Summary, error) {
	r, err := Read(dir)
	if err != nil {
		return Summary{}, err
	}
	s, err := Summarize(r)
	if err != nil {
		return s, fmt.Errorf("summarize %s: %w", dir, err)
	}
	return s, writeJSON(filepath.Join(dir, SummaryFile), s)
}

// writeJSON replaces a file as a whole, so that nobody ever reads half of it.
func writeJSON(path string, v any) error {
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
