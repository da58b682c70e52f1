package cgroup

import (
	"crypto/rand"
	"errors"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestMemoryLimitIsTheSmallestAbove(t *testing.T) {
	root := t.TempDir()
	pod := filepath.Join(root, "kubepods", "pod")
	own := filepath.Join(pod, "container")
	if err := os.MkdirAll(own, 0o755); err != nil {
		t.Fatal(err)
	}
	if got := memoryLimit(root, own); got != math.MaxInt64 {
		t.Errorf("without any limit: %d", got)
	}
	for _, f := range []struct {
		folder, text string
		want         int64
	}{{own, "max\n", math.MaxInt64}, {pod, "536870912\n", 512 << 20}, {own, "268435456\n", 256 << 20},
		{root, "1073741824\n", 256 << 20}} {
		if err := os.WriteFile(filepath.Join(f.folder, "memory.max"), []byte(f.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := memoryLimit(root, own); got != f.want {
			t.Errorf("with %q in %s: %d, want %d", f.text, f.folder, got, f.want)
		}
	}
}

func TestThreadsAndProcessesJoin(t *testing.T) {
	home, err := Own()
	if err != nil {
		t.Fatal(err)
	}
	name := "fl-cgroup-" + rand.Text()[:8]
	path, err := New(name)
	if err != nil {
		t.Fatalf("this test needs root and cgroups of version 2: %v", err)
	}
	defer func() {
		if err := errors.Join(Delete(path), Delete(path), Delete("")); err != nil {
			t.Error(err)
		}
	}()
	if again, err := New(name); again != path || err != nil {
		t.Errorf("made again it is %q, %v", again, err)
	}
	failure := errors.New("what f returns")
	err = Do(path, func() error {
		for what, get := range map[string]func() (string, error){"own": Own, "node": Node} {
			if at, err := get(); at != path || err != nil {
				t.Errorf("%s inside is %q, %v", what, at, err)
			}
		}
		out, err := exec.Command("cat", "/proc/self/cgroup").Output()
		if err != nil || !strings.Contains(string(out), "/"+name+"\n") {
			t.Errorf("a child is in\n%s%v", out, err)
		}
		return failure
	})
	if !errors.Is(err, failure) {
		t.Error(err)
	}
	if at, err := Own(); at != home || err != nil {
		t.Errorf("afterwards the thread is in %q, %v", at, err)
	}
	if root, err := Root(); err != nil {
		t.Error(err)
	} else if node, err := Node(); err != nil || node != root && home == root {
		t.Errorf("without a mark, the node is %q, %v", node, err)
	}
}

func TestNoSuchCgroup(t *testing.T) {
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	called := false
	if err := Do(filepath.Join(root, "fl-none"), func() error { called = true; return nil }); !errors.Is(err,
		os.ErrNotExist) || called {
		t.Errorf("entering a cgroup that isn't there: %v", err)
	}
}
