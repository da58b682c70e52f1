package vm

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// guestArgument is what the kernel's command line gives its first process.
const guestArgument = "fairlead-vm-guest"

func init() {
	if os.Getpid() == 1 && os.Args[len(os.Args)-1] == guestArgument { // after what kernels pass on that don't know it
		live()
	}
}

// live is the life of a guest's first process. Only the end of the machine ends it.
func live() {
	err := serve()
	fmt.Fprintln(os.Stderr, "vm: guest ends:", err)
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

// serve obeys the host until it hangs up.
func serve() error {
	for _, m := range early {
		if err := m.mount(); err != nil {
			return err
		}
	}
	var ports []string
	// its driver may be a module
	for end := time.Now().Add(5 * time.Second); len(ports) == 0 &&
		time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		ports, _ = filepath.Glob("/dev/vport*p1") // the pattern is well-formed
	}
	if len(ports) != 1 {
		return fmt.Errorf("%d serial ports %q instead of one", len(ports), ports)
	}
	port, err := os.OpenFile(ports[0], os.O_RDWR, 0)
	if err != nil {
		return err
	}
	g := &guest{out: gob.NewEncoder(port)}
	in := gob.NewDecoder(port)
	var first order
	if err := in.Decode(&first); err != nil {
		return fmt.Errorf("first order: %w", err)
	}
	if first.Setup == nil {
		return errors.New("the first order is not setup")
	}
	if err := first.Setup.do(); err != nil {
		return errors.Join(err, g.report(report{Kind: failed, Text: err.Error()}))
	}
	go g.reap()
	if err := g.report(report{Kind: ready, Text: release()}); err != nil {
		return err
	}
	for {
		var o order
		switch err := in.Decode(&o); {
		case err != nil:
			return fmt.Errorf("the host hung up: %w", err)
		case o.Kill:
			g.kill()
		case o.Run != nil:
			g.start(o.Run)
		}
	}
}

func release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err.Error()
	}
	return unix.ByteSliceToString(u.Release[:])
}

// mounted is one file system in its place.
type mounted struct {
	source, at, kind string
	flags            uintptr
	data             string
}

func (m mounted) mount() error {
	if err := os.MkdirAll(m.at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.at, m.kind, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s (%s) on %s: %w", m.source, m.kind, m.at, err)
	}
	return nil
}

// early is there while the host's files are still the root, read-only; late is where processes live.
var (
	early = []mounted{
		{"proc", "/proc", "proc", 0, ""},
		{"devtmpfs", "/dev", "devtmpfs", 0, ""},
		{"tmpfs", "/run", "tmpfs", 0, ""},
	}
	late = []mounted{
		{"proc", "/proc", "proc", 0, ""},
		{"sysfs", "/sys", "sysfs", 0, ""},
		{"devtmpfs", "/dev", "devtmpfs", 0, ""},
		{"devpts", "/dev/pts", "devpts", 0, "ptmxmode=666"},
		{"tmpfs", "/dev/shm", "tmpfs", 0, ""},
		{"tmpfs", "/run", "tmpfs", 0, "mode=755"},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", 0, ""},
		{"bpf", "/sys/fs/bpf", "bpf", 0, ""},
		{"tracefs", "/sys/kernel/tracing", "tracefs", 0, ""},
		{"debugfs", "/sys/kernel/debug", "debugfs", 0, ""},
	}
)

const paths = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// do makes the guest a place to live in.
func (s *setup) do() error {
	if out, err := modprobe(filepath.Dir(filepath.Dir(filepath.Dir(s.Modules))), "overlay"); err != nil {
		return fmt.Errorf("modprobe overlay: %w: %s", err, out)
	}
	layers := mounted{"overlay", "/run/root", "overlay", 0, "lowerdir=/,upperdir=/run/upper,workdir=/run/work"}
	if err := errors.Join(os.Mkdir("/run/upper", 0o755), os.Mkdir("/run/work", 0o755), layers.mount()); err != nil {
		return err
	}
	if err := errors.Join(os.Chdir(layers.at), unix.Chroot("."), os.Chdir("/")); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	for _, m := range late {
		if err := m.mount(); err != nil {
			return err
		}
	}
	for i, path := range s.Shared {
		if err := (mounted{fmt.Sprint("shared", i), path, "virtiofs", 0, ""}).mount(); err != nil {
			return err
		}
	}
	modules := "/lib/modules/" + s.Release // where modprobe looks, also when the kernel calls it
	if err := errors.Join(os.MkdirAll("/lib/modules", 0o755), os.RemoveAll(modules),
		os.Symlink(s.Modules, modules)); err != nil {
		return err
	}
	os.Clearenv() // of what the kernel gave
	return errors.Join(os.Setenv("PATH", paths), os.Setenv("HOME", "/root"), os.Setenv("LANG", "C.UTF-8"),
		unix.Sethostname([]byte("guest")), loopback(), cacheOpened())
}

func modprobe(dir, module string) ([]byte, error) {
	path, err := program("kmod", "modprobe")
	if err != nil {
		return nil, err
	}
	return exec.Command(path, "-d", dir, module).CombinedOutput()
}

// loopback brings interface lo up.
func loopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return os.NewSyscallError("SIOCSIFFLAGS lo", unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo))
}

// guest is the host's hand inside.
type guest struct {
	writing sync.Mutex
	out     *gob.Encoder
	mu      sync.Mutex
	running int // process id of the command, also of its group; 0 if none
}

func (g *guest) report(r report) error {
	g.writing.Lock()
	defer g.writing.Unlock()
	return g.out.Encode(r)
}

// stream reports what is written to it as one kind.
type stream struct {
	g    *guest
	kind reportKind
}

func (s stream) Write(b []byte) (int, error) {
	return len(b), s.g.report(report{Kind: s.kind, Data: b})
}

var _ io.Writer = stream{}

const hanging = 5 * time.Second // how long a command's children may hold its output open after its end

// start starts a command. It's running, or reported ended, when start returns, so that a later order to kill finds it.
func (g *guest) start(r *run) {
	cmd := exec.Command(r.Args[0], r.Args[1:]...)
	cmd.Dir, cmd.Env, cmd.WaitDelay = r.Dir, append(os.Environ(), r.Env...), hanging
	cmd.Stdout, cmd.Stderr = stream{g, stdout}, stream{g, stderr}
	if r.OneOutput {
		cmd.Stderr = cmd.Stdout
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := cmd.Start(); err != nil {
		_ = g.report(report{Kind: ended, Text: err.Error()}) // a dead port ends serve
		return
	}
	g.running = cmd.Process.Pid
	go g.wait(cmd)
}

// wait reports a command's end. Processes that it left behind live on.
func (g *guest) wait(cmd *exec.Cmd) {
	err := cmd.Wait()
	g.mu.Lock()
	g.running = 0
	g.mu.Unlock()
	g.sweep()
	unix.Sync() // so that the host may end the machine at any time
	end := report{Kind: ended, Code: cmd.ProcessState.ExitCode()}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		end.Code = 128 + int(status.Signal()) // as shells say it
	} else if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) && !errors.Is(err, exec.ErrWaitDelay) {
		end.Text = err.Error()
	}
	_ = g.report(end) // a dead port ends serve
}

func (g *guest) kill() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.running != 0 {
		_ = unix.Kill(-g.running, unix.SIGKILL) // it may just have ended
	}
}

// reap is a first process's duty: it waits for orphans, else their process ids would stay taken.
func (g *guest) reap() {
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	for range died {
		g.sweep()
	}
}

// sweep waits for dead children other than the command, whose own Wait wants it.
func (g *guest) sweep() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for {
		var info unix.Siginfo
		if err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); err != nil {
			return
		}
		// si_pid on 64-bit machines, see sigaction(2); 0 if none
		pid := int(*(*int32)(unsafe.Add(unsafe.Pointer(&info), 16)))
		if pid == 0 || pid == g.running {
			return
		}
		_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
	}
}
