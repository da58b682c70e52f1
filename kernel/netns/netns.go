// Package netns gives network namespaces names under /run/netns and runs functions inside them.
//
// A name is a bind mount, as ip-netns(8) makes it: `ip netns exec NAME` works on ours and Open on theirs. The package
// runs no program and knows nothing of links or addresses: that is package link.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Dir is where names live.
const Dir = "/run/netns"

// Namespace is an open network namespace. It lives as long as its name, an open handle, a process or a socket in it.
type Namespace struct {
	Name   string // file name under Dir, empty for Current's
	handle netns.NsHandle
}

// New makes an empty namespace of that name. A name that is taken returns an error that is fs.ErrExist.
func New(name string) (*Namespace, error) {
	if name == "" || name != filepath.Base(name) || name == "." || name == ".." || len(name) > unix.NAME_MAX {
		return nil, fmt.Errorf("make network namespace %q: not a file name", name)
	}
	if err := prepare(); err != nil {
		return nil, fmt.Errorf("make network namespace %s: %w", name, err)
	}
	path := filepath.Join(Dir, name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return nil, fmt.Errorf("make network namespace %s: %w", name, err)
	}
	f.Close()
	h, err := unshare(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make network namespace %s: %w", name, err), os.Remove(path))
	}
	return &Namespace{Name: name, handle: h}, nil
}

// prepare makes Dir a shared mount of itself, as ip-netns(8) does before it adds the first name. Were ip to do so
// later, over names that are mounted already, each would stand twice and could not be removed (EBUSY). The lock is ip's
// too.
func prepare() error {
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		return err
	}
	lock, err := os.Open(Dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", Dir, err)
	}
	if err := unix.Mount("", Dir, "none", unix.MS_SHARED|unix.MS_REC, ""); !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Mount(Dir, Dir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount %s on itself: %w", Dir, err)
	}
	return unix.Mount("", Dir, "none", unix.MS_SHARED|unix.MS_REC, "")
}

// unshare makes a namespace and mounts it at path.
func unshare(path string) (netns.NsHandle, error) {
	h := netns.None()
	err := onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount it: %w", err)
		}
		var err error
		h, err = netns.Get()
		return err
	})
	return h, err
}

// Open returns the namespace of that name. A name that isn't there returns an error that is fs.ErrNotExist.
func Open(name string) (*Namespace, error) {
	h, err := netns.GetFromName(name)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", name, err)
	}
	return &Namespace{Name: name, handle: h}, nil
}

// Current returns the namespace of the calling thread.
func Current() (*Namespace, error) {
	h, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("open this thread's network namespace: %w", err)
	}
	return &Namespace{handle: h}, nil
}

// Inode returns the inode number of the calling thread's network namespace. While that lives, no other has it.
func Inode() (uint64, error) {
	var s unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &s); err != nil {
		return 0, fmt.Errorf("read this thread's network namespace: %w", err)
	}
	return s.Ino, nil
}

// FD is the file descriptor of the namespace, valid until Close.
func (n *Namespace) FD() int { return int(n.handle) }

// Close returns the handle back. The name stays.
func (n *Namespace) Close() error {
	if err := n.handle.Close(); err != nil {
		return fmt.Errorf("close network namespace %s: %w", n.Name, err)
	}
	return nil
}

// Do runs f with the calling goroutine's thread inside the namespace. Sockets that f makes itself belong there for
// ever; goroutines that f starts don't run there. Calls may nest. Where the thread can't go back, Do returns an error
// and leaves the goroutine locked to the thread, which ends with it.
// In the calling thread's own namespace it needs no capability.
func (n *Namespace) Do(f func() error) error {
	return onOwnThread(func() error {
		if err := enter(n.handle); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", n.Name, err)
		}
		return f()
	})
}

// In runs f as Do does, in the namespace of an open file such as /proc/PID/ns/net. Of another file the error is
// unix.EINVAL.
func In(file *os.File, f func() error) error {
	return (&Namespace{Name: file.Name(), handle: netns.NsHandle(file.Fd())}).Do(f)
}

// Enter puts the calling thread into the namespace for good: the goroutine stays locked to it. For programs about to
// exec another.
func (n *Namespace) Enter() error {
	runtime.LockOSThread()
	if err := netns.Set(n.handle); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", n.Name, err)
	}
	return nil
}

// onOwnThread runs f on a locked thread, which returns to the namespace that it had before, however f ends.
func onOwnThread(f func() error) (err error) {
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open this thread's network namespace: %w", err)
	}
	defer func() {
		defer home.Close()
		if back := enter(home); back != nil {
			err = errors.Join(err, fmt.Errorf("return to the thread's own network namespace: %w", back))
			return
		}
		runtime.UnlockOSThread()
	}()
	return f()
}

// enter puts the calling thread into a namespace, unless it is there: the kernel wants CAP_SYS_ADMIN even then.
func enter(h netns.NsHandle) error {
	if now, err := netns.Get(); err == nil {
		defer now.Close()
		if now.Equal(h) {
			return nil
		}
	}
	return netns.Set(h)
}

// Delete removes a name. The kernel takes the namespace apart in the background once nothing else holds it. A name that
// isn't there returns an error that is fs.ErrNotExist.
func Delete(name string) error {
	path := filepath.Join(Dir, name)
	// EINVAL: a file that was never mounted on, left by a process killed in New.
	if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("delete network namespace %s: %w", name, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("delete network namespace %s: %w", name, err)
	}
	return nil
}

// List returns the names that start with prefix, sorted.
func List(prefix string) ([]string, error) {
	entries, err := os.ReadDir(Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
