package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"fairlead.dev/fairlead/sandbox"
)

// Event is what a daemon tells whoever started it, a line of JSON each.
type Event struct {
	Done, Total int    // hosts built
	Step        string // for people: what is done, where that is not hosts
	Up          bool   // the last of a good start
	Error       string // the last of a bad one
}

// EventsFD is the file descriptor that Start gives the daemon for its events.
const EventsFD = 3

// Events returns a function that writes events to a file descriptor, for the daemon's side, up to the last. That
// none is read is no error.
func Events(fd int) func(Event) {
	syscall.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "events")
	out := json.NewEncoder(f)
	return func(e Event) {
		out.Encode(e)
		if e.Up || e.Error != "" {
			f.Close()
		}
	}
}

// Start runs this very program with args in the background, as the daemon of the sandbox of that name, and waits until
// the sandbox is up. What the program prints goes to sandbox.log in Folder. Where it ends before, or ctx does, nothing
// is left of it.
func Start(ctx context.Context, name string, args []string, progress func(Event)) error {
	if err := start(ctx, name, args, progress); err != nil {
		return fmt.Errorf("start sandbox %s: %w", name, err)
	}
	return nil
}

func start(ctx context.Context, name string, args []string, progress func(Event)) error {
	if err := os.MkdirAll(Folder(name), 0o755); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(Folder(name), "sandbox.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	events, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer events.Close()
	d := exec.Command("/proc/self/exe", args...)
	d.Args[0], d.Dir = os.Args[0], "/"
	d.Stdout, d.Stderr, d.ExtraFiles = log, log, []*os.File{theirs} // the first extra file is EventsFD
	d.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = d.Start()
	theirs.Close()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { d.Process.Signal(syscall.SIGTERM) })
	err = follow(events, progress)
	stop()
	if err == nil {
		return d.Process.Release()
	}
	d.Wait()
	if _, there := sandbox.StateOf(name); Absent(there) {
		err = errors.Join(err, os.RemoveAll(Folder(name)))
	}
	return cmp.Or(ctx.Err(), err)
}

// follow passes progress on until the sandbox is up.
func follow(events io.Reader, progress func(Event)) error {
	for in := json.NewDecoder(events); ; {
		var e Event
		if err := in.Decode(&e); err != nil {
			return fmt.Errorf("its process ended: %w", err)
		}
		switch {
		case e.Error != "":
			return errors.New(e.Error)
		case e.Up:
			return nil
		}
		progress(e)
	}
}

// WaitReady waits until the agents of all nodes are ready, and all pods have a network.
func WaitReady(ctx context.Context, name string) error {
	for {
		s, err := StatusOf(name)
		i := slices.IndexFunc(s.Agents, func(a Agent) bool { return a.State != Ready })
		switch {
		case err == nil && i < 0 && s.Apart == "":
			return nil
		case sleep(ctx, 20*time.Millisecond):
			continue
		case err != nil:
			return err
		case i < 0:
			return errors.New(s.Apart)
		}
		a := s.Agents[i]
		if a.Error != "" {
			a.State += ", last ended with " + a.Error
		}
		return fmt.Errorf("the agent of node %s is %s: see %s", a.Node, a.State, a.Log)
	}
}
