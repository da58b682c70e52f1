package result

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestSamples(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	w, err := Create(dir, Manifest{Profile: "quick", Seed: 7})
	if err != nil {
		t.Fatal(err)
	}
	b := Block{Measure: "crr", Arm: "nft", Round: 2}
	for _, ns := range [][]int64{nil, {30, 10}, {20}} {
		if err := w.Samples(b, ns); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close("", Load{}); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, SamplesFile))
	if want := "measure,arm,round,number,ns\ncrr,nft,2,0,30\ncrr,nft,2,1,10\ncrr,nft,2,0,20\n"; err != nil ||
		string(got) != want {
		t.Errorf("%q, want %q: %v", got, want, err)
	}
}

// empty makes the directory of a run without blocks.
func empty(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "run")
	w, err := Create(dir, Manifest{Design: Design{ID: "services"}, Profile: "quick", Seed: 7})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Close("", Load{}); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestCreateNeverOverwrites(t *testing.T) {
	dir := empty(t)
	if _, err := Create(dir, Manifest{}); err == nil {
		t.Error("a second run went into the same directory")
	}
}

func TestOtherSchema(t *testing.T) {
	dir := empty(t)
	path := filepath.Join(dir, ManifestFile)
	if err := os.WriteFile(path, []byte(`{"schema": 99}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(dir); err == nil || !strings.Contains(err.Error(), "99") {
		t.Errorf("schema 99 is read: %v", err)
	}
}

func FuzzReadBlocks(f *testing.F) {
	f.Add("{\"arm\":\"nft\"}\n{\"arm\"")
	f.Fuzz(func(t *testing.T, s string) {
		blocks, cut, err := readBlocks(strings.NewReader(s))
		if whole := strings.HasSuffix(s, "\n") || s == ""; err == nil && cut == whole {
			t.Errorf("cut %v of %q", cut, s)
		}
		if len(blocks) > strings.Count(s, "\n") {
			t.Errorf("%d blocks in %d lines", len(blocks), strings.Count(s, "\n"))
		}
	})
}

// An exact run's measures of time are counts, without bounds in time, and the design that it is made of stays as it is.
func TestCounted(t *testing.T) {
	d := Design{Margin: 0.01, Method: []string{"first"},
		Measures: []Measure{{ID: "crr", Unit: "µs", Text: "from call to return", Ratio: true}, {ID: "size", Unit: "MiB"},
			{ID: "sync", Unit: "s", Text: "from start to end", Counted: "processor time"}},
		Aims: []Aim{{ID: "bound", Measure: "sync", Of: Value}, {ID: "flat", Measure: "sync", Of: Value, Over: &CellRef{}},
			{ID: "ratio", Measure: "crr", Of: Ratio}, {ID: "small", Measure: "size", Of: Value}},
		Ghosts:   []Ghost{{Measure: "sync"}, {Measure: "size"}},
		Pictures: []Picture{{Measures: []string{"crr"}, Ghosts: []Ghost{{Measure: "crr"}}}},
		Answer:   &Answer{Findings: []Finding{{Object: "time"}, {Object: "rules"}}}}
	c := d.Counted()
	for i, want := range []Measure{{Unit: Instructions, Text: "from call to return"}, {Unit: "MiB"},
		{Unit: Instructions, Text: "processor time"}} {
		if m := c.Measures[i]; m.Unit != want.Unit || m.Text != want.Text {
			t.Errorf("%+v", m)
		}
	}
	var aims []string
	for _, a := range c.Aims {
		aims = append(aims, a.ID)
	}
	if !c.Exact || c.Margin >= d.Margin || len(c.Method) != 2 || c.Answer.Findings[0].Object != "instructions" ||
		c.Answer.Findings[1].Object != "rules" || !slices.Equal(aims, []string{"flat", "ratio", "small"}) ||
		len(c.Ghosts) != 1 || len(c.Pictures[0].Ghosts) != 0 {
		t.Errorf("%+v", c)
	}
	if d.Measures[0].Unit != "µs" || d.Answer.Findings[0].Object != "time" || d.Exact || len(d.Aims) != 4 ||
		len(d.Ghosts) != 2 || len(d.Pictures[0].Ghosts) != 1 {
		t.Errorf("the design that it was made of is %+v", d)
	}
}

// What is left out is named, and nothing reads it any more.
func TestLeaveOut(t *testing.T) {
	of := func(id string) []CellRef { return []CellRef{{Measure: id}} }
	d := Design{
		Measures: []Measure{{ID: "crr"}, {ID: "idle", Title: "idle agent"}, {ID: "tail", Title: "tail", From: "idle"}},
		Aims:     []Aim{{Measure: "crr"}, {Measure: "idle"}, {Measure: "crr", Over: &CellRef{Measure: "idle"}}},
		Ghosts:   []Ghost{{Measure: "idle"}},
		Pictures: []Picture{{ID: "both", Measures: []string{"crr", "idle"}}, {ID: "one", Measures: []string{"idle"}}},
		Answer: &Answer{Findings: []Finding{{Cells: of("idle")}, {Cells: of("crr")},
			{Cells: of("crr"), Over: &CellRef{Measure: "idle"}}, {Tally: TallyAims}}}}
	c := d
	c.LeaveOut("it lasts", "idle", "unknown")
	if len(c.Measures) != 1 || len(c.Aims) != 1 || len(c.Ghosts) != 0 || len(c.Answer.Findings) != 2 ||
		len(c.Pictures) != 1 || !slices.Equal(c.Pictures[0].Measures, []string{"crr"}) ||
		!slices.Equal(c.Missing, []string{"idle agent, tail: it lasts"}) {
		t.Errorf("%+v", c)
	}
	if len(d.Measures) != 3 || len(d.Aims) != 3 || len(d.Pictures) != 2 || len(d.Pictures[0].Measures) != 2 ||
		len(d.Answer.Findings) != 4 {
		t.Errorf("the design that it was made of is %+v", d)
	}
	c.LeaveOut("there are none", "unknown")
	if len(c.Missing) != 1 {
		t.Errorf("missing: %q", c.Missing)
	}
}

// A trace is folded once, and what it says are blocks of its arm.
func TestFolded(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	w, err := Create(dir, Manifest{})
	if err != nil {
		t.Fatal(err)
	}
	at := Trace{Measure: "crr", Arm: "ebpf", Params: Params{"services": "10"}}
	path, err := w.Trace(at)
	if err != nil || os.WriteFile(path, []byte("raw"), 0o644) != nil {
		t.Fatal(path, err)
	}
	if again, err := w.Trace(at); again != "" || err != nil {
		t.Errorf("traced again, to %q: %v", again, err)
	}
	if err := w.Folded(func(b []byte) (string, map[string]float64, error) {
		return string(b) + " folded", map[string]float64{"-of-tcp": 7}, nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close("", Load{}); err != nil {
		t.Fatal(err)
	}
	r, err := Read(dir)
	if err != nil || len(r.Blocks) != 1 || r.Blocks[0].Measure != "crr-of-tcp" || r.Blocks[0].Arm != "ebpf" ||
		r.Blocks[0].Figures["value"] != 7 {
		t.Errorf("%+v, %v", r.Blocks, err)
	}
	b, err := os.ReadFile(filepath.Join(dir, TracesFolder, "crr_ebpf_services=10.folded"))
	if _, raw := os.Stat(path); err != nil || string(b) != "raw folded" || raw == nil {
		t.Errorf("%q, %v; the raw trace is there: %v", b, err, raw == nil)
	}
}
