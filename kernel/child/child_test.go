package child

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const parent = "FAIRLEAD_CHILD_PARENT" // in a test's child that has a child itself

func TestMain(m *testing.M) {
	if os.Getenv(parent) != "" {
		p, err := Start(exec.Command("sleep", "60"), nil)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(p.PID)
		<-p.Ended()
	}
	os.Exit(m.Run())
}

// A child dies with its parent, however that ends.
func TestDiesWithItsParent(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), parent+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p, err := Start(cmd, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Kill()
	var pid int
	if _, err := fmt.Fscan(bufio.NewReader(out), &pid); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	p.Kill()
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 20_000); n != 1 {
		t.Errorf("the child of a killed parent is still there: %v", err)
	}
}

func TestEnd(t *testing.T) {
	p, err := Start(exec.Command("sleep", "60"), func(f func() error) error { return f() })
	if err != nil {
		t.Fatal(err)
	}
	p.End(time.Minute)
	var how *exec.ExitError
	if !errors.As(p.Err(), &how) || how.Sys().(interface{ Signal() unix.Signal }).Signal() != unix.SIGTERM {
		t.Errorf("it ended with %v", p.Err())
	}
	stubborn := exec.Command("sh", "-c", "trap '' TERM; echo; while :; do sleep 1; done")
	out, err := stubborn.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if p, err = Start(stubborn, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	p.End(time.Millisecond)
	unix.Kill(-p.PID, unix.SIGKILL) // what it started
	if !errors.As(p.Err(), &how) || how.Sys().(interface{ Signal() unix.Signal }).Signal() != unix.SIGKILL {
		t.Errorf("the stubborn ended with %v", p.Err())
	}
	p.Kill()
	if _, err := Start(exec.Command("/nonexistent"), nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a program that isn't there: %v", err)
	}
}
