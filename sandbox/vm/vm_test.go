package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// sh runs a shell command in a guest and returns its standard output and error.
func sh(t *testing.T, m *Machine, script string) (code int, stdout, stderr string) {
	t.Helper()
	var o, e bytes.Buffer
	code, err := m.Run(t.Context(), Command{Args: []string{"sh", "-c", script}, Stdout: &o, Stderr: &e})
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return code, o.String(), e.String()
}

// One machine, from boot to end.
func TestMachine(t *testing.T) {
	share := t.TempDir()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, make([]byte, 3<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	m, err := Open(t.Context(), Options{Shared: []string{share}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		for _, p := range m.children {
			if _, err := os.Stat(filepath.Join("/proc", fmt.Sprint(p.PID))); err == nil {
				t.Errorf("%s is still there, process %d", p.name, p.PID)
			}
		}
	}()
	t.Logf("booted in %v", time.Since(start))

	for name, c := range map[string]struct {
		script string
		code   int
		stdout string // parts of it
		stderr string
	}{
		"the kernel is another": {"uname -r", 0, m.Release, ""},
		"output apart":          {"echo out; echo err >&2", 0, "out\n", "err\n"},
		"exit code":             {"exit 3", 3, "", ""},
		"signal":                {"kill -9 $$", 137, "", ""},
		"planes' modules":       {"modprobe -a ip_vs ip_vs_sh ipip ipvlan sctp && cat /proc/modules", 0, "ipvlan", ""},
		"modules on demand":     {"ip link add type vxlan id 7 dstport 4789 && ip link", 0, "vxlan0", ""},
		"two processors":        {"nproc", 0, "2\n", ""},
		"loopback":              {"ip addr show lo", 0, "127.0.0.1/8", ""},
		"file systems":          {"cut -d' ' -f2,3 /proc/mounts", 0, "/sys/fs/cgroup cgroup2\n/sys/fs/bpf bpf\n", ""},
		"types of the kernel":   {"ls /sys/kernel/btf/vmlinux", 0, "vmlinux", ""},
		"orphans are waited for": {"sh -c 'sleep 0.1 & echo $!' >/tmp/orphan; while [ -e /proc/$(cat /tmp/orphan) ]; do " +
			"sleep 0.1; done", 0, "", ""},
		"writes stay in the guest": {"echo here > /var/fairlead-guest && cat /var/fairlead-guest", 0, "here\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := sh(t, m, c.script)
			if code != c.code || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) ||
				c.stderr == "" && stderr != "" {
				t.Errorf("%s: code %d, said %q and %q", c.script, code, stdout, stderr)
			}
		})
	}
	t.Run("what is opened is kept", func(t *testing.T) {
		used := "used() { df --output=used / | tail -n 1; }; " // KiB of the guest's memory
		if code, _, stderr := sh(t, m, used+"before=$(used); cat "+file+" >/dev/null; "+
			"for i in $(seq 100); do [ $(used) -ge $((before + 3000)) ] && exit; sleep 0.1; done; exit 1"); code != 0 {
			t.Error("not copied", code, stderr)
		}
	})
	t.Run("shared", func(t *testing.T) {
		if err := os.WriteFile(filepath.Join(share, "in"), []byte("from the host"), 0o644); err != nil {
			t.Fatal(err)
		}
		if code, _, stderr := sh(t, m, "cd "+share+" && tr h H <in >out"); code != 0 {
			t.Fatal(code, stderr)
		}
		if b, err := os.ReadFile(filepath.Join(share, "out")); err != nil || string(b) != "from tHe Host" {
			t.Errorf("%q, %v", b, err)
		}
	})
	if _, err := os.Stat("/var/fairlead-guest"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file written in the guest is on the host: %v", err)
	}
	t.Run("no such program", func(t *testing.T) {
		if _, err := m.Run(t.Context(), Command{Args: []string{"/no/such"}}); err == nil ||
			!strings.Contains(err.Error(), "/no/such") {
			t.Error(err)
		}
	})
	t.Run("output streams, and a command is cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		enough := errors.New("seen enough")
		said := writer(func(b []byte) { cancel(enough) }) // only if the line comes before the command's end, which never is
		if _, err := m.Run(ctx, Command{Args: []string{"sh", "-c", "echo line; sleep 1d & wait"}, Stdout: said}); !errors.Is(
			err, enough) {
			t.Error(err)
		}
		if code, stdout, _ := sh(t, m, "pidof sleep"); code == 0 {
			t.Errorf("the cancelled command's child lives on: %s", stdout)
		}
	})
	t.Run("a panic ends the machine and is shown", func(t *testing.T) {
		_, err := m.Run(t.Context(), Command{Args: []string{"sh", "-c", "echo c > /proc/sysrq-trigger; sleep 1d"}})
		if err == nil || !strings.Contains(err.Error(), "Kernel panic - not syncing: sysrq triggered crash") {
			t.Error(err)
		}
	})
}

type writer func([]byte)

func (w writer) Write(b []byte) (int, error) { w(b); return len(b), nil }

// When its context ends, so does the machine, also in the midst of its boot.
func TestOpenCancelled(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	booting := errors.New("it boots")
	_, err := Open(ctx, Options{Console: writer(func([]byte) { cancel(booting) })})
	if !errors.Is(err, booting) {
		t.Error(err)
	}
}

func TestTooMuchMemory(t *testing.T) {
	if _, err := Open(t.Context(), Options{Memory: 1 << 30}); err == nil ||
		!strings.Contains(err.Error(), "MiB are free") {
		t.Error(err)
	}
}

func TestMissingProgram(t *testing.T) {
	if _, err := program("a-package", "a-program"); err == nil ||
		!strings.Contains(err.Error(), "apt-get install --no-install-recommends a-package") {
		t.Error(err)
	}
}

// A kernel is there whole, not there, or broken.
func TestKernel(t *testing.T) {
	dir := t.TempDir()
	if _, err := at(filepath.Join(dir, "6.12")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	for _, c := range []struct{ add, says string }{
		{"boot/config-6.12.9", "0 kernel images"},
		{"boot/vmlinuz-6.12.9", "lacks"},
		{"lib/modules/6.12.9/modules.dep.bin", ""},
		{"boot/vmlinuz-6.12.10", "2 kernel images"},
	} {
		path := filepath.Join(dir, "6.12", c.add)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644)); err != nil {
			t.Fatal(err)
		}
		k, err := at(filepath.Join(dir, "6.12"))
		if c.says == "" && (err != nil || k.Release != "6.12.9") {
			t.Errorf("complete: %+v, %v", k, err)
		}
		if c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("with %s: %v, should say %s", c.add, err, c.says)
		}
	}
}

// Of a suite's packages, the newest kernel of a series is the one to boot.
func TestNewest(t *testing.T) {
	names := []string{"linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-50-cloud-amd64", "linux-image-6.1.0-51-amd64",
		"linux-image-6.12.90+deb12.1-cloud-amd64", "linux-image-6.12.95+deb12-cloud-amd64",
		"linux-image-6.12.95+deb12-cloud-amd64-unsigned", "linux-image-6.12.9+deb12-cloud-amd64", "linux-image-cloud-amd64"}
	for series, want := range map[Series]string{"6.1": names[1], "6.12": names[4], "6.2": ""} {
		if got := series.newest(names); got != want {
			t.Errorf("%s: %q, want %q", series, got, want)
		}
	}
}

// Files of every package's layout are where those of bookworm are.
func TestArrange(t *testing.T) {
	const release = "7.3.4+deb13-cloud-amd64"
	for name, files := range map[string][]string{
		"bookworm":      {"boot/vmlinuz-" + release, "lib/modules/" + release + "/modules.dep.bin"},
		"modules apart": {"boot/vmlinuz-" + release, "usr/lib/modules/" + release + "/modules.dep.bin"},
		"since 6.19":    {"usr/lib/modules/" + release + "/vmlinuz", "usr/lib/modules/" + release + "/modules.dep.bin"},
	} {
		root := t.TempDir()
		for _, f := range files {
			path := filepath.Join(root, f)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		if err := arrange(root, release); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if k, err := at(root); err != nil || k.Release != release {
			t.Errorf("%s: %+v, %v", name, k, err)
		}
	}
}

func TestUnknownSeries(t *testing.T) {
	if _, err := Prepare(t.Context(), "6.13"); err == nil ||
		!strings.Contains(err.Error(), `no kernel "6.13" is known: there are ["5.10" "6.1" "6.12" "6.18" "7.3"]`) {
		t.Error(err)
	}
}

func TestTail(t *testing.T) {
	var said tail
	for range tailSize {
		if n, err := said.Write([]byte("line\r\n")); n != 6 || err != nil {
			t.Fatal(n, err)
		}
	}
	if s := said.String(); len(s) > tailSize || !strings.HasPrefix(s, "line\nline\n") || !strings.HasSuffix(s, "\nline") {
		t.Errorf("%q", s)
	}
}
