package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"fairlead.dev/fairlead/sandbox"
)

// patience is how long a daemon has to take its sandbox down once told to: its agents' farewell, and some more.
const patience = farewell + 10*time.Second

// Stop takes a sandbox down, whose daemon runs or was killed. A sandbox that another kind of process holds is an error.
func Stop(ctx context.Context, name string) error {
	s, err := sandbox.StateOf(name)
	if err != nil {
		return err
	}
	if !s.Alive() {
		return sandbox.DownByName(name)
	}
	if _, err := StatusOf(name); err != nil {
		return fmt.Errorf("stop sandbox %s: process %d holds it and is not a sandbox daemon: stop that process", name, s.PID)
	}
	if err := syscall.Kill(s.PID, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("stop sandbox %s: end process %d: %w", name, s.PID, err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for s.Alive() {
		if !sleep(ctx, 10*time.Millisecond) {
			return fmt.Errorf("stop sandbox %s: process %d doesn't end: %w", name, s.PID, ctx.Err())
		}
	}
	if err := sandbox.DownByName(name); !Absent(err) {
		return err
	}
	return nil
}

// Pick returns the sandbox of that name or, for an empty name, the only one that a daemon keeps up.
func Pick(name string) (sandbox.State, error) {
	if name != "" {
		return sandbox.StateOf(name)
	}
	states, err := sandbox.States()
	if err != nil {
		return sandbox.State{}, err
	}
	states = slices.DeleteFunc(states, func(s sandbox.State) bool {
		_, err := StatusOf(s.Name)
		return err != nil || !s.Alive()
	})
	if len(states) == 1 {
		return states[0], nil
	}
	if len(states) == 0 {
		return sandbox.State{}, errors.New("no sandbox is up: start one with fairlead sandbox up DIR")
	}
	var names []string
	for _, s := range states {
		names = append(names, s.Name)
	}
	return sandbox.State{}, fmt.Errorf("sandboxes %s are up: choose one with --name", strings.Join(names, " and "))
}

// All returns the sandboxes that Stop can take down: those that daemons keep up, and what killed processes left over.
func All() ([]sandbox.State, error) {
	states, err := sandbox.States()
	return slices.DeleteFunc(states, func(s sandbox.State) bool {
		_, err := StatusOf(s.Name)
		return err != nil && s.Alive()
	}), err
}
