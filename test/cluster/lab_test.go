package cluster

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"fairlead.dev/fairlead/lab/analysis"
	"fairlead.dev/fairlead/lab/result"
)

// The lab's experiment control is told by a control plane of its own.
func TestLab(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Getenv("FAIRLEAD"), "lab", "run", "control", "--quick", "--services", "20",
		"--modes", "nftables",
		"--subject", "control-plane="+os.Getenv("CONTROL_PLANE"), "--seed", "1", "--out", dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", cmd.Args, err, out)
	}
	runs, err := filepath.Glob(filepath.Join(dir, "control-*"))
	if err != nil || len(runs) != 1 {
		t.Fatalf("its results: %v, %v", runs, err)
	}
	r, err := result.Read(runs[0])
	check(t, err)
	s, err := analysis.Summarize(r)
	check(t, err)
	if c, ok := s.Cell("moved-churn", "nftables", map[string]string{"services": "20"}); !ok || c.Value == nil ||
		c.Failed() > 0 {
		t.Errorf("no number for changes: %+v", c)
	}
	if words := strings.Join(s.Design.Missing, "\n"); strings.Contains(words, "real API server") {
		t.Errorf("it was told by another API server: %s", words)
	}
}
