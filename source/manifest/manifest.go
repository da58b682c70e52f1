package manifest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"fairlead.dev/fairlead/source"
)

// Stdin is the path that stands for standard input.
const Stdin = "-"

// A Source reads one path.
type Source struct {
	path  string
	stdin io.Reader
}

var _ source.Source = (*Source)(nil)

// New makes a source of the folder, or of the file, at path. With Stdin it reads standard input once, to its end.
func New(path string) *Source { return &Source{path, os.Stdin} }

// Run returns what there is and then each change, until ctx ends. Only a path that can't be read at first is an error.
func (s *Source) Run(ctx context.Context, deliver func(source.Batch)) error {
	if stream, err := s.stream(); err != nil {
		return err
	} else if stream != nil {
		return s.follow(ctx, stream, deliver)
	}
	n, err := newNotifier()
	if err != nil {
		return fmt.Errorf("watch %s: %w", s.path, err)
	}
	defer n.close()
	return newFollower(s.path, n).run(ctx, deliver)
}

// Check returns why a source of path can't begin, without reading what is there.
func Check(path string) error {
	if path == Stdin {
		return nil
	}
	fi, err := os.Stat(path)
	if err == nil && (fi.IsDir() || fi.Mode().IsRegular()) { // to open a pipe may wait for a writer
		var file *os.File
		if file, err = os.Open(path); err == nil {
			file.Close()
		}
	}
	if err != nil {
		return pathError(path, err)
	}
	return nil
}

// Load reads path once. Objects come by file and place. Only a path that can't be read is an error.
func Load(path string) ([]source.Object, []source.Problem, error) { return New(path).load() }

// Files calls visit with each regular file at a path, a folder's or the one that it is, as Load reads them: links are
// followed, and what is hidden is passed over.
func Files(path string, visit func(file string, text []byte)) error {
	return files(path, map[string]bool{}, visit)
}

// files is Files without the folders that are above.
func files(path string, above map[string]bool, visit func(file string, text []byte)) error {
	info, err := os.Stat(path)
	if err != nil {
		return pathError(path, err)
	}
	if info.Mode().IsRegular() {
		text, err := os.ReadFile(path)
		if err != nil {
			return pathError(path, err)
		}
		visit(path, text)
		return nil
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil || !info.IsDir() || above[real] {
		return err
	}
	above[real] = true
	defer delete(above, real)
	entries, err := os.ReadDir(path)
	for _, e := range entries {
		name := filepath.Join(path, e.Name())
		if target, serr := os.Stat(name); serr != nil || hidden(e.Name()) || !target.IsDir() && !wanted(e.Name()) {
			continue
		}
		err = errors.Join(err, files(name, above, visit))
	}
	return err
}

func (s *Source) load() ([]source.Object, []source.Problem, error) { return s.loadWith(false) }

// loadWith reads the source once, with templates those of workloads, too.
func (s *Source) loadWith(templates bool) (objects []source.Object, problems []source.Problem, err error) {
	if stream, err := s.stream(); err != nil {
		return nil, nil, err
	} else if stream != nil {
		st, err := s.read(stream, templates)
		if err != nil {
			return nil, nil, err
		}
		b, _ := st.batch()
		return st.listing(), b.Problems, nil
	}
	f := newFollower(s.path, nil)
	f.store.words.Templates = templates
	for range 10 { // files that vanish while they are read are looked at again
		if err := f.round(); err != nil {
			return nil, nil, err
		}
	}
	if err := f.rootError(); err != nil {
		return nil, nil, err
	}
	b, _ := f.store.batch()
	return f.store.listing(), b.Problems, nil
}

// stream returns what can be read only once: standard input, or a pipe. It is nil for folders and files.
func (s *Source) stream() (io.Reader, error) {
	if s.path == Stdin {
		return s.stdin, nil
	}
	fi, err := os.Stat(s.path)
	if err != nil {
		return nil, pathError(s.path, err)
	}
	if fi.IsDir() || fi.Mode().IsRegular() {
		return nil, nil
	}
	file, err := os.Open(s.path)
	if err != nil {
		return nil, pathError(s.path, err)
	}
	return file, nil
}

// follow reads a stream, delivers what it says, and waits for ctx to end. A stream may never end: then a goroutine is
// left that reads it.
func (s *Source) follow(ctx context.Context, stream io.Reader, deliver func(source.Batch)) error {
	st, failed := make(chan *store, 1), make(chan error, 1)
	go func() {
		if got, err := s.read(stream, false); err != nil {
			failed <- err
		} else {
			st <- got
		}
	}()
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	case got := <-st:
		b, _ := got.batch()
		deliver(b)
		<-ctx.Done()
		return nil
	}
}

// read reads a stream to its end.
func (s *Source) read(stream io.Reader, templates bool) (*store, error) {
	text, err := io.ReadAll(stream)
	if err != nil {
		return nil, fmt.Errorf("read manifests from %s: %w", s.name(), err)
	}
	st := newStore()
	st.words.Templates = templates
	c, d := content{}.read(text, st.words)
	st.update(s.name(), c, d)
	return st, nil
}

func (s *Source) name() string {
	if s.path == Stdin {
		return "stdin"
	}
	return s.path
}

// rootError returns the reason why the root itself could not be read.
func (f *follower) rootError() error {
	for _, p := range f.store.faults[f.root] {
		if p.Reason == CannotRead || p.Reason == Missing {
			return fmt.Errorf("read manifests from %s: %s", f.root, p.Message)
		}
	}
	return nil
}

// pathError returns why a path given by a person can't be read, and what to do.
func pathError(path string, err error) error {
	hint := ""
	if errors.Is(err, fs.ErrNotExist) {
		hint = similar(filepath.Clean(path))
	}
	return fmt.Errorf("read manifests from %s: %w%s", path, reason(err), hint)
}

// reason returns an error of the os package without what was tried on what, and with a way out.
func reason(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		err = pe.Err
	}
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: run as a user that may read it, or let all read it with chmod a+rX", err)
	case errors.Is(err, syscall.ELOOP):
		return fmt.Errorf("%w: a link leads back to itself", err)
	}
	return err
}

// similar returns a hint for a path that does not exist: the first part that is missing, and a name like it.
func similar(path string) string {
	parent := filepath.Dir(path)
	for ; parent != filepath.Dir(parent); path, parent = parent, filepath.Dir(parent) {
		if _, err := os.Stat(parent); err == nil {
			break
		}
	}
	entries, err := os.ReadDir(parent)
	if err != nil {
		return ""
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	slices.Sort(names)
	if near := Nearest(filepath.Base(path), names); near != "" {
		return ": did you mean " + filepath.Join(parent, near) + "?"
	}
	return fmt.Sprintf(": %s has no %s", parent, filepath.Base(path))
}
