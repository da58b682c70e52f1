package sockets

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// dial connects two UDP sockets of a new namespace to the same place, and returns the cookies of the namespace and of
// the first.
func dial(t *testing.T, network, to string) (a, b net.Conn, namespace, cookie uint64) {
	t.Helper()
	ns := netnstest.New(t)
	c, err := link.Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Up(1); err != nil {
		t.Fatal(err)
	}
	err = ns.Do(func() error {
		var err, err2 error
		a, err = net.Dial(network, to)
		b, err2 = net.Dial(network, to)
		return errors.Join(err, err2)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	raw, err := a.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		if cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE); err == nil {
			namespace, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return a, b, namespace, cookie
}

func TestOnlyTheRequestedSocketIsClosed(t *testing.T) {
	for network, to := range map[string]string{"udp4": "127.0.0.1:9", "udp6": "[::1]:9"} {
		a, b, namespace, cookie := dial(t, network, to)
		names, peer := Names{}, netip.MustParseAddrPort(to)
		names.Add(namespace, cookie, netip.AddrPortFrom(peer.Addr(), 10)) // by now it is connected elsewhere
		if n, err := Close(unix.IPPROTO_UDP, names); n != 0 || err != nil {
			t.Errorf("%s: %d sockets closed that are connected elsewhere, %v", network, n, err)
		}
		names.Add(namespace, cookie, peer)
		names.Add(namespace, 1<<63, peer) // gone
		if n, err := Close(unix.IPPROTO_UDP, names); n != 1 || err != nil {
			t.Errorf("%s: %d sockets closed, %v", network, n, err)
		}
		if _, err := a.Write([]byte{0}); err == nil {
			t.Errorf("%s: a closed socket can still be written to", network)
		}
		if _, err := b.Write([]byte{0}); err != nil {
			t.Errorf("%s: the other socket: %v", network, err)
		}
	}
}

func TestNothingToClose(t *testing.T) {
	names := Names{}
	names.Add(1<<63, 1, netip.AddrPort{}) // a namespace that is gone
	if n, err := Close(unix.IPPROTO_UDP, names); n != 0 || err != nil {
		t.Errorf("%d closed, %v", n, err)
	}
	if n, err := Close(unix.IPPROTO_UDP, nil); n != 0 || err != nil {
		t.Errorf("%d closed, %v", n, err)
	}
}
