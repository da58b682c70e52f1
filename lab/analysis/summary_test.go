package analysis

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
	"fairlead.dev/fairlead/lab/stats"
)

func design() result.Design {
	return result.Design{
		ID: "services", Vary: result.Axis{Param: "services"}, Baseline: "direct", Again: "again", Margin: 0.02, Rounds: 21,
		Arms: []result.Arm{{ID: "direct", Title: "direct"}, {ID: "again", Title: "direct again"},
			{ID: "nft", Title: "nftables"}},
		Measures: []result.Measure{
			{ID: "crr", Title: "connection", Unit: "µs", Stat: "p50", Ratio: true},
			{ID: "change", Title: "one change", Unit: "ms", Stat: "p50"},
			{ID: "memory", Title: "memory", Unit: "MiB", Stat: "value"},
			{ID: "packets", Title: "packets", Stat: "counter:softnet", Ratio: true, Margin: 0.001},
		},
	}
}

// record makes a run's directory of the given blocks.
func record(t *testing.T, d result.Design, blocks ...result.Block) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "run")
	w, err := result.Create(dir, result.Manifest{Design: d, Profile: "quick", Seed: 7,
		Command: []string{"fairlead", "lab", "run", "services"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if err := w.Add(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close("", result.Load{}); err != nil {
		t.Fatal(err)
	}
	return dir
}

func at(n string) map[string]string { return map[string]string{"services": n} }

// rounds is crr blocks: in each round the baseline at both ends, drifting, and between them it again and nft 10 %
// dearer.
func rounds(t *testing.T, n int) (blocks []result.Block) {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 1))
	for i := range n {
		level := 60_000 * (1 + 0.3*float64(i)/float64(n)) // the machine slows down by 30 %: ratios must not care
		add := func(arm string, params map[string]string, factor float64) {
			ns := make([]int64, 200)
			for j := range ns {
				ns[j] = int64(level * factor * (1 + 0.002*r.NormFloat64()))
			}
			b, err := result.Block{Measure: "crr", Arm: arm, Params: params, Round: i,
				Counters: map[string]float64{"softnet": 800}}.Times(ns)
			if err != nil {
				t.Fatal(err)
			}
			b.CPU = &load.CPU{System: 200 * 10_000}
			blocks = append(blocks, b)
		}
		add("direct", nil, 0.98)
		add("nft", at("1000"), 1.1)
		add("again", nil, 1)
		add("nft", at("10"), 1)
		add("direct", nil, 1.02)
	}
	return blocks
}

func summarize(t *testing.T, dir string) Summary {
	t.Helper()
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestRatiosAreToTheSameRound(t *testing.T) {
	s := summarize(t, record(t, design(), rounds(t, 21)...))
	var got []string
	for _, c := range s.Cells {
		got = append(got, c.Arm+" "+c.Params.String()+" "+string(c.Verdict))
	}
	if d := cmp.Diff([]string{"direct  ", "again  same", "nft services=10 same", "nft services=1000 higher"},
		got); d != "" {
		t.Errorf("cells: -want +got\n%s", d)
	}
	c, _ := s.Cell("crr", "nft", at("1000"))
	if e := c.Ratio; math.Abs(e.Value-1.1) > 0.001 || e.N != 21 || e.CI.Half() > 0.002 {
		t.Errorf("ratio %+v, want 1.1", e)
	}
	if c.X != 1000 || !c.HasX || c.Ops != 4200 || c.Blocks != 21 || c.Counters["softnet"] != 4 ||
		c.CPU["system"] != 10_000 {
		t.Errorf("%+v", c)
	}
	if v := c.Value; v.Value < 70_000 || v.Value > 82_000 {
		t.Errorf("value %+v", v)
	}
	if q := c.Quantiles; q["p1"] > q["p50"] || q["p99.9"] > q["max"] || q["p50"] < 66_000 {
		t.Errorf("quantiles %v", q)
	}
	if r := s.Resolution["crr"]; r.Half <= 0 || r.Half > 0.002 {
		t.Errorf("resolution %+v", r)
	}
	if base := s.Select("crr", "direct")[0]; base.Ratio != nil || base.Verdict != "" || base.Blocks != 42 || base.HasX {
		t.Errorf("baseline %+v", base)
	}
	if len(s.Warnings) != 0 {
		t.Errorf("warnings %v", s.Warnings)
	}
	if nft := s.Select("crr", "nft"); len(nft) != 2 || nft[0].X != 10 {
		t.Errorf("select gives %+v", nft)
	}
}

func TestAims(t *testing.T) {
	d := design()
	aim := func(id string, of result.Metric, bound float64, edit func(*result.Aim)) {
		a := result.Aim{ID: id, Measure: "crr", Arm: "nft", Params: at("1000"), Of: of, Bound: bound}
		if edit != nil {
			edit(&a)
		}
		d.Aims = append(d.Aims, a)
	}
	overTen := func(a *result.Aim) { a.Over = &result.CellRef{Params: at("10")} }
	aim("ratio hit", "ratio", 1.2, nil)
	aim("ratio miss", "ratio", 1.05, nil)
	aim("ratio close", "ratio", 1.1, nil)
	aim("least hit", "ratio", 1.05, func(a *result.Aim) { a.Least = true })
	aim("least miss", "ratio", 1.2, func(a *result.Aim) { a.Least = true })
	aim("value hit", "value", 1e5, nil)
	aim("p99 miss", "p99", 6e4, nil)
	aim("p99 hit", "p99", 1e5, nil)
	aim("p99.9 of 4200 hit", "p99.9", 1e5, nil)
	aim("p99.99 of 4200", "p99.99", 1e5, nil)
	aim("growth hit", "value", 1.11, overTen)
	aim("growth miss", "value", 1.09, overTen)
	aim("p50 growth hit", "p50", 1.2, overTen)
	aim("failed hit", "failed", 0, nil)
	aim("elsewhere", "value", 1, func(a *result.Aim) { a.Params = at("7") })
	aim("no arm", "value", 1, func(a *result.Aim) { a.Arm = "ebpf" })
	aim("over nothing", "value", 1, func(a *result.Aim) { a.Over = &result.CellRef{Arm: "ebpf"} })
	want := map[string]Outcome{"ratio hit": Hit, "ratio miss": Miss, "ratio close": Inconclusive, "least hit": Hit,
		"least miss": Miss, "value hit": Hit,
		"p99 miss": Miss, "p99 hit": Hit, "p99.9 of 4200 hit": Hit, "p99.99 of 4200": Inconclusive, "growth hit": Hit,
		"growth miss":    Miss,
		"p50 growth hit": Hit, "failed hit": Hit, "elsewhere": NotMeasured, "no arm": NotMeasured,
		"over nothing": NotMeasured}
	s := summarize(t, record(t, d, rounds(t, 21)...))
	for _, r := range s.Aims {
		if r.Outcome != want[r.ID] {
			t.Errorf("%s: %s, want %s (%+v, %s)", r.ID, r.Outcome, want[r.ID], r.Got, r.Why)
		}
		if (r.Outcome == NotMeasured) != (r.Got == nil) || r.Got == nil && r.Why == "" {
			t.Errorf("%s: %+v", r.ID, r)
		}
	}
	d.Aims = []result.Aim{{ID: "G0", Measure: "crr", Arm: "nft", Params: at("10"), Of: "beauty"}}
	r, err := result.Read(record(t, design(), rounds(t, 1)...))
	if err != nil {
		t.Fatal(err)
	}
	r.Manifest.Design = d
	if _, err := Summarize(r); err == nil {
		t.Error("an aim of beauty is no error")
	}
}

// What the baseline differs from itself is no more claimed of an aim than of a cell.
func TestAimsOfANoisyRun(t *testing.T) {
	e := stats.Estimate{Value: 1.1, CI: stats.Interval{Low: 1.09, High: 1.11}, N: 21, Sure: true}
	for _, c := range []struct {
		bound, resolution float64
		least             bool
		want              Outcome
	}{
		{1.13, 0, false, Hit}, {1.13, 0.01, false, Hit}, {1.13, 0.04, false, Inconclusive}, {1.2, 0.04, false, Hit},
		{1.07, 0, false, Miss}, {1.07, 0.01, false, Miss}, {1.07, 0.04, false, Inconclusive}, {1, 0.04, false, Miss},
		{1.07, 0.01, true, Hit}, {1.07, 0.04, true, Inconclusive}, {1.13, 0.01, true, Miss}, {1.13, 0.04, true, Inconclusive},
	} {
		if got := judge(result.Aim{Bound: c.bound, Least: c.least}, e, c.resolution); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
	blocks := rounds(t, 21)
	for i, b := range blocks {
		if b.Arm == "again" {
			blocks[i].Figures["p50"] *= 1.05
		}
	}
	d := design()
	a := result.Aim{Measure: "crr", Arm: "nft", Params: at("1000")}
	for _, of := range []result.Metric{result.Ratio, result.Value} {
		a.ID, a.Of, a.Bound = string(of), of, map[result.Metric]float64{result.Ratio: 1.12, result.Value: 84_000}[of]
		d.Aims = append(d.Aims, a)
	}
	a.ID, a.Of, a.Bound, a.Over = "growth", "value", 1.12, &result.CellRef{Params: at("10")}
	d.Aims = append(d.Aims, a)
	for _, r := range summarize(t, record(t, d, blocks...)).Aims {
		if want := map[string]Outcome{"ratio": Inconclusive, "value": Hit, "growth": Inconclusive}[r.ID]; r.Outcome != want {
			t.Errorf("%s: %s, want %s (%+v)", r.ID, r.Outcome, want, r.Got)
		}
	}
}

func TestScalarsAndCounters(t *testing.T) {
	var blocks []result.Block
	for i := range 5 {
		blocks = append(blocks, result.Block{Measure: "memory", Arm: "nft", Params: at("10"), Round: i}.Is(float64(100+i)))
		for arm, n := range map[string]float64{"direct": 8, "again": 8, "nft": 10} {
			blocks = append(blocks, result.Block{Measure: "packets", Arm: arm, Round: i, Ops: 100,
				Counters: map[string]float64{"softnet": 100 * n}})
		}
	}
	// no baseline
	blocks = append(blocks, result.Block{Measure: "packets", Arm: "nft", Round: 5, Ops: 100,
		Counters: map[string]float64{"softnet": 100}})
	blocks = append(blocks, result.Block{Measure: "packets", Arm: "nft", Round: 6}) // nothing done
	s := summarize(t, record(t, design(), blocks...))
	c, _ := s.Cell("memory", "nft", at("10"))
	if want := (&stats.Estimate{Value: 102, CI: stats.Interval{Low: 100, High: 104}, N: 5, Sure: true}); cmp.Diff(want,
		c.Value) != "" {
		t.Errorf("memory %+v", c.Value)
	}
	p, _ := s.Cell("packets", "nft", nil)
	if p.Ratio == nil || p.Ratio.Value != 1.25 || p.Ratio.N != 5 || p.Verdict != stats.Higher || p.Value.N != 6 {
		t.Errorf("packets %+v, ratio %+v", p, p.Ratio)
	}
	if s.Resolution["packets"].Half != 0 {
		t.Errorf("an exact counter has the resolution %+v", s.Resolution["packets"])
	}
}

func TestKilledRun(t *testing.T) {
	dir := record(t, design(), rounds(t, 2)...)
	path := filepath.Join(dir, result.BlocksFile)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b[:len(b)-40], 0o644); err != nil {
		t.Fatal(err)
	}
	r, err := result.Read(dir)
	if err != nil || !r.Cut || len(r.Blocks) != 9 {
		t.Fatalf("cut %v, %d blocks, %v", r.Cut, len(r.Blocks), err)
	}
	r.Manifest.Ended = time.Time{}
	r.Manifest.Outcome = "interrupted"
	s, err := Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"no end", "interrupted", "incompletely", "2 of 21"} {
		if !strings.Contains(strings.Join(s.Warnings, "\n"), want) {
			t.Errorf("no warning says %q: %q", want, s.Warnings)
		}
	}
	for _, c := range s.Cells {
		if c.Verdict != "" && c.Verdict != stats.Unclear {
			t.Errorf("two rounds can't say %q of %s", c.Verdict, c.Arm)
		}
	}
	// A bad line that is not the last one is damage, not a killed run.
	if err := os.WriteFile(path, append([]byte("{\"measure\": 3}\n"), b...), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := result.Read(dir); err == nil || !strings.Contains(err.Error(), "line 1") {
		t.Errorf("damage is read as %v", err)
	}
}

func TestFailuresAndNoiseReported(t *testing.T) {
	blocks := rounds(t, 6)
	blocks[1].Errors = map[string]int64{"timeout": 2, "refused": 1}
	r, err := result.Read(record(t, design(), blocks...))
	if err != nil {
		t.Fatal(err)
	}
	r.Manifest.Before = result.Load{}
	r.Manifest.After = result.Load{Total: 100 * time.Second, Busy: 40 * time.Second, Own: 30 * time.Second,
		Steal: 3 * time.Second}
	s, err := Summarize(r)
	if err != nil {
		t.Fatal(err)
	}
	if w := strings.Join(s.Warnings, "\n"); !strings.Contains(w,
		"connection, nftables (services=1000): 3 of 1203 operations failed (1 refused, 2 timeout)") {
		t.Errorf("warnings %q", w)
	}
	if n := s.Noise; !n.Noisy || n.Steal != 0.03 || math.Abs(n.Others-0.1) > 1e-12 || len(n.Why) < 2 {
		t.Errorf("noise %+v", n)
	}
}

func TestBadBlocks(t *testing.T) {
	for name, b := range map[string]result.Block{
		"unknown measure": {Measure: "beauty", Arm: "nft"},
		"unknown arm":     {Measure: "crr", Arm: "ipvs"},
		"bad histogram":   {Measure: "crr", Arm: "nft", Operations: result.Operations{Hist: "AAAA"}},
	} {
		r := result.Run{Manifest: result.Manifest{Schema: result.Schema, Design: design()}, Blocks: []result.Block{b}}
		if _, err := Summarize(r); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := Summarize(result.Run{Manifest: result.Manifest{Design: design()}}); err != nil {
		t.Errorf("a run without blocks: %v", err)
	}
}

// What is written must come back: the summary file is what Summarize makes from the raw files.
func TestSummaryFileIsTheSummary(t *testing.T) {
	dir := record(t, design(), rounds(t, 6)...)
	want := summarize(t, dir)
	if _, err := WriteSummary(dir); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, SummaryFile))
	if err != nil {
		t.Fatal(err)
	}
	var got Summary
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	r, err := result.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range r.Blocks {
		if b.Order != i || b.Experiment != "services" {
			t.Errorf("block %d: order %d, experiment %q", i, b.Order, b.Experiment)
		}
	}
	h, err := Hist(r, want.Cells[0])
	if err != nil || h.TotalCount() != want.Cells[0].Ops {
		t.Errorf("histogram %v, %v", h, err)
	}
}
