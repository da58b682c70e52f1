package link

import (
	"errors"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSettingsOverReadOnlyProc: with /proc/sys read-only, as in a container, a device's IPv4 settings are set with
// CAP_NET_ADMIN alone, and others with CAP_SYS_ADMIN.
func TestSettingsOverReadOnlyProc(t *testing.T) {
	ns, _ := space(t)
	inContainer := func(caps uint64, settings ...Setting) error {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked
			done <- errors.Join(ns.Enter(), readOnlyProc(), keepCapabilities(caps), Set(ns, settings...))
		}()
		return <-done
	}
	device := []Setting{{"ipv4/conf/lo/accept_local", "1"}, {"ipv4/conf/lo/route_localnet", "1"},
		{"ipv4/conf/lo/rp_filter", "2"}}
	other := Setting{"ipv4/tcp_mtu_probing", "1"}
	if err := inContainer(1<<unix.CAP_NET_ADMIN, device...); err != nil {
		t.Error(err)
	}
	if err := inContainer(1<<unix.CAP_SYS_ADMIN, other); err != nil { // the thread that mounts /proc has the process's capabilities
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

// keepCapabilities drops the calling thread's other capabilities.
func keepCapabilities(caps uint64) error {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	low := uint32(caps)
	data := [2]unix.CapUserData{{Effective: low, Permitted: low}}
	return unix.Capset(&h, &data[0])
}
