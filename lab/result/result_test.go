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
