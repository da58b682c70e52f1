package test_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// A measurement that is interrupted while it still tries what the machine can do says that, and leaves nothing.
func TestInterruptedWhileModesAreTried(t *testing.T) {
	for want, args := range map[string][]string{
		"fairlead: interrupted: nothing was measured; everything was removed\n": {"lab", "run", "services", "--quick",
			"--out", t.TempDir()},
		"fairlead: interrupted: there is no advice; everything was removed\n": {"advise", "--source", "../examples/shop",
			"--node", "a"},
	} {
		run := exec.Command(fairlead, args...)
		var out bytes.Buffer
		run.Stdout, run.Stderr = &out, &out
		if err := run.Start(); err != nil {
			t.Fatal(err)
		}
		made := func() int {
			l, _ := filepath.Glob(fmt.Sprintf("/run/netns/fllab-%d-*-try-*", run.Process.Pid))
			return len(l)
		}
		eventually(t, "a mode is tried", func() bool { return made() > 0 })
		run.Process.Signal(os.Interrupt)
		if err := run.Wait(); err == nil || out.String() != want || made() > 0 {
			t.Errorf("%s: %v, %d namespaces are left; it says %q, want %q", args[0], err, made(), &out, want)
		}
	}
}
