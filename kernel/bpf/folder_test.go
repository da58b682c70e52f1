package bpf

import (
	"strings"
	"testing"
)

// TestGivenFolder: a container that has the folder of all pins alone finds it wherever it is mounted.
func TestMountedFolder(t *testing.T) {
	const whole = "31 24 0:27 / /sys/fs/bpf rw,nosuid,nodev,noexec,relatime shared:10 - bpf bpf rw,mode=700\n"
	for mounts, want := range map[string]string{
		"": "", whole: "",
		"40 24 0:27 /fairlead /run/fairlead/bpf rw,relatime master:10 - bpf bpf " +
			"rw,mode=700\n" + whole: "/run/fairlead/bpf",
		whole + "40 24 0:27 /fairlead /run/fairlead/bpf rw - bpf bpf " +
			"rw\n": "/run/fairlead/bpf",
		"40 24 0:27 /fairlead/1 /a rw - bpf bpf rw\n":                  "",
		"40 24 0:29 /fairlead /run/fairlead/bpf rw - tmpfs tmpfs rw\n": "",
		"40 24 0:27 /fairlead\n - bpf\n":                               "",
	} {
		if is := mountedAt(mounts); is != want {
			t.Errorf("%q: %q, not %q", mounts, is, want)
		}
	}
}

// FuzzGiven: whatever mounts there are, what is given is a path of theirs, or nothing.
func FuzzMountedAt(f *testing.F) {
	f.Add("40 24 0:27 /fairlead /run/fairlead/bpf rw,relatime master:10 - bpf bpf rw,mode=700\n")
	f.Add("31 24 0:27 / /sys/fs/bpf rw - bpf bpf rw\n - bpf")
	f.Fuzz(func(t *testing.T, mounts string) {
		if is := mountedAt(mounts); !strings.Contains(mounts, is) {
			t.Errorf("%q is not in %q", is, mounts)
		}
	})
}
