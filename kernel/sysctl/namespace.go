package sysctl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
)

// Setting is one kernel setting of a network namespace.
type Setting struct {
	Name  string // path below /proc/sys, such as "net/ipv4/ip_forward"; a leading "-": a kernel without it is fine
	Value string
}

// Set writes settings in ns, in order, up to the first that fails. Where /proc/sys is read-only, as in a container, a
// value that is there already needs no write, an IPv4 setting of a device is set by netlink, and others are written
// through a /proc that is mounted for this call, which takes CAP_SYS_ADMIN.
func Set(ns *netns.Namespace, settings ...Setting) error {
	err := set(ns, settings)
	if !errors.Is(err, unix.EROFS) {
		return err
	}
	if again := throughOwnProc(func() error { return set(ns, settings) }); again != nil {
		return fmt.Errorf("%w; mount another /proc, which takes CAP_SYS_ADMIN: %w", err, again)
	}
	return nil
}

func set(ns *netns.Namespace, settings []Setting) error {
	return ns.Do(func() error {
		for _, s := range settings {
			if err := s.write(); err != nil {
				return fmt.Errorf("in network namespace %s: %w", ns.Name, err)
			}
		}
		return nil
	})
}

// write sets s in the calling thread's namespace.
func (s Setting) write() error {
	name, optional := strings.CutPrefix(s.Name, "-")
	path := "/proc/sys/" + name
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if optional && errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if errors.Is(err, unix.EROFS) {
		if now, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(now)) == s.Value {
			return nil
		}
		if device, id := deviceSetting(name); id != 0 {
			return s.setLink(device, id)
		}
	}
	if err != nil {
		return fmt.Errorf("set %s to %s: %w", name, s.Value, err)
	}
	_, err = f.WriteString(s.Value)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("set %s to %s: %w", name, s.Value, err)
	}
	return nil
}

// devconf are numbers of IPv4 settings of a device (IPV4_DEVCONF_* in linux/ip.h).
var devconf = map[string]int{"forwarding": 1, "rp_filter": 8, "accept_local": 23, "route_localnet": 26}

// deviceSetting returns the device and the number of a setting that netlink can set, 0 for others.
func deviceSetting(name string) (device string, id int) {
	path, ok := strings.CutPrefix(name, "net/ipv4/conf/")
	device, what, _ := strings.Cut(path, "/")
	if !ok || device == "all" || device == "default" {
		return "", 0
	}
	return device, devconf[what]
}

// setLink sets an IPv4 setting of a device of the calling thread's namespace by netlink (IFLA_INET_CONF), which takes
// CAP_NET_ADMIN.
func (s Setting) setLink(device string, id int) error {
	value, err := strconv.ParseUint(s.Value, 10, 32)
	if err != nil {
		return fmt.Errorf("set %s to %s: %w", s.Name, s.Value, err)
	}
	i, err := net.InterfaceByName(device)
	if err != nil {
		return fmt.Errorf("set %s to %s: %w", s.Name, s.Value, err)
	}
	err = setDevice(i.Index, uint16(id), uint32(value))
	if err != nil {
		return fmt.Errorf("set %s to %s by netlink: %w", s.Name, s.Value, err)
	}
	return nil
}

// setDevice sets an IPv4 setting of the device of an index.
func setDevice(index int, id uint16, value uint32) error {
	n, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return err
	}
	defer n.Close()
	return n.Request(unix.RTM_SETLINK, 0, func(b *netlink.Buffer) {
		head := make([]byte, unix.SizeofIfInfomsg)
		binary.NativeEndian.PutUint32(head[4:], uint32(index))
		*b = append(*b, head...)
		b.Nest(unix.IFLA_AF_SPEC, func() {
			b.Nest(unix.AF_INET, func() {
				b.Nest(unix.IFLA_INET_CONF, func() { b.Uint32(id, value) })
			})
		})
	}, func(netlink.Message) {})
}

// throughOwnProc runs f on a thread that ends with it, and sees a /proc of its own, which is writable.
func throughOwnProc(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// Get reads a setting of ns by its name.
func Get(ns *netns.Namespace, name string) (value string, err error) {
	err = ns.Do(func() error {
		b, err := os.ReadFile("/proc/sys/" + name)
		value = strings.TrimSpace(string(b))
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	return value, nil
}
