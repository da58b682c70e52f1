package sysctl

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/kernel/netns"
	"fairlead.dev/fairlead/kernel/netns/netnstest"
)

// TestSettingsOverReadOnlyProc: with /proc/sys read-only, as in a container, a device's IPv4 settings are set with
// CAP_NET_ADMIN alone, and others with CAP_SYS_ADMIN.
func TestSettingsOverReadOnlyProc(t *testing.T) {
	ns := netnstest.New(t)
	inContainer := func(caps uint64, settings ...Setting) error {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked
			done <- errors.Join(ns.Enter(), readOnlyProc(), restrictCapabilities(caps), Set(ns, settings...))
		}()
		return <-done
	}
	device := []Setting{{"net/ipv4/conf/lo/accept_local", "1"}, {"net/ipv4/conf/lo/route_localnet", "1"},
		{"net/ipv4/conf/lo/rp_filter", "2"}}
	other := Setting{"net/ipv4/tcp_mtu_probing", "1"}
	if err := inContainer(1<<unix.CAP_NET_ADMIN, device...); err != nil {
		t.Error(err)
	}
	// the thread that mounts /proc has the process's capabilities
	if err := inContainer(1<<unix.CAP_SYS_ADMIN, other); err != nil {
		t.Error(err)
	}
	if err := inContainer(0, append(device, other)...); err != nil {
		t.Errorf("what is so already: %v", err)
	}
	for _, s := range append(device, other) {
		if now, err := Get(ns, s.Name); err != nil || now != s.Value {
			t.Errorf("%s is %q, %v", s.Name, now, err)
		}
	}
}

// readOnlyProc has the calling thread see /proc/sys read-only.
func readOnlyProc() error {
	return errors.Join(unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""), unix.Mount("", "/proc/sys", "",
			unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
}

// restrictCapabilities drops the calling thread's other capabilities.
func restrictCapabilities(caps uint64) error {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	low := uint32(caps)
	data := [2]unix.CapUserData{{Effective: low, Permitted: low}}
	return unix.Capset(&h, &data[0])
}

func TestSetIsTheNamespacesOwn(t *testing.T) {
	ns, other := netnstest.New(t), netnstest.New(t)
	err := errors.Join(Set(ns, Setting{"net/ipv4/ip_forward", "1"}, Setting{"-net/no/such", "1"}),
		Set(other, Setting{"net/ipv4/ip_forward", "0"}))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		ns   *netns.Namespace
		want string
	}{{ns, "1\n"}, {other, "0\n"}} {
		c.ns.Do(func() error {
			if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward"); string(b) != c.want {
				t.Errorf("%s: %q, %v, want %q", c.ns.Name, b, err, c.want)
			}
			return nil
		})
	}
}

func TestErrorsNameTheSetting(t *testing.T) {
	ns := netnstest.New(t)
	for _, e := range []struct {
		err  error
		want []string
	}{
		{Set(ns, Setting{"net/ipv4/none", "1"}), []string{"net/ipv4/none", ns.Name}},
		{Set(ns, Setting{"net/ipv4/ip_forward", "many"}), []string{"net/ipv4/ip_forward", "many"}},
	} {
		for _, w := range e.want {
			if e.err == nil || !strings.Contains(e.err.Error(), w) {
				t.Errorf("%v, want it to name %s", e.err, w)
			}
		}
	}
}
