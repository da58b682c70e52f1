package bpf

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"
)

// Probe checks the kernel for what the programs need, and returns an error that names everything missing, with the
// version of Linux that has it.
var Probe = sync.OnceValue(func() error {
	if err := Capable(); err != nil {
		return err
	}
	var errs []error
	need := func(err error, what string) {
		switch {
		case errors.Is(err, ebpf.ErrNotSupported):
			errs = append(errs, fmt.Errorf("bpf: this kernel lacks %s; use another mode", what))
		case err != nil:
			errs = append(errs, fmt.Errorf("bpf: look for %s: %w", what, Explain(err)))
		}
	}
	if _, err := btf.LoadKernelSpec(); err != nil {
		errs = append(
			errs,
			fmt.Errorf("bpf: this kernel does not describe its types (CONFIG_DEBUG_INFO_BTF): %w; use another mode", err),
		)
	}
	need(features.HaveProgramType(ebpf.CGroupSockAddr), "programs at a cgroup's sockets (Linux 4.17, CONFIG_CGROUP_BPF)")
	need(features.HaveMapType(ebpf.LRUHash), "maps of the type LRU hash (4.10)")
	need(features.HaveMapType(ebpf.LPMTrie), "maps of the type LPM trie (4.11)")
	need(features.HaveMapType(ebpf.SkStorage), "storage with sockets (5.2)")
	need(features.HaveMapType(ebpf.RingBuf), "ring buffers (5.8)")
	need(features.HaveBoundedLoops(), "loops in programs (5.3)")
	need(features.HaveV3ISA(), "32-bit instructions (5.1)")
	need(features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnGetNetnsCookie), "network namespaces' cookies (5.7)")
	need(
		features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSkStorageGet),
		"storage with sockets for programs at a cgroup's (5.8)",
	)
	need(
		features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnProbeReadKernel),
		"reading of its own structs by such programs (5.8)",
	)
	need(features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnKtimeGetCoarseNs), "the coarse clock (5.11)")
	need(
		features.HaveProgramHelper(ebpf.CGroupSock, asm.FnSkStorageGet),
		"storage with sockets where these are closed (5.14 has it)",
	)
	return errors.Join(errs...)
})

// Capable returns an error where the calling thread lacks capabilities: without them the kernel answers as if it lacked
// features.
func Capable() error {
	if lacking := lackingCapabilities(); len(lacking) > 0 {
		return fmt.Errorf("bpf: without %s: %w", strings.Join(lacking, ", "), Explain(unix.EPERM))
	}
	return nil
}

// lackingCapabilities returns the names of the missing capabilities of the calling thread.
func lackingCapabilities() (names []string) {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if unix.Capget(&h, &has[0]) != nil {
		return nil // the kernel will say
	}
	effective := uint64(has[1].Effective)<<32 | uint64(has[0].Effective)
	may := func(bits ...int) (yes bool) {
		for _, b := range bits {
			yes = yes || effective&(1<<b) != 0
		}
		return yes
	}
	if !may(unix.CAP_BPF, unix.CAP_SYS_ADMIN) {
		names = append(names, "CAP_BPF")
	}
	if !may(unix.CAP_PERFMON, unix.CAP_SYS_ADMIN) {
		names = append(names, "CAP_PERFMON")
	}
	if !may(unix.CAP_NET_ADMIN) {
		names = append(names, "CAP_NET_ADMIN")
	}
	return names
}

// Lacks returns sentences about optional features that this kernel lacks, and the consequences.
var Lacks = sync.OnceValue(func() (lacks []string) {
	if errors.Is(features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval), ebpf.ErrNotSupported) {
		lacks = append(
			lacks,
			"This kernel lacks bpf_set_retval (Linux 5.18): a connect() without endpoint reads EPERM in place of ECONNREFUSED.",
		)
	}
	return lacks
})

// ProbeDevices checks the kernel for what the programs for packets need besides, and returns an error that names what
// is missing.
var ProbeDevices = sync.OnceValue(func() error {
	var errs []error
	need := func(err error, what string) {
		if err != nil {
			errs = append(errs, fmt.Errorf("bpf: this kernel lacks %s: %w", what, err))
		}
	}
	need(features.HaveProgramType(ebpf.SchedCLS), "programs at devices (4.1)")
	need(features.HaveProgramHelper(ebpf.SchedCLS, asm.FnSkcLookupTcp), "the look-up of sockets (5.2)")
	need(features.HaveProgramHelper(ebpf.SchedCLS, asm.FnKtimeGetCoarseNs), "a coarse clock (5.11)")
	if major, minor := release(); major < 6 || major == 6 && minor < 7 {
		errs = append(
			errs,
			fmt.Errorf(
				"bpf: Linux %d.%d lacks links to devices (6.6) and source addresses in look-ups of routes (6.7)",
				major,
				minor,
			),
		)
	}
	return errors.Join(errs...)
})

// Preempts reports whether this kernel's work on packets may be preempted by other such work (PREEMPT_RT): then what
// programs store by processor may change while they read it.
func Preempts() bool {
	var u unix.Utsname
	return unix.Uname(&u) != nil || strings.Contains(unix.ByteSliceToString(u.Version[:]), "PREEMPT_RT")
}

// release returns the kernel's version.
func release() (major, minor int) {
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	}
	return major, minor
}
