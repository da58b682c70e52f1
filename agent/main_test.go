package agent

import (
	"os"
	"path/filepath"
	"testing"
)

// TestMain returns iptables a lock of its own: the host's is shared by all network namespaces, and by whoever else is
// at work.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "fairlead-agent-test-")
	if err != nil {
		panic(err)
	}
	os.Setenv("XTABLES_LOCKFILE", filepath.Join(dir, "xtables.lock"))
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}
