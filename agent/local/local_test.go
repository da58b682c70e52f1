package local

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// serve replies in a folder until the test ends.
func serve(t *testing.T, folder, reply string) *Server {
	t.Helper()
	s, err := Serve(folder, Replies{Configuration: func(w io.Writer) error {
		_, err := io.WriteString(w, reply)
		return err
	}, Decided: func(io.Writer) error { return errors.New("nothing is decided yet") }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// read returns the reply to a request.
func read(folder, request string) (got string, err error) {
	err = Read(folder, request, func(r io.Reader) error {
		b, err := io.ReadAll(r)
		got = string(b)
		return err
	})
	return got, err
}

// demand reads a reply.
func demand(t *testing.T, folder, want string) {
	t.Helper()
	if got, err := read(folder, Configuration); err != nil || got != want {
		t.Errorf("%q, %v: want %q", got, err, want)
	}
}

func TestReplyOfTheAgentThatRuns(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "run")
	if _, err := read(folder, Configuration); !errors.Is(err, ErrNoAgent) {
		t.Errorf("without a folder: %v", err)
	}
	first := serve(t, folder, "first")
	demand(t, folder, "first")
	demand(t, folder, "first")
	second := serve(t, folder, "second") // begins before the first ends, as agents replace each other
	demand(t, folder, "second")
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	demand(t, folder, "second")
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if _, err := read(folder, Configuration); !errors.Is(err, ErrNoAgent) {
		t.Errorf("after the end: %v", err)
	}
}

func TestNoReplyOfAnAgentThatWasKilled(t *testing.T) {
	folder := t.TempDir()
	serve(t, folder, "killed").listener.Close()
	if _, err := read(folder, Configuration); !errors.Is(err, ErrNoAgent) {
		t.Error(err)
	}
	serve(t, folder, "next")
	demand(t, folder, "next")
}

func TestNetworkNamespacesShareAFolder(t *testing.T) {
	folder := t.TempDir()
	serve(t, folder, "here")
	err := netnstest.New(t).Do(func() error {
		if _, err := read(folder, Configuration); !errors.Is(err, ErrNoAgent) {
			t.Errorf("elsewhere: %v", err)
		}
		serve(t, folder, "there")
		demand(t, folder, "there")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	demand(t, folder, "here")
}

// unprivileged reads as another user than root. Its thread ends with it.
func unprivileged(folder string) (err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if _, _, failed := unix.RawSyscall(unix.SYS_SETRESUID, 65534, 65534, 65534); failed != 0 {
			err = failed
			return
		}
		_, err = read(folder, Configuration)
	}()
	<-done
	return err
}

func TestOthersThanRootAreRefused(t *testing.T) {
	folder, err := os.MkdirTemp("", "fairlead-local-") // which all may enter, unlike the test's own
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	s := serve(t, folder, "secret")
	if err := unprivileged(folder); err == nil || !strings.Contains(err.Error(), "run as root") {
		t.Errorf("by the file's mode: %v", err)
	}
	if err := os.Chmod(s.path, 0o666); err != nil {
		t.Fatal(err)
	}
	// the server may have closed before it is asked
	if err := unprivileged(folder); !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("by the user of the process: %v", err)
	}
	demand(t, folder, "secret")
}

func TestErrorsAreReplies(t *testing.T) {
	folder := t.TempDir()
	serve(t, folder, "")
	for request, want := range map[string]string{
		Decided: "nothing is decided yet", "other": `no request "other`, strings.Repeat("x", 100): "unexpected EOF",
	} {
		if got, err := read(folder, request); err == nil || !strings.Contains(err.Error(), want) || got != "" {
			t.Errorf("%s: %q, %v", request, got, err)
		}
	}
}

// A command that reads nothing holds up neither others nor the agent's end.
func TestSilentCommandHoldsNothingUp(t *testing.T) {
	folder := t.TempDir()
	s := serve(t, folder, "reply")
	c, err := net.Dial("unix", s.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	demand(t, folder, "reply")
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
