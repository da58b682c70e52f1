package testbed

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"fairlead.dev/fairlead/agent/mode"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/netns"
)

// Whatever a run makes outside its results has a name that begins so, followed by its process and when that began.
const (
	spacePrefix  = "fllab-"
	folderPrefix = "fairlead-lab-"
	nodeSuffix   = "-node" // of a pair's near namespace
	farSuffix    = "-far"  // of its far one
)

// owner names this process for as long as the machine runs: number and start, since numbers are used again.
func owner() string {
	born, _ := born(os.Getpid())
	return fmt.Sprintf("%d-%d", os.Getpid(), born)
}

// Owner returns the name of this process among all of this machine until it restarts, for what it makes elsewhere.
func Owner() string { return owner() }

// Gone reports whether a process that Owner named has ended.
func Gone(owner string) bool { return dead(owner) }

// dead reports whether name, without its prefix, names a process that is gone. A name of another kind names none.
func dead(name string) bool {
	var pid int
	var begun uint64
	if n, _ := fmt.Sscanf(name, "%d-%d", &pid, &begun); n < 2 {
		return false
	}
	b, running := born(pid)
	return !running || b != begun
}

// born returns when a process started, in clock ticks after boot, and whether it runs (proc_pid_stat(5): fields 22 and
// 3).
func born(pid int) (ticks uint64, running bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	// the second field is a name in parentheses, which may hold anything
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return 0, false
	}
	_, err = fmt.Sscan(f[19], &ticks)
	return ticks, err == nil
}

// Sweep removes what runs left over that were killed before they could, and says what it was. Those that still run
// are left alone.
func Sweep() (removed []string, err error) {
	spaces, err := netns.List(spacePrefix)
	errs := []error{err}
	for _, name := range spaces {
		if dead(strings.TrimPrefix(name, spacePrefix)) {
			if err := errors.Join(unpin(name), netns.Delete(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
				continue
			}
			removed = append(removed, "network namespace "+name)
		}
	}
	groups, err := leftGroups()
	errs = append(errs, err)
	for _, dir := range groups {
		if dead(strings.TrimPrefix(filepath.Base(dir), spacePrefix)) {
			errs = append(errs, cgroup.Delete(dir))
			removed = append(removed, "cgroup "+dir)
		}
	}
	folders, err := filepath.Glob(filepath.Join(os.TempDir(), folderPrefix+"*"))
	errs = append(errs, err)
	for _, dir := range folders {
		if dead(strings.TrimPrefix(filepath.Base(dir), folderPrefix)) && ownFolder(dir) {
			errs = append(errs, os.RemoveAll(dir))
			removed = append(removed, "folder "+dir)
		}
	}
	return removed, errors.Join(errs...)
}

// Leftovers returns what this process has made and not removed yet: network namespaces, cgroups, folders, and processes
// that have one of these among their arguments.
func Leftovers() (l []string, err error) {
	own := owner()
	l, err = netns.List(spacePrefix + own)
	groups, gerr := leftGroups()
	for _, g := range groups {
		if strings.Contains(g, spacePrefix+own) {
			l = append(l, g)
		}
	}
	dir := filepath.Join(os.TempDir(), folderPrefix+own)
	folders, ferr := filepath.Glob(dir + "*")
	commands, cerr := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, c := range commands {
		if b, _ := os.ReadFile(c); strings.Contains(string(b), dir) {
			l = append(l, c+": "+string(b))
		}
	}
	return append(l, folders...), errors.Join(err, gerr, ferr, cerr)
}

// ownFolder reports whether path is a folder of this process's user: others can make folders of such names.
func ownFolder(path string) bool {
	i, err := os.Lstat(path)
	if err != nil || !i.IsDir() {
		return false
	}
	s, ok := i.Sys().(*syscall.Stat_t)
	return ok && int(s.Uid) == os.Geteuid()
}

// unpin removes what an agent left in a node's namespace, since not all of it goes with the namespace.
func unpin(name string) error {
	if !strings.HasSuffix(name, nodeSuffix) && !strings.HasSuffix(name, farSuffix) {
		return nil
	}
	ns, err := netns.Open(name)
	if err != nil {
		return nil // a name without a namespace, of which Delete knows
	}
	defer ns.Close()
	return ns.Do(func() error { return mode.Clean(context.Background()) })
}

// leftGroups lists the cgroups of all runs, below those that this process is in.
func leftGroups() (l []string, err error) {
	if own, err := cgroup.Own(); err == nil { // else there is no such file system, so nothing in it
		if l, err = filepath.Glob(filepath.Join(own, spacePrefix+"*")); err != nil {
			return nil, err
		}
	}
	quotas, err := cgroup.Quotas(spacePrefix)
	slices.Sort(l)
	for _, q := range quotas {
		if _, both := slices.BinarySearch(l, q); !both { // version 2 has one hierarchy
			l = append(l, q)
		}
	}
	return l, err
}
