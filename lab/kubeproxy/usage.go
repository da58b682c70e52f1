package kubeproxy

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Usage is what a process took until now.
type Usage struct {
	User, System   time.Duration // of processors, with all programs that it ran and that have ended; in steps of 10 ms
	Resident, Peak int64         // bytes of its own memory, now and at most
}

// CPU is the processor time.
func (u Usage) CPU() time.Duration { return u.User + u.System }

// Usage of the kube-proxy, and of the iptables-restore or nft that it ran.
func (p *Proxy) Usage() (Usage, error) { return UsageOf(p.child.PID) }

// PID is its process.
func (p *Proxy) PID() int { return p.child.PID }

// CPU is the processor time of its threads that live (/proc/PID/task/TID/schedstat, first field) and, in steps of 10
// ms, of the programs that it ran and that have ended.
func (p *Proxy) CPU() (sum time.Duration, err error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.PID()))
	for _, path := range threads {
		b, rerr := os.ReadFile(path)
		if errors.Is(rerr, os.ErrNotExist) || errors.Is(rerr, unix.ESRCH) {
			continue // that thread has ended
		}
		ns, _, _ := strings.Cut(string(b), " ")
		n, perr := strconv.ParseInt(ns, 10, 64)
		err = errors.Join(err, rerr, perr)
		sum += time.Duration(n)
	}
	stat, rerr := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
	if err = errors.Join(err, rerr); err != nil {
		return 0, fmt.Errorf("read what %s used: %w", p, err)
	}
	ran, err := children(stat)
	return sum + ran, err
}

// children is what of a process's times is its ended children's.
func children(stat []byte) (time.Duration, error) {
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 15 {
		return 0, fmt.Errorf("%d fields in %q", len(fields)+2, stat)
	}
	user, err := strconv.ParseInt(fields[13], 10, 64)
	system, serr := strconv.ParseInt(fields[14], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err, serr)
}

// UsageOf reads /proc/PID/stat and /proc/PID/status (proc_pid_stat(5)).
func UsageOf(pid int) (u Usage, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err == nil {
		u.User, u.System, err = times(stat)
	}
	if err != nil {
		return u, fmt.Errorf("read what process %d used: %w", pid, err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, fmt.Errorf("read the memory of process %d: %w", pid, err)
	}
	u.Resident, u.Peak = kilobytes(status, "VmRSS"), kilobytes(status, "VmHWM")
	return u, nil
}

// times adds a process's fields 14 and 16, and 15 and 17: its own time and its ended children's, in ticks, of which
// Linux shows a hundred to the second (USER_HZ). Field 2, the name, may hold anything but ends with the last ")".
func times(stat []byte) (user, system time.Duration, err error) {
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 15 {
		return 0, 0, fmt.Errorf("%d fields in %q", len(fields)+2, stat)
	}
	for i, sum := range []*time.Duration{&user, &system, &user, &system} {
		n, err := strconv.ParseInt(fields[11+i], 10, 64)
		if err != nil {
			return 0, 0, err
		}
		*sum += time.Duration(n) * 10 * time.Millisecond
	}
	return user, system, nil
}

// kilobytes is a size in /proc/PID/status in bytes, 0 if it isn't there.
func kilobytes(status []byte, name string) (n int64) {
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			fmt.Sscan(rest, &n)
		}
	}
	return n << 10
}
