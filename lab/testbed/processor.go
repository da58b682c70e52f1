package testbed

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

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

// ProcessorTime returns the processor time of a process, all its threads', those that have ended too; 0 is this
// process. It is exact to the nanosecond, and can be read until the process has been waited for.
func ProcessorTime(pid int) (time.Duration, error) {
	const scheduled = 2 // CPUCLOCK_SCHED of the kernel's include/linux/posix-timers_types.h
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|scheduled), &ts); err != nil {
		return 0, fmt.Errorf("read the clock of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
}

// Spent returns the processor time that used counts while something goes on, and how long that goes on.
func Spent(used func() (time.Duration, error), something func() error) (spent, wall time.Duration, err error) {
	before, err := used()
	if err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	if err := something(); err != nil {
		return 0, 0, err
	}
	wall = time.Since(begin)
	after, err := used()
	return after - before, wall, err
}

var started = time.Now()

// Clock returns what measures work that this process does itself, or by commands that it waits for: the time; in an
// exact run, the processor time, that of the commands to the microsecond, since the clock of such a machine jumps over
// idle time.
func (b *Testbed) Clock() time.Duration {
	if !b.Config.Exact {
		return time.Since(started)
	}
	own, err := ProcessorTime(0)
	var commands unix.Rusage
	if err = errors.Join(err, unix.Getrusage(unix.RUSAGE_CHILDREN, &commands)); err != nil {
		panic(err) // both of this process: neither can fail
	}
	return own + time.Duration(commands.Utime.Nano()+commands.Stime.Nano())
}
