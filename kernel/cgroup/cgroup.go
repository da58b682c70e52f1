// Package cgroup finds cgroups (version 2), and makes such as single threads may join: a program attached to one sees
// the sockets that were made by its threads, whatever network namespace these were in. A Quota limits processor time.
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Mark is the extended attribute of a cgroup that stands for a node of its own: in a sandbox, nodes share one machine.
const Mark = "trusted.fairlead.node"

// Node returns the folder of the cgroup that holds all processes of this node and its pods: the nearest above the
// calling thread that bears Mark, or else the root of the cgroup file system.
func Node() (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	own, err := Own()
	if err != nil {
		return "", err
	}
	for at := own; len(at) > len(root); at = filepath.Dir(at) {
		if _, err := unix.Getxattr(at, Mark, nil); err == nil {
			return at, nil
		}
	}
	return root, nil
}

// Root finds the file system, which a hybrid host has beside those of version 1.
func Root() (string, error) {
	f, err := os.Open("/proc/self/mounts")
	if err != nil {
		return "", fmt.Errorf("cgroup: look for the file system: %w", err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		if w := strings.Fields(s.Text()); len(w) > 2 && w[2] == "cgroup2" {
			return w[1], nil
		}
	}
	return "", errors.Join(s.Err(), errors.New("cgroup: no file system of version 2 is mounted: mount one with "+
		"`mount -t cgroup2 none /sys/fs/cgroup/unified`, or start with the kernel parameter "+
		"systemd.unified_cgroup_hierarchy"))
}

// Own returns the folder of the calling thread's cgroup.
func Own() (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil {
		return "", fmt.Errorf("cgroup: look for the thread's own: %w", err)
	}
	for l := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(l, "0::"); ok {
			return filepath.Join(root, strings.TrimSpace(path)), nil
		}
	}
	return root, nil
}

// MemoryLimit returns how much memory, in bytes, the calling thread's cgroup and those above it allow; where none
// limits it, or there is no file system of version 2, math.MaxInt64.
func MemoryLimit() int64 {
	root, err := Root()
	if err != nil {
		return math.MaxInt64
	}
	own, err := Own()
	if err != nil {
		return math.MaxInt64
	}
	return memoryLimit(root, own)
}

// memoryLimit returns the smallest memory.max from the folder at up to root.
func memoryLimit(root, at string) int64 {
	limit := int64(math.MaxInt64)
	for ; len(at) >= len(root); at = filepath.Dir(at) {
		text, err := os.ReadFile(filepath.Join(at, "memory.max"))
		if err != nil {
			continue // the root of a host has none
		}
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil { // not "max"
			limit = min(limit, n)
		}
	}
	return limit
}

// New makes a cgroup for threads below the calling thread's own, which bears Mark, and returns its folder. One that is
// there already is taken.
func New(name string) (path string, err error) {
	own, err := Own()
	if err != nil {
		return "", err
	}
	path = filepath.Join(own, name)
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("cgroup: %w", err)
	}
	err = os.WriteFile(filepath.Join(path, "cgroup.type"), []byte("threaded"), 0)
	if err == nil {
		err = unix.Setxattr(path, Mark, []byte(name), 0)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("cgroup: let threads join %s: %w", path, err), os.Remove(path))
	}
	return path, nil
}

// Delete removes a cgroup that New made. One that isn't there is no error, nor is one that still has processes: it
// stays.
func Delete(path string) error {
	if path == "" {
		return nil
	}
	err := os.Remove(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("cgroup: %w", err)
	}
	if err == nil {
		return disableCPU(path)
	}
	return nil
}

// Do runs f on a thread in the cgroup of that folder. Sockets and processes that f itself makes belong there for ever;
// goroutines that f starts don't run there. Calls may nest. Where the thread can't go back, Do returns an error and
// leaves the goroutine locked to the thread, which ends with it.
func Do(path string, f func() error) (err error) {
	runtime.LockOSThread()
	home, err := Own()
	if err == nil {
		err = enter(path)
	}
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer func() {
		if back := enter(home); back != nil {
			err = errors.Join(err, back)
			return
		}
		runtime.UnlockOSThread()
	}()
	return f()
}

// Enter moves the whole process for good: for programs about to exec another.
func Enter(path string) error {
	if err := os.WriteFile(filepath.Join(path, "cgroup.procs"), []byte("0"), 0); err != nil {
		return fmt.Errorf("cgroup: enter %s: %w", path, err)
	}
	return nil
}

// enter moves the calling thread.
func enter(path string) error {
	f, err := os.OpenFile(filepath.Join(path, "cgroup.threads"), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString("0") // whoever writes
		f.Close()
	}
	if err != nil {
		return fmt.Errorf("cgroup: enter %s: %w", path, err)
	}
	return nil
}
