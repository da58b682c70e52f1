// Package sockets closes other programs' sockets, in whatever network namespace they are, by the kernel's socket diagnosis
// (sock_diag(7), SOCK_DESTROY). It decides nothing: its callers name the sockets by their cookies.
package sockets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink/nl"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

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

// Close closes the sockets of a protocol (unix.IPPROTO_UDP or IPPROTO_TCP): their owners read ECONNABORTED. It gives how
// many there were; one that is gone is no error. A namespace counts as gone when neither a process nor a name in
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

// closeIn closes the named sockets of one namespace, unless that has been seen, and gives its cookie.
func closeIn(path string, protocol uint8, names Names, seen map[uint64]bool) (cookie uint64, closed int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	c, err := nl.GetNetlinkSocketAt(vnetns.NsHandle(f.Fd()), vnetns.None(), unix.NETLINK_SOCK_DIAG)
	if errors.Is(err, unix.EINVAL) {
		return 0, 0, fmt.Errorf("%s: %w", path, fs.ErrNotExist) // the name was removed since
	}
	if err != nil {
		return 0, 0, fmt.Errorf("sockets: open netlink socket in %s: %w", path, err)
	}
	defer c.Close()
	if cookie, err = unix.GetsockoptUint64(c.GetFd(), unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err != nil {
		return 0, 0, fmt.Errorf("sockets: ask for a network namespace's cookie: %w", err)
	}
	if names[cookie] == nil || seen[cookie] {
		return cookie, 0, nil
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		n, err := closeFamily(&nl.SocketHandle{Socket: c}, family, protocol, names[cookie])
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

func closeFamily(c *nl.SocketHandle, family, protocol uint8, named map[uint64]netip.AddrPort) (closed int, err error) {
	list, err := ask(c, unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP, request(family, protocol, make([]byte, idLength)))
	if err != nil {
		return 0, fmt.Errorf("sockets: list sockets of family %d: %w", family, err)
	}
	for _, m := range list {
		if len(m) < idAt+idLength {
			continue
		}
		id := m[idAt : idAt+idLength]
		if peer, is := named[binary.NativeEndian.Uint64(id[cookieAt:])]; !is || peer != remote(family, id) {
			continue
		}
		_, err := ask(c, sockDestroy, unix.NLM_F_ACK, request(family, protocol, id))
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

// ask makes a request of sock_diag.
func ask(c *nl.SocketHandle, kind, flags int, data []byte) ([][]byte, error) {
	r := nl.NewNetlinkRequest(kind, flags)
	r.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_SOCK_DIAG: c}
	r.AddRawData(data)
	return r.Execute(unix.NETLINK_SOCK_DIAG, 0)
}

// request makes a struct inet_diag_req_v2: all states.
func request(family, protocol uint8, id []byte) []byte {
	b := binary.NativeEndian.AppendUint32([]byte{family, protocol, 0, 0}, ^uint32(0))
	return append(b, id...)
}

// remote gives what a socket is connected to.
func remote(family uint8, id []byte) netip.AddrPort {
	a := netip.AddrFrom16([16]byte(id[20:36])).Unmap()
	if family == unix.AF_INET {
		a = netip.AddrFrom4([4]byte(id[20:24]))
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(id[2:]))
}
