package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// quotaPeriod is that of quotas: Kubernetes' (cpuCFSQuotaPeriod).
const quotaPeriod = 100 * time.Millisecond

// quotaWeight is the weight of every quota of version 2: the greatest.
const quotaWeight = "10000"

// Quota is a cgroup of version 2 or 1, with threads that share so much processor time, as a container's limit has it.
type Quota struct {
	Path string // folder
	v1   bool
}

// NewQuota makes a quota of so many processors below the calling thread's own cgroup; 0: without a limit, but with the
// greatest weight against others, as one with a limit has. The error says what this machine lacks.
func NewQuota(name string, processors float64) (q *Quota, err error) {
	parent, v1, err := quotaParent()
	if err != nil {
		return nil, err
	}
	q = &Quota{Path: filepath.Join(parent, name), v1: v1}
	if !v1 {
		enabled, err := enableCPU(parent)
		if err != nil {
			return nil, fmt.Errorf("cgroup: enable the controller cpu: %w", err)
		}
		if enabled {
			q.Path += enabledSuffix
		}
	}
	if err := os.Mkdir(q.Path, 0o755); err != nil {
		return nil, errors.Join(fmt.Errorf("cgroup: %w", err), disableCPU(q.Path))
	}
	for _, s := range q.settings(processors) {
		if err := os.WriteFile(filepath.Join(q.Path, s[0]), []byte(s[1]), 0); err != nil {
			return nil, errors.Join(fmt.Errorf("cgroup: limit %s to %g processors: %w", q.Path, processors, err),
				Delete(q.Path))
		}
	}
	return q, nil
}

// enabledSuffix ends the name of a quota for which the controller cpu was enabled in its parent: that is undone when
// the quota is deleted, also by another process.
const enabledSuffix = "+cpu"

// enableCPU enables the controller cpu for the children of a cgroup of version 2, and reports whether it was not
// enabled before.
func enableCPU(parent string) (enabled bool, err error) {
	file := filepath.Join(parent, "cgroup.subtree_control")
	now, err := os.ReadFile(file)
	if err != nil || slices.Contains(strings.Fields(string(now)), "cpu") {
		return false, err
	}
	return true, os.WriteFile(file, []byte("+cpu"), 0)
}

// disableCPU undoes enableCPU where the deleted quota of that path was what it was enabled for, and its parent has no
// other quota, which would lose its limit.
func disableCPU(path string) error {
	parent := filepath.Dir(path)
	if !strings.HasSuffix(path, enabledSuffix) {
		return nil
	}
	others, err := filepath.Glob(filepath.Join(parent, "*", "cpu.weight"))
	if err != nil {
		return err
	}
	for _, o := range others {
		if b, err := os.ReadFile(o); err == nil && strings.TrimSpace(string(b)) == quotaWeight {
			return nil
		}
	}
	if err := os.WriteFile(filepath.Join(parent, "cgroup.subtree_control"), []byte("-cpu"), 0); err != nil {
		return fmt.Errorf("cgroup: disable the controller cpu again: %w", err)
	}
	return nil
}

// settings returns the files of a quota, and what is written to each, in this order.
func (q *Quota) settings(processors float64) (l [][2]string) {
	period := quotaPeriod.Microseconds()
	if q.v1 {
		l = [][2]string{{"cpu.shares", "262144"}}
		if processors > 0 {
			l = append(l, [2]string{"cpu.cfs_period_us", fmt.Sprint(period)},
				[2]string{"cpu.cfs_quota_us", fmt.Sprint(int64(processors * float64(period)))})
		}
		return l
	}
	l = [][2]string{{"cgroup.type", "threaded"}, {"cpu.weight", quotaWeight}}
	if processors > 0 {
		l = append(l, [2]string{"cpu.max", fmt.Sprintf("%d %d", int64(processors*float64(period)), period)})
	}
	return l
}

// Do runs f with the calling thread there, which the caller has locked to its goroutine. What f starts elsewhere is not
// limited.
func (q *Quota) Do(f func() error) (err error) {
	if err := q.move(q.Path); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, q.move(filepath.Dir(q.Path))) }()
	return f()
}

// move moves the calling thread into a cgroup of the same hierarchy.
func (q *Quota) move(to string) error {
	file := map[bool]string{true: "tasks", false: "cgroup.threads"}[q.v1]
	if err := os.WriteFile(filepath.Join(to, file), []byte("0"), 0); err != nil {
		return fmt.Errorf("cgroup: enter %s: %w", to, err)
	}
	return nil
}

// Quotas returns the folders of quotas below the calling thread's own cgroup of which the names begin so.
func Quotas(prefix string) ([]string, error) {
	parent, _, err := quotaParent()
	if err != nil {
		return nil, nil // no such file system, so nothing in it
	}
	return filepath.Glob(filepath.Join(parent, prefix+"*"))
}

// quotaParent returns the folder of the cgroup that limits the calling thread's processor time, and whether it is of
// version 1.
func quotaParent() (path string, v1 bool, err error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return "", false, fmt.Errorf("cgroup: look for the file system: %w", err)
	}
	own, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil {
		return "", false, fmt.Errorf("cgroup: look for the thread's own: %w", err)
	}
	if path, ok := firstVersion(string(mounts), string(own)); ok {
		return path, true, nil
	}
	if path, err = Own(); err != nil {
		return "", false, err
	}
	controllers, err := os.ReadFile(filepath.Join(path, "cgroup.controllers"))
	if err != nil || !slices.Contains(strings.Fields(string(controllers)), "cpu") {
		return "", false, errors.Join(err, fmt.Errorf("cgroup: the controller cpu is neither in %s nor in a hierarchy of "+
			"version 1", path))
	}
	return path, false, nil
}

// firstVersion returns the folder of a thread in the hierarchy of version 1 that limits processor time, from the texts
// of /proc/self/mounts and of the thread's cgroup file (cgroups(7)).
func firstVersion(mounts, own string) (string, bool) {
	has := func(list string) bool { return slices.Contains(strings.Split(list, ","), "cpu") }
	for m := range strings.Lines(mounts) {
		f := strings.Fields(m)
		if len(f) < 4 || f[2] != "cgroup" || !has(f[3]) {
			continue
		}
		for l := range strings.Lines(own) {
			if p := strings.SplitN(strings.TrimSpace(l), ":", 3); len(p) == 3 && has(p[1]) {
				return filepath.Join(f[1], p[2]), true
			}
		}
	}
	return "", false
}
