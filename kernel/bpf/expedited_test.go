package bpf

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// Waits are expedited while attachments are made and not thereafter, also where an agent was killed meanwhile. A
// setting of others stays, and what can't be set keeps nothing from being attached.
func TestExpedited(t *testing.T) {
	failed := errors.New("failed")
	for name, c := range map[string]struct {
		before, meanwhile, after string
		killed                   bool
	}{
		"usual":        {"0\n", "1", "0", false},
		"after a kill": {"1\n", "1", "0", true},
		"of others":    {"1\n", "1\n", "1\n", false},
		"none":         {"", "", "", false},
	} {
		file, mark := filepath.Join(t.TempDir(), "rcu"), filepath.Join(t.TempDir(), "mark")
		now := func() string {
			b, _ := os.ReadFile(file)
			return string(b)
		}
		if c.before != "" {
			if err := os.WriteFile(file, []byte(c.before), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if c.killed {
			if err := os.Mkdir(mark, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		err := expedited(file, mark, func() error {
			if got := now(); got != c.meanwhile {
				t.Errorf("%s: meanwhile %q, want %q", name, got, c.meanwhile)
			}
			return failed
		})
		if !errors.Is(err, failed) || now() != c.after {
			t.Errorf("%s: then %q, want %q: %v", name, now(), c.after, err)
		}
		if _, err := os.Lstat(mark); err == nil {
			t.Errorf("%s: the mark stays", name)
		}
	}
}
