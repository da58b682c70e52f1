package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Mount is where the BPF file system is. Pins outlive the process that made them.
const Mount = "/sys/fs/bpf"

// ours is the name of the folder that holds all of Fairlead's pins.
const ours = "fairlead"

// Folder returns the folder for what belongs to the calling thread's network namespace, and the namespace's cookie:
// nodes in a sandbox share one file system.
func Folder() (path string, cookie uint64, err error) {
	if cookie, err = Namespace(); err != nil {
		return "", 0, err
	}
	return filepath.Join(base(), strconv.FormatUint(cookie, 10)), cookie, nil
}

// base returns the folder of all pins: below Mount, or the mount of that folder alone in a container.
var base = sync.OnceValue(func() string {
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		if at := mountedAt(string(mounts)); at != "" {
			return at
		}
	}
	return filepath.Join(Mount, ours)
})

// mounted reports whether a folder is the one of all pins, mounted by itself in a container.
func mounted(folder string) bool { return folder == base() && folder != filepath.Join(Mount, ours) }

// mountedAt returns where the folder of all pins is mounted by itself, "" where it isn't: proc_pid_mountinfo(5).
func mountedAt(mounts string) string {
	for l := range strings.Lines(mounts) {
		before, after, _ := strings.Cut(l, " - ")
		where, what := strings.Fields(before), strings.Fields(after)
		if len(where) > 4 && len(what) > 0 && what[0] == "bpf" && where[3] == "/"+ours {
			return where[4]
		}
	}
	return ""
}

// Namespace returns the cookie of the calling thread's network namespace.
func Namespace() (uint64, error) {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("bpf: open a socket to know this network namespace: %w", err)
	}
	defer unix.Close(s)
	cookie, err := unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("bpf: ask for this network namespace's cookie: %w; that takes Linux 5.14 or later", err)
	}
	return cookie, nil
}

// MakeFolder creates a folder for pins, and mounts the file system first where it is missing. One that other users
// own or may write to is an error.
func MakeFolder(path string) error {
	if !mounted(base()) {
		if err := mount(); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return fmt.Errorf("bpf: make a folder for pins: %w", err)
	}
	return checkFolder(path)
}

// checkFolder returns an error where a folder for pins, or one above it below Mount, belongs to other users or they
// may write to it: they could have the programs use maps of theirs. One that is missing is no error.
func checkFolder(path string) error {
	for ; len(path) > len(Mount); path = filepath.Dir(path) {
		var s unix.Stat_t
		switch err := unix.Lstat(path, &s); {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return fmt.Errorf("bpf: check folder %s: %w", path, err)
		case s.Mode&unix.S_IFMT != unix.S_IFDIR:
			return fmt.Errorf("bpf: %s is not a folder: remove it", path)
		case int(s.Uid) != os.Geteuid() || s.Mode&0o022 != 0:
			return fmt.Errorf("bpf: folder %s belongs to user %d and has mode %#o, want user %d and no write "+
				"access for others: "+
				"remove it, or correct both", path, s.Uid, s.Mode&0o7777, os.Geteuid())
		}
	}
	return nil
}

// mount mounts a BPF file system at Mount if there is none. In a mount namespace of this process alone it would end
// with the process, and all pins with it, so there it is not mounted: a parent process in another mount namespace
// shows that.
func mount() error {
	var at unix.Statfs_t
	if err := unix.Statfs(Mount, &at); err == nil && at.Type == unix.BPF_FS_MAGIC {
		return nil
	}
	ours, err := os.Readlink("/proc/thread-self/ns/mnt")
	if err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	if above, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", os.Getppid())); err != nil || above != ours {
		return fmt.Errorf(
			"bpf: no BPF file system is mounted at %s, and in this mount namespace one would not last: mount it on the "+
				"host with `mount -t bpf bpf %s` and give it to this container",
			Mount,
			Mount,
		)
	}
	if err := unix.Mount("bpf", Mount, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("bpf: mount a BPF file system at %s: %w", Mount, err)
	}
	return nil
}

// RemoveFolder removes a folder with its pins, and those above where nothing else is there. What only the pins held
// goes.
func RemoveFolder(path string) error {
	if err := os.RemoveAll(path); err != nil {
		return fmt.Errorf("bpf: remove pins: %w", err)
	}
	for above := filepath.Dir(path); len(above) > len(Mount) && !mounted(above); above = filepath.Dir(above) {
		err := os.Remove(above)
		if errors.Is(err, unix.ENOTEMPTY) {
			return nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("bpf: remove a folder for pins: %w", err)
		}
	}
	return nil
}
