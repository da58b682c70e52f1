package manifest

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/source"
)

func TestPathErrors(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "manifests"), 0o755))
	must(t, os.Symlink("a", filepath.Join(dir, "b")))
	must(t, os.Symlink("b", filepath.Join(dir, "a")))
	for _, tt := range []struct{ path, want string }{
		{"manifest", "read manifests from DIR/manifest: no such file or directory: did you mean DIR/manifests?"},
		{"other/a/b", "read manifests from DIR/other/a/b: no such file or directory: DIR has no other"},
		{"Manifests/x.yaml", "read manifests from DIR/Manifests/x.yaml: no such file or directory: did you mean " +
			"DIR/manifests?"},
		{"a", "read manifests from DIR/a: too many levels of symbolic links: a link leads back to itself"},
	} {
		_, _, err := Load(filepath.Join(dir, tt.path))
		rerr := New(filepath.Join(dir, tt.path)).Run(context.Background(), func(source.Batch) { t.Error("delivered") })
		for _, err := range []error{err, rerr} {
			if err == nil || strings.ReplaceAll(err.Error(), dir, "DIR") != tt.want {
				t.Errorf("%s: %v, want %s", tt.path, err, tt.want)
			}
		}
	}
	if _, _, err := Load(filepath.Join(dir, "x")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v is not ErrNotExist", err)
	}
	if got := reason(&fs.PathError{Op: "open", Path: "x", Err: unix.EACCES}).Error(); got != "permission denied: run as "+
		"a user that may read it, or let all read it with chmod a+rX" {
		t.Error(got)
	}
	must(t, os.Symlink("/proc/self/mem", filepath.Join(dir, "mem")))
	if _, _, err := Load(filepath.Join(dir, "mem")); err == nil || !strings.Contains(err.Error(), "input/output error") {
		t.Errorf("a file that can't be read: %v", err)
	}
}

func TestStdin(t *testing.T) {
	s := &Source{Stdin, strings.NewReader(svc("a", 1) + "---\nkind: [\n")}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	n := 0
	must(t, s.Run(ctx, func(b source.Batch) {
		n++
		if len(b.Changes) != 1 || len(b.Problems) != 1 || b.Problems[0].File != "stdin" || b.Problems[0].Line != 10 {
			t.Errorf("got %v", b)
		}
		cancel()
	}))
	if n != 1 {
		t.Errorf("delivered %d times", n)
	}
	s = &Source{Stdin, strings.NewReader(svc("a", 1))}
	if objects, problems, err := s.load(); len(objects) != 1 || problems != nil || err != nil {
		t.Errorf("loaded %v, %v, %v", objects, problems, err)
	}
	s = &Source{Stdin, iotest.ErrReader(io.ErrUnexpectedEOF)}
	if err := s.Run(context.Background(), nil); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a broken stream: %v", err)
	}
	r, w, err := os.Pipe()
	must(t, err)
	defer w.Close()
	defer r.Close()
	ctx, cancel = context.WithCancel(context.Background())
	cancel()
	must(t, (&Source{Stdin, r}).Run(ctx, nil)) // returns though the stream does not end
}

func TestPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	must(t, unix.Mkfifo(pipe, 0o600))
	go func() { _ = os.WriteFile(pipe, []byte(svc("a", 1)), 0) }()
	objects, _, err := Load(pipe)
	if err != nil || len(objects) != 1 {
		t.Errorf("loaded %v, %v", objects, err)
	}
	// In a folder a pipe is nothing to read: opening it would wait for a writer.
	if objects, _, err := Load(filepath.Dir(pipe)); err != nil || len(objects) != 0 {
		t.Errorf("loaded %v, %v", objects, err)
	}
	must(t, os.Rename(pipe, pipe+".yaml"))
	if objects, _, err := Load(filepath.Dir(pipe)); err != nil || len(objects) != 0 {
		t.Errorf("loaded %v, %v", objects, err)
	}
}

// A change that no event tells of, in another file, shows whether that file is read again.
func TestOnlyTheChangedFileIsRead(t *testing.T) {
	w := watch(t, folder(t, "a.yaml", svc("a", 1), "b.yaml", svc("b", 1)))
	f, err := os.OpenFile(w.path("b.yaml"), os.O_RDWR, 0)
	must(t, err)
	m, err := unix.Mmap(int(f.Fd()), 0, len(svc("b", 1)), unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	must(t, f.Close())
	w.marked("a:1 b:1")
	copy(m, svc("b", 2))
	w.save("a.yaml", svc("a", 2))
	w.want("a:2 b:1")
	must(t, os.Chmod(w.path("b.yaml"), 0o600)) // an event
	w.want("a:2 b:2")
	must(t, unix.Munmap(m))
}
