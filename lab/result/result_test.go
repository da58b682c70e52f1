package result

import (
	"os"
	"path/filepath"
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

// An exact run's measures of time are counts, and the design that it is made of stays as it is.
func TestCounted(t *testing.T) {
	d := Design{Margin: 0.01, Method: []string{"first"},
		Measures: []Measure{{ID: "crr", Unit: "µs", Ratio: true}, {ID: "size", Unit: "MiB"}},
		Answer:   &Answer{Findings: []Finding{{Object: "time"}, {Object: "rules"}}}}
	c := d.Counted()
	if c.Measures[0].Unit != Instructions || c.Measures[1].Unit != "MiB" || !c.Exact || c.Margin >= d.Margin ||
		len(c.Method) != 2 || c.Answer.Findings[0].Object != "instructions" || c.Answer.Findings[1].Object != "rules" {
		t.Errorf("%+v", c)
	}
	if d.Measures[0].Unit != "µs" || d.Answer.Findings[0].Object != "time" || d.Exact {
		t.Errorf("the design that it was made of is %+v", d)
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
