package mode

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestChoose(t *testing.T) {
	t.Setenv("XTABLES_LOCKFILE", filepath.Join(t.TempDir(), "lock")) // the host's is shared with others at work
	m, why, err := Choose(t.Context(), Auto)
	if err != nil || !strings.Contains(why, "auto: ") {
		t.Errorf("auto: %v, %q", err, why)
	}
	for _, name := range preference {
		if name == m.Name {
			break
		}
		if !strings.Contains(why, "not "+name) {
			t.Errorf("it is not said why not %s: %s", name, why)
		}
	}
	if m, _, err := Choose(t.Context(), "ebpf"); err != nil || m.Name != "ebpf" {
		t.Errorf("by name: %s, %v", m.Name, err)
	}
	if _, _, err := Choose(t.Context(), "magic"); err == nil || !strings.Contains(err.Error(), "userspace") {
		t.Errorf("unknown: %v", err)
	}
}
