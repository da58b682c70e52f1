package vmtest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fairlead.dev/fairlead/sandbox/vm"
)

// Open boots a machine that ends with the test, and fails the test if it can't.
func Open(t *testing.T, o vm.Options) *vm.Machine {
	t.Helper()
	// not the test's context: that ends before Cleanup, and Close shall say what it sees
	m, err := vm.Open(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// Run builds the tests of a package (import path, or path from the caller's directory) and runs some, as Tests.Run has
// it.
func Run(t *testing.T, pkg, pattern string, args ...string) {
	t.Helper()
	Build(t, pkg).Run(t, pattern, args...)
}

// Tests are a package's tests, compiled.
type Tests struct {
	Kernel      vm.Series // they run under; vm.Default if empty
	binary, dir string
}

// Build compiles a package's tests. They are there until the test ends.
func Build(t *testing.T, pkg string) Tests {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "guest.test")
	golang := func(args ...string) string {
		cmd := exec.Command("go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // a static binary
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v: %s", cmd, err, &stderr)
		}
		return strings.TrimSpace(string(out))
	}
	dir := golang("list", "-f", "{{.Dir}}", pkg)
	golang("test", "-c", "-o", binary, pkg)
	return Tests{binary: binary, dir: dir}
}

// Run boots a machine and runs there those tests whose names match pattern, as go test -run means it. Each of them is a
// subtest of t with its output; arguments go to the test binary. A test skipped in the guest is failed here, and so is
// a pattern that matches nothing.
func (b Tests) Run(t *testing.T, pattern string, args ...string) {
	t.Helper()
	m := Open(t, vm.Options{Kernel: b.Kernel, CPUs: 1}) // all that a guest has share one of the host's
	t.Logf("under Linux %s, emulated: times say nothing", m.Release)
	args = append([]string{b.binary, "-test.v=test2json", "-test.run=" + pattern}, args...)
	ctx := t.Context()
	if end, ok := t.Deadline(); ok {
		left := time.Until(end)
		args = append(args, fmt.Sprintf("-test.timeout=%v", left*9/10))
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, left*19/20) // later than the binary's own, which says where it hung
		defer cancel()
	}
	said, events, err := decoder(t)
	if err != nil {
		t.Fatal(err)
	}
	const seed = "CONFORMANCE_SEED" // by which random worlds are drawn again
	code, err := m.Run(ctx, vm.Command{Args: args, Env: []string{seed + "=" + os.Getenv(seed)}, Dir: b.dir, Stdout: said,
		Stderr: said})
	said.Close()
	root := <-events
	if err != nil {
		t.Errorf("the tests were cut short: %v", err)
	}
	if len(root.below) == 0 {
		t.Errorf("no test matches %q", pattern)
	}
	root.replay(t)
	if code != 0 && !t.Failed() {
		t.Errorf("the test binary ended with code %d, though none of its tests failed", code)
	}
}

// result is a test's, or the whole binary's.
type result struct {
	name   string
	action string // pass, fail, skip; empty while it runs
	said   strings.Builder
	below  []*result
}

// decoder turns what a test binary prints into results: the binary's own, sent when the writer is closed.
func decoder(t *testing.T) (io.WriteCloser, <-chan *result, error) {
	cmd := exec.Command("go", "tool", "test2json")
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, nil, fmt.Errorf("go tool test2json: %w", err)
	}
	done := make(chan *result, 1)
	go func() {
		root, err := collect(out, t.Logf)
		if err != nil {
			t.Errorf("read go tool test2json: %v", err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("go tool test2json: %v", err)
		}
		done <- root
	}()
	return in, done, nil
}

// collect reads test2json's events to the end, and logs each test that ends.
func collect(events io.Reader, log func(string, ...any)) (*result, error) {
	root := &result{}
	all := map[string]*result{"": root}
	for d := json.NewDecoder(bufio.NewReader(events)); ; {
		var e struct {
			Action, Test, Output string
			Elapsed              float64 // seconds
		}
		if err := d.Decode(&e); err == io.EOF {
			return root, nil
		} else if err != nil {
			return root, err
		}
		r := all[e.Test]
		if r == nil {
			r = &result{name: e.Test}
			all[e.Test] = r
			p := parent(all, e.Test)
			p.below = append(p.below, r)
		}
		switch e.Action {
		case "output":
			if !framing(e.Output) {
				r.said.WriteString(e.Output)
			}
		case "pass", "fail", "skip":
			r.action = e.Action
			if e.Test != "" {
				log("%s %s (%.1f s)", e.Action, e.Test, e.Elapsed)
			}
		}
	}
}

// framing reports whether a line only says that a test begins or ends, as the subtest here does too.
func framing(line string) bool {
	line = strings.TrimLeft(line, " ")
	return strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ") || line == "PASS\n" || line == "FAIL\n"
}

// parent finds the test that a test is a subtest of. A subtest's own name may have slashes.
func parent(all map[string]*result, name string) *result {
	for {
		i := strings.LastIndexByte(name, '/')
		if i < 0 {
			return all[""]
		}
		name = name[:i]
		if p := all[name]; p != nil {
			return p
		}
	}
}

// replay makes subtests of what is below.
func (r *result) replay(t *testing.T) {
	for _, b := range r.below {
		t.Run(strings.TrimPrefix(strings.TrimPrefix(b.name, r.name), "/"), func(t *testing.T) {
			b.replay(t)
			b.evaluate(t)
		})
	}
	if r.name == "" {
		r.evaluate(t)
	}
}

func (r *result) evaluate(t *testing.T) {
	if said := strings.TrimSpace(r.said.String()); said != "" {
		t.Log(said)
	}
	switch r.action {
	case "pass":
	case "fail":
		t.Fail()
	case "skip":
		t.Error("skipped in the guest")
	default:
		t.Error("didn't end")
	}
}
