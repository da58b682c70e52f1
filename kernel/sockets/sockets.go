// Package sockets closes other programs' sockets, in whatever network namespace they are, by the kernel's socket
// diagnosis (sock_diag(7), SOCK_DESTROY). It decides nothing: its callers name the sockets by their cookies.
package sockets

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netlink"
	"fairlead.dev/fairlead/kernel/netns"
)

// Names are sockets: by the cookie of their network namespace, then by their own, with what they are connected to.
type Names map[uint64]map[uint64]netip.AddrPort

// Add names one more. One that is connected elsewhere by the time that it would be closed is not meant.
func (n Names) Add(namespace, socket uint64, peer netip.AddrPort) {
	if n[namespace] == nil {
		n[namespace] = map[uint64]netip.AddrPort{}
	}
	n[namespace][socket] = peer
}

// Close closes the sockets of a protocol (unix.IPPROTO_UDP or IPPROTO_TCP): their owners read ECONNABORTED. It gives
// how many there were; one that is gone is no error. A namespace counts as gone when neither a process nor a name in
// /run/netns leads to it.
func Close(protocol uint8, names Names) (closed int, err error) {
	if len(names) == 0 {
		return 0, nil
	}
	var errs []error
	seen := map[uint64]bool{}
	for _, path := range netns.All() {
		if len(seen) == len(names) {
			break
		}
		cookie, n, err := closeIn(path, protocol, names, seen)
		closed += n
		if names[cookie] != nil {
			seen[cookie] = true
		}
		if !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return closed, errors.Join(errs...)
}

// closeIn closes the named sockets of one namespace, unless that has been seen, and returns its cookie.
func closeIn(path string, protocol uint8, names Names, seen map[uint64]bool) (cookie uint64, closed int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	var c *netlink.Socket
	err = netns.In(f, func() (err error) {
		c, err = netlink.Open(unix.NETLINK_SOCK_DIAG, 0)
		return err
	})
	if errors.Is(err, unix.EINVAL) {
		return 0, 0, fmt.Errorf("%s: %w", path, fs.ErrNotExist) // the name was removed since
	}
	if err != nil {
		return 0, 0, fmt.Errorf("sockets: open netlink socket in %s: %w", path, err)
	}
	defer c.Close()
	if cookie, err = c.Option(unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err != nil {
		return 0, 0, fmt.Errorf("sockets: ask for a network namespace's cookie: %w", err)
	}
	if names[cookie] == nil || seen[cookie] {
		return cookie, 0, nil
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		n, err := closeFamily(c, family, protocol, names[cookie])
		if closed += n; err != nil {
			return cookie, closed, err
		}
	}
	return cookie, closed, nil
}

// A struct inet_diag_msg begins with four bytes, then a struct inet_diag_sockid of 48 bytes (linux/inet_diag.h).
const (
	idAt     = 4
	idLength = 48
	cookieAt = 40 // in the id
)

// sockDestroy is the message type SOCK_DESTROY (linux/sock_diag.h).
const sockDestroy = 21

func closeFamily(c *netlink.Socket, family, protocol uint8, named map[uint64]netip.AddrPort) (closed int, err error) {
	var meant [][]byte
	err = netlink.Stable(func() error {
		meant = nil
		all := request(family, protocol, make([]byte, idLength))
		return c.Request(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP, all, func(m netlink.Message) {
			if len(m.Body) < idAt+idLength {
				return
			}
			id := m.Body[idAt : idAt+idLength]
			if peer, is := named[binary.NativeEndian.Uint64(id[cookieAt:])]; is && peer == remote(family, id) {
				meant = append(meant, bytes.Clone(id))
			}
		})
	})
	if err != nil {
		return 0, fmt.Errorf("sockets: list sockets of family %d: %w", family, err)
	}
	for _, id := range meant {
		err := c.Request(sockDestroy, 0, request(family, protocol, id), func(netlink.Message) {})
		switch {
		case err == nil:
			closed++
		case errors.Is(err, unix.EOPNOTSUPP):
			return closed, fmt.Errorf("sockets: close a socket: %w: this kernel was built without CONFIG_INET_DIAG_DESTROY", err)
		case !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESTALE):
			return closed, fmt.Errorf("sockets: close the socket to %s: %w", remote(family, id), err)
		}
	}
	return closed, nil
}

// request writes a struct inet_diag_req_v2: all states.
func request(family, protocol uint8, id []byte) func(*netlink.Buffer) {
	return func(b *netlink.Buffer) {
		*b = append(*b, family, protocol, 0, 0)
		*b = append(binary.NativeEndian.AppendUint32(*b, ^uint32(0)), id...)
	}
}

// remote returns what a socket is connected to.
func remote(family uint8, id []byte) netip.AddrPort {
	a := netip.AddrFrom16([16]byte(id[20:36])).Unmap()
	if family == unix.AF_INET {
		a = netip.AddrFrom4([4]byte(id[20:24]))
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(id[2:]))
}
