package netns

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// All returns a path to each network namespace that can be found, the own first: those that a name or a process leads
// to.
func All() (paths []string) {
	all := []string{"/proc/thread-self/ns/net"}
	for _, pattern := range []string{Dir + "/*", "/proc/[0-9]*/ns/net"} {
		more, _ := filepath.Glob(pattern) // the patterns are right
		all = append(all, more...)
	}
	type file struct{ device, inode uint64 }
	seen := map[file]bool{}
	for _, p := range all {
		var s unix.Stat_t
		var on unix.Statfs_t
		if unix.Stat(p, &s) != nil || seen[file{uint64(s.Dev), s.Ino}] {
			continue // gone
		}
		if unix.Statfs(p, &on) != nil || on.Type != unix.NSFS_MAGIC {
			continue // a name that is just being made or removed
		}
		seen[file{uint64(s.Dev), s.Ino}] = true
		paths = append(paths, p)
	}
	return paths
}

// Host is a network namespace as sockets know it.
type Host struct {
	Cookie    uint64
	Addresses []netip.Addr // of its interfaces, but for loopback and what only neighbours know
}

// Hosts returns each network namespace that can be found: the calling thread's, then those that a pair of devices
// connects to it, such as the pods of a node, then all others. One that is removed meanwhile is left out.
func Hosts() (hosts []Host, err error) {
	socket, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netns: open a netlink socket: %w", err)
	}
	defer socket.Close()
	links, err := socket.LinkList()
	if err != nil {
		return nil, fmt.Errorf("netns: list devices: %w", err)
	}
	beyond := map[int]bool{} // IDs of the namespaces that the other ends of devices are in
	for _, l := range links {
		beyond[l.Attrs().NetNsID] = true
	}
	var others []Host
	err = onOwnThread(func() error {
		for i, path := range All() {
			h, err := netns.GetFromPath(path)
			if err != nil {
				continue // gone
			}
			id, unknown := socket.GetNetNsIdByFd(int(h))
			connected := i == 0 || unknown == nil && id >= 0 && beyond[id]
			err = enter(h)
			h.Close()
			if err != nil {
				continue
			}
			host, err := here()
			if err != nil {
				return fmt.Errorf("netns: look into %s: %w", path, err)
			}
			if connected {
				hosts = append(hosts, host)
			} else {
				others = append(others, host)
			}
		}
		return nil
	})
	return append(hosts, others...), err
}

// here reports of the calling thread's.
func here() (h Host, err error) {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return h, err
	}
	defer unix.Close(s)
	if h.Cookie, err = unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err != nil {
		return h, err
	}
	list, err := net.InterfaceAddrs()
	for _, a := range list {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
			h.Addresses = append(h.Addresses, p.Addr())
		}
	}
	return h, err
}
