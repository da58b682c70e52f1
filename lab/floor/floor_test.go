package floor

import (
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"fairlead.dev/fairlead/kernel/cgroup"
	kernellink "fairlead.dev/fairlead/kernel/link"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// Programs are attached at connect() and at devices, connections go on as without them, and Close detaches all.
func TestAttach(t *testing.T) {
	ns := netnstest.New(t)
	conn, err := kernellink.Dial(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.Up(1); err != nil {
		t.Fatal(err)
	}
	folder, err := cgroup.New("fl-floor-test")
	if err != nil {
		t.Fatal(err)
	}
	defer cgroup.Delete(folder)
	group, err := os.Open(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	err = ns.Do(func() error {
		for _, p := range []Program{Empty, Lookup} {
			c, err := Attach(p, folder, netip.MustParseAddr("10.64.0.1"), Device{Index: 1, Loopback: true})
			if err != nil {
				return err
			}
			if a, d := attached(t, group), attachedAt(t, 1); a != 1 || d != 1 {
				t.Errorf("program %d: %d at connect(), %d at the device, want one each", p, a, d)
			}
			if err := cgroup.Do(folder, connect); err != nil {
				t.Errorf("program %d: %v", p, err)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Attach(Empty, "/nonexistent", netip.Addr{}); err == nil {
		t.Error("attached at a cgroup that isn't there")
	}
}

// attached returns how many programs are at connect() of a cgroup.
func attached(t *testing.T, group *os.File) int {
	t.Helper()
	r, err := link.QueryPrograms(link.QueryOptions{Target: int(group.Fd()), Attach: ebpf.AttachCGroupInet4Connect})
	if err != nil {
		t.Fatal(err)
	}
	return len(r.Programs)
}

// attachedAt returns how many programs are at egress of a device.
func attachedAt(t *testing.T, index int) int {
	t.Helper()
	r, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: ebpf.AttachTCXEgress})
	if err != nil {
		t.Fatal(err)
	}
	return len(r.Programs)
}

// connect connects over the loopback device.
func connect() error {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err == nil {
		err = c.Close()
	}
	return err
}
