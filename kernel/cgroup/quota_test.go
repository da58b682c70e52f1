package cgroup

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A thread with a limit of a fifth of a processor gets that, of the time that passes.
func TestQuota(t *testing.T) {
	q, err := NewQuota("fl-quota-"+rand.Text()[:8], 0.2)
	if err != nil {
		t.Fatalf("this test needs root and the controller cpu: %v", err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = q.Do(func() error {
		cpu := func() time.Duration {
			var ts unix.Timespec
			unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
			return time.Duration(ts.Nano())
		}
		before, begun := cpu(), time.Now()
		for time.Since(begun) < 5*quotaPeriod {
		}
		if got, passed := cpu()-before, time.Since(begun); got > passed/2 {
			t.Errorf("it used %v of %v", got, passed)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if l, err := Quotas(filepath.Base(q.Path)); len(l) != 1 || err != nil {
		t.Errorf("listed: %q, %v", l, err)
	}
	if err := Delete(q.Path); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(q.Path); err == nil {
		t.Errorf("%s is still there", q.Path)
	}
}

func TestFirstVersion(t *testing.T) {
	const own = "9:name=systemd:/\n4:cpu,cpuacct:/pods/a:b\n0::/x\n"
	for mounts, want := range map[string]string{
		"cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n": "/sys/fs/cgroup/cpu,cpuacct/pods/a:b",
		"cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n":           "",
		"cgroup2 /sys/fs/cgroup cgroup2 rw,cpu 0 0\n":                   "",
	} {
		if got, ok := firstVersion(mounts, own); got != want || ok != (want != "") {
			t.Errorf("%s: %q, want %q", strings.TrimSpace(mounts), got, want)
		}
	}
}
