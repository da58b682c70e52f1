package testbed

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Processors is how the machine is shared out: client and server together on one processor, since waking another costs
// more than what is measured; everything else on the rest.
type Processors struct {
	Load []int // one
	rest []int // all others; the same one where there is no other
	All  []int
}

// readProcessors shares out what this process may use.
func readProcessors() (p Processors, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return p, fmt.Errorf("read which processors may be used: %w", err)
	}
	for i := range len(set) * strconv.IntSize {
		if set.IsSet(i) {
			p.All = append(p.All, i)
		}
	}
	n := len(p.All)
	p.Load, p.rest = p.All[n-1:], p.All[:max(1, n-1)]
	return p, nil
}

// pin keeps all threads of a process, those to come too, on processors. Threads that begin meanwhile are found by
// looking again.
func pin(pid int, cpus []int) error {
	var set unix.CPUSet
	for _, c := range cpus {
		set.Set(c)
	}
	for done, more := map[string]bool{}, true; more; {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		if err != nil || len(tasks) == 0 {
			return errors.Join(err, fmt.Errorf("pin process %d: %w", pid, os.ErrProcessDone))
		}
		more = false
		for _, t := range tasks {
			if done[t] {
				continue
			}
			done[t], more = true, true
			tid, _ := strconv.Atoi(filepath.Base(t))
			if err := unix.SchedSetaffinity(tid, &set); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("pin process %d to processors %v: %w", pid, cpus, err)
			}
		}
	}
	return nil
}
