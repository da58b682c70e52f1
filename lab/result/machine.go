package result

import (
	"strings"
	"time"
)

// Build is the program that measured.
type Build struct {
	Module   string `json:"module"`
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`   // "": built without version control's knowledge
	Modified bool   `json:"modified,omitempty"` // with changes that are in no commit
	Go       string `json:"go"`
	Binary   string `json:"binary"` // SHA-256 of the executable
}

// Machine is where it measured. What the kernel doesn't say is empty.
type Machine struct {
	Kernel      string            `json:"kernel"` // release and version
	Arch        string            `json:"arch"`
	CPU         string            `json:"cpu"` // model
	CPUs        int               `json:"cpus"`
	Memory      int64             `json:"memory"` // bytes
	Hypervisor  bool              `json:"hypervisor"`
	Clocksource string            `json:"clocksource"`
	Governor    string            `json:"governor,omitempty"`
	Cgroup      string            `json:"cgroup"`            // the line of the unified hierarchy in /proc/self/cgroup
	CPUMax      string            `json:"cpu_max,omitempty"` // of that cgroup
	Mitigations map[string]string `json:"mitigations"`
	Config      map[string]string `json:"config"`  // kernel options that bear on times
	Sysctls     map[string]string `json:"sysctls"` // likewise
}

// Emulated reports whether its processor is a program: QEMU's, as `--kernel vm` has it.
func (m Machine) Emulated() bool { return strings.Contains(m.CPU, "TCG") }

// Load is what else the machine did, read before and after: differences count.
type Load struct {
	Average string        `json:"average"` // /proc/loadavg
	Total   time.Duration `json:"total"`   // ns of all processors since boot
	Busy    time.Duration `json:"busy"`
	Steal   time.Duration `json:"steal"`
	Own     time.Duration `json:"own"` // of this process and the children that it waited for
	Memory  int64         `json:"memory_available"`
}
