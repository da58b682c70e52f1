package testbed

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead.dev/fairlead/lab/load"
	"fairlead.dev/fairlead/lab/result"
)

// ReadLoad returns what the machine has done so far.
func ReadLoad() result.Load {
	t := load.ParseStat([]byte(file("/", "proc/stat")))[-1]
	l := result.Load{Average: file("/", "proc/loadavg"), Total: t.Total(), Busy: t.Busy(), Steal: t.Steal,
		Own: load.OwnCPU()}
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_CHILDREN, &ru) == nil {
		l.Own += time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	}
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) == nil {
		l.Memory = int64(si.Freeram) * int64(si.Unit)
	}
	return l
}

// ReadBuild returns what this program is.
func ReadBuild() result.Build {
	b := result.Build{Go: runtime.Version()}
	if info, ok := debug.ReadBuildInfo(); ok {
		b.Module, b.Version = info.Main.Path, info.Main.Version
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				b.Commit = s.Value
			case "vcs.modified":
				b.Modified = s.Value == "true"
			}
		}
	}
	if f, err := os.Open("/proc/self/exe"); err == nil {
		defer f.Close()
		h := sha256.New()
		if _, err := io.Copy(h, f); err == nil {
			b.Binary = hex.EncodeToString(h.Sum(nil))
		}
	}
	return b
}

// ReadMachine returns where this program runs.
func ReadMachine() result.Machine { return readMachine("/") }

func readMachine(root string) result.Machine {
	info := file(root, "proc/cpuinfo")
	m := result.Machine{
		Kernel:      strings.TrimSpace(file(root, "proc/sys/kernel/osrelease") + " " + file(root, "proc/sys/kernel/version")),
		Arch:        runtime.GOARCH,
		CPU:         field(info, "model name"),
		CPUs:        strings.Count("\n"+info, "\nprocessor"),
		Hypervisor:  strings.Contains(field(info, "flags")+" ", " hypervisor "),
		Clocksource: file(root, "sys/devices/system/clocksource/clocksource0/current_clocksource"),
		Governor:    file(root, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
		Mitigations: map[string]string{},
		Config:      kernelConfig(root),
		Sysctls:     map[string]string{},
	}
	if kb := strings.Fields(field(file(root, "proc/meminfo"), "MemTotal")); len(kb) == 2 {
		for _, d := range kb[0] {
			m.Memory = m.Memory*10 + int64(d-'0')
		}
		m.Memory *= 1024
	}
	for line := range strings.Lines(file(root, "proc/self/cgroup")) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			m.Cgroup, m.CPUMax = path, file(root, filepath.Join("sys/fs/cgroup", path, "cpu.max"))
		}
	}
	flaws, _ := filepath.Glob(filepath.Join(root, "sys/devices/system/cpu/vulnerabilities/*"))
	for _, f := range flaws {
		m.Mitigations[filepath.Base(f)] = file("", f)
	}
	for _, name := range sysctls {
		if v := file(root, "proc/sys/"+strings.ReplaceAll(name, ".", "/")); v != "" {
			m.Sysctls[name] = strings.Join(strings.Fields(v), " ")
		}
	}
	return m
}

// sysctls are those that change what a connection costs.
var sysctls = []string{
	"net.core.bpf_jit_enable", "net.core.default_qdisc", "net.core.netdev_budget", "net.core.somaxconn",
	"net.ipv4.ip_local_port_range",
	"net.ipv4.tcp_congestion_control", "net.ipv4.tcp_max_syn_backlog", "net.ipv4.tcp_timestamps", "net.ipv4.tcp_tw_reuse",
	"net.netfilter.nf_conntrack_buckets", "net.netfilter.nf_conntrack_max", "kernel.sched_autogroup_enabled",
}

// options are those that change what is counted and how finely.
var options = []string{"HZ", "IRQ_TIME_ACCOUNTING", "NO_HZ_FULL", "PREEMPT_DYNAMIC", "PREEMPT_RT",
	"VIRT_CPU_ACCOUNTING_GEN", "NETFILTER_XTABLES_LEGACY"}

// kernelConfig reads options from /proc/config.gz, which not every kernel has: "y", a number, or "n".
func kernelConfig(root string) map[string]string {
	f, err := os.Open(filepath.Join(root, "proc/config.gz"))
	if err != nil {
		return nil
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil
	}
	text, err := io.ReadAll(z)
	if err != nil {
		return nil
	}
	c := map[string]string{}
	for _, o := range options {
		c[o] = "n"
		if _, rest, ok := bytes.Cut(text, []byte("\nCONFIG_"+o+"=")); ok {
			v, _, _ := bytes.Cut(rest, []byte("\n"))
			c[o] = string(v)
		}
	}
	return c
}

// file is a small file's content without the white space around it, "" if there is none.
func file(root, path string) string {
	b, _ := os.ReadFile(filepath.Join(root, path))
	return strings.TrimSpace(string(b))
}

// field is the value of the first line "name : value".
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
