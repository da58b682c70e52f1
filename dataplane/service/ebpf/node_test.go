package ebpf_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"fairlead.dev/fairlead/dataplane/service/ebpf"
	"fairlead.dev/fairlead/kernel/bpf"
	"fairlead.dev/fairlead/kernel/cgroup"
	"fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns"
)

// inside runs f on a thread of a node that has nothing: a network namespace, whose loopback has the addresses given,
// and a cgroup for its sockets. What f leaves pinned is an error.
func inside(t testing.TB, f func(ebpf.Options), addrs ...string) {
	t.Helper()
	name := "fl-ebpf-" + rand.Text()[:8]
	ns, err := netns.New(name)
	if err != nil {
		t.Fatalf("this test needs root: %v", err)
	}
	home, err := cgroup.New(name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(ns.Close(), netns.Delete(name), cgroup.Delete(home)); err != nil {
			t.Error(err)
		}
	}()
	c, err := link.Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Up(1); err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		addr := netip.MustParseAddr(a)
		if err := c.AddAddress(1, netip.PrefixFrom(addr, addr.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	err = cgroup.Do(home, func() error {
		return ns.Do(func() error {
			f(ebpf.Options{Cgroup: home})
			folder, _, err := bpf.Folder()
			if err != nil {
				return err
			}
			if _, err := os.Stat(folder); err == nil {
				left, _ := filepath.Glob(folder + "/*")
				return errors.Join(fmt.Errorf("left behind: %v", left), bpf.RemoveFolder(folder))
			}
			return nil
		})
	})
	if err != nil {
		t.Error(err)
	}
}

// opened opens a plane that is closed and cleaned when the test ends.
func opened(t testing.TB, o ebpf.Options) *ebpf.Plane {
	t.Helper()
	p, err := ebpf.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func write(t testing.TB, p *ebpf.Plane, put, del []ebpf.Fact) {
	t.Helper()
	if err := p.Write(context.Background(), put, del); err != nil {
		t.Fatal(err)
	}
}

func clean(t testing.TB, p *ebpf.Plane) {
	t.Helper()
	if err := errors.Join(p.Clean(context.Background()), p.Close()); err != nil {
		t.Error(err)
	}
}

func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }
