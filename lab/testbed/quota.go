package testbed

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/lab/load"
)

// Quota is a limit of processor time for servers.
type Quota struct{ group *cgroup.Quota }

// NewQuota returns a limit of so many processors, 0 for none, until the testbed is closed. Make it before the pair of
// its server, so that it is removed after that.
func (b *Testbed) NewQuota(arm string, processors float64) (*Quota, error) {
	g, err := cgroup.NewQuota(fmt.Sprintf("%s-%s-quota", b.Name, arm), processors)
	if err != nil {
		return nil, err
	}
	b.Defer(func() error {
		for end := time.Now().Add(time.Second); ; time.Sleep(time.Millisecond) { // threads that have ended leave it later
			err := cgroup.Delete(g.Path)
			if _, serr := os.Stat(g.Path); err != nil || serr != nil {
				return err
			}
			if time.Now().After(end) {
				return errors.New("remove " + g.Path + ": it still has threads")
			}
		}
	})
	return &Quota{group: g}, nil
}

// highest is the priority of threads that share a processor with others by the kernel's usual scheduler (nice(2)).
const highest = -20

// QuotaThread returns where a server with a limit runs: on the load's processor, in ns. It has no real-time priority,
// which limits don't reach.
func (b *Testbed) QuotaThread(ns *netns.Namespace, q *Quota) load.Thread {
	return load.Thread{CPUs: b.CPUs.Load, Enter: func(f func() error) error {
		if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), highest); err != nil {
			return fmt.Errorf("raise a thread's priority (CAP_SYS_NICE): %w", err)
		}
		return q.group.Do(func() error { return ns.Do(f) })
	}}
}
