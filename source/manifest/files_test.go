package manifest

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// Files visits what Load reads: through links, once around a loop, and without what would block.
func TestFiles(t *testing.T) {
	root, elsewhere := t.TempDir(), t.TempDir()
	for _, path := range []string{root + "/a.yaml", root + "/.hidden.yaml", root + "/notes.txt", elsewhere + "/b.json"} {
		if err := os.WriteFile(path, []byte(path), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	current := filepath.Join(t.TempDir(), "current")
	if err := errors.Join(os.Symlink(elsewhere, root+"/linked"), os.Symlink(root, elsewhere+"/loop"),
		os.Symlink(root+"/none", root+"/gone.yaml"), unix.Mkfifo(root+"/pipe.yaml", 0o600),
		os.Symlink(root, current)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{root, current} {
		got := map[string]bool{}
		if err := Files(path, func(file string, _ []byte) { got[file] = true }); err != nil {
			t.Fatal(err)
		}
		want := []string{filepath.Join(path, "a.yaml"), filepath.Join(path, "linked", "b.json")}
		if l := slices.Sorted(maps.Keys(got)); !slices.Equal(l, want) {
			t.Errorf("%q, want %q", l, want)
		}
	}
	if err := Files(root+"/none", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a path that isn't there: %v", err)
	}
	if err := Files(root+"/pipe.yaml", nil); err != nil {
		t.Errorf("a pipe: %v", err)
	}
}
