package cgroup

import (
	"crypto/rand"
	"errors"
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
	parent, _, err := quotaParent()
	if err != nil {
		t.Fatal(err)
	}
	before, _ := os.ReadFile(filepath.Join(parent, "cgroup.subtree_control")) // version 1 has none
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
	if after, _ := os.ReadFile(filepath.Join(parent, "cgroup.subtree_control")); string(after) != string(before) {
		t.Errorf("the parent's controllers were %q, and are %q", before, after)
	}
}

// The controller is enabled once, and disabled again with the quota that it was enabled for, unless others need it.
func TestControllerPutBack(t *testing.T) {
	parent := t.TempDir()
	control := filepath.Join(parent, "cgroup.subtree_control")
	// write makes a child with a weight, and these controllers the parent's.
	write := func(controllers, child, weight string) {
		path := filepath.Join(parent, child)
		if err := errors.Join(os.WriteFile(control, []byte(controllers), 0o644), os.MkdirAll(path, 0o755),
			os.WriteFile(filepath.Join(path, "cpu.weight"), []byte(weight+"\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	has := func(want string) {
		t.Helper()
		if b, err := os.ReadFile(control); err != nil || string(b) != want {
			t.Errorf("written: %q, want %q; %v", b, want, err)
		}
	}
	write("memory pids\n", "others", "100")
	if enabled, err := enableCPU(parent); !enabled || err != nil {
		t.Errorf("enabled: %v, %v", enabled, err)
	}
	has("+cpu")
	write("cpu pids\n", "others", "100")
	if enabled, err := enableCPU(filepath.Join(parent, "others")); enabled || err == nil {
		t.Errorf("of a folder that is no cgroup: %v, %v", enabled, err)
	}
	if enabled, err := enableCPU(parent); enabled || err != nil {
		t.Errorf("enabled before: %v, %v", enabled, err)
	}
	has("cpu pids\n")
	if err := Delete(filepath.Join(parent, "absent"+enabledSuffix)); err != nil {
		t.Error(err)
	}
	has("cpu pids\n") // another process has put it back
	for _, name := range []string{"quota", "quota" + enabledSuffix} {
		if err := os.Mkdir(filepath.Join(parent, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := Delete(filepath.Join(parent, "quota")); err != nil {
		t.Error(err)
	}
	has("cpu pids\n")
	if err := Delete(filepath.Join(parent, "quota"+enabledSuffix)); err != nil {
		t.Error(err)
	}
	has("-cpu")
	write("cpu pids\n", "another", quotaWeight)
	if err := disableCPU(filepath.Join(parent, "quota"+enabledSuffix)); err != nil {
		t.Error(err)
	}
	has("cpu pids\n")
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
