package testbed

import (
	"compress/gzip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"fairlead.dev/fairlead/lab/result"
)

func TestManifestOfThisMachine(t *testing.T) {
	m, b, l := ReadMachine(), ReadBuild(), ReadLoad()
	if m.Kernel == "" || m.CPUs == 0 || m.Memory == 0 || m.Clocksource == "" || l.Total == 0 || l.Average == "" {
		t.Errorf("machine %+v, load %+v", m, l)
	}
	if b.Go == "" || len(b.Binary) != 64 || b.Module != "fairlead.dev/fairlead" {
		t.Errorf("build %+v", b)
	}
}

func TestReadMachine(t *testing.T) {
	root := t.TempDir()
	write := func(path, text string) {
		full := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("proc/sys/kernel/osrelease", "6.1.0\n")
	write("proc/sys/kernel/version", "#1 SMP\n")
	write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Slow\nflags\t\t: fpu hypervisor\nprocessor\t: 1\n")
	write("proc/meminfo", "MemTotal:        2048 kB\n")
	write("proc/self/cgroup", "4:memory:/x\n0::/lab\n")
	write("sys/fs/cgroup/lab/cpu.max", "max 100000\n")
	write("sys/devices/system/cpu/vulnerabilities/meltdown", "Not affected\n")
	write("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
	var z strings.Builder
	gz := gzip.NewWriter(&z)
	gz.Write([]byte("\nCONFIG_HZ=250\n# CONFIG_PREEMPT_RT is not set\nCONFIG_PREEMPT_DYNAMIC=y\n"))
	gz.Close()
	write("proc/config.gz", z.String())
	got := readMachine(root)
	config := map[string]string{"HZ": "250", "PREEMPT_DYNAMIC": "y"}
	for _, o := range options {
		if config[o] == "" {
			config[o] = "n"
		}
	}
	want := result.Machine{Kernel: "6.1.0 #1 SMP", Arch: got.Arch, CPU: "Slow", CPUs: 2, Memory: 2 << 20, Hypervisor: true,
		Cgroup: "/lab", CPUMax: "max 100000",
		Mitigations: map[string]string{"meltdown": "Not affected"}, Config: config,
		Sysctls: map[string]string{"net.ipv4.ip_local_port_range": "32768 60999"}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
}
