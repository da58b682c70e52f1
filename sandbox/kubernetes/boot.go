package kubernetes

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// own is set in the environment of a machine's process that has its namespaces.
const own = "FAIRLEAD_MACHINE"

// Boot makes this process a machine, given as JSON, and returns when that ends: at SIGTERM, or with its first program
// that ends by itself, which is an error. It is called in the network namespace that the machine is to have.
//
// The first of two processes joins the machine's cgroups, so that the second sees these as the roots.
func Boot(spec string) error {
	var m Machine
	if err := json.Unmarshal([]byte(spec), &m); err != nil {
		return fmt.Errorf("read the machine: %w", err)
	}
	if os.Getenv(own) != "" {
		return m.boot()
	}
	if err := joinCgroups(m.Cgroup); err != nil {
		return err
	}
	runtime.LockOSThread() // Pdeathsig comes when the thread that made the child ends: PR_SET_PDEATHSIG(2const)
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), own+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL,
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC |
			syscall.CLONE_NEWCGROUP,
	}
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, unix.SIGTERM, unix.SIGINT)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the machine's first process: %w", err)
	}
	go func() {
		for s := range ends {
			cmd.Process.Signal(s)
		}
	}()
	return cmd.Wait()
}

// boot is the machine's first process: it mounts, starts the programs and reaps orphans.
func (m Machine) boot() error {
	for _, step := range []func() error{m.mount, overrideSysctls, m.name, m.write} {
		if err := step(); err != nil {
			return fmt.Errorf("machine %s: %w", m.Name, err)
		}
	}
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, unix.SIGTERM, unix.SIGINT)
	var all children
	go all.reap()
	died := make(chan error)
	for _, p := range m.Programs {
		if err := m.launch(p, &all, died); err != nil {
			return err
		}
	}
	select {
	case <-ends:
		return nil
	case err := <-died:
		return err
	}
}

func (m Machine) name() error { return unix.Sethostname([]byte(m.Name)) }

func (m Machine) write() error {
	for _, f := range m.Folders {
		if err := os.MkdirAll(f, 0o755); err != nil {
			return err
		}
	}
	for _, f := range m.Files {
		err := errors.Join(os.MkdirAll(filepath.Dir(f.Path), 0o755), os.WriteFile(f.Path, []byte(f.Text), f.Mode))
		if err != nil {
			return err
		}
	}
	return nil
}

// mount makes the machine's file systems: see the package's comment.
func (m Machine) mount() error {
	list, err := hierarchies() // before other file systems cover them
	if err != nil {
		return err
	}
	const hidden = "/run/machine"
	do := func(source, target, kind string, flags uintptr, data string) {
		if err != nil {
			return
		}
		if target != "/" && kind != "" {
			os.MkdirAll(target, 0o755)
		}
		if err = unix.Mount(source, target, kind, flags, data); err != nil {
			err = fmt.Errorf("mount %s at %s: %w", kind+source, target, err)
		}
	}
	do("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	do("", "/", "", unix.MS_REC|unix.MS_SHARED, "") // volumes' mounts reach containers
	for _, d := range []string{"etc", "opt", "var"} {
		upper, work := filepath.Join(m.Dir, d), filepath.Join(m.Dir, d+".work")
		err = errors.Join(err, os.MkdirAll(upper, 0o755), os.MkdirAll(work, 0o755))
	}
	data := filepath.Join(m.Dir, "data")
	err = errors.Join(err, os.MkdirAll(data, 0o755))
	do("tmpfs", "/run", "tmpfs", 0, "mode=755")
	do(m.Dir, hidden, "bind", unix.MS_BIND, "")
	for _, d := range []string{"etc", "opt", "var"} {
		do("overlay", "/"+d, "overlay", 0, fmt.Sprintf("lowerdir=/%s,upperdir=%s/%[1]s,workdir=%[2]s/%[1]s.work", d, hidden))
	}
	for _, d := range []string{"containerd", "kubelet"} { // overlayfs has no upper layer on overlayfs
		at := filepath.Join(hidden, "data", d)
		err = errors.Join(err, os.MkdirAll(at, 0o755))
		do(at, "/var/lib/"+d, "bind", unix.MS_BIND, "")
	}
	do("proc", "/proc", "proc", 0, "")
	do("sysfs", "/sys", "sysfs", 0, "")
	do("bpf", "/sys/fs/bpf", "bpf", 0, "")
	if err != nil {
		return err
	}
	return mountCgroups(list)
}

// sysctls are those of the whole kernel that a kubelet sets at its start, and their values then (KubeletConfiguration's
// protectKernelDefaults).
var sysctls = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// overrideSysctls mounts files over sysctls, so that a kubelet finds its values and the kernel keeps its own.
func overrideSysctls() error {
	for name, value := range sysctls {
		file := filepath.Join("/run/sysctls", name)
		err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(value+"\n"), 0o644))
		if err == nil {
			err = unix.Mount(file, filepath.Join("/proc/sys", name), "", unix.MS_BIND, "")
		}
		if err != nil && !errors.Is(err, unix.ENOENT) { // a kernel without it
			return fmt.Errorf("mount %s over /proc/sys/%s: %w", file, name, err)
		}
	}
	return nil
}

// mountCgroups mounts what the host has, where it has it, as the machine's cgroup namespace shows it.
func mountCgroups(list []hierarchy) error {
	const root = "/sys/fs/cgroup"
	if len(list) > 1 || list[0].options != "" {
		if err := unix.Mount("tmpfs", root, "tmpfs", 0, "mode=755"); err != nil {
			return fmt.Errorf("mount tmpfs at %s: %w", root, err)
		}
	}
	for _, h := range list {
		kind := "cgroup"
		if h.options == "" {
			kind = "cgroup2"
		}
		if !strings.HasPrefix(h.at, root) {
			h.at = filepath.Join(root, filepath.Base(h.at))
		}
		if err := os.MkdirAll(h.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(kind, h.at, kind, 0, h.options); err != nil {
			return fmt.Errorf("mount %s %s at %s: %w", kind, h.options, h.at, err)
		}
	}
	return nil
}

// launch starts a program and waits until it is ready.
func (m Machine) launch(p Program, all *children, died chan<- error) error {
	file := p.Name + ".log"
	log, err := os.OpenFile(filepath.Join("/run/machine", file), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.Args[0], p.Args[1:]...)
	cmd.Env = append(os.Environ(), "PATH="+m.Path)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	if err := all.start(cmd); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	if p.Ends {
		if err := all.wait(cmd); err != nil {
			return fmt.Errorf("%s: %w: see %s", p.Name, err, file)
		}
		return nil
	}
	ended := make(chan error, 1)
	go func() {
		err := fmt.Errorf("%s ended by itself: %v: see %s", p.Name, all.wait(cmd), file)
		ended <- err
		died <- err
	}()
	for deadline := time.Now().Add(time.Minute); p.Socket != ""; {
		select {
		case err := <-ended:
			return err
		case <-time.After(20 * time.Millisecond):
		}
		if _, err := os.Stat(p.Socket); err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s does not listen at %s after a minute: see %s", p.Name, p.Socket, file)
		}
	}
	return nil
}

// children are the processes that a machine's first one has started itself. Others become its children when their
// parents die.
type children struct {
	mu  sync.Mutex
	own map[int]bool
}

func (c *children) start(cmd *exec.Cmd) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := cmd.Start()
	if err == nil {
		if c.own == nil {
			c.own = map[int]bool{}
		}
		c.own[cmd.Process.Pid] = true
	}
	return err
}

func (c *children) wait(cmd *exec.Cmd) error {
	err := cmd.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.own, cmd.Process.Pid)
	return err
}

// reap waits for children that this process did not start, whenever one ends.
func (c *children) reap() {
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	for range died {
		orphans, _ := filepath.Glob("/proc/[0-9]*")
		for _, p := range orphans {
			pid, _ := strconv.Atoi(filepath.Base(p))
			c.mu.Lock()
			if !c.own[pid] {
				unix.Wait4(pid, nil, unix.WNOHANG, nil) // no child: no harm
			}
			c.mu.Unlock()
		}
	}
}
