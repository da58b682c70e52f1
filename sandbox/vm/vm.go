package vm

import (
	"cmp"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Options returns what machine to open. The zero value is a good one.
type Options struct {
	Kernel  Series    // Default if empty
	Shared  []string  // directories that the guest may write; they have the same paths inside
	CPUs    int       // 2 if zero; 1 of an Exact one
	Memory  int       // MiB; 3072 if zero
	Console io.Writer // gets what the guest's kernel prints, if not nil
	Exact   bool      // its clocks count instructions, and it can trace them: see exact.go
}

// Machine is a running guest.
type Machine struct {
	Release string // of the kernel, as uname -r says it

	qemu     *process
	children []*process // all, qemu last
	port     *os.File
	out      *gob.Encoder
	in       *gob.Decoder
	portLock chan struct{} // holds one token: its holder may use port
	tracer   *tracer       // nil: not Exact
	close    func() error
	unhook   func() bool
}

const bootDeadline = 5 * time.Minute // seen: 4 s on an idle machine, 20 s among eight busy processes on two cores

// Open boots a guest. When ctx ends, so does the guest. Errors say which package is missing, or how the boot ended,
// with the console's last lines.
func Open(ctx context.Context, o Options) (*Machine, error) {
	o.CPUs, o.Memory = cmp.Or(o.CPUs, 2), cmp.Or(o.Memory, 3072)
	if o.Exact {
		o.CPUs = 1
	}
	k, err := Prepare(ctx, cmp.Or(o.Kernel, Default))
	if err != nil {
		return nil, err
	}
	if err := enough(o.Memory); err != nil {
		return nil, err
	}
	m := &Machine{portLock: make(chan struct{}, 1), unhook: func() bool { return true }}
	m.close = sync.OnceValue(m.end)
	err = m.start(k, o)
	if err == nil {
		m.unhook = context.AfterFunc(ctx, func() { _ = m.close() })
		err = m.boot(ctx, k, o)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("boot the second kernel %s: %w", k.Release, err), m.Close())
	}
	m.portLock <- struct{}{}
	return m, nil
}

// enough reports whether so many MiB are free.
func enough(memory int) error {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(string(b), "MemAvailable:")
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return errors.New("/proc/meminfo says no MemAvailable")
	}
	kib, err := strconv.Atoi(fields[0])
	if err != nil {
		return fmt.Errorf("/proc/meminfo: MemAvailable: %w", err)
	}
	if kib/1024 < memory {
		return fmt.Errorf("the second kernel needs %d MiB of memory, %d MiB are free: end something, or ask for a "+
			"smaller machine", memory, kib/1024)
	}
	return nil
}

// What qemu emulates, with a way around two faults of qemu 7.2. After cmpxchg16b without a lock prefix, which the
// kernel's allocator uses, the flags may hold another register's bits: about every third boot died of it. And where
// each emulated processor has a thread of its own, one may run code that the other has just patched, as the kernel
// patches itself when it flips a static key: about one boot in 80 died of it. One thread for all takes half as long
// again, if there are idle cores.
//
// The clock is the machine's HPET, which is true. The kernel measures the TSC's rate while it boots, and on a busy host
// that was seen to go wrong by a factor of ten: every timeout came ten times too soon. Reading the HPET takes no more
// processor time here.
const (
	processor = "max,cx16=off,la57=off"
	emulation = "tcg,thread=single"
	timed     = "no_timer_check tsc=unstable clocksource=hpet"
)

// start starts a virtiofsd per directory and qemu. All talk over sockets that have no name, so nothing stays when they
// end.
func (m *Machine) start(k Kernel, o Options) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if strings.ContainsAny(self, "\" ") {
		return fmt.Errorf("%q can't be the guest's first process: the kernel's command line takes no path with spaces "+
			"or quotes", self)
	}
	qemu, err := program("qemu-system-x86", "qemu-system-x86_64")
	if err != nil {
		return err
	}
	args := hardware(k, o, self)
	var files []*os.File
	pass := func(f *os.File) string {
		files = append(files, f)
		return strconv.Itoa(2 + len(files))
	}
	for i, dir := range append([]string{"/"}, o.Shared...) {
		tag, cache := "root", "always"
		if i > 0 {
			tag, cache = fmt.Sprint("shared", i-1), "auto"
		}
		f, err := m.share(dir, cache)
		if err != nil {
			return errors.Join(err, closeAll(files))
		}
		args = append(args, "-chardev", "socket,id="+tag+",fd="+pass(f), "-device",
			"vhost-user-fs-pci,chardev="+tag+",tag="+tag)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return errors.Join(os.NewSyscallError("socketpair", err), closeAll(files))
	}
	m.port = os.NewFile(uintptr(pair[0]), "guest's serial port")
	m.out, m.in = gob.NewEncoder(m.port), gob.NewDecoder(m.port)
	args = append(args, "-chardev", "socket,id=port,fd="+pass(os.NewFile(uintptr(pair[1]), "port")),
		"-device", "virtio-serial-pci", "-device", "virtserialport,chardev=port,nr=1")
	if o.Exact {
		more, err := m.exact(o, pass)
		if err != nil {
			return errors.Join(err, closeAll(files))
		}
		args = append(args, more...)
	}
	m.qemu, err = start(qemu, args, o.Console, files...)
	if err != nil {
		return err
	}
	m.children = append(m.children, m.qemu)
	if m.tracer != nil {
		go m.tracer.serve()
	}
	return nil
}

// hardware returns qemu's arguments of a machine without its files and ports. Its first process is the program self.
func hardware(k Kernel, o Options, self string) []string {
	size := fmt.Sprintf("%dM", o.Memory)
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", "q35,memory-backend=memory", "-object", "memory-backend-memfd,id=memory,share=on,size=" + size, "-m",
		size,
		"-accel", emulation, "-cpu", processor, "-smp", strconv.Itoa(o.CPUs),
		"-kernel", k.Image, "-append", strings.Join([]string{
			"rootfstype=virtiofs", "root=root", "ro", "init=" + self, "console=ttyS0", "loglevel=5", "panic=-1",
			guestVariable + "=" + self, clock(o), "mitigations=off", "audit=0", "init_on_alloc=0", "--", guestArgument}, " "),
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
	}
	if k.Initrd != "" {
		args = append(args, "-initrd", k.Initrd)
	}
	return args
}

func closeAll(files []*os.File) (err error) {
	for _, f := range files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// share starts a virtiofsd that serves a directory, and returns the connection to it. It ends when the connection does.
func (m *Machine) share(dir, cache string) (*os.File, error) {
	virtiofsd, err := program("qemu-system-common", "virtiofsd")
	if err != nil {
		return nil, err
	}
	if s, err := os.Stat(dir); err != nil || !s.IsDir() || !filepath.IsAbs(dir) {
		return nil, errors.Join(err, fmt.Errorf("share %q with the second kernel: not the absolute path of a directory", dir))
	}
	if strings.Contains(dir, ",") {
		return nil, fmt.Errorf("share %q with the second kernel: virtiofsd takes no path with a comma", dir)
	}
	tmp, err := os.MkdirTemp("", "fairlead-vm-") // only we may enter, and only until the connection is made
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(tmp, "fs"), Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	c, err := net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr))
	if err != nil {
		return nil, err
	}
	defer c.Close()
	listening, err := l.File()
	if err != nil {
		return nil, err
	}
	args := []string{"--fd=3", "-f", "-o", "source=" + dir, "-o", "cache=" + cache, "-o", "sandbox=chroot", "-o", "xattr",
		"-o", "log_level=warn"}
	p, err := start(virtiofsd, args, nil, listening)
	if err != nil {
		return nil, err
	}
	m.children = append(m.children, p)
	return c.File()
}

// boot waits for the guest's first process and sets it up.
func (m *Machine) boot(ctx context.Context, k Kernel, o Options) error {
	ctx, cancel := context.WithTimeoutCause(ctx, bootDeadline, fmt.Errorf("not done within %v", bootDeadline))
	defer cancel()
	if err := m.out.Encode(order{Setup: &setup{Release: k.Release, Modules: k.Modules, Shared: o.Shared}}); err != nil {
		return m.ended(err)
	}
	var r report
	if err := m.readReport(ctx, &r); err != nil {
		return err
	}
	if r.Kind != ready {
		return fmt.Errorf("its first process: %s", r.Text)
	}
	m.Release = r.Text
	return nil
}

// readReport waits for a report. After an error the machine is of no more use.
func (m *Machine) readReport(ctx context.Context, r *report) error {
	stop := context.AfterFunc(ctx, func() { _ = m.port.SetReadDeadline(time.Now()) })
	defer stop()
	*r = report{}
	err := m.in.Decode(r)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return m.ended(err)
	}
	return nil
}

// ended ends a machine that doesn't answer. The error tells what its processes said last.
func (m *Machine) ended(err error) error {
	_ = m.close() // after it, all is said
	for _, p := range m.children {
		if said := p.said.String(); said != "" {
			err = fmt.Errorf("%w\nlast lines of %s:\n%s", err, p.name, said)
		}
	}
	return err
}

// Close ends the guest and all its host processes. What commands wrote below Options.Shared is there.
func (m *Machine) Close() error {
	m.unhook()
	return m.close()
}

func (m *Machine) end() error {
	for _, p := range slices.Backward(m.children) {
		p.Kill()
	}
	var err error
	if m.tracer != nil {
		err = m.tracer.close()
	}
	if m.port == nil {
		return err
	}
	return errors.Join(err, m.port.Close())
}

// Command is a program to run in the guest.
type Command struct {
	Args []string // path or name, arguments; a name is looked up in the guest's PATH
	Env  []string // NAME=value, besides PATH, HOME and LANG
	Dir  string   // "/" if empty
	// nil: dropped. Written by Run's goroutine only, as output comes; both the same: in the order of writing
	Stdout, Stderr io.Writer
}

const killed = time.Minute // how long a command may take to die

// Run runs a command in the guest and returns its exit code, or 128 + the signal that ended it. Commands run one after
// another. When ctx ends, the command and its process group are killed; the error is ctx's cause then. The machine
// stays of use after that, and after the error that a command can't be started; not after any other, which tells the
// machine's last words.
func (m *Machine) Run(ctx context.Context, c Command) (code int, err error) {
	if len(c.Args) == 0 {
		return 0, errors.New("a command for the second kernel has no arguments")
	}
	select {
	case <-m.portLock:
		defer func() { m.portLock <- struct{}{} }()
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	if c.Dir == "" {
		c.Dir = "/"
	}
	one := c.Stdout != nil && reflect.TypeOf(c.Stdout).Comparable() && c.Stdout == c.Stderr
	if err := m.out.Encode(order{Run: &run{Args: c.Args, Env: c.Env, Dir: c.Dir, OneOutput: one}}); err != nil {
		return 0, m.ended(err)
	}
	life, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	killSent := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(killSent)
		_ = m.out.Encode(order{Kill: true}) // a dead port is heard below
		time.AfterFunc(killed, func() { cancel(errors.New("the command can't be killed")) })
	})
	defer func() {
		if !stop() {
			<-killSent // the order to kill is for this command, not for the next
		}
	}()
	return m.listen(life, ctx, c)
}

// listen passes on what a command says until it ends.
func (m *Machine) listen(life, ctx context.Context, c Command) (code int, err error) {
	var failed error // of the writers
	for {
		var r report
		if err := m.readReport(life, &r); err != nil {
			return 0, errors.Join(fmt.Errorf("%s in the second kernel: %w", c.Args[0], err), context.Cause(ctx))
		}
		switch {
		case r.Kind == stdout && c.Stdout != nil && failed == nil:
			_, failed = c.Stdout.Write(r.Data)
		case r.Kind == stderr && c.Stderr != nil && failed == nil:
			_, failed = c.Stderr.Write(r.Data)
		case r.Kind == ended && r.Text != "":
			return 0, fmt.Errorf("run %s in the second kernel: %s", c.Args[0], r.Text)
		case r.Kind == ended:
			return r.Code, errors.Join(context.Cause(ctx), failed)
		}
	}
}
