// Package labtest runs experiments in tests, as users do: Main is the agent when a test program is started as one.
package labtest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/agent"
	"fairlead.dev/fairlead/agent/config"
	"fairlead.dev/fairlead/agent/mode"
	agentnode "fairlead.dev/fairlead/agent/node"
	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/experiment"
	"fairlead.dev/fairlead/lab/report"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/testbed"
	"fairlead.dev/fairlead/resolve/policy"
	resolve "fairlead.dev/fairlead/resolve/service"
	"fairlead.dev/fairlead/source"
	"fairlead.dev/fairlead/source/kube"
	"fairlead.dev/fairlead/source/manifest"
)

// Program builds the program that users run, and returns its path.
func Program(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fairlead")
	out, err := exec.Command("go", "build", "-o", path, "fairlead.dev/fairlead/cmd/fairlead").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

// Main is the agent when it is called as one, as the program itself would be.
func Main(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "run" {
		if err := runAgent(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func runAgent(args []string) error {
	f := flag.NewFlagSet("run", flag.ContinueOnError)
	dir, node, status := f.String("source", "", ""), f.String("node", "", ""), f.String("status-address", "", "")
	name, entries, kubeconfig := f.String("mode", "", ""), f.Int("maglev-table-size", 0, ""),
		f.String("kubeconfig", "", "")
	fastPath, engine := f.String("ebpf-fast-path", "", ""), f.String("policy-engine", "", "")
	f.String("policy-mode", "", "") // with an engine they are enforced
	if err := f.Parse(args); err != nil {
		return err
	}
	m, err := mode.Of(*name)
	if err != nil {
		return err
	}
	m = m.With(mode.Options{NoFastPath: *fastPath == string(config.Never)})
	policies, err := policyOptions(*engine, *node)
	if err != nil {
		return err
	}
	addresses, err := agentnode.OpenAddresses()
	if err != nil {
		return err
	}
	defer addresses.Close()
	var from source.Source = manifest.New(*dir)
	if *kubeconfig != "" {
		from = kube.New(kube.Options{Access: kube.Access{Kubeconfig: *kubeconfig}, Node: *node})
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	return agent.Run(ctx, agent.Options{Mode: m, Source: from,
		Resolve:   resolve.Config{Node: *node, Balancing: resolve.Balancing{Entries: *entries}},
		Addresses: addresses, Policies: policies,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Servers: agent.Servers{Metrics: *status}})
}

// policyOptions returns nil without an engine.
func policyOptions(engine, node string) (*agent.PolicyOptions, error) {
	if engine == "" {
		return nil, nil
	}
	e, err := mode.EngineOf(engine)
	return &agent.PolicyOptions{Engine: e, Resolve: policy.Config{Node: node, CutMark: config.DefaultCutMark}}, err
}

// Options returns those of a run in tests: the agent is this test program.
func Options(t *testing.T, progress io.Writer) experiment.Options {
	return experiment.Options{Seed: 7, Out: t.TempDir(), Agent: []string{"/proc/self/exe"}, Output: progress,
		Command: []string{"fairlead", "lab", "run", "services", "--seed", "7"}}
}

// NothingLeft fails where a run of this process left a namespace, a folder or a process behind.
func NothingLeft(t *testing.T) {
	t.Helper()
	if left, err := testbed.Leftovers(); err != nil || len(left) > 0 {
		t.Errorf("left over: %q %v", left, err)
	}
}

// Prepare is an experiment's Prepare.
type Prepare = func(context.Context, *testbed.Testbed, experiment.Options) (experiment.Trial, error)

// Perform runs what an experiment prepares, and reports.
func Perform(ctx context.Context, o experiment.Options, prepare Prepare) (dir string, err error) {
	if dir, err = (experiment.Experiment{Prepare: prepare}).Perform(ctx, o); dir == "" {
		return "", err
	}
	return dir, errors.Join(err, report.Build(dir))
}

// Run runs an experiment in some modes and returns its folder and summary.
func Run(t *testing.T, modes []string, begin Prepare) (dir string, s analysis.Summary) {
	t.Helper()
	o := Options(t, io.Discard)
	o.Modes = modes
	dir, err := Perform(t.Context(), o, begin)
	if err != nil {
		t.Fatal(err)
	}
	NothingLeft(t)
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if s, err = analysis.Summarize(r); err != nil {
		t.Fatal(err)
	}
	for _, c := range s.Cells {
		if c.Failed() > 0 {
			t.Errorf("%s of %s, %v: failed %v", c.Measure, c.Arm, c.Params, c.Errors)
		}
	}
	ReportsFromRawFilesAlone(t, dir)
	answered(t, s)
	return dir, s
}

// answered fails where a design names no cells that answer its question, or the run has none of a finding's.
func answered(t *testing.T, s analysis.Summary) {
	t.Helper()
	if a := s.Design.Answer; a == nil || len(a.Findings) == 0 || len(a.Findings) > 3 || a.Chart == "" {
		t.Errorf("the design's answer is %+v, want one to three findings and a chart", a)
	}
	for _, f := range s.Answer.Findings {
		if f.Tally == "" && len(f.Numbers) == 0 {
			t.Errorf("no number for %q", f.Subject)
		}
	}
}

// Number is a cell's, which must be there.
func Number(t *testing.T, s analysis.Summary, measure, arm string, params result.Params) float64 {
	t.Helper()
	c, ok := s.Cell(measure, arm, params)
	if !ok || c.Value == nil {
		t.Errorf("no number for %s of %s, %v", measure, arm, params)
		return math.NaN()
	}
	return c.Value.Value
}

// ReportsFromRawFilesAlone fails where the raw files alone make another report than dir has.
func ReportsFromRawFilesAlone(t *testing.T, dir string) {
	t.Helper()
	copied := t.TempDir()
	for _, name := range []string{result.ManifestFile, result.BlocksFile, result.SamplesFile} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if name == result.SamplesFile && errors.Is(err, os.ErrNotExist) {
			continue // few experiments keep every single time
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(copied, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := report.Build(copied); err != nil {
		t.Fatal(err)
	}
	names := []string{report.HTMLFile, report.MarkdownFile, analysis.SummaryFile}
	for _, of := range []string{dir, copied} {
		charts, err := filepath.Glob(filepath.Join(of, report.ChartsDir, "*.svg"))
		if err != nil || len(charts) == 0 {
			t.Fatalf("%d charts in %s: %v", len(charts), of, err)
		}
		for _, c := range charts {
			names = append(names, filepath.Join(report.ChartsDir, filepath.Base(c)))
		}
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		a, aerr := os.ReadFile(filepath.Join(dir, name))
		b, berr := os.ReadFile(filepath.Join(copied, name))
		if err := errors.Join(aerr, berr); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) {
			t.Errorf("%s is another when made from the raw files alone", name)
		}
	}
}

// once ends a run, as Ctrl-C would, when its raw blocks hold a word.
func once(ctx context.Context, out, word string, cancel func()) {
	for ctx.Err() == nil {
		files, _ := filepath.Glob(filepath.Join(out, "*", result.BlocksFile))
		for _, f := range files {
			if b, _ := os.ReadFile(f); bytes.Contains(b, []byte(word)) {
				cancel()
				return
			}
		}
		testbed.Sleep(ctx, 5*time.Millisecond)
	}
}

// Interrupt has a run end as by Ctrl-C once a block of the measure is there: nothing is left over, and the report says
// so.
func Interrupt(t *testing.T, measure string, prepare Prepare) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o := Options(t, io.Discard)
	go once(ctx, o.Out, `"measure":"`+measure+`"`, cancel)
	dir, err := Perform(ctx, o, prepare)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	NothingLeft(t)
	h, err := os.ReadFile(filepath.Join(dir, report.HTMLFile))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(h, []byte("the run ended early: it was interrupted")) {
		t.Error("the report doesn't say that the run was interrupted")
	}
}

// AimsAreOfCells fails where an aim is of a measure or an arm that the design doesn't have.
func AimsAreOfCells(t *testing.T, d result.Design) {
	t.Helper()
	known := func(measure, arm string) bool {
		_, ok := d.Measure(measure)
		return ok && slices.ContainsFunc(d.Arms, func(a result.Arm) bool { return a.ID == arm || arm == "nobody" })
	}
	for _, a := range d.Aims {
		if a.Cannot != "" {
			continue
		}
		if !known(a.Measure, a.Arm) {
			t.Errorf("aim %s is of %s of %s", a.ID, a.Measure, a.Arm)
		}
		for _, ref := range []*result.CellRef{a.Over, a.Less, a.Plus} {
			if ref != nil && !known(cmp.Or(ref.Measure, a.Measure), cmp.Or(ref.Arm, a.Arm)) {
				t.Errorf("aim %s refers to %s of %s", a.ID, ref.Measure, ref.Arm)
			}
		}
	}
}

// BrokenSubject runs an experiment with kube-proxies that are none: the error says what is wrong, and nothing is left
// over.
func BrokenSubject(t *testing.T, prepare Prepare) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kube-proxy")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho a word before the end\nexit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		subjects []string
		want     string
	}{
		{[]string{"kube-proxy=" + path}, "a word before the end"},
		{[]string{"kube-proxy=" + path, "kube-proxy=" + path}, "given already"},
		{[]string{"kube-proxy=/nonexistent"}, "make -C test/kubeproxy build"},
		{[]string{"cilium=" + path}, "want kube-proxy=PATH"},
	} {
		o := Options(t, io.Discard)
		o.Subjects = c.subjects
		if _, err := Perform(t.Context(), o, prepare); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("with %v: error %v, want %q in it", c.subjects, err, c.want)
		}
		NothingLeft(t)
	}
}
