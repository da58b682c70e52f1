package bpf

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// expeditedFiles are where the setting may be by which all waits for an RCU grace period are expedited: as a
// container has it, and as a host.
var expeditedFiles = []string{"/run/fairlead/rcu_expedited", "/sys/kernel/rcu_expedited"}

// expeditedMark is the folder, in that of all pins, that marks the setting as ours while it is set.
const expeditedMark = "rcu-expedited"

// expediting is held while the setting is ours.
var expediting sync.Mutex

// Expedited calls f while the kernel expedites waits for an RCU grace period, as it does by itself for most that hold
// the RTNL lock (synchronize_net). Attaching by tcx waits for one under that lock, but not so (tcx_entry_sync): it is
// held for a tenth of the time then. Where the setting can't be written, as in a container whose sysfs is read-only,
// f is called all the same. One call waits for another.
func Expedited(f func() error) error {
	expediting.Lock()
	defer expediting.Unlock()
	file := expeditedFiles[len(expeditedFiles)-1]
	if _, err := os.Lstat(expeditedFiles[0]); err == nil {
		file = expeditedFiles[0]
	}
	return expedited(file, filepath.Join(base(), expeditedMark), f)
}

// expedited is Expedited, with the setting's file and the folder that marks it as ours.
func expedited(file, mark string, f func() error) error {
	was, err := os.ReadFile(file)
	if err != nil {
		return f()
	}
	if _, err := os.Lstat(mark); err != nil && strings.TrimSpace(string(was)) != "0" {
		return f() // it is set, and not by us
	}
	if err := os.Mkdir(mark, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return f()
	}
	if err := os.WriteFile(file, []byte("1"), 0); err != nil {
		return errors.Join(f(), Unpin(mark))
	}
	defer func() {
		if os.WriteFile(file, []byte("0"), 0) == nil {
			Unpin(mark)
		}
	}()
	return f()
}
