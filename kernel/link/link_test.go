package link

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// space makes a namespace with its loopback up, and a connection to it, that go with the test.
func space(t *testing.T) (*netns.Namespace, *Conn) {
	t.Helper()
	ns := netnstest.New(t)
	c, err := Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	check(t, c.Up(1))
	return ns, c
}

func check(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func index(t *testing.T, c *Conn, name string) int {
	t.Helper()
	i, err := c.Index(name)
	check(t, err)
	return i
}

func TestNeighbourIsPutAndDeleted(t *testing.T) {
	_, c := space(t)
	other, _ := space(t)
	dev, err := c.AddVeth(End{Name: "eth0"}, End{Name: "eth0"}, other)
	check(t, err)
	for _, a := range []string{"10.0.0.3", "fd00::3"} {
		n := Neighbour{Dev: dev, Addr: netip.MustParseAddr(a), MAC: [6]byte{2}}
		check(t, c.PutNeighbour(n), c.PutNeighbour(n), c.DeleteNeighbour(n), c.DeleteNeighbour(n))
	}
}

func TestGSO(t *testing.T) {
	ns, c := space(t)
	dev, err := c.AddVeth(End{Name: "near"}, End{Name: "far"}, ns)
	check(t, err, c.SetGSO(dev, 196608))
	if got, err := c.GSO(dev); err != nil || got != 196608 {
		t.Errorf("pieces have up to %d bytes, %v: this test needs a kernel with BIG TCP for IPv4 (6.3)", got, err)
	}
	if err := c.SetGSO(dev, 1<<30); !errors.Is(err, unix.EINVAL) {
		t.Errorf("pieces of a GiB: %v", err)
	}
}

func TestAwait(t *testing.T) {
	_, c := space(t)
	other, o := space(t)
	near, err := c.AddVeth(End{Name: "eth0"}, End{Name: "eth0"}, other)
	check(t, err)
	far := index(t, o, "eth0")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Await(ctx, near); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an interface whose peer is down: %v", err)
	}
	check(t, o.Up(far), c.Await(t.Context(), near), o.Await(t.Context(), far))
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	a := netip.MustParseAddr("fd00::1")
	if err := c.Await(ctx, near, a); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an address that isn't there: %v", err)
	}
	check(t, c.AddAddress(near, netip.PrefixFrom(a, 64)), c.Await(t.Context(), near, a))
	if err := c.Await(t.Context(), 99); err == nil {
		t.Error("an interface that isn't there is ready")
	}
}

func TestErrorsSayWhatWasTried(t *testing.T) {
	ns, c := space(t)
	for _, e := range []struct {
		err  error
		want []string
	}{
		{c.Up(99), []string{"99", "up"}},
		{c.AddAddress(99, netip.MustParsePrefix("10.0.0.1/32")), []string{"10.0.0.1/32", "99"}},
		{c.PutNeighbour(Neighbour{Dev: 99, Addr: netip.MustParseAddr("10.0.0.1")}), []string{"10.0.0.1", "99"}},
		{second(c.AddVeth(End{Name: "lo"}, End{Name: "x"}, ns)), []string{"veth lo", "peer x", ns.Name}},
		{second(c.AddBridge("lo")), []string{"bridge lo"}},
		{second(c.Index("none")), []string{"none"}},
		{c.Attach(1, 99), []string{"1", "99"}},
	} {
		for _, w := range e.want {
			if e.err == nil || !strings.Contains(e.err.Error(), w) {
				t.Errorf("%v, want it to name %s", e.err, w)
			}
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestAddressIsUsableAtOnce(t *testing.T) {
	ns, c := space(t)
	other, _ := space(t)
	dev, err := c.AddVeth(End{Name: strings.Repeat("x", MaxName)}, End{Name: "eth0"}, other)
	check(t, err, c.AddAddress(dev, netip.MustParsePrefix("fd00::1/128")))
	err = ns.Do(func() error { // a tentative address can't be bound to
		s, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		return unix.Bind(s, &unix.SockaddrInet6{Addr: netip.MustParseAddr("fd00::1").As16()})
	})
	check(t, err)
}
