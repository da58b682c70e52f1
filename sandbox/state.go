package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"fairlead.dev/fairlead/kernel/netns"
)

// Dir is where each sandbox says that it is there: NAME.json, and for those that want one a folder NAME.
const Dir = "/run/fairlead/sandbox"

// State is what a sandbox says of itself to other processes.
type State struct {
	Name  string `json:"name"`
	PID   int    `json:"pid"`   // the process that holds it
	Born  uint64 `json:"born"`  // when that process started, in clock ticks after boot: numbers are used again
	Hosts []Host `json:"hosts"` // outside, nodes, pods
}

// self is the state of a sandbox that this process holds.
func self(name string) State {
	born, _ := born(os.Getpid())
	return State{Name: name, PID: os.Getpid(), Born: born}
}

// Alive reports whether the process that holds the sandbox still runs.
func (s State) Alive() bool {
	b, running := born(s.PID)
	return running && b == s.Born
}

// Namespaces returns the names of the sandbox's network namespaces that are there.
func (s State) Namespaces() ([]string, error) {
	all, err := netns.List(s.Name + "-")
	ours := slices.DeleteFunc(all, func(n string) bool {
		rest := n[len(s.Name)+1:]
		return rest != "wire" && rest != "outside" && !strings.HasPrefix(rest, "node-") && !strings.HasPrefix(rest, "pod-")
	})
	return ours, err
}

// born returns when a process started, and whether it runs (proc_pid_stat(5): fields 22 and 3).
func born(pid int) (uint64, bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	// The second field is a name in parentheses, which may itself hold anything.
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return 0, false
	}
	ticks, err := strconv.ParseUint(fields[19], 10, 64)
	return ticks, err == nil
}

func statePath(name string) string { return filepath.Join(Dir, name+".json") }

// temporary writes the state to a file of its own beside its place, and returns its path.
func (s State) temporary() (string, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		return "", err
	}
	f, err := os.CreateTemp(Dir, "."+s.Name+"-")
	if err != nil {
		return "", err
	}
	_, err = f.Write(append(b, '\n'))
	return f.Name(), errors.Join(err, f.Close(), os.Chmod(f.Name(), 0o644))
}

// write puts the state in its place, whole at every moment.
func (s State) write() error {
	tmp, err := s.temporary()
	if err == nil {
		err = os.Rename(tmp, statePath(s.Name))
	}
	if err != nil {
		return fmt.Errorf("record sandbox %s: %w", s.Name, err)
	}
	return nil
}

// claim takes a name for this process. It returns an error where the name is taken, left over, or the start of
// namespaces that no sandbox made.
func claim(name string) error {
	s := self(name)
	tmp, err := s.temporary()
	if err != nil {
		return fmt.Errorf("claim sandbox name %s: %w", name, err)
	}
	defer os.Remove(tmp)
	err = os.Link(tmp, statePath(name))
	if errors.Is(err, fs.ErrExist) {
		return inUse(name)
	}
	if err != nil {
		return fmt.Errorf("claim sandbox name %s: %w", name, err)
	}
	if foreign, err := s.Namespaces(); err != nil || len(foreign) > 0 {
		os.Remove(statePath(name))
		return errors.Join(err,
			fmt.Errorf("claim sandbox name %s: there are network namespaces %s that no sandbox recorded: "+
				"take another name, or remove them with ip netns delete", name, strings.Join(foreign, ", ")))
	}
	return nil
}

// inUse states which process has a name.
func inUse(name string) error {
	s, err := StateOf(name)
	switch {
	case err != nil:
		return err
	case s.Alive():
		return fmt.Errorf("sandbox %s is up already, held by process %d", name, s.PID)
	}
	return fmt.Errorf("sandbox %s is left over from process %d, which is gone: take it down first", name, s.PID)
}

func unclaim(name string) error {
	if err := os.Remove(statePath(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("give sandbox name %s back: %w", name, err)
	}
	return nil
}

// StateOf reads the state of one sandbox. A sandbox that isn't there returns an error that is fs.ErrNotExist.
func StateOf(name string) (s State, err error) {
	b, err := os.ReadFile(statePath(name))
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return s, fmt.Errorf("there is no sandbox %s: %w", name, fs.ErrNotExist)
	case err != nil:
		return s, fmt.Errorf("read state of sandbox %s: %w", name, err)
	}
	return s, nil
}

// States returns all sandboxes of this machine, by name.
func States() ([]State, error) {
	entries, err := os.ReadDir(Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	var states []State
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || !goodName.MatchString(name) {
			continue
		}
		s, err := StateOf(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // went meanwhile
		}
		if err != nil {
			return nil, err
		}
		states = append(states, s)
	}
	return states, nil
}

// Host finds a host by its name, written as in Host.Name, with a slash after the role, or without the role: "pod
// shop/web-1", "pod/shop/web-1" and "shop/web-1" are one.
func (s State) Host(name string) (Host, error) {
	var known []string
	for _, h := range s.Hosts {
		if short := h.Short(); name == h.Name || name == string(h.Role)+"/"+short || name == short {
			return h, nil
		}
		known = append(known, h.Short())
	}
	if len(known) > 12 {
		known = append(known[:12], fmt.Sprintf("and %d more", len(known)-12))
	}
	return Host{}, fmt.Errorf("sandbox %s has no host %q: it has %s", s.Name, name, strings.Join(known, ", "))
}

// Leftovers returns the sandboxes whose process is gone: killed before it could take them down.
func Leftovers() ([]State, error) {
	states, err := States()
	return slices.DeleteFunc(states, State.Alive), err
}

// DownByName removes a sandbox that was left over: its namespaces and all that it recorded, nothing else. One that is
// still held is an error, one that isn't there an error that is fs.ErrNotExist.
func DownByName(name string) error {
	s, err := StateOf(name)
	if err != nil {
		return err
	}
	if s.Alive() {
		return fmt.Errorf("take sandbox %s down: process %d still holds it", name, s.PID)
	}
	spaces, err := s.Namespaces()
	errs := []error{err}
	for _, h := range s.Hosts {
		if err := h.unload(); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	for _, n := range spaces {
		if err := netns.Delete(n); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take sandbox %s down: %w", name, err)
	}
	halfWritten, err := filepath.Glob(filepath.Join(Dir, "."+name+"-*"))
	errs = append(errs, err)
	for _, path := range append(halfWritten, filepath.Join(Dir, name)) {
		errs = append(errs, os.RemoveAll(path))
	}
	return errors.Join(append(errs, unclaim(name))...)
}
