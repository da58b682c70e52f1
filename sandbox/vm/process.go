package vm

import (
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"

	"fairlead.dev/fairlead/kernel/child"
)

// process is a child that the kernel kills when this process dies.
type process struct {
	*child.Process
	name string
	said tail
}

// start runs a program with these files as its descriptors 3, 4, ..., which start closes here. What it prints is kept
// and also goes to console, if not nil.
func start(path string, args []string, console io.Writer, files ...*os.File) (*process, error) {
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	p := &process{name: path[strings.LastIndexByte(path, '/')+1:], said: tail{next: console}}
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = &p.said, &p.said, files
	var err error
	p.Process, err = child.Start(cmd, nil)
	return p, err
}

// tail keeps the last of what was written to it, and passes all on.
type tail struct {
	mu       sync.Mutex
	buffered []byte
	next     io.Writer
}

const tailSize = 4 << 10 // bytes

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buffered = append(t.buffered, b...)
	if n := len(t.buffered) - tailSize; n > 0 {
		t.buffered = append(t.buffered[:0], t.buffered[n:]...)
	}
	if t.next != nil {
		return t.next.Write(b)
	}
	return len(b), nil
}

// String returns the last lines, the first of them whole.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := string(t.buffered)
	if _, whole, cut := strings.Cut(s, "\n"); cut && len(s) == tailSize {
		s = whole
	}
	return strings.TrimSpace(strings.ReplaceAll(s, "\r", ""))
}
